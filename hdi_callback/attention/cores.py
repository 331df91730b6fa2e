"""Attention on a tape: a softmax between two products of what has labels, or one operation that is all of that.

A `Core` gives the queries, keys and values that meet there, with labels: a matrix of queries for each group of rows
that share keys. Nothing here knows what a head is.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hdi_callback.attention.labels import (
    RESAMPLED,
    SEVERAL,
    SHARED,
    TIMES,
    FeatureRange,
    Label,
    Labels,
    Unreadable,
    only_one,
)
from hdi_callback.attention.normalisers import normaliser_before
from hdi_callback.attention.operations import (
    CHOICES,
    COPIES,
    EXPONENTIALS,
    FUSED_BY_TOKENS,
    RANDOM,
    SOFTMAX_LIKE,
    is_fused,
)
from hdi_callback.attention.planes import repeats, reshaped, small, thin, unique_rows
from hdi_callback.attention.products import Product, reduced_dims
from hdi_callback.attention.tape import DATA, MADE, Cell, Step, View

__all__ = ["OVER_HEADS", "OVER_QUERIES", "Core", "ValueProduct", "core_of", "layout_of_fused"]

OVER_QUERIES = "its softmax runs over queries, not over keys"
ELEMENT_BY_ELEMENT = "its weights are multiplied with values element by element"
OVER_HEADS = "its softmax runs over heads, or over sequences"
_FAR = 400  # cells to walk back from a softmax
_NEAR_MAP = 9  # the same, where a map mixes the scores of heads
_NEAR = 60  # steps to walk on from it


@dataclass(frozen=True, eq=False)
class ValueProduct:
    """Weights of one softmax, times values.

    Attributes:
        query: labels ``(n, queries, width)``.
        key: labels ``(n, keys, width)``.
        value: labels ``(n, keys, width)``.
        step: the product with the values, or the fused operation.
        product: the same; `None` of a fused operation.
        units: ``(n, queries)``, which row of the scores each row of the weights is; below 0 for none.
    """

    query: Label
    key: Label
    value: Label
    step: Step
    product: Product | None = None
    units: Tensor | None = None

    def placed(self, plane: Tensor) -> Tensor:
        """Give a plane ``(n, queries, width)`` the shape in which the output lies."""
        out = self.step.outputs[0]
        assert out is not None
        if self.product is not None:
            return self.product.placed(plane, out)
        if layout_of_fused(self.step) == "b q h":
            batch, queries, heads, width = out.shape
            plane = reshaped(plane, (batch, heads, queries, width)).transpose(1, 2)
        return reshaped(plane, out.shape)


@dataclass(frozen=True, eq=False)
class Core:
    """An attention, as it runs.

    Attributes:
        step: the softmax, or the fused operation.
        parts: its products with values; one, as a rule.
        score_step: the product of queries and keys; `None` of a fused operation.
        query_of: which query each row of the softmax is of, counted over all matrices of `score_step`, in the shape of
            the softmax without `dim`; `None` of a fused operation.
        dim: the dimension that the softmax runs over.
        flags: what else is true of its scores.
        scores: what weights are made of; `None` of a fused operation.
        normaliser: what makes them.
        is_causal: whether that hides later keys; where it is a softmax this is not looked at.
    """

    step: Step
    parts: tuple[ValueProduct, ...]
    score_step: Step | None = None
    query_of: Tensor | None = None
    dim: int = -1
    flags: frozenset[str] = frozenset()
    scores: View | None = None
    normaliser: str = "softmax"
    is_causal: bool = False

    @property
    def anchor(self) -> Step:
        """The step by which it is recognised in other forwards."""
        return self.step if self.normaliser == "softmax" or self.score_step is None else self.score_step


def core_of(labels: Labels, step: Step) -> Core | None:
    """Read the attention of a step; `None` if it is none.

    Raises:
        Unreadable: if it is attention that cannot be read.
    """  # noqa: DOC201
    if layout_of_fused(step):
        return _fused_core(labels, step)
    if step.op in SOFTMAX_LIKE:
        return _core_behind(labels, step, step.inputs[0], softmax_dim(step))
    normaliser = normaliser_before(labels, step)
    if normaliser is None:
        return None
    core = _core_behind(labels, normaliser.step, normaliser.scores, normaliser.dim)
    return None if core is None else replace(core, normaliser=normaliser.name, is_causal=normaliser.is_causal)


def _read(labels: Labels, view: View, what: str) -> Label:
    try:
        label = labels.read(view)
    except Unreadable as error:
        raise Unreadable(f"its {what} depend on an operation that is not followed: {error}") from None
    if label is None:
        nothing = torch.zeros((), dtype=torch.int64).expand(view.shape)
        return Label(nothing, nothing)
    return label


# attention in one operation


def layout_of_fused(step: Step) -> str:
    """Say in which order a fused attention takes the dimensions of queries: ``""`` if it is none."""
    if is_fused(step.op):
        return "b h q"
    return "b q h" if step.op in FUSED_BY_TOKENS and len(step.inputs[0].shape) == 4 else ""


def _fused_core(labels: Labels, step: Step) -> Core:
    given = []
    for view, what in zip(step.inputs[:3], ("queries", "keys", "values")):
        if layout_of_fused(step) == "b q h":
            (b, q, h, w), (sb, sq, sh, sw) = view.shape, view.stride
            view = view.seen_as((b, h, q, w), (sb, sh, sq, sw))
        given.append(_read(labels, view, what).reshaped((math.prod(view.shape[:-2]), *view.shape[-2:])))
    query, key, value = given
    groups = len(query.features)
    if len(key.features) != groups:
        key, value = (_repeated(one, groups // len(one.features)) for one in (key, value))
    return Core(step, (ValueProduct(query, key, value, step),))


def _repeated(label: Label, times: int) -> Label:
    features, tokens = (thin(plane.repeat_interleave(times, 0)) for plane in (label.features, label.tokens))
    return Label(features, tokens, label.flags)


# a softmax, written out

_MIXED = "heads are mixed, or cut in pieces, between its softmax and its values"


def _core_behind(labels: Labels, step: Step, scores: View, dim: int | None) -> Core | None:
    """Read the attention of what makes weights of scores over a dimension."""
    if scores.cell.kind < MADE or dim is None:
        return None
    own = set(_score_steps(labels, scores.cell))
    mapped = _mapped_scores(labels, scores.cell, beside=bool(own))
    consumers = _products_behind(labels, step) if own or (mapped and len(scores.shape) > 2) else []
    if consumers and (mapped & own if own else mapped):
        raise Unreadable("a map with a parameter mixes the scores of heads in front of its softmax")
    if not own:
        _refuse_other_scores(labels, step, scores, dim)
    if not consumers:
        return None
    dim %= len(scores.shape)
    label = _read(labels, scores, "scores")
    if RESAMPLED in label.flags:
        raise Unreadable("scores of several tokens are pooled")
    sources = labels.sources_in(label.features, "scores")
    if not sources:
        return None
    source = _own_source(labels, label, sources)
    for other in sources:
        _slots(labels, label.features, other)
    is_flipped, renumbered = _side(labels, label, dim, source)  # flipped: keys are the rows of the product
    parts = []
    for consumer in consumers:
        try:
            parts.append(_part(labels, consumer, sources, source, is_flipped=is_flipped, renumbered=renumbered))
        except Unreadable:  # noqa: PERF203
            if not parts:
                raise
    asked = _numbered(_slots(labels, label.features, source), label.tokens, source, is_flipped, renumbered)
    flags = {"scores are a sum of several products"} if len(sources) > 1 else set()
    flags |= label.flags & {SHARED, TIMES}
    return Core(step, tuple(parts), source.step, asked.amax(dim), dim - len(scores.shape), frozenset(flags), scores)


def softmax_dim(step: Step) -> int | None:
    """Say over which dimension a softmax runs, also one that is written out: exponentials over their sum."""
    shape = step.inputs[0].shape
    if step.op not in EXPONENTIALS:
        return int(step.args[1]) % len(shape) if shape else None
    made = step.outputs[0]
    for user in made.cell.users if made is not None else ():
        if user.op == "sum" and len(user.inputs[0].shape) == len(shape) and _divides(user):
            return reduced_dims(user)[0]
    before = step.inputs[0].cell.step
    if before is not None and before.op == "_log_softmax":
        return int(before.args[1]) % len(shape)
    for view in before.inputs if before is not None and before.op == "sub" else ():
        if view.cell.step is not None and view.cell.step.op in {"logsumexp", "add", "log"}:
            sizes = [d for d in range(len(view.shape)) if view.shape[d] == 1 != shape[d]]
            return sizes[0] if sizes else None
    return None


def _divides(step: Step) -> bool:
    """Whether something is divided by a sum, and not by its product with features, as in linear attention."""
    todo = [step]
    for current in todo:  # it grows
        users = [user for made in current.outputs if made is not None for user in made.cell.users]
        if any(user.op in {"div", "reciprocal", "log", "pow"} for user in users):
            return True
        todo += [user for user in users if len(todo) < _NEAR and (user.is_pointwise or user.op in COPIES)]
    return False


def _refuse_other_scores(labels: Labels, step: Step, scores: View, dim: int) -> None:
    """Refuse what weighs values by a softmax of something else than products of queries and keys."""
    try:
        consumers = [product for _, product in _products_behind(labels, step) if product.kind == "scores"]
    except Unreadable as error:
        label = labels.may_read(scores) if str(error) == ELEMENT_BY_ELEMENT else None
        if label is not None and bool((only_one(label.tokens.movedim(dim, -1)) == SEVERAL).all()):
            raise
        return
    if any(_is_read(labels, product.second) for product in consumers):
        raise Unreadable("its scores are no products of queries and keys")


def _is_read(labels: Labels, view: View) -> bool:
    """Say whether a tensor comes from a map, or from what cannot be followed."""
    try:
        return labels.read(view) is not None
    except Unreadable:
        return True


def _score_steps(labels: Labels, cell: Cell) -> Iterator[Step]:
    """Walk back from a softmax to products of two computed tensors."""
    todo, seen = [cell], set[int]()
    while todo and len(seen) < _FAR:
        one = todo.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if one.step is not None:
            product = labels.products.of(one.step)
            if product is not None and product.kind == "scores":
                yield one.step
            elif product is None or product.kind == "constant":
                todo += [view.cell for view in one.step.inputs if view.is_float and view.cell.kind >= MADE]
        if one.before is not None:
            todo.append(one.before)


def _mapped_scores(labels: Labels, cell: Cell, *, beside: bool) -> set[Step]:
    """Find products of two computed tensors that a map with a parameter takes, a few steps before the softmax.

    Where such products also come to the softmax without a map, what is added to them is followed as well.
    """  # noqa: DOC201
    found: set[Step] = set()
    todo = [(cell, False, 0)]
    while todo:
        one, is_mapped, far = todo.pop()
        if one.step is None or one.step.number in labels.installed or far > _NEAR_MAP:
            continue
        product = labels.products.of(one.step)
        if product is not None and product.kind == "scores":
            found |= {one.step} if is_mapped else set()
        elif product is not None and product.kind in {"weight", "filter"}:
            todo.append((product.first.cell, True, far + 1))
        else:
            views = [view for view in one.step.inputs if view.is_float and view.cell.kind >= MADE]
            todo += [(view.cell, is_mapped, far + 1) for view in (views if beside else views[:1])]
    return found


def _own_source(labels: Labels, label: Label, sources: list[FeatureRange]) -> FeatureRange:
    """Choose the product of queries and keys among those that scores are a sum of.

    Both factors depend on what the model is given, and not on positions alone; scores of a layer before are
    added, and so come from an earlier step.
    """  # noqa: DOC201, DOC501

    def strength(source: FeatureRange) -> int:
        product = labels.products.of(source.step) if source.step is not None else None
        return 0 if product is None else min(product.first.cell.kind, product.second.cell.kind)

    strongest = max(map(strength, sources))
    strong = [source for source in sources if strength(source) == strongest]
    own = [source for source in strong if source.step is None or source.step.number not in labels.score_steps] or strong
    short = small(label.features)
    for number in short[short < -1].unique().tolist():
        if (
            len({labels.owner(member) for member in labels.members(number)} & {labels.owner(one.start) for one in own})
            > 1
        ):
            raise Unreadable("its scores are a sum of several products of queries and keys")
    return own[-1]


def _slots(labels: Labels, features: Tensor, source: FeatureRange) -> Tensor:
    """Say which row of a source's scores each element is; -1 for none."""
    short = small(features)
    slots = torch.where((short >= source.start) & (short < source.end), short - source.start, -1)
    for one in short[short < -1].unique().tolist():
        mine = [member for member in labels.members(one) if source.start <= member < source.end]
        if len(mine) > 1:
            raise Unreadable("the scores of several heads, or of several queries, are mixed")
        slots[short == one] = mine[0] - source.start if mine else -1
    return slots.expand(features.shape)


