"""Data of the user's that user code can reach, and how it is put back.

A forward may count its calls in an attribute of its class, add its auxiliary loss to a list of its module, or keep a
buffer behind a weak reference. `UserData` walks from a module along classes, functions and the names these use, records
every container, attribute and small tensor that it reaches, and restores what has changed.

It enters the code of the user's own files and of the packages that the modules come from. Other installed packages,
torch, the standard library and trainers are assumed to keep no such data: the work of their threads must not be undone.
"""

from __future__ import annotations

import collections
import contextvars
import copy
import random
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from hdi_callback.attention.isolation.contents import (
    ATOMS,
    are_same,
    attributes_of,
    counters_in,
    has_memory,
    items_of,
    kind_of,
    refill,
    rewind,
)

_NOT_ENTERED = frozenset(sys.stdlib_module_names) | {
    "torch", "numpy", "hdi_callback", "lightning", "pytorch_lightning", "lightning_fabric", "accelerate", "deepspeed",
    "composer", "wandb", "tensorboard", "torchmetrics", "IPython", "ipykernel", "pytest", "_pytest", "pluggy",
}  # fmt: skip
_MOST_OBJECTS = 100_000
_MOST_ITEMS = 100_000  # of one container
_MOST_ELEMENTS = 2**16  # of a tensor or an array; a large one is a weight or a table, and no record of calls
_ABSENT = object()


