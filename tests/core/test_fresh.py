"""Heads taken apart: what is orthogonal, what keeps its scale, and what the layer computes afterwards."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F

from hdi_callback.core import attention_agreement, fold_head, folding_error, fresh_head, head_diversity
from hdi_callback.errors import ShapeError
from tests.core.test_subspaces import gaussian


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_a_fresh_head_is_orthogonal_to_all_others_where_there_is_room():
    weight = gaussian(4, 6, 40, seed=1)
    weight[3] = 2 * weight[0]
    fresh = fresh_head(weight, 3, generator=seeded())
    assert (weight[:3] @ fresh.mT).abs().max() < 1e-12
    assert float(fresh.norm()) == pytest.approx(float(weight[:3].norm(dim=(1, 2)).mean()))
    assert torch.linalg.matrix_rank(fresh) == 6
    again, other = fresh_head(weight, 3, generator=seeded()), fresh_head(weight, 3, generator=seeded(1))
    assert torch.equal(fresh, again), "the generator decides"
    assert not torch.allclose(fresh, other), "and it is random within the room that there is"


def test_a_fresh_head_beside_a_single_other_is_orthogonal_to_it():
    weight = gaussian(2, 4, 16, seed=1)
    fresh = fresh_head(weight, 0, generator=seeded())
    assert (weight[1] @ fresh.mT).abs().max() < 1e-12
    assert float(fresh.norm()) == pytest.approx(float(weight[1].norm()))


def test_without_free_directions_a_fresh_head_takes_the_least_used_ones():
    weight = gaussian(4, 8, 24, seed=2)
    weight[3] = weight[0]
    before, after = head_diversity(weight), weight.clone()
    after[3] = fresh_head(weight, 3, generator=seeded())
    worst_of_random = min(
        float(head_diversity(torch.cat([weight[:3], gaussian(1, 8, 24, seed=s)])).subspace.overlap[3, :3].sum())
        for s in range(50)
    )
    assert float(before.subspace.worst) == pytest.approx(1)
    assert float(head_diversity(after).subspace.overlap[3, :3].sum()) < worst_of_random


def test_drawing_a_fresh_head_does_not_change_the_global_random_state():
    state = torch.get_rng_state()
    fresh_head(gaussian(3, 4, 16), 1, generator=seeded())
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(("shape", "head"), [((1, 4, 16), 0), ((3, 4, 16), 3), ((4, 16), 0)])
def test_an_invalid_head_index_is_refused(shape, head):
    with pytest.raises(ShapeError, match="fresh head needs"):
        fresh_head(torch.ones(shape), head)


def attend(x, weights, value, bias):
    return weights @ (x @ value.mT + bias)


@pytest.mark.parametrize("same_values", [True, False])
def test_folding_preserves_the_output_of_heads_that_attend_alike(same_values):
    x, weights = gaussian(7, 12, seed=3), torch.softmax(gaussian(7, 7, seed=4), -1)
    stay, out_stay, out_leave = gaussian(4, 12, seed=5), gaussian(4, 12, seed=6), gaussian(4, 12, seed=7)
    leave = stay if same_values else gaussian(4, 4, seed=8) @ stay
    biases = (gaussian(4, seed=9), gaussian(4, seed=10))
    folded = fold_head((stay, leave), (out_stay, out_leave), biases)
    before = attend(x, weights, stay, biases[0]) @ out_stay + attend(x, weights, leave, biases[1]) @ out_leave
    after = attend(x, weights, stay, biases[0]) @ folded.output + folded.bias
    assert (before - after).abs().max() < 1e-10
    assert folded.lost < 1e-12


def test_folding_reports_the_share_that_is_lost():
    stay, leave = torch.eye(8, dtype=torch.float64)[:4], torch.eye(8, dtype=torch.float64)[4:]
    output = gaussian(4, 8)
    assert float(fold_head((stay, leave), (output, output)).lost) == pytest.approx(1)
    half = torch.cat([stay[:2], leave[:2]])
    assert 0.1 < float(fold_head((stay, half), (output, output)).lost) < 0.95


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
    out[1], out[2] = fold_head((v[1], v[2]), (out[1], out[2])).output, 0
    key[2], q[2] = fresh_head(key, 2, generator=seeded()), fresh_head(q, 2, generator=seeded())
    assert (layer() - before).abs().max() < 1e-10
    assert float(head_diversity(key).subspace.worst) < 0.5


# --- how alike two heads attend


@pytest.mark.parametrize("size", [0.02, 0.1, 1.0, 3.0])
@pytest.mark.parametrize("has_biases", [False, True])
def test_the_agreement_of_two_heads_agrees_with_products_computed_by_hand(size, has_biases):
    (q_a, q_b), (k_a, k_b) = size * gaussian(2, 6, 20, seed=1), gaussian(2, 6, 20, seed=2)
    q_b, k_b = q_a + 0.2 * q_b, k_a + 0.1 * k_b
    biases = tuple(gaussian(2, 6, seed=3)) if has_biases else None
    # A bias is a row of the product more: what it adds to the score of a key is a score like others.
    products = [
        torch.cat([q.mT @ k, (torch.zeros(1, 6, dtype=q.dtype) if bias is None else bias[None]) @ k])
        for q, k, bias in zip((q_a, q_b), (k_a, k_b), biases or (None, None))
    ]
    apart = float((products[0] - products[1]).square().sum()) / 6
    spread = min(1.0, float(products[1].square().sum()) / 6)
    found = attention_agreement((q_a, q_b), (k_a, k_b), biases)
    assert float(found) == pytest.approx(math.exp(-apart / spread / 2), rel=1e-6)


def test_the_agreement_under_a_norm_depends_only_on_directions():
    (q_a, q_b), (k_a, k_b) = gaussian(2, 6, 20, seed=1), gaussian(2, 6, 20, seed=2)
    q_b, k_b = q_a + 0.5 * q_b, k_a + 0.5 * k_b
    one, other = (q_a.mT @ k_a).flatten(), (q_b.mT @ k_b).flatten()
    cosine = float(F.cosine_similarity(one, other, dim=0))
    found = float(attention_agreement((q_a, q_b), (k_a, k_b), is_normed=True))
    assert found == pytest.approx(math.exp(cosine - 1), rel=1e-6)
    assert float(attention_agreement((9 * q_a, q_b), (k_a, 7 * k_b), is_normed=True)) == pytest.approx(found, rel=1e-9)


@pytest.mark.parametrize(("gamma", "lost"), [(1.0, 0.3), (0.8, 0.3), (0.5, 0.6), (0.2, 0.1), (0.9, 0.0)])
def test_the_loss_of_a_handover_is_that_of_random_tokens(gamma, lost):
    draw = torch.Generator().manual_seed(0)
    values = torch.linalg.qr(torch.randn(12, 4, generator=draw, dtype=torch.float64)).Q
    kept, beyond = values[:, :2] * math.sqrt(1 - lost**2), values[:, 2:] * lost  # sizes of one head's C
    rows = torch.tensor([[1.0, 0.0], [gamma, math.sqrt(1 - gamma**2)]], dtype=torch.float64)
    tokens = torch.randn(20_000, 2, 12, generator=draw, dtype=torch.float64)
    before, after = (torch.einsum("t,ntd->nd", row, tokens) for row in rows)
    was = torch.cat([before @ kept, before @ beyond], -1)
    instead = torch.cat([after @ kept, torch.zeros_like(before @ beyond)], -1)
    measured = float(((was - instead).square().sum() / was.square().sum()).sqrt())
    found = float(folding_error(torch.tensor(lost), torch.tensor(gamma)))
    assert found == pytest.approx(min(measured, 1.0), rel=0.03)  # what is lost is everything at most