def _side(labels: Labels, label: Label, dim: int, source: FeatureRange) -> tuple[bool, Tensor | None]:
    """Say whether keys are the rows of a product, and number rows anew where several products share queries."""
    slots = _slots(labels, label.features, source)
    try:
        return not _runs_over_columns(slots, label.tokens, dim, source), None
    except Unreadable:  # perhaps the same queries are in several rows, with the keys of several windows
        n, rows, _ = source.shape
        product = labels.products.of(source.step) if source.step is not None else None
        if product is None:
            raise
        first = _read(labels, product.first, "queries").reshaped(product.first_shape)
        wide = torch.cat([one.expand(n, -1, -1) for one in (first.features, first.tokens)], -1)
        _, alike = unique_rows(wide.flatten(0, 1))
        at = torch.full((int(alike.max()) + 1,), n * rows).scatter_reduce(0, alike, torch.arange(n * rows), "amin")
        renumbered = at[alike]
        slots = torch.where(slots < 0, -1, renumbered[slots.clamp(min=0)])
        return not _runs_over_columns(slots, label.tokens, dim, source), renumbered


def _runs_over_columns(slots: Tensor, tokens: Tensor, dim: int, source: FeatureRange) -> bool:
    """Say whether a dimension runs over the columns of a product; otherwise over its rows."""
    _, rows, columns = source.shape
    if not bool((small(tokens) > 0).any()):
        raise Unreadable("scores of several tokens are pooled")
    if slots.shape[dim] == 1:
        return columns == 1 or rows > 1
    slot_pairs, token_pairs = _pairs(slots, dim), _pairs(tokens, dim)
    slot_pairs = [one[(slot_pairs[0] >= 0) & (slot_pairs[1] >= 0)] for one in slot_pairs]
    token_pairs = [one[(token_pairs[0] > 0) & (token_pairs[1] > 0)] for one in token_pairs]
    same_slot, same_token = (one[0] == one[1] for one in (slot_pairs, token_pairs))
    if not same_slot.numel() or (bool(same_slot.all()) and not bool(same_token.all())):
        return True
    of_one_matrix = slot_pairs[0] // rows == slot_pairs[1] // rows
    if bool(same_token.all()) and bool(of_one_matrix.all()) and not bool(same_slot.any()):
        return False
    if bool(same_slot.all()) and bool(same_token.all()):
        raise Unreadable("its softmax does not run over tokens")
    one_of_each = slot_pairs[0] % rows == slot_pairs[1] % rows
    over_heads = bool(same_token.all()) and bool(one_of_each.all()) and not bool(of_one_matrix.any())
    raise Unreadable(OVER_HEADS if over_heads else "its softmax runs over heads, or over queries and keys together")


