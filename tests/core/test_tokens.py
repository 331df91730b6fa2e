"""The spread of tokens against the eigenvalues of their covariance and every cosine."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.overrides import TorchFunctionMode

from hdi_callback.core import token_spread
from hdi_callback.errors import ShapeError
from tests.core.search import SEARCH
from tests.core.test_subspaces import gaussian


class Products(TorchFunctionMode):
    """Keep the shape of every matrix product."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func in (torch.matmul, Tensor.matmul, Tensor.__matmul__):
            self.shapes.append(tuple(made.shape))
        return made


def plain(tokens: Tensor) -> tuple[float, float]:
    x = tokens.double().numpy()
    eigenvalues = np.linalg.eigvalsh(np.cov(x.T, bias=True).reshape(x.shape[1], -1))
    u = x / np.linalg.norm(x, axis=1, keepdims=True)
    cosines = (u @ u.T)[~np.eye(len(x), dtype=bool)]
    return eigenvalues.sum() ** 2 / (eigenvalues**2).sum(), cosines.mean()


@given(st.integers(2, 12), st.integers(2, 12), st.integers(0, 10**6))
@SEARCH
def test_rank_and_cosine_are_those_of_numpy_with_few_tokens_and_with_many(n, d, seed):
    tokens = gaussian(n, d, seed=seed) + 1
    spread, (rank, cosine) = token_spread(tokens), plain(tokens)
    assert float(spread.rank) == pytest.approx(rank)
    assert float(spread.cosine) == pytest.approx(cosine, abs=1e-9)


@given(st.integers(2, 9), st.integers(0, 10**6))
@SEARCH
def test_turning_scaling_and_shifting_change_what_they_should(n, seed):
    tokens, turn = gaussian(n, 6, seed=seed), torch.linalg.qr(gaussian(6, 6, seed=seed + 1)).Q
    spread, turned = token_spread(tokens), token_spread(3 * tokens @ turn)
    assert torch.allclose(spread.rank, turned.rank)
    assert torch.allclose(spread.cosine, turned.cosine)
    shifted = token_spread(tokens + 1e3)
    assert float(shifted.rank) == pytest.approx(float(spread.rank), rel=1e-6)
    assert float(shifted.cosine) > 0.99


def test_tokens_that_become_equal_have_rank_zero_and_cosine_one():
    mean, noise = gaussian(1, 16), gaussian(40, 16, seed=1)
    assert float(token_spread(noise).rank) > 8
    line = mean + torch.linspace(-1, 1, 40, dtype=torch.float64)[:, None] * gaussian(1, 16, seed=2)
    assert float(token_spread(line).rank) == pytest.approx(1)
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        one = token_spread(mean.to(dtype).expand(40, 16))
        assert float(one.rank) == 0
        assert float(one.cosine) == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("shape", [(60, 256), (256, 60)])
def test_single_precision_with_a_common_mean_and_any_scale(shape):
    tokens = (gaussian(*shape) + 30).float()
    rank, cosine = plain(tokens)
    for scale in (1e-15, 1, 1e15):
        spread = token_spread(tokens * scale)
        assert float(spread.rank) == pytest.approx(rank, rel=1e-4)
        assert float(spread.cosine) == pytest.approx(cosine, abs=1e-5)


def test_padding_does_not_count_whatever_it_holds():
    tokens, valid = gaussian(2, 9, 5), torch.arange(9) % 3 > 0
    spoiled = tokens.masked_fill(~valid[:, None], torch.nan)
    spread, clean = token_spread(spoiled, valid.expand(2, 9)), token_spread(tokens[:, valid])
    for name in ("rank", "cosine", "tokens"):
        assert torch.allclose(getattr(spread, name), getattr(clean, name))


def test_a_token_of_zeros_has_cosine_zero_and_fewer_than_two_tokens_give_nan():
    tokens = torch.tensor([[0.0, 0], [1, 0], [0, 1]])
    assert float(token_spread(tokens).cosine) == 0
    assert float(token_spread(tokens).tokens) == 3
    for few in (tokens[:1], tokens[:0]):
        assert token_spread(few).rank.isnan()
        assert token_spread(few).cosine.isnan()
    assert token_spread(tokens[:2]).cosine.isnan()


def test_a_shape_that_is_no_batch_of_tokens_is_refused():
    with pytest.raises(ShapeError, match="tokens, features"):
        token_spread(torch.ones(3))
    with pytest.raises(ShapeError, match="tokens, features"):
        token_spread(torch.ones(3, 4), torch.ones(4, dtype=torch.bool))


def made(kind: str, n: int, d: int) -> Tensor:
    """Tokens of which few directions, neighbours, clusters, or one token, hold most."""
    noise = gaussian(n, d)
    if kind == "few directions":
        return gaussian(n, 5, seed=1) @ gaussian(5, d, seed=2) + 0.1 * noise
    if kind == "neighbours alike":
        tokens = noise.clone()
        for place in range(1, n):
            tokens[place] = 0.95 * tokens[place - 1] + 0.3 * noise[place]
        return tokens
    if kind == "clusters":
        return gaussian(10, d, seed=1)[torch.arange(n) % 10] + 0.3 * noise
    if kind == "one large token":
        return torch.cat([100 * noise[:1], noise[1:]])
    return noise
