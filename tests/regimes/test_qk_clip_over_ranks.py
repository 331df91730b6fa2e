"""QKClip on two ranks: one limit, one decision."""

from __future__ import annotations

import pytest
import torch

from hdi_callback.attention import find_attention
from hdi_callback.interventions import QKClip
from tests.monitoring.interventions.test_qk_clip import largest_scores, make, step


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
