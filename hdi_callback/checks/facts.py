"""Facts about each attention of a forward: which rows make its heads, how scores are made, where outputs go.

A fact that cannot be established is `None`, or missing. Nothing here judges.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from hdi_callback.attention.discovery.cores import Core, core_of, sums_of
from hdi_callback.attention.discovery.find import TapeReader, place_of
from hdi_callback.attention.discovery.heads import IN, FoundAttention, Projection
from hdi_callback.attention.discovery.labels import NORMED, NOTHING, SEVERAL, SUM, Label, Labels
from hdi_callback.attention.discovery.planes import small, unique_rows
from hdi_callback.attention.discovery.products import Unreadable
from hdi_callback.attention.operations import SOFTMAX_LIKE, SOFTMAXES
from hdi_callback.attention.tape import CONSTANT, DATA, Cell, Step, Tape
from hdi_callback.checks import scores
from hdi_callback.checks.blocks import block_of
from hdi_callback.checks.positions import cosines_of, length_of, pairs_of, shift_of

CUT = "cut across heads"
PLURAL = {"query": "queries", "key": "keys", "value": "values", "output": "outputs"}


@dataclass(frozen=True, eq=False)
class HeadRows:
    """Rows (of an output: columns) of each head in one parameter."""

    name: str  # of the parameter
    rows: Tensor  # ``(heads, width)``, their numbers
    total: int  # rows of the parameter

    @property
    def module(self) -> str:
        """The last name of its module, as code calls it: ``"q_proj"``."""
        return _last_name(self.name)

    @cached_property
    def order(self) -> str:
        """How heads lie in the parameter: ``"head by head"``, ``"interleaved"``, or ``""``."""
        rows = sorted({tuple(sorted(row)) for row in self.rows.tolist()})  # heads may share keys
        if len({after - row for own in rows for row, after in pairwise(own)}) != 1:
            return ""
        return "head by head" if all(after[0] > own[-1] for own, after in pairwise(rows)) else "interleaved"


@dataclass(frozen=True, eq=False)
class Facts:
    """What one attention does."""

    path: str  # of its layer
    line: str  # file and line of the forward where the softmax runs; "" if that is not known
    is_training: bool  # whether its module is in training mode
    is_renormalised: bool  # whether weights are divided by their sums behind the softmax
    window: int  # how many tokens a query may see, as its module declares; 0 if it does not

    reason: str = ""  # why its heads cannot be told; "" if they can

    # of its heads
    heads: int = 0  # 0 if they cannot be told
    features: int = 0  # that its maps take
    rows: Mapping[str, tuple[HeadRows, ...]] = field(default_factory=dict)  # by role: of each map that is summed
    normed: tuple[str, ...] = ()  # roles that have a norm behind their map, or before that of the output
    mixed: tuple[tuple[int, int], ...] = ()  # (head, token) in the first row of the output projection, if in disorder
    cosines: Mapping[str, Tensor] = field(default_factory=dict)  # by role: ``(heads, tokens, width)``, of rotations
    length: float | None = None  # of rotations: 1 if queries and keys are only turned, and not scaled too
    shift: int | None = None  # by how many tokens queries are turned more than keys
    block: str | None = None  # what is around it: "x + attention(norm(x))", with y for another stream

    # of its softmax
    width: int = 0  # features of a query
    queries: int = 0  # in each matrix
    keys: int = 0
    scale: float | None = None  # of products of queries and keys
    changes: tuple[scores.Change, ...] = ()  # of scores before the softmax
    curves: tuple[str, ...] = ()  # what bends scores, point by point: a soft cap
    score_dropout: float = 0.0  # its probability before the softmax
    hidden: Tensor | None = None  # which keys, ``(..., queries, keys)``
    normaliser: str = "softmax"  # what makes weights of scores
    softmaxes: int = 1  # that run one after the other
    changes_behind: tuple[scores.Change, ...] = ()  # of weights
    dropout: float | None = None  # its probability
    pairs: Mapping[str, frozenset[tuple[int, int]]] = field(default_factory=dict)  # by role: places that are rotated
    cut_across: Mapping[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)  # by role: see `_cut_across`
    order: Mapping[str, str] = field(default_factory=dict)  # by role: how tokens come from the map, or to it
    steps: tuple[int, int] = (0, 0)  # of the tape, from its maps to its product with values
    padding: Mapping[str, Tensor] = field(default_factory=dict)  # name of a mask -> ``(batch, tokens)``
    tokens: tuple[Tensor, ...] = ()  # numbers of tokens that both queries and keys are made of
    earlier: int | None = None  # how many tensors that this forward has not made are in keys, and not in queries

    @cached_property
    def key_head_of(self) -> tuple[int, ...]:
        """Return the number of each head's keys among the different ones, in the order of their rows."""
        if not self.rows.get("key"):
            return ()
        return tuple(self.rows["key"][0].rows.unique(dim=0, return_inverse=True)[1].tolist())

    @cached_property
    def visible(self) -> Tensor | None:
        """Return which of the first keys are seen, ``(samples, heads or 1, queries, keys)``; `None` if not known."""
        sizes = min(self.queries, scores.KEPT), min(self.keys, scores.KEPT)
        if self.hidden is None or any(mask not in {1, size} for mask, size in zip(self.hidden.shape[-2:], sizes)):
            return None
        visible = ~self.hidden.expand(*self.hidden.shape[:-2], *sizes)
        return visible.reshape(-1, visible.shape[-3] if visible.dim() > 3 else 1, *visible.shape[-2:])

    @cached_property
    def distances(self) -> Tensor | None:
        """Return by the distance from query to key of how many pairs of tokens the key is seen.

        ``(heads or 1, 2 tokens - 1)``, the latest keys first. Keys that no query sees are padding, and left out; NaN
        where no pair is left. The last query and key are of one token. `None` if masks are not known.
        """
        visible, past = self.visible, self.keys - self.queries
        if visible is None or self.queries < 2 or past < 0 or (past and self.keys > scores.KEPT):
            return None
        queries, keys = visible.shape[2:]
        real = visible.any(-2).any(1)
        if past and not bool(real[:, -1].any()):  # a cache that is longer than its tokens
            return None
        pairs = (real[:, None, past : past + queries, None] & real[:, None, None, :]).expand_as(visible)
        both = torch.stack([visible & pairs, pairs]).double().sum(1).flatten(-2)
        sums = both.new_zeros(*both.shape[:2], 2 * keys - 1)
        sums.index_add_(
            -1, (torch.arange(past, past + queries)[:, None] - torch.arange(keys) + keys - 1).flatten(), both
        )
        return sums[0] / sums[1]

    @cached_property
    def seen(self) -> tuple[Tensor, Tensor, Tensor] | None:
        """Return shares of `distances`: of earlier tokens, nearest first, of the token itself, and of later ones."""
        if self.distances is None:
            return None
        shares, tokens = self.distances.nan_to_num(0), self.distances.shape[1] // 2
        return shares[:, tokens + 1 :], shares[:, tokens], shares[:, :tokens].flip(1)

    @cached_property
    def bias(self) -> Tensor | None:
        """Return the constant that is added to scores, ``(..., queries, keys)``, NaN where a key is hidden."""
        if self.reason:
            return None
        total = torch.zeros(1, min(self.queries, scores.KEPT), min(self.keys, scores.KEPT))
        for change in self.changes:
            if change.hides is None:
                return None
            if change.is_added and change.value is not None and change.value.is_floating_point():
                value = change.value.float().masked_fill(change.hides, torch.nan)
                if value.dim() > 3 and float((value - value[:1]).abs().nan_to_num(0).max()) > 0:
                    return None  # of the data
                total = total + (value[0] if value.dim() > 3 else value)
        return total

    @cached_property
    def is_causal(self) -> bool | None:
        """Whether each token sees itself, and none behind it; `None` if that is not known, or does not apply."""
        if self.seen is None:  # a triangle of fewer keys, such as mixtures of tokens, is meant so
            visible = self.visible if 1 < self.keys < self.queries else None
            return True if visible is not None and torch.equal(visible, torch.ones_like(visible).tril()) else None
        _, itself, later = self.seen
        return not bool(later.any()) and bool(itself.any())

    @cached_property
    def sees_single_key(self) -> Tensor:
        """Which heads see a single key with each query, so that its weight is 1 whatever queries and keys are."""
        heads = max(1, self.heads)
        if self.keys == 1 or self.visible is None or (self.keys > scores.KEPT and self.queries != self.keys):
            return torch.full((heads,), self.keys == 1)
        is_single = (self.visible.sum(-1) == 1).all(-1).all(0)
        return is_single if len(is_single) == heads else is_single.all().expand(heads)

    @property
    def is_usual_scale(self) -> bool:
        """Whether scores are scaled by 1 / sqrt(width)."""
        return self.scale is not None and self.width > 0 and math.isclose(self.scale, self.width**-0.5, rel_tol=0.01)