class UserData:
    """Data that user code can reach, as it was when it was recorded.

    Example:
        >>> losses = [1.0]
        >>> data = UserData()
        >>> data.note([losses])
        >>> losses.append(2.0)
        >>> data.restore()
        >>> losses
        [1.0]
    """

    def __init__(self) -> None:
        self._known: dict[int, Any] = {}  # keeps objects alive, so that numbers stay those of one object
        self._undo: list[Callable[[], None]] = []
        self._empty: list[Any] = []  # containers without an item, of which a module has ten
        self._homes: set[str] = set()  # packages that modules are from
        self._modules = frozenset(sys.modules)  # what was imported before
        self._imported: frozenset[str] = frozenset()  # and since, by the time of `restore`
        # Of the methods of classes only those are entered whose names some code uses: a model may inherit hundreds.
        self._used: set[str] = {"forward"}
        self._unused: dict[str, list[Any]] = {}

    def note(self, roots: Iterable[Any]) -> None:
        """Record what can be reached from some objects; what is recorded already stays as it was.

        Args:
            roots: modules, functions, classes, containers.
        """
        todo = [root for root in roots if id(root) not in self._known]
        for module in todo:
            if isinstance(module, nn.Module):
                kinds = {type(part) for part in module.modules()}
                self._homes |= {base.__module__.partition(".")[0] for kind in kinds for base in kind.__mro__}
        while todo and len(self._known) < _MOST_OBJECTS:
            one = todo.pop()
            if isinstance(one, ATOMS) or id(one) in self._known:
                continue
            self._known[id(one)] = one
            with suppress(Exception):  # an object that cannot be read is not known
                todo += self._noted(one)

    def restore(self) -> None:
        """Restore everything that has changed since."""
        self._imported = frozenset(sys.modules) - self._modules
        for one in self._empty:
            if now := items_of(one):
                with suppress(Exception):
                    refill(one, self._registered(now))
        for undo in reversed(self._undo):
            with suppress(Exception):
                undo()

    def _noted(self, one: Any) -> Iterable[Any]:
        """Record one object, and return the objects that it leads to."""
        for kinds, noted in _KINDS:
            if isinstance(one, kinds):
                return noted(self, one)
        for kinds, state_of in _states("numpy" in sys.modules):
            if isinstance(one, kinds):
                self._undo.append(state_of(one))
                return ()
        return self._instance(one)

    # --- kinds of objects

    def _container(self, one: Any) -> Iterable[Any]:
        kind = kind_of(one)
        if kind.__len__(one) > _MOST_ITEMS:
            return ()
        if not kind.__len__(one):
            self._empty.append(one)
            self._undo_attributes(one)
            return ()
        before = items_of(one)
        counters = counters_in(before)

        def undo() -> None:
            rewind(before, counters)
            now = items_of(one)
            if are_same(now, before):
                return
            refill(one, [*before, *self._registered(now)])

        self._undo.append(undo)
        self._undo_attributes(one)
        if isinstance(one, bytearray):
            return ()
        values = [value for _, value in before] if isinstance(one, dict) else before
        return [value for value in values if not isinstance(value, ATOMS)]

    def _registered(self, items: list[Any]) -> list[Any]:
        """Choose what modules registered as they were imported meanwhile: they stay imported and register only once."""
        if not self._imported:
            return []
        found = []
        for item in items:
            parts = item if isinstance(item, tuple) else (item,)
            homes = {part.__name__ if isinstance(part, types.ModuleType) else _home(part) for part in parts}
            if not self._imported.isdisjoint(homes):
                found.append(item)
        return found

    def _tensor(self, one: Tensor) -> Iterable[Any]:
        # A parameter is trained, and nothing that counts. Other kinds of tensors may call back when they are read.
        if type(one) is not Tensor or one.is_meta or one.layout is not torch.strided or one.numel() > _MOST_ELEMENTS:
            return ()
        if not has_memory(one):
            return ()
        with torch.no_grad():
            before, version = one.detach().clone(), None if one.is_inference() else one._version

        def undo() -> None:
            # Unchanged, nothing may be written: autograd may have saved the tensor.
            if (version is None or one._version != version) and has_memory(one):
                with torch.no_grad(), torch.inference_mode(one.is_inference()):
                    one.detach().copy_(before)

        self._undo.append(undo)
        return ()

    def _function(self, one: types.FunctionType) -> Iterator[Any]:
        if self._is_foreign(one.__module__):
            return
        yield from (one.__defaults__ or (), one.__kwdefaults__ or {}, one.__dict__)
        for cell in one.__closure__ or ():
            yield self._cell(cell)
        names = _names_in(one.__code__)
        for name in names - self._used:
            yield from self._unused.pop(name, ())
        self._used |= names
        yield from self._names(one.__globals__, names)

    def _cell(self, cell: types.CellType) -> Any:
        try:
            before = cell.cell_contents
        except ValueError:  # empty yet
            return None

        def undo() -> None:
            if cell.cell_contents is not before:
                cell.cell_contents = before

        self._undo.append(undo)
        return before

    def _names(self, namespace: dict[str, Any], names: frozenset[str]) -> Iterator[Any]:
        """Record what a piece of code may read and bind in the namespace of a module."""
        if self._is_foreign(namespace.get("__name__")):
            return
        for name in names:
            before = namespace.get(name, _ABSENT)
            if before is _ABSENT and not name.isidentifier():
                continue
            self._undo.append(partial(_bind_again, namespace, name, before))
            if isinstance(before, types.ModuleType):
                yield from self._names(vars(before), names)
            elif before is not _ABSENT:
                yield before

    def _class(self, one: type) -> Iterator[Any]:
        if self._is_foreign(one.__module__):  # torch makes classes of the user's: parametrized ones, sharded ones
            yield from (base for base in one.__mro__[1:] if not self._is_foreign(base.__module__))
            return
        before = {name: value for name, value in vars(one).items() if not _is_dunder(name)}

        def undo() -> None:
            now = {name: value for name, value in vars(one).items() if not _is_dunder(name)}
            for name in now.keys() - before.keys():
                type.__delattr__(one, name)
            for name, value in before.items():
                if now.get(name, _ABSENT) is not value:
                    type.__setattr__(one, name, value)

        self._undo.append(undo)
        for name, value in list(vars(one).items()):
            is_code = isinstance(value, (types.FunctionType, staticmethod, classmethod, property))
            is_called = _is_dunder(name) and not (name == "__init__" and issubclass(one, nn.Module))
            if not is_code or is_called or name in self._used:
                yield value
            else:
                self._unused.setdefault(name, []).append(value)
        yield from one.__mro__[1:]

    def _instance(self, one: Any) -> Iterator[Any]:
        kind = type(one)
        is_open = isinstance(one, (nn.Module, types.SimpleNamespace, threading.local))
        if self._is_foreign(kind.__module__) and not is_open:
            return
        yield kind
        attributes = attributes_of(one)
        if attributes is not None:
            yield attributes
        for owner in kind.__mro__:
            for name in self._slots(owner):
                before = getattr(one, name, _ABSENT)
                if before is not _ABSENT:
                    self._undo.append(partial(_set_again, one, name, before))
                    yield before

    def _slots(self, owner: type) -> tuple[str, ...]:
        slots = () if self._is_foreign(owner.__module__) else vars(owner).get("__slots__", ())
        return (slots,) if isinstance(slots, str) else tuple(name for name in slots if not _is_dunder(name))

    def _is_foreign(self, module: Any) -> bool:
        package = module.partition(".")[0] if isinstance(module, str) else "builtins"
        return package in _NOT_ENTERED or (package not in self._homes and _is_installed(package))

    def _undo_attributes(self, one: Any) -> None:
        """Record what an instance of a subclass of a container has beside its items."""
        attributes = attributes_of(one)
        if attributes is not None and id(attributes) not in self._known:
            self._known[id(attributes)] = attributes
            self._container(attributes)


