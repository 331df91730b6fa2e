"""`are_alike`: two modules that hold the same compute the same, without a run of either."""

from __future__ import annotations

import types
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from hdi_callback.attention.isolation import HOOKS, attributes_of, has_memory

_ATOMS = (type(None), bool, int, float, complex, str, bytes, range, torch.dtype, torch.device, torch.Size, torch.layout)
# No copy has them: the mode, what `torch.compile` made of a forward, and hooks.
_NOT_COPIED = frozenset((*HOOKS, "training", "_compiled_call_impl"))
_IS_PYTHON_CLASS = 1 << 9  # Py_TPFLAGS_HEAPTYPE


def are_alike(one: nn.Module, other: nn.Module) -> bool:
    """Return whether all that a forward can read of two modules is equal, but for the values of parameters.

    A traced run draws parameters by their names, so that two such modules give the same in it. What cannot be compared,
    such as a closure or an object of an extension, is taken to differ, unless it is one and the same.

    Args:
        one: a module.
        other: another.

    Returns:
        True if so; a number that differs, such as the place of a layer in its model, is enough for False.
    """
    try:
        with torch.no_grad(), torch._C.DisableTorchFunction():
            return _Comparison().are_equal(one, other)
    except Exception:  # an object that cannot be read
        return False


class _Comparison:
    """Walks two structures in step; objects that occur twice must do so at the same places of both."""

    def __init__(self) -> None:
        self.pairs: dict[int, Any] = {}
        self.others: dict[int, Any] = {}

    def are_equal(self, one: Any, other: Any) -> bool:
        if type(one) is not type(other):
            return False
        if isinstance(one, _ATOMS):
            return bool(one == other)
        if id(one) in self.pairs or id(other) in self.others:
            return self.pairs.get(id(one)) is other and self.others.get(id(other)) is one
        self.pairs[id(one)], self.others[id(other)] = other, one
        return one is other or self._are_equal_inside(one, other)

    def _are_equal_inside(self, one: Any, other: Any) -> bool:
        kind = type(one)
        if isinstance(one, Tensor):
            return _are_equal_tensors(one, other)
        if kind in (list, tuple):
            return len(one) == len(other) and all(map(self.are_equal, one, other))
        if kind is set or kind is frozenset:
            return all(isinstance(item, _ATOMS) for item in one) and one == other
        if isinstance(one, dict) and kind.__module__ in ("builtins", "collections"):
            return self._are_equal_dicts(one, other)
        if kind is types.MethodType:
            return one.__func__ is other.__func__ and self.are_equal(one.__self__, other.__self__)
        if isinstance(one, nn.Module) or _has_attributes_alone(kind):
            mine, theirs = attributes_of(one), attributes_of(other)
            return mine is not None and theirs is not None and self._are_equal_dicts(mine, theirs)
        return False

    def _are_equal_dicts(self, one: dict[Any, Any], other: dict[Any, Any]) -> bool:
        mine, theirs = ([name for name in each if name not in _NOT_COPIED] for each in (one, other))
        return mine == theirs and all(
            isinstance(name, _ATOMS) and self.are_equal(one[name], other[name]) for name in mine
        )


def _are_equal_tensors(one: Tensor, other: Tensor) -> bool:
    if type(one) not in (Tensor, nn.Parameter) or is_lazy(one) or is_lazy(other):
        return False
    kinds = [(each.shape, each.dtype, each.device, each.layout, each.requires_grad) for each in (one, other)]
    if kinds[0] != kinds[1]:
        return False
    if isinstance(one, nn.Parameter) or one.is_meta:
        return True
    return has_memory(one) and has_memory(other) and torch.equal(one, other)


def _has_attributes_alone(kind: type) -> bool:
    """Return whether all that instances of a class hold is in their `__dict__`."""
    return kind is types.SimpleNamespace or all(
        base.__flags__ & _IS_PYTHON_CLASS and not base.__dict__.get("__slots__")
        for base in kind.__mro__
        if base is not object
    )
