"""Reductions of a matrix over pairs of heads: its mean, its largest entry, and its clusters of heads."""

from __future__ import annotations

import torch
from torch import Tensor


def live_pairs(dead: Tensor) -> Tensor:
    """Mark the pairs of two different live heads.

    Args:
        dead: ``(..., H)``.

    Returns:
        ``(..., H, H)``, boolean.
    """
    live = ~dead
    eye = torch.eye(dead.shape[-1], dtype=torch.bool, device=dead.device)
    return live[..., :, None] & live[..., None, :] & ~eye


def mean_over_pairs(matrix: Tensor, pairs: Tensor) -> Tensor:
    """Average over the marked pairs.

    Args:
        matrix: ``(..., H, H)``, symmetric.
        pairs: ``(..., H, H)``, boolean.

    Returns:
        ``(...)``; NaN where there is no pair.
    """
    return torch.where(pairs, matrix, 0).sum((-2, -1)) / pairs.sum((-2, -1))


def largest_pair(matrix: Tensor, pairs: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Find the largest entry over the marked pairs, and for each head its largest neighbour.

    Args:
        matrix: ``(..., H, H)``, symmetric.
        pairs: ``(..., H, H)``, boolean.

    Returns:
        The largest entry ``(...)``, its two heads ``(..., 2)`` in ascending order, for each head the head of its
        largest entry ``(..., H)``, and that entry ``(..., H)``; -1 and NaN where there is none.
    """
    masked = torch.where(pairs, matrix, -torch.inf)
    each, nearest = masked.max(-1)
    worst, first = each.max(-1)
    second = nearest.gather(-1, first[..., None])[..., 0]
    both = torch.stack([torch.minimum(first, second), torch.maximum(first, second)], -1)
    known = worst.isfinite()
    return (
        torch.where(known, worst, torch.nan),
        torch.where(known[..., None], both, -1),
        torch.where(each.isfinite(), nearest, -1),
        torch.where(each.isfinite(), each, torch.nan),
    )


def clusters(matrix: Tensor, pairs: Tensor, limit: float | Tensor) -> Tensor:
    """Join the heads that a chain of entries at or above `limit` connects.

    Args:
        matrix: ``(..., H, H)``, symmetric.
        pairs: ``(..., H, H)``, boolean.
        limit: entries from here on connect; a number, or one that broadcasts to the matrix.

    Returns:
        ``(..., H)``, the smallest head of each head's cluster: its own number for a head alone.
    """
    H = matrix.shape[-1]
    joined = pairs & (matrix >= limit) | torch.eye(H, dtype=torch.bool, device=matrix.device)
    reach = joined.float()
    # Each product doubles the length of the chains; nothing here depends on a value.
    for _ in range(max(1, (H - 1).bit_length())):
        reach = ((reach @ reach) > 0).float()
    return reach.argmax(-1)
