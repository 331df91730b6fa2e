"""Modules that cannot be observed without changing how they run, with the reasons.

- A compiled graph is guarded by the modes that are on: with one more it would be recompiled.

In evaluation torch's own encoder takes a fused kernel unless a mode or a hook is active; this is checked when it is
called (`window.py`).
"""

from __future__ import annotations

import sys
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import nn

_COMPILED = "it is compiled, and its graph cannot be observed"
_DEPTH = 3  # calls from a forward to a compiled function that are followed


def closed_reason(module: nn.Module) -> str | None:
    """Return why a module is not observed, with all that it holds.

    Args:
        module: the module.

    Returns:
        The reason; None if it can be observed.
    """
    kind, own = type(module), vars(module)  # a `__getattr__` of the user's does not run
    if own.get("_compiler_ctx") is not None:  # Lightning's name for what was compiled
        return _COMPILED
    if own.get("_compiled_call_impl") is not None or kind.__name__ == "OptimizedModule":
        return _COMPILED
    if isinstance(module, torch.jit.ScriptModule):
        return "it is scripted, and what TorchScript runs cannot be observed"
    if isinstance(module, nn.DataParallel) and len(own.get("device_ids") or ()) > 1:  # else it calls its module itself
        return "nn.DataParallel runs copies of it in other threads"
    forward: Any = own.get("forward", kind.forward)
    if _is_compiled(forward):
        return _COMPILED
    implementation = getattr(own.get("config"), "_attn_implementation", None)
    if implementation == "flex_attention" and _calls_attention_interface(kind):
        return "its attention is flex_attention, which is compiled"
    name = _compiled_function_of(kind)
    return None if name is None else f"it calls `{name}`, which is compiled"


def _is_compiled(function: Any) -> bool:
    function = getattr(function, "__func__", function)
    has_origin = "_torchdynamo_orig_callable" in getattr(function, "__dict__", {})
    return has_origin and not getattr(function, "_torchdynamo_disable", False)


def _calls_attention_interface(kind: type[nn.Module]) -> bool:
    return any("ALL_ATTENTION_FUNCTIONS" in function.__code__.co_names for function in _functions_of(kind))


def _compiled_function_of(kind: type[nn.Module]) -> str | None:
    """Find a function among those that the methods of a class call that was compiled."""
    if kind.__module__.partition(".")[0] == "torch":
        return None
    visited: set[CodeType] = set()
    for function in _functions_of(kind):
        name = _compiled_among(function, visited, _DEPTH)
        if name is not None:
            return name
    return None


def _functions_of(kind: type[nn.Module]) -> list[FunctionType]:
    own = [base for base in kind.__mro__ if base not in (nn.Module, object)]
    return [value for base in own for value in vars(base).values() if isinstance(value, FunctionType)]


def _compiled_among(function: FunctionType, visited: set[CodeType], depth: int) -> str | None:
    if function.__code__ in visited or not depth:
        return None
    visited.add(function.__code__)
    flex = getattr(sys.modules.get("torch.nn.attention.flex_attention"), "flex_attention", None)
    for name in function.__code__.co_names:
        value = function.__globals__.get(name)
        if value is None:
            continue
        if _is_compiled(value) or (flex is not None and value is flex):
            return name
        if isinstance(value, FunctionType) and value.__module__.partition(".")[0] not in ("torch", "transformers"):
            found = _compiled_among(value, visited, depth - 1)
            if found is not None:
                return found
    return None


def split_open_and_closed(model: nn.Module) -> tuple[dict[str, nn.Module], dict[str, tuple[nn.Module, str]]]:
    """Split the modules of a model into those that are observed and those that are not.

    Args:
        model: the model.

    Returns:
        Path -> module for those that are; path -> module and reason for the outermost of those that are not.
    """
    opened: dict[str, nn.Module] = {}
    closed: dict[str, tuple[nn.Module, str]] = {}
    inside: set[int] = set()
    for name, module in model.named_modules():
        if id(module) in inside:
            continue
        reason = closed_reason(module)
        if reason is None:
            opened[name] = module
        else:
            closed[name] = (module, reason)
            inside |= {id(part) for part in module.modules()}
    return {name: module for name, module in opened.items() if id(module) not in inside}, closed
