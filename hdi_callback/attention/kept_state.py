"""Put back what a forward changes: all that can be reached from the modules and the arguments of a call.

Tensors are copied right before an operation first writes into their memory, wherever they are held. Python objects
are listed before the forward, and put back in place after it. What is met and could not be put back, such as an open
file or a generator function that runs, is named before the forward runs.
"""

from __future__ import annotations

import array
import copy
import functools
import io
import random
import sys
import types
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from hdi_callback.attention.dtensors import is_sharded
from hdi_callback.attention.releases import Mode, arguments_of
from hdi_callback.attention.tape import storage_key, tensors_in, written_tensors
from hdi_callback.guard import describe

# Objects of these packages are the training around a forward, or torch's own machinery, which looks after itself.
_NOT_ENTERED = (
    "hdi_callback", "lightning", "pytorch_lightning", "accelerate", "wandb", "tensorboard", "logging", "threading",
    "concurrent", "multiprocessing", "asyncio", "re", "torch._", "torch.distributed", "torch.cuda", "torch.fx",
    "torch.jit", "torch.autograd", "torch.nn.parallel", "torch.utils.hooks",
)  # fmt: skip
_ATOMS = (type(None), bool, int, float, complex, str, bytes, range, slice, types.ModuleType, types.CodeType)
_LARGEST = 2**20  # items of a container, and numbers of an array, that are listed
_MOST_ENTERED = 10_000  # items of a container that are looked into: data, not state, has more
_INSTALLED = {"torch", *sys.stdlib_module_names}
_Items = list[tuple[Any, Any]]  # name or place -> item
_Lend = Callable[[Any, Any], object] | None  # writes an item by name or place


class KeptTensors(Mode):
    """Copy the memory of a tensor before the first operation that writes into it; `put_back` undoes all writes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._fresh: set[int | None] = set()  # storages that the forward itself has made
        self._contents: dict[int, tuple[Any, Any]] = {}  # of storages that are written
        self._tensors: dict[int, tuple[Tensor, Tensor, Any]] = {}  # with their geometry, and their versions
        self._may_have_cast = False  # whether a context of autocast that was made before had a cache

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Copy the tensors that an operation is about to write into, then run it."""
        kwargs = kwargs or {}
        self._may_have_cast |= torch.is_autocast_cache_enabled()
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # a DTensor asks for operations on the part of this rank, which come here
        written = written_tensors(func, args, kwargs)
        if "batch_norm" in getattr(func, "__name__", ""):  # it writes into statistics, and its schema does not say so
            received = arguments_of(func, args, kwargs)
            written += tensors_in([received.get("running_mean"), received.get("running_var")])
        for tensor in written:
            self._keep(tensor)
        out = func(*args, **kwargs)
        if not written:
            self._fresh |= set(map(storage_key, tensors_in(out))).difference(
                map(storage_key, tensors_in((args, *kwargs.values())))
            )
        return out

    def put_back(self) -> None:
        """Write the memory back as it was, geometries that were changed in place, and the counters of autograd."""
        for tensor, before, _ in self._tensors.values():
            if _geometry(tensor) != _geometry(before):
                with torch.no_grad(), torch._C.DisableTorchFunction():
                    requires_grad = tensor.requires_grad
                    tensor.set_(before)  # type: ignore[call-overload]
                    tensor.requires_grad_(requires_grad)
        for storage, content in self._contents.values():
            if storage.nbytes() == 0:  # FSDP frees what it has gathered
                continue
            if storage.nbytes() != content.nbytes():
                storage.resize_(content.nbytes())
            storage.copy_(content)
        for _, _, version in reversed(self._tensors.values()):
            if version is not None:
                version.__exit__(None, None, None)
        self._contents.clear()
        self._tensors.clear()
        if self._may_have_cast:  # a weight that is cast without autograd, which the forward that trains would find
            torch.clear_autocast_cache()

    def _keep(self, tensor: Tensor) -> None:
        address = storage_key(tensor)
        if address is None or address in self._fresh or tensor.is_meta:
            return
        if address not in self._contents:
            storage = tensor.untyped_storage()
            self._contents[address] = storage, storage.clone()
        if id(tensor) not in self._tensors:
            version = None if tensor.is_inference() else _unsafe_preserve_version_counter(tensor)
            self._tensors[id(tensor)] = tensor, tensor.detach(), version


