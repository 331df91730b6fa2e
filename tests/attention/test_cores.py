"""Attention cores in the graph of a traced run: softmaxes that are written out, and what resembles one."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hdi_callback.attention import survey
from hdi_callback.attention.trace.core_view import own_columns
from hdi_callback.attention.trace.head_rows import Rows
from tests.attention import models as by_hand
from tests.attention.models import D, H


class ToNobody(by_hand.Separate):
    """Weights exp(s) / (1 + sum exp(s)): a part of them is of no token, as in Miller's softmax with one added."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.transpose(1, 2) for part in self.heads(x))
        scores = q @ k.mT / 8**0.5
        weights = scores.exp()
        return self.out_proj(((weights / (1 + weights.sum(-1, keepdim=True))) @ v).transpose(1, 2).flatten(2))


class OfSizes(by_hand.Separate):
    """Products of scores that are no exponentials, and no averages: no attention."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.transpose(1, 2) for part in self.heads(x))
        scores = (q @ k.mT / 8**0.5).abs()
        return self.out_proj(((scores / (1 + scores.sum(-1, keepdim=True))) @ v).transpose(1, 2).flatten(2))


def test_a_handwritten_softmax_that_adds_one_to_the_denominator_is_attention():
    torch.manual_seed(0)
    model = nn.Sequential(ToNobody())
    (layer,) = survey(model).layers
    assert (layer.num_heads, layer.head_dim, layer.num_key_heads) == (H, 8, H)
    for role in ("query", "key", "value"):
        own = model[0].get_submodule(f"{role[0]}_proj").weight
        assert torch.equal(layer.weight(role), own.view(H, 8, D))


def test_weights_below_one_that_are_not_exponentials_are_not_attention():
    torch.manual_seed(0)
    found = survey(nn.Sequential(OfSizes(), ToNobody()))
    assert [layer.name for layer in found.layers] == ["1"], "the other one is seen beside it"
    assert found.refused == ()


def test_output_columns_of_a_head_are_those_its_features_act_on_or_all_if_one_is_unknown():
    shown = {("q.weight", feature): feature // 2 for feature in range(4)}
    assert own_columns(shown, [Rows("q.weight", (0, 1)), Rows("q.weight", (2, 3))], 6) == [0, 1]
    several = {**shown, ("q.weight", 3): -2}
    for one in (several, {key: value for key, value in shown.items() if key[1] != 3}):
        assert own_columns(one, [Rows("q.weight", (2, 3))], 6) == [0, 1, 2, 3, 4, 5]
