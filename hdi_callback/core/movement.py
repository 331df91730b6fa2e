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
    """

    movement: Tensor
    unchanged: Tensor


@dataclass(frozen=True)
class MovementSums:
    """What the movement of heads is made of, by head ``(..., H)``."""

    moved: Tensor  # squared norm of the change
    size: Tensor  # squared norm before
    same: Tensor  # share of weights that are exactly what they were


@torch.no_grad()
def movement_sums(now: Sequence[Tensor], before: Sequence[Tensor]) -> MovementSums:
    """Compare the weights of heads with those of an earlier reading.

    Args:
        now: stacks ``(roles, ..., H, width, features)``, of the roles of one shape each.
        before: the same at an earlier reading; in any type, on any device.

    Returns:
        What `movement_of` takes, in float32 or wider.
    """
    moved = size = same = torch.zeros((), device=now[0].device)
    for weight, last in zip(now, before):
        wide = torch.promote_types(weight.dtype, torch.float32)
        last = last.to(weight.device, wide, non_blocking=True)
        change = weight.to(wide) - last
        moved = moved + torch.linalg.vector_norm(change, dim=(-2, -1)).square().sum(0)
        size = size + torch.linalg.vector_norm(last, dim=(-2, -1)).square().sum(0)
        same = same + change.eq_(0).sum((0, -2, -1))  # as floats, in place: summing booleans is six times as slow
    return MovementSums(moved, size, same / sum(len(weight) * weight.shape[-2:].numel() for weight in now))


@torch.no_grad()
def movement_of(sums: MovementSums) -> HeadMovement:
    """Divide the sums."""
    movement = torch.where(sums.size == 0, torch.nan, (sums.moved / sums.size).sqrt())
    return HeadMovement(torch.where(sums.moved == 0, 0, movement), sums.same)


@torch.no_grad()
def not_finite(weight: Tensor) -> Tensor:
    """Return which heads have a weight that is NaN or infinite.

    Args:
        weight: ``(..., H, width, features)``.

    Returns:
        ``(..., H)``, boolean.
    """
    return (weight * 0).sum((-2, -1)).isnan()  # 0 * x is NaN for NaN and infinity
