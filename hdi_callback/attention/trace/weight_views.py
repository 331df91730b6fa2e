"""`WeightViews`: which rows of which parameter the matrix of a product is."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hdi_callback.attention.trace.draw import drawn_parameter
from hdi_callback.attention.trace.maps import MapStub


@dataclass(frozen=True, eq=False)
class WeightView:
    """A parameter, or a part of it, with dims in whatever order.

    Attributes:
        base: the parameter.
        tensor: the view.
        dims: for each dim of the view those of the parameter that it runs over, one or several that are put together.
        parameter: dotted path.
        stub: the map that holds it, if one does.
    """

    base: Tensor
    tensor: Tensor
    dims: tuple[tuple[int, ...], ...]
    parameter: str
    stub: MapStub | None = None

    @property
    def is_whole(self) -> bool:
        """Whether it is the parameter itself."""
        return self.tensor.shape == self.base.shape and self.tensor.stride() == self.base.stride()

    def features(self, new: Sequence[int]) -> tuple[tuple[int, ...], int, list[int]] | None:
        """Numbers of the output features of a map, from the dims of the view that are not contracted.

        Args:
            new: those dims.

        Returns:
            The dims of the parameter that number its features, none for those of a matrix as its map has them; the
            first feature of the view; and `new` in the order of the parameter. `None` if the view has features that do
            not lie side by side, or a part of what the map takes that is not the first of it.
        """
        shape, sizes = self.base.shape, self.tensor.shape
        kept = [dim for at, dims in enumerate(self.dims) if at not in new for dim in dims]
        axes = tuple(dim for dim in range(len(shape)) if dim not in kept)  # those too of which one is chosen
        first = int(self.tensor.storage_offset() - self.base.storage_offset())
        last = first + sum((sizes[at] - 1) * self.tensor.stride(at) for at in new)
        count = math.prod(sizes[at] for at in new)
        takes_first = len(kept) == 1 or self.takes_all(new)
        start, end = (self._number(one, axes) for one in (first, last))
        if not takes_first or self._number(first, kept) or self._number(last, kept) or end - start + 1 != count:
            return None
        is_matrix = len(shape) == 2 and axes == (int(self.stub is not None and self.stub.is_transposed),)
        if self.stub is not None and not is_matrix and not self.stub.has_parameter:
            return None
        return () if is_matrix else axes, start, sorted(new, key=lambda at: self.dims[at])

    def takes_all(self, new: Sequence[int]) -> bool:
        """Return whether the dims of the view that are contracted are all that the parameter has.

        Args:
            new: the other dims.

        Returns:
            True if so.
        """
        kept = [dim for at, dims in enumerate(self.dims) if at not in new for dim in dims]
        count = math.prod(self.tensor.shape[at] for at in new)
        return math.prod(self.base.shape[dim] for dim in kept) * count == self.tensor.numel()

    def _number(self, offset: int, dims: Sequence[int]) -> int:
        """Number an element of the parameter by its place in some of the dims."""
        number = 0
        for dim in dims:
            number = number * self.base.shape[dim] + offset // self.base.stride(dim) % self.base.shape[dim]
        return number


class WeightViews:
    """Recognises parameters of a copy, and views of them.

    Args:
        stubs: its linear maps.
        parameters: path -> every other parameter.
    """

    def __init__(self, stubs: Iterable[MapStub], parameters: Mapping[str, nn.Parameter]) -> None:
        self.stubs = {id(stub.weight): stub for stub in stubs}
        self.names = {id(parameter): name for name, parameter in parameters.items()}

    def is_of_parameter(self, tensor: Tensor) -> bool:
        """Return whether a tensor is a parameter or a view of one."""
        base = _base(tensor)
        return id(base) in self.names or id(base) in self.stubs

    def view_of(self, tensor: Tensor) -> WeightView | None:
        """Recognise a parameter, or a part of it that keeps its dims, in whatever order.

        Args:
            tensor: any tensor.

        Returns:
            What it shows of which parameter; `None` of anything else.
        """
        base = _base(tensor)
        stub = self.stubs.get(id(base))
        name = self.names.get(id(base)) if stub is None else f"{stub.path}.weight"
        if name is None or not base.is_contiguous() or base.dim() < 2 or (stub is not None and base.dim() != 2):
            return None
        if tensor.shape == base.shape and tensor.stride() == base.stride():
            return WeightView(base, tensor, tuple((dim,) for dim in range(base.dim())), name, stub)
        dims = [_dims_of(base, size, stride) for size, stride in zip(tensor.shape, tensor.stride())]
        used = [dim for one in dims for dim in one]
        is_plain = all(dims) and len(set(used)) == len(used)
        return WeightView(base, tensor, tuple(dims), name, stub) if is_plain else None

    def has_filled(self, arguments: Iterable[Any], made: Any) -> bool:
        """Fill weights that a function uses in another way than in a product that is cut.

        Args:
            arguments: of the function.
            made: its result, from weights that hold no numbers yet.

        Returns:
            True if there were such weights, so that it is to be tried again; a view of a weight reads none of it.
        """
        has_filled = False
        for argument in arguments:
            if type(argument) in (tuple, list):
                has_filled |= self.has_filled(argument, made)
            elif isinstance(argument, Tensor) and isinstance(made, Tensor):
                base = _base(argument)
                stub = self.stubs.get(id(base))
                if stub is not None and not stub.holds_numbers and _base(made) is not base:
                    stub.holds_numbers = True  # for all runs, as those before this one have its weight in their graph
                    with torch._C.DisableTorchFunction(), torch.no_grad():
                        base.copy_(drawn_parameter(f"{stub.path}.weight", base))
                    has_filled = True
        return has_filled


def _dims_of(base: Tensor, size: int, stride: int) -> tuple[int, ...]:
    """Dims of a parameter that one dim of a view runs over; none where it is split or repeated."""
    last = next((dim for dim in range(base.dim()) if base.stride(dim) == stride and base.shape[dim] > 1), None)
    if last is None:
        return ()
    first = last
    while first and base.shape[first : last + 1].numel() < size:
        first -= 1
    return tuple(range(first, last + 1))


def _base(tensor: Tensor) -> Tensor:
    return tensor if tensor._base is None else tensor._base
