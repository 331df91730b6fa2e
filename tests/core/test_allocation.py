"""The allocation of a total width to heads, against SciPy's Lambert W and a search by brute force."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize_scalar
from scipy.special import lambertw

from hdi_callback.core import allocate_heads
from hdi_callback.errors import MisconfigurationError


def error(width: float, D: int, n: float, *, B=1.0, g=0.1, L=0.1, noise=1.0) -> float:
    return B * math.exp(-g * width) + noise / n * (width / D * math.exp(L * width) + 1 - width / D)


@pytest.mark.parametrize(("samples", "heads", "width"), [(10**3, 16, 48), (10**6, 12, 64), (10**9, 6, 128)])
def test_the_sanity_row(samples, heads, width):
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


def test_a_width_may_be_held_to_multiples():
    assert allocate_heads(720, 1000, multiple_of=16).head_dim % 16 == 0
    with pytest.raises(MisconfigurationError, match="write multiple_of=1"):
        allocate_heads(9, 1000, multiple_of=2)


@pytest.mark.parametrize("argument", ["bias_scale", "bias_decay", "variance_growth", "noise"])
def test_what_is_not_positive_is_refused(argument):
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
