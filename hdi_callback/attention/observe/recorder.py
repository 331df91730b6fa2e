"""What one observed forward leaves behind: maps that ran, and every attention with what was read of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hdi_callback.attention.observe.axes import Axes, resolve
from hdi_callback.attention.observe.chosen import ChosenTokens
from hdi_callback.attention.observe.cores import ObservedCore
from hdi_callback.attention.observe.lineage import Scores
from hdi_callback.attention.observe.masks import MaskTerm
from hdi_callback.attention.observe.quiet import holds_numbers, is_plain
from hdi_callback.attention.observe.rows import RowChunk, RowPlan, rows_of_operands, rows_of_weights
from hdi_callback.attention.observe.samples import MAX_FEATURES, MapCall, arrangements, sample_of_map

_MAPS_BEFORE = 64  # calls of maps before an attention among which its queries, keys and values are searched
_MAPS_AFTER = 8  # and after it, among which its output projection is searched
_MAPS_KEPT = 1024  # calls after which those that are near no attention are let go, as those of many experts are


@dataclass(eq=False)
class Reading:
    """What is to be read of an attention.

    Attributes:
        reduce_rows: what is made of each piece of rows; results are added. None: rows are not read.
        reduce_norms: what is made of ``(..., H, length, width)`` and of what is no padding in it.
        max_queries: how many queries are read.
        keeps_samples: keep a few tokens for the comparison with claims.
        padding: ``(batch, length)``, True at tokens that are padding, or what gives it for a number of sequences and of
            queries while attention runs, or None; None if it follows from masks.
        heads: dotted path of a layer -> number of heads that it is said to have.
        claimed: ids of modules whose maps are kept wherever they ran.
    """

    reduce_rows: Callable[[RowChunk], Any] | None = None
    reduce_norms: Callable[[Tensor, Tensor | None], Any] | None = None
    max_queries: int = 64
    keeps_samples: bool = True
    padding: Tensor | Callable[[int, int], Tensor | None] | None = None
    heads: Mapping[str, int] = field(default_factory=dict)
    claimed: frozenset[int] = frozenset()


@dataclass(eq=False)
class Taken:
    """What was read of the weights, before it is known that values are averaged with them."""

    axes: Axes | None
    unread: str = ""
    rows: Any = None
    norms: dict[str, Any] = field(default_factory=dict)
    bias: Tensor | None = None
    is_bounded: bool = True
    is_self: bool = False


class Recorder:
    """Record maps and attentions of a forward.

    Args:
        reading: what is to be read.
        names: id of a module or parameter -> its dotted path.
    """

    def __init__(self, reading: Reading, names: Mapping[int, str]) -> None:
        self.reading, self._names = reading, names
        self.maps: list[MapCall] = []
        self.cores: list[ObservedCore] = []
        self.stack: list[tuple[str, nn.Module]] = []
        self.chosen = ChosenTokens()
        self.is_recorded = False  # by autograd, of what runs now
        self._sites: dict[tuple[Any, ...], ObservedCore] = {}
        self._runs: dict[str, int] = {}  # how often a module was entered
        self._places: dict[tuple[str, int], int] = {}
        self._paddings: dict[tuple[Any, ...], tuple[Tensor | None, Tensor | None]] = {}
        self._order = 0
        self._settled: list[MapCall] = []

    # --- the position of a forward

    def enter(self, name: str, module: nn.Module) -> None:
        """Note that a module begins."""
        self.stack.append((name, module))
        self._runs[name] = self._runs.get(name, 0) + 1
        self._places[name, self._runs[name]] = 0

    def leave(self, name: str) -> None:
        """Note that a module has ended, and those inside it that were left by an exception."""
        names = [one for one, _ in self.stack]
        if name in names:
            del self.stack[len(names) - 1 - names[::-1].index(name) :]

    @property
    def owner(self) -> tuple[str, str]:
        """Path and class of the innermost module that runs."""
        return (self.stack[-1][0], type(self.stack[-1][1]).__name__) if self.stack else ("", "")

    def site(self, via: str) -> tuple[tuple[Any, ...], ObservedCore | None]:
        """Number an attention within its module, so that it is the same one when the module runs again.

        Args:
            via: what computes it.

        Returns:
            What identifies it, and what was recorded at its first run.
        """
        name = self.owner[0]
        run = name, self._runs.get(name, 0)
        number = self._places.get(run, 0)
        self._places[run] = number + 1
        key = (name, number if self.stack else via)
        return key, self._known(key)

    @property
    def is_repeated(self) -> bool:
        """Whether the next attention of the running module was recorded at an earlier run."""
        name = self.owner[0]
        run = name, self._runs.get(name, 0)
        return bool(self.stack) and self._known((name, self._places.get(run, 0))) is not None

    def _known(self, key: tuple[Any, ...]) -> ObservedCore | None:
        """Give what was recorded, unless it is of a forward that does not train and this one does."""
        known = self._sites.get(key)
        return None if known is not None and self.is_recorded and not known.is_recorded else known

    # --- linear maps and norms

    def map_ran(
        self,
        parameter: Tensor,
        inputs: Tensor,
        made: Tensor,
        features_dim: int = -1,
        *,
        rows: int = 0,
        is_transposed: bool = False,
    ) -> None:
        """Record a product with a parameter."""
        if not self.reading.keeps_samples or not (holds_numbers(inputs) and holds_numbers(made)):
            return
        module = self.stack[-1][1] if self.stack else None
        keys = (id(parameter),) if module is None else (id(parameter), id(module))
        name = self._names.get(id(parameter), "")
        held = () if module is None else (*module._parameters.items(), *vars(module).items())
        own = next((key for key, value in held if value is parameter), "")  # sharded: not the parameter of before
        if not name and own:
            name = f"{self.owner[0]}.{own}" if self.owner[0] else own
        self._add(keys, name or self.owner[0], "linear", inputs, made, features_dim, rows, is_transposed, own)

    def norm_ran(self, weight: Tensor | None, inputs: Tensor, made: Tensor) -> None:
        """Record a norm, whose features are those that come in."""
        is_kept = self.reading.keeps_samples and holds_numbers(inputs) and holds_numbers(made)
        if not is_kept or inputs.shape != made.shape:
            return
        keys = (id(weight),) if weight is not None else ()
        self._add_norm(keys, self._names.get(id(weight), "") or self.owner[0], inputs, made)

    def _add_norm(self, keys: tuple[int, ...], name: str, inputs: Tensor, made: Tensor) -> None:
        """Record a norm of tokens, or of the heads of tokens: of each order of its dimensions a sample."""
        if inputs.dim() < 2 or not inputs.numel() or inputs.shape[-1] > MAX_FEATURES:
            return
        views = [(inputs[..., None, :, :], made[..., None, :, :])]
        if inputs.dim() >= 4:
            views = [(inputs, made), (inputs.transpose(-3, -2), made.transpose(-3, -2))]
        elif inputs.dim() == 3:
            views += [(inputs[None], made[None]), (inputs.transpose(0, 1), made.transpose(0, 1))]
        ways = []
        for one, other in views:
            pairs = zip(arrangements(one, self._tokens()[:3]), arrangements(other, self._tokens()[:3]), strict=False)
            ways += [(before, after) for before, after in pairs if before.start == 0]
        self._order += 1
        empty = inputs.new_empty(0, 0)
        tokens = inputs.numel() // inputs.shape[-1]
        self.maps.append(
            MapCall(
                self._order,
                keys,
                name,
                "norm",
                tokens,
                empty,
                empty,
                inputs.data_ptr(),
                0,
                self.owner[0],
                False,
                "",
                tuple(ways),
            )
        )

    def module_ran(self, module: nn.Module, kind: str, inputs: Any, made: Any, features_dim: int) -> None:
        """Record what a module took and gave as a whole."""
        tensors = isinstance(inputs, Tensor) and isinstance(made, Tensor)
        if not tensors or not self.reading.keeps_samples or not (holds_numbers(inputs) and holds_numbers(made)):
            return
        if kind == "norm" and inputs.shape == made.shape:
            self._add_norm((id(module),), self._names.get(id(module), ""), inputs, made)
        elif kind != "norm":
            self._add((id(module),), self._names.get(id(module), ""), kind, inputs, made, features_dim, 0)

    def _add(
        self,
        keys: tuple[int, ...],
        name: str,
        kind: str,
        inputs: Tensor,
        made: Tensor,
        features_dim: int,
        rows: int,
        is_transposed: bool = False,
        own: str = "",
    ) -> None:
        if not made.is_floating_point() or not made.numel() or made.dim() < 1:
            return
        if made.shape[features_dim] > MAX_FEATURES:
            return
        self._let_go()
        self._order += 1
        before = inputs.dim() == made.dim() and inputs.numel() // inputs.shape[features_dim] == (
            made.numel() // made.shape[features_dim]
        )
        self.maps.append(
            MapCall(
                self._order,
                keys,
                name,
                kind,
                made.numel() // made.shape[features_dim],
                sample_of_map(inputs, features_dim) if before else made.new_empty(0, 0),
                sample_of_map(made, features_dim),
                inputs.data_ptr(),
                rows,
                self.owner[0],
                is_transposed,
                own,
            )
        )

    def _let_go(self) -> None:
        if len(self.maps) < _MAPS_KEPT + len(self._settled):
            return
        newest, cores = self._order - _MAPS_BEFORE, [core.order for core in self.cores]
        near = {order for core in cores for order in range(core - _MAPS_BEFORE, core + _MAPS_AFTER)}
        claimed = self.reading.claimed
        self.maps = [
            one for one in self.maps if one.order >= newest or one.order in near or not claimed.isdisjoint(one.keys)
        ]
        self._settled = self.maps

    def _tokens(self) -> list[int]:
        """How many tokens the inputs of the maps before have, those of the running module first, the latest first."""
        recent = [one for one in self.maps[-_MAPS_BEFORE:][::-1] if one.kind == "linear"]
        name = self.owner[0]
        here = [one.tokens for one in recent if one.owner == name or one.owner.startswith(f"{name}.")]
        return list(dict.fromkeys([*here, *(one.tokens for one in recent)]))

    def _is_self(self) -> bool:
        name = self.owner[0]
        recent = [one for one in self.maps[-_MAPS_BEFORE:] if one.kind == "linear"]
        inside = [one for one in recent if one.owner == name or one.owner.startswith(f"{name}.")]
        return len({one.source for one in inside}) == 1

    # --- attention

    def _claimed_heads(self) -> int | None:
        for name, _ in reversed(self.stack):
            if name in self.reading.heads:
                return self.reading.heads[name]
        return None

    def axes_of(self, lead: Sequence[int], queries: int, keys: int) -> Axes | None:
        """Separate sequences from heads."""
        tokens = self._tokens()
        both = [one for one in tokens if queries and one % queries == 0 and one // queries * keys in tokens]
        ordered = [*both, *(one for one in tokens if one not in both)]
        return resolve(lead, queries, ordered, self._claimed_heads(), keys=keys)

    def weights_ran(self, scores: Scores, inputs: Tensor, weights: Tensor, axis: int) -> Taken:
        """Read the rows of weights that a softmax gave.

        Args:
            scores: where they come from.
            inputs: the input of the softmax.
            weights: what it gave.
            axis: dimension of the keys, negative.

        Returns:
            What was read.
        """
        if self.is_repeated:
            return Taken(None)
        if scores.query is None or scores.key is None:
            return Taken(None, "its weights are a softmax, but its scores are no product of two activations")
        if axis == scores.row_axis:
            swapped = scores.query, scores.row_axis
            scores.query, scores.row_axis = scores.key, scores.key_axis
            scores.key, scores.key_axis = swapped
        if scores.lost:
            done = ", ".join(dict.fromkeys(scores.lost))
            return Taken(None, f"its scores go through {done} before the softmax, which is not followed")
        if axis != scores.key_axis:
            return Taken(None, "its softmax is over another dimension than that of the keys")
        order = (scores.row_axis, axis), (-2, -1)
        inputs, weights = inputs.movedim(*order), weights.movedim(*order)
        queries, keys = int(weights.shape[-2]), int(weights.shape[-1]) - scores.before - scores.after
        if not (is_plain(weights) and is_plain(scores.query) and is_plain(scores.key)):
            return Taken(
                None, f"its tensors are spread over devices or of a kind of their own ({type(weights).__name__})"
            )
        if keys != scores.key.shape[-2] or queries != scores.query.shape[-2] or not queries or not keys:
            return Taken(None, "its softmax is over other columns than its keys")
        axes = self.axes_of(weights.shape[:-2], queries, keys)
        if axes is None:
            return Taken(None, "sequences and heads share a dimension, and nothing tells them apart")
        shift = None if scores.shift is None else scores.shift.movedim(*order)
        return self._read(
            axes,
            scores.query,
            scores.key,
            scores.terms,
            scores.biases,
            lambda plan: rows_of_weights(
                weights, inputs, plan, first=scores.before, shift=shift, hides_by_scores=bool(scores.unknown)
            ),
            is_bounded=not scores.unknown and scores.scale is not None,
        )

    def _read(
        self,
        axes: Axes,
        query: Tensor,
        key: Tensor,
        terms: Sequence[MaskTerm],
        biases: Sequence[tuple[Tensor | float, float]],
        rows: Callable[[RowPlan], Iterator[RowChunk]],
        *,
        is_bounded: bool = True,
    ) -> Taken:
        reading, is_self = self.reading, self._is_self()
        taken = Taken(axes, is_self=is_self)
        taken.bias, is_known = _largest(biases, query.device)
        taken.is_bounded = is_bounded and is_known
        if reading.reduce_rows is None:
            taken.unread = "its rows were not asked for"
            return taken
        taken.unread = self._own_choice(query, key, axes)
        if taken.unread:
            return taken
        queries, keys = int(query.shape[-2]), int(key.shape[-2])
        padding = self._padding(axes, queries, keys, terms, query.device)
        of_queries = padding if is_self and queries == keys else None
        if callable(reading.padding):
            padded = reading.padding(axes.sequences, queries)
            of_queries = of_queries if padded is None else padded.to(query.device)
            padding = of_queries if is_self and queries == keys else padding
        plan = RowPlan.of(
            axes, queries, keys, query.device, terms=terms, max_queries=reading.max_queries, left_out=of_queries
        )
        for chunk in rows(plan):
            one = reading.reduce_rows(chunk)
            taken.rows = one if taken.rows is None else taken.rows + one
        if taken.rows is None:
            taken.unread = "its weights do not have the dimensions of its scores"
        if reading.reduce_norms is not None:
            for role, tensor in (("query", query), ("key", key)):
                features = _heads_of(tensor, axes)
                left_out = of_queries if role == "query" else padding
                sizes = [axes.lead[dim] for dim in axes.batch]
                valid = None if left_out is None else ~left_out.view(*sizes, 1, left_out.shape[-1])
                if features is not None:
                    taken.norms[role] = reading.reduce_norms(features, valid)
        return taken

    def _own_choice(self, query: Tensor, key: Tensor, axes: Axes) -> str:
        """Say that heads have other queries or keys than other heads; empty if they have the same."""
        own = [which for which, one in (("queries", query), ("keys", key)) if self.chosen.differ_by_head(one, axes)]
        return f"each head has {own[0]} of its own choice, so that rows of two do not compare" if own else ""

    def _padding(
        self, axes: Axes, queries: int, keys: int, terms: Sequence[MaskTerm], device: torch.device
    ) -> Tensor | None:
        """Return which keys are padding, ``(sequences, keys)``; each mask of a forward is read once."""
        known = self.reading.padding
        if isinstance(known, Tensor) and known.shape == (axes.sequences, keys):
            return known.to(device)
        found: Tensor | None = None
        for term in terms:
            key = (id(term.tensor), term.kind, axes, queries, keys)
            if key not in self._paddings:
                everyone = torch.arange(axes.sequences, device=device)
                # The mask is kept with it, so that its id stays its own.
                self._paddings[key] = (term.tensor, term.seen_by_none(axes, everyone, queries, keys))
            one = self._paddings[key][1]
            found = one if found is None else found if one is None else found | one
        return found

    def forget(self) -> None:
        """Let go of what belongs to one forward alone."""
        self._paddings.clear()
        self.stack.clear()

    def core_ran(
        self,
        via: str,
        scores: Scores,
        value: Tensor | None,
        output: Tensor | None,
        taken: Taken | None,
        *,
        kind: str = "softmax",
    ) -> ObservedCore | None:
        """Record that values were averaged.

        Args:
            via: what computed it.
            scores: of which product the weights are.
            value: ``(*lead, keys, width)``.
            output: ``(*lead, queries, width)``.
            taken: what was read of the weights.
            kind: of weights.

        Returns:
            The record; None if this one was recorded at an earlier run.
        """
        site, known = self.site(via)
        if known is not None:
            known.runs += 1
            return None
        module, module_type = self.owner
        self._order += 1
        core = ObservedCore(module, module_type, kind, via, self._order, is_recorded=self.is_recorded)
        if site in self._sites:
            self.cores.remove(self._sites[site])
        self._sites[site] = core
        self.cores.append(core)
        core.parts = tuple(name for name, _ in self.stack)
        core.maps = self.maps[-_MAPS_BEFORE:]
        if taken is not None:
            core.axes, core.unread, core.rows, core.norms = taken.axes, taken.unread, taken.rows, taken.norms
            core.bias, core.is_bounded, core.is_self = taken.bias, taken.is_bounded, taken.is_self
        core.scale = scores.scale
        core.changed = (*scores.unknown, *scores.altered)
        if scores.query is not None and scores.key is not None:
            core.queries, core.width = int(scores.query.shape[-2]), int(scores.query.shape[-1])
            core.keys = int(scores.key.shape[-2])
            core.key_heads = _key_heads(scores.key, core.axes)
        if scores.altered:
            core.rows, core.unread = None, f"its weights go through {', '.join(scores.altered)} after the softmax"
        if self.reading.keeps_samples:
            tokens = self._tokens()
            roles = {"query": scores.query, "key": scores.key, "value": value, "output": output}
            for role, tensor in roles.items():
                if tensor is not None and holds_numbers(tensor) and tensor.dim() >= 2:
                    core.samples.roles[role] = list(arrangements(tensor, tokens[:4]))
        return core

    def fused_ran(
        self,
        via: str,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        output: Tensor,
        *,
        terms: Sequence[MaskTerm] = (),
        scale: float | None = None,
        softcap: float = 0.0,
        unread: str = "",
    ) -> None:
        """Record a kernel that keeps its weights to itself.

        Args:
            via: its name.
            query: ``(*lead, queries, width)``.
            key: ``(*lead, keys, width)``.
            value: ``(*lead, keys, value width)``.
            output: ``(*lead, queries, value width)``.
            terms: what hides keys, and what is added.
            scale: factor of the scores; None for one over the root of the width.
            softcap: bound of the scores.
            unread: why its rows cannot be computed; empty if they can.
        """
        factor = scale if scale is not None else 1 / math.sqrt(query.shape[-1])
        scores = Scores(query.detach(), key.detach(), scale=factor)
        biases: list[tuple[Tensor | float, float]] = [
            (one.tensor, 1.0) for one in terms if one.kind == "added" and one.tensor is not None
        ]
        taken: Taken | None = None
        if not (is_plain(query) and is_plain(key)):
            taken = Taken(
                None, f"its tensors are spread over devices or of a kind of their own ({type(query).__name__})"
            )
        elif not self.is_repeated:
            axes = self.axes_of(query.shape[:-2], int(query.shape[-2]), int(key.shape[-2]))
            unread = unread or ("" if axes is None else self._own_choice(query, key, axes))
            if axes is None or unread:
                taken = Taken(axes, unread or "sequences and heads share a dimension, and nothing tells them apart")
            else:
                taken = self._read(
                    axes,
                    query.detach(),
                    key.detach(),
                    terms,
                    biases,
                    lambda plan: rows_of_operands(
                        query.detach(), key.detach(), plan, scale=float(factor), softcap=softcap
                    ),
                )
        self.core_ran(via, scores, value, output, taken)


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


def _key_heads(key: Tensor, axes: Axes | None) -> int:
    if axes is None:
        return 0
    if key.dim() - 2 != len(axes.lead):
        return axes.heads
    return math.prod(int(key.shape[dim]) for dim in axes.heads_dims)
