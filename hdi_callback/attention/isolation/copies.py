"""`isolated_copy`: a copy of a module that calls no hook and shares no tensor with it."""

from __future__ import annotations

import copy
import sys
import threading
import types
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize

from hdi_callback.attention.isolation.contents import attributes_of, has_memory
from hdi_callback.attention.isolation.isolated import IsolationError, isolated
from hdi_callback.attention.isolation.signals import comes_from_signal

_MOST_BYTES = 2 * 2**30  # of parameters and buffers in one copy
HOOKS = (
    "_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs", "_backward_hooks", "_backward_pre_hooks", "_state_dict_hooks",
    "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks",
)  # fmt: skip
_OF_COMPOSABLE = "__composable_api_state_key"  # where torch keeps the state of `fully_shard` in a module
_UNIQUE = [(torch, "Stream"), (torch.cuda, "Stream"), (torch.distributed, "ProcessGroup"), (torch.distributed, "Store")]
# Handles of something that exists once, and functions that nothing copies: a copy has the same.
_KEPT = (staticmethod, *(kind for place, name in _UNIQUE if isinstance(kind := getattr(place, name, None), type)))
_LOCKS: tuple[type, ...] = (type(threading.Lock()), type(threading.RLock()))


def isolated_copy(
    module: nn.Module, replaced: Mapping[Any, Any] | None = None, *, shares_parameters: bool = False
) -> nn.Module:
    """Copy a module without hooks, and with matrices in place of the parametrizations that compute them.

    The matrices are those that the last forward has used: computed in evaluation mode, from buffers as they are. The
    copy shares no tensor with the module, so that it may be run and written to.

    Args:
        module: the module; nothing of it is changed.
        replaced: modules or tensors within -> what takes their place in the copy, uncopied.
        shares_parameters: keep the module's own parameters in the copy, and its parametrizations, so that gradients
            reach them. Buffers are copied all the same.

    Returns:
        The copy, in evaluation mode.

    Raises:
        IsolationError: if the module cannot be copied: the copying fails, or gives parts of the module itself, or
            would take more than 2 GiB.
        KeyboardInterrupt: if the user interrupts.
    """
    with isolated(module):
        memo = _memo(module, replaced or {}, shares_parameters)
        try:
            _copy_sharded(module, memo)
            trial: nn.Module = copy.deepcopy(module, memo)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            if not isinstance(error, Exception) and comes_from_signal(error):
                raise
            raise IsolationError(f"copying it raises {type(error).__name__} ({error})") from error
        _refuse_shared(module, trial, replaced or {}, shares_parameters)
        parts = list(trial.modules())
        for part in parts:
            for name in HOOKS:
                hooks = part.__dict__.get(name)
                if hooks:
                    hooks.clear()
            object.__setattr__(part, "training", False)  # a `train` of the user's may do anything
        for part in parts:
            for name, value in list(part.__dict__.items()):
                if isinstance(value, types.FunctionType):
                    part.__dict__[name] = _rebound(value, memo)
            if not shares_parameters:
                _without_parametrizations(part)
        return trial


def _copy_sharded(module: nn.Module, memo: dict[int, Any]) -> None:
    """Copy a module of `fully_shard` in the class that it had before: FSDP refuses copies of its own."""
    sharded: Any = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", ())
    blanks: list[tuple[nn.Module, Any]] = []
    for part in module.modules():
        if isinstance(part, sharded) and id(part) not in memo:
            plain = next(kind for kind in type(part).__mro__ if not issubclass(kind, sharded))
            blanks.append((part, object.__new__(plain)))
            memo[id(part)] = blanks[-1][1]
    for part, blank in blanks:
        own = {name: value for name, value in part.__dict__.items() if not name.startswith(_OF_COMPOSABLE)}
        blank.__dict__.update(copy.deepcopy(own, memo))


def _memo(module: nn.Module, replaced: Mapping[Any, Any], shares_parameters: bool) -> dict[int, Any]:
    """List the objects that `copy.deepcopy` is to take as copied already."""
    memo: dict[int, Any] = {id(one): other for one, other in replaced.items()}
    size, todo = 0, [module]
    visited: set[int] = set()
    while todo:
        part = todo.pop()
        if id(part) in memo or id(part) in visited:
            continue
        visited.add(id(part))
        for name in HOOKS:  # copying a hook would copy all that it belongs to
            hooks = part.__dict__.get(name)
            if hooks is not None:
                memo[id(hooks)] = type(hooks)()
        for parameter in part._parameters.values():
            if parameter is not None and shares_parameters:
                memo[id(parameter)] = parameter
        for one in _values_within(part.__dict__, visited):
            if isinstance(one, nn.Module):
                todo.append(one)
            elif isinstance(one, Tensor):
                if id(one) not in memo and not is_lazy(one) and not has_memory(one):
                    raise IsolationError("the memory of its weights was freed, as FSDP does between forwards")
                size += 0 if id(one) in memo or is_lazy(one) else one.nbytes
                if one.grad_fn is not None:  # as the loss of the last forward, which cannot be copied with its graph
                    memo[id(one)] = one.detach().clone()
            elif isinstance(one, _KEPT):
                memo[id(one)] = one
            elif isinstance(one, _LOCKS):
                memo[id(one)] = threading.Lock() if isinstance(one, _LOCKS[0]) else threading.RLock()
        if size > _MOST_BYTES:
            raise IsolationError(f"a copy of it would take more than {_MOST_BYTES / 2**30:.0f} GiB")
    return memo


