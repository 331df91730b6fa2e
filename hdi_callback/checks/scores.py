"""What is done to scores on their way from the product of queries and keys to the values: scale, masks, dropout."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from hdi_callback.attention.cores import Core
from hdi_callback.attention.labels import Labels
from hdi_callback.attention.planes import small
from hdi_callback.attention.tape import Cell, Step, View

HIDDEN = -90.0  # a key is hidden by a score below it: exp(-90) = 1e-39
_FAR = 200  # cells to walk back
_PLAIN = {"clone", "_to_copy", "copy", "native_dropout", "_softmax", "_safe_softmax"}  # that hide nothing


@dataclass(frozen=True, eq=False)
class Change:
    """One operation on scores, or on weights behind the softmax, with another tensor.

    Attributes:
        op: ``"add"``, ``"mul"``, ``"masked_fill"``, ``"where"``, ``"attn_mask"`` of a fused attention, or another.
        hides: where it hides keys, broadcast over scores ``(..., queries, keys)``; `None` if that is not known.
        value: what is added, multiplied with, or filled in (NaN elsewhere), if it is known.
        is_learned: whether parameters make it.
        shape: of the other tensor, as it is broadcast.
    """

    op: str
    hides: Tensor | None
    value: Tensor | None = None
    is_learned: bool = False
    shape: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False)
class Link:
    """A step on a way, with what it takes beside."""

    step: Step
    main: View
    others: list[View]


def way(cell: Cell, is_end: Callable[[Step], bool]) -> list[Link] | None:
    """List the steps that lead to a cell from the nearest step that is an end, without it; `None` if there is none."""
    came: dict[Cell, Cell | None] = {cell: None}
    todo = [cell]
    while todo and len(came) < _FAR:
        one = todo.pop(0)
        if one.step is not None and is_end(one.step):
            links = []
            while (after := came[one]) is not None:
                step = after.step
                main = next((view for view in step.taken if view.cell is one), None) if step is not None else None
                if step is not None and main is not None:
                    links.append(Link(step, main, [view for view in step.taken if view is not main]))
                one = after
            return links
        taken = [view.cell for view in one.step.taken if view.is_float] if one.step is not None else []
        for other in [*taken, *([one.before] if one.before is not None else [])]:
            if other not in came:
                came[other] = one
                todo.append(other)
    return None


# scale


def scale_of(labels: Labels, core: Core, scores: list[Link]) -> float | None:
    """Multiply the numbers that queries, keys and scores are multiplied with; `None` if one is not known."""
    step, part = core.step, core.parts[0]
    if part.product is None:
        given = step.given("scale")
        scale: float | None = part.query.features.shape[-1] ** -0.5 if given is None else float(given)
        cells = [view.cell for view in step.taken[:2]]
    else:
        scale = _multiplied([_factor(link) for link in scores])
        product = labels.products.of(core.score_step) if core.score_step is not None else None
        if core.score_step is not None and core.score_step.op == "baddbmm":
            scale = _multiplied([scale, float(core.score_step.given("alpha", 1))])
        cells = [product.first.cell, product.second.cell] if product is not None else []

    def is_map(one: Step) -> bool:
        product = labels.products.of(one)
        return product is not None and product.kind in {"weight", "filter"}

    ways = [way(cell, is_map) for cell in cells if cell.step is not None]
    if any(one is None for one in ways):
        return None
    return _multiplied([scale, *(_factor(link, of_features=True) for one in ways for link in one or ())])


def _multiplied(factors: list[float | None]) -> float | None:
    known = [one for one in factors if one is not None]
    return math.prod(known) if len(known) == len(factors) else None


def _factor(link: Link, *, of_features: bool = False) -> float | None:
    """Give the number that a step multiplies with; what differs between features (positions, gains, norms) counts 1."""
    step = link.step
    if step.op not in {"mul", "div"}:
        return 1.0
    other = next((one for one in step.args[:2] if one is not link.main), None)
    if isinstance(other, View):
        value = other.value
        if value is None or not value.numel() or bool((value != value.flatten()[0]).any()):
            return 1.0 if of_features and other.numel > 1 else None
        other = float(value.flatten()[0])
    if not isinstance(other, (int, float)) or (step.op == "div" and (step.args[0] is not link.main or not other)):
        return None
    return 1 / other if step.op == "div" else float(other)


# masks


def changes_of(links: list[Link], axes: tuple[int, int] | None) -> list[Change]:
    """List what hides keys or is added on a way."""
    found: list[Change] = []
    for link in links:
        found += [_in_order(one, link, axes) for one in _changes(link)]
    return found


def changes_of_fused(step: Step) -> list[Change]:
    """List the masks that a fused attention is given."""
    given = step.given("attn_mask", step.given("attn_bias"))
    found = _added("attn_mask", given) if isinstance(given, View) else []
    if step.given("is_causal", default=False):
        queries, keys = (min(view.shape[-2], 64) for view in step.taken[:2])
        found.append(Change("is_causal", torch.ones(queries, keys, dtype=torch.bool).triu(1)))
    return found


def _changes(link: Link) -> list[Change]:
    step, nothing = link.step, torch.zeros((), dtype=torch.bool)
    others = [view for view in link.others if view.numel > 1]
    if step.op == "masked_fill":
        return [_filled(step.op, _known(step.args[1]), _number(step.args[2]))]
    if step.op == "where":
        is_kept, mask = step.args[1] is link.main, _known(step.args[0])
        mask = ~mask.bool() if mask is not None and is_kept else mask
        return [_filled(step.op, mask, _number(step.args[2] if is_kept else step.args[1]))]
    if step.op in {"add", "sub"}:
        return [change for one in others for change in _added(step.op, one, sign=-1 if step.op == "sub" else 1)]
    if step.op == "mul":
        return [Change(step.op, nothing, _known(one), one.cell.is_mapped, one.shape) for one in others]
    if step.is_pointwise or step.op in _PLAIN:
        return []
    return [Change(step.op, None)]


def _filled(op: str, mask: Tensor | None, value: float | None) -> Change:
    if mask is None or value is None:
        return Change(op, None)
    put = torch.where(mask.bool(), value, torch.nan)
    return Change(op, put <= HIDDEN, put, shape=tuple(put.shape))


def _added(op: str, view: View, sign: int = 1, depth: int = 8) -> list[Change]:
    """Say what is added to scores; a learned bias is taken apart, as masks are often put into it first."""
    if not view.cell.is_mapped:
        value = _known(view)
        if value is None:
            return [Change(op, None, shape=view.shape)]
        hides = ~value if value.dtype == torch.bool else sign * value <= HIDDEN
        return [Change(op, hides, value, shape=view.shape)]
    step = view.cell.step
    if step is not None and depth and (step.is_pointwise or step.op in _PLAIN):
        mains = [one for one in step.taken if one.is_float and one.cell.is_mapped]
        if step.op in {"add", "sub"}:
            parts = [one for one in step.taken if one.is_float and one.numel > 1]
            return [change for part in parts for change in _added(op, part, depth=depth - 1)]
        if len(mains) != 1 or (step.op == "mul" and any(one.numel > 1 for one in step.taken if one is not mains[0])):
            return [Change(op, None, is_learned=True, shape=view.shape)]
        masks = _changes(Link(step, mains[0], [one for one in step.taken if one is not mains[0]]))
        return [*_added(op, mains[0], depth=depth - 1), *masks]
    return [Change(op, torch.zeros((), dtype=torch.bool), is_learned=True, shape=view.shape)]


def _known(view: object) -> Tensor | None:
    return view.value.cpu() if isinstance(view, View) and view.value is not None else None


def _number(given: object) -> float | None:
    """Give the number that is filled in, also if a tensor is full of it."""
    if isinstance(given, (int, float)):
        return float(given)
    value = _known(given)
    if value is None or not value.numel() or bool((value != value.flatten()[0]).any()):
        return None
    return float(value.flatten()[0])


def _in_order(change: Change, link: Link, axes: tuple[int, int] | None) -> Change:
    """Let queries and keys be the last dims of a change, as they may lie elsewhere in the scores."""
    if axes == (-2, -1) or not change.shape:
        return change
    if axes is None:
        return Change(change.op, None, None, change.is_learned, change.shape)

    def turned(value: Tensor | None) -> Tensor | None:
        if value is None or not value.dim():
            return value
        wide = value.reshape(*[1] * (len(link.main.shape) - value.dim()), *value.shape)
        return wide.movedim(axes, (-2, -1))

    shape = turned(torch.zeros(change.shape, device="meta"))
    assert shape is not None
    return Change(change.op, turned(change.hides), turned(change.value), change.is_learned, tuple(shape.shape))


def hidden_by(changes: list[Change]) -> Tensor | None:
    """Say which keys are hidden, ``(..., queries, keys)`` or broadcast to that; `None` if it is not known."""
    hidden = torch.zeros(1, 1, dtype=torch.bool)
    for change in changes:
        if change.hides is None or (
            change.op == "mul" and change.value is not None and bool((change.value == 0).any())
        ):
            return None
        try:
            hidden = hidden | change.hides
        except RuntimeError:  # shapes of before and behind a reshaping
            return None
    return hidden


def axes_of(core: Core) -> tuple[int, int] | None:
    """Say which dims of the scores are queries and keys, counted from the end; `None` if that is not known."""
    part = core.parts[0]
    if core.asked is None or part.units is None:
        return -2, -1
    rank = core.asked.dim() + 1
    units, tokens = part.units, part.query.tokens[..., 0]
    if units.shape != tokens.shape or bool((core.asked < 0).any()):
        return None
    count = int(max(core.asked.max(), units.max())) + 1
    matrix, token = torch.full((count,), -1), torch.full((count,), -1)
    known = units >= 0
    matrix[units[known]] = torch.arange(len(units))[:, None].expand_as(units)[known]
    token[units[known]] = tokens[known]
    for dim, size in enumerate(core.asked.shape):
        first, second = (core.asked.narrow(dim, start, size - 1) for start in (0, 1)) if size > 1 else (None, None)
        if first is None or second is None:
            continue
        same_keys = bool((matrix[first] == matrix[second]).all())
        if same_keys and bool((token[first] != token[second]).all()):
            at = dim if dim < rank + core.dim else dim + 1
            return at - rank, core.dim
    return None


# behind the softmax


def dropout_behind(links: list[Link]) -> float:
    """Give the probability of the dropout behind a softmax, 0 if there is none."""
    for link in links:
        if link.step.op == "native_dropout" and link.step.args[2] is not False:
            return float(link.step.args[1])
        for view in link.others if link.step.op == "mul" else ():
            cell: Cell | None = view.cell
            while cell is not None:  # a tensor that is filled with 0 and 1, and divided, in place
                if cell.step is not None and cell.step.op == "bernoulli":
                    return 1 - float(cell.step.given("p", math.nan))
                cell = cell.before
    return 0.0


def is_renormalised(step: Step) -> bool:
    """Say whether weights are divided by sums of themselves behind the softmax."""
    made = step.made[0]
    if made is None:
        return False
    cells, todo = {made.cell}, [made.cell]
    for _ in range(12):
        if not todo:
            return False
        for user in todo.pop(0).users:
            if user.op == "div" and len([view for view in user.taken if view.cell in cells]) > 1:
                return True
            if user.is_pointwise or user.op in {"sum", "clone", "_to_copy"}:
                for out in user.made:
                    if out is not None and out.cell not in cells:
                        cells.add(out.cell)
                        todo.append(out.cell)
    return False


def few(plane: Tensor) -> list[int]:
    """List the different numbers of a plane."""
    return [int(one) for one in small(plane).unique().tolist()]
