"""Put back what a forward changes: all that can be reached from the modules and the arguments of a call.

Tensors are copied right before an operation first writes into their memory, wherever they are held. Python objects
are listed before the forward, and put back in place after it. What cannot be put back, such as a file that was
written or a generator function that went on, is named where it has happened.
"""

from __future__ import annotations

import copy
import functools
import io
import operator
import random
import sys
import types
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.utils._pytree import tree_leaves

from hdi_callback.attention.releases import Mode
from hdi_callback.attention.sharding import is_sharded
from hdi_callback.attention.tape import written_tensors

__all__ = ["KeptState", "KeptTensors"]

# Objects of these packages hold no state of a model's forward, or are the training that runs around it.
_NOT_ENTERED = frozenset({
    "torch", "numpy", "hdi_callback", "lightning", "pytorch_lightning", "accelerate", "wandb", "tensorboard", "logging",
    "threading", "_thread", "concurrent", "multiprocessing", "asyncio", "weakref", "re", "builtins", "functools",
})  # fmt: skip
_ATOMS = (type(None), bool, int, float, complex, str, bytes, range, slice, Tensor, types.ModuleType, types.CodeType)
_LARGEST = 100_000  # items of a container, and numbers of an array, that are listed


class KeptTensors(Mode):
    """Copy the memory of a tensor before the first operation that writes into it; `put_back` undoes all writes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._fresh: set[int | None] = set()  # storages that the forward itself has made
        self._copies: dict[int, tuple[Any, Any]] = {}
        self._versions: dict[int, Any] = {}

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let torch.compile go on with what runs under this mode, then and later."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Copy what the operation is about to write into, then run it."""
        kwargs = kwargs or {}
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # a DTensor asks for operations on the part of this rank, which come here
        written = written_tensors(func, args, kwargs)
        for tensor in (*written, *_statistics(func, args, kwargs)):
            self._keep(tensor)
        out = func(*args, **kwargs)
        if not written:
            before = {_address(tensor) for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, Tensor)}
            made = {_address(tensor) for tensor in tree_leaves(out) if isinstance(tensor, Tensor)}
            self._fresh |= made - before
        return out

    def put_back(self) -> None:
        """Write the memory back as it was, and the counters of autograd."""
        for storage, content in self._copies.values():
            if storage.nbytes() == content.nbytes():  # FSDP frees what it has gathered
                storage.copy_(content)
        for version in reversed(self._versions.values()):
            version.__exit__(None, None, None)
        self._copies.clear()
        self._versions.clear()

    def _keep(self, tensor: Tensor) -> None:
        address = _address(tensor)
        if address is None or address in self._fresh or tensor.is_meta:
            return
        if address not in self._copies:
            storage = tensor.untyped_storage()
            self._copies[address] = storage, storage.clone()
        if id(tensor) not in self._versions and not tensor.is_inference():
            self._versions[id(tensor)] = _unsafe_preserve_version_counter(tensor)


