r"""Attention rows of sampled queries -> `RowSums` -> `RowMetrics`.

A head averages values with the row :math:`a_h(q)` over the n keys that query q sees, as a Nadaraya-Watson estimator
does with its kernel. Sums over queries add up over chunks, sequences and ranks, and are divided once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from hdi_callback.core.pairs import live_pairs, mean_over_pairs
from hdi_callback.errors import ShapeError

PATTERN = 32
"""Rows and columns of `RowMetrics.pattern`."""

_PIECE = 2048  # products that are added one after the other: of longer sums float32 keeps five digits


@dataclass(frozen=True)
class RowMetrics:
    r"""Statistics of the attention of a layer's heads, averaged over queries; NaN (positions: -1) where not measured.

    Attributes:
        queries: number of queries that count.
        entropy: ``(H,)``, mean of the entropy over log n: 1 uniform, 0 one token.
        sink: ``(H,)``, the largest mean attention that one key position gets.
        sink_position: ``(H,)``, that position.
        alike: ``(H, H)``, :math:`A_{hg} / \sqrt{A_{hh} A_{gg}}` with :math:`A_{hg} = \operatorname{mean}_q \langle
            a_h(q), a_g(q) \rangle` of rows without their uniform part: whether two heads attend alike beyond both being
            flat; in [-1, 1], NaN for a head that is flat to rounding.
        alike_mean: mean of `alike` over the pairs of heads that are not flat.
        logit: ``(H,)``, the largest score of a sampled query less the mean of all keys that it sees: what softmax does
            not ignore.
        keys: mean number of visible keys, over queries that see one of several keys.
        ahead: ``(H,)``, mean attention to keys behind the query: 0 under a causal mask.
        pattern: ``(H, 32, 32)``, mean attention from queries in a part of the sequence to keys in a part of it; of up
            to 32 keys a part is one token. NaN in rows of which no query was sampled.
    """

    queries: Tensor
    entropy: Tensor
    sink: Tensor
    sink_position: Tensor
    alike: Tensor
    alike_mean: Tensor
    logit: Tensor
    keys: Tensor
    ahead: Tensor
    pattern: Tensor


@dataclass(frozen=True)
class RowSums:
    """Sums over queries of the statistics in `RowMetrics`; all add up over disjoint queries, but `MAXIMA`."""

    queries: Tensor  # ``()``, number of queries that count
    entropy: Tensor  # ``(H,)``, sum of the normalised entropies
    columns: Tensor  # ``(H, keys)``, sum of the rows
    centred: Tensor  # ``(H, H)``, sum of the inner products of rows without their uniform part
    logit: Tensor  # ``(H,)``, the largest score less the mean; minus infinity where there is none
    seeing: Tensor  # ``()``, number of queries that see a key, where there are several keys
    visible: Tensor  # ``()``, sum of the numbers of keys that they see, mean over heads
    placed: Tensor  # ``()``, number of them whose positions among the keys are known
    ahead: Tensor  # ``(H,)``, sum of their attention to later keys
    pattern: Tensor  # ``(H, 32, 32)``, sum of the attention from queries in a part of the sequence to keys in one
    in_part: Tensor  # ``(32,)``, number of queries that count in each part of the sequence

    MAXIMA: ClassVar[frozenset[str]] = frozenset({"logit"})

    def __add__(self, later: RowSums) -> RowSums:
        """Join disjoint queries of the same heads; the shorter key axis is padded."""
        keys = max(self.columns.shape[-1], later.columns.shape[-1])
        ours, theirs = self.padded(keys), later.padded(keys)
        added = {item.name: getattr(ours, item.name) + getattr(theirs, item.name) for item in fields(RowSums)}
        return RowSums(**{**added, "logit": torch.maximum(self.logit, later.logit)})

    def padded(self, keys: int) -> RowSums:
        """Widen the columns to a number of keys, so that shapes agree over ranks."""
        return replace(self, columns=F.pad(self.columns, (0, keys - self.columns.shape[-1])))


@torch.no_grad()
def attention_rows(
    weights: Tensor,
    visible: Tensor | None = None,
    *,
    logits: Tensor | None = None,
    positions: Tensor | None = None,
    layers: bool = False,
) -> RowSums:
    """Add up the rows of attention of some queries of one layer, or of several layers at once.

    Args:
        weights: ``(..., H, queries, keys)``, attention of each query to each key; dimensions in front of the heads are
            further queries. Rows that add up to less than 1 (learned sinks) are taken as they are.
        visible: boolean, broadcastable to `weights`: True where that query sees that key. A query to leave out sees no
            key. By default the keys whose score is not masked; without `logits` all.
        logits: as `weights`, the scores after scale, softcap and bias; masked ones are not read.
        positions: ``(queries,)``, positions of the queries among the keys, where both are of one sequence.
        layers: the first dimension is that of layers, which are not added up.

    Returns:
        Their sums, in float32 or wider; of several layers stacked in front.

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
    sees = visible_keys.sum(-1).to(wide.dtype)  # (layers, sequences, H or 1, queries)
    # A query counts for all heads or for none, so that pairs of heads are compared on the same queries; and not where
    # it has no choice.
    seeing = (sees > 0).all(-2) & (keys > 1)
    counts = (sees >= 2).all(-2, keepdim=True)
    mask = visible_keys & counts[..., None]
    a = torch.where(mask, wide, 0)
    total, n = torch.where(counts, a.sum(-1), 1), torch.where(counts, sees, 1)
    centred = torch.where(mask, a - (total / n)[..., None], 0)
    # What remains of a uniform row is rounding, which may correlate between two heads.
    rounding = 2 * torch.finfo(weights.dtype).eps * torch.linalg.vector_norm(a, dim=-1)
    is_flat = torch.linalg.vector_norm(centred, dim=-1) <= rounding
    centred = centred.masked_fill(is_flat[..., None], 0)
    entropy = torch.special.entr(a).sum(-1) / torch.where(counts, n, 2).log()
    ahead = wide.new_zeros(count, H)
    if positions is not None:
        later = (
            visible_keys & seeing[..., None, :, None] & (torch.arange(keys, device=wide.device) > positions[:, None])
        )
        ahead = torch.where(later, wide, 0).sum((1, 3, 4))
    of_sequences = a.sum(1)
    pattern, in_part = wide.new_zeros(count, H, PATTERN, PATTERN), wide.new_zeros(count, PATTERN)
    if positions is not None:
        of_queries, of_keys = (_in_parts(at, keys, wide) for at in (positions, torch.arange(keys, device=wide.device)))
        pattern = of_queries.mT @ of_sequences @ of_keys
        in_part = counts.sum((1, 2)).to(wide.dtype) @ of_queries
    number_seeing = seeing.sum((1, 2)).to(wide.dtype)
    sums = RowSums(
        queries=counts.sum((1, 2, 3)).to(wide.dtype),
        entropy=torch.where(counts, entropy, 0).sum((1, 3)),
        columns=of_sequences.sum(2),
        centred=_inner_products(centred),
        logit=_largest(None if logits is None else arranged(logits), visible_keys, wide),
        seeing=number_seeing,
        visible=torch.where(seeing, sees.mean(-2), 0).sum((1, 2)),
        placed=number_seeing * float(positions is not None),
        ahead=ahead,
        pattern=pattern,
        in_part=in_part,
    )
    return sums if layers else RowSums(**{item.name: getattr(sums, item.name)[0] for item in fields(sums)})


