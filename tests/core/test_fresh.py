"""Heads taken apart: what is orthogonal, what keeps its scale, and what the layer computes afterwards."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F

from hdi_callback.core import fold_head, fresh_head, head_diversity
from tests.core.test_subspaces import gaussian


def test_a_fresh_head_is_orthogonal_to_all_others_where_there_is_room():
    weight = gaussian(4, 6, 40, seed=1)
    weight[3] = 2 * weight[0]
    fresh = fresh_head(weight, 3)
    assert (weight[:3] @ fresh.mT).abs().max() < 1e-12
    assert float(fresh.norm()) == pytest.approx(float(weight[:3].norm(dim=(1, 2)).mean()))
    assert torch.linalg.matrix_rank(fresh) == 6
    assert torch.equal(fresh, fresh_head(weight, 3)), "alike on every rank"


def test_a_fresh_head_beside_a_single_other_is_orthogonal_to_it():
    weight = gaussian(2, 4, 16, seed=1)
    fresh = fresh_head(weight, 0)
    assert (weight[1] @ fresh.mT).abs().max() < 1e-12
    assert float(fresh.norm()) == pytest.approx(float(weight[1].norm()))


def test_without_free_directions_a_fresh_head_takes_the_least_used_ones():
    weight = gaussian(4, 8, 24, seed=2)
    weight[3] = weight[0]
    before, after = head_diversity(weight), weight.clone()
    after[3] = fresh_head(weight, 3)
    worst_of_random = min(
        float(head_diversity(torch.cat([weight[:3], gaussian(1, 8, 24, seed=s)])).subspace.overlap[3, :3].sum())
        for s in range(50)
    )
    assert float(before.subspace.worst) == pytest.approx(1)
    assert float(head_diversity(after).subspace.overlap[3, :3].sum()) < worst_of_random


def attend(x, weights, value, bias):
    return weights @ (x @ value.mT + bias)


def fold(stays, leaves):
    """Fold a head into another; each is its query, key, value and output weight."""
    return fold_head(*(torch.stack(pair) for pair in zip(stays, leaves)))


@pytest.mark.parametrize("has_biases", [False, True])
@pytest.mark.parametrize("same_values", [True, False])
def test_folding_preserves_the_output_of_heads_that_attend_alike(same_values, has_biases):
    x, weights = gaussian(7, 12, seed=3), torch.softmax(gaussian(7, 7, seed=4), -1)
    query, key = gaussian(4, 12, seed=1), gaussian(4, 12, seed=2)
    stay, out_stay, out_leave = gaussian(4, 12 + has_biases, seed=5), gaussian(4, 12, seed=6), gaussian(4, 12, seed=7)
    leave = stay if same_values else gaussian(4, 4, seed=8) @ stay
    values = [(value[:, :12], value[:, 12] if has_biases else 0.0) for value in (stay, leave)]
    folded, error = fold((query, key, stay, out_stay), (query, key, leave, out_leave))
    before = attend(x, weights, *values[0]) @ out_stay + attend(x, weights, *values[1]) @ out_leave
    assert (before - attend(x, weights, *values[0]) @ folded).abs().max() < 1e-10
    assert error < 1e-6


def test_folding_reports_the_share_that_is_lost():
    stay, leave = torch.eye(8, dtype=torch.float64)[:4], torch.eye(8, dtype=torch.float64)[4:]
    query, key, output = gaussian(3, 4, 8)
    assert float(fold((query, key, stay, output), (query, key, leave, output))[1]) == pytest.approx(1)
    half = torch.cat([stay[:2], leave[:2]])
    beyond = float(output[2:].norm() / output.norm())
    error = float(fold((query, key, stay, output), (query, key, half, output))[1])
    assert error == pytest.approx(beyond)


def test_after_folding_and_a_fresh_subspace_the_layer_output_is_unchanged():
    torch.manual_seed(0)
    H, k, d, x = 3, 4, 24, torch.randn(5, 9, 24, dtype=torch.float64)
    q, key, v = (torch.randn(H, k, d, dtype=torch.float64) for _ in range(3))
    out = torch.randn(H, k, d, dtype=torch.float64)
    for weight in (q, key, v):
        weight[2] = weight[1]

    def layer():
        heads = [x[:, None] @ weight.mT for weight in (q, key, v)]  # (batch, H, length, k)
        return (F.scaled_dot_product_attention(*heads) @ out).sum(1)

    before = layer()
    heads = [[weight[head] for weight in (q, key, v, out)] for head in (1, 2)]
    out[1], out[2] = fold(*heads)[0], 0
    key[2], q[2] = fresh_head(key, 2), fresh_head(q, 2)
    assert (layer() - before).abs().max() < 1e-10
    assert float(head_diversity(key).subspace.worst) < 0.5


# --- what two heads that attend differently lose


def scores_apart(query, key, other_query, other_key) -> tuple[float, float]:
    """Frobenius norms of the difference of two QK circuits, which are formed here, and of the second."""
    products = [q.mT @ k for q, k in ((query, key), (other_query, other_key))]
    return float((products[0] - products[1]).norm()), float(products[1].norm())


@pytest.mark.parametrize("size", [0.02, 0.1, 1.0, 3.0])
def test_the_error_of_heads_that_score_differently_agrees_with_products_computed_by_hand(size):
    (q_a, q_b), (k_a, k_b) = size * gaussian(2, 6, 20, seed=1), gaussian(2, 6, 20, seed=2)
    value, output = gaussian(2, 6, 20, seed=3)
    q_b, k_b = q_a + 0.02 * q_b, k_a + 0.01 * k_b
    apart, norm = scores_apart(q_a, k_a, q_b, k_b)
    error = float(fold((q_a, k_a, value, output), (q_b, k_b, value, output))[1])
    assert error == pytest.approx(min(1.0, apart / min(norm, math.sqrt(6))), rel=1e-6)


@pytest.mark.parametrize(("apart", "lost"), [(0.0, 0.3), (0.6, 0.3), (0.3, 0.6), (1.2, 0.1), (0.4, 0.0)])
def test_the_error_bounds_what_random_tokens_lose(apart, lost):
    draw = torch.Generator().manual_seed(0)
    gamma = math.exp(-(apart**2) / 2)  # cosine of the rows of attention
    values = torch.linalg.qr(torch.randn(12, 4, generator=draw, dtype=torch.float64)).Q
    kept, beyond = values[:, :2] * math.sqrt(1 - lost**2), values[:, 2:] * lost  # sizes of one head's C
    rows = torch.tensor([[1.0, 0.0], [gamma, math.sqrt(1 - gamma**2)]], dtype=torch.float64)
    tokens = torch.randn(20_000, 2, 12, generator=draw, dtype=torch.float64)
    before, after = (torch.einsum("t,ntd->nd", row, tokens) for row in rows)
    leaving = torch.cat([before @ kept, before @ beyond], -1)
    folded = torch.cat([after @ kept, torch.zeros_like(before @ beyond)], -1)
    measured = float(((leaving - folded).square().sum() / leaving.square().sum()).sqrt())
    assert min(measured, 1.0) <= 1.03 * min(1.0, math.hypot(apart, lost))
