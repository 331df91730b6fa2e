"""Attention on a tape: a softmax between two products of what has labels, or one operation that is all of that.

A `Core` gives the queries, keys and values that meet there, with labels: a matrix of queries for each group of rows
that share keys. Nothing here knows what a head is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice

import torch
from torch import Tensor

from hdi_callback.attention import operations as ops
from hdi_callback.attention.discovery.labels import (
    RESAMPLED,
    SEVERAL,
    FeatureRange,
    Label,
    Labels,
    only_one,
)
from hdi_callback.attention.discovery.planes import repeats, reshaped, small, thin
from hdi_callback.attention.discovery.products import Product, Unreadable, reduced_dims
from hdi_callback.attention.normalisers import Normaliser
from hdi_callback.attention.tape import DATA, MADE, Cell, Step, View, WalkOn, walk_back

OVER_QUERIES = "its softmax runs over queries, not over keys"
ELEMENT_BY_ELEMENT = "its weights are multiplied with values element by element"
OVER_HEADS = "its softmax runs over heads or sequences, alone or with keys"
_MOST_CELLS_TO_SCORES = 400  # from a softmax back to the matmul of queries and keys
_MOST_STEPS_TO_MAP = 9  # from a softmax back to a map that mixes the scores of heads
_MOST_STEPS_TO_VALUES = 60
_MASKING = {"add", "mul", "where", "masked_fill", "tril", "triu"} | ops.KEEPS  # between exponentials and their sum


@dataclass(frozen=True, eq=False)
class ValueProduct:
    """One matmul of attention weights with values, with the queries and keys behind those weights."""

    labels: dict[str, Label]  # role -> ``(n, queries or keys, width)``
    step: Step  # the product with the values, or the fused operation
    product: Product | None = None  # the same; `None` of a fused operation
    units: Tensor | None = None  # ``(n, queries)``, the row of the scores of each row of weights; below 0: none

    def width(self, role: str) -> int:
        """Return how many features of a role meet there."""
        return self.labels[role].features.shape[-1]

    def placed(self, plane: Tensor) -> Tensor:
        """Return a plane ``(n, queries, width)`` in the shape of the output."""
        out = self.step.output
        if self.product is not None:
            return self.product.placed(plane, out)
        if layout_of_fused(self.step) == "b q h":
            batch, queries, heads, width = out.shape
            plane = reshaped(plane, (batch, heads, queries, width)).transpose(1, 2)
        return reshaped(plane, out.shape)


@dataclass(frozen=True, eq=False)
class Core:
    """An attention, as it runs."""

    step: Step  # the softmax, or the fused operation
    parts: tuple[ValueProduct, ...]  # its products with values; one, as a rule
    score_step: Step | None = None  # the product of queries and keys; `None` of a fused operation
    query_of: Tensor | None = None  # of each row of the softmax, counted over all matrices of `score_step`
    dim: int = -1  # that the softmax runs over
    scores: View | None = None  # what the softmax takes; `None` of a fused operation
    normaliser: Normaliser | None = None  # in place of a softmax
    notes: tuple[str, ...] = ()  # what rows and weights do not show of it


def core_of(labels: Labels, step: Step) -> Core | None:
    """Return the attention of a step, `None` if it is none; raise `Unreadable` if it cannot be read."""
    if layout_of_fused(step):
        return _fused_core(labels, step)
    normaliser = step.normaliser
    if normaliser is not None and (label := labels.read(normaliser.scores)) is not None:
        labels.installed[step.number] = label
        core = _core_behind(labels, step, normaliser.scores, normaliser.dim)
        return None if core is None else replace(core, normaliser=normaliser)
    is_read_at_sum = step.op in ops.EXPONENTIALS and any(user.normaliser for user in _users_behind_masks(step))
    if step.op not in ops.SOFTMAX_LIKE or is_read_at_sum:
        return None
    return _core_behind(labels, step, step.inputs[0], softmax_dim(step))


def _read(labels: Labels, view: View, role: str) -> Label:
    try:
        label = labels.read(view)
    except Unreadable as error:
        raise Unreadable(f"its {role} depend on an operation that is not followed: {error}") from None
    if label is None:
        nothing = torch.zeros((), dtype=torch.int64).expand(view.shape)
        return Label(nothing, nothing)
    return label


# attention in one operation


def layout_of_fused(step: Step) -> str:
    """Return in which order a fused attention takes the dimensions of queries, ``""`` if it is none."""
    layout = ops.FUSED.get(step.op, "")
    return layout if layout != "b q h" or len(step.inputs[0].shape) == 4 else ""


def _fused_core(labels: Labels, step: Step) -> Core:
    factors = []
    for view, role in zip(step.inputs[:3], ("queries", "keys", "values")):
        if layout_of_fused(step) == "b q h":
            (b, q, h, w), (sb, sq, sh, sw) = view.shape, view.stride
            view = view.seen_as((b, h, q, w), (sb, sh, sq, sw))
        factors.append(_read(labels, view, role).reshaped((math.prod(view.shape[:-2]), *view.shape[-2:])))
    query, key, value = factors
    groups = len(query.features)
    if len(key.features) != groups:
        times = groups // len(key.features)
        key, value = (label.mapped(lambda plane: thin(plane.repeat_interleave(times, 0))) for label in (key, value))
    return Core(step, (ValueProduct({"query": query, "key": key, "value": value}, step),))


# a softmax, written out

_MIXED = "heads are mixed, or cut in pieces, between its softmax and its values"


def _core_behind(labels: Labels, step: Step, scores: View, dim: int | None) -> Core | None:
    """Return the attention of what makes weights of scores over a dimension."""
    if scores.cell.kind < MADE or dim is None:
        return None
    score_steps = set(_score_steps(labels, scores.cell))
    mapped_steps = _mapped_scores(labels, scores.cell, beside=bool(score_steps))
    consumers = _products_behind(labels, step) if score_steps or (mapped_steps and len(scores.shape) > 2) else []
    if consumers and (mapped_steps & score_steps if score_steps else mapped_steps):
        raise Unreadable("a map with a parameter mixes the scores of heads in front of its softmax")
    if not score_steps:
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
    for summand in sources:
        _slots(labels, label.features, summand)
    slots = _slots(labels, label.features, source)
    is_flipped = not _runs_over_columns(slots, label.tokens, dim, source)  # keys are the rows of the product
    parts = []
    for consumer in consumers:
        try:
            parts.append(_part(labels, consumer, sources, source, is_flipped=is_flipped))
        except Unreadable:  # noqa: PERF203
            if not parts:
                raise
    query_of = _numbered(slots, label.tokens, source, is_flipped)
    at = dim - len(scores.shape)
    notes = _CHOICE if _has_choice_behind(step, [product for _, product in consumers]) else ()
    return Core(step, tuple(parts), source.step, query_of.amax(dim), at, scores, notes=notes)


_CHOICE = ("a choice among its weights behind the softmax",)  # a note: its rows do not show it


def _has_choice_behind(softmax: Step, products: list[Product]) -> bool:
    """Whether weights are chosen among between a softmax and the products with values."""

    def inputs(cell: Cell) -> list[Cell]:
        return [each for each in cell.inputs if each.step is not None and each.step.number > softmax.number]

    cells = islice(walk_back([product.first.cell for product in products], inputs), _MOST_CELLS_TO_SCORES)
    return any(cell.step is not None and cell.step.op in ops.CHOICES for cell in cells)


def softmax_dim(step: Step) -> int | None:
    """Return the dimension that a softmax runs over, also one that is written out: exponentials over their sum."""
    shape = step.inputs[0].shape
    if step.op not in ops.EXPONENTIALS:
        return int(step.args[1]) % len(shape) if shape else None
    return next((reduced_dims(user)[0] for user in sums_of(step) if len(user.inputs[0].shape) == len(shape)), None)


def sums_of(exponential: Step) -> list[Step]:
    """Return the sums that exponentials are divided by, also behind a mask."""
    return [user for user in _users_behind_masks(exponential) if user.op == "sum" and _divides(user)]


def _users_behind_masks(exponential: Step) -> Iterator[Step]:
    """Return what uses exponentials, also behind a mask."""
    walk = WalkOn([exponential.output.cell], most=_MOST_STEPS_TO_VALUES)
    for user in walk:
        yield user
        others = [view for view in user.inputs if view.cell not in walk.met]
        if user.op in _MASKING and not any(view.cell.is_mapped for view in others):
            walk.follow(user)


def _divides(step: Step) -> bool:
    """Whether something is divided by a sum, and not by its product with features, as in linear attention."""
    walk = WalkOn([step.output.cell], most=_MOST_STEPS_TO_VALUES)
    for user in walk:
        if user.op in {"div", "reciprocal", "log", "pow"}:
            return True
        if user.is_pointwise or user.op in ops.COPIES:
            walk.follow(user)
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
    """Whether a tensor comes from a projection, or from what cannot be followed."""
    try:
        return labels.read(view) is not None
    except Unreadable:
        return True


def _score_steps(labels: Labels, cell: Cell) -> Iterator[Step]:
    """Return the products of two computed tensors that a softmax depends on, with no projection between."""

    def inputs(cell: Cell) -> list[Cell]:
        before = [cell.before] if cell.before is not None else []
        if cell.step is None or labels.products.kind(cell.step) not in {"", "constant"}:
            return before
        return [view.cell for view in cell.step.inputs if view.is_float and view.cell.kind >= MADE] + before

    for current in islice(walk_back([cell], inputs), _MOST_CELLS_TO_SCORES):
        if current.step is not None and labels.products.kind(current.step) == "scores":
            yield current.step


def _mapped_scores(labels: Labels, cell: Cell, *, beside: bool) -> set[Step]:
    """Return the products that a projection takes before the softmax; `beside` those that come to it without a map."""
    mapped: set[Step] = set()
    todo = [(cell, False, 0)]
    while todo:
        current, is_mapped, far = todo.pop()
        if current.step is None or current.step.number in labels.installed or far > _MOST_STEPS_TO_MAP:
            continue
        product = labels.products.of(current.step)
        if product is not None and product.kind == "scores":
            mapped |= {current.step} if is_mapped else set()
        elif product is not None and product.kind in {"weight", "filter"}:
            todo.append((product.first.cell, True, far + 1))
        else:
            views = [view for view in current.step.inputs if view.is_float and view.cell.kind >= MADE]
            todo += [(view.cell, is_mapped, far + 1) for view in (views if beside else views[:1])]
    return mapped


def _own_source(labels: Labels, label: Label, sources: list[FeatureRange]) -> FeatureRange:
    """Return which product in a sum of scores is of data on both sides, and of no layer before."""

    def strength(source: FeatureRange) -> int:
        product = labels.products.of(source.step)
        return 0 if product is None else min(product.first.cell.kind, product.second.cell.kind)

    strongest = max(map(strength, sources))
    strong = [source for source in sources if strength(source) == strongest]
    candidates = [source for source in strong if source.step and source.step.number not in labels.score_steps] or strong
    short = small(label.features)
    for number in short[short < -1].unique().tolist():
        owners = {labels.owner(member) for member in labels.members(number)}
        if len(owners & {labels.owner(source.start) for source in candidates}) > 1:
            raise Unreadable("its scores are a sum of several products of queries and keys")
    return candidates[-1]


def _slots(labels: Labels, features: Tensor, source: FeatureRange) -> Tensor:
    """Return which row of a product's scores each element is of; -1 for none."""
    short = small(features)
    slots = torch.where((short >= source.start) & (short < source.end), short - source.start, -1)
    for number in short[short < -1].unique().tolist():
        members = [member for member in labels.members(number) if source.start <= member < source.end]
        if len(members) > 1:
            raise Unreadable("the scores of several heads, or of several queries, are mixed")
        slots[short == number] = members[0] - source.start if members else -1
    return slots.expand(features.shape)


