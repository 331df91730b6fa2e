r"""Attention rows of sampled queries -> `RowSums` -> `RowMetrics`.

A head averages values with the row :math:`a_h(q)` over the n keys that query q sees, as a Nadaraya-Watson estimator
does with its kernel. Sums over queries add up over chunks, sequences and ranks, and are divided once.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from hdi_callback.errors import ShapeError

PATTERN = 32  # rows and columns of `RowMetrics.pattern`


class RowMetrics(NamedTuple):
    """Statistics of the attention of a layer's heads, averaged over queries; NaN where not measured."""

    entropy: Tensor  # ``(H,)``, mean of the entropy over log n: 1 uniform, 0 one token
    sink: Tensor  # ``(H,)``, mean attention to the first token that a query sees: 1 if all queries attend to it alone
    logit: Tensor  # ``(H,)``, largest score of a query less the mean of the keys that it sees, which softmax ignores
    ahead: Tensor  # ``(H,)``, mean attention to keys behind the query: 0 under a causal mask
    # ``(H, 32, 32)``, mean attention from queries in a part of the sequence to keys in a part of it; of up to 32 keys a
    # part is one token. NaN in rows of which no query was sampled.
    pattern: Tensor


class RowSums(NamedTuple):
    """Sums over queries of the statistics in `RowMetrics`; all add up over disjoint queries, but `largest`."""

    queries: Tensor  # ``()``, number of queries that see two keys, which alone have an entropy
    entropy: Tensor  # ``(H,)``, sum of their normalised entropies
    first: Tensor  # ``(H,)``, sum of their attention to the first key that they see
    seeing: Tensor  # ``()``, number of queries that see a key, where there are several keys
    ahead: Tensor  # ``(H,)``, sum of their attention to later keys; NaN where positions are not known
    pattern: Tensor  # ``(H, 32, 32)``, sum of the attention from queries in a part of the sequence to keys in one
    in_part: Tensor  # ``(32,)``, number of queries in each part of the sequence
    largest: Tensor  # ``(H,)``, the largest score less the mean; minus infinity where there is none

    def __add__(self, later: RowSums) -> RowSums:  # type: ignore[override]
        """Join disjoint queries of the same heads."""
        added = RowSums(*(ours + theirs for ours, theirs in zip(self, later)))
        return added._replace(largest=torch.maximum(self.largest, later.largest))


