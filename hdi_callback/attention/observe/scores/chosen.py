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
_MOVES = frozenset((
    "view", "reshape", "transpose", "swapaxes", "permute", "movedim", "unsqueeze", "squeeze", "flatten", "unflatten",
    "cat", "expand", "repeat_interleave", "repeat",
))  # fmt: skip
_ANY: frozenset[int] = frozenset()


class ChosenTokens:
    """Follow tokens selected from a tensor with other indices for each of its leading dimensions."""

    def __init__(self) -> None:
        # The dimensions over which the choice differs, negative; empty where they have been moved.
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
            return len(call.args) > 1 and bool(_indices(call.args[1]))
        return call.name in _GATHERS or (bool(self._notes) and self._dims_of_any(call) is not None)

    def follow(self, call: Call) -> None:
        """Record a selection of tokens, or propagate it to a result.

        Args:
            call: of a function that may concern it.
        """
        result, args = call.result, call.args
        if not isinstance(result, Tensor) or not result.is_floating_point():
            return
        if call.name in _GATHERS:
            index = next((value for value in call.values[1:] if isinstance(value, Tensor)), None)
            varies = frozenset() if index is None else _varying(index)
            if len(varies) > 1:
                self._notes[result] = varies
        elif call.name == "__getitem__" and (indices := _indices(args[1])):
            most = max((_varying(one) for one in indices), key=len)
            if len(most) > 1:
                place = _place(args[1], args[0].dim(), max(one.dim() for one in indices))
                dims = _ANY if place is None else frozenset(place - result.dim() + dim for dim in most)
                self._notes[result] = dims
        elif (dims_of_any := self._dims_of_any(call)) is not None:
            keeps_places = call.base in _KEEPS_PLACES
            if keeps_places and result.dim() == max(tensor.dim() for tensor in call.tensors()):
                self._notes[result] = dims_of_any
            elif keeps_places or call.base in _MOVES:
                self._notes[result] = _ANY

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
        if not dims or tensor.dim() - 2 != len(axes.lead):  # moved, or sequences and heads in one dimension
            return True
        return any(dim - len(axes.lead) - 2 in dims for dim in axes.heads_dims)

    def _find(self, tensor: Tensor) -> frozenset[int] | None:
        known = self._notes.get(tensor)
        if known is not None:
            return known
        base = tensor._base if type(tensor) is Tensor and tensor._is_view() else None
        dims = None if base is None else self._find(base)
        is_same = base is not None and base.shape == tensor.shape and base.stride() == tensor.stride()
        return dims if dims is None or is_same else _ANY  # turned twice, it is as it was

    def _dims_of_any(self, call: Call) -> frozenset[int] | None:
        return next((dims for tensor in call.tensors() if (dims := self._find(tensor)) is not None), None)


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