class KeptState:
    """List the Python objects that can be reached from some roots; `put_back` restores them in place.

    Containers, attributes and slots, those of classes, closures, global names that the user's forwards use, arrays
    and generators of random numbers are restored. Iterators that can be copied are replaced by copies meanwhile.
    """

    def __init__(self, roots: Iterable[Any]) -> None:
        self.beyond: set[str] = set()  # what was met and could not be put back if it changed, in words
        self._met: dict[int, Any] = {}  # kept alive, so that no number is used again
        self._undo: list[Callable[[], object]] = []
        self._stack: list[Any] = list(roots)
        while self._stack:
            value = self._stack.pop()
            if not isinstance(value, _ATOMS) and id(value) not in self._met:
                self._met[id(value)] = value
                self._list_content(value)
                if not isinstance(value, (types.FunctionType, type)):  # a container may have attributes as well
                    self._list_attributes(value)

    def put_back(self) -> None:
        """Restore everything; raise `RuntimeError` if an object does not take back what it held."""
        errors = []
        for undo in reversed(self._undo):
            try:
                undo()
            except Exception as error:  # noqa: PERF203  the others are restored
                errors.append(error)
        if errors:
            raise RuntimeError(f"what it changed could not be put back ({describe(errors[0])})")

    def _list_content(self, value: Any) -> None:
        if isinstance(value, dict):
            self._list_dict(value)
        elif isinstance(value, (list, deque)):
            self._list(lambda: list(enumerate(value)), functools.partial(_refill, value), value.__setitem__)
        elif isinstance(value, set):
            self._list(lambda: list(enumerate(value)), functools.partial(_reset, value), None)
        elif isinstance(value, (tuple, frozenset)):
            self._stack.extend(value if len(value) <= _LARGEST else ())
        elif isinstance(value, (types.MethodType, types.BuiltinMethodType)):
            self._stack += [value.__self__, getattr(value, "__func__", None)]
        elif isinstance(value, functools.partial):
            self._stack += [value.func, value.args, value.keywords]
        elif isinstance(value, types.FunctionType):
            self._list_function(value)
        elif isinstance(value, type):
            self._list_class(value)
        elif isinstance(value, functools._lru_cache_wrapper):
            self._stack.append(value.__wrapped__)
            size = value.cache_info().currsize
            self._undo.append(lambda: value.cache_clear() if value.cache_info().currsize != size else None)
        elif isinstance(value, (torch.Generator, np.random.RandomState)):
            state: Any = value.get_state()
            self._undo.append(functools.partial(value.set_state, state))
        elif isinstance(value, random.Random):
            self._undo.append(functools.partial(value.setstate, value.getstate()))
        elif isinstance(value, (np.random.Generator, np.random.BitGenerator)):
            bits: Any = getattr(value, "bit_generator", value)
            self._undo.append(functools.partial(setattr, bits, "state", bits.state))
        elif isinstance(value, np.ndarray):
            if value.flags.writeable and value.size <= 16 * _LARGEST:
                self._undo.append(functools.partial(np.copyto, value, value.copy()))
        elif isinstance(value, (bytearray, array.array)):
            self._undo.append(functools.partial(value.__setitem__, slice(None), value[:]))
        elif isinstance(value, io.IOBase):
            is_used = not value.closed and value not in (sys.stdin, sys.stdout, sys.stderr)
            self.beyond |= {"an open file"} if is_used else set()
        elif isinstance(value, types.GeneratorType):
            self.beyond |= set() if value.gi_frame is None else {"a generator function that runs"}
        elif _is_iterator(value):  # held by what cannot lend a copy
            self.beyond.add("an iterator")

    def _list(self, read: Callable[[], _Items], restore: Callable[[_Items, _Items], object], lend: _Lend) -> None:
        """List items by name or place, to restore them later; `lend` writes copies of iterators meanwhile."""
        before = read()
        if len(before) > _LARGEST:
            return

        def undo() -> None:
            now = read()
            pairs = zip(chain(*now), chain(*before))  # of names or places, and of items
            same = (a is b or (type(a) is type(b) is int and a == b) for a, b in pairs)
            if len(now) != len(before) or not all(same):
                restore(now, before)

        self._undo.append(undo)
        for name, item in before if len(before) <= _MOST_ENTERED else ():
            if lend is not None and _is_iterator(item):
                with suppress(Exception):  # it cannot be copied
                    lend(name, copy.deepcopy(item))  # with the iterators within it
                    continue
            self._stack.append(item)

    def _list_dict(self, value: dict[Any, Any]) -> None:
        """List the items of a dict, also of a module or another object."""
        if any(map(is_sharded, value.values())):  # FSDP exchanges parameters
            return

        def restore(now: _Items, before: _Items) -> None:
            if not any(map(is_sharded, value.values())):
                # of the class itself: transformers' outputs refuse some of these methods
                kind: Any = next(base for base in type(value).__mro__ if base.__module__ in ("builtins", "collections"))
                kind.clear(value)
                for name, item in before:
                    kind.__setitem__(value, name, item)

        self._list(lambda: list(value.items()), restore, functools.partial(dict.__setitem__, value))

    def _list_named(self, holder: Any, names: Callable[[], Iterable[str]]) -> None:
        """List attributes of what has no dict of them: of classes and modules, slots, what a closure holds."""
        kind: Any = type if isinstance(holder, type) else object

        def read() -> _Items:
            return [(name, item) for name in names() for item in content(holder, name)]

        def restore(now: _Items, before: _Items) -> None:
            held = dict(now)
            for name in held.keys() - dict(before).keys():
                kind.__delattr__(holder, name)
            for name, item in before:
                if name not in held or held[name] is not item:
                    kind.__setattr__(holder, name, item)

        self._list(read, restore, functools.partial(kind.__setattr__, holder))

    def _list_function(self, value: types.FunctionType) -> None:
        for cell in value.__closure__ or ():
            self._list_named(cell, lambda: ["cell_contents"])
        self._stack += [value.__defaults__, value.__kwdefaults__, vars(value)]
        names = names_in(value.__code__) if _is_users(value.__module__) else ()
        for module in (sys.modules.get(value.__module__), *map(value.__globals__.get, names)):
            if names and isinstance(module, types.ModuleType) and _is_users(module.__name__):
                self._list_named(module, functools.partial(_data_in, module, names))

    def _list_class(self, value: type) -> None:
        """List attributes of a class, and what the methods of a user's class use."""
        if value.__module__ == "builtins" or _is_not_entered(value.__module__):
            return
        self._list_named(value, functools.partial(_data_in, value))
        if _is_users(value.__module__):
            self._stack += [function for item in vars(value).values() for function in _functions_in(item)]
        self._stack += value.__bases__

    def _list_attributes(self, value: Any) -> None:
        kind: Any = type(value)
        if not isinstance(value, (nn.Module, Tensor)) and _is_not_entered(kind.__module__):
            return
        attributes = getattr(value, "__dict__", None)
        if isinstance(attributes, dict):
            self._stack.append(attributes)
        if isinstance(value, Tensor):
            self._list_tensor(value)
            return
        self._stack.append(kind)
        if slots := _slots_of(kind):
            self._list_named(value, lambda: slots)

    def _list_tensor(self, value: Tensor) -> None:
        """List what no operation shows: the memory behind `.data`, the gradient, and hooks."""
        if is_sharded(value) or not value.is_leaf or (address := storage_key(value)) is None:
            return
        before, late = value.detach(), getattr(value, "_post_accumulate_grad_hooks", None)

        def undo() -> None:
            if storage_key(value) != address and before.shape == value.shape:
                value.data = before
            if late is None and getattr(value, "_post_accumulate_grad_hooks", None) is not None:
                value._post_accumulate_grad_hooks.clear()

        self._undo.append(undo)
        self._list_named(value, lambda: ("grad", "_backward_hooks", "requires_grad"))


