"""Products on a tape: with parameters, or of two computed tensors; and which elements of which parameters they take."""

from __future__ import annotations

import bisect
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from hdi_callback.attention.operations import CONVOLUTIONS, COPIES, MATMULS, MOVES, OF_WEIGHTS
from hdi_callback.attention.planes import Geometry, reshaped
from hdi_callback.attention.replay import NotReplayedError, Recipe
from hdi_callback.attention.tape import CONSTANT, DATA, MADE, WEIGHT, Cell, Step, Tape, View, mapped

_OF_TENSORS = {"dtype", "device", "layout", "pin_memory", "out"}  # arguments that say where a result lies

__all__ = ["Product", "Products", "Unreadable"]


class Unreadable(Exception):  # noqa: N818  a reason, not an error of anybody's
    """What depends on it cannot be read; the message is the reason, as a clause."""


@dataclass(frozen=True, eq=False)
class Product:
    """A product of matrices ``(n, rows, k) @ (n, k, columns)``.

    Attributes:
        kind: with a ``"weight"`` (the second factor), of two computed factors (``"scores"``), with a ``"constant"``,
            or a ``"filter"`` of a convolution, whose factors are as they are in the operation.
        first: the first factor.
        second: the second.
        is_flipped: the operation gives the result transposed, as a weight on the left does.
        sizes: of ``mul`` and ``sum``, whose factors may have several dimensions in place of `n`: those of the result,
        order: and where they go.
    """

    kind: Literal["weight", "scores", "constant", "filter", "unknown filter"]
    first: View
    second: View
    is_flipped: bool = False
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
        """Give a plane ``(n, rows, columns)`` the shape in which the operation gives its result."""
        plane = plane.mT if self.is_flipped else plane
        if self.order:
            plane = reshaped(plane, self.sizes).permute(self.order)
        return reshaped(plane, out.shape)


