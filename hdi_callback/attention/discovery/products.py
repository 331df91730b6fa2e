"""Products on a tape: with parameters, or of two computed tensors; and which elements of which parameters they take."""

from __future__ import annotations

import bisect
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from hdi_callback.attention import operations as ops
from hdi_callback.attention.discovery.planes import reshaped, small, written_out
from hdi_callback.attention.replay import NotReplayedError, Recipe
from hdi_callback.attention.tape import CONSTANT, DATA, MADE, WEIGHT, Cell, Step, Tape, View, mapped, walk_back

_OF_TENSORS = {"dtype", "device", "layout", "pin_memory", "out"}  # arguments that say where a result lies


class Unreadable(Exception):  # noqa: N818  a reason, not an error of anybody's
    """What depends on it cannot be read; the message is the reason, as a clause."""


@dataclass(frozen=True, eq=False)
class Product:
    """A matmul ``(n, rows, k) @ (n, k, columns)``."""

    # With a "weight" (the second factor), of two computed factors ("scores"), with a "constant", or with the "filter"
    # of a convolution as a matrix: then the first factor is as it is in the operation.
    kind: Literal["weight", "scores", "constant", "filter", "unknown filter"]
    first: View
    second: View
    taps: int = 1  # elements of a filter for each of its inputs
    is_flipped: bool = False  # the operation returns the result transposed, as with a weight on the left
    # Of ``mul`` and ``sum``, whose factors may have several dimensions in place of `n`: those of the result, and where
    # they go.
    sizes: tuple[int, ...] = ()
    order: tuple[int, ...] = ()

    @property
    def shape(self) -> tuple[int, int, int]:
        """``(n, rows, columns)``."""
        n = max(self.first_shape[0], self.second_shape[0])
        return n, self.first.shape[-2], self.second.shape[-1]

    @property
    def first_shape(self) -> tuple[int, int, int]:
        """``(n, rows, k)``."""
        return math.prod(self.first.shape[:-2]), *self.first.shape[-2:]  # type: ignore[return-value]

    @property
    def second_shape(self) -> tuple[int, int, int]:
        """``(n, k, columns)``."""
        return math.prod(self.second.shape[:-2]), *self.second.shape[-2:]  # type: ignore[return-value]

    def placed(self, plane: Tensor, out: View) -> Tensor:
        """Return a plane ``(n, rows, columns)`` in the shape of the operation's result."""
        plane = plane.mT if self.is_flipped else plane
        if self.order:
            plane = reshaped(plane, self.sizes).permute(self.order)
        return reshaped(plane, out.shape)


