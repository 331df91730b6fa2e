"""The comparison of attention rows with returned weights: what it calls right, and what it calls wrong."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.attention.sweep.rows import _compare_all, _truth, softmaxes

HEADS, TOKENS = 2, 5


class Scores(nn.Module):
    def forward(self, scores: Tensor) -> Tensor:
        return scores.softmax(-1)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Sequential(Scores()), nn.Sequential(Scores())

    def forward(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        return self.encoder(scores), self.decoder(scores.flip(-2).mT)


@pytest.fixture
def ran() -> tuple[tuple[Tensor, Tensor], list[Any]]:
    scores = torch.randn(3, HEADS, TOKENS, TOKENS, generator=torch.Generator().manual_seed(0))
    model = Model()
    with softmaxes(model) as kept:
        return model(scores), kept


def compare(weights_of: dict[str, Tensor], returned: list[Tensor], kept: list[Any]) -> dict[str, Any]:
    """Compare layers that were read from some weights with the weights that a model returned."""
    layers = {}
    for name, weights in weights_of.items():
        values = {key: value for key, value in _truth(weights, kept).items() if key.startswith("attention")}
        layers[name] = SimpleNamespace(values=values, arrays={"attention_entropy": [0.0] * HEADS})
    report: dict[str, Any] = {"worst": {}, "wrong": [], "absent": {}, "layers": {}}
    own = [_truth(one.result, [one]) for one in kept]
    truths = [_truth(one, kept) for one in returned]
    _compare_all(SimpleNamespace(layers=layers, absent={}), {}, truths, own, "eager", report)
    return report


def test_a_layer_whose_weights_are_not_returned_is_compared_with_its_own_softmax(ran):
    (encoder, decoder), kept = ran
    report = compare({"encoder": encoder}, [decoder], kept)
    assert not report["wrong"]
    assert report["layers"] == {"eager": 1}
    assert report["by their softmax"] == {"eager": ["encoder"]}


@pytest.mark.parametrize("returned", ["its own", "another's", "unknown"])
def test_a_misread_layer_is_wrong_whichever_attention_weights_the_model_returns(ran, returned):
    (encoder, decoder), kept = ran
    misread = encoder.roll(1, 0).mT.softmax(-1)
    weights = {"its own": encoder, "another's": decoder, "unknown": encoder.square() / 2}[returned]
    seen = [one for one in kept if returned != "unknown" or "encoder" not in one.module]
    report = compare({"encoder": misread}, [weights], seen)
    assert [name for _, name, _ in report["wrong"]] == ["encoder"]
    assert report["layers"] == {"eager": 0}