def content(holder: Any, name: str) -> list[Any]:
    """Return what an attribute holds, if it holds anything."""
    try:
        return [getattr(holder, name)]
    except (AttributeError, ValueError):  # an empty slot, an empty cell
        return []


@functools.lru_cache(maxsize=4096)
def _slots_of(kind: Any) -> list[str]:
    bases = (base for base in kind.__mro__ if "__slots__" in vars(base) and not _is_not_entered(base.__module__))
    return [slot for base in bases for slot, item in vars(base).items() if isinstance(item, types.MemberDescriptorType)]


def _data_in(holder: Any, names: Iterable[str] | None = None) -> list[str]:
    """Return the names of a class or module, of all or of some, that are neither Python's own, modules nor methods."""
    items = ((name, vars(holder).get(name)) for name in (list(vars(holder)) if names is None else names))
    return [
        name for name, item in items
        if not name.startswith("__") and not isinstance(item, types.ModuleType)
        and not (isinstance(holder, type) and hasattr(item, "__get__"))
    ]  # fmt: skip


def names_in(code: types.CodeType) -> set[str]:
    """Return the names that a function uses, also as strings, and in its comprehensions and lambdas."""
    nested = (names_in(part) for part in code.co_consts if isinstance(part, types.CodeType))
    return {name for name in (*code.co_names, *code.co_consts) if isinstance(name, str)}.union(*nested)


