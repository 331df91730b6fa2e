"""The running calls of modules, with their arguments, and whether checkpointing or a pipeline makes them.

They are read from Python's stack, which holds the arguments of each module call; modules need no hook for it.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import FrameType
from typing import Any

from torch import Tensor, nn


@dataclass
class Frame:
    """One running call: a module and its arguments.

    Attributes:
        module: the module.
        arguments: by the names of its forward's parameters.
    """

    module: nn.Module
    arguments: Mapping[str, Any]

    @property
    def first(self) -> Any:
        """The first tensor among its arguments."""
        return next((value for value in self.arguments.values() if isinstance(value, Tensor)), None)

    @property
    def parameters(self) -> frozenset[str]:
        """Names of the parameters of its forward."""
        return frozenset(parameters_of(self.module))

    @classmethod
    def of(cls, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Frame:
        """Name the arguments of a call.

        Args:
            module: the module that is called.
            args: by position.
            kwargs: by name.

        Returns:
            The call.
        """
        names = parameters_of(module)
        by_position = {
            names[place] if place < len(names) else f"argument {place}": value for place, value in enumerate(args)
        }
        return cls(module, {**by_position, **kwargs})


def parameters_of(module: nn.Module) -> tuple[str, ...]:
    """Name the parameters of the forward of a module that may be passed by position.

    Args:
        module: any module.

    Returns:
        Their names; none where the forward has no signature.
    """
    kind: Any = type(module)
    return _parameters(kind)


@lru_cache(maxsize=1024)
def _parameters(kind: Any) -> tuple[str, ...]:
    try:
        found = inspect.signature(kind.forward).parameters.values()
    except (TypeError, ValueError):
        return ()
    return tuple(parameter.name for parameter in found if parameter.kind is parameter.POSITIONAL_OR_KEYWORD)[1:]


def _stack() -> Iterator[FrameType]:
    """The running frames of Python functions, innermost first."""
    code: FrameType | None = sys._getframe(1)
    while code is not None:
        yield code
        code = code.f_back


def is_recomputing() -> bool:
    """Return whether activation checkpointing repeats a forward that autograd has recorded.

    Returns:
        False also where the first time was without autograd, as with ``use_reentrant=True``.
    """
    return any(frame.f_code.co_name == "unpack_hook" and "checkpoint" in frame.f_code.co_filename for frame in _stack())


def is_inferring_shapes() -> bool:
    """Return whether a stage of a pipeline runs its module on made-up numbers, to infer the shapes of its outputs.

    Returns:
        True within the first step of a `torch.distributed.pipelining.PipelineStage`, before its first real forward.
    """
    if "torch.distributed.pipelining.stage" not in sys.modules:
        return False
    return any(frame.f_code.co_name in _INFERENCES and "pipelining" in frame.f_code.co_filename for frame in _stack())


def running_calls() -> list[Frame]:
    """Return the running calls of modules, innermost first.

    Returns:
        The calls; of a module that was compiled as a whole that of the whole.
    """
    found: list[Frame] = []
    for frame in _stack():
        if frame.f_code in _CALLS:
            variables = frame.f_locals
            module = variables["self"]
            module = getattr(module, "_orig_mod", module)
            if not found or found[-1].module is not module:
                found.append(Frame.of(module, variables["args"], variables["kwargs"]))
    return found


_INFERENCES = {"_forward_metadata_inference", "_shape_inference"}  # from torch 2.13 on, and before
_CALLS = {nn.Module._call_impl.__code__, nn.Module._wrapped_call_impl.__code__}