class Products:
    """Recognise the products of a tape."""

    def __init__(self, tape: Tape) -> None:
        self.tape = tape
        self.stride: dict[int, tuple[int, int]] = {}  # parameter -> elements to the next of a row, and how many
        self.irregular: dict[int, str] = {}  # parameter -> why its rows have no regular order
        self._known: dict[int, Product | None] = {}

    def _number_what_is_computed(self, view: View) -> None:
        """Give the elements of a weight that is computed from parameters numbers of their own."""
        tape, cell = self.tape, view.cell
        while cell.step is not None and cell.step.op in COPIES | MOVES and (base := self.base_of(cell)) is not None:
            if base.cell.parameter is not None:
                return
            cell = base.cell
        name = tape.names[self.parameter_of(View(cell, (), (), 0, cell.itemsize, is_float=True))]
        recipe: Recipe | str
        try:
            recipe = Recipe.of(cell, _read_out(tape))
            key = recipe.key
            if any(tape.local[one][0] != tape.shapes[one] for one in recipe.parameters if one in tape.local):
                raise NotReplayedError("each rank holds a part of its parameters")
        except NotReplayedError as error:
            recipe = key = f"its weight, computed from `{name}`, cannot be read: {error}"
        name, count = _attribute(name), 1
        while name in tape.places and str(tape.recipes.get(name, "")) != key:
            name, count = f"{name.partition(' ')[0]} (computed{f' {count}' * (count > 1)})", count + 1
        if name in tape.recipes:  # another call of the same module
            cell.parameter = name
            return
        tape.recipes[name] = recipe
        tape.shapes[name] = cell.written.shape if cell.written is not None else ()
        tape.add_weight(name, cell, cell.numel)

    def owner(self, number: int) -> int:
        """Say which parameter an element is of."""
        return bisect.bisect_right(self.tape.first, number) - 1

    def owners(self, numbers: Tensor) -> list[int]:
        """Say of which parameters some elements are."""
        return runs_of(numbers.unique().tolist(), self.tape.first)

    def of(self, step: Step) -> Product | None:
        """Say what product a step is, if it is one."""
        if step.number not in self._known:
            self._known[step.number] = self._recognised(step)
        return self._known[step.number]

    def _recognised(self, step: Step) -> Product | None:
        for view in step.inputs if step.op in MATMULS or step.op in CONVOLUTIONS else ():
            if view.cell.kind == MADE and view.cell.parameter is None and self.is_weight(view):
                self._number_what_is_computed(view)
        if step.op in CONVOLUTIONS and isinstance(step.args[1], View):
            kind: Literal["filter", "unknown filter"] = "filter" if self.is_weight(step.args[1]) else "unknown filter"
            return Product(kind, step.args[0], step.args[1])
        if step.op == "sum":
            return _written_out(step)
        if step.op not in MATMULS or len(step.inputs) < 2:
            return None
        first, second = step.args[MATMULS[step.op] :][:2]
        first = _as_batch(first, is_row=step.op != "dot")
        second = _as_batch(second.mT if step.op == "linear" else second, is_row=False)
        if self.is_weight(second):
            return Product("weight", first, second)
        if self.is_weight(first):
            return Product("weight", second.mT, first.mT, is_flipped=True)
        if CONSTANT in {first.cell.kind, second.cell.kind}:
            return Product("constant", first, second)
        return Product("scores", first, second)

    # weights

    def is_weight(self, view: View) -> bool:
        """Say whether each element of a tensor is one of a parameter, perhaps moved or changed by itself."""
        cell: Cell | None = view.cell
        for _ in range(50):
            if cell is None or cell.kind not in {WEIGHT, MADE}:
                return False
            if cell.parameter is not None:
                return True
            base = self.base_of(cell)
            cell = None if base is None else base.cell
        return False

    def base_of(self, cell: Cell) -> View | None:
        """Find the tensor whose elements a cell has."""
        step = cell.step
        if step is None or cell.written is None or step.op == "embedding":
            return None
        if step.op == "mm":  # an orthogonal map is one near the identity times a buffer
            return next((one for one in step.inputs if self._is_of_linalg(one.cell)), None)
        keeps = step.is_pointwise or step.op in COPIES | OF_WEIGHTS
        if not keeps and step.op not in MOVES:
            return None
        views = [one for one in step.inputs if (one.is_float or one.cell.parameter) and one.cell.kind in {WEIGHT, MADE}]
        if step.op in MOVES:
            return views[0] if len(views) == 1 or (all(one.cell.parameter for one in views) and views) else None
        views = [one for one in views if one.numel == cell.written.numel]
        if len(views) > 1:
            views.sort(key=lambda one: not self.is_weight(one))
        return views[0] if views else None

    def _is_of_linalg(self, cell: Cell) -> bool:
        base: View | None = None
        while cell.step is not None and not cell.step.op.lstrip("_").startswith("linalg"):
            base = self.base_of(cell) if cell.kind == MADE else None
            if base is None:
                return False
            cell = base.cell
        return cell.step is not None and cell.kind == MADE

    def changed_by(self, step: Step) -> str:
        """Say of which parameter, and by what, a factor of a product is made that depends on more than parameters."""
        todo = [(view.cell, "") for view in step.inputs if view.cell.kind == DATA]
        for cell, op in todo:  # it grows
            if cell.parameter is not None and op:
                return f"`{cell.parameter}` by {op} with something that is no parameter"
            made, written = cell.step, cell.written
            if (
                made is not None
                and written is not None
                and len(todo) < 50
                and (made.is_pointwise or made.op in OF_WEIGHTS)
            ):
                todo += [(view.cell, made.op) for view in made.inputs if view.numel == written.numel and view.is_float]
        return ""

    def parameter_of(self, view: View) -> int:
        """Number the parameter that a weight is made of; -1 if it is none."""
        while view.cell.parameter is None:
            base = self.base_of(view.cell)
            if base is None:
                return -1
            view = base
        return self.tape.places[view.cell.parameter]

    def elements(self, view: View) -> Tensor:
        """Number the elements of a weight among those of all parameters."""
        view = self.through_copies(view)
        cell = view.cell
        if cell.parameter is not None:
            at = torch.zeros((), dtype=torch.int64)
            for dim, (size, stride) in enumerate(zip(view.shape, view.stride)):
                at = at + (torch.arange(size) * stride).reshape(-1, *[1] * (len(view.shape) - 1 - dim))
            return (at + self.tape.number(cell.parameter) + view.offset).expand(view.shape)
        step, written = cell.step, cell.written
        if step is None or written is None:
            raise Unreadable("a weight is made of nothing that is known")
        if cell.before is not None and written.numel < cell.numel:
            raise Unreadable("a weight is written in parts")
        if step.op not in MOVES | COPIES:
            raise Unreadable(f"a weight is made by {step.op}")
        base = self.base_of(cell)
        if step.op in COPIES and base is not None:
            made = self.elements(base).expand(written.shape)
        else:
            made = self._moved(step, cell)
        flat = torch.zeros(cell.numel, dtype=torch.int64)
        flat.as_strided(written.shape, written.stride, written.offset).copy_(made)
        return flat.as_strided(view.shape, view.stride, view.offset)

    def through_copies(self, view: View) -> View:
        """Give the part of the parameter that a view of its copy, as autocast makes them, is."""
        while view.cell.parameter is None and (base := self.base_of(view.cell)) is not None:
            step, written = view.cell.step, view.cell.written
            is_part = written is not None and written.numel < view.cell.numel and view.cell.before is not None
            if step is None or written is None or step.op not in COPIES or base.stride != written.stride or is_part:
                break
            view = base.seen_as(view.shape, view.stride, view.offset - written.offset + base.offset)
        return view

    def _moved(self, step: Step, cell: Cell) -> Tensor:
        def numbers(one: View) -> Tensor:
            if not one.is_float:
                return one.value.cpu() if one.value is not None else torch.zeros(one.shape, dtype=torch.int64)
            if one.cell.kind in {WEIGHT, MADE}:
                return self.elements(one).double().clone()
            return torch.zeros(one.shape, dtype=torch.float64)

        return run_on(step, step.outputs.index(cell.written), numbers)

    def features(self, weight: View) -> Tensor:
        """Number the features ``(n, columns)`` that a weight ``(n, k, columns)`` makes, by the first of each."""
        n, rows, columns = weight.shape
        weight = self.through_copies(weight)
        if weight.cell.parameter is not None:
            first = self.elements(weight.seen_as((n, 1, columns), weight.stride))[:, 0]
            stride: int | None = weight.stride[1]
        else:
            numbers = self.elements(weight)
            first = numbers[:, 0]
            steps = numbers[:, 1:] - numbers[:, :-1]
            stride = 1 if rows == 1 else int(steps.flatten()[0]) if bool((steps == steps.flatten()[0]).all()) else None
        for owner in self.owners(first):
            if stride is None:
                self.irregular[owner] = "its rows lie in no regular order"
            elif self.stride.get(owner, (0, -1))[1] < rows:
                self.stride[owner] = stride, rows
        return first


