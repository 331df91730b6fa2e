"""Pairs of heads: their means, the largest of them, and the chunks in which products over all pairs are formed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

TEMPORARY = 2**26  # bytes of temporary memory that a product over all pairs of heads may take: 64 MiB


def live_pairs(dead: Tensor) -> Tensor:
    """Return which pairs are of two different live heads, ``(..., H, H)``."""
    live = ~dead
    eye = torch.eye(dead.shape[-1], dtype=torch.bool, device=dead.device)
    return live[..., :, None] & live[..., None, :] & ~eye


def mean_over_pairs(matrix: Tensor, pairs: Tensor) -> Tensor:
    """Average a matrix ``(..., H, H)`` over the marked pairs; NaN where there is none."""
    return torch.where(pairs, matrix, 0).sum((-2, -1)) / pairs.sum((-2, -1))


def largest_pair(matrix: Tensor, pairs: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest entry of a symmetric matrix ``(..., H, H)`` over the marked pairs, and its two heads.

    They are ``(..., 2)``, in ascending order; NaN and -1 where there is none.
    """
    masked = torch.where(pairs, matrix, -torch.inf)
    each, nearest = masked.max(-1)
    worst, first = each.max(-1)
    second = nearest.gather(-1, first[..., None])[..., 0]
    both = torch.stack([torch.minimum(first, second), torch.maximum(first, second)], -1)
    is_known = worst.isfinite()
    return torch.where(is_known, worst, torch.nan), torch.where(is_known[..., None], both, -1)


def at_least(rows: Tensor) -> int:
    """Return in how many chunks the product of the rows of heads ``(L, H, k, d)`` is formed at least."""
    # Eight chunks of heads, each against all from its first one on, save 7/16 of a symmetric product.
    return 8 if rows.is_cpu and rows.numel() >= 2**15 else 1


def head_chunks(heads: int, bytes_of_head: int, *, at_least: int = 1) -> Iterator[slice]:
    """Split heads into chunks whose temporaries fit into `TEMPORARY`, one head each at the least."""
    step = max(1, min(-(-heads // at_least), TEMPORARY // max(1, bytes_of_head)))
    for start in range(0, heads, step):
        yield slice(start, min(start + step, heads))


def symmetric(heads: int, chunks: Sequence[tuple[slice, Tensor]]) -> Tensor:
    """Join the rows of chunks of heads, each from its first head on, and mirror them: ``(..., H, H)``."""
    blocks = chunks[0][1]
    if len(chunks) == 1:
        return blocks
    matrix = blocks.new_empty(*blocks.shape[:-2], heads, heads)
    for part, blocks in chunks:
        matrix[..., part, part.start :] = blocks
        matrix[..., part.start :, part] = blocks.mT
    return matrix
