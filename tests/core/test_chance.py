"""The chance of an overlap, against SciPy's Beta law and against random subspaces themselves."""

from __future__ import annotations

import math

import pytest
import torch
from scipy.stats import beta

from hdi_callback.core import chance_of_overlap, head_diversity
from hdi_callback.errors import ShapeError


def beta_law(r: int, s: int, d: int):
    mean = math.sqrt(r * s) / d
    variance = 2 * (d - r) * (d - s) / (d**2 * (d - 1) * (d + 2))
    m = mean * (1 - mean) / variance - 1
    return beta(mean * m, (1 - mean) * m), mean, math.sqrt(variance)


@pytest.mark.parametrize(("r", "s", "d"), [(8, 8, 64), (16, 16, 64), (64, 64, 768), (4, 12, 48), (128, 128, 4096)])
@pytest.mark.parametrize("deviations", [0.5, 2, 4, 8])
def test_the_bound_lies_above_the_tail_of_the_beta_law_and_within_a_factor_of_fifty(r, s, d, deviations):
    law, mean, deviation = beta_law(r, s, d)
    overlap = mean + deviations * deviation
    bound = chance_of_overlap(overlap, ranks=(r, s), width=d)
    assert law.sf(overlap) <= bound <= max(50 * law.sf(overlap), 1e-300)


def test_fresh_layers_exceed_the_bound_at_most_at_its_stated_rate():
    H, k, d, layers = 6, 8, 48, 4000
    weight = torch.randn(layers, H, k, d, generator=torch.Generator().manual_seed(0))
    worst = head_diversity(weight).worst.tolist()
    bounds = [chance_of_overlap(value, ranks=(k, k), width=d, pairs=H * (H - 1) // 2) for value in worst]
    for level in (0.3, 0.1, 0.01):
        share = sum(bound < level for bound in bounds) / layers
        assert share <= level + 3 * math.sqrt(level / layers)
    assert min(bounds) < 0.05, "and the bound is not so loose that it never moves"


def test_many_pairs_make_a_large_overlap_less_surprising():
    one = chance_of_overlap(0.25, ranks=(8, 8), width=64)
    many = chance_of_overlap(0.25, ranks=(8, 8), width=64, pairs=100)
    assert 90 * one < many < 100 * one * (1 + 1e-9)


def test_identical_heads_have_chance_zero_and_heads_that_span_the_space_have_chance_one():
    assert chance_of_overlap(1.0, ranks=(8, 8), width=64) == 0
    assert chance_of_overlap(0.9, ranks=(64, 8), width=64) == 1


def test_a_dead_head_has_no_overlap_to_be_judged():
    with pytest.raises(ShapeError, match="live heads"):
        chance_of_overlap(0.5, ranks=(0, 8), width=64)


@pytest.mark.parametrize(("width", "overlap"), [(20, 0.3), (64, 0.2), (512, 0.05)])
def test_for_two_lines_the_bound_is_the_chernoff_bound_of_their_distribution(width, overlap):
    # The squared cosine of two random lines is Beta(1/2, (d - 1)/2), whose parameters add up to d/2.
    mean = 1 / width
    divergence = mean * math.log(mean / overlap) + (1 - mean) * math.log((1 - mean) / (1 - overlap))
    assert chance_of_overlap(overlap, ranks=(1, 1), width=width, pairs=1) == pytest.approx(
        math.exp(-width / 2 * divergence), rel=1e-9
    )
    assert chance_of_overlap(overlap, ranks=(1, 1), width=width, pairs=1) >= beta.sf(overlap, 0.5, (width - 1) / 2)
