"""What is done to scores on their way from the product of queries and keys to the values: scale, masks, dropout."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hdi_callback.attention.discovery.cores import Core, sums_of
from hdi_callback.attention.discovery.labels import Labels
from hdi_callback.attention.operations import COPIES, FUSED, RANDOM, REDUCTIONS, SOFTMAXES
from hdi_callback.attention.tape import Cell, Step, View, walk_back

KEPT = 64  # of masks and tables the tape keeps so many queries and keys
HIDDEN = -90.0  # a key is hidden by a score below it: exp(-90) = 1e-39
_FAR = 200  # cells to walk back
_MASKING = re.compile("window|bias|mask|slopes")  # names of arguments that may hide keys
_HIDES_NOTHING = torch.zeros((), dtype=torch.bool)


@dataclass(frozen=True, eq=False)
class Change:
    """One operation on scores, or on weights behind the softmax, with another tensor."""

    op: str  # "add", "mul", "masked_fill", "where", "attn_mask" of a fused attention, or another
    hides: Tensor | None  # where it hides keys, broadcast over scores ``(..., queries, keys)``; `None`: not known
    value: Tensor | None = None  # what is added, multiplied with, or filled in (NaN elsewhere), if it is known
    bias: tuple[int, ...] = ()  # shape of a learned tensor that is added

    @property
    def is_added(self) -> bool:
        """Whether a tensor is added to scores, or subtracted from them."""
        return self.op in {"add", "sub", "attn_mask"} or self.op.startswith("score_mod")


@dataclass(frozen=True, eq=False)
class Link:
    """A step on a path, and the input of it that lies on that path."""

    step: Step
    main: View

    @property
    def others(self) -> list[View]:
        """Return the other inputs of the step that are no numbers."""
        return [view for view in self.step.inputs if view is not self.main and view.numel > 1]


def links_back(cell: Cell, is_end: Callable[[Step], bool]) -> list[Link] | None:
    """Return the shortest path from a cell back to a step that is an end, without it; `None` if there is none."""
    todo: list[tuple[Cell, list[Link]]] = [(cell, [])]
    visited = {cell}
    while todo and len(visited) < _FAR:
        current, behind = todo.pop(0)
        if current.step is None:
            continue
        if is_end(current.step):
            return behind
        for view in current.step.inputs:
            if view.is_float and view.cell not in visited:
                visited.add(view.cell)
                todo.append((view.cell, [Link(current.step, view), *behind]))
    return None


def sides_of(labels: Labels, core: Core) -> list[View]:
    """Return the queries and keys of an attention, as their matmul takes them."""
    product = labels.products.of(core.score_step)
    return core.step.inputs[:2] if product is None else [product.first, product.second]


def scale_of(labels: Labels, core: Core, scores: list[Link]) -> float | None:
    """Return the product of the numbers that scale queries, keys and scores; `None` if one is not known."""
    factors: list[float | None]
    if core.score_step is None:
        factors = [_scale_of_fused(core.step, core.parts[0].width("query"))]
    else:
        factors = [float(core.score_step.argument("alpha", 1)), *map(_factor, scores)]  # alpha is of baddbmm

    for view in sides_of(labels, core):
        links = links_back(view.cell, labels.products.is_projection) if view.cell.step is not None else []
        if links is None:
            return None
        factors += [_factor(link, of_features=True) for link in links]
    numbers = [factor for factor in factors if factor is not None]
    return math.prod(numbers) if len(numbers) == len(factors) else None


def _scale_of_fused(step: Step, width: int) -> float | None:
    """Return by what a fused attention scales scores; `None` where a package gives it another name than is known."""
    names = [name for name in ("scale", "softmax_scale") if name in step.arguments]
    if not names and FUSED.get(step.op) == "b q h":
        return None
    number = step.argument(names[0]) if names else None
    return width**-0.5 if number is None else float(number)


def dropout_of_fused(step: Step) -> float | None:
    """Return the probability of dropout of a fused attention; `None` where a package gives it another name."""
    is_named = "dropout_p" in step.arguments
    return float(step.argument("dropout_p") or 0.0) if is_named or FUSED.get(step.op) != "b q h" else None


def _factor(link: Link, *, of_features: bool = False) -> float | None:
    """Return the factor of a step; what differs between features (positions, gains, norms) counts 1."""
    step = link.step
    if step.op not in {"mul", "div"}:
        return 1.0
    operand = next((value for value in step.args[:2] if value is not link.main), None)
    number = _number(operand)
    if number is None and of_features and isinstance(operand, View) and operand.numel > 1:
        return 1.0
    if step.op == "mul" or number is None:
        return number
    return 1 / number if number and step.args[0] is link.main else None


def changes_of(links: list[Link]) -> list[Change]:
    """Return what hides keys, or is added, on a path."""
    return [change for link in links for change in _changes(link)]


def changes_of_product(step: Step | None) -> list[Change]:
    """Return what the product of queries and keys begins with."""
    start = step.args[0] if step is not None and step.op == "baddbmm" and step.argument("beta", 1) else None
    changes = _added("add", start) if isinstance(start, View) else []
    hides_nothing = (change.hides is not None and not bool(change.hides.any()) for change in changes)
    return [Change("baddbmm", _HIDES_NOTHING if is_known else None) for is_known in hides_nothing]


def changes_of_fused(step: Step) -> list[Change]:
    """Return the masks of a fused attention."""
    if FUSED.get(step.op) == "b q h":
        return _changes_of_package(step)
    mask = step.argument("attn_mask", step.argument("attn_bias"))
    changes = _added("attn_mask", mask) if isinstance(mask, View) else []
    if (name := step.argument("score_mod")) is not None:  # of FlexAttention
        bias = step.argument("score_bias").value.cpu()
        changes.append(Change(f"score_mod `{name}`", bias <= HIDDEN, bias))
    if step.argument("is_causal", default=False):
        queries, keys = (min(view.shape[-2], KEPT) for view in step.inputs[:2])
        changes.append(Change("is_causal", torch.ones(queries, keys, dtype=torch.bool).triu(1)))
    return changes


def _changes_of_package(step: Step) -> list[Change]:
    """Return the mask of a package's attention, not known where more than a causal flag may hide or add something."""
    causal = next((name for name in ("is_causal", "causal") if name in step.arguments), "")
    further = [step.argument(name) for name in step.arguments if _MASKING.search(name)]
    is_plain = all(not isinstance(value, View) and value in {None, False, -1} for value in further)
    queries, keys = (view.shape[1] for view in step.inputs[:2])
    if not causal or not is_plain or queries != keys:
        return [Change(step.op, None)]
    count = min(keys, KEPT)
    return [Change(causal, torch.ones(count, count, dtype=torch.bool).triu(1))] if step.argument(causal) else []


