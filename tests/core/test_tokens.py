"""The mean cosine of tokens against every cosine."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hdi_callback.core.tokens import TokenSums, mean_cosine, token_sums
from tests.core.search import SEARCH
from tests.core.test_subspaces import gaussian


def cosine_of(tokens: Tensor, valid: Tensor | None = None) -> Tensor:
    return mean_cosine(token_sums(tokens, valid))


def plain(tokens: Tensor) -> float:
    x = tokens.double().numpy()
    u = x / np.linalg.norm(x, axis=1, keepdims=True)
    return (u @ u.T)[~np.eye(len(x), dtype=bool)].mean()


@given(st.integers(2, 12), st.integers(2, 12), st.integers(0, 10**6))
@SEARCH
def test_the_cosine_is_that_of_numpy_with_few_tokens_and_with_many(n, d, seed):
    tokens = gaussian(n, d, seed=seed) + 1
    assert float(cosine_of(tokens)) == pytest.approx(plain(tokens), abs=1e-9)


@given(st.integers(2, 9), st.integers(0, 10**6))
@SEARCH
def test_turning_and_scaling_change_nothing_and_shifting_does(n, seed):
    tokens, turn = gaussian(n, 6, seed=seed), torch.linalg.qr(gaussian(6, 6, seed=seed + 1)).Q
    assert torch.allclose(cosine_of(tokens), cosine_of(3 * tokens @ turn))
    assert float(cosine_of(tokens + 1e3)) > 0.99


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_tokens_that_become_equal_have_cosine_one(dtype):
    assert float(cosine_of(gaussian(1, 16).to(dtype).expand(40, 16))) == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("shape", [(60, 256), (256, 60)])
@pytest.mark.parametrize("scale", [1e-15, 1, 1e15])
def test_single_precision_with_a_common_mean_and_any_scale(shape, scale):
    tokens = (gaussian(*shape) + 30).float()
    assert float(cosine_of(tokens * scale)) == pytest.approx(plain(tokens), abs=1e-5)


def test_padding_does_not_count_whatever_it_holds():
    tokens, valid = gaussian(2, 9, 5), torch.arange(9) % 3 > 0
    spoiled = tokens.masked_fill(~valid[:, None], torch.nan)
    assert torch.allclose(cosine_of(spoiled, valid.expand(2, 9)), cosine_of(tokens[:, valid]))


def test_a_token_of_zeros_has_cosine_zero_and_fewer_than_two_tokens_give_nan():
    tokens = torch.tensor([[0.0, 0], [1, 0], [0, 1]])
    assert float(cosine_of(tokens)) == 0
    for few in (tokens[:0], tokens[:1], tokens[:2]):
        assert cosine_of(few).isnan()
    assert cosine_of(tokens.masked_fill(tokens == 1, torch.nan)).isnan()


def test_sums_of_parts_add_up_to_one_pass():
    tokens = gaussian(9, 5)
    parts = [token_sums(part) for part in tokens.split([2, 0, 7])]
    assert torch.allclose(mean_cosine(TokenSums(*map(sum, zip(*parts)))), cosine_of(tokens))
