"""Products from slices of eight bits: exact, whatever rounds the inputs of a product, and good for every head."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hdi_callback.core import head_diversity, head_overlap, orthonormal_bases, whitening
from hdi_callback.core import slices as slices_module
from hdi_callback.core.slices import has_fast_float64, sliced_gram, sliced_product
from tests.core.test_subspaces import CASES, SIZED, gaussian, scipy_bases, scipy_overlap

SEARCH = settings(max_examples=30, deadline=None, derandomize=True)


@given(st.integers(1, 5), st.integers(1, 2500), st.integers(-30, 30), st.integers(0, 10**6))
@SEARCH
def test_the_gram_matrix_is_exactly_that_of_rows_rounded_to_24_bits(k, d, exponent, seed):
    rows = (gaussian(k, d, seed=seed) * 2.0**exponent).float()
    _, power = np.frexp(rows.abs().amax(-1, keepdim=True).numpy())
    unit = 2.0 ** (power - 23.0)
    rounded = np.round(rows.double().numpy() / unit) * unit
    assert np.abs(rounded - rows.double().numpy()).max() <= unit.max() / 2
    expected = rounded @ rounded.T
    assert np.allclose(sliced_gram(rows).numpy(), expected, rtol=1e-14, atol=1e-14 * np.abs(expected).max())


def test_slices_are_integers_exact_in_bfloat16_with_sums_exact_in_float32():
    rows = torch.cat([gaussian(4, 3000).float(), torch.ones(1, 3000), -torch.full((1, 3000), 255 / 256)])
    slices, _ = slices_module._cut(rows, dim=-1)
    for piece in slices:
        assert torch.equal(piece, piece.round())
        assert torch.equal(piece.bfloat16().float(), piece)
    assert slices_module._TERMS * max(float(piece.abs().max()) for piece in slices) ** 2 <= 2**24


@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 10**6))
@SEARCH
def test_a_product_is_that_of_float64_to_the_stated_error(k, d, seed):
    left = gaussian(k, k, seed=seed) * torch.logspace(0, 4, k, dtype=torch.float64)[:, None]
    right = gaussian(k, d, seed=seed + 1).float()
    product = sliced_product(left, right)
    assert product.dtype == torch.float32
    scale = left.abs().amax(-1, keepdim=True) * right.double().abs().amax(-2, keepdim=True) * k
    assert ((product.double() - left @ right.double()).abs() <= 2**-22 * scale).all()


def test_rows_of_zeros_give_zero_and_non_finite_rows_give_nan():
    rows = torch.zeros(3, 5)
    rows[1] = torch.arange(5)
    assert sliced_gram(rows).tolist() == [[0, 0, 0], [0, 30, 0], [0, 0, 0]]
    rows[2, 0] = torch.nan
    assert sliced_gram(rows)[2, 2].isnan()


@pytest.fixture
def without_float64(monkeypatch):
    monkeypatch.setattr(whitening, "has_fast_float64", lambda device: False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_a_device_without_fast_float64_agrees_with_scipy(case, dtype, without_float64):
    weight = CASES[case].to(dtype)
    bases = orthonormal_bases(weight)
    measured = head_overlap(bases.rows, bases.rank).double().numpy()
    assert np.abs(measured - scipy_overlap(weight.double())).max() < 2e-5
    assert bases.rank.tolist() == [basis.shape[1] for basis in scipy_bases(weight.double())]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(whitening, "has_fast_float64", lambda device: True)
        expected = head_diversity(weight).energy_overlap
    assert torch.allclose(head_diversity(weight).energy_overlap, expected, atol=2e-5, equal_nan=True)


@pytest.mark.parametrize("case", SIZED)
def test_the_index_of_a_layer_of_full_size_is_off_by_less_than_1e_6_without_float64(case, without_float64):
    weight = SIZED[case][0].float()
    exact = head_diversity(weight.double(), method="exact")
    assert abs(float(head_diversity(weight).index) - float(exact.index)) < 1e-6


@pytest.mark.parametrize(
    ("capability", "fast"),
    [((7, 0), True), ((8, 0), True), ((9, 0), True), ((8, 6), False), ((8, 9), False), ((12, 0), False)],
)
def test_fast_float64_is_known_from_the_compute_capability(capability, fast, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "hip", None)
    assert has_fast_float64(torch.device("cuda")) is fast
    assert has_fast_float64(torch.device("cpu"))