class KeptState:
    """List the Python objects that can be reached from some roots; `put_back` restores them in place.

    Containers, attributes of objects and of the user's classes, closures, global names that forwards use, generators of
    random numbers, arrays and positions of files are restored. Iterators that can be copied are replaced by copies
    meanwhile. Generators of random numbers that are reached are restored as well.

    Args:
        roots: modules, and arguments of their calls.
    """

    def __init__(self, roots: Iterable[Any]) -> None:
        self._met: dict[int, Any] = {}  # kept alive, so that no number is used again
        self._undo: list[Callable[[], None]] = []
        self._lost: list[tuple[str, Callable[[], Any], Any]] = []
        self._stack: list[Any] = list(roots)
        while self._stack:
            value = self._stack.pop()
            if not isinstance(value, _ATOMS) and id(value) not in self._met:
                self._met[id(value)] = value
                self._list(value)

    def put_back(self) -> list[str]:
        """Restore everything.

        Returns:
            What has changed and cannot be restored, in words.
        """
        lost = [what for what, state, before in self._lost if state() != before]
        for undo in reversed(self._undo):
            undo()
        return list(dict.fromkeys(lost))

    def _list(self, value: Any) -> None:
        if isinstance(value, dict):
            self._list_dict(value)
        elif isinstance(value, (list, deque)):
            self._list_items(value, lambda: list(value), functools.partial(_refill, value, value.extend))
        elif isinstance(value, set):
            self._list_items(value, lambda: list(value), functools.partial(_refill, value, value.update))
        elif isinstance(value, (tuple, frozenset)):
            self._stack.extend(value if len(value) <= _LARGEST else ())
        elif isinstance(value, torch.Generator):
            self._keep(value.get_state, value.set_state, torch.equal)
        elif isinstance(value, random.Random):
            self._keep(value.getstate, value.setstate)
        elif isinstance(value, (np.random.Generator, np.random.BitGenerator)):
            bits: Any = getattr(value, "bit_generator", value)
            state = bits.state
            self._undo.append(lambda: setattr(bits, "state", state))
        elif isinstance(value, np.random.RandomState):
            self._keep(value.get_state, value.set_state, lambda now, state: False)
        elif isinstance(value, np.ndarray):
            self._list_array(value)
        elif isinstance(value, io.IOBase):
            self._list_file(value)
        elif isinstance(value, types.GeneratorType):
            self._lost.append(("a generator function, which went on", lambda: _place(value), _place(value)))
        elif isinstance(value, types.MethodType):
            self._stack += [value.__self__, value.__func__]
        elif isinstance(value, functools.partial):
            self._stack += [value.func, value.args, value.keywords]
        elif isinstance(value, types.FunctionType):
            self._list_function(value)
        elif isinstance(value, type):
            self._list_class(value)
        else:
            self._list_object(value)

    def _list_dict(self, value: dict[Any, Any]) -> None:
        """List the items of a dict, also of a module or another object; iterators in it give way to copies."""
        if len(value) > _LARGEST or any(map(is_sharded, value.values())):  # FSDP exchanges parameters
            return
        items = list(value.items())

        def undo() -> None:
            now = list(value.items())
            is_changed = len(now) != len(items) or any(a is not c or b is not d for (a, b), (c, d) in zip(now, items))
            if is_changed and not any(map(is_sharded, value.values())):
                # of the class itself: transformers' outputs refuse some of these methods
                kind: Any = next(base for base in type(value).__mro__ if base.__module__ in ("builtins", "collections"))
                kind.clear(value)
                for name, item in items:
                    kind.__setitem__(value, name, item)

        self._undo.append(undo)
        for name, item in items:
            if (other := _copied_iterator(item)) is not None:
                dict.__setitem__(value, name, other)
        self._stack += [item for _, item in items if not isinstance(item, _ATOMS)]

    def _list_items(self, value: Any, read: Callable[[], list[Any]], write: Callable[[list[Any]], Any]) -> None:
        if len(value) > _LARGEST:
            return
        items = read()

        def undo() -> None:
            if len(value) != len(items) or any(now is not item for now, item in zip(value, items)):
                write(items)

        self._undo.append(undo)
        copies = {place: other for place, item in enumerate(items) if (other := _copied_iterator(item)) is not None}
        if copies and isinstance(value, (list, deque)):
            for place, other in copies.items():
                value[place] = other
        self._stack += [item for item in items if not isinstance(item, _ATOMS)]

    def _keep(
        self, read: Callable[[], Any], write: Callable[[Any], Any], is_same: Callable[[Any, Any], bool] = operator.eq
    ) -> None:
        state = read()
        self._undo.append(lambda: None if is_same(read(), state) else write(state))

    def _list_array(self, value: Any) -> None:
        if value.size <= _LARGEST and value.flags.writeable:
            content = value.copy()
            self._undo.append(lambda: np.copyto(value, content))

    def _list_file(self, value: Any) -> None:
        try:
            place = value.tell()
        except (OSError, ValueError):  # a pipe, or closed
            return
        if value.writable():
            self._lost.append(("a file, which was written", lambda: None if value.closed else value.tell(), place))
        else:
            self._undo.append(lambda: None if value.closed else value.seek(place))

    def _list_function(self, value: types.FunctionType) -> None:
        for cell in value.__closure__ or ():
            try:
                content = cell.cell_contents
            except ValueError:  # not filled yet
                continue
            self._undo.append(lambda cell=cell, content=content: setattr(cell, "cell_contents", content))  # type: ignore[misc]
            self._stack.append(content)
        if _is_users(value.__module__):
            names = value.__globals__
            for name in value.__code__.co_names:
                if name in names and not isinstance(names[name], types.ModuleType):
                    self._undo.append(lambda name=name, content=names[name]: names.__setitem__(name, content))  # type: ignore[misc]
                    self._stack.append(names[name])

    def _list_class(self, value: type) -> None:
        """List attributes of a user's class, and what its methods use."""
        if not _is_users(value.__module__):
            return
        own = {
            name: item for name, item in vars(value).items()
            if not name.startswith("__") and not isinstance(item, (property, staticmethod, classmethod))
        }  # fmt: skip

        def undo() -> None:
            now = vars(value)
            for name in [name for name in now if name not in own and not name.startswith("__")]:
                if not isinstance(now[name], (property, staticmethod, classmethod)):
                    delattr(value, name)
            for name, item in own.items():
                if now.get(name) is not item:
                    setattr(value, name, item)

        self._undo.append(undo)
        self._stack += [item for item in own.values() if not isinstance(item, _ATOMS)]
        self._stack += value.__bases__

    def _list_object(self, value: Any) -> None:
        is_module = isinstance(value, nn.Module)
        if not is_module and type(value).__module__.partition(".")[0] in _NOT_ENTERED:
            return
        attributes = getattr(value, "__dict__", None)
        if isinstance(attributes, dict):
            self._stack.append(attributes)
        self._stack.append(type(value))
        for name in {name for base in type(value).__mro__ for name in _slots(base)}:
            try:
                item = getattr(value, name)
            except AttributeError:
                continue
            self._undo.append(lambda name=name, item=item: object.__setattr__(value, name, item))  # type: ignore[misc]
            self._stack.append(item)