@torch.no_grad()
def attention_rows(
    weights: Tensor,
    visible: Tensor | None = None,
    *,
    logits: Tensor | None = None,
    positions: Tensor | None = None,
    layers: bool = False,
) -> RowSums:
    """Return sums over the rows of attention of some queries of one layer, or of several layers at once.

    Weights, and the scores after scale, softcap and bias, are ``(..., H, queries, keys)``; dimensions in front of the
    heads are further queries, but the first with `layers`. Rows that add up to less than 1 (learned sinks) are taken
    as they are. Where `visible` is false a query does not see a key; a query to leave out sees none. By default those
    are seen whose score is not masked. Positions of queries are among the keys, where both are of one sequence.

    Raises:
        ShapeError: if `weights` has fewer than three dimensions, or `logits` another shape.

    Example:
        >>> sums = attention_rows(torch.full((2, 3, 4), 0.25))  # two heads, three queries, uniform over four keys
        >>> row_metrics(sums).entropy.tolist()
        [1.0, 1.0]
    """
    if weights.dim() < 3 + layers or (logits is not None and logits.shape != weights.shape):
        raise ShapeError(
            "Attention rows have the shape (..., heads, queries, keys), and logits the same; got "
            f"{tuple(weights.shape)} and {None if logits is None else tuple(logits.shape)}."
        )
    *batch, H, queries, keys = weights.shape
    count, sequences = (batch[0], math.prod(batch[1:])) if layers else (1, math.prod(batch))

    def arranged(x: Tensor) -> Tensor:
        return x.reshape(count, sequences, x.shape[-3], queries, keys)  # (layers, sequences, heads, queries, keys)

    visible_keys = arranged(_seen(weights, visible, logits))
    wide = arranged(weights.to(torch.promote_types(weights.dtype, torch.float32)))
    sees = visible_keys.sum(-1, dtype=wide.dtype)  # (layers, sequences, H or 1, queries)
    # A query counts for all heads or for none.
    fewest = sees.amin(-2, keepdim=True)
    seeing, counts = (fewest > 0) & (keys > 1), fewest > 1
    a = torch.where(visible_keys, wide, 0)
    # At a quarter of the time of `torch.special.entr`; of negative weights it is not known.
    entropy = (a.clamp_min(torch.finfo(a.dtype).tiny).log_() * a).sum(-1) / -torch.where(counts, sees, 2).log()
    entropy = torch.where(a.amin(-1) < 0, torch.nan, entropy)
    first = visible_keys.byte().argmax(-1, keepdim=True).expand(*a.shape[:-1], 1)
    ahead = pattern = in_part = wide.new_full((count, 1), torch.nan)
    if positions is None:
        ahead, pattern = ahead.expand(-1, H), ahead[..., None, None].expand(-1, H, PATTERN, PATTERN)
        in_part = in_part.expand(-1, PATTERN)
    else:
        places, of_keys = _places(keys, wide.device, wide.dtype)
        ahead = torch.where(places > positions[:, None], a, 0).sum(-1)
        ahead = torch.where(seeing, ahead, 0).sum((1, 3))
        of_queries = _in_parts(positions, keys, wide.dtype)
        pattern = of_queries.mT @ (a * counts[..., None]).sum(1) @ of_keys
        in_part = counts.sum((1, 2), dtype=wide.dtype) @ of_queries
    sums = RowSums(
        queries=counts.sum((1, 2, 3), dtype=wide.dtype),
        entropy=torch.where(counts, entropy, 0).sum((1, 3)),
        first=torch.where(counts, a.gather(-1, first)[..., 0], 0).sum((1, 3)),
        seeing=seeing.sum((1, 2, 3), dtype=wide.dtype),
        ahead=ahead,
        pattern=pattern,
        in_part=in_part,
        largest=_largest(None if logits is None else arranged(logits), visible_keys, sees, wide),
    )
    return sums if layers else RowSums(*(total[0] for total in sums))


@torch.no_grad()
def row_metrics(sums: RowSums) -> RowMetrics:
    """Return the averages over queries of one layer, or of several, stacked in front; NaN where no query counts."""
    return RowMetrics(
        entropy=sums.entropy / sums.queries[..., None],
        sink=sums.first / sums.queries[..., None],
        logit=torch.where(sums.largest == -torch.inf, torch.nan, sums.largest),
        ahead=sums.ahead / sums.seeing[..., None],
        pattern=sums.pattern / sums.in_part[..., None, :, None],
    )


@lru_cache(maxsize=16)
def _places(length: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the places in a sequence, and the parts in which they are."""
    places = torch.arange(length, device=device)
    return places, _in_parts(places, length, dtype)


def _in_parts(places: Tensor, length: int, dtype: torch.dtype) -> Tensor:
    """Return ``(places, 32)``, 1 at the part of the sequence in which each place is."""
    parts = (places * PATTERN // length if length > PATTERN else places).clamp(max=PATTERN - 1)
    return (parts[:, None] == torch.arange(PATTERN, device=places.device)).to(dtype)


def _seen(weights: Tensor, visible: Tensor | None, logits: Tensor | None) -> Tensor:
    """Return which keys each query sees, with all dimensions of the rows; a mask shared by heads is not expanded."""
    if visible is None and logits is not None:
        visible = logits > torch.finfo(logits.dtype).min / 2
    elif visible is None:
        visible = torch.ones((), dtype=torch.bool, device=weights.device)
    shared = visible[(None,) * (weights.dim() - visible.dim())]
    return shared.expand(*weights.shape[:-3], -1, *weights.shape[-2:])


def _largest(logits: Tensor | None, visible_keys: Tensor, sees: Tensor, wide: Tensor) -> Tensor:
    """Return how far each head's scores of a query rise above their mean at most; minus infinity if there are none."""
    if logits is None or logits.numel() == 0:
        return wide.new_full((wide.shape[0], wide.shape[2]), -torch.inf)
    scores = logits.to(wide.dtype)
    mean = torch.where(visible_keys, scores, 0).sum(-1) / sees.clamp(min=1)
    return (torch.where(visible_keys, scores, -torch.inf).amax(-1) - mean).amax((1, 3))