def facts_of(reader: TapeReader) -> list[Facts]:
    """Return facts about each attention that was read, or whose softmax was met, in the order of the forward."""
    collected: list[Facts] = []
    labels = reader.labels
    every: list[tuple[Step, FoundAttention | str]] = [
        *((attention.core.step, attention) for attention in reader.attentions), *reader.refused
    ]  # fmt: skip
    is_scaled, sources = _is_rotation_scaled(labels.tape.model), _sources(labels.tape)
    for step, attention in sorted(every, key=lambda pair: pair[0].number):
        values = _of_step(labels, step)
        try:
            core = None if isinstance(attention, str) else attention.core
            with suppress(Unreadable):
                core = core or core_of(labels, step)
            values |= {} if core is None else _of_core(labels, core)
            if core is not None:
                queries, keys = (sources.get(view.cell, {}) for view in scores.sides_of(labels, core))
                values["tokens"] = tuple(each for at, each in queries.items() if at in keys and each is not None)
                values["earlier"] = sum(each is None and at not in queries for at, each in keys.items())
            values |= {"reason": attention} if isinstance(attention, str) else _of_attention(labels, attention, values)
        except Exception as error:  # one attention that is not understood leaves the others
            values = _of_step(labels, step)
            values["reason"] = f"its facts could not be collected ({type(error).__name__}: {error})"
        values |= {"length": None} if is_scaled else {}
        collected.append(Facts(**values))
    return collected