def _statistics(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """List the running statistics that a batch norm is given: it writes into them, and its schema does not say so."""
    arguments = getattr(getattr(func, "_schema", None), "arguments", ())
    named = {argument.name: kwargs.get(argument.name) for argument in arguments}
    named |= {argument.name: value for argument, value in zip(arguments, args)}
    return [named[name] for name in ("running_mean", "running_var") if isinstance(named.get(name), Tensor)]


def _refill(value: Any, add: Callable[[list[Any]], None], items: list[Any]) -> None:
    value.clear()
    add(items)


def _slots(kind: type) -> tuple[str, ...]:
    names = vars(kind).get("__slots__", ())
    names = (names,) if isinstance(names, str) else tuple(names)
    return tuple(name for name in names if name not in ("__dict__", "__weakref__"))


def _place(generator: types.GeneratorType[Any, Any, Any]) -> Any:
    frame = generator.gi_frame
    return None if frame is None else (frame.f_lasti, {name: id(value) for name, value in frame.f_locals.items()})


def _copied_iterator(value: Any) -> Any:
    """Return a copy of an iterator of Python's own (a list's, `itertools.count`); `None` of anything else."""
    is_iterator = hasattr(type(value), "__next__") and type(value).__module__ in ("builtins", "itertools")
    if not is_iterator or isinstance(value, types.GeneratorType):
        return None
    try:
        return copy.copy(value)
    except Exception:  # of an iterator that cannot be copied
        return None


@functools.cache
def _is_users(module: str) -> bool:
    """Whether a module is the user's own code, and not an installed package."""
    loaded = sys.modules.get(module or "")
    file = getattr(loaded, "__file__", None)
    if module == "__main__":
        return True
    if loaded is None or file is None or module.partition(".")[0] in _NOT_ENTERED:
        return False
    return "site-packages" not in file and "dist-packages" not in file and module.partition(".")[0] not in _STANDARD


_STANDARD = frozenset(sys.stdlib_module_names)


def _address(tensor: Tensor) -> int | None:
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):  # a tensor without memory
        return None
