"""Movement of the heads' weights between two readings, and weights that are not finite."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hdi_callback.errors import ShapeError


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


@torch.no_grad()
def head_movement(now: Sequence[Tensor], before: Sequence[Tensor]) -> HeadMovement:
    """Compare the weights of heads with those of an earlier reading.

    Args:
        now: weights ``(..., H, width, features)`` of the same heads: their queries, outputs, and keys and values where
            no heads share them.
        before: the same at an earlier reading; in any type, on any device.

    Returns:
        The movement, in float32 or wider.

    Raises:
        ShapeError: if the shapes differ.

    Example:
        >>> moved = head_movement([torch.full((2, 1, 4), 3.0)], [torch.full((2, 1, 4), 2.0)])
        >>> moved.movement.tolist(), moved.unchanged.tolist()
        ([0.5, 0.5], [0.0, 0.0])
    """
    if [w.shape for w in now] != [w.shape for w in before]:
        raise ShapeError(
            f"Two readings of the same weights have the same shapes, got {[tuple(w.shape) for w in now]} and "
            f"{[tuple(w.shape) for w in before]}."
        )
    moved = size = same = torch.zeros((), device=now[0].device)
    for weight, last in zip(now, before):
        wide = torch.promote_types(weight.dtype, torch.float32)
        last = last.to(weight.device, wide, non_blocking=True)
        change = weight.to(wide) - last
        moved = moved + torch.linalg.vector_norm(change, dim=(-2, -1)).square()
        size = size + torch.linalg.vector_norm(last, dim=(-2, -1)).square()
        same = same + change.eq_(0).sum((-2, -1))  # as floats, in place: summing booleans is six times as slow
    count = sum(weight.shape[-2:].numel() for weight in now)
    movement = torch.where(size == 0, torch.nan, (moved / size).sqrt())
    return HeadMovement(torch.where(moved == 0, 0, movement), same / count)


@torch.no_grad()
def not_finite(weight: Tensor) -> Tensor:
    """Return which heads have a weight that is NaN or infinite.

    Args:
        weight: ``(..., H, width, features)``.

    Returns:
        ``(..., H)``, boolean.
    """
    return (weight * 0).sum((-2, -1)).isnan()  # 0 * x is NaN for NaN and infinity
