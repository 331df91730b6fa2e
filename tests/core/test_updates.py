"""Movement, and the lenses on W(t) - W(t - k)."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hdi_callback.core import (
    head_diversity,
    head_movement,
    head_update,
    qk_circuits,
    spectral_entropy,
    weight_update,
)
from hdi_callback.errors import ShapeError
from tests.core.search import SEARCH
from tests.core.test_subspaces import gaussian, with_spectrum


def test_movement_is_relative_and_zero_for_a_frozen_head():
    before, change = gaussian(2, 4, 3, 8), gaussian(2, 4, 3, 8, seed=1)
    change[:, 2] = 0
    expected = torch.linalg.matrix_norm(change) / torch.linalg.matrix_norm(before)
    movement = head_movement(before + 0.01 * change, before)
    assert torch.allclose(movement, 0.01 * expected, rtol=1e-9)
    assert (movement[:, 2] == 0).all()


def test_updates_that_bfloat16_rounds_away_are_no_movement():
    weight = gaussian(2, 4, 8).bfloat16()
    assert head_movement((weight.float() * (1 + 1e-5)).bfloat16(), weight).tolist() == [0, 0]
    next_one = weight.clone()
    next_one[1] = torch.nextafter(weight[1], torch.full_like(weight[1], torch.inf))
    expected = torch.linalg.matrix_norm(next_one[1].double() - weight[1].double())
    movement = head_movement(next_one, weight)
    assert movement[0] == 0
    assert float(movement[1]) == pytest.approx(float(expected / torch.linalg.matrix_norm(weight[1].double())), rel=1e-5)


def test_a_copy_in_another_type_is_compared_in_the_wider_one():
    weight = gaussian(2, 4, 8).float()
    rounded = weight.bfloat16()
    expected = torch.linalg.matrix_norm(weight - rounded.float()) / torch.linalg.matrix_norm(rounded.float())
    assert torch.allclose(head_movement(weight, rounded), expected)


def test_a_head_that_was_zero_has_no_relative_movement():
    before = gaussian(2, 4, 8)
    before[0] = 0
    movement = head_movement(before + 1, before)
    assert movement[0].isnan()
    assert movement[1].isfinite()


def test_the_lens_on_updates_sees_heads_that_learn_the_same():
    before, step = gaussian(4, 6, 48), gaussian(4, 6, 48, seed=1)
    step[3] = gaussian(6, 6, seed=2) @ step[1]
    update = head_update(before + 1e-3 * step, before)
    assert head_diversity(before + 1e-3 * step).worst < 0.4
    assert update.diversity.worst_pair.tolist() == [1, 3]
    assert float(update.diversity.worst) == pytest.approx(1)
    step[2] = 0
    still = head_update(before + 1e-3 * step, before)
    assert still.diversity.dead.tolist() == [False, False, True, False]
    assert still.spectral_entropy.isnan().tolist() == [False, False, True, False]
    assert still.movement[2] == 0


def test_the_circuits_of_updates_are_circuits_of_differences():
    query, key = gaussian(3, 4, 12), gaussian(3, 4, 12, seed=1)
    moved = query + gaussian(3, 4, 12, seed=2), key + gaussian(3, 4, 12, seed=3)
    updates = weight_update(moved[0], query), weight_update(moved[1], key)
    plain = torch.stack([(q.mT @ k).flatten() for q, k in zip(moved[0] - query, moved[1] - key)])
    expected = torch.nn.functional.cosine_similarity(plain[:, None], plain[None], dim=-1)
    assert torch.allclose(qk_circuits(*updates).cosine, expected, atol=1e-9)


@given(st.integers(2, 12), st.floats(0, 12), st.integers(0, 10**6))
@SEARCH
def test_the_spectral_entropy_is_that_of_the_singular_values(k, decades, seed):
    sigma = torch.logspace(0, -decades, k, dtype=torch.float64)
    p = (sigma**2 / (sigma**2).sum()).numpy()
    expected = -np.where(p > 0, p * np.log(np.maximum(p, 1e-300)), 0).sum() / np.log(k)
    assert spectral_entropy(with_spectrum(sigma, 2, 16, seed=seed)).tolist() == pytest.approx([expected] * 2, abs=2e-6)


def test_the_spectral_entropy_of_closed_forms():
    assert spectral_entropy(torch.eye(64)[None]).tolist() == pytest.approx([1], abs=1e-6)
    assert spectral_entropy(gaussian(8, 1) @ gaussian(1, 20)[None]).tolist() == pytest.approx([0], abs=2e-6)
    half = torch.cat([torch.eye(4), torch.zeros(4, 4)])[None]
    assert spectral_entropy(half).tolist() == pytest.approx([np.log(4) / np.log(8)], abs=1e-6)
    assert spectral_entropy(torch.ones(2, 1, 5)).isnan().all()
    assert spectral_entropy(torch.zeros(2, 3, 5)).isnan().all()


def test_readings_of_different_shapes_are_refused():
    with pytest.raises(ShapeError, match="one shape"):
        head_movement(torch.ones(2, 3, 4), torch.ones(2, 3, 5))


def test_heads_of_width_two_have_an_entropy_and_those_of_width_one_have_none():
    weight = torch.tensor([[[3.0, 0, 0], [0, 1, 0]]], dtype=torch.float64)
    shares = np.array([0.9, 0.1])
    expected = -(shares * np.log(shares)).sum() / np.log(2)
    assert float(spectral_entropy(weight)) == pytest.approx(expected, rel=1e-5)
    assert spectral_entropy(weight[:, :1]).shape == (1,)
    assert spectral_entropy(weight[:, :1]).isnan().all()


@pytest.mark.parametrize("k", range(2, 13))
def test_the_spectral_entropy_of_an_even_head_is_one_and_never_more(k):
    found = spectral_entropy(torch.eye(k, dtype=torch.float64)[None])
    assert found.tolist() == pytest.approx([1.0], abs=1e-5)
    assert found.max() <= 1