def _changes(link: Link) -> list[Change]:
    step = link.step
    if step.op == "masked_fill":
        return [_filled(step.op, _value_of(step.args[1]), step.args[2])]
    if step.op == "where":
        mask, is_kept = _value_of(step.args[0]), step.args[1] is link.main
        hidden = ~mask.bool() if mask is not None and is_kept else mask
        return [_filled(step.op, hidden, step.args[2] if is_kept else step.args[1])]
    if step.op in {"add", "sub"}:
        return [change for other_view in link.others for change in _added(step.op, other_view)]
    if step.op == "mul":
        return [Change(step.op, _HIDES_NOTHING, _value_of(other_view)) for other_view in link.others]
    hides_nothing = step.is_pointwise or step.op in {"native_dropout", "_log_softmax", *COPIES, *SOFTMAXES}
    return [] if hides_nothing else [Change(step.op, None)]


def links_to_sum(core: Core, behind: list[Link]) -> list[Link]:
    """Return the steps between a function of scores and the sum that what it returns is divided by."""
    if core.normaliser is not None and core.scores is not None:
        start = core.scores.cell.step
        return links_back(core.step.output.cell, lambda step: step is start) or []
    sums = [links_back(step.inputs[0].cell, lambda step: step is core.step) or [] for step in sums_of(core.step)]
    summed = {link.step for links in sums for link in links}
    return [link for link in behind if link.step in summed]