def embedded_tokens(step: Step) -> list[Tensor]:
    """Return the numbers of tokens, in two dimensions, that a step looks up in a table."""
    tensors = [view.value for view in step.inputs if not view.is_float] if step.op in {"embedding", "index"} else []
    return [each for each in tensors if each is not None and each.dim() == 2 and not each.dtype.is_floating_point]


def _sources(tape: Tape) -> dict[Cell, dict[int, Tensor | None]]:
    """Return of each content what it is made of, by `id`: numbers of tokens, and `None` for numbers from outside."""
    sources: dict[Cell, dict[int, Tensor | None]] = {}
    for step in tape.steps:
        own: dict[int, Tensor | None] = {id(tokens): tokens for tokens in embedded_tokens(step)}
        for view in step.inputs:
            is_outside = view.is_float and view.cell.step is None and view.cell.kind in {CONSTANT, DATA}
            own |= {id(view.cell): None} if is_outside and view.numel > 1 else sources.get(view.cell, {})
        for cell in (view.cell for view in step.outputs if view is not None):
            sources[cell] = own | ({} if cell.before is None else sources.get(cell.before, {}))
    return sources


def _of_step(labels: Labels, step: Step) -> dict[str, Any]:
    """Return what is known of a softmax without its queries, keys and values."""
    line = step.line.replace("\\", "/")
    path = step.path or ""
    window = getattr(labels.tape.modules[path], "sliding_window", None)
    return {
        "path": path,
        "line": "" if "/torch/nn/" in line else line.rpartition("/")[2],  # without folders, and nothing of torch's own
        "is_training": path in labels.tape.training,
        "is_renormalised": step.op in SOFTMAX_LIKE and bool(sums_of(step)),
        "window": window if type(window) is int and window > 1 else 0,
    }


