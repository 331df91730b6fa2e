"""Movement of the heads' weights between two readings, and weights that are not finite."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class HeadMovement:
    r"""Change of the heads' weights between two readings.

    Attributes:
        movement: ``(..., H)``, :math:`\lVert W - W' \rVert / \lVert W' \rVert` over all weights of a head. 0 means
            frozen, updates that round away, or zeros that stay so; NaN where zeros have changed.
        unchanged: ``(..., H)``, share of these weights that are exactly what they were, to the last bit.
        by_role: ``(..., roles, H)``, the movement of each role; NaN also of a role that is not there, or not to train.
    """

    movement: Tensor
    unchanged: Tensor
    by_role: Tensor


@dataclass(frozen=True)
class MovementSums:
    """Squared norms and counts of changed weights, by role and head ``(..., roles, H)``."""

    moved: Tensor  # squared norm of the change
    size: Tensor  # squared norm before
    same: Tensor  # number of weights that are exactly what they were
    number: Tensor  # number of weights


@torch.no_grad()
def movement_sums(now: Tensor, before: Tensor) -> MovementSums:
    """Return the sums over the weights of heads, compared with those of an earlier reading.

    Args:
        now: ``(..., H, width, features)``.
        before: the same at an earlier reading; in any type, on any device.

    Returns:
        Sums ``(..., H)`` in float32 or wider.
    """
    wide = torch.promote_types(now.dtype, torch.float32)
    before = before.to(now.device, wide, non_blocking=True)
    change = now.to(wide) - before
    moved = torch.linalg.vector_norm(change, dim=(-2, -1)).square()
    size = torch.linalg.vector_norm(before, dim=(-2, -1)).square()
    same = change.eq_(0).sum((-2, -1))  # as floats, in place: summing booleans is six times as slow
    return MovementSums(moved, size, same, torch.full_like(same, now.shape[-2:].numel()))


@torch.no_grad()
def movement_of(sums: MovementSums, own: Sequence[int], trains: Tensor | None = None) -> HeadMovement:
    """Return the movement of heads.

    Args:
        sums: of all roles; zeros of a role that is not there.
        own: the roles that no heads share, of which the movement of a head is taken.
        trains: ``(..., roles)``, whether a role is to train; by default all are.
    """
    moved, size, same, number = (tensor[..., list(own), :].sum(-2) for tensor in vars(sums).values())
    movement = _relative(moved, size)
    is_known = sums.number > 0 if trains is None else (sums.number > 0) & trains[..., None].bool()
    by_role = _relative(sums.moved, sums.size).masked_fill(~is_known, torch.nan)
    # Nothing is equal to NaN, but of weights without a finite past nothing is known.
    return HeadMovement(movement, (same / number).masked_fill(movement.isnan(), torch.nan), by_role)


def _relative(moved: Tensor, size: Tensor) -> Tensor:
    return torch.where(moved == 0, 0, torch.where(size == 0, torch.nan, (moved / size).sqrt()))


@torch.no_grad()
def not_finite(weight: Tensor) -> Tensor:
    """Return which heads have a weight that is NaN or infinite.

    Args:
        weight: ``(..., H, width, features)``.

    Returns:
        ``(..., H)``, boolean.
    """
    return (weight * 0).sum((-2, -1)).isnan()  # 0 * x is NaN for NaN and infinity