def _functions_in(item: Any) -> list[Any]:
    """Return the functions of a method, a property, a static method or a class method."""
    parts = (item.fget, item.fset) if isinstance(item, property) else (getattr(item, "__func__", item),)
    return [part for part in parts if isinstance(part, (types.FunctionType, functools._lru_cache_wrapper))]


def _refill(value: Any, now: _Items, before: _Items) -> None:
    value.clear()
    value.extend(item for _, item in before)


def _reset(value: set[Any], now: _Items, before: _Items) -> None:
    """Remove the added items and add the removed ones; the others stay in their order."""
    numbers = {id(item) for _, item in before}
    value.difference_update([item for _, item in now if id(item) not in numbers])
    value.update(item for _, item in before)


def _is_iterator(value: Any) -> bool:
    is_iterator = hasattr(type(value), "__next__") and type(value).__module__ in ("builtins", "itertools")
    return is_iterator and not isinstance(value, types.GeneratorType)


@functools.cache
def _is_users(module: str) -> bool:
    """Whether a module is the user's own code, and not an installed package."""
    file = getattr(sys.modules.get(module or ""), "__file__", None) or "site-packages"
    is_installed = "site-packages" in file or "dist-packages" in file or module.partition(".")[0] in _INSTALLED
    return module == "__main__" or not (is_installed or _is_not_entered(module))


@functools.cache
def _is_not_entered(module: object) -> bool:
    """Whether objects and classes of a module are left alone."""
    return not isinstance(module, str) or any(  # before Python 3.11 that of a type of C may be a descriptor
        module == name or module.startswith(name if name.endswith("_") else f"{name}.") for name in _NOT_ENTERED
    )


def _geometry(tensor: Tensor) -> tuple[Any, ...]:
    return storage_key(tensor), tensor.storage_offset(), tensor.shape, tensor.stride()