def _of_core(labels: Labels, core: Core) -> dict[str, Any]:
    """Return what is known of an attention without its heads."""
    part, step = core.parts[0], core.step
    score_links: list[scores.Link] | None = []
    behind: list[scores.Link] | None = []
    if part.product is None:
        changes, dropout = scores.changes_of_fused(step), scores.dropout_of_fused(step)
    else:
        score_links = (
            None if core.scores is None else scores.links_back(core.scores.cell, lambda value: value is core.score_step)
        )
        behind = scores.links_back(part.product.first.cell, lambda value: value is step)
        changes = (
            scores.changes_of(score_links)
            if score_links is not None and scores.is_by_rows(core)
            else [scores.Change("not followed", None)]
        )
        before_sum = scores.links_to_sum(core, behind or [])
        changes = [*scores.changes_of_product(core.score_step), *changes, *scores.masks_of_weights(before_sum)]
        dropout = None if behind is None else scores.dropout_behind(behind)
        behind = [link for link in behind or () if link not in before_sum]
    queries, keys = (part.labels[role].features.shape[1] for role in ("query", "key"))
    softmaxes = 1 + sum(link.step.op in SOFTMAXES for link in [*(score_links or ()), *(behind or ())])
    sides = [*scores.sides_of(labels, core), step.inputs[2] if part.product is None else part.product.second]
    across = {role: _cut_across(labels, label) for role, label in part.labels.items()}
    # What one softmax hides the next one shows.
    hidden = scores.hidden_by(changes, len((core.scores or step.inputs[0]).shape)) if softmaxes == 1 else None
    if hidden is not None and hidden.shape[-2:] == (keys, keys) and not queries % keys:
        queries = keys  # heads that share keys are put together with queries, as by an einsum
    return {
        "width": part.width("query"),
        "queries": queries,
        "keys": keys,
        "scale": None if score_links is None else scores.scale_of(labels, core, score_links),
        "changes": tuple(changes),
        "score_dropout": scores.dropout_behind(score_links or []) or 0.0,
        "curves": tuple(link.step.op for link in score_links or () if scores.is_curve(link.step)),
        "hidden": hidden,
        "normaliser": "softmax" if core.normaliser is None else core.normaliser.name,
        "softmaxes": softmaxes,
        "changes_behind": tuple(scores.changes_of(behind or [])) if scores.is_by_rows(core) else (),
        "dropout": dropout,
        "pairs": {role: pairs_of(labels, label) for role, label in part.labels.items()},
        "cut_across": {role: value for role, value in across.items() if value is not None},
        "order": {role: CUT if across[role] else _order(label.tokens) for role, label in part.labels.items()},
        "steps": (min((step.number for step in labels.leading_to(sides)), default=step.number), part.step.number + 1),
        "padding": {name: value.cpu() for name, value in step.padding.items()},
    }


def _of_attention(labels: Labels, attn: FoundAttention, values: dict[str, Any]) -> dict[str, Any]:
    """Return what is known of heads."""
    maps = {role: attn.maps.get(role, []) for role in IN} | {"output": [columns for _, columns in attn.outputs]}
    mixed = _mixed(labels, attn)
    entering = labels.may_read(attn.takers[0][1].first) if attn.takers else None
    order = CUT if mixed else "" if entering is None else _order(entering.tokens)
    asking = {role: maps[role][0] for role in ("query", "key") if maps[role]}
    whole = {role: cosines_of(labels, attn.core, projection.starts) for role, projection in asking.items()}
    tables = {role: table[:, : values[PLURAL[role]]] for role, table in whole.items() if table is not None}
    cosines = [table[0] for table in tables.values()]
    is_usual = math.isclose(values["scale"] or 0, values["width"] ** -0.5, rel_tol=0.01)
    is_sum = bool({SUM.of("query"), SUM.of("key")} & attn.flags)  # of which each part may have a scale of its own
    return {
        "path": place_of(attn, attn.maps),
        "heads": attn.heads,
        "features": next((projection.count for projection in asking.values()), 0),
        "rows": {role: tuple(_rows(labels, each) for each in listed) for role, listed in maps.items() if listed},
        "normed": tuple(role for role in PLURAL if _is_normed(labels, attn, role)),
        "scale": None if is_sum and not is_usual else values["scale"],
        "cosines": tables,
        "length": length_of(labels, attn.core),
        "shift": shift_of(*cosines) if len({table.shape for table in cosines}) == 1 < len(cosines) else None,
        # Of a sum of maps features are of more pairs than their own.
        "pairs": {role: pairs for role, pairs in values["pairs"].items() if len(attn.maps.get(role, ())) < 2},
        "order": values["order"] | {"output": order},
        "mixed": mixed,
        "block": block_of(labels, attn),
    }


def _is_normed(labels: Labels, attn: FoundAttention, role: str) -> bool:
    if role in IN:
        return NORMED.of(role) in attn.flags
    entering = (labels.may_read(product.first) for _, product in attn.takers)
    return any(label is not None and NORMED in label.flags for label in entering)


def _is_rotation_scaled(model: nn.Module) -> bool:
    """Whether a module declares that rotary tables are scaled, as YaRN does."""
    names = ("attention_scaling", "attention_factor", "mscale")
    return any(getattr(module, name, 1) not in {1, None} for module in model.modules() for name in names)


# rows of parameters


def _rows(labels: Labels, projection: Projection) -> HeadRows:
    name = projection.names[0]
    total = math.prod(labels.tape.shapes[name]) // max(1, projection.count)
    firsts = [labels.tape.first[labels.tape.places[name]] for name in projection.names]
    offset = projection.starts - torch.tensor(firsts)[:, None]
    count, stride = projection.count, projection.stride
    rows = offset // count if stride == 1 else offset // (count * stride) * stride + offset % stride
    return HeadRows(name, rows, total)


