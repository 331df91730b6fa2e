"""Queries and keys that each head chose for itself among the tokens, as sparse attention does.

The rows of two heads are then of other queries, or their columns other keys, and have nothing to say of each other.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from hdi_callback.attention.observe.scores.axes import Axes

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
    """Follow what was picked out of a tensor with other indices for each of its leading dimensions."""

    def __init__(self) -> None:
        # The dimensions over which the choice differs, negative; empty where they have been moved.
        self._tags: dict[int, tuple[weakref.ref[Tensor], frozenset[int]]] = {}

    def clear(self) -> None:
        """Forget all tensors."""
        self._tags.clear()

    def may_concern(self, name: str, args: tuple[Any, ...]) -> bool:
        """Return whether `follow` is to see a function.

        Args:
            name: of the function.
            args: its arguments.

        Returns:
            Whether tokens may be chosen by it, or were before.
        """
        if name == "__getitem__":
            return len(args) > 1 and bool(_indices(args[1]))
        return name in _GATHERS or (bool(self._tags) and self._dims_of_any(args) is not None)

    def follow(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Note a choice, or carry it on.

        Args:
            name: of the function.
            args: by position.
            kwargs: by name.
            result: what it gave.
        """
        if not isinstance(result, Tensor) or not result.is_floating_point():
            return
        plain = name.strip("_").removeprefix("i") if name.startswith("__i") else name.strip("_")
        if name in _GATHERS:
            index = next((one for one in (*args[1:], *kwargs.values()) if isinstance(one, Tensor)), None)
            varies = frozenset() if index is None else _varying(index)
            if len(varies) > 1:
                self._tag(result, varies)
        elif name == "__getitem__" and (indices := _indices(args[1])):
            most = max((_varying(one) for one in indices), key=len)
            if len(most) > 1:
                place = _place(args[1], args[0].dim(), max(one.dim() for one in indices))
                self._tag(result, _ANY if place is None else frozenset(place - result.dim() + dim for dim in most))
        elif (dims := self._dims_of_any(args)) is not None:
            if plain in _KEEPS_PLACES and result.dim() == max(one.dim() for one in args if isinstance(one, Tensor)):
                self._tag(result, dims)
            elif plain in _KEEPS_PLACES or plain in _MOVES:
                self._tag(result, _ANY)

    def differ_by_head(self, tensor: Tensor, axes: Axes) -> bool:
        """Return whether heads have tokens of their own.

        Args:
            tensor: ``(*lead, length, width)``, queries or keys.
            axes: which leading dimensions are heads.

        Returns:
            False if all heads of a sequence have the same tokens, as far as they were followed.
        """
        if not self._tags or axes.heads < 2:
            return False
        dims = self._find(tensor)
        if dims is None:
            return False
        if not dims or tensor.dim() - 2 != len(axes.lead):  # moved, or sequences and heads in one dimension
            return True
        return any(dim - len(axes.lead) - 2 in dims for dim in axes.heads_dims)

    def _tag(self, tensor: Tensor, dims: frozenset[int]) -> None:
        key = id(tensor)
        self._tags[key] = (weakref.ref(tensor, lambda _, key=key: self._tags.pop(key, None)), dims)  # type: ignore[misc]

    def _find(self, tensor: Any) -> frozenset[int] | None:
        if not isinstance(tensor, Tensor):
            return None
        tag = self._tags.get(id(tensor))
        if tag is not None and tag[0]() is tensor:
            return tag[1]
        base = tensor._base if type(tensor) is Tensor and tensor._is_view() else None
        dims = None if base is None else self._find(base)
        is_same = base is not None and base.shape == tensor.shape and base.stride() == tensor.stride()
        return dims if dims is None or is_same else _ANY  # turned twice, it is as it was

    def _dims_of_any(self, args: tuple[Any, ...]) -> frozenset[int] | None:
        for one in args:
            for tensor in one if isinstance(one, (tuple, list)) else (one,):
                if (dims := self._find(tensor)) is not None:
                    return dims
        return None


def _indices(index: Any) -> list[Tensor]:
    """Give the tensors of whole numbers among what a tensor is indexed with."""
    parts = index if isinstance(index, tuple) else (index,)
    return [one for one in parts if isinstance(one, Tensor) and one.dtype in (torch.int64, torch.int32)]


def _varying(index: Tensor) -> frozenset[int]:
    """Give the dimensions over which an index can differ, negative."""
    sizes = zip(index.shape, index.stride())
    return frozenset(dim - index.dim() for dim, (size, stride) in enumerate(sizes) if size > 1 and stride)


def _place(index: Any, dims: int, width: int) -> int | None:
    """Give the dimension of the result behind those that tensors of `width` dimensions index; None if not known."""
    parts = index if isinstance(index, tuple) else (index,)
    if not all(isinstance(one, (Tensor, slice)) for one in parts):
        return None
    which = [number for number, one in enumerate(parts) if isinstance(one, Tensor)]
    return which[0] + width if which == list(range(which[0], which[-1] + 1)) else None
