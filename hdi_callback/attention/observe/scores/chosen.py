"""Queries and keys that each head chose for itself among the tokens, as sparse attention does.

The rows of two heads then belong to different queries, or their columns to different keys, and do not compare.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hdi_callback.attention.observe.scores.axes import Axes
from hdi_callback.attention.observe.scores.call import Call, TensorNotes

_GATHERS = frozenset(["gather", "take_along_dim"])
_KEEPS_PLACES = frozenset((
    "mul", "multiply", "rmul", "div", "truediv", "add", "radd", "sub", "to", "type_as", "float", "half", "bfloat16",
    "double", "contiguous", "clone", "detach", "dropout",
))  # fmt: skip
_PUTS_SIDE_BY_SIDE = frozenset(("cat", "concat", "repeat", "repeat_interleave"))
_MOVES = frozenset((
    "view", "reshape", "transpose", "swapaxes", "permute", "movedim", "unsqueeze", "squeeze", "flatten", "unflatten",
    "expand", "chunk", "split", "narrow", "select", "unbind", "getitem",
))  # fmt: skip
_ANY = frozenset([0])  # which ones it is over is not known; dimensions are negative


class ChosenTokens:
    """Follow tokens selected from a tensor with other indices for each of its leading dimensions."""

    def __init__(self) -> None:
        # The dimensions over which the choice may differ.
        self._notes = TensorNotes[frozenset[int]]()
        self.clear = self._notes.clear

    def may_concern(self, call: Call) -> bool:
        """Return whether `follow` must handle a call.

        Args:
            call: of any function.

        Returns:
            Whether tokens may be chosen by it, or were before.
        """
        if call.name == "__getitem__":
            return len(call.args) > 1 and (bool(_indices(call.args[1])) or self._are_noted(call))
        return call.name in _GATHERS or self._are_noted(call)

    def follow(self, call: Call) -> None:
        """Record a selection of tokens, or propagate it to a result.

        Args:
            call: of a function that may concern it.
        """
        result, args = call.result, call.args
        if call.base in _MOVES and not (call.name == "__getitem__" and _indices(args[1])):
            self._follow_move(call)
            return
        if not isinstance(result, Tensor) or not result.is_floating_point():
            return
        if call.name in _GATHERS:
            index = next((value for value in call.values[1:] if isinstance(value, Tensor)), None)
            if index is not None and len(varies := _varying(index)) > 1:
                self._notes[result] = varies
        elif call.name == "__getitem__" and (indices := _indices(args[1])):
            most = max((_varying(one) for one in indices), key=len)
            if len(most) > 1:
                place = _place(args[1], args[0].dim(), max(one.dim() for one in indices))
                dims = _ANY if place is None else frozenset(place - result.dim() + dim for dim in most)
                self._notes[result] = dims
        elif call.base in _KEEPS_PLACES or call.base in _PUTS_SIDE_BY_SIDE:
            noted = [found for tensor in call.tensors() if (found := self._find(tensor)) is not None]
            is_flattened = result.dim() < max(tensor.dim() for tensor in call.tensors())
            self._notes[result] = _ANY if is_flattened else frozenset().union(*noted)

    def _follow_move(self, call: Call) -> None:
        noted = ((tensor, dims) for tensor in call.tensors() if (dims := self._find(tensor)) is not None)
        tensor, dims = next(noted)
        for moved in call.results:
            if moved is not tensor:
                self._notes[moved] = _seen_through(tensor, dims, moved)

    def differ_by_head(self, tensor: Tensor, axes: Axes) -> bool:
        """Return whether each head selects its own tokens.

        Args:
            tensor: ``(*lead, length, width)``, queries or keys.
            axes: which leading dimensions are heads.

        Returns:
            False if all heads of a sequence have the same tokens, as far as they were followed.
        """
        if not self._notes or axes.heads < 2:
            return False
        dims = self._find(tensor)
        if dims is None:
            return False
        if tensor.dim() - 2 != len(axes.lead):  # sequences and heads in one dimension
            return bool(dims)
        if dims >= _ANY:
            return True
        return any(dim - len(axes.lead) - 2 in dims for dim in axes.heads_dims)

    def _find(self, tensor: Tensor) -> frozenset[int] | None:
        known = self._notes.get(tensor)
        if known is not None:
            return known
        base = tensor._base if type(tensor) is Tensor and tensor._is_view() else None
        dims = None if base is None else self._find(base)
        return None if base is None or dims is None else _seen_through(base, dims, tensor)

    def _are_noted(self, call: Call) -> bool:
        return bool(self._notes) and any(self._find(tensor) is not None for tensor in call.tensors())


def _seen_through(tensor: Tensor, dims: frozenset[int], view: Tensor) -> frozenset[int]:
    """Return the dimensions of a view that step along dimensions of a tensor; any of them if it is no view.

    A dimension of the view covers the places from its stride to that of its last entry, and steps along each dimension
    of the tensor whose own places overlap with these.
    """
    if dims >= _ANY or type(view) is not Tensor:
        return _ANY
    if view.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr():
        return _ANY
    own = [(tensor.stride(dim), tensor.stride(dim) * tensor.shape[dim]) for dim in dims]
    return frozenset(
        dim - view.dim()
        for dim, (size, stride) in enumerate(zip(view.shape, view.stride()))
        if size > 1 and stride and any(first <= stride * (size - 1) and stride < last for first, last in own)
    )


def _indices(index: Any) -> list[Tensor]:
    """Return the integer tensors in the index of a tensor."""
    parts = index if isinstance(index, tuple) else (index,)
    return [part for part in parts if isinstance(part, Tensor) and part.dtype in (torch.int64, torch.int32)]


def _varying(index: Tensor) -> frozenset[int]:
    """Return the dimensions over which an index can differ, negative."""
    sizes = zip(index.shape, index.stride())
    return frozenset(dim - index.dim() for dim, (size, stride) in enumerate(sizes) if size > 1 and stride)


def _place(index: Any, dims: int, width: int) -> int | None:
    """Return the dimension of the result behind those that tensors of `width` dimensions index; None if not known."""
    parts = index if isinstance(index, tuple) else (index,)
    if not all(isinstance(part, (Tensor, slice)) for part in parts):
        return None
    which = [number for number, part in enumerate(parts) if isinstance(part, Tensor)]
    return which[0] + width if which == list(range(which[0], which[-1] + 1)) else None