def _last_name(parameter: str) -> str:
    return parameter.removesuffix(".weight").rpartition(".")[2]


def ranges(numbers: Iterable[int]) -> list[str]:
    """Return whole numbers as ranges: ``["0-2", "5"]``."""
    different = set(numbers)
    starts, ends = (sorted(number for number in different if number + step not in different) for step in (-1, 1))
    return [str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends)]


def shown_rows(rows: Tensor) -> str:
    """Return numbers of rows as a few ranges: ``0-767``."""
    parts = ranges(small(rows).flatten().tolist())
    return ", ".join(parts) if len(parts) < 4 else f"{parts[0]}, {parts[1]}, ... {parts[-1]}"


def shown_heads(heads: Sequence[int]) -> str:
    """Return heads in words: ``head 3``, ``heads 0, 1``."""
    listed = ", ".join(map(str, heads[:8])) + (", ..." if len(heads) > 8 else "")
    return f"head{'s' if len(heads) > 1 else ''} {listed}"


# tokens and heads that lie in the wrong place


def _order(tokens: Tensor) -> str:
    """Return how tokens lie in ``(matrices, tokens, features)``, or `""` if that is not known."""
    short = small(tokens)
    if tokens.shape[1] < 2 or bool((short == NOTHING).any()):
        return ""
    if bool((short == SEVERAL).any()):
        return "several together"
    numbers = tokens[..., 0]
    if not bool((numbers[:, 1:] > numbers[:, :-1]).all()):
        return "in another order"
    samples = numbers[:, 0].tolist()
    different = sorted(set(samples))
    is_sorted = samples in (sorted(samples), different * (len(samples) // len(different)))  # by samples, or by heads
    return "in their order" if is_sorted else "under other samples"


def _cut_across(labels: Labels, label: Label) -> tuple[str, tuple[int, ...]] | None:
    """Return module and tokens of the first rows of a role, if memory ``(token, head)`` is read as something else."""
    n, rows, _ = label.features.shape
    if rows < 2 or label.features.stride(1) == 0:
        return None
    _, kinds = unique_rows(label.features.reshape(n * rows, -1))
    tokens, heads = label.tokens[..., 0].reshape(-1), len(kinds.unique())
    if heads < 2 or len(kinds) % heads or bool((tokens <= 0).any()):
        return None
    by_token, numbers = kinds.reshape(-1, heads), tokens.reshape(-1, heads)
    is_cut = bool((by_token == by_token[0]).all()) and bool((numbers == numbers[:, :1]).all())
    in_order = bool((numbers[1:, 0] > numbers[:-1, 0]).all())
    views = (view for step in labels.tape.steps for view in step.inputs)
    batches = (
        view.shape for view in views if view.cell.kind == DATA and view.cell.step is None and len(view.shape) > 1
    )
    of_a_token = rows == heads and n > next(batches, (n,))[0]  # more matrices than sequences
    if not is_cut or not in_order or not (of_a_token or n % heads == 0):
        return None
    owner = min(labels.owners(label.features), key=lambda owner: (owner in labels.ranges, owner))
    module = _last_name(labels.tape.names[owner]) if owner not in labels.ranges else "its map"
    return module, tuple((tokens[:rows] - tokens[0]).tolist())


def _mixed(labels: Labels, attn: FoundAttention) -> tuple[tuple[int, int], ...]:
    """Return the head and token of each part of the first row of an output projection, if it mixes tokens of a head."""
    source = attn.source
    if source is None or attn.heads < 2 or not attn.numbers:
        return ()
    queries = attn.numbers[0].shape[1]
    for _, product in attn.takers:
        label = labels.may_read(product.first)
        if label is None or (attn.outputs and product.kind != "filter"):
            continue
        zeros = (0,) * (label.features.dim() - 2)
        # Channels lie before places.
        first: tuple[Any, ...] = (0, ..., *zeros) if product.kind == "filter" else (0, *zeros)
        features, tokens = (plane.expand_as(label.features)[first] for plane in (label.features, label.tokens))
        if len(features) != attn.heads * attn.width:
            continue
        if bool((features < source.start).any()) or bool((features >= source.end).any()):
            continue
        heads, of = (features - source.start) // attn.width, (tokens - 1) % queries
        parts = list(dict.fromkeys(zip(heads.tolist(), of.tolist())))
        if len(parts) > len({head for head, _ in parts}):
            return tuple(parts)
    return ()
