"""Parts of a tape, run again on other tensors: a weight that is computed from parameters, weights made of scores.

The recorded operations run, and nothing of the user's: no hook, no parametrization, no random number. What they write
is written into copies.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hdi_callback.attention.operations import DROPOUTS, OBSERVES, RANDOM
from hdi_callback.attention.tape import WEIGHT, Cell, Step, View, mapped, walk_back, written_tensors

__all__ = ["DROPOUTS", "NotReplayedError", "Recipe", "run_steps", "steps_before"]


class NotReplayedError(Exception):
    """Operations that cannot run again; the message is the reason, as a clause."""


def steps_before(root: Cell, is_leaf: Callable[[Cell], bool], most: int = 2000) -> list[Step]:
    """Return the steps that write what a content depends on, in their order, up to the leaves.

    Raises:
        NotReplayedError: if there are more than `most`, or one draws random numbers.
    """

    def inputs(cell: Cell) -> list[Cell]:
        if is_leaf(cell):
            return []
        before = [cell.before] if cell.before is not None else []
        return before + ([view.cell for view in cell.step.inputs] if cell.step is not None else [])

    steps = dict[int, Step]()
    for cell in walk_back([root], inputs):
        step = cell.step
        if step is None or is_leaf(cell):
            continue
        if step.op in RANDOM:
            raise NotReplayedError(f"it draws random numbers ({step.op})")
        if any(view.itemsize != view.cell.itemsize for view in step.inputs):
            raise NotReplayedError(f"{step.op} takes a tensor in another type")
        steps[step.number] = step
        if len(steps) > most:
            raise NotReplayedError(f"it is computed by more than {most} operations")
    return [steps[number] for number in sorted(steps)]


def run_steps(
    steps: list[Step], storages: dict[int, Tensor], leaf: Callable[[View], Tensor], convert: Callable[[str, Any], Any]
) -> None:
    """Run steps again, in their order.

    Args:
        steps: the steps.
        storages: flat contents, by the `id` of their cells; those that are written are added.
        leaf: returns a tensor whose content is not among them.
        convert: returns another value in place of a named argument, such as a device.
    """
    for step in steps:

        def tensor(view: View) -> Tensor:
            flat = storages.get(id(view.cell))
            return leaf(view) if flat is None else flat.as_strided(view.shape, view.stride, view.offset)

        args = mapped(step.args, tensor)
        kwargs = {name: convert(name, value) for name, value in mapped(step.kwargs, tensor).items()}
        for view, out in zip(step.outputs, _outputs(step, args, kwargs), strict=True):
            if view is not None and out is not None:
                storages[id(view.cell)] = _stored(view, out, storages)


def _outputs(step: Step, args: list[Any], kwargs: dict[str, Any]) -> list[Tensor | None]:
    if step.op == "bernoulli":  # dropout leaves all that it would divide by this number
        return [torch.full_like(args[0], step.argument("p", 1.0))]
    if step.op in DROPOUTS:
        return [args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)]
    if step.op == OBSERVES:
        args[1] = torch.zeros_like(args[1])
    if step.function._schema.is_mutable:  # copies are written into
        args = [value.clone() if isinstance(value, Tensor) else value for value in args]
        kwargs = {name: value.clone() if isinstance(value, Tensor) else value for name, value in kwargs.items()}
    out = step.function(*args, **kwargs)
    written = written_tensors(step.function, tuple(args), kwargs)
    outs = list(out) if isinstance(out, (tuple, list)) else [out]
    return [*outs[: len(step.outputs) - len(written)], *written]


def _stored(view: View, out: Tensor, storages: Mapping[int, Tensor]) -> Tensor:
    """Return a flat content, with what a step has written into it."""
    cell = view.cell
    is_whole = view.numel == cell.numel and view.offset == 0
    if is_whole and torch.empty(view.shape, device="meta").stride() == view.stride:
        return out.reshape(-1)
    before = None if cell.before is None else storages.get(id(cell.before))
    if before is None and not is_whole and cell.before is not None:
        raise NotReplayedError("a tensor is written in parts")
    flat = out.new_zeros(cell.numel) if before is None else before.to(out.dtype)
    return flat.as_strided_scatter(out.reshape(view.shape), view.shape, view.stride, view.offset)


@dataclass(frozen=True, eq=False, repr=False)
class Recipe:
    """How a weight is computed from parameters and buffers: as the forward did when it was written down."""

    parameters: tuple[str, ...]  # dotted names of those that take part
    key: str  # what tells it from other recipes; the same in each call of a module
    _steps: list[Step]
    _names: Mapping[int, str]  # the `id` of a cell -> dotted name of the parameter or buffer that it is
    _root: Cell

    def __str__(self) -> str:
        return self.key

    def __call__(self, read: Callable[[str], Tensor]) -> Tensor:
        """Return the weight as it is now, flat, differentiable; `read` returns a parameter or buffer by its name."""
        storages = {cell: _flat(read(name)) for cell, name in self._names.items()}
        device = next(iter(storages.values())).device

        def convert(name: str, value: Any) -> Any:
            return device if name == "device" and value is not None else value

        with torch.autocast(device.type, enabled=False):  # which the steps have written down where it was on
            run_steps(self._steps, storages, _refuse, convert)
        return storages[id(self._root)]

    @classmethod
    def of(cls, root: Cell, read_out: Set[str] = frozenset()) -> Recipe:
        """Return the recipe of a content that is made of parameters alone; raise `NotReplayedError` if there is none.

        A buffer that is changed on the way is read as it is now, and not changed again: the vectors of a spectral
        norm and the ranges of a quantisation are those that the last forward used. Of the parameters in `read_out` the
        forward has read numbers, which would be stale.
        """  # noqa: DOC501
        names: dict[int, str] = {}
        parameters: set[str] = set()

        def is_leaf(cell: Cell) -> bool:
            first = cell
            while first.before is not None and first.kind != WEIGHT:
                first = first.before
            name = first.parameter if first.kind == WEIGHT else first.buffer
            if name is None or cell is root:
                return False
            names[id(cell)] = name
            parameters.update((name,) if first.kind == WEIGHT else ())
            return True

        steps = steps_before(root, is_leaf)
        cells = [view.cell for step in steps for view in step.inputs]
        if parameters & read_out:
            raise NotReplayedError("a number is read out of a parameter that it is computed from")
        if any(cell.step is None and id(cell) not in names for cell in cells):
            raise NotReplayedError("it takes a tensor that is neither a parameter nor a buffer")
        alone = _Alone()
        steps = list(map(alone.step, steps))
        numbers = {id(cell): names.get(id(old), str(at)) for at, (old, cell) in enumerate(alone.cells.values())}

        def named(view: View) -> object:
            return numbers[id(view.cell)], view.shape, view.stride, view.offset

        key = "; ".join(f"{step.op}{mapped((step.args, step.kwargs), named)}" for step in steps)
        own = {id(cell): names[id(old)] for old, cell in alone.cells.values() if id(old) in names}
        return cls(tuple(sorted(parameters)), key, steps, own, alone.cell(root))


class _Alone:
    """Copies steps without what uses them, so that a recipe does not keep the whole tape alive."""

    def __init__(self) -> None:
        self.cells: dict[int, tuple[Cell, Cell]] = {}

    def cell(self, old: Cell) -> Cell:
        if id(old) not in self.cells:
            self.cells[id(old)] = old, Cell(old.numel, old.itemsize, old.kind)
        return self.cells[id(old)][1]

    def view(self, old: View) -> View:
        return View(self.cell(old.cell), old.shape, old.stride, old.offset, old.itemsize, old.is_float)

    def step(self, old: Step) -> Step:
        args, kwargs = mapped(old.args, self.view), mapped(old.kwargs, self.view)
        outputs = [None if view is None else self.view(view) for view in old.outputs]
        for view in old.outputs:
            if view is not None and view.cell.before is not None:
                self.cell(view.cell).before = self.cell(view.cell.before)
        return Step(old.number, old.op, old.function, tuple(args), kwargs, None, "", [], outputs)


def _refuse(_: View) -> Tensor:
    raise NotReplayedError("it takes a tensor that is neither a parameter nor a buffer")


def _flat(tensor: Tensor) -> Tensor:
    """Return the elements of a tensor as they lie in memory."""
    if tensor.is_contiguous():
        return tensor.reshape(-1)
    return tensor.new_zeros(tensor.numel()).as_strided_scatter(tensor, tensor.shape, tensor.stride(), 0)