def _pairs(plane: Tensor, dim: int) -> list[Tensor]:
    """Give neighbours along a dimension."""
    for other in range(plane.dim()):
        if other != dim and plane.stride(other) == 0 and plane.shape[other] > 1:
            plane = plane.narrow(other, 0, 1)
    if plane.stride(dim) == 0:
        plane = plane.narrow(dim, 0, 2)
    size = plane.shape[dim]
    return [plane.narrow(dim, start, size - 1).flatten() for start in (0, 1)]


def _numbered(
    slots: Tensor, tokens: Tensor, source: FeatureRange, is_flipped: bool, renumbered: Tensor | None
) -> Tensor:
    """Number queries: by the rows of the product, or by its columns."""
    if renumbered is not None:
        slots = torch.where(slots < 0, -1, renumbered[slots.clamp(min=0)])
    if is_flipped:
        _, rows, columns = source.shape
        return torch.where(slots < 0, -1, slots // rows * columns + tokens - 1)
    return slots


def _part(
    labels: Labels, consumer: tuple[Step, Product], sources: list[FeatureRange], source: FeatureRange, *,
    is_flipped: bool, renumbered: Tensor | None
) -> ValueProduct:  # fmt: skip
    """Read a product of weights and values: which queries ask, with which keys and values."""
    step, product = consumer
    _, rows, columns = source.shape
    behind = _read(labels, product.first, "weights behind the softmax").reshaped(product.first_shape)
    if source not in labels.sources_in(behind.features, "scores"):
        raise Unreadable("the weights behind its softmax are not followed to the values")
    _refuse_several_softmaxes(labels, behind, sources)
    slots = _slots(labels, behind.features, source)
    units = _numbered(slots, behind.tokens, source, is_flipped, renumbered)
    units = units.expand(product.shape[0], -1, -1)
    unit = _one_unit(units)
    asking, asked = _factors(labels, source, is_flipped=is_flipped)
    rows = columns if is_flipped else rows
    query, key = _rows_of(asking, asked, unit, rows)
    value = _read(labels, product.second, "values")
    value = value.reshaped(product.second_shape).expanded((product.shape[0], *product.second_shape[1:]))
    if bool((small(units) < 0).any()):  # keys of other products beside
        beside = (units < 0).all(1)[..., None]
        value = Label(torch.where(beside, 0, value.features), value.tokens, value.flags)
    return ValueProduct(query, key, value, step, product, unit)


def _refuse_several_softmaxes(labels: Labels, behind: Label, sources: list[FeatureRange]) -> None:
    """Refuse weights that are put together of those of several softmaxes, place by place."""
    short = small(behind.features)
    for number in short[short < -1].unique().tolist():
        of = {labels.source_of(labels.owner(member)) for member in labels.members(number)}
        if any(one is not None and one.kind == "scores" and one not in sources for one in of):
            raise Unreadable("its weights are put together with those of another softmax")


def _one_unit(units: Tensor) -> Tensor:
    """Give the query of each row of weights, which must be one."""
    unit = units[..., 0] if repeats(units, -1) else units.amax(-1)
    if not repeats(units, -1) and not bool(((units == unit[..., None]) | (units < 0)).all()):
        by_column = units.amax(-2, keepdim=True)
        raise Unreadable(OVER_QUERIES if bool(((units == by_column) | (units < 0)).all()) else _MIXED)
    if bool((unit < 0).all()):
        raise Unreadable("the weights behind its softmax are not followed to the values")
    return unit


def _factors(labels: Labels, source: FeatureRange, *, is_flipped: bool) -> tuple[Label, Label]:
    """Read what asks and what is asked: ``(n, rows, width)`` each."""
    product = labels.products.of(source.step) if source.step is not None else None
    assert product is not None
    first = _read(labels, product.first, "queries").reshaped(product.first_shape)
    second = _read(labels, product.second, "keys").reshaped(product.second_shape).mT
    for view, label in ((product.first, first), (product.second, second)):
        if not bool(small(label.features).any()) and any(one.op in RANDOM for one in labels.leading_to([view])):
            raise Unreadable("its queries or keys are drawn at random: they are random features")
    n = source.shape[0]
    first, second = (one.expanded((n, *one.features.shape[1:])) for one in (first, second))
    return (second, first) if is_flipped else (first, second)


def _rows_of(asking: Label, asked: Label, unit: Tensor, rows: int) -> tuple[Label, Label]:
    """Give the queries of each row of weights, and their keys."""
    n = len(asking.features)
    if tuple(unit.shape) == (n, rows) and torch.equal(unit.flatten(), torch.arange(n * rows)):
        return asking, asked
    index = unit.clamp(min=0)
    slot, row = index // rows, index % rows
    features = torch.where((unit < 0)[..., None], 0, _picked(asking.features, slot, row))
    query = Label(thin(features), thin(_picked(asking.tokens, slot, row)), asking.flags)
    of = slot.amax(-1)
    return query, Label(asked.features[of], asked.tokens[of], asked.flags)


def _picked(plane: Tensor, slot: Tensor, row: Tensor) -> Tensor:
    if plane.stride(1) == 0:
        return plane[:, 0][slot]
    return plane[slot, row]


def _products_behind(labels: Labels, step: Step) -> list[tuple[Step, Product]]:
    """Walk on from a softmax to its products with values; the weights are the first factor of each."""
    made = step.outputs[0]
    if made is None:
        return []
    found: list[tuple[Step, Product]] = []
    of_constants: list[tuple[Step, Product]] = []  # of places, say
    seen, done = {id(made.cell)}, set[int]()
    todo = [(one.number, one) for one in made.cell.users]
    heapq.heapify(todo)
    while todo and len(done) < _NEAR:
        number, one = heapq.heappop(todo)
        if number in done or number <= step.number or "backward" in one.op or one.op in CHOICES:
            continue
        done.add(number)
        product = labels.products.of(one)
        if product is not None:
            taken = _with_weights_first(product, seen)
            if taken is not None and product.kind in {"weight", "filter"}:
                if not found:
                    raise Unreadable("a map with a parameter mixes its weights behind the softmax")
            elif taken is not None:
                (found if product.kind == "scores" else of_constants).append((one, taken))
            continue
        if one.op == "mul" and not found and _multiplies_values(labels, one, seen):
            raise Unreadable(ELEMENT_BY_ELEMENT)
        for out in one.outputs:
            if out is not None and out.is_float:
                seen.add(id(out.cell))
                for user in out.cell.users:
                    heapq.heappush(todo, (user.number, user))
    return found or of_constants


def _with_weights_first(product: Product, seen: set[int]) -> Product | None:
    if id(product.first.cell) in seen:
        return product
    if id(product.second.cell) not in seen:
        return None
    first, second = product.second.mT, product.first.mT
    return replace(product, first=first, second=second, is_flipped=not product.is_flipped)


def _multiplies_values(labels: Labels, step: Step, seen: set[int]) -> bool:
    out = step.outputs[0]
    if out is None or any(labels.products.of(user) is not None for user in out.cell.users):
        return False  # it is half of a product
    others = [view for view in step.inputs if id(view.cell) not in seen and view.cell.kind == DATA]
    return any(_is_read(labels, view) for view in others)
