"""Modules that few people write, for each of which one mechanism of finding is there."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hdi_callback.attention import survey

WIDTH, HEADS, TOKENS = 16, 4, 7


class Attention(nn.Module):
    """One attention, whose scores and outputs are changed by those below."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def in_heads(self, x):
        return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)

    def sums(self, query, key, value):
        return ((query @ key.mT).softmax(-1) @ value).transpose(1, 2).flatten(2)


class SlidingFeatures(Attention):
    def forward(self, x):
        query, key = (one(x).unfold(-1, 10, 2).transpose(1, 2) for one in (self.q, self.k))  # features 0-9, 2-11, ...
        return self.o(self.sums(query, key, self.in_heads(self.v(x))))


def test_heads_whose_features_overlap_are_refused_for_that():
    found = survey(SlidingFeatures())
    assert found.layers == ()
    assert [one.reason for one in found.refused] == ["its query heads share features of `q`"]


class OneHeadInFourTemperatures(Attention):
    def forward(self, x):
        query, key, value = (one(x)[:, None] for one in (self.q, self.k, self.v))
        return self.o(self.sums(query * torch.arange(1.0, 1 + HEADS).view(-1, 1, 1), key, value)[..., :WIDTH])


def test_one_head_whose_scores_are_weighed_in_several_ways_is_not_read_as_a_head():
    found = survey(OneHeadInFourTemperatures())
    assert found.layers == ()
    reason = "its heads mix: several of them depend on the same features of the same tokens"
    assert [one.reason for one in found.refused] == [reason]


class OutputsOfHeadsNormed(Attention):
    """As in RetNet and the Differential Transformer, where a group norm takes the outputs of each head."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(HEADS, WIDTH)

    def forward(self, x):
        mixed = self.sums(*(self.in_heads(one(x)) for one in (self.q, self.k, self.v)))
        return self.o(self.norm(mixed.flatten(0, 1)).view_as(x))


def test_a_group_norm_of_head_outputs_leaves_queries_keys_and_values_to_be_read():
    module = OutputsOfHeadsNormed()
    (layer,) = survey(module).layers
    assert layer.num_heads == HEADS
    assert torch.equal(layer.weight("value").flatten(0, 1), module.v.weight)
    assert "output" not in layer.slices  # the norm divides what the projection takes


class KeysOfALatentOfSevenTokens(Attention):
    """It runs for one length alone, and so not with inputs that are made up."""

    def __init__(self) -> None:
        super().__init__()
        self.k, self.down = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 8)

    def forward(self, x):
        if x.shape[1] != TOKENS:
            raise ValueError
        keys = self.k(self.down(x))
        return self.o(self.sums(*(self.in_heads(one) for one in (self.q(x), keys, self.v(x)))))


def test_keys_of_two_maps_that_a_real_forward_alone_shows_are_not_read_from_the_second(monkeypatch):
    module, x = KeysOfALatentOfSevenTokens(), torch.randn(2, TOKENS, WIDTH)
    # What the forward showed cannot be run again, so that its rows are judged by observation alone.
    monkeypatch.setattr("hdi_callback.attention.finding.search.Search.trace_recorded", lambda *_: None)
    found = survey(module, forward=lambda: module(x))
    assert found.layers == ()
    (refusal,) = found.refused
    assert "`down.weight` and `k.weight`, one after the other" in refusal.reason


class NormedOverAllHeads(Attention):
    def __init__(self, how):
        super().__init__()
        self.how = how

    def forward(self, x):
        query, key = (self.in_heads(self.how(one(x))) for one in (self.q, self.k))
        return self.o(self.sums(query, key, self.in_heads(self.v(x))))


BY_HAND = {
    "normalize": lambda x: nn.functional.normalize(x, dim=-1),
    "the root of a mean without its dim": lambda x: x * torch.rsqrt(x.square().mean(-1)).unsqueeze(-1),
}


@pytest.mark.parametrize("how", BY_HAND)
def test_a_norm_over_all_heads_that_is_written_by_hand_hides_no_head(how):
    module = NormedOverAllHeads(BY_HAND[how])
    (layer,) = survey(module).layers
    assert torch.equal(layer.weight("key").flatten(0, 1), module.k.weight)
    assert layer.normed == {"query", "key"}


def test_products_of_half_precision_hide_no_head():
    module = NormedOverAllHeads(lambda x: x.half())
    (layer,) = survey(module).layers
    assert torch.equal(layer.weight("key").flatten(0, 1), module.k.weight)