def run_on(step: Step, position: int, numbers: Callable[[View], Tensor]) -> Tensor:
    """Return one output of an operation, run on whole numbers in place of its tensors."""
    args, kwargs = mapped(step.args, numbers), mapped(step.kwargs, numbers)
    kwargs = {name: value for name, value in kwargs.items() if name not in _OF_TENSORS}
    out = step.function(*(args[:2] if step.op == "constant_pad_nd" else args), **kwargs)
    return torch.as_tensor(out[position] if isinstance(out, (tuple, list)) else out).long()


def _read_out(tape: Tape) -> set[str]:
    """List the parameters of which a forward has read numbers."""
    todo, found, seen = list(tape.read_out), set[str](), set[int]()
    while todo:
        cell = todo.pop()
        if id(cell) in seen or cell.kind not in {WEIGHT, MADE}:
            continue
        seen.add(id(cell))
        found.update((cell.parameter,) if cell.parameter is not None else ())
        todo += [view.cell for view in cell.step.inputs] if cell.step is not None else []
    return found


def _written_out(step: Step) -> Product | None:
    """Recognise a product that is written as ``(a * b).sum(dim)``: what both have is the batch, the rest its sides."""
    taken = step.inputs[0]
    made = taken.cell.step
    if made is None or made.op != "mul" or taken.cell.written is None or len(made.inputs) < 2:
        return None
    written, summed = taken.cell.written, reduced_dims(step)
    views = [_broadcast(view, len(taken.shape)) for view in made.inputs[:2]]
    if (
        (written.shape, written.stride) != (taken.shape, taken.stride)
        or len(summed) != 1
        or taken.shape[summed[0]] == 1
    ):
        return None
    if any(view.cell.kind < DATA or not view.is_float for view in views) or views[0].cell is views[1].cell:
        return None
    dims = [dim for dim in range(len(taken.shape)) if dim not in summed]
    rows, columns = ([d for d in dims if one.shape[d] > 1 == other.shape[d]] for one, other in (views, views[::-1]))
    if len(rows) > 1 or len(columns) > 1 or not (rows or columns):
        return None
    batch = [dim for dim in dims if dim not in rows + columns]
    if any(view.shape[summed[0]] == 1 for view in views):
        return None
    first, second = (
        _permuted(views[0], [*batch, *rows], summed[0]),
        _permuted(views[1], [*batch, *columns], summed[0]).mT,
    )
    if not rows:
        first = first.seen_as((*first.shape[:-1], 1, first.shape[-1]), (*first.stride[:-1], 0, first.stride[-1]))
    if not columns:
        second = second.mT
        second = second.seen_as(
            (*second.shape[:-1], 1, second.shape[-1]), (*second.stride[:-1], 0, second.stride[-1])
        ).mT
    order = [[*batch, *rows, *columns].index(dim) for dim in dims]
    order = [at + 1 if not rows and at >= len(batch) else at for at in order]
    missing = [at for at in range(len(batch) + 2) if at not in order]
    sizes = (*(taken.shape[dim] for dim in batch), first.shape[-2], second.shape[-1])
    return Product("scores", first, second, sizes=sizes, order=(*order, *missing))