@torch.no_grad()
def row_metrics(sums: RowSums) -> RowMetrics:
    """Divide the sums over queries by their number.

    Args:
        sums: of one layer, or of several, stacked in front.

    Returns:
        The averages; NaN where no query counts.
    """
    queries = sums.queries[..., None]
    # One more column, as an empty tensor has no largest entry.
    sink, position = F.pad(sums.columns, (0, int(sums.columns.shape[-1] == 0))).max(-1)
    alike = _cosine(sums.centred)
    # Flat heads are like none. NaN stays in, and shows.
    not_flat = live_pairs(sums.centred.diagonal(dim1=-2, dim2=-1) == 0)
    return RowMetrics(
        queries=sums.queries,
        entropy=sums.entropy / queries,
        sink=sink / queries,
        sink_position=torch.where(queries > 0, position, -1),
        alike=alike,
        alike_mean=mean_over_pairs(alike, not_flat),
        logit=torch.where(sums.logit == -torch.inf, torch.nan, sums.logit),
        keys=sums.visible / sums.seeing,
        ahead=sums.ahead / sums.placed[..., None],
        pattern=sums.pattern / sums.in_part[..., None, :, None],
    )


def _in_parts(places: Tensor, length: int, like: Tensor) -> Tensor:
    """Return ``(places, 32)``, 1 at the part of the sequence in which each place is."""
    parts = (places * PATTERN // length if length > PATTERN else places).clamp(max=PATTERN - 1)
    return (parts[:, None] == torch.arange(PATTERN, device=like.device)).to(like.dtype)


def _seen(weights: Tensor, visible: Tensor | None, logits: Tensor | None) -> Tensor:
    """Return which keys each query sees, with all dimensions of the rows; a mask shared by heads is not expanded."""
    if visible is None:
        visible_keys = torch.ones((), dtype=torch.bool, device=weights.device)
        if logits is not None:
            visible_keys = logits > torch.finfo(logits.dtype).min / 2
    else:
        visible_keys = visible
    return visible_keys[(None,) * (weights.dim() - visible_keys.dim())].expand(
        *weights.shape[:-3], -1, *weights.shape[-2:]
    )


def _largest(logits: Tensor | None, visible_keys: Tensor, wide: Tensor) -> Tensor:
    """Return how far each head's scores of a query rise above their mean at most; minus infinity if there are none."""
    if logits is None or logits.numel() == 0:
        return wide.new_full((wide.shape[0], wide.shape[2]), -torch.inf)
    scores = logits.to(wide.dtype)
    mean = torch.where(visible_keys, scores, 0).sum(-1) / visible_keys.sum(-1).clamp(min=1)
    return (torch.where(visible_keys, scores, -torch.inf).amax(-1) - mean).amax((1, 3))


def _inner_products(rows: Tensor) -> Tensor:
    """Inner products (layers, H, H) of the rows (layers, sequences, H, queries, keys) of every two heads."""
    flat = rows.flatten(-2)
    count = -(-flat.shape[-1] // _PIECE)
    pieces = F.pad(flat, (0, count * _PIECE - flat.shape[-1])).unflatten(-1, (count, _PIECE)).transpose(2, 3)
    products: Tensor = (pieces @ pieces.mT).sum((1, 2))
    return products


def _cosine(product: Tensor) -> Tensor:
    """Cosines of inner products (..., H, H); 1 on the diagonal, NaN for heads of norm 0."""
    own = product.diagonal(dim1=-2, dim2=-1).sqrt()
    cosine = product / (own[..., :, None] * own[..., None, :])
    eye = torch.eye(product.shape[-1], dtype=torch.bool, device=product.device)
    return torch.where(eye & cosine.isfinite(), 1, cosine.clamp(-1, 1))
