"""The empirical covariance term against the naive computation, and the identities of its bookkeeping."""

from __future__ import annotations

import math
from dataclasses import fields
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hdi_callback.core import HeadMoments, bias_variance_covariance, head_covariance
from hdi_callback.core.circuits import ov_circuits_and_products
from hdi_callback.core.head_sums import HeadSums
from hdi_callback.errors import ShapeError
from tests.core.tensor_sizes import TensorSizes
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


# --- streaming


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=5), st.integers(0, 10**6))
def test_merging_in_pieces_is_one_pass(sizes, seed):
    outputs, weight = layer(tokens=sum(sizes) + 2, seed=seed)
    moments = HeadMoments.of(outputs[:2])
    for piece in outputs[2:].split(sizes):
        moments = moments.update(piece)
    whole = HeadMoments.of(outputs)
    assert float(moments.count) == len(outputs)
    scale = float(whole.scatter.abs().max())
    assert float((moments.scatter - whole.scatter).abs().max()) < 2e-14 * scale
    assert float((moments.mean - whole.mean).abs().max()) < 1e-13
    assert np.allclose(moments.covariance(weight).trace, naive_trace(outputs, weight), rtol=1e-11)


def test_the_order_of_merging_does_not_matter():
    parts = [HeadMoments.of(part) for part in layer(tokens=90)[0].split(30)]
    left = parts[0].merge(parts[1]).merge(parts[2])
    right = parts[2].merge(parts[1].merge(parts[0]))
    assert torch.allclose(left.scatter, right.scatter, rtol=1e-13)
    assert torch.allclose(left.mean, right.mean, rtol=1e-13)


# --- standard errors


def explicit_jackknife(outputs: torch.Tensor, weight: torch.Tensor, lengths: list[int]) -> tuple[float, float]:
    starts = np.cumsum([0, *lengths])
    values = []
    for start, stop in pairwise(starts):
        T = naive_trace(torch.cat([outputs[:start], outputs[stop:]]), weight)
        H = len(T)
        c = (T.sum() - np.trace(T)) / (H * (H - 1))
        values.append((c, c / (np.trace(T) / H)))
    n = len(values)
    return tuple(np.sqrt((n - 1) / n * ((np.array(values) - np.mean(values, 0)) ** 2).sum(0)))


@pytest.mark.parametrize("lengths", [[20] * 10, [5, 60, 35, 100], [150, 50]])
def test_standard_errors_are_those_of_leaving_out_each_sequence(lengths):
    outputs, weight = layer()
    measured = head_covariance(outputs, weight, lengths=lengths)
    covariance, correlation = explicit_jackknife(outputs, weight, lengths)
    assert float(measured.covariance_error) == pytest.approx(covariance, rel=1e-10)
    assert float(measured.correlation_error) == pytest.approx(correlation, rel=1e-9)


@pytest.mark.parametrize("lengths", [None, [3000, 1000], [1000] * 4])
def test_the_contributions_of_the_heads_are_never_formed(lengths):
    tokens, H, width, d = 4000, 4, 6, 200
    outputs, weight = gaussian(tokens, H, width), gaussian(H, width, d, seed=1)
    with TensorSizes() as sizes:
        head_covariance(outputs, weight, lengths=lengths)
    assert sizes.largest <= max(outputs.numel(), (H * width) ** 2)
    with TensorSizes() as sizes:
        torch.einsum("thi,hid->thd", outputs[:1000], weight)
    assert sizes.largest >= 1000 * H * d


def test_one_sequence_gives_no_standard_error():
    outputs, weight = layer()
    assert math.isnan(float(head_covariance(outputs, weight, lengths=[200]).correlation_error))
    assert math.isnan(float(head_covariance(outputs, weight).correlation_error))


def test_leaving_out_all_but_one_token_leaves_nothing_to_compare():
    outputs, weight = layer()
    assert math.isnan(float(head_covariance(outputs, weight, lengths=[199, 1]).correlation_error))


