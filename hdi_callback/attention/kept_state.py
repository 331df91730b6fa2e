"""Put back what a forward changes: all that can be reached from the modules and the arguments of a call.

Tensors are copied right before an operation first writes into their memory, wherever they are held. Python objects
are listed before the forward, and put back in place after it. What cannot be put back, such as a file that was
written or a generator function that went on, is named where it has happened.
"""

from __future__ import annotations

import array
import copy
import functools
import io
import operator
import random
import sys
import types
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from hdi_callback.attention.dtensors import is_sharded
from hdi_callback.attention.operations import RESHAPED_IN_PLACE
from hdi_callback.attention.releases import Mode
from hdi_callback.attention.tape import tensors_in, written_tensors
from hdi_callback.guard import describe

__all__ = ["KeptState", "KeptTensors"]

# Objects of these packages are the training around a forward, or torch's own machinery, which looks after itself.
_NOT_ENTERED = (
    "hdi_callback", "lightning", "pytorch_lightning", "accelerate", "wandb", "tensorboard", "logging", "threading",
    "concurrent", "multiprocessing", "asyncio", "re", "torch._", "torch.distributed", "torch.cuda", "torch.fx",
    "torch.jit", "torch.autograd", "torch.nn.parallel", "torch.utils.hooks",
)  # fmt: skip
_ATOMS = (type(None), bool, int, float, complex, str, bytes, range, slice, types.ModuleType, types.CodeType)
_LARGEST = 2**20  # items of a container, and numbers of an array, that are listed
_MOST_ENTERED = 10_000  # items of a container that are looked into: data, not state, has more


class KeptTensors(Mode):
    """Copy the memory of a tensor before the first operation that writes into it; `put_back` undoes all writes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._fresh: set[int | None] = set()  # storages that the forward itself has made
        self._copies: dict[int, tuple[Any, Any]] = {}
        self._versions: dict[int, Any] = {}
        self._geometries: dict[int, tuple[Any, ...]] = {}  # of tensors that are reshaped in place

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let torch.compile go on with what runs under this mode, then and later."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Copy the tensors that an operation is about to write into, then run it."""
        kwargs = kwargs or {}
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # a DTensor asks for operations on the part of this rank, which come here
        written = written_tensors(func, args, kwargs)
        if written and str(getattr(func, "overloadpacket", func)).rpartition(".")[2].rstrip("_") in RESHAPED_IN_PLACE:
            for tensor in written:
                self._keep_geometry(tensor)
        for tensor in (*written, *_statistics(func, args, kwargs)):
            self._keep(tensor)
        out = func(*args, **kwargs)
        if not written:
            self._fresh |= set(map(_address, tensors_in(out))).difference(
                map(_address, tensors_in((args, *kwargs.values())))
            )
        return out

    def put_back(self) -> None:
        """Write the memory back as it was, and the counters of autograd."""
        for tensor, storage, size, geometry, requires_grad in self._geometries.values():
            if storage.nbytes() != size:
                storage.resize_(size)
            with torch.no_grad(), torch._C.DisableTorchFunction():
                tensor.set_(storage, *geometry)
                tensor.requires_grad_(requires_grad)
        for storage, content in self._copies.values():
            if storage.nbytes() == content.nbytes():  # FSDP frees what it has gathered
                storage.copy_(content)
        for version in reversed(self._versions.values()):
            version.__exit__(None, None, None)
        for table in (self._copies, self._versions, self._geometries):
            table.clear()

    def _keep(self, tensor: Tensor) -> None:
        address = _address(tensor)
        if address is None or address in self._fresh or tensor.is_meta:
            return
        if address not in self._copies:
            storage = tensor.untyped_storage()
            self._copies[address] = storage, storage.clone()
        if id(tensor) not in self._versions and not tensor.is_inference():
            self._versions[id(tensor)] = _unsafe_preserve_version_counter(tensor)

    def _keep_geometry(self, tensor: Tensor) -> None:
        address = _address(tensor)
        if address is not None and address not in self._fresh and id(tensor) not in self._geometries:
            storage = tensor.untyped_storage()
            geometry = tensor.storage_offset(), tuple(tensor.shape), tensor.stride()
            self._geometries[id(tensor)] = tensor, storage, storage.nbytes(), geometry, tensor.requires_grad


