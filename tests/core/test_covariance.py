"""The empirical covariance term against the naive computation, and the identities of its bookkeeping."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hdi_callback.core import head_covariance
from hdi_callback.core.covariance import ContributionSums, contribution_sums, covariance_term
from tests.core.test_subspaces import gaussian


def layer(
    tokens: int = 200, H: int = 4, width: int = 6, d: int = 24, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    mixing = gaussian(H * width, H * width, seed=seed + 1)
    outputs = (gaussian(tokens, H * width, seed=seed) @ mixing).reshape(tokens, H, width) + 3
    return outputs, gaussian(H, width, d, seed=seed + 2)


def naive_trace(outputs: torch.Tensor, weight: torch.Tensor) -> np.ndarray:
    """tr Cov_t(z_h, z_g) from the contributions themselves, in numpy."""
    z = np.einsum("thi,hid->thd", outputs.double().numpy(), weight.double().numpy())
    z = z - z.mean(0)
    return np.einsum("thd,tgd->hg", z, z) / len(z)


def test_the_trace_is_that_of_the_contributions_themselves():
    outputs, weight = layer()
    expected = naive_trace(outputs, weight)
    assert (
        np.abs(
            head_covariance(outputs, weight).trace.numpy() / np.abs(expected).max() - expected / np.abs(expected).max()
        ).max()
        < 5e-15
    )


def test_the_traces_add_up_to_the_variance_of_the_modules_own_output():
    outputs, weight = layer()
    projection = torch.nn.Linear(24, 24, dtype=torch.float64)
    with torch.no_grad():
        projection.weight.copy_(weight.flatten(0, 1).T)
        y = projection(outputs.flatten(1)).numpy()
    assert float(head_covariance(outputs, weight).trace.sum()) == pytest.approx(
        np.trace(np.cov(y.T, bias=True)), rel=1e-13
    )


def test_variance_covariance_and_correlation_agree_with_the_naive_trace():
    outputs, weight = layer()
    T = naive_trace(outputs, weight)
    measured = head_covariance(outputs, weight)
    v, c = np.trace(T) / 4, T[~np.eye(4, dtype=bool)].mean()
    assert float(measured.variance) == pytest.approx(v)
    assert float(measured.covariance) == pytest.approx(c)
    assert float(measured.correlation) == pytest.approx(c / v)
    assert int(measured.tokens) == 200


def test_the_variance_factor_is_the_variance_of_the_mean_head():
    outputs, weight = layer()
    measured = head_covariance(outputs, weight)
    z = np.einsum("thi,hid->thd", outputs.numpy(), weight.numpy()).mean(1)
    achieved = np.trace(np.cov(z.T, bias=True)) / float(measured.variance)
    rho = float(measured.correlation)
    assert float(measured.variance_factor) == pytest.approx(achieved, rel=1e-13)
    assert float(measured.variance_factor) == pytest.approx(1 / 4 + 3 / 4 * rho, abs=1e-15)
    assert float(measured.effective_heads) == pytest.approx(min(4, 1 / achieved))


def test_identical_heads_have_correlation_one():
    outputs, weight = layer()
    twins = head_covariance(outputs[:, :1].expand(-1, 4, -1), weight[:1].expand(4, -1, -1))
    assert float(twins.correlation) == pytest.approx(1, abs=1e-14)
    assert float(twins.effective_heads) == pytest.approx(1)


def test_independent_heads_have_as_many_effective_heads():
    measured = head_covariance(gaussian(40_000, 4, 3), gaussian(4, 3, 12, seed=1))
    assert abs(float(measured.correlation)) < 0.01
    assert float(measured.effective_heads) == pytest.approx(4, rel=0.02)


def test_heads_that_cancel_are_capped_at_their_number():
    outputs = gaussian(100, 1, 3)
    opposed = head_covariance(torch.cat([outputs, -outputs], 1), torch.eye(3, dtype=torch.float64).expand(2, 3, 3))
    assert float(opposed.correlation) == pytest.approx(-1)
    assert float(opposed.effective_heads) == 2


def test_clones_with_different_output_projections_overlap_before_them_and_not_after():
    one = gaussian(5000, 1, 4)
    apart = torch.linalg.qr(gaussian(16, 16, seed=1)).Q.reshape(4, 4, 16)
    measured = head_covariance(one.expand(-1, 4, -1), apart)
    assert abs(float(measured.correlation)) < 1e-12
    assert torch.allclose(measured.output_overlap, torch.ones(4, 4, dtype=torch.float64))


def test_the_output_overlap_is_the_rv_coefficient_of_the_outputs():
    outputs, weight = layer()
    measured = head_covariance(outputs, weight).output_overlap
    centred = (outputs - outputs.mean(0)).numpy()
    for h in range(4):
        for g in range(4):
            a, b = centred[:, h], centred[:, g]
            rv = np.linalg.norm(a.T @ b) ** 2 / np.linalg.norm(a.T @ a) / np.linalg.norm(b.T @ b)
            assert float(measured[h, g]) == pytest.approx(rv, abs=1e-13)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.integers(2, 5), st.integers(1, 4), st.integers(2, 30), st.integers(0, 10**6))
def test_no_counterexample_to_the_bounds_of_the_correlation(H, width, tokens, seed):
    measured = head_covariance(gaussian(tokens, H, width, seed=seed), gaussian(H, width, 7, seed=seed + 1))
    assert -1 / (H - 1) - 1e-9 <= float(measured.correlation) <= 1 + 1e-9
    assert 1 - 1e-9 <= float(measured.effective_heads) <= H
    assert torch.linalg.eigvalsh(measured.trace).min() > -1e-9 * float(measured.trace.abs().max())


def test_a_large_common_mean_costs_no_precision_in_float32():
    outputs, weight = gaussian(2000, 4, 6), gaussian(4, 6, 24, seed=1)
    expected = head_covariance(outputs, weight)
    shifted = head_covariance((outputs + 1000).float(), weight.float())
    assert float(shifted.correlation) == pytest.approx(float(expected.correlation), abs=2e-4)
    assert float(shifted.variance) == pytest.approx(float(expected.variance), rel=2e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_outputs_are_measured_in_float32(dtype):
    outputs, weight = (tensor.to(dtype) for tensor in layer())
    measured = head_covariance(outputs, weight)
    assert measured.trace.dtype == torch.float32
    expected = naive_trace(outputs, weight)
    assert np.abs(measured.trace.double().numpy() - expected).max() < 1e-5 * np.abs(expected).max()


@pytest.mark.parametrize("tokens", [0, 1])
def test_too_few_tokens_give_no_number(tokens):
    outputs, weight = layer()
    measured = head_covariance(outputs[:tokens], weight)
    assert math.isnan(float(measured.correlation))
    assert math.isnan(float(measured.covariance))


def test_a_single_head_has_no_covariance():
    outputs, weight = layer(H=1)
    measured = head_covariance(outputs, weight)
    assert math.isnan(float(measured.covariance))
    assert float(measured.variance) > 0


# --- the covariance term alone, as a reading takes it


def covariance_by_hand(outputs: torch.Tensor, weight: torch.Tensor) -> float:
    T = naive_trace(outputs, weight)
    return T[~np.eye(len(T), dtype=bool)].mean()


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=5), st.integers(0, 10**6))
def test_contributions_of_ranks_add_up_to_one_pass(sizes, seed):
    outputs, weight = layer(tokens=sum(sizes) + 2, seed=seed)
    parts = [contribution_sums(part, weight, about_mean=False) for part in outputs.split([2, *sizes])]
    added = ContributionSums(*map(sum, zip(*parts)))
    assert float(added.tokens) == len(outputs)
    scale = float(np.abs(naive_trace(outputs, weight)).max())
    for sums in (added, contribution_sums(outputs, weight)):
        assert float(covariance_term(sums, 4)) == pytest.approx(covariance_by_hand(outputs, weight), abs=1e-12 * scale)


@pytest.mark.parametrize("mean", [0, 1000])
@pytest.mark.parametrize("scale", [1e-25, 1, 1e15])
@pytest.mark.parametrize("about_mean", [False, True])
def test_the_covariance_term_is_precise_in_float32_whatever_the_mean_and_the_scale(mean, scale, about_mean):
    outputs, weight = (gaussian(2000, 4, 6) + mean).float() * scale, gaussian(4, 6, 24, seed=1).float()
    expected = head_covariance(outputs.double(), weight.double())
    measured = float(covariance_term(contribution_sums(outputs, weight, about_mean=about_mean), 4))
    assert measured == pytest.approx(float(expected.covariance), abs=2e-6 * float(expected.variance))


@pytest.mark.parametrize("about_mean", [False, True])
def test_padding_counts_in_no_sum_whatever_it_holds(about_mean):
    outputs, weight = layer()
    valid = torch.arange(200) % 3 > 0
    spoiled = outputs.masked_fill(~valid[:, None, None], torch.nan)
    sums = contribution_sums(spoiled, weight, valid, about_mean=about_mean)
    assert float(covariance_term(sums, 4)) == pytest.approx(covariance_by_hand(outputs[valid], weight), rel=1e-9)
    assert covariance_term(contribution_sums(outputs[:1], weight, about_mean=about_mean), 4).isnan()


def test_centring_first_is_precise_in_float32_and_subtracting_means_later_is_not():
    outputs, weight = (gaussian(2000, 4, 6) + 1000).float(), gaussian(4, 6, 24, seed=1).float()
    exact = np.trace(naive_trace(outputs, weight)) / 4
    second = (outputs.flatten(1).T @ outputs.flatten(1)) / 2000
    mean = outputs.flatten(1).mean(0)
    flat = weight.flatten(0, 1)
    late = ((second - mean[:, None] * mean) * (flat @ flat.T)).view(4, 6, 4, 6).sum((1, 3)).trace() / 4
    assert abs(float(head_covariance(outputs, weight).variance) / exact - 1) < 1e-6
    assert abs(float(late) / exact - 1) > 1e-3
