"""Readings of an attention while it runs: its rows, the norms of its queries and keys, its bounds."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hdi_callback.attention.observe.compare.cores import ReadRows
from hdi_callback.attention.observe.map_log import MapLog
from hdi_callback.attention.observe.module_stack import ModuleStack
from hdi_callback.attention.observe.quiet import is_plain, is_transformed
from hdi_callback.attention.observe.scores.axes import Axes, DimensionRoles, are_ambiguous, resolve
from hdi_callback.attention.observe.scores.chosen import ChosenTokens
from hdi_callback.attention.observe.scores.lineage import Scores
from hdi_callback.attention.observe.scores.masks import MaskTerm
from hdi_callback.attention.observe.scores.rows import RowChunk, RowPlan, rows_of_operands, rows_of_weights

_AXES_UNKNOWN = "its sequences and heads share a dimension, or two that are alike, and cannot be separated"
_EMPTY = "it ran on no tokens: the batch is empty"


@dataclass(frozen=True)
class SeenBefore:
    """What an earlier forward showed of an attention, where the maps before it are not recorded again.

    Attributes:
        dims: roles of its leading dimensions; None if several readings were possible.
        is_self: its maps took the same tokens for queries and keys.
        head_order: see `ReadRows`.
    """

    dims: DimensionRoles | None
    is_self: bool
    head_order: tuple[int, ...] = ()


@dataclass(eq=False)
class Request:
    """Settings of what is read of every attention.

    Attributes:
        reduce_rows: what is made of each piece of rows; results are added. None: rows are not read.
        reduce_norms: what is made of ``(..., H, length, width)`` and of what is no padding in it.
        max_queries: how many queries are read.
        keeps_samples: keep a few tokens for the comparison with claims.
        padding: ``(batch, length)``, True at tokens that are padding, or what gives it for a number of sequences and of
            queries while attention runs, or None; None if it follows from masks.
        heads: dotted path of a layer -> number of heads that it claims.
        claimed: ids of modules whose maps are kept wherever they ran.
        seen: place of an attention -> how an earlier forward, of which samples were kept, showed its dimensions.
        is_read: id of a layer's module -> whether rows are read inside it; of nested ones the innermost decides. What
            is in none is read.
    """

    reduce_rows: Callable[[RowChunk], Any] | None = None
    reduce_norms: Callable[[Tensor, Tensor | None], Any] | None = None
    max_queries: int = 64
    keeps_samples: bool = True
    padding: Tensor | Callable[[int, int], Tensor | None] | None = None
    heads: Mapping[str, int] = field(default_factory=dict)
    claimed: frozenset[int] = frozenset()
    is_read: Mapping[int, bool] = field(default_factory=dict)
    seen: Mapping[tuple[Any, ...], SeenBefore] = field(default_factory=dict)


class RowReader:
    """Read the rows, norms and bounds that a request names.

    Args:
        request: what is to be read.
        maps: the linear maps before an attention, whose numbers of tokens separate sequences from heads.
        stack: the modules that run.
    """

    def __init__(self, request: Request, maps: MapLog, stack: ModuleStack) -> None:
        self._request, self._maps, self._stack = request, maps, stack
        self.chosen = ChosenTokens()
        self.is_ambiguous = False
        self._paddings: dict[tuple[Any, ...], tuple[Tensor | None, Tensor | None]] = {}

    def forget(self) -> None:
        """Discard the state of one forward."""
        self._paddings.clear()

    def axes_of(self, lead: Sequence[int], queries: int, keys: int, *, tied: int = 1) -> Axes | None:
        """Separate sequences from heads.

        Args:
            lead: sizes of the dimensions in front of ``(queries, keys)``.
            queries: length of a sequence of queries.
            keys: length of a sequence of keys.
            tied: rows of an alignment, which have one map of weights.

        Returns:
            The role of each dimension; None if nothing decides it.
        """
        tokens = [count // tied for count in self._maps.tokens() if count % tied == 0]
        both = [count for count in tokens if queries and count % queries == 0 and count // queries * keys in tokens]
        ordered = [*both, *(count for count in tokens if count not in both)]
        around = (name for name, _ in reversed(self._stack.modules))
        claimed = next((self._request.heads[name] for name in around if name in self._request.heads), None)
        seen = None if self._request.keeps_samples else self._request.seen.get(self._stack.next_place)
        axes = None if seen is None or seen.dims is None else seen.dims.axes(lead)
        if axes is not None:
            return axes
        # One that was seen with a single sequence does not show which is outside.
        if seen is not None and (seen.dims is None or len(lead) == 1):
            return None
        self.is_ambiguous = are_ambiguous(lead, queries, ordered, claimed, keys=keys)
        return resolve(lead, queries, ordered, claimed, keys=keys)

    def of_weights(self, scores: Scores, inputs: Tensor, weights: Tensor, axis: int) -> ReadRows:
        """Read the rows of the weights of a softmax.

        Args:
            scores: where they come from.
            inputs: the input of the softmax.
            weights: its output.
            axis: dimension of the keys, negative.

        Returns:
            What was read.
        """
        if scores.query is None or scores.key is None:
            return ReadRows(unread="its softmax is of scores that are not a product of two activations")
        if axis == scores.row_axis:
            scores.query, scores.key = scores.key, scores.query
            scores.row_axis, scores.key_axis = scores.key_axis, scores.row_axis
        if scores.lost or scores.opened is not None:
            done = ", ".join(dict.fromkeys(scores.lost)) or "reshape"
            return ReadRows(
                unread=f"its scores are changed by {done} before the softmax in a way that is not supported"
            )
        if axis != scores.key_axis:
            return ReadRows(unread="its softmax is not over the dimension of the keys")
        order = (scores.row_axis, axis), (-2, -1)
        inputs, weights = inputs.movedim(*order), weights.movedim(*order)
        queries, keys = int(weights.shape[-2]), int(weights.shape[-1]) - scores.before - scores.after
        if not (is_plain(weights) and is_plain(scores.query) and is_plain(scores.key)):
            return ReadRows(unread=_of_a_kind_of_its_own(weights))
        if not queries or not keys:
            return ReadRows(unread=_EMPTY)
        if keys != scores.key.shape[-2] or queries != scores.query.shape[-2]:
            return ReadRows(unread="the columns of its softmax are not its keys")
        axes = self.axes_of(weights.shape[:-2], queries, keys, tied=scores.tied)
        shift = None if scores.shift is None else scores.shift.movedim(*order)

        def rows(plan: RowPlan) -> Iterator[RowChunk]:
            hides = bool(scores.unknown)
            return rows_of_weights(weights, inputs, plan, first=scores.before, shift=shift, hides_by_scores=hides)

        return self._read(axes, scores, rows)

    def of_operands(self, scores: Scores, unread: str) -> ReadRows:
        """Compute the rows of a fused kernel, which does not return them.

        Args:
            scores: what it takes.
            unread: why they cannot be computed; empty if they can.

        Returns:
            What was read.
        """
        query, key, scale = scores.query, scores.key, scores.scale
        assert query is not None
        assert key is not None
        assert scale is not None
        if not (is_plain(query) and is_plain(key)):
            return ReadRows(unread=_of_a_kind_of_its_own(query))
        axes = self.axes_of(query.shape[:-2], int(query.shape[-2]), int(key.shape[-2]))
        if unread:
            return ReadRows(axes, unread)
        return self._read(axes, scores, lambda plan: rows_of_operands(query.detach(), key.detach(), plan, float(scale)))

    def _read(self, axes: Axes | None, scores: Scores, rows: Callable[[RowPlan], Iterator[RowChunk]]) -> ReadRows:
        query, key, terms = scores.query, scores.key, scores.terms
        assert query is not None
        assert key is not None
        is_empty = not query.numel() or not key.numel()
        if axes is None:
            return ReadRows(unread=_EMPTY if is_empty else _AXES_UNKNOWN)
        request, seen = self._request, self._request.seen.get(self._stack.next_place)
        is_self = self._maps.have_one_source() if request.keeps_samples or seen is None else seen.is_self
        read = ReadRows(axes, is_self=is_self, dims=DimensionRoles.of(axes, query.dim() - 2))
        read.is_ambiguous = self.is_ambiguous
        read.bias, is_known = _largest(scores.biases, query.device)
        read.is_bounded = is_known and not scores.unknown and scores.scale is not None
        if request.reduce_rows is None:
            read.unread = "its rows were not requested"
            return read
        around = (id(module) for _, module in reversed(self._stack.modules))
        if not next((request.is_read[module] for module in around if module in request.is_read), True):
            read.unread = "its rows are read at another reading"
            return read
        own = [which for which, one in (("queries", query), ("keys", key)) if self.chosen.differ_by_head(one, axes)]
        if own:
            read.unread = f"each head chooses its own {own[0]}, so that the rows of two heads do not compare"
            return read
        queries, keys = int(query.shape[-2]), int(key.shape[-2])
        padding = self._padding(axes, queries, keys, terms, query.device)
        of_queries = padding if is_self and queries == keys else None
        if callable(request.padding):
            padded = request.padding(axes.sequences, queries)
            of_queries = of_queries if padded is None else padded.to(query.device)
            padding = of_queries if is_self and queries == keys else padding
        plan = RowPlan.of(
            axes, queries, keys, query.device, terms=terms, max_queries=request.max_queries, left_out=of_queries
        )
        for chunk in rows(plan):
            one = request.reduce_rows(chunk)
            read.rows = one if read.rows is None else read.rows + one
        if read.rows is None:
            read.unread = _EMPTY if is_empty else "its weights do not have the dimensions of its scores"
        if request.reduce_norms is not None:
            for role, tensor, left_out in (("query", query, of_queries), ("key", key, padding)):
                features = _heads_of(tensor, axes)
                sizes = [axes.lead[dim] for dim in axes.batch]
                valid = None if left_out is None else ~left_out.view(*sizes, 1, left_out.shape[-1])
                if features is not None:
                    read.norms[role] = request.reduce_norms(features, valid)
        if seen is not None and not request.keeps_samples and seen.head_order:
            read.norms, read.head_order = {}, seen.head_order
        return read

    def _padding(
        self, axes: Axes, queries: int, keys: int, terms: Sequence[MaskTerm], device: torch.device
    ) -> Tensor | None:
        """Return which keys are padding, ``(sequences, keys)``; each mask of a forward is read once."""
        known = self._request.padding
        if isinstance(known, Tensor) and known.shape == (axes.sequences, keys):
            return known.to(device)
        found: Tensor | None = None
        for term in terms:
            key = (id(term.tensor), term.kind, axes, queries, keys)
            if key not in self._paddings:
                everyone = torch.arange(axes.sequences, device=device)
                # The mask is kept with it, so that its id stays its own.
                self._paddings[key] = (term.tensor, term.hidden_from_all(axes, everyone, queries, keys))
            one = self._paddings[key][1]
            found = one if found is None else found if one is None else found | one
        return found


def _of_a_kind_of_its_own(tensor: Tensor) -> str:
    if is_transformed(tensor):
        return "it runs under a transform of torch.func, which cannot be observed"
    return f"its tensors are sharded or of a tensor subclass ({type(tensor).__name__})"


def _largest(biases: Sequence[tuple[Tensor | float, float]], device: torch.device) -> tuple[Tensor | None, bool]:
    """The largest sum that can have been added to a score, without waiting for the device."""
    total: Tensor | None = None
    for bias, factor in biases:
        if math.isnan(factor):
            return None, False
        if isinstance(bias, Tensor):
            top = (bias.detach().amax() if factor > 0 else bias.detach().amin()).float().to(device) * factor
        else:
            top = torch.full((), bias * factor, device=device)
        total = top if total is None else total + top
    return total, True


def _heads_of(tensor: Tensor, axes: Axes) -> Tensor | None:
    """View queries or keys as ``(..., H, length, width)``."""
    ours = Axes(tuple(tensor.shape[:-2]), axes.batch) if tensor.dim() - 2 == len(axes.lead) else axes
    opened = ours.opened(tensor.detach())
    if opened is None or opened.dim() != len(axes.lead) + 2:
        return None
    moved = opened.permute(*axes.batch, *axes.heads_dims, -2, -1)
    return moved.flatten(len(axes.batch), -3) if axes.heads_dims else moved.unsqueeze(-3)
