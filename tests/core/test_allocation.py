"""The allocation of a total width to heads, against SciPy's Lambert W and a search by brute force."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize_scalar
from scipy.special import lambertw

from hdi_callback.core import allocate_heads, rank_allocations
from hdi_callback.errors import MisconfigurationError


def error(width: float, D: int, n: float, *, B=1.0, g=0.1, L=0.1, noise=1.0) -> float:
    return B * math.exp(-g * width) + noise / n * (width / D * math.exp(L * width) + 1 - width / D)


@pytest.mark.parametrize(("samples", "heads", "width"), [(10**3, 16, 48), (10**6, 12, 64), (10**9, 6, 128)])
def test_more_samples_give_fewer_and_wider_heads(samples, heads, width):
    answer = allocate_heads(768, samples)
    assert (answer.num_heads, answer.head_dim) == (heads, width)


@pytest.mark.parametrize("samples", [50, 10**3, 10**5, 10**8])
@pytest.mark.parametrize(("g", "L"), [(0.1, 0.1), (0.3, 0.05), (0.02, 0.2)])
def test_the_whole_number_answer_is_the_best_divisor(samples, g, L):
    answer = allocate_heads(720, samples, bias_decay=g, variance_growth=L)
    errors = {width: error(width, 720, samples, g=g, L=L) for width in range(1, 721) if 720 % width == 0}
    assert answer.head_dim == min(errors, key=errors.get)
    assert answer.num_heads * answer.head_dim == 720
    assert answer.error == pytest.approx(min(errors.values()))


@pytest.mark.parametrize("samples", [10**4, 10**7, 10**12])
def test_the_continuous_answer_is_lambert_w_and_nearly_the_minimum(samples):
    g, L, D = 0.1, 0.15, 1024
    answer = allocate_heads(D, samples, bias_decay=g, variance_growth=L)
    y = lambertw((g + L) / L * math.exp((g + L) / L) * g * samples * D).real
    assert answer.continuous_head_dim == pytest.approx(y / (g + L) - 1 / L, rel=1e-12)
    best = minimize_scalar(lambda width: error(width, D, samples, g=g, L=L), bounds=(1, D), method="bounded").x
    assert answer.continuous_head_dim == pytest.approx(best, rel=0.01)


def test_the_head_width_grows_with_the_logarithm_of_the_samples():
    samples = np.logspace(20, 60, 9)
    widths = [allocate_heads(4096, n).continuous_head_dim for n in samples]
    slopes = np.diff(widths) / np.diff(np.log(samples))
    assert slopes == pytest.approx([1 / (0.1 + 0.1)] * 8, rel=0.03)


def test_the_head_width_can_be_restricted_to_multiples():
    assert allocate_heads(720, 1000, multiple_of=16).head_dim % 16 == 0
    with pytest.raises(MisconfigurationError, match="write multiple_of=1"):
        allocate_heads(9, 1000, multiple_of=2)


@pytest.mark.parametrize("argument", ["bias_scale", "bias_decay", "variance_growth", "noise"])
def test_arguments_that_are_not_positive_are_refused(argument):
    with pytest.raises(MisconfigurationError, match=argument):
        allocate_heads(768, 1000, **{argument: 0})


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.floats(0.01, 1), st.floats(0.01, 1), st.floats(0.01, 100), st.integers(1, 10**9), st.integers(1, 4096))
def test_the_continuous_answer_is_lambert_w_for_every_constant(g, L, noise, samples, D):
    answer = allocate_heads(D, samples, bias_decay=g, variance_growth=L, noise=noise)
    argument = (g + L) / L * math.exp((g + L) / L) * g * samples * D / noise
    # d_k* may be small beside the two terms whose difference it is.
    assert answer.continuous_head_dim == pytest.approx(
        lambertw(argument).real / (g + L) - 1 / L, rel=1e-9, abs=1e-9 / L
    )


@pytest.mark.parametrize("D", [512, 4096, 2**16])
def test_the_head_count_is_nearly_linear_in_the_width(D):
    def heads(width: int) -> float:
        return width / allocate_heads(width, 10**6).continuous_head_dim

    # d_k* grows by log 2 / (g + L), less a little, for each doubling, and takes only that much from the linear law.
    grown = allocate_heads(2 * D, 10**6).continuous_head_dim - allocate_heads(D, 10**6).continuous_head_dim
    assert 0.9 * math.log(2) / 0.2 < grown < math.log(2) / 0.2
    assert 1.85 < heads(2 * D) / heads(D) < 2


# --- from measured constants

FALLING = [0.5**i for i in range(64)]


def modelled(width: int, *, D=64, n=64, left_out, inflation, noise=1.0) -> float:
    return left_out + noise / n * (width / D * inflation + 1 - width / D)


def test_the_ranking_agrees_with_the_error_model_computed_by_hand():
    effective = [9.0, 11.0]
    answer = rank_allocations(64, 64, effective_samples=effective, head_dim=8, spectrum=FALLING)
    growth = np.mean(np.log(64 / np.array(effective))) / 8
    wanted = {
        width: modelled(width, left_out=sum(FALLING[width:]) / sum(FALLING), inflation=math.exp(growth * width))
        for width in (1, 2, 4, 8, 16, 32, 64)
    }
    assert answer.variance_growth == pytest.approx(growth)
    assert {choice.head_dim: choice.error for choice in answer.choices} == pytest.approx(wanted)
    assert [choice.head_dim for choice in answer.choices] == sorted(wanted, key=wanted.get)
    assert [choice.head_dim for choice in answer.curve] == sorted(wanted)
    assert all(choice.num_heads * choice.head_dim == 64 for choice in answer.choices)
    best = min(wanted.values())
    assert answer.near_best == tuple(width for width in sorted(wanted) if wanted[width] <= 1.1 * best)
    assert answer.choices[0].excess == 0
    assert answer.choices[-1].excess == pytest.approx(max(wanted.values()) / best - 1)


def test_with_an_exponential_spectrum_the_ranking_agrees_with_the_closed_form():
    D, n, g, L = 768, 10**6, 0.1, 0.1
    spectrum = [math.exp(-g * i) for i in range(D)]
    effective = [n * math.exp(-L * 64)]
    answer = rank_allocations(D, n, effective_samples=effective, head_dim=64, spectrum=spectrum)
    assert answer.choices[0].head_dim == allocate_heads(D, n, bias_decay=g, variance_growth=L).head_dim


def test_the_participation_ratio_is_that_of_an_exponential_spectrum():
    spectrum = np.array([0.9**i for i in range(2000)])
    rank = spectrum.sum() ** 2 / (spectrum**2).sum()
    measured = {"effective_samples": [100.0], "head_dim": 16}
    by_rank = rank_allocations(256, 1000, **measured, input_rank=rank)
    by_spectrum = rank_allocations(256, 1000, **measured, spectrum=spectrum.tolist())
    for left, right in zip(by_rank.curve, by_spectrum.curve):
        assert left.error == pytest.approx(right.error, rel=1e-9)


def test_the_ranking_is_conclusive_if_the_assumptions_agree_within_a_factor_of_two():
    answer = rank_allocations(64, 64, effective_samples=[9.0, 11.0], head_dim=8, spectrum=FALLING)
    assert answer.is_conclusive
    assert answer.span[1] <= 2 * answer.span[0]
    assert answer.best is answer.choices[0]
    assert len(answer.best_by_assumption) == 6


@pytest.mark.parametrize(
    ("measured", "why"),
    [
        ({"effective_samples": [63.5], "spectrum": FALLING}, "nearly uniform"),
        ({"effective_samples": [4.0], "spectrum": [0.9**i for i in range(64)]}, "ranges from"),
        ({"effective_samples": [60.0], "spectrum": [1.0] * 64}, "no narrower head suffices alone"),
        ({"effective_samples": [50.0], "spectrum": [1.0] * 1000, "multiple_of": 16, "noise": 1e-9}, "does not matter"),
    ],
)
def test_an_inconclusive_ranking_has_no_best_width_and_states_the_reason(measured, why):
    answer = rank_allocations(64, 64, head_dim=8, **measured)
    assert not answer.is_conclusive
    assert answer.best is None
    assert why in answer.reason
    assert answer.choices, "the curve is there all the same"


def test_scales_of_the_spectrum_and_its_order_do_not_matter():
    measured = {"effective_samples": [9.0, math.nan, 11.0], "head_dim": 8}
    once = rank_allocations(64, 64, **measured, spectrum=FALLING)
    again = rank_allocations(64, 64, **measured, spectrum=[1e-7 * value for value in reversed(FALLING)])
    assert once == again
    assert (
        once.near_best
        == rank_allocations(64, 64, effective_samples=[11.0, 9.0], head_dim=8, spectrum=FALLING).near_best
    )


@pytest.mark.parametrize("rounding", [[], [0.0, -5e-7]])
def test_a_spectrum_of_one_direction_is_ranked_as_rank_one_despite_rounding(rounding):
    measured = {"effective_samples": [10.0], "head_dim": 8}
    found = rank_allocations(64, 64, **measured, spectrum=[1.0, *rounding])
    assert found.choices == rank_allocations(64, 64, **measured, input_rank=1).choices  # r = 0: the first has it all


@pytest.mark.parametrize(
    ("wrong", "what"),
    [
        ({"effective_samples": []}, "effective_samples"),
        ({"effective_samples": [65.0]}, "up to samples=64"),
        ({"effective_samples": [0.0]}, "effective_samples"),
        ({"spectrum": None}, "either `spectrum` or `input_rank`"),
        ({"input_rank": 3.0}, "either `spectrum` or `input_rank`"),
        ({"spectrum": None, "input_rank": 0.5}, "at least 1"),
        ({"spectrum": [0.0, 0.0]}, "spectrum"),
        ({"spectrum": [1.0, -1.0]}, "none below 0"),
        ({"spectrum": [1.0, math.nan]}, "finite"),
        ({"head_dim": 2.5}, "whole number"),
        ({"noise_factor": 0}, "noise_factor"),
        ({"multiple_of": 3}, "write multiple_of=1"),
    ],
)
def test_impossible_measurements_are_refused(wrong, what):
    right = {"effective_samples": [10.0], "head_dim": 8, "spectrum": FALLING}
    with pytest.raises(MisconfigurationError, match=what):
        rank_allocations(64, 64, **{**right, **wrong})