def test_leaving_out_sequences_accounts_for_correlated_tokens():
    rng = np.random.default_rng(0)
    weight = torch.eye(2, dtype=torch.float64).expand(3, 2, 2)
    estimates, by_sequence, by_token = [], [], []
    for _ in range(40):
        steps = rng.standard_normal((30, 60, 6))
        series = np.empty_like(steps)
        series[:, 0] = steps[:, 0]
        for t in range(1, 60):
            series[:, t] = 0.9 * series[:, t - 1] + math.sqrt(1 - 0.81) * steps[:, t]
        outputs = torch.tensor(series.reshape(-1, 3, 2))
        measured = head_covariance(outputs, weight, lengths=[60] * 30)
        estimates.append(float(measured.covariance))
        by_sequence.append(float(measured.covariance_error))
        by_token.append(
            float(head_covariance(outputs[:300], weight, lengths=[1] * 300).covariance_error) / math.sqrt(6)
        )
    assert np.mean(by_sequence) == pytest.approx(np.std(estimates), rel=0.35)
    assert np.mean(by_token) < 0.6 * np.std(estimates)


# --- shapes, and the bias-variance-covariance decomposition


def test_shapes_that_do_not_belong_together_are_refused():
    with pytest.raises(ShapeError, match="must agree"):
        head_covariance(torch.zeros(10, 4, 6), torch.zeros(4, 5, 24))
    with pytest.raises(ShapeError, match="add up to the 10 tokens"):
        head_covariance(torch.zeros(10, 4, 6), torch.zeros(4, 6, 24), lengths=[4, 4])
    with pytest.raises(ShapeError, match="tokens, heads, width"):
        HeadMoments.of(torch.zeros(10, 24))
    with pytest.raises(ShapeError, match="replicates, heads"):
        bias_variance_covariance(torch.zeros(3, 4, 5), torch.zeros(6))


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.integers(1, 6), st.integers(2, 6), st.integers(1, 5), st.integers(0, 10**6))
def test_the_error_of_an_ensemble_is_bias_plus_variance_plus_covariance(replicates, H, points, seed):
    predictions, target = gaussian(replicates, H, points, seed=seed) + 1, gaussian(points, seed=seed + 1)
    terms = bias_variance_covariance(predictions, target)
    squared = ((predictions.numpy().mean(1) - target.numpy()) ** 2).mean()
    bias = ((predictions.numpy().mean((0, 1)) - target.numpy()) ** 2).mean()
    assert float(terms.mse) == pytest.approx(squared, rel=1e-12)
    assert float(terms.bias) == pytest.approx(bias, rel=1e-12)
    assert float(terms.mse) == pytest.approx(
        float(terms.bias + terms.variance / H + (1 - 1 / H) * terms.covariance), rel=1e-11
    )


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.integers(2, 6), st.sampled_from([torch.float32, torch.float64]), st.integers(0, 10**6))
def test_heads_that_cancel_up_to_rounding_are_capped_at_their_number(H, dtype, seed):
    outputs = gaussian(50, H - 1, 5, seed=seed).to(dtype)
    outputs = torch.cat([outputs, -outputs.sum(1, keepdim=True)], 1)
    weight = gaussian(1, 5, 9, seed=seed + 1).to(dtype).expand(H, 5, 9)
    measured = head_covariance(outputs, weight)
    assert float(measured.correlation) == pytest.approx(-1 / (H - 1), abs=1e-6)
    assert float(measured.effective_heads) == pytest.approx(H)


def test_a_sequence_without_tokens_is_no_replicate():
    outputs, weight = layer()
    plain = head_covariance(outputs, weight, lengths=[60, 40, 100])
    padded = head_covariance(outputs, weight, lengths=[0, 60, 0, 40, 100, 0])
    assert float(padded.covariance_error) == float(plain.covariance_error)
    assert float(padded.correlation_error) == float(plain.correlation_error)
    assert math.isnan(float(head_covariance(outputs, weight, lengths=[200, 0]).covariance_error))