class KeptState:
    """List the Python objects that can be reached from some roots; `put_back` restores them in place.

    Containers, attributes and slots, those of classes, closures, global names that the user's forwards use, arrays,
    positions of files and generators of random numbers are restored. Iterators that can be copied are replaced by
    copies meanwhile.

    Args:
        roots: modules, and arguments of their calls.
    """

    def __init__(self, roots: Iterable[Any]) -> None:
        self._met: dict[int, Any] = {}  # kept alive, so that no number is used again
        self._undo: list[Callable[[], object]] = []
        self._lost: list[tuple[str, Callable[[], Any], Any]] = []
        self._stack: list[Any] = list(roots)
        while self._stack:
            value = self._stack.pop()
            if not isinstance(value, _ATOMS) and id(value) not in self._met:
                self._met[id(value)] = value
                self._list_content(value)
                if not isinstance(value, (types.FunctionType, type)):  # a container may have attributes as well
                    self._list_attributes(value)

    def put_back(self) -> list[str]:
        """Restore everything.

        Returns:
            What has changed and cannot be restored, in words.
        """
        lost = [words for words, state, before in self._lost if state() != before]
        for undo in reversed(self._undo):
            try:
                undo()
            except Exception as error:  # noqa: PERF203  an object that defends itself
                lost.append(f"an object that cannot be written ({describe(error)})")
        return list(dict.fromkeys(lost))

    def _list_content(self, value: Any) -> None:
        if isinstance(value, dict):
            self._list_dict(value)
        elif isinstance(value, (list, deque)):
            self._list_items(value, functools.partial(_refill, value))
        elif isinstance(value, set):
            self._list_items(value, functools.partial(_reset, value))
        elif isinstance(value, (tuple, frozenset)):
            self._stack.extend(value if len(value) <= _LARGEST else ())
        elif isinstance(value, (bytearray, array.array)):
            self._undo.append(functools.partial(value.__setitem__, slice(None), value[:]))
        elif isinstance(value, (torch.Generator, np.random.RandomState)):
            self._keep(value.get_state, value.set_state, _never)
        elif isinstance(value, random.Random):
            self._keep(value.getstate, value.setstate)
        elif isinstance(value, (np.random.Generator, np.random.BitGenerator)):
            bits: Any = getattr(value, "bit_generator", value)
            self._keep(lambda: bits.state, lambda state: setattr(bits, "state", state), _never)
        elif isinstance(value, np.ndarray):
            self._list_array(value)
        elif isinstance(value, (io.StringIO, io.BytesIO)) and not value.closed:
            self._keep(value.getvalue, lambda content: (value.seek(0), value.truncate(), value.write(content)))
        elif isinstance(value, io.IOBase):
            self._list_file(value)
        elif isinstance(value, types.GeneratorType):
            self._lost.append(("a generator function, which went on", lambda: _place(value), _place(value)))
        elif _is_iterator(value):  # held by what cannot lend a copy
            self._lost.append(("an iterator, which went on", lambda: _numbers(value), _numbers(value)))
        elif isinstance(value, types.MethodType):
            self._stack += [value.__self__, value.__func__]
        elif isinstance(value, types.BuiltinMethodType):
            self._stack.append(value.__self__)
        elif isinstance(value, functools.partial):
            self._stack += [value.func, value.args, value.keywords]
        elif isinstance(value, functools._lru_cache_wrapper):
            self._list_cache(value)
        elif isinstance(value, types.FunctionType):
            self._list_function(value)
        elif isinstance(value, type):
            self._list_class(value)

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
            self._meet(item, functools.partial(dict.__setitem__, value, name))

    def _list_items(self, value: Any, write: Callable[[list[Any]], None]) -> None:
        if len(value) > _LARGEST:
            return
        items = list(value)

        def undo() -> None:
            if len(value) != len(items) or any(now is not item for now, item in zip(value, items)):
                write(items)

        self._undo.append(undo)
        for place, item in enumerate(items if len(items) <= _MOST_ENTERED else ()):
            if not isinstance(item, _ATOMS):
                self._meet(item, functools.partial(value.__setitem__, place) if hasattr(value, "insert") else None)

    def _meet(self, item: Any, lend: Callable[[Any], Any] | None) -> None:
        """Queue an item of a container; an iterator is replaced by a copy, which `lend` writes in its place."""
        iterator = None if lend is None else _copied_iterator(item)
        if iterator is None or lend is None:
            self._stack.append(item)
        else:
            lend(iterator)

    def _keep(
        self, read: Callable[[], Any], write: Callable[[Any], Any], is_same: Callable[[Any, Any], bool] = operator.eq
    ) -> None:
        state = read()
        self._undo.append(lambda: None if is_same(read(), state) else write(state))

    def _list_array(self, value: Any) -> None:
        if value.size > 16 * _LARGEST or not value.flags.writeable:
            return
        content = value.copy()

        def undo() -> None:
            if not value.flags.writeable:
                value.flags.writeable = True
            if value.shape != content.shape:
                value.resize(content.shape, refcheck=False)
            np.copyto(value, content)

        self._undo.append(undo)

    def _list_file(self, value: Any) -> None:
        try:
            place = value.tell()
        except (OSError, ValueError):  # a pipe, or closed
            return
        if value.writable():
            self._lost.append(("a file, which was written", lambda: None if value.closed else value.tell(), place))
        else:
            self._undo.append(lambda: None if value.closed else value.seek(place))

    def _list_cache(self, value: Any) -> None:
        """List a function with a cache, which can only be emptied as a whole."""
        size = value.cache_info().currsize
        self._stack.append(value.__wrapped__)
        if size:
            words = "a function with a cache, which was filled further"
            self._lost.append((words, lambda: value.cache_info().currsize, size))
        else:
            self._undo.append(lambda: value.cache_clear() if value.cache_info().currsize else None)

    def _list_function(self, value: types.FunctionType) -> None:
        for cell in value.__closure__ or ():
            try:
                content = cell.cell_contents
            except ValueError:  # not filled yet
                continue
            write = functools.partial(setattr, cell, "cell_contents")
            self._undo.append(functools.partial(write, content))
            self._meet(content, write)
        self._stack += [value.__defaults__, value.__kwdefaults__, vars(value)]
        if _is_users(value.__module__):
            names = _names_in(value.__code__)
            self._list_names(value.__globals__, names)
            for name in names:
                module = value.__globals__.get(name)
                if isinstance(module, types.ModuleType) and _is_users(module.__name__):
                    self._list_names(vars(module), names)

    def _list_names(self, names: dict[str, Any], used: Iterable[str]) -> None:
        """List global names that a function uses."""
        for name in used:
            if name in names and not isinstance(names[name], types.ModuleType):
                write = functools.partial(names.__setitem__, name)
                self._undo.append(functools.partial(write, names[name]))
                self._meet(names[name], write)

    def _list_class(self, value: type) -> None:
        """List attributes of a class, and what the methods of a user's class use."""
        if value.__module__ == "builtins" or _is_not_entered(value.__module__):
            return
        own = {name: item for name, item in vars(value).items() if _is_data(name, item)}

        def undo() -> None:
            for name in [name for name, item in vars(value).items() if _is_data(name, item) and name not in own]:
                delattr(value, name)
            for name, item in own.items():
                if vars(value).get(name) is not item:
                    setattr(value, name, item)

        self._undo.append(undo)
        for name, item in own.items():
            self._meet(item, functools.partial(setattr, value, name))
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
        for slot in _slots_of(kind):
            self._list_slot(value, slot)

    def _list_tensor(self, value: Tensor) -> None:
        """List what no operation shows: the memory behind `.data`, the gradient, and hooks."""
        if is_sharded(value) or not value.is_leaf or (address := _address(value)) is None:
            return
        before, gradient, hooks = value.detach(), value.grad, value._backward_hooks
        late = getattr(value, "_post_accumulate_grad_hooks", None)
        self._stack += [hooks, late]

        def undo() -> None:
            if _address(value) != address and before.shape == value.shape:
                value.data = before
            if value.grad is not gradient:
                value.grad = gradient
            if value._backward_hooks is not hooks:
                value._backward_hooks = hooks
            if late is None and getattr(value, "_post_accumulate_grad_hooks", None) is not None:
                value._post_accumulate_grad_hooks.clear()

        self._undo.append(undo)

    def _list_slot(self, value: Any, slot: types.MemberDescriptorType) -> None:
        try:
            item = slot.__get__(value)
        except AttributeError:  # not filled yet
            self._undo.append(functools.partial(_empty, slot, value))
            return
        with suppress(AttributeError, TypeError):  # of a type in C, which cannot be written
            slot.__set__(value, item)
            self._undo.append(functools.partial(slot.__set__, value, item))
            self._meet(item, functools.partial(slot.__set__, value))