# Kinds of objects, and the functions that record them; each returns the objects that it leads to.
_KINDS: tuple[tuple[Any, Callable[[UserData, Any], Iterable[Any]]], ...] = (
    ((list, dict, set, collections.deque, bytearray), UserData._container),
    (tuple, lambda _, one: one),
    (Tensor, UserData._tensor),
    (types.FunctionType, UserData._function),
    (types.MethodType, lambda _, one: (one.__func__, one.__self__)),
    ((staticmethod, classmethod), lambda _, one: (one.__func__,)),
    (property, lambda _, one: (one.fget, one.fset)),
    (partial, lambda _, one: (one.func, one.args, one.keywords)),
    (weakref.ref, lambda _, one: (one(),)),
    (type, UserData._class),
    (types.ModuleType, lambda *_: ()),  # entered along the names that code uses
)


@cache
def _states(has_numpy: bool) -> tuple[tuple[type, Callable[[Any], Callable[[], Any]]], ...]:
    """Kinds of objects with a state of their own, each with a function that returns its undo, or raises."""
    found: tuple[tuple[type, Callable[[Any], Callable[[], Any]]], ...] = (
        (contextvars.ContextVar, lambda one: partial(one.reset, one.set(one.get()))),
        (torch.Generator, lambda one: partial(one.set_state, one.get_state())),
        (random.Random, lambda one: partial(one.setstate, one.getstate())),
    )
    if not has_numpy:
        return found
    numpy: Any = sys.modules["numpy"]
    return (
        *found,
        (numpy.random.Generator, lambda one: _bits_of(one.bit_generator)),
        (numpy.random.RandomState, lambda one: partial(one.set_state, one.get_state())),
        (numpy.ndarray, _elements_of),
    )


def _bits_of(bits: Any) -> Callable[[], None]:
    return partial(setattr, bits, "state", copy.deepcopy(bits.state))


def _elements_of(array: Any) -> Callable[[], None]:
    if array.size > _MOST_ELEMENTS or array.dtype == object or not array.flags.writeable:
        return lambda: None
    before = array.copy()

    def undo() -> None:
        if array.tobytes() != before.tobytes():
            array[...] = before

    return undo


def _is_dunder(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


@cache
def _is_installed(package: str) -> bool:
    path = getattr(sys.modules.get(package), "__file__", None) or ""
    return "site-packages" in path or "dist-packages" in path


_NAMES: dict[types.CodeType, frozenset[str]] = {}


def _names_in(code: types.CodeType) -> frozenset[str]:
    """The global names and attributes that a function uses, those of functions within included."""
    if code not in _NAMES:
        within = [_names_in(part) for part in code.co_consts if isinstance(part, types.CodeType)]
        _NAMES[code] = frozenset(code.co_names).union(*within)
    return _NAMES[code]


def _home(one: Any) -> str:
    """The module that a class or a function is from; empty for other objects."""
    is_defined = isinstance(one, (type, types.FunctionType))
    home = one.__module__ if is_defined else ""
    return home if isinstance(home, str) else ""


def _bind_again(namespace: dict[str, Any], name: str, before: Any) -> None:
    now = namespace.get(name, _ABSENT)
    if now is before:
        return
    if before is not _ABSENT:
        namespace[name] = before
    elif not isinstance(now, (types.ModuleType, types.FunctionType, type)):  # these were only loaded late
        del namespace[name]


def _set_again(one: Any, name: str, before: Any) -> None:
    if getattr(one, name, _ABSENT) is not before:
        object.__setattr__(one, name, before)
