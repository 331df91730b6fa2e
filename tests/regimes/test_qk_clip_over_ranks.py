"""QKClip on two ranks: one limit, one decision."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from hdi_callback import watch_heads
from hdi_callback.attention import find_attention
from hdi_callback.interventions import QKClip
from hdi_callback.monitoring.ranks.roster import SIZES
from tests.monitoring.interventions.test_qk_clip import largest_scores, make, step
from tests.regimes.test_pipeline import Stage, batch, loss, run, schedule_of
from tests.skips import NEEDS_ONE_MICROBATCH


def clipped_on(rank: int) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Train one step on the half of a batch that is this rank's; the sequence with the largest scores is rank 1's."""
    model, x = make("grouped", 0)
    parts = x[:1] * 0.1, x[1:]
    limit = float(largest_scores(model, x[1:]).max()) / 2
    step(model, parts[rank], QKClip(limit), rate=0.0)
    (layer,) = find_attention(model)
    return layer.weight("query").detach().clone(), layer.weight("key").detach().clone(), limit


@pytest.mark.slow
def test_all_ranks_clip_by_the_largest_score_of_any_rank(two_ranks):
    first, second = (reported.answer for reported in two_ranks(clipped_on))
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])
    model, x = make("grouped", 0)
    step(model, x[1:], QKClip(first[2]))
    (layer,) = find_attention(model)
    torch.testing.assert_close(layer.weight("query").detach(), first[0], rtol=1e-6, atol=1e-9)
    assert not torch.equal(first[0], find_attention(make("grouped", 0)[0])[0].weight("query"))


RATE, LIMIT = 0.1, 0.05


def stages_clipped(rank: int, cuts: list[int], keeps_names: bool, is_resumed: bool) -> dict[str, Any]:
    """Make a step in a pipeline, in which each rank clips the layers that it holds."""
    model = Stage(cuts[rank], cuts[rank + 1], keeps_names=keeps_names)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    begun = time.monotonic()
    options = {"alerts": None, "metrics": ["hdi"], "history": False, "verbose": False}
    with watch_heads(model, optimizer, every_n_steps=100, interventions=[QKClip(LIMIT)], **options) as heads:
        if is_resumed:
            layers = {layer.name: [getattr(layer, size) for size in SIZES] for layer in heads.monitor.layers}
            heads.load_state_dict({**heads.state_dict(), "step": 7, "last_step": 0, "layers": layers})
        with heads.step():
            run(schedule_of(model, rank, 2, microbatches=1), rank, 2, batch())
            optimizer.step()
    weights = {name: value.detach().tolist() for name, value in model.state_dict().items()}
    return {"weights": weights, "seconds": time.monotonic() - begun}


def whole_clipped() -> dict[str, Any]:
    model = Stage()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    options = {"alerts": None, "history": False, "verbose": False}
    with watch_heads(model, optimizer, interventions=[QKClip(LIMIT)], **options) as heads, heads.step():
        loss(model(batch()), batch()).backward()
        optimizer.step()
    return {name: value.detach() for name, value in model.state_dict().items()}


@pytest.mark.slow
@pytest.mark.parametrize("is_resumed", [False, True])
@pytest.mark.parametrize("cuts", [[0, 2, 4], [0, 1, 4]])
def test_stages_of_a_pipeline_clip_their_own_layers_from_the_first_step(two_ranks, cuts, is_resumed):
    """No reading comes before the first step of a run that is resumed."""
    if torch.__version__ < "2.13":  # as a TorchVersion, number by number
        pytest.skip(NEEDS_ONE_MICROBATCH)
    whole = whole_clipped()
    for rank in two_ranks(stages_clipped, cuts, True, is_resumed):
        assert rank.answer["seconds"] < 40
        for name, weight in rank.answer["weights"].items():
            torch.testing.assert_close(torch.tensor(weight), whole[name], rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("cuts", [[0, 2, 4], [0, 1, 4]])
def test_stages_whose_layers_share_names_stay_unclipped(two_ranks, cuts):
    if torch.__version__ < "2.13":  # as a TorchVersion, number by number
        pytest.skip(NEEDS_ONE_MICROBATCH)
    for rank in two_ranks(stages_clipped, cuts, False, False):
        assert rank.answer["seconds"] < 40
        assert any("it is not known which ranks hold the same layers" in line for line in rank.warnings)
