"""Equality of modules by what they hold: equal modules compute the same, without a run of either.

A traced run draws parameters by their names, so that their values make no difference. `differing_attributes` names the
plain attributes in which two modules differ, such as the number of a layer in its model; `watched` shows whether a run
reads them: an attribute that is not read makes no difference either.
"""

from __future__ import annotations

import types
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from hdi_callback.attention.isolation import ATOMS, HOOKS, attributes_of, has_memory

# No copy has them: the mode, what `torch.compile` made of a forward, and hooks.
_NOT_COPIED = frozenset((*HOOKS, "training", "_compiled_call_impl"))
# Methods by which a class may read its attributes while it is copied, or each time that one is read.
_READING = ("__deepcopy__", "__reduce_ex__", "__reduce__", "__getstate__", "__setstate__", "__getattribute__")
_IS_PYTHON_CLASS = 1 << 9  # Py_TPFLAGS_HEAPTYPE


Attribute = tuple[str, str]
"""Dotted path of a part, and the name of one of its attributes."""


def differing_attributes(one: nn.Module, other: nn.Module) -> frozenset[Attribute] | None:
    """Name the numbers, words and other plain attributes of parts in which two modules differ.

    What cannot be compared, such as a closure or an object of an extension, is taken to differ, unless it is one and
    the same. Values of parameters, the mode and hooks are not compared.

    Args:
        one: a module.
        other: another.

    Returns:
        The attributes, none if the modules are alike; `None` if they differ in anything else.
    """
    comparison = _Comparison()
    try:
        with torch.no_grad(), torch._C.DisableTorchFunction():
            if not comparison.are_equal(one, other):
                return None
            if not comparison.differing:
                return frozenset()
            paths = {id(part): path for path, part in one.named_modules()}
            return frozenset((paths[owner], name) for owner, name in comparison.differing)
    except Exception:  # an object that cannot be read
        return None


@contextmanager
def watched(module: nn.Module, attributes: Iterable[Attribute]) -> Iterator[set[Attribute]]:
    """Note which attributes the code of the block reads or writes.

    Meanwhile each is a property of a subclass, so that code which checks the class of a part, or reads its `__dict__`,
    may behave differently: compare the results with a run that is not watched.

    Args:
        module: a copy, whose parts are of other classes within the block.
        attributes: to be watched.

    Yields:
        Those that were read or written so far, or that a copy does not have.
    """
    used: set[Attribute] = set()
    of_parts: dict[str, set[str]] = {}
    for path, name in attributes:
        of_parts.setdefault(path, set()).add(name)
    parts = dict(module.named_modules())
    kinds: list[tuple[nn.Module, type]] = []
    values: list[tuple[nn.Module, dict[str, Any]]] = []
    try:
        for path, names in of_parts.items():
            part = parts.get(path)
            if part is None or not names <= part.__dict__.keys():  # in a linear map, whose code does not run in a copy
                used.update((path, name) for name in names)
                continue
            own = {name: part.__dict__.pop(name) for name in names}
            values.append((part, own))
            kind = type(part)
            watching = types.new_class(kind.__name__, (_Unregistered, kind))
            for name in names:
                setattr(watching, name, _watching(own, (path, name), used))
            watching.__module__, watching.__qualname__ = kind.__module__, kind.__qualname__
            object.__setattr__(part, "__class__", watching)
            kinds.append((part, kind))
        yield used
    finally:
        for part, kind in kinds:
            object.__setattr__(part, "__class__", kind)
        for part, own in values:
            part.__dict__.update(own)


class _Unregistered:
    """Keeps a subclass from code that runs for each new one, as where a package keeps a list of them."""

    def __init_subclass__(cls, **options: Any) -> None:
        return None


def _watching(values: dict[str, Any], attribute: Attribute, used: set[Attribute]) -> property:
    def read(_: Any) -> Any:
        used.add(attribute)
        return values[attribute[1]]

    def write(_: Any, value: Any) -> None:
        used.add(attribute)
        values[attribute[1]] = value

    return property(read, write)


class _Comparison:
    """Walks two structures in step; objects that occur twice must do so at the same places of both.

    Attributes:
        differing: number of a module and name of a plain attribute of its own, wherever these differ.
    """

    def __init__(self) -> None:
        self.pairs: dict[int, Any] = {}
        self.others: dict[int, Any] = {}
        self.differing: list[tuple[int, str]] = []

    def are_equal(self, one: Any, other: Any) -> bool:
        if type(one) is not type(other):
            return False
        if isinstance(one, ATOMS):
            return bool(one == other)
        if id(one) in self.pairs or id(other) in self.others:
            return self.pairs.get(id(one)) is other and self.others.get(id(other)) is one
        self.pairs[id(one)], self.others[id(other)] = other, one
        if one is other:
            return True
        if isinstance(one, Tensor):
            return _are_equal_tensors(one, other)
        if type(one) in (set, frozenset):
            return all(isinstance(item, ATOMS) for item in one) and bool(one == other)
        mine, theirs = _held_by(one), _held_by(other)
        if mine is None or theirs is None or not all(isinstance(name, ATOMS) for name in (*mine, *theirs)):
            return False
        return list(mine) == list(theirs) and all(
            self.are_equal(mine[name], theirs[name]) or self._is_noted(one, name, mine[name], theirs[name])
            for name in mine
        )

    def _is_noted(self, owner: Any, name: Any, one: Any, other: Any) -> bool:
        """Record an attribute that differs, if it is a plain one of a module."""
        if not isinstance(owner, nn.Module) or not _may_be_watched(owner, name, one, other):
            return False
        self.differing.append((id(owner), name))
        return True


def _held_by(one: Any) -> dict[Any, Any] | None:
    """Return everything that an object holds, by name; `None` where that is not known."""
    kind = type(one)
    held: dict[Any, Any] | None = None
    if kind in (list, tuple):
        held = dict(enumerate(one))
    elif isinstance(one, dict) and kind.__module__ in ("builtins", "collections"):
        held = one
    elif kind is types.MethodType:
        held = {"__func__": one.__func__, "__self__": one.__self__}
    elif isinstance(one, nn.Module) or _has_attributes_alone(kind):
        held = attributes_of(one)
    return None if held is None else {name: held[name] for name in held if name not in _NOT_COPIED}


def _may_be_watched(owner: nn.Module, name: Any, one: Any, other: Any) -> bool:
    kind = type(owner)
    if not all(isinstance(part, ATOMS) for part in (one, other)) or type(kind) is not type or type(name) is not str:
        return False
    is_plain = not hasattr(getattr(kind, name, None), "__set__")
    return is_plain and all(getattr(kind, method, None) is getattr(nn.Module, method, None) for method in _READING)


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