def _runs_over_columns(slots: Tensor, tokens: Tensor, dim: int, source: FeatureRange) -> bool:
    """Whether a dimension runs over the columns of a product; otherwise it runs over its rows."""
    _, rows, columns = source.shape
    if slots.shape[dim] == 1:
        return columns == 1 or rows > 1
    slot_pairs, token_pairs = _pairs(slots, dim), _pairs(tokens, dim)
    slot_pairs = slot_pairs[:, (slot_pairs >= 0).all(0)]
    token_pairs = token_pairs[:, (token_pairs > 0).all(0)]
    same_slot, same_token = (pairs[0] == pairs[1] for pairs in (slot_pairs, token_pairs))
    if not same_slot.numel() or (bool(same_slot.all()) and not bool(same_token.all())):
        return True
    of_one_matrix = slot_pairs[0] // rows == slot_pairs[1] // rows
    if bool(same_token.all()) and bool(of_one_matrix.all()) and not bool(same_slot.any()):
        return False
    one_of_each = slot_pairs[0] % rows == slot_pairs[1] % rows
    over_heads = bool(one_of_each.all()) and not bool(of_one_matrix.all())
    raise Unreadable(OVER_HEADS if over_heads else "its softmax runs over queries and keys together")


def _pairs(plane: Tensor, dim: int) -> Tensor:
    """Return neighbours along a dimension, ``(2, pairs)``."""
    rows = plane.movedim(dim, 0)
    return torch.stack([small(rows[:-1]).flatten(), small(rows[1:]).flatten()])


