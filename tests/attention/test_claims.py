"""One rule says what a real forward shows against a claim, before training and in it."""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn

from hdi_callback import HeadDiversityMonitor
from hdi_callback.attention import AttentionLayer, find_attention, register_layout
from hdi_callback.attention.finding.runtime_verifier import comparison_with_forward
from hdi_callback.attention.layer.registry import _REGISTERED
from hdi_callback.attention.observe import Verdict
from hdi_callback.attention.trace.inputs import Inputs
from hdi_callback.errors import UnsupportedAttentionWarning
from tests.attention.models import D, NanoGPT

RECORDED = (Inputs((torch.randn(2, 8, D),), {}),)
CANNOT_RUN = (Inputs(("no tensor",), {}),)
AGAINST = Verdict("contradicted", "its keys are others")
OPEN = Verdict("undecided", "nothing was observed")


def layer(evidence: str, *, is_right: bool) -> AttentionLayer:
    (found,) = find_attention(nn.Sequential(NanoGPT()))
    slices = dict(found.slices) if is_right else {**found.slices, "key": found.slices["value"]}
    return replace(found, evidence=evidence, slices=slices)


@pytest.mark.parametrize(
    ("evidence", "is_right", "verdict", "recorded", "says"),
    [
        ("layout", False, Verdict("established", ""), RECORDED, None),  # attention received what is claimed
        ("layout", False, AGAINST, CANNOT_RUN, "its keys are others"),
        ("layout", False, OPEN, CANNOT_RUN, None),
        ("layout", False, None, (), None),
        ("trace", True, AGAINST, CANNOT_RUN, None),  # a traced run outweighs observation: that before training
        ("forward", True, AGAINST, (), None),
        ("layout", True, AGAINST, RECORDED, None),  # and that with the inputs of the forward
        ("layout", True, AGAINST, CANNOT_RUN + RECORDED, None),
        ("layout", False, OPEN, RECORDED, "its key heads are not the rows that the layer claims"),
        ("layout", False, None, RECORDED, "its key heads are not the rows that the layer claims"),
        ("trace", False, AGAINST, RECORDED, "its keys are others"),  # both say so: what was observed is nearer
    ],
)
def test_the_evidence_and_the_verdict_of_the_forward_decide_if_a_claim_is_contradicted(
    evidence, is_right, verdict, recorded, says
):
    assert comparison_with_forward(layer(evidence, is_right=is_right), verdict, recorded) == says


class Described(NanoGPT):
    """Attention of which a user describes the values as keys."""


@pytest.fixture
def wrong_layout():
    before = list(_REGISTERED)
    register_layout(Described, lambda name, module: replace(wrong_of(module), name=name))
    yield
    _REGISTERED[:] = before


def wrong_of(module: nn.Module) -> AttentionLayer:
    plain = NanoGPT()
    plain.load_state_dict(module.state_dict())
    (found,) = find_attention(nn.Sequential(plain))
    slices = {role: part.moved_to(module) for role, part in found.slices.items()}
    return replace(
        found, module=module, evidence="layout", output_projection=None, slices={**slices, "key": slices["value"]}
    )


def test_a_wrong_registered_layout_is_contradicted_before_training_and_in_training(wrong_layout):
    torch.manual_seed(0)
    model, x = nn.Sequential(Described()), torch.randn(3, 7, D)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        corrected = find_attention(model, forward=lambda: model(x))
    assert [one.evidence for one in corrected] == ["trace"]
    assert torch.equal(corrected[0].weight("key"), model[0].c_attn.weight[D : 2 * D].view(4, 8, D))
    with HeadDiversityMonitor(model, metrics=["hdi"]) as monitor:
        monitor.arm()
        model(x)
        with pytest.warns(match="`0` is left out from now on"):
            record = monitor.measure(0).record()
    assert "contradicts its heads" in record.absent["0"]


class ValuesOfAnEarlierBlock(nn.Module):
    """Adds to its values what a dictionary may hold, which no synthetic inputs make."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(D, D) for _ in range(4))

    def forward(self, x: torch.Tensor, extras: dict[str, torch.Tensor] | None = None) -> torch.Tensor:
        q, k, v = (one(x).unflatten(-1, (4, -1)).transpose(1, 2) for one in (self.q, self.k, self.v))
        v = v if extras is None else v + extras["first"].unflatten(-1, (4, -1)).transpose(1, 2)
        return self.o((q @ k.mT).softmax(-1).matmul(v).transpose(1, 2).flatten(2))


def test_heads_stay_watched_in_training_if_the_forward_only_adds_to_what_is_left_out():
    model, tokens = nn.Sequential(ValuesOfAnEarlierBlock()), torch.randn(2, 8, D)
    run = lambda: model[0](tokens, {"first": tokens})  # noqa: E731
    left_out = "the input that is added to the values from `v`"
    with HeadDiversityMonitor(model) as monitor:
        (before,) = monitor.layers
        monitor.arm()
        run().sum().backward()
        with pytest.warns(UnsupportedAttentionWarning, match=f"is read in part: without {left_out}"):
            reading = monitor.measure(0)
        (layer,) = monitor.layers
        assert (before.left_out, layer.left_out, monitor.refused) == ("", left_out, ())
    assert torch.equal(layer.weight("value").flatten(0, 1), model[0].v.weight)
    assert reading.absent == {}
    with pytest.warns(UnsupportedAttentionWarning):
        (again,) = find_attention(model, forward=run)
    assert again.left_out == left_out