def _values_within(container: Any, visited: set[int], depth: int = 4) -> Iterator[Any]:
    """Modules, tensors, handles and locks among the attributes of a module, in containers and objects too."""
    if id(container) in visited:
        return
    visited.add(id(container))
    for one in list(container.values() if isinstance(container, dict) else container):
        if isinstance(one, (nn.Module, Tensor, *_LOCKS, *_KEPT)):
            yield one
        elif not depth or isinstance(one, (type, types.FunctionType, types.ModuleType)):
            continue
        elif isinstance(one, (dict, list, tuple, set)):
            yield from _values_within(one, visited, depth - 1)
        else:
            yield from _values_within(attributes_of(one) or {}, visited, depth - 1)


def _rebound(function: types.FunctionType, memo: Mapping[int, Any]) -> types.FunctionType:
    """Bind a function that was put on an instance, as in place of its forward, to the copy, not to the module."""
    cells = []
    for cell in function.__closure__ or ():
        try:
            kept = cell.cell_contents
        except ValueError:  # empty yet
            return function
        owner = getattr(kept, "__self__", None) if isinstance(kept, types.MethodType) else None
        if id(owner) in memo and owner is not None:
            kept = types.MethodType(kept.__func__, memo[id(owner)])
        elif id(kept) in memo:
            kept = memo[id(kept)]
        elif isinstance(kept, types.FunctionType) and kept is not function:
            kept = _rebound(kept, memo)
        cells.append(types.CellType(kept))
    if not cells:
        return function
    moved = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, tuple(cells)
    )
    moved.__kwdefaults__ = function.__kwdefaults__
    vars(moved).update(vars(function))
    return moved


def _refuse_shared(module: nn.Module, trial: nn.Module, replaced: Mapping[Any, Any], shares_parameters: bool) -> None:
    """Refuse a copy that shares state, as a class may define: writing to it would change the user's module."""
    own = {id(part) for part in module.modules()}
    replacements = {id(other) for other in replaced.values()}
    if any(id(part) in own and id(part) not in replacements for part in trial.modules()):
        raise IsolationError("a copy of it shares modules with the original")
    theirs = {_place(tensor) for tensor in _tensors_of(module, not shares_parameters)} - {None}
    replacing = [other for other in replaced.values() if isinstance(other, nn.Module)]
    kept = {id(tensor) for part in replacing for tensor in _tensors_of(part, True)} | replacements
    if any(_place(tensor) in theirs for tensor in _tensors_of(trial, not shares_parameters) if id(tensor) not in kept):
        raise IsolationError("a copy of it shares tensors with the original")


def _tensors_of(module: nn.Module, with_parameters: bool) -> Iterator[Tensor]:
    if with_parameters:
        yield from module.parameters()
    yield from module.buffers()


def _place(tensor: Tensor) -> int | None:
    with suppress(Exception):  # no memory yet, or none of its own
        return tensor.untyped_storage().data_ptr() or None
    return None


def _without_parametrizations(part: nn.Module) -> None:
    """Replace the parametrizations of a copy by the matrices that they compute."""
    parametrizations = part._modules.get("parametrizations")
    if isinstance(parametrizations, nn.ModuleDict) and parametrize.is_parametrized(part):
        values: dict[str, Tensor] = {name: plist.forward() for name, plist in parametrizations.items()}
        del part._modules["parametrizations"]
        # Its class is that of the original too, so that torch's own way of removing them would break the original.
        object.__setattr__(part, "__class__", type(part).__bases__[0])
        for name, value in values.items():
            part._parameters[name] = nn.Parameter(value, requires_grad=value.is_floating_point())
    for name, value in list(part.__dict__.items()):
        # The older way of torch: a hook that is gone has computed it from these.
        if type(value) is Tensor and {f"{name}_v", f"{name}_orig"} & part._parameters.keys():
            del part.__dict__[name]
            part._buffers[name] = value
