"""Scores of the model itself before and after clipping."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from hdi_callback import find_attention
from hdi_callback.errors import MisconfigurationError
from hdi_callback.interventions import QKClip
from hdi_callback.interventions.qk_clip import _scale_scores
from tests.interventions.training import Attention, Model, Open, reading

KINDS = {
    "plain": lambda: Attention(64, 4, 4),
    "with biases": lambda: Attention(64, 4, 4, bias=True),
    "grouped": lambda: Attention(64, 8, 2),
}


def made(kind: str):
    torch.manual_seed(0)
    model = Model(KINDS[kind], depth=1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2)
    return model, model.blocks[0], Open(model), torch.randn(4, 9, 64)


def clip(training, scores, limit, **options):
    intervention = QKClip(limit=limit, **options)
    intervention.bind(training)
    return intervention.handle(reading(logits={"blocks.0": scores})), intervention


@pytest.mark.parametrize("kind", KINDS)
def test_heads_above_the_limit_are_scaled_to_it_and_others_are_bit_identical(kind):
    model, attention, training, x = made(kind)
    model(x)
    scores = attention.largest.clone()
    limit = float(scores.sort().values[1]) * 1.001  # two heads are below it
    layer = training.layers["blocks.0"]
    before = {role: layer.weight(role).detach().clone() for role in ("query", "key")}
    (action,), _ = clip(training, scores.tolist(), limit)
    model(x)
    above = scores > limit
    torch.testing.assert_close(attention.largest, torch.where(above, limit, scores), rtol=1e-5, atol=1e-5)
    assert torch.equal(layer.weight("query")[~above], before["query"][~above])
    keys_above = torch.stack([above[[key == one for one in layer.key_of]].all() for key in range(layer.num_key_heads)])
    assert torch.equal(layer.weight("key")[~keys_above], before["key"][~keys_above])
    heads = above.nonzero().flatten().tolist()
    assert action.message.startswith(f"scaled queries and keys with scores above {limit:g}: blocks.0 (heads ")
    assert training.expected == [("blocks.0", heads, 0)]
    assert action.layers == ("blocks.0",)


def test_queries_and_keys_share_the_scaling_of_a_head():
    _, _, training, _ = made("plain")
    layer = training.layers["blocks.0"]
    before = {role: layer.weight(role).detach().clone() for role in ("query", "key")}
    scores = [1.0, 1.0, 40.0, 1.0]
    clip(training, scores, 10.0)
    for role in ("query", "key"):
        torch.testing.assert_close(layer.weight(role)[2], before[role][2] * math.sqrt(10 / 40))


def test_a_shared_key_is_scaled_only_if_all_of_its_query_heads_exceed_the_limit():
    _, _, training, _ = made("grouped")
    layer = training.layers["blocks.0"]
    keys = layer.weight("key").detach().clone()
    clip(training, [40.0, 20.0, 20.0, 20.0, 40.0, 1.0, 20.0, 20.0], 10.0)
    torch.testing.assert_close(layer.weight("key")[0], keys[0] * math.sqrt(0.5))
    assert torch.equal(layer.weight("key")[1], keys[1])


@pytest.mark.parametrize("over", [1.0005, 1.01, 3.0])
def test_bfloat16_weights_come_below_the_limit_even_for_a_small_excess(over):
    model, _, training, _ = made("plain")
    model.bfloat16()
    layer = training.layers["blocks.0"]
    before = layer.weight("query").detach().float().norm()
    clip(training, [10.0 * over] * 4, 10.0)
    assert layer.weight("query").detach().float().norm() <= before / math.sqrt(over)


def test_unknown_scores_and_layers_that_were_not_read_are_left():
    _, _, training, _ = made("plain")
    layer = training.layers["blocks.0"]
    before = layer.weight("query").detach().clone()
    assert clip(training, [math.nan, None, math.inf, 1.0], 10.0)[0] == ()
    assert clip(training, [], 10.0)[0] == ()
    intervention = QKClip()
    intervention.bind(training)
    assert intervention.handle(reading()) == ()
    assert torch.equal(layer.weight("query"), before)


def test_it_acts_at_most_so_often():
    _, _, training, _ = made("plain")
    _, intervention = clip(training, [40.0] * 4, 10.0, at_most=2)
    acted = [bool(intervention.handle(reading(logits={"blocks.0": [40.0] * 4}))) for _ in range(3)]
    assert acted == [True, False, False]


def test_scores_that_grow_are_kept_near_the_limit():
    model, attention, training, x = made("plain")
    intervention = QKClip(limit=20.0)
    intervention.bind(training)
    for _ in range(40):
        with torch.no_grad():
            attention.q_proj.weight.mul_(1.1)
            model(x)
        intervention.handle(reading(logits={"blocks.0": attention.largest.tolist()}))
    with torch.no_grad():
        model(x)
    assert float(attention.largest.max()) <= 20.001


def test_layers_that_cannot_be_clipped_are_refused_before_training():
    _, _, training, _ = made("plain")
    layer = training.layers["blocks.0"]
    object.__setattr__(layer, "normed", frozenset({"key"}))
    with pytest.raises(MisconfigurationError, match=r"a norm follows its key heads, which undoes it.*exclude="):
        QKClip().bind(training)
    object.__setattr__(layer, "normed", frozenset())
    layer.weights["query"] = layer.weights["key"]
    with pytest.raises(MisconfigurationError, match="share their weight"):
        QKClip().bind(training)
    del layer.weights["query"]
    with pytest.raises(MisconfigurationError, match="no query weight"):
        QKClip().bind(training)


def test_a_bias_that_is_not_of_queries_or_keys_is_left_alone_and_looked_at():
    class ByHand(nn.Module):
        def __init__(self):
            super().__init__()
            self.wq, self.wk, self.wv, self.wo = (nn.Parameter(torch.randn(16, 16) / 4) for _ in range(4))
            self.bias = nn.Parameter(torch.ones(16))  # of the output

        def forward(self, x):
            q, k, v = (x.matmul(w.T).unflatten(-1, (4, 4)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
            heads = (q @ k.mT / 2).softmax(-1) @ v
            return heads.transpose(1, 2).flatten(2) @ self.wo.T + self.bias

    torch.manual_seed(0)
    model, x = ByHand(), torch.randn(2, 6, 16)
    (layer,) = find_attention(model, lambda: model(x))
    assert layer.further_parameters().keys() == {"bias"}  # which may stand still
    queries = layer.weight("query").detach().clone()
    _scale_scores(layer, [1, 0.25, 1, 1])
    assert torch.allclose(layer.weight("query")[1], queries[1] / 2, rtol=1e-5)
    assert torch.equal(model.bias, torch.ones(16))