def _never(now: Any, before: Any) -> bool:
    return False


def _empty(slot: types.MemberDescriptorType, value: Any) -> None:
    with suppress(AttributeError):
        slot.__delete__(value)


@functools.lru_cache(maxsize=4096)
def _slots_of(kind: Any) -> list[types.MemberDescriptorType]:
    slots = [slot for base in kind.__mro__ for slot in vars(base).values()]
    slots = [slot for slot in slots if isinstance(slot, types.MemberDescriptorType)]
    return [slot for slot in slots if not _is_not_entered(slot.__objclass__.__module__)]


def _is_data(name: str, item: Any) -> bool:
    """Whether an attribute of a class is neither Python's own nor a descriptor."""
    return not name.startswith("__") and not isinstance(item, types.FunctionType) and not hasattr(item, "__get__")


def _names_in(code: types.CodeType) -> set[str]:
    """List the names that a function uses, also in its comprehensions and lambdas."""
    nested = (part for part in code.co_consts if isinstance(part, types.CodeType))
    return set(code.co_names).union(*map(_names_in, nested))


def _functions_in(item: Any) -> list[Any]:
    """List the functions of a method, a property, a static method or a class method."""
    parts = (item.fget, item.fset) if isinstance(item, property) else (getattr(item, "__func__", item),)
    return [part for part in parts if isinstance(part, (types.FunctionType, functools._lru_cache_wrapper))]