def masks_of_weights(links: list[Link]) -> list[Change]:
    """Return where weights are set to 0 before they are divided by their sum, which hides keys."""
    return [
        Change("masked_fill", None if change.value is None or dropout_behind([link]) != 0 else change.value == 0)
        for link in links for change in _changes(link) if not change.is_added
    ]  # fmt: skip


def is_curve(step: Step) -> bool:
    """Whether a step bends scores, as a soft cap does."""
    straight = {"add", "sub", "mul", "div", "neg", "masked_fill", "where", *COPIES}
    return step.is_pointwise and step.op not in straight


def _filled(op: str, mask: Tensor | None, value: object) -> Change:
    number = _number(value)
    if mask is None or number is None:
        return Change(op, None)
    filled = torch.where(mask.bool(), number, torch.nan)
    return Change(op, filled <= HIDDEN, filled)


def _added(op: str, view: View, depth: int = 8) -> list[Change]:
    """Return what is added to scores; a learned bias is taken apart, as masks are often put into it first."""
    if not view.cell.is_mapped:
        value = _value_of(view)
        if value is None:
            return [Change(op, None)]
        if value.dtype == torch.bool and op == "attn_mask":  # added by hand, it is 0 and 1
            return [Change(op, ~value, value)]
        value = (-1 if op == "sub" else 1) * value.float()
        return [Change(op, value <= HIDDEN, value)]
    step = view.cell.step
    if step is not None and step.op in REDUCTIONS and view.shape[-1] == 1:
        return []  # the largest of a query's scores, say, without which its softmax is the same
    if step is None or not (step.is_pointwise or step.op in COPIES):
        return [Change(op, _HIDES_NOTHING, bias=view.shape)]
    if not depth:
        return [Change(op, None, bias=view.shape)]
    if step.op == "add":
        return [change for part in step.inputs if part.numel > 1 for change in _added(op, part, depth - 1)]
    links = [Link(step, part_view) for part_view in step.inputs if part_view.is_float and part_view.cell.is_mapped]
    if len(links) != 1 or (step.op == "mul" and links[0].others):
        return [Change(op, None, bias=view.shape)]
    return [*_added(op, links[0].main, depth - 1), *_changes(links[0])]


def _value_of(value: object) -> Tensor | None:
    return value.value.cpu() if isinstance(value, View) and value.value is not None else None


def _number(operand: object) -> float | None:
    """Return a number, also that of which a tensor is full; `None` if there is none, or if it is not known."""
    if isinstance(operand, (int, float)):
        return float(operand)
    value = _value_of(operand)
    if value is None or not value.numel() or bool((value != value.flatten()[0]).any()):
        return None
    return float(value.flatten()[0])


def hidden_by(changes: Sequence[Change], dims: int) -> Tensor | None:
    """Return which keys are hidden, broadcast over scores of so many dimensions; `None` if it is not known."""
    hidden = torch.zeros([1] * max(dims, 2), dtype=torch.bool)
    for change in changes:
        shows_again = change.op == "mul" and change.value is not None and bool((change.value == 0).any())
        if change.hides is None or shows_again:
            return None
        try:
            hidden = hidden | change.hides
        except RuntimeError:  # shapes of before and behind a reshaping
            return None
    return hidden


def is_by_rows(core: Core) -> bool:
    """Whether scores lie as ``(..., queries, keys)`` where the softmax runs, as masks are read."""
    if core.query_of is None or core.query_of.dim() == 0:
        return True
    return core.dim == -1 and bool((core.query_of.diff(dim=-1) == 1).all())


def dropout_behind(links: list[Link]) -> float | None:
    """Return the probability of the dropout on a path, 0 if there is none; `None` if it is not known."""
    for link in links:
        if link.step.op == "native_dropout" and link.step.args[2] is not False:
            return float(link.step.args[1])
        for view in link.others if link.step.op == "mul" else ():
            cell: Cell | None = view.cell
            while cell is not None:  # a tensor that is filled with 0 and 1, and divided, in place
                if cell.step is not None and cell.step.op == "bernoulli":
                    return round(1 - float(cell.step.argument("p", math.nan)), 9)
                cell = cell.before
            made_of = walk_back([view.cell], lambda cell: cell.inputs)
            if any(source.step is not None and source.step.op in RANDOM for source in made_of):
                return None
    return 0.0