def test_five_merges_agree_with_one_pass_to_float64_rounding():
    outputs = layer(tokens=300)[0]
    moments, whole = HeadMoments.of(outputs[:60]), HeadMoments.of(outputs)
    for piece in outputs[60:].split(60):
        moments = moments.update(piece)
    assert float((moments.scatter - whole.scatter).abs().max() / whole.scatter.abs().max()) < 5e-15
    assert float((moments.mean - whole.mean).abs().max() / whole.mean.abs().max()) < 2e-15


def test_centring_first_is_precise_in_float32_and_subtracting_means_later_is_not():
    outputs, weight = (gaussian(2000, 4, 6) + 1000).float(), gaussian(4, 6, 24, seed=1).float()
    exact = np.trace(naive_trace(outputs, weight)) / 4
    second = (outputs.flatten(1).T @ outputs.flatten(1)) / 2000
    mean = outputs.flatten(1).mean(0)
    flat = weight.flatten(0, 1)
    late = ((second - mean[:, None] * mean) * (flat @ flat.T)).view(4, 6, 4, 6).sum((1, 3)).trace() / 4
    assert abs(float(head_covariance(outputs, weight).variance) / exact - 1) < 1e-6
    assert abs(float(late) / exact - 1) > 1e-3


def test_errors_from_single_tokens_of_an_autoregression_are_three_times_too_small():
    rng, r, length, sequences = np.random.default_rng(1), 0.9, 60, 200
    weight = torch.eye(2, dtype=torch.float64).expand(3, 2, 2)
    # Products of two such series correlate as r^(2j): the variance of a mean over `length` of them grows by this.
    lags = np.arange(1, length)
    inflation = math.sqrt(1 + 2 * ((1 - lags / length) * r ** (2 * lags)).sum())
    assert inflation == pytest.approx(3, abs=0.1)
    ratios = []
    for _ in range(5):
        series = rng.standard_normal((sequences, length, 6))
        for t in range(1, length):
            series[:, t] = r * series[:, t - 1] + math.sqrt(1 - r**2) * series[:, t]
        outputs = torch.tensor(series.reshape(-1, 3, 2))
        by_sequence = float(head_covariance(outputs, weight, lengths=[length] * sequences).covariance_error)
        z = (outputs - outputs.mean(0)).numpy()
        products = (z.sum(1) ** 2 - (z**2).sum(1)).sum(-1) / 6  # of each token: their mean is the covariance term
        assert products.mean() == pytest.approx(float(head_covariance(outputs, weight).covariance), abs=1e-12)
        ratios.append(by_sequence / (products.std(ddof=1) / math.sqrt(len(products))))
    assert np.mean(ratios) == pytest.approx(inflation, rel=0.1)


