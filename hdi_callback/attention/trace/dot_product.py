"""The scores of torch's `scaled_dot_product_attention`, which it computes and does not show."""

from __future__ import annotations

import torch
from torch import Tensor


def dot_product_scores(
    query: Tensor,
    key: Tensor,
    attn_mask: Tensor | None = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    hidden: float = -torch.inf,
) -> Tensor:
    """Compute the scores before the softmax.

    Args:
        query: ``(..., queries, width)``.
        key: ``(..., keys, width)``.
        attn_mask: broadcastable to the scores: True where a query may attend to a key, or numbers that are added.
        is_causal: each query attends to the keys up to its own position.
        scale: ``1 / sqrt(width)`` by default.
        hidden: the score of a key that a boolean mask hides.

    Returns:
        ``(..., queries, keys)``.
    """
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    if attn_mask is None:
        return scores
    return scores.masked_fill(~attn_mask, hidden) if attn_mask.dtype == torch.bool else scores + attn_mask


def repeated_for_queries(query: Tensor, *shared: Tensor) -> tuple[Tensor, ...]:
    """Repeat grouped key and value heads, ``(..., heads, tokens, width)``, so that each query head has its own.

    Args:
        query: the queries.
        shared: keys, values.

    Returns:
        Each of `shared` with as many heads as the queries.
    """
    return tuple(tensor.repeat_interleave(query.shape[-3] // tensor.shape[-3], -3) for tensor in shared)
