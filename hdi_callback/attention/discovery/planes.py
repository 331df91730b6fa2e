"""Whole numbers for each element of a tensor, kept small where they repeat.

A plane is a tensor of whole numbers whose repeated dimensions have stride 0, as `Tensor.expand` gives them: a number
for each of a million scores takes no more memory than it has different rows. What is computed of planes is computed
of what does not repeat (`small`), and repeated again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from hdi_callback.attention.tape import View


def small(plane: Tensor) -> Tensor:
    """Return a plane with every expanded (stride 0) dimension narrowed to size 1."""
    strides = plane.stride()
    for dim, size in enumerate(plane.shape) if 0 in strides else ():
        if strides[dim] == 0 and size > 1:
            plane = plane.narrow(dim, 0, 1)
    return plane


def thin(plane: Tensor) -> Tensor:
    """Return a plane with dimensions whose entries are all equal expanded, so that they take no memory."""
    shape, plane = plane.shape, small(plane)
    for dim in range(plane.dim()):
        if plane.shape[dim] > 1 and bool((plane == plane.narrow(dim, 0, 1)).all()):
            plane = plane.narrow(dim, 0, 1)
    return plane.expand(shape)


def reshaped(plane: Tensor, shape: Sequence[int]) -> Tensor:
    """Return a reshaped plane, with expanded dimensions kept where that can be."""
    if -1 in shape:
        size_left = plane.numel() // -math.prod(shape)
        shape = [size_left if size == -1 else size for size in shape]
    try:
        return plane.view(tuple(shape))
    except RuntimeError:
        old, new = (torch.empty(tuple(sizes), device="meta").stride() for sizes in (plane.shape, shape))
        return _gathered(plane, plane.shape, old, shape, new, 0)


def repeats(plane: Tensor, dim: int) -> bool:
    """Whether a plane is the same all along a dimension."""
    return plane.shape[dim] == 1 or plane.stride(dim) == 0 or bool((plane == plane.narrow(dim, 0, 1)).all())


def by_value(function: Callable[[int], int], plane: Tensor) -> Tensor:
    """Return a plane with another number for each of its numbers, found once for each that differs."""
    unique, back = torch.unique(small(plane), return_inverse=True)
    return torch.tensor([function(number) for number in unique.tolist()], dtype=torch.int64)[back].expand(plane.shape)


def unique_rows(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the different rows of a matrix, and which of them each row is."""
    short = small(rows) if rows.shape[0] > 1 and rows.stride(0) == 0 else rows
    factors = torch.randint(1, 2**62, rows.shape[1:], generator=torch.Generator().manual_seed(0))
    code = (short * factors).sum(1)  # sorting rows would take long; a sum tells them apart
    unique, number = torch.unique(code, return_inverse=True)
    first = torch.zeros(len(unique), dtype=torch.int64).scatter_(0, number, torch.arange(len(number)))
    return short[first].expand(-1, rows.shape[1]), number.expand(len(rows))


def seen_through(plane: Tensor, written: View, view: View) -> Tensor | None:
    """Return a plane, written through one view of memory, through another; `None` if that had gaps or goes beyond."""
    offset = view.offset - written.offset
    last = offset + sum((size - 1) * step for size, step in zip(view.shape, view.stride))
    steps = sorted((step, size) for size, step in zip(written.shape, written.stride) if size > 1)
    is_dense = all(step == math.prod(size for _, size in steps[:at]) for at, (step, _) in enumerate(steps))
    if not (is_dense and 0 <= offset <= last < plane.numel()):
        return None
    return _gathered(plane, written.shape, written.stride, view.shape, view.stride, offset)


def _gathered(
    plane: Tensor, written: Sequence[int], steps: Sequence[int], shape: Sequence[int], stride: Sequence[int],
    offset: int
) -> Tensor:  # fmt: skip
    """Return a plane of some shape and strides in others.

    The place along a dim of an element at some offset in memory is ``offset // step % size``. A dim of the result
    does not change it if its stride is a multiple of ``step * size``, or small enough for no carry.
    """
    short = small(plane)
    places = _places(short.shape, tuple(written), tuple(steps), tuple(shape), tuple(stride), offset)
    return (short[places] if places else plane).expand(tuple(shape))


@lru_cache(maxsize=32)  # layers that are alike view their memory alike
def _places(
    counts: Sequence[int], written: Sequence[int], steps: Sequence[int], shape: Sequence[int], stride: Sequence[int],
    offset: int
) -> tuple[Tensor, ...]:  # fmt: skip
    """Return where the elements of a view are along each dim, of which a plane has different entries."""
    places = []
    for size, step, count in zip(written, steps, counts):
        dims = sorted(
            (dim for dim, by in enumerate(stride) if count > 1 and by % (step * size)), key=stride.__getitem__
        )
        lengths = [(shape[dim] - 1) * stride[dim] for dim in dims]
        units = (math.gcd(step, *(stride[dim] for dim in dims[at:])) for at in range(len(dims) + 1))
        no_carry = max(at for at, unit in enumerate(units) if offset % unit + sum(lengths[:at]) < unit)
        at = torch.tensor(offset).reshape([1] * len(shape))
        for dim in dims[no_carry:]:
            along = torch.arange(shape[dim]) * stride[dim]
            at = at + along.reshape([-1 if each == dim else 1 for each in range(len(shape))])
        places.append(at // step % size if count > 1 else torch.zeros_like(at))
    return tuple(places)


def written_out(plane: Tensor, written: View, numel: int) -> Tensor:
    """Return the plane of a whole storage, element by element."""
    flat = torch.zeros(numel, dtype=torch.int64)
    flat.as_strided(written.shape, written.stride, written.offset).copy_(plane)
    return flat
