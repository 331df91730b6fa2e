"""Rows of attention of sampled queries, and norms of queries and keys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import add

import torch
from torch import Tensor

from hdi_callback.attention.capture.capture import Captured
from hdi_callback.attention.layer import AttentionLayer
from hdi_callback.core.rows import PATTERN, RowMetrics, RowSums, attention_rows, row_metrics
from hdi_callback.monitor.metrics import NORMS, ROWS
from hdi_callback.monitor.ranks import Ranks
from hdi_callback.monitor.reading import apart
from hdi_callback.monitor.sums import SumSource

POSITIONS_OVER_RANKS = 1024
"""Key positions of which several ranks add up the attention: a sink behind them is seen by one process only."""


@dataclass(frozen=True)
class NormSums:
    """Mean norms of queries and keys, weighted by the number of queries that were read."""

    count: Tensor  # number of queries
    query: Tensor  # ``(H,)``, count times the mean norm of the queries as they enter the scores
    key: Tensor  # ``(H,)``, the same of the keys

    def __add__(self, later: NormSums) -> NormSums:
        """Join the norms of two times that attention ran."""
        return NormSums(self.count + later.count, self.query + later.query, self.key + later.key)


def take_rows(
    logits: Tensor, weights: Tensor, *, positions: Tensor, visible: Tensor, norms: tuple[Tensor, Tensor] | None
) -> list[tuple[RowSums, NormSums | None]]:
    """Reduce sampled rows of some layers to sums, as `Capture` asks for."""
    sums = attention_rows(weights, visible, logits=logits, positions=positions, layers=True)
    if norms is None:
        return [(of_layer, None) for of_layer in apart(sums)]
    weighted = NormSums(sums.queries, *(sums.queries[:, None] * norm for norm in norms))
    return list(zip(apart(sums), apart(weighted)))


class AttentionRows(SumSource):
    """Entropy, sinks, scores and likeness of the heads' attention."""

    name, reads = ROWS, "rows"

    def __init__(self) -> None:
        self._positions: int | None = None

    def begin(self, layers: Sequence[AttentionLayer], captured: Mapping[str, Captured], ranks: Ranks) -> None:
        """Fix the number of positions on all ranks, whose sequences may differ in length."""
        self._positions = POSITIONS_OVER_RANKS if ranks.size > 1 else None

    def sums(self, layers: Sequence[AttentionLayer], captured: Sequence[Captured]) -> list[RowSums]:
        return [self._sums(of_layer) for of_layer in captured]

    def _sums(self, captured: Captured) -> RowSums:
        total: RowSums = reduce(add, (sums for sums, _ in captured.rows))
        if self._positions is None:
            return total
        total = total.padded(max(self._positions, total.columns.shape[-1]))
        return replace(total, columns=total.columns[..., : self._positions])

    def blank(self, layer: AttentionLayer, device: torch.device) -> RowSums:
        unseen = torch.zeros(layer.num_heads, 1, self._positions or 1, device=device)
        return attention_rows(unseen, unseen > 0)  # a query that sees no key

    def finish(self, sums: RowSums) -> RowMetrics:
        return row_metrics(sums)

    def size(self, layer: AttentionLayer) -> int:
        return layer.num_heads * (POSITIONS_OVER_RANKS + PATTERN**2 + 2 * layer.num_heads)


class QueryKeyNorms(SumSource):
    """Mean norms of queries and keys, where attention is one operation and so takes them."""

    name, reads = NORMS, "rows"

    def sums(self, layers: Sequence[AttentionLayer], captured: Sequence[Captured]) -> list[NormSums]:
        return [self._sums(layer, of_layer) for layer, of_layer in zip(layers, captured)]

    def _sums(self, layer: AttentionLayer, captured: Captured) -> NormSums:
        norms_of_runs = [norms for _, norms in captured.rows if norms is not None]
        return reduce(add, norms_of_runs) if norms_of_runs else self.blank(layer, captured.rows[0][0].entropy.device)

    def blank(self, layer: AttentionLayer, device: torch.device) -> NormSums:
        none = torch.zeros(layer.num_heads, device=device)
        return NormSums(torch.zeros((), device=device), none, none)

    def finish(self, sums: NormSums) -> NormSums:
        count = sums.count[..., None]
        return NormSums(sums.count, sums.query / count, sums.key / count)
