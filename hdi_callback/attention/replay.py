"""A weight that is computed from parameters, computed anew: the steps that made it run again on other tensors.

The recorded operations run, and nothing of the user's: no hook, no parametrization, no random number. What they write
is written into copies.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hdi_callback.attention.operations import DROPOUTS, OBSERVES, RANDOM
from hdi_callback.attention.tape import WEIGHT, Cell, Step, View, mapped, walk_back, written_tensors
from hdi_callback.guard import autocast_off

_MOST = 2000  # steps


class NotReplayedError(Exception):
    """A weight that cannot be computed anew; the message is the reason, as a clause."""


@dataclass(frozen=True, eq=False, repr=False)
class Recipe:
    """How a weight is computed from parameters and buffers: as the forward did when it was written down."""

    parameters: tuple[str, ...]  # dotted names of those that take part
    key: str  # what tells it from other recipes; the same in each call of a module
    _steps: list[Step]  # whose views have a cell for each storage, and not for each of its contents
    _names: Mapping[Cell, str]  # dotted names of the parameters and buffers
    _root: Cell

    def __str__(self) -> str:
        return self.key

    def __call__(self, read: Callable[[str], Tensor]) -> Tensor:
        """Return the weight as it is now, flat, differentiable; `read` returns a parameter or buffer by its name."""
        storages = {cell: _flat(read(name)) for cell, name in self._names.items()}
        device = next(iter(storages.values())).device

        def tensor(view: View) -> Tensor:
            return storages[view.cell].as_strided(view.shape, view.stride, view.offset)

        with autocast_off(device.type):  # which the steps have written down where it was on
            for step in self._steps:
                args, kwargs = list(mapped(step.args, View, tensor)), mapped(step.kwargs, View, tensor)
                if kwargs.get("device") is not None:
                    kwargs["device"] = device
                for view, out in zip(step.outputs, _outputs(step, args, kwargs), strict=True):
                    if view is not None and out is not None:
                        storages[view.cell] = _written(view, out, storages.get(view.cell))
        return storages[self._root]

    @classmethod
    def of(cls, root: Cell, read_out: Set[str] = frozenset()) -> Recipe:
        """Return the recipe of a content that is made of parameters alone; raise `NotReplayedError` if there is none.

        A buffer that is changed on the way is read as it is now, and not changed again: the vectors of a spectral
        norm and the ranges of a quantisation are those that the last forward used. Of the parameters in `read_out` the
        forward has read numbers, which would be stale.
        """  # noqa: DOC501
        names: dict[Cell, str] = {}  # by the first content of a storage
        parameters: set[str] = set()
        steps: dict[int, Step] = {}

        def inputs(cell: Cell) -> list[Cell]:
            first, step = _first(cell), cell.step
            name = first.parameter if first.kind == WEIGHT else first.buffer
            if name is not None and cell is not root:
                names[first] = name
                parameters.update((name,) if first.kind == WEIGHT else ())
                return []
            if step is None:
                raise NotReplayedError("it takes a tensor that is neither a parameter nor a buffer")
            if step.op in RANDOM | DROPOUTS | {"bernoulli"}:
                raise NotReplayedError(f"it draws random numbers ({step.op})")
            if any(view.itemsize != view.cell.itemsize for view in step.inputs):
                raise NotReplayedError(f"{step.op} takes a tensor in another type")
            steps[step.number] = step
            if len(steps) > _MOST:
                raise NotReplayedError(f"it is computed by more than {_MOST} operations")
            return [view.cell for view in step.inputs] + ([cell.before] if cell.before is not None else [])

        for _ in walk_back([root], inputs):
            pass
        if parameters & read_out:
            raise NotReplayedError("a number is read out of a parameter that it is computed from")
        # Copies without what uses them, so that a recipe does not keep the whole tape alive.
        copies: dict[Cell, Cell] = {}

        def copied(cell: Cell) -> Cell:
            return copies.setdefault(_first(cell), Cell(cell.numel, cell.itemsize, cell.kind))

        def moved(view: View) -> View:
            return replace(view, cell=copied(view.cell), value=None)

        def named(view: View) -> object:
            first = _first(view.cell)
            return names.get(first) or list(copies).index(first), view.shape, view.stride, view.offset

        own, keys = list[Step](), list[str]()
        for _, step in sorted(steps.items()):
            outputs = [None if view is None else moved(view) for view in step.outputs]
            args, kwargs = mapped(step.args, View, moved), mapped(step.kwargs, View, moved)
            own.append(Step(step.number, step.op, step.function, args, kwargs, None, "", [], outputs))
            keys.append(f"{step.op}{mapped((step.args, step.kwargs), View, named)}")
        of_copies = {copied(cell): name for cell, name in names.items()}
        return cls(tuple(sorted(parameters)), "; ".join(keys), own, of_copies, copied(root))


def _first(cell: Cell) -> Cell:
    """Return the first content of a storage, or the parameter that it is."""
    while cell.before is not None and cell.kind != WEIGHT:
        cell = cell.before
    return cell


def _outputs(step: Step, args: list[Any], kwargs: dict[str, Any]) -> list[Tensor | None]:
    if step.op == OBSERVES:
        args[1] = torch.zeros_like(args[1])
    if step.function._schema.is_mutable:  # copies are written into
        args = [value.clone() if isinstance(value, Tensor) else value for value in args]
        kwargs = {name: value.clone() if isinstance(value, Tensor) else value for name, value in kwargs.items()}
    out = step.function(*args, **kwargs)
    written = written_tensors(step.function, tuple(args), kwargs)
    outs = list(out) if isinstance(out, (tuple, list)) else [out]
    return [*outs[: len(step.outputs) - len(written)], *written]


def _written(view: View, out: Tensor, before: Tensor | None) -> Tensor:
    """Return the flat content of a storage after a step has written into it."""
    is_whole = view.numel == view.cell.numel and view.offset == 0
    if is_whole and torch.empty(view.shape, device="meta").stride() == view.stride:
        return out.reshape(-1)
    flat = out.new_zeros(view.cell.numel) if before is None else before.to(out.dtype)
    return flat.as_strided_scatter(out.reshape(view.shape), view.shape, view.stride, view.offset)


def _flat(tensor: Tensor) -> Tensor:
    """Return the elements of a tensor as they lie in memory."""
    if tensor.is_contiguous():
        return tensor.reshape(-1)
    return tensor.new_zeros(tensor.numel()).as_strided_scatter(tensor, tensor.shape, tensor.stride(), 0)