def _refill(value: Any, items: list[Any]) -> None:
    value.clear()
    value.extend(items)


def _reset(value: set[Any], items: list[Any]) -> None:
    """Remove the added items and add the removed ones; the others stay in their order."""
    before = set(map(id, items))
    value.difference_update([item for item in value if id(item) not in before])
    value.update(items)


def _statistics(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """List the running statistics that a batch norm is given: it writes into them, and its schema does not say so."""
    places = _places_of_statistics(func)
    values = [args[place] if place < len(args) else kwargs.get(name) for name, place in places]
    return [tensor for tensor in values if isinstance(tensor, Tensor)]


@functools.lru_cache(maxsize=4096)
def _places_of_statistics(func: Any) -> list[tuple[str, int]]:
    names = [argument.name for argument in getattr(getattr(func, "_schema", None), "arguments", ())]
    return [(name, place) for place, name in enumerate(names) if name in ("running_mean", "running_var")]


def _place(generator: types.GeneratorType[Any, Any, Any]) -> Any:
    frame = generator.gi_frame
    return None if frame is None else (frame.f_lasti, {name: id(value) for name, value in frame.f_locals.items()})


def _is_iterator(value: Any) -> bool:
    is_iterator = hasattr(type(value), "__next__") and type(value).__module__ in ("builtins", "itertools")
    return is_iterator and not isinstance(value, types.GeneratorType)


def _numbers(iterator: Any) -> list[int]:
    """List the numbers that say how far an iterator is, as pickling shows them."""
    try:
        _, arguments, *state = iterator.__reduce__()
    except Exception:  # of a kind that cannot be pickled
        return []
    return [number for number in (*arguments, *state) if isinstance(number, int)]


def _copied_iterator(value: Any) -> Any:
    """Return a copy of an iterator of Python's own (a list's, `itertools.count`); `None` of anything else."""
    if not _is_iterator(value):
        return None
    try:
        return copy.deepcopy(value)  # with the iterators within it
    except Exception:  # of an iterator that cannot be copied
        return None


@functools.cache
def _is_users(module: str) -> bool:
    """Whether a module is the user's own code, and not an installed package."""
    loaded = sys.modules.get(module or "")
    file = getattr(loaded, "__file__", None) or ""
    if module == "__main__":
        return True
    is_own = loaded is not None and bool(file) and module.partition(".")[0] not in {"torch", *_STANDARD}
    return is_own and not _is_not_entered(module) and "site-packages" not in file and "dist-packages" not in file


@functools.cache
def _is_not_entered(module: str | None) -> bool:
    """Whether objects and classes of a module are left alone."""
    return module is None or any(
        module == name or module.startswith(name if name.endswith("_") else f"{name}.") for name in _NOT_ENTERED
    )


_STANDARD = frozenset(sys.stdlib_module_names)


def _address(tensor: Tensor) -> int | None:
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):  # a tensor without memory
        return None
