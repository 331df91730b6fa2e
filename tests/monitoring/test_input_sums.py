"""Sums over tokens in float32 agree with sums in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hdi_callback.monitoring.monitor.input_mean import InputMean, InputSums
from tests.core.test_subspaces import gaussian

N, D = 600, 96

TOKENS = {
    "independent": gaussian(N, D),
    "about a mean": gaussian(N, D) + 1000 * gaussian(D, seed=1),
    "all but one": 1e-4 * gaussian(N, D) + gaussian(D, seed=1),
    "few directions": gaussian(N, 3) @ gaussian(3, D, seed=1),
    "large": 1e9 * gaussian(N, D),
    "small": 1e-8 * gaussian(N, D),
    "few": gaussian(5, D),
    "with one of zeros": torch.cat([torch.zeros(1, D), gaussian(N, D)]),
}


def in_double(tokens: Tensor, weights: Tensor) -> InputSums:
    mean = InputMean.of(tokens.double(), weights)
    rows = (tokens.double() - mean.total / mean.count) * weights.sqrt()[:, None]
    return InputSums(mean, rows.square().sum(), (rows.T @ rows).square().sum())


@pytest.mark.parametrize("kind", list(TOKENS))
@pytest.mark.parametrize("is_weighted", [False, True])
def test_token_metrics_in_single_precision_agree_with_double_precision(kind, is_weighted):
    tokens = TOKENS[kind].float()
    weights = torch.arange(len(tokens)).remainder(4).double() if is_weighted else torch.ones(len(tokens)).double()
    sums, exact = InputSums.in_single(tokens, weights), in_double(tokens, weights)
    found, expected = sums.spread(), exact.spread()
    assert float(found.rank) == pytest.approx(float(expected.rank), rel=1e-6)
    assert float(found.cosine) == pytest.approx(float(expected.cosine), abs=1e-7)
    assert found.tokens == expected.tokens
    assert torch.allclose(sums.mean.total, exact.mean.total, rtol=1e-6, atol=1e-6 * float(exact.mean.size.sqrt()))
    assert torch.allclose(sums.mean.size, exact.mean.size, rtol=1e-6)


def test_equal_tokens_have_rank_zero_and_non_finite_or_extreme_tokens_need_double_precision():
    ones = torch.ones(N).double()
    same = gaussian(1, D).float().expand(N, D)
    assert float(InputSums.in_single(same, ones).spread().rank) == 0
    for tokens in (torch.full((N, D), torch.nan), torch.zeros(N, D), torch.full((N, D), 1e20), torch.zeros(0, D)):
        assert InputSums.in_single(tokens, ones[: len(tokens)]) is None