def _numbered(slots: Tensor, tokens: Tensor, source: FeatureRange, is_flipped: bool) -> Tensor:
    """Return the numbers of queries: by the rows of the product, or by its columns."""
    if is_flipped:
        _, rows, columns = source.shape
        return torch.where(slots < 0, -1, slots // rows * columns + tokens - 1)
    return slots


def _part(
    labels: Labels, consumer: tuple[Step, Product], sources: list[FeatureRange], source: FeatureRange, *,
    is_flipped: bool
) -> ValueProduct:  # fmt: skip
    """Return a product of weights and values, with the queries and keys of these weights."""
    step, product = consumer
    _, rows, columns = source.shape
    weights = _read(labels, product.first, "weights behind the softmax").reshaped(product.first_shape)
    if source not in labels.sources_in(weights.features, "scores"):
        raise Unreadable("the weights behind its softmax are not followed to the values")
    _refuse_several_softmaxes(labels, weights, sources)
    slots = _slots(labels, weights.features, source)
    units = _numbered(slots, weights.tokens, source, is_flipped)
    units = units.expand(product.shape[0], -1, -1)
    unit = _one_unit(units)
    queries, keys = _factors(labels, source, is_flipped=is_flipped)
    query, key = _rows_of(queries, keys, unit, columns if is_flipped else rows)
    value = _read(labels, product.second, "values")
    value = value.reshaped(product.second_shape).expanded((product.shape[0], *product.second_shape[1:]))
    return ValueProduct({"query": query, "key": key, "value": value}, step, product, unit)


def _refuse_several_softmaxes(labels: Labels, weights: Label, sources: list[FeatureRange]) -> None:
    """Refuse weights that are combined element by element from those of several softmaxes."""
    short = small(weights.features)
    for number in short[short < -1].unique().tolist():
        ranges = {labels.ranges.get(labels.owner(member)) for member in labels.members(number)}
        if any(item is not None and item.kind == "scores" and item not in sources for item in ranges):
            raise Unreadable("its weights are put together with those of another softmax")


def _one_unit(units: Tensor) -> Tensor:
    """Return the query of each row of weights, which must be one."""
    unit = units[..., 0] if repeats(units, -1) else units.amax(-1)
    if not repeats(units, -1) and not bool(((units == unit[..., None]) | (units < 0)).all()):
        by_column = units.amax(-2, keepdim=True)
        raise Unreadable(OVER_QUERIES if bool(((units == by_column) | (units < 0)).all()) else _MIXED)
    if bool((unit < 0).all()):
        raise Unreadable("the weights behind its softmax are not followed to the values")
    return unit


def _factors(labels: Labels, source: FeatureRange, *, is_flipped: bool) -> tuple[Label, Label]:
    """Return the labels of queries and of keys, ``(n, rows, width)`` each."""
    product = labels.products.of(source.step)
    assert product is not None
    first = _read(labels, product.first, "queries").reshaped(product.first_shape)
    second = _read(labels, product.second, "keys").reshaped(product.second_shape).mT
    for view, label in ((product.first, first), (product.second, second)):
        if not bool(small(label.features).any()) and any(step.op in ops.RANDOM for step in labels.leading_to([view])):
            raise Unreadable("its queries or keys are drawn at random: they are random features")
    n = source.shape[0]
    first, second = (label.expanded((n, *label.features.shape[1:])) for label in (first, second))
    return (second, first) if is_flipped else (first, second)


def _rows_of(queries: Label, keys: Label, unit: Tensor, rows: int) -> tuple[Label, Label]:
    """Return the queries of each row of weights, and their keys."""
    n = len(queries.features)
    if tuple(unit.shape) == (n, rows) and torch.equal(unit.flatten(), torch.arange(n * rows)):
        return queries, keys
    index = unit.clamp(min=0)
    slot, row = index // rows, index % rows
    features, tokens = (
        plane[:, 0][slot] if plane.stride(1) == 0 else plane[slot, row] for plane in (queries.features, queries.tokens)
    )
    query = Label(thin(torch.where((unit < 0)[..., None], 0, features)), thin(tokens), queries.flags)
    return query, keys.mapped(lambda plane: plane[slot.amax(-1)])


def _products_behind(labels: Labels, softmax: Step) -> list[tuple[Step, Product]]:
    """Return the products of a softmax with values; the weights are the first factor of each."""
    with_values: list[tuple[Step, Product]] = []
    with_constants: list[tuple[Step, Product]] = []  # of positions, say
    walk = WalkOn([softmax.output.cell], most=_MOST_STEPS_TO_VALUES)
    for step in walk:
        if "backward" in step.op or step.op in ops.CHOICES:
            continue
        product = labels.products.of(step)
        if product is None:
            is_factor = step.op == "mul" and not any(map(labels.products.of, step.output.cell.users))
            others = [view for view in step.inputs if view.cell not in walk.met and view.cell.kind == DATA]
            if is_factor and not with_values and any(_is_read(labels, view) for view in others):
                raise Unreadable(ELEMENT_BY_ELEMENT)
            walk.follow(step)
        elif product.first.cell in walk.met or product.second.cell in walk.met:
            if product.first.cell not in walk.met:
                first, second = product.second.mT, product.first.mT
                product = replace(product, first=first, second=second, is_flipped=not product.is_flipped)
            if product.kind not in {"weight", "filter"}:
                (with_values if product.kind == "scores" else with_constants).append((step, product))
            elif not with_values:
                raise Unreadable("a map with a parameter mixes its weights behind the softmax")
    return with_values or with_constants