@pytest.mark.parametrize("is_weighted", [False, True])
def test_sums_over_tokens_of_several_ranks_are_those_of_the_centred_outputs(is_weighted):
    outputs, output_weight = gaussian(30, 3, 4, seed=1) + 2, gaussian(3, 4, 10, seed=2)
    weights = torch.arange(30.0) % 3 if is_weighted else torch.ones(30)
    mean = (weights[:, None, None] * outputs).sum(0) / weights.sum()
    parts = [
        HeadSums.of(
            outputs[part], output_weight, mean, with_scatter=True, weights=weights[part] if is_weighted else None
        )
        for part in (slice(0, 11), slice(11, 30))
    ]
    whole = parts[0] + parts[1]
    written = np.einsum("thk,hkd->thd", (outputs - mean).double().numpy(), output_weight.double().numpy())
    expected = np.einsum("t,thd,tgd->hg", weights.double().numpy(), written, written)
    assert float(whole.count) == float(weights.sum())
    np.testing.assert_allclose(whole.products.numpy(), expected, rtol=1e-4, atol=1e-4)
    found, direct = whole.covariance(), head_covariance(outputs, output_weight, weights=weights)
    np.testing.assert_allclose(found.trace.numpy(), direct.trace.numpy(), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found.output_overlap.numpy(), direct.output_overlap.numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("heads", [1, 3, 9])
def test_sums_mixed_with_output_weights_later_equal_those_mixed_at_once(heads):
    outputs, output_weight = gaussian(30, heads, 4, seed=1) + 2, gaussian(heads, 4, 10, seed=2)
    mean = outputs.mean(0)
    at_once = HeadSums.of(outputs, output_weight, mean, with_scatter=True)
    later = HeadSums.of(outputs, None, mean, with_scatter=True)
    assert later.scatter is not None
    assert later.scatter.shape == (HeadSums.scatter_size(heads, 4),)
    assert not later.products.any()
    written = np.einsum("thk,hkd->thd", (outputs - mean).double().numpy(), output_weight.double().numpy())
    expected = np.einsum("thd,tgd->hg", written, written)
    for known in (None, products_of_output(output_weight)):
        mixed = later.mixed(output_weight, known)
        np.testing.assert_allclose(mixed.products.numpy(), expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(later.mixed(output_weight).products, at_once.products)
    with pytest.raises(ShapeError, match="without a scatter"):
        HeadSums.of(outputs, None, mean).mixed(output_weight)


def products_of_output(output_weight):
    weight = output_weight.float()[None]
    _, products = ov_circuits_and_products(gaussian(*weight.shape, seed=5).float(), weight)
    assert products is not None
    return products


def test_one_token_with_a_large_weight_gives_no_covariance():
    outputs, output_weight = gaussian(5, 3, 4, seed=1), gaussian(3, 4, 10, seed=2)
    often = torch.tensor([0.0, 7.0, 0.0, 0.0, 0.0])
    assert head_covariance(outputs, output_weight, weights=often).covariance.isnan()
    assert not head_covariance(outputs, output_weight, weights=often + 0.5).covariance.isnan()


def test_standard_errors_of_numbered_sequences_are_those_of_sequences_in_a_row():
    lengths = [7, 4, 9, 6]
    outputs, output_weight = gaussian(26, 3, 4, seed=1) + 1, gaussian(3, 4, 10, seed=2)
    numbers = torch.repeat_interleave(torch.arange(4), torch.tensor(lengths))
    order = torch.randperm(26, generator=torch.Generator().manual_seed(0))
    in_a_row = head_covariance(outputs, output_weight, lengths=lengths)
    numbered = head_covariance(outputs[order], output_weight, sequences=(numbers[order], 4))
    with_padding = head_covariance(
        torch.cat([outputs, torch.full((3, 3, 4), torch.nan)]),
        output_weight,
        sequences=(torch.cat([numbers, torch.tensor([0, 1, 3])]), 4),
        weights=torch.cat([torch.ones(26), torch.zeros(3)]),
    )
    assert in_a_row.covariance_error > 0
    for other in (numbered, with_padding):
        for name in ("covariance", "correlation", "covariance_error", "correlation_error"):
            torch.testing.assert_close(getattr(other, name), getattr(in_a_row, name), rtol=1e-4, atol=1e-6)


def test_two_numbered_sequences_are_enough_for_a_standard_error():
    outputs, output_weight = gaussian(20, 3, 4, seed=1) + 1, gaussian(3, 4, 10, seed=2)
    numbers = torch.arange(20) % 2
    alone = [float(head_covariance(outputs[numbers == one], output_weight).covariance) for one in (0, 1)]
    found = head_covariance(outputs, output_weight, sequences=(numbers, 2)).covariance_error
    # Leaving one of two out leaves the other: the jackknife's variance is (n - 1)/n times their squared distances.
    assert float(found) == pytest.approx(abs(alone[0] - alone[1]) / 2, rel=1e-4)


def test_precomputed_products_of_output_weights_change_nothing():
    generator = torch.Generator().manual_seed(0)
    outputs, value, weight = (
        torch.randn(*shape, generator=generator) for shape in ((50, 6, 8), (6, 8, 40), (6, 8, 40))
    )
    _, products = ov_circuits_and_products(value[None], weight[None])
    found, expected = head_covariance(outputs, weight, products=products), head_covariance(outputs, weight)
    for item in fields(expected):
        assert torch.equal(getattr(found, item.name).nan_to_num(), getattr(expected, item.name).nan_to_num())