class Products:
    """Recognises the products of a tape."""

    def __init__(self, tape: Tape) -> None:
        self.tape = tape
        self.stride: dict[int, tuple[int, int]] = {}  # parameter -> elements to the next of a row, and how many
        self._known: dict[int, Product | None] = {}

    def _number_what_is_computed(self, view: View) -> None:
        """Number the elements of a weight that is computed from parameters."""
        tape, cell = self.tape, view.cell
        while (base := self._copied(cell)) is not None:
            if base.cell.parameter is not None:
                return
            cell = base.cell
        name = tape.names[self.parameter_of(View(cell, (), (), 0, cell.itemsize, is_float=True))]
        recipe: Recipe | str
        try:
            recipe = Recipe.of(cell, _read_out(tape))
            key = recipe.key
            if any(tape.local[part][0] != tape.shapes[part] for part in recipe.parameters if part in tape.local):
                raise NotReplayedError("each rank holds a part of its parameters")
        except NotReplayedError as error:
            recipe = key = f"its weight, computed from `{name}`, cannot be read: {error}"
        name, count = attribute_of(name), 1
        while name in tape.places and str(tape.recipes.get(name, "")) != key:
            name, count = f"{name.partition(' ')[0]} (computed{f' {count}' * (count > 1)})", count + 1
        if name in tape.recipes:  # another call of the same module
            cell.parameter = name
            return
        tape.recipes[name] = recipe
        tape.shapes[name] = cell.written.shape if cell.written is not None else ()
        tape.add_weight(name, cell, cell.numel)

    def of(self, step: Step | None) -> Product | None:
        """Return the product that a step is, if it is one."""
        if step is not None and step.number not in self._known:
            self._known[step.number] = self._recognised(step)
        return None if step is None else self._known[step.number]

    def kind(self, step: Step | None) -> str:
        """Return the kind of product that a step is, ``""`` if it is none."""
        product = self.of(step)
        return "" if product is None else product.kind

    def is_projection(self, step: Step | None) -> bool:
        """Whether a step is a product with a parameter."""
        return self.kind(step) in {"weight", "filter"}

    def _recognised(self, step: Step) -> Product | None:
        for view in step.inputs if step.op in ops.MATMULS or step.op in ops.CONVOLUTIONS else ():
            if view.cell.kind == MADE and view.cell.parameter is None and self.is_weight(view):
                self._number_what_is_computed(view)
        if step.op in ops.CONVOLUTIONS and isinstance(step.args[1], View):
            weight = step.args[1]
            if not self.is_weight(weight):
                return Product("unknown filter", step.args[0], weight)
            filters = 1 if step.argument("transposed", default=False) else 0  # the dimension of them
            count, stride = weight.shape[filters], weight.stride[filters]
            matrix = weight.seen_as((1, weight.numel // count, count), (0, 1, stride))
            return Product("filter", step.args[0], matrix, math.prod(weight.shape[2:]))
        if step.op == "sum":
            return _written_out(step)
        if step.op not in ops.MATMULS or len(step.inputs) < 2:
            return None
        first, second = step.args[ops.MATMULS[step.op] :][:2]
        first = _as_batch(first, is_row=step.op != "dot")
        second = _as_batch(second.mT if step.op == "linear" else second, is_row=False)
        if self.is_weight(second):
            return Product("weight", first, second)
        if self.is_weight(first):
            return Product("weight", second.mT, first.mT, is_flipped=True)
        if CONSTANT in {first.cell.kind, second.cell.kind}:
            return Product("constant", first, second)
        return Product("scores", first, second)

    def is_weight(self, view: View) -> bool:
        """Whether each element of a tensor is one of a parameter, perhaps moved or changed by itself."""
        return view.cell.kind in {WEIGHT, MADE} and self.parameter_of(view) >= 0

    def base_of(self, cell: Cell) -> View | None:
        """Return the tensor whose elements a content has."""
        step = cell.step
        if step is None or cell.written is None or step.op == "embedding":
            return None
        if step.op == "mm":  # an orthogonal map is one near the identity times a buffer
            return next((view for view in step.inputs if self._is_of_linalg(view.cell)), None)
        if not (step.is_pointwise or step.op in ops.COPIES | ops.OF_WEIGHTS | ops.MOVES):
            return None
        views = [view for view in step.inputs if view.cell.kind in {WEIGHT, MADE}]
        views = [view for view in views if view.is_float or view.cell.parameter]
        if step.op in ops.MOVES:
            return views[0] if len(views) == 1 or (all(view.cell.parameter for view in views) and views) else None
        views = [view for view in views if view.numel == cell.written.numel]
        if len(views) > 1:
            views.sort(key=lambda view: not self.is_weight(view))
        return views[0] if views else None

    def _is_of_linalg(self, cell: Cell) -> bool:
        base: View | None = None
        while cell.step is not None and not cell.step.op.lstrip("_").startswith("linalg"):
            base = self.base_of(cell) if cell.kind == MADE else None
            if base is None:
                return False
            cell = base.cell
        return cell.step is not None and cell.kind == MADE

    def parameter_of(self, view: View) -> int:
        """Return the number of the parameter that a weight is made of; -1 if it is none."""
        while view.cell.parameter is None:
            base = self.base_of(view.cell)
            if base is None:
                return -1
            view = base
        return self.tape.places[view.cell.parameter]

    def elements(self, view: View) -> Tensor:
        """Return the numbers of the elements of a weight among those of all parameters."""
        view = self.through_copies(view)
        cell = view.cell
        if cell.parameter is not None:
            at = torch.tensor(self.tape.first[self.tape.places[cell.parameter]] + view.offset)
            for dim, (size, stride) in enumerate(zip(view.shape, view.stride)):
                if size > 1:
                    at = at + (torch.arange(size) * stride).reshape(-1, *[1] * (len(view.shape) - 1 - dim))
            return at.expand(view.shape)
        base, written = self._copied(cell), cell.written
        if base is None or written is None:
            raise Unreadable("a weight is made of nothing that is known")
        flat = written_out(self.elements(base).expand(written.shape), written, cell.numel)
        return flat.as_strided(view.shape, view.stride, view.offset)

    def through_copies(self, view: View) -> View:
        """Return the part of the parameter that a view of its copy, as autocast makes them, is."""
        while view.cell.parameter is None and (base := self._copied(view.cell)) is not None:
            written = view.cell.written
            if written is None or base.stride != written.stride:
                break
            view = base.seen_as(view.shape, view.stride, view.offset - written.offset + base.offset)
        return view

    def _copied(self, cell: Cell) -> View | None:
        """Return the tensor that a content is a copy of, `None` if it is none, or of a part."""
        is_part = cell.before is not None and cell.written is not None and cell.written.numel < cell.numel
        return None if is_part or cell.step is None or cell.step.op not in ops.COPIES else self.base_of(cell)

    def features(self, weight: View) -> Tensor:
        """Return the features ``(n, columns)`` of a weight ``(n, k, columns)``: the first element of each."""
        first, stride = self.lines(weight, 1)
        for owner in owners_of(small(first).unique().tolist(), self.tape):
            if self.stride.get(owner, (0, -1))[1] < weight.shape[1]:
                self.stride[owner] = stride, weight.shape[1]
        return first

    def lines(self, weight: View, dim: int) -> tuple[Tensor, int]:
        """Return the first element of each line along a dim of a weight ``(n, k, columns)``, and the stride there."""
        weight = self.through_copies(weight)
        if weight.cell.parameter is not None:
            firsts = weight.seen_as((*weight.shape[:dim], 1, *weight.shape[dim + 1 :]), weight.stride)
            return self.elements(firsts).select(dim, 0), weight.stride[dim]
        numbers = self.elements(weight)
        steps = numbers.diff(dim=dim)
        stride = int(steps.flatten()[0]) if steps.numel() else 1
        if bool((steps != stride).any()):
            raise Unreadable("rows or columns in no regular order")
        return numbers.select(dim, 0), stride


def run_on(step: Step, position: int, numbers: Callable[[View], Tensor]) -> Tensor:
    """Return one output of an operation, run on whole numbers in place of its tensors."""
    args, kwargs = mapped(step.args, View, numbers), mapped(step.kwargs, View, numbers)
    kwargs = {name: value for name, value in kwargs.items() if name not in _OF_TENSORS}
    out = step.function(*(args[:2] if step.op == "constant_pad_nd" else args), **kwargs)
    return torch.as_tensor(out[position] if isinstance(out, (tuple, list)) else out).long()


def _read_out(tape: Tape) -> set[str]:
    """Return the parameters of which a forward has read numbers."""
    cells = walk_back(tape.read_out, lambda cell: cell.inputs if cell.kind in {WEIGHT, MADE} else [])
    return {cell.parameter for cell in cells if cell.parameter is not None}


def _written_out(step: Step) -> Product | None:
    """Return a product that is written as ``(a * b).sum(dim)``: dimensions of both are the batch, others its sides."""
    total = step.inputs[0]
    factor, written = total.cell.step, total.cell.written
    if factor is None or factor.op != "mul" or written is None or len(factor.inputs) < 2:
        return None
    summed = reduced_dims(step)
    missing_dims = [(view, [1] * (len(total.shape) - len(view.shape))) for view in factor.inputs[:2]]
    views = [view.seen_as((*more, *view.shape), (*[0] * len(more), *view.stride)) for view, more in missing_dims]
    is_other = (written.shape, written.stride) != (total.shape, total.stride)
    if is_other or len(summed) != 1 or total.shape[summed[0]] == 1:
        return None
    if any(view.cell.kind < DATA or not view.is_float for view in views) or views[0].cell is views[1].cell:
        return None
    dims = [dim for dim in range(len(total.shape)) if dim not in summed]
    rows, columns = ([d for d in dims if a.shape[d] > 1 == b.shape[d]] for a, b in (views, views[::-1]))
    if len(rows) > 1 or len(columns) > 1 or not (rows or columns):
        return None
    batch = [dim for dim in dims if dim not in rows + columns]
    if any(view.shape[summed[0]] == 1 for view in views):
        return None
    first, second = (
        _side(view, [*batch, *side], summed[0], is_single=not side) for view, side in zip(views, (rows, columns))
    )
    order = [[*batch, *rows, *columns].index(dim) for dim in dims]
    order = [at + 1 if not rows and at >= len(batch) else at for at in order]
    missing = [at for at in range(len(batch) + 2) if at not in order]
    sizes = (*(total.shape[dim] for dim in batch), first.shape[-2], second.shape[-2])
    return Product("scores", first, second.mT, sizes=sizes, order=(*order, *missing))


def reduced_dims(step: Step) -> tuple[int, ...]:
    """Return the dims over which an operation sums, or takes the largest."""
    shape = step.inputs[0].shape
    dims = step.argument("dim")
    if dims is None or dims == () or isinstance(dims, bool):
        return tuple(range(len(shape)))
    return tuple(dim % len(shape) for dim in ((dims,) if isinstance(dims, int) else dims))


def _side(view: View, dims: list[int], last: int, *, is_single: bool) -> View:
    """Return a factor with the summed dimension last, and a dimension of size 1 before it if it has no side."""
    shape, stride = [view.shape[dim] for dim in dims], [view.stride[dim] for dim in dims]
    if is_single:
        shape, stride = [*shape, 1], [*stride, 0]
    return view.seen_as((*shape, view.shape[last]), (*stride, view.stride[last]))


def _as_batch(view: View, *, is_row: bool) -> View:
    """Return a vector or matrix as a batch of matrices."""
    shape, stride = view.shape, view.stride
    if len(shape) == 1:
        shape, stride = ((1, *shape), (0, *stride)) if is_row else ((*shape, 1), (*stride, 0))
    if len(shape) == 2:
        shape, stride = (1, *shape), (0, *stride)
    return view.seen_as(shape, stride)


def owners_of(numbers: Sequence[int], tape: Tape) -> list[int]:
    """Return the parameters and feature ranges, by their places, that elements with ascending numbers are of."""
    owners, at, ends = list[int](), 0, [*tape.first[1:], tape.end]
    while at < len(numbers):
        owners.append(bisect.bisect_right(tape.first, numbers[at]) - 1)
        at = bisect.bisect_left(numbers, ends[owners[-1]], at + 1)
    return owners


def attribute_of(parameter: str) -> str:
    """Return the name by which a module uses what it computes from a parameter."""
    path = parameter.split(".")
    if "parametrizations" in path:
        at = path.index("parametrizations")
        return ".".join([*path[:at], path[at + 1]])
    return re.sub(r"(weight)_(orig|v|g)$", r"\1", parameter)