def reduced_dims(step: Step) -> tuple[int, ...]:
    """Say over which dims an operation sums, or takes the largest."""
    shape = step.inputs[0].shape
    given = step.argument("dim")
    if given is None or given == () or isinstance(given, bool):
        return tuple(range(len(shape)))
    return tuple(one % len(shape) for one in ((given,) if isinstance(given, int) else given))


def _broadcast(view: View, dims: int) -> View:
    """Give a tensor as many dims as it is broadcast to."""
    more = dims - len(view.shape)
    return view.seen_as((*[1] * more, *view.shape), (*[0] * more, *view.stride))


def _permuted(view: View, dims: list[int], last: int) -> View:
    order = [*dims, last]
    return view.seen_as(tuple(view.shape[d] for d in order), tuple(view.stride[d] for d in order))


def _as_batch(view: View, *, is_row: bool) -> View:
    """Let a vector or matrix be a batch of matrices."""
    shape, stride = view.shape, view.stride
    if len(shape) == 1:
        shape, stride = ((1, *shape), (0, *stride)) if is_row else ((*shape, 1), (*stride, 0))
    if len(shape) == 2:
        shape, stride = (1, *shape), (0, *stride)
    if len(shape) > 3:  # linear in inference mode
        shape, stride = (1, math.prod(shape[:-1]), shape[-1]), (0, shape[-1], 1)
    return view.seen_as(shape, stride)


def runs_of(numbers: list[int], starts: list[int]) -> list[int]:
    """Say which runs, that begin at some numbers, sorted numbers are in."""
    found, at = [], 0
    while at < len(numbers):
        run = bisect.bisect_right(starts, numbers[at]) - 1
        found.append(run)
        at = len(numbers) if run + 1 == len(starts) else bisect.bisect_left(numbers, starts[run + 1])
    return found


def _attribute(parameter: str) -> str:
    """Return the name by which a module uses what it computes from a parameter."""
    path = parameter.split(".")
    if "parametrizations" in path:
        at = path.index("parametrizations")
        return ".".join([*path[:at], path[at + 1]])
    return re.sub(r"(weight)_(orig|v|g)$", r"\1", parameter)


def geometry(view: View) -> Geometry:
    """Give the geometry of a view."""
    return Geometry(view.shape, view.stride, view.offset)
