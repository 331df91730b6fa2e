"""Movement of the heads' weights between two readings, and weights that are not finite."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor


class HeadMovement(NamedTuple):
    """Change of the heads' weights between two readings, ``(..., H)``."""

    # Norm of the change of all weights of a head, as a share of their norm before. 0 means frozen, updates that round
    # away, or zeros that stay so; NaN where zeros have changed.
    movement: Tensor
    unchanged: Tensor  # share of these weights that are exactly what they were, to the last bit
    by_role: Mapping[str, Tensor]  # role -> the movement of its weights


class MovementSums(NamedTuple):
    """Sums over the weights of heads, ``(..., H)``."""

    moved: Tensor  # norm of the change
    size: Tensor  # norm before
    same: Tensor  # number of weights that are exactly what they were


@torch.no_grad()
def movement_sums(now: Tensor, before: Tensor) -> MovementSums:
    """Return sums over the weights of heads, ``(..., H, width, features)``, and those of an earlier reading.

    The earlier ones are overwritten, as new memory takes longer to touch than all the rest.
    """
    before = before.to(now.device, torch.promote_types(now.dtype, torch.float32), non_blocking=True)
    size = torch.linalg.vector_norm(before, dim=(-2, -1))
    change = before - now if before.is_inference() else before.sub_(now)
    moved = torch.linalg.vector_norm(change, dim=(-2, -1))
    return MovementSums(moved, size, change.eq_(0).sum((-2, -1)))  # as floats: of booleans it is six times as slow


def movement_of(sums: Mapping[str, MovementSums], own: Mapping[str, int]) -> HeadMovement:
    """Return the movement of heads from sums by role; `own`: a role that no heads share -> weights of a head."""
    moved, size, same = (torch.stack(parts) for parts in zip(*(sums[role] for role in own)))
    movement = _relative(*(torch.linalg.vector_norm(norms, dim=0) for norms in (moved, size)))
    # Nothing is equal to NaN, but of weights without a finite past nothing is known.
    unchanged = (same.sum(0) / sum(own.values())).masked_fill(movement.isnan(), torch.nan)
    return HeadMovement(movement, unchanged, {role: _relative(part.moved, part.size) for role, part in sums.items()})


def _relative(moved: Tensor, size: Tensor) -> Tensor:
    return torch.where(moved == 0, 0, torch.where(size == 0, torch.nan, moved / size))


@torch.no_grad()
def not_finite(weight: Tensor) -> Tensor:
    """Return which heads ``(..., H)`` of a weight ``(..., H, width, features)`` hold numbers that are not finite."""
    return ~torch.stack([weight.amax((-2, -1)), weight.amin((-2, -1))]).isfinite().all(0)
