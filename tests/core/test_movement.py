"""Movement of the heads' weights between two readings."""

from __future__ import annotations

import pytest
import torch

from hdi_callback.core.movement import movement_of, movement_sums
from tests.core.test_subspaces import gaussian


def head_movement(now, before):
    """Compare the heads of roles, each a tensor ``(..., heads, width, features)``."""
    sums = {f"role {place}": movement_sums(*pair) for place, pair in enumerate(zip(now, before))}
    return movement_of(sums, {role: weight.shape[-2:].numel() for role, weight in zip(sums, now)})


def test_movement_is_relative_and_zero_for_a_frozen_head():
    before, change = gaussian(2, 4, 3, 8), gaussian(2, 4, 3, 8, seed=1)
    change[:, 2] = 0
    expected = torch.linalg.matrix_norm(change) / torch.linalg.matrix_norm(before)
    movement = head_movement([before + 0.01 * change], [before]).movement
    assert torch.allclose(movement, 0.01 * expected, rtol=1e-9)
    assert (movement[:, 2] == 0).all()


def test_updates_that_bfloat16_rounds_away_are_no_movement():
    weight = gaussian(2, 4, 8).bfloat16()
    assert head_movement([(weight.float() * (1 + 1e-5)).bfloat16()], [weight]).movement.tolist() == [0, 0]
    next_one = weight.clone()
    next_one[1] = torch.nextafter(weight[1], torch.full_like(weight[1], torch.inf))
    expected = torch.linalg.matrix_norm(next_one[1].double() - weight[1].double())
    movement = head_movement([next_one], [weight]).movement
    assert movement[0] == 0
    assert float(movement[1]) == pytest.approx(float(expected / torch.linalg.matrix_norm(weight[1].double())), rel=1e-5)


def test_a_copy_in_another_type_is_compared_in_the_wider_one():
    weight = gaussian(2, 4, 8).float()
    rounded = weight.bfloat16()
    expected = torch.linalg.matrix_norm(weight - rounded.float()) / torch.linalg.matrix_norm(rounded.float())
    assert torch.allclose(head_movement([weight], [rounded]).movement, expected)


def test_a_head_that_was_zero_has_no_relative_movement():
    before = gaussian(2, 4, 8)
    before[0] = 0
    movement = head_movement([before + 1], [before]).movement
    assert movement[0].isnan()
    assert movement[1].isfinite()


def test_a_share_of_unchanged_weights_is_counted_to_the_last_bit():
    before = gaussian(2, 4, 8)
    now = before.clone()
    now[1, :2] *= 1 + 1e-9
    assert head_movement([now], [before]).unchanged.tolist() == [1, 0.5]


def test_a_moving_role_does_not_hide_one_that_stands_still():
    query, output = gaussian(2, 4, 3, 8), gaussian(2, 4, 3, 8, seed=1)
    moved = head_movement([query, 1.01 * output], [query, output])
    assert (moved.movement > 0).all()
    assert (moved.by_role["role 0"] == 0).all()
    assert torch.allclose(moved.by_role["role 1"], torch.full((2, 4), 0.01, dtype=torch.float64))
