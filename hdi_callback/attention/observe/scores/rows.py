"""Attention rows: the weights of a few queries over all keys that they see, as the model computes them.

Where the model forms its weights itself, they are taken as they are, after the softmax and before dropout. Where a
fused kernel keeps them to itself, they are computed for the sampled queries from the inputs of the kernel. Either way
what is taken is bounded: pieces of at most `BUDGET` numbers, each passed on before the next one is formed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hdi_callback.attention.observe.scores.axes import Axes, spread
from hdi_callback.attention.observe.scores.masks import HIDDEN, MaskTerm, hidden_by

BUDGET = 2**22
"""Numbers in one piece."""


@dataclass(frozen=True, eq=False)
class RowChunk:
    """Weights of some queries.

    Attributes:
        weights: ``(S, H, q, keys)``, float32, before dropout; a row sums to less than 1 where part of the softmax goes
            to learned sinks, and is zero where a query sees no key or is padding.
        visible: ``(S, 1 or H, q, keys)``, True where a query sees a key.
        logits: the input of the softmax, like `weights`, masked places included; None if it is not known.
        sequences: ``(S,)``, numbers of the sequences in the batch.
        positions: ``(q,)``, positions of the queries.
        queries: how many queries a sequence has, those that are not read among them.
    """

    weights: Tensor
    visible: Tensor
    logits: Tensor | None
    sequences: Tensor
    positions: Tensor
    queries: int


@dataclass(frozen=True, eq=False)
class RowPlan:
    """The queries that are read.

    Attributes:
        axes: the leading dimensions of queries and scores.
        queries: how many queries there are in a sequence.
        keys: how many keys.
        sequences: ``(S,)``, the sequences that are read.
        positions: ``(q,)``, the queries of each that are read.
        terms: what hides keys.
        left_out: ``(S, queries)``, queries that are padding; None if none is known.
    """

    axes: Axes
    queries: int
    keys: int
    sequences: Tensor
    positions: Tensor
    terms: tuple[MaskTerm, ...] = ()
    left_out: Tensor | None = None

    @classmethod
    def of(
        cls,
        axes: Axes,
        queries: int,
        keys: int,
        device: torch.device,
        *,
        terms: Sequence[MaskTerm] = (),
        max_queries: int = 64,
        left_out: Tensor | None = None,
    ) -> RowPlan:
        """Choose queries, and find their padding.

        Args:
            axes: the leading dimensions.
            queries: how many queries there are in a sequence.
            keys: how many keys.
            device: where the scores are.
            terms: what hides keys.
            max_queries: how many queries to read over all sequences.
            left_out: ``(sequences, queries)``, True at queries that are padding. Which keys are hidden follows from
                `terms` alone.

        Returns:
            The plan.
        """
        sequences = spread(max(1, min(max_queries, max(8, max_queries // max(queries, 1)))), axes.sequences, device)
        positions = spread(max(1, max_queries // max(len(sequences), 1)), queries, device)
        some = None if left_out is None else left_out[sequences]
        return cls(axes, queries, keys, sequences, positions, tuple(terms), some)

    def pieces(self, per_query: int, per_sequence: int = 0) -> Iterator[RowPlan]:
        """Cut the plan so that no piece needs more than the budget.

        Args:
            per_query: numbers that one query of one sequence needs.
            per_sequence: numbers that one sequence needs besides.

        Yields:
            Plans of fewer sequences and queries.
        """
        per_all = per_query * len(self.positions) + per_sequence
        together = max(1, BUDGET // max(per_all, 1))
        step = max(1, BUDGET // max(per_query, 1))
        for start in range(0, len(self.sequences), together):
            some = slice(start, start + together)
            part = replace(
                self,
                sequences=self.sequences[some],
                left_out=None if self.left_out is None else self.left_out[some],
            )
            for first in range(0, len(self.positions), step):
                yield replace(part, positions=self.positions[first : first + step])

    def hidden(self) -> Tensor | None:
        """Return which keys the terms hide from the chosen queries.

        Returns:
            ``(S or 1, 1 or heads, q, keys or 1)``; None without terms.
        """
        return hidden_by(self.terms, self.axes, self.sequences, self.positions, self.keys)

    def visible(self, hidden: Tensor | None) -> Tensor:
        """Return which keys the chosen queries see.

        Args:
            hidden: what `hidden` gives.

        Returns:
            ``(S, 1 or heads, q, keys)``; False throughout for queries that are padding.
        """
        heads = 1 if hidden is None else hidden.shape[1]
        shape = (len(self.sequences), heads, len(self.positions), self.keys)
        none_hidden = torch.ones((), dtype=torch.bool, device=self.positions.device)
        visible = (none_hidden if hidden is None else ~hidden).expand(shape)
        if self.left_out is not None:
            visible = visible & ~self.left_out[:, None, self.positions, None]
        return visible


def rows_of_weights(
    weights: Tensor,
    logits: Tensor | None,
    plan: RowPlan,
    *,
    first: int = 0,
    shift: Tensor | None = None,
    hides_by_scores: bool = False,
) -> Iterator[RowChunk]:
    """Read rows where the model has them.

    Args:
        weights: ``(*lead, queries, columns)``, with at least as many columns as keys.
        logits: the input of the softmax, of the same shape, or None.
        plan: which rows.
        first: column of the first key.
        shift: what was subtracted from the logits before, ``(*lead, queries, 1)``.
        hides_by_scores: not all that hides keys is among the terms: keys far below the largest logit are hidden too.

    Yields:
        Pieces of a bounded size.
    """
    axes = plan.axes
    opened, raw = axes.opened(weights), None if logits is None else axes.opened(logits)
    moved = None if shift is None else axes.opened(shift)
    if opened is None:
        return
    for part in plan.pieces(opened.shape[-1] * axes.heads):
        keys = slice(first, first + part.keys)
        rows = axes.rows(opened, part.sequences, part.positions)[..., keys].float()
        scores = None if raw is None else axes.rows(raw, part.sequences, part.positions)[..., keys].float()
        if scores is not None and moved is not None:
            scores = scores + axes.rows(moved, part.sequences, part.positions).float()
        visible = part.visible(part.hidden())
        if hides_by_scores and scores is not None:
            visible = visible & (scores > scores.amax(-1, keepdim=True) + HIDDEN)
        yield RowChunk(_of_visible(rows, visible), visible, scores, part.sequences, part.positions, part.queries)


def rows_of_operands(query: Tensor, key: Tensor, plan: RowPlan, scale: float) -> Iterator[RowChunk]:
    """Compute rows from the inputs of a fused kernel.

    Args:
        query: ``(*lead, queries, width)``.
        key: ``(*lead, keys, width)``, where the dimensions of heads may hold fewer, each for as many query heads side
            by side as it takes.
        plan: which rows, and what is added and hidden.
        scale: factor of the scores.

    Yields:
        Pieces of a bounded size.
    """
    axes = plan.axes
    queries = axes.opened(query)
    key_axes = Axes(tuple(key.shape[:-2]), axes.batch) if key.dim() == query.dim() else axes
    keys = key_axes.opened(key)
    if queries is None or keys is None:
        return
    width = query.shape[-1]
    for part in plan.pieces(axes.heads * plan.keys, axes.heads * plan.keys * width):
        q = axes.rows(queries, part.sequences, part.positions).float()  # (S, H, q, width)
        k = key_axes.rows(keys, part.sequences, None).float()  # (S, G, keys, width)
        groups = k.shape[1]
        grouped = q.reshape(q.shape[0], groups, -1, *q.shape[2:])
        scores = (grouped @ k[:, :, None].mT).flatten(1, 2).mul_(scale)
        for term in part.terms:
            added = term.added(axes, part.sequences, part.positions)
            scores = scores if added is None else scores + added
        hidden = part.hidden()
        visible = part.visible(hidden)
        masked = scores if hidden is None else _hide(scores, hidden)
        weights = masked.softmax(-1)
        yield RowChunk(_of_visible(weights, visible), visible, scores, part.sequences, part.positions, part.queries)


def _hide(scores: Tensor, hidden: Tensor) -> Tensor:
    """Make the scores of hidden keys minus infinity."""
    # On a CPU to add takes a seventh of the time; NaN and infinity stay in, as they do not where they are replaced.
    if _is_on_host(scores) and bool(scores.sum().isfinite()):
        return scores + scores.new_zeros(hidden.shape).masked_fill_(hidden, -torch.inf)
    return scores.masked_fill(hidden, -torch.inf)


def _is_on_host(tensor: Tensor) -> bool:
    """Return whether the host may read a tensor without waiting for a device."""
    return tensor.device.type == "cpu" and type(tensor) is Tensor


def _of_visible(rows: Tensor, visible: Tensor) -> Tensor:
    """Zero the rows of queries without a visible key, whose softmax is 0/0 or uniform by accident."""
    sees = visible.any(-1, keepdim=True)
    if _is_on_host(sees) and bool(sees.all()):
        return rows
    return rows.masked_fill(~sees, 0.0)
