"""The running calls of modules, read from Python's stack: no hook is needed, and functions are no obstacle."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import FrameType
from typing import Any

import torch
from torch import nn

_INNER, _WRAPPED = nn.Module._call_impl.__code__, nn.Module._wrapped_call_impl.__code__


@dataclass(frozen=True)
class ModuleCall:
    """A running call: the module, and its arguments by the names of its forward's parameters."""

    module: nn.Module
    arguments: Mapping[str, Any]


def running_frames() -> Iterator[FrameType]:
    """Return the frames of Python's stack, the caller's first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def module_of(frame: FrameType, modules: Container[nn.Module]) -> nn.Module | None:
    """Return the module whose call or forward a frame is, if it is one of some modules."""
    code = frame.f_code
    is_call = (code is _INNER or code is _WRAPPED or code.co_name == "forward") and code.co_argcount > 0
    module = frame.f_locals.get(code.co_varnames[0]) if is_call else None
    return module if isinstance(module, nn.Module) and module in modules else None


def modules_within(model: nn.Module) -> list[nn.Module]:
    """Return what `nn.Module.modules` does, in a tenth of its time: modules without parts that are shared, twice."""
    modules, met = [model], set[nn.Module]()  # a part may hold the whole
    for module in modules:
        if module._modules and module not in met:
            met.add(module)
            modules += [child for child in module._modules.values() if child is not None]
    return modules


def running_calls() -> list[ModuleCall]:
    """Return the running calls of modules, innermost first; of a compiled module that of the whole."""
    calls: list[ModuleCall] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:  # hundreds in all, so not by `running_frames`
        if frame.f_code is _WRAPPED:
            local = frame.f_locals
            module = local["self"]._modules.get("_orig_mod", local["self"])
            if not calls or calls[-1].module is not module:
                kind: Any = type(module)
                names, args = _parameters(kind), enumerate(local["args"])
                by_position = {names[at] if at < len(names) else f"argument {at}": value for at, value in args}
                calls.append(ModuleCall(module, {**by_position, **local["kwargs"]}))
        frame = frame.f_back
    return calls


def running_modules() -> set[nn.Module]:
    """Return the modules whose eager calls run: within a compiled module none does, but its wrapper's may."""
    return {frame.f_locals["self"] for frame in running_frames() if frame.f_code is _INNER}


def is_rehearsal() -> bool:
    """Return whether torch's pipelining runs a stage on tensors that it makes up, to learn their shapes."""
    stages = sys.modules.get("torch.distributed.pipelining.stage")
    if stages is None or torch.compiler.is_compiling():
        return False
    names = [frame.f_code.co_name for frame in running_frames() if frame.f_globals is vars(stages)]
    # The forward or backward of a micro-batch, in every release.
    return bool(names) and not any(name.endswith("_one_chunk") for name in names)


def running_module(names: Mapping[nn.Module, str]) -> str | None:
    """Return the name of the innermost of some modules whose forward runs now, `None` if none does."""
    running = (module_of(frame, names) for frame in running_frames())
    return next((names[module] for module in running if module is not None), None)


@lru_cache(maxsize=1024)
def _parameters(kind: Any) -> tuple[str, ...]:
    try:
        parameters = inspect.signature(kind.forward).parameters.values()
    except (TypeError, ValueError):
        return ()
    return tuple(parameter.name for parameter in parameters if parameter.kind is parameter.POSITIONAL_OR_KEYWORD)[1:]
