"""`WeightViews`: which rows of which parameter the matrix of a product is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hdi_callback.attention.trace.draw import drawn_parameter
from hdi_callback.attention.trace.maps import MapStub


@dataclass(frozen=True)
class WeightRows:
    """Rows that lie side by side in a parameter, or columns of one that is used transposed.

    Attributes:
        parameter: dotted path.
        start: the first feature, counted over `axes`.
        axes: dims of the parameter that number the features, where it is no module's matrix.
        map: the map that holds it, if one does and its matrix is used as the map would use it.
    """

    parameter: str
    start: int
    axes: tuple[int, ...] = ()
    map: MapStub | None = None


@dataclass(frozen=True)
class ParameterPart:
    """A whole parameter, or what is chosen of it by its first dim.

    Attributes:
        parameter: dotted path.
        shape: of the whole parameter.
        first: the first that is chosen.
        has_first: the first dim is there still: several were chosen, not one.
        is_whole: all were chosen.
    """

    parameter: str
    shape: tuple[int, ...]
    first: int = 0
    has_first: bool = True
    is_whole: bool = True


class WeightViews:
    """Recognises parameters of a copy, and views of them.

    Args:
        stubs: its linear maps.
        parameters: path -> every other parameter.
    """

    def __init__(self, stubs: Iterable[MapStub], parameters: Mapping[str, nn.Parameter]) -> None:
        self.stubs = {id(stub.weight): stub for stub in stubs}
        self.names = {id(one): name for name, one in parameters.items()}

    def name_of(self, tensor: Any) -> str | None:
        """Give the path of a whole parameter; `None` for any other tensor."""
        return self.names.get(id(tensor))

    def part_of(self, tensor: Tensor) -> ParameterPart | None:
        """Recognise a whole parameter, ``parameter[i]`` or ``parameter[i:j]``.

        Args:
            tensor: a parameter, or a view of one.

        Returns:
            What was chosen; `None` of anything else.
        """
        name = self.name_of(tensor)
        if name is not None:
            return ParameterPart(name, tuple(tensor.shape))
        base = _base(tensor)
        name, shape = self.name_of(base), tuple(base.shape)
        if name is None or len(shape) < 3 or not base.is_contiguous() or not tensor.is_contiguous():
            return None
        has_first = tensor.dim() == base.dim()
        first, left = divmod(int(tensor.storage_offset() - base.storage_offset()), base.stride(0))
        if left or tuple(tensor.shape[has_first:]) != shape[1:]:
            return None
        return ParameterPart(name, shape, first, has_first, is_whole=False)

    def is_of_parameter(self, tensor: Tensor) -> bool:
        """Return whether a tensor is a parameter or a view of one."""
        base = _base(tensor)
        return id(base) in self.names or id(base) in self.stubs

    def rows_of(self, matrix: Any) -> WeightRows | None:
        """Find the parameter that a matrix ``(features, in_features)`` is a view of.

        Args:
            matrix: rows of a parameter ``(..., in_features)``, of one ``(in_features, features)`` that is transposed,
                or of one of several such matrices ``(H, in_features, features)``; a view of a part of the input is none
                of these.

        Returns:
            The rows, `None` if it is something else.
        """
        if not isinstance(matrix, Tensor) or matrix.dim() != 2:
            return None
        base = _base(matrix)
        stub, name = self.stubs.get(id(base)), self.names.get(id(base))
        if (stub is None and name is None) or not base.is_contiguous() or base.dim() < 2:
            return None
        if stub is not None and base.dim() != 2:
            return None
        taken, (inner, columns) = matrix.shape[1], base.shape[-2:]
        row, column = divmod(int(matrix.storage_offset() - base.storage_offset()), columns)
        if matrix.stride() == (columns, 1) and taken == columns and column == 0:
            is_transposed, start, axes = False, row, tuple(range(base.dim() - 1)) if base.dim() > 2 else ()
        elif matrix.stride() == (1, columns) and taken == inner and row % inner == 0 and base.dim() <= 3:
            is_transposed, start, axes = True, row // inner * columns + column, (0, 2) if base.dim() == 3 else (1,)
        else:
            return None
        if stub is None:
            return WeightRows(str(name), start, axes)
        if is_transposed == stub.is_transposed:
            return WeightRows(f"{stub.path}.weight", start, (), stub)
        has_matrix = isinstance(stub.original[0]._parameters.get("weight"), nn.Parameter)
        return WeightRows(f"{stub.path}.weight", start, axes) if has_matrix else None

    def has_filled(self, arguments: Iterable[Any], made: Any) -> bool:
        """Draw numbers for weights of maps that a function reads otherwise than in a product that is cut.

        Args:
            arguments: of the function.
            made: what it gave, from weights that hold no numbers yet.

        Returns:
            True if there were such weights, so that it is to be asked again; a view of a weight reads none of it.
        """
        has_filled = False
        for one in arguments:
            if type(one) in (tuple, list):
                has_filled |= self.has_filled(one, made)
            elif isinstance(one, Tensor) and isinstance(made, Tensor):
                base = _base(one)
                stub = self.stubs.get(id(base))
                if stub is not None and not stub.holds_numbers and _base(made) is not base:
                    stub.holds_numbers = True  # for all runs, as those before this one have its weight in their graph
                    with torch._C.DisableTorchFunction(), torch.no_grad():
                        base.copy_(drawn_parameter(f"{stub.path}.weight", base))
                    has_filled = True
        return has_filled

    def stack_of(self, stack: Tensor) -> tuple[str | None, bool]:
        """Recognise a whole parameter of three dims: its path, and whether its last two dims are turned."""
        base = stack._base
        if id(stack) in self.names or base is None or not base.is_contiguous() or stack.shape != base.mT.shape:
            return self.name_of(stack), False
        return (self.name_of(base), True) if stack.stride() == base.mT.stride() else (None, False)


def _base(tensor: Tensor) -> Tensor:
    return tensor if tensor._base is None else tensor._base
