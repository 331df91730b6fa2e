"""What differs between releases of torch, 2.6 to the newest: nothing else in the package depends on one.

Everything is chosen by what is there, never by a version. Where an internal is missing, eager models are read as ever.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from types import CodeType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hdi_callback.guard import warn

__all__ = ["FLEX", "TransformGetItemToIndex", "identity", "vmap"]  # of torch; the rest is defined here

NEWEST_TRIED = (2, 15)

try:
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
    from torch._higher_order_ops.flex_attention import flex_attention as FLEX
    from torch.nn.attention.flex_attention import _identity as identity
    from torch.nn.attention.flex_attention import _vmap_for_bhqkv as vmap
except ImportError:  # it is named as an operation that is not known
    FLEX = TransformGetItemToIndex = identity = vmap = None  # type: ignore[assignment,misc]

FLEX_HAS_MAXIMUM = hasattr(sys.modules.get("torch.nn.attention.flex_attention"), "AuxRequest")  # since torch 2.9


def has_saving_hooks() -> bool:
    """Whether what autograd keeps goes through hooks of the user's; true where torch before 2.7 does not tell."""
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return top is None or top(True) is not None


class Mode(TorchDispatchMode):
    """A dispatch mode to which operators that take functions come as well, FlexAttention among them."""

    supports_higher_order_operators = True  # since torch 2.8

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let torch.compile go on with what runs under this mode, then and later."""
        return True

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Say the same to older releases, whose flag for it is of the process: two threads could leave it set."""
        return not hasattr(TorchDispatchMode, "ignore_compile_internals")

    def __enter__(self) -> Any:
        """Begin; older releases ask each such operator for a rule of the mode's class."""
        if not hasattr(TorchDispatchMode, "supports_higher_order_operators"):
            for operator in torch._ops._higher_order_ops.values():
                operator.python_key_table.setdefault(type(self), partial(_come, operator))
        return super().__enter__()  # type: ignore[no-untyped-call]


def arguments_of(func: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """Return the arguments of an operation by name, with its defaults."""
    names, defaults = _schema_of(func)
    return {**defaults, **dict(zip(names, args)), **kwargs}


@lru_cache(maxsize=64)
def _schema_of(func: Any) -> tuple[list[str], dict[str, Any]]:
    arguments = func._schema.arguments
    defaults = {argument.name: argument.default_value for argument in arguments if argument.has_default_value()}
    return [argument.name for argument in arguments], defaults


def passed_on(func: Any, args: Any, kwargs: Any) -> Any:
    """Return the result of an operation; modes below see it once, where before torch 2.10 they see a detach twice."""
    if func is not _DETACH or torch._C._len_torch_dispatch_stack() == 0:
        return func(*args, **kwargs) if kwargs else func(*args)
    with torch._C._ExcludeDispatchKeyGuard(_ABOVE), torch._C._AutoDispatchBelowAutograd():
        return func(*args, **kwargs)


_DETACH = torch.ops.aten.detach.default
_ABOVE = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)


def _come(operator: Any, mode: TorchDispatchMode, *args: Any, **kwargs: Any) -> Any:
    return mode.__torch_dispatch__(operator, (), args, kwargs)


@dataclass(frozen=True)
class Compiler:
    """How dynamo calls compiled code."""

    frames: Any  # its module that holds ``_stance``, which every call of compiled code asks
    wrapper: CodeType  # of what `torch.compile` returns; it has ``fn``, ``args`` and ``kwargs``
    first: str  # the attribute of a stance that it asks for first: "stance" before torch 2.8

    def skip_compiling(self, *functions: Any) -> None:
        """Keep dynamo from compiling functions of ours: before torch 2.8 it traces them while it asks for a stance."""
        if self.first == "stance":
            for function in functions:
                self.frames.skip_code(function.__code__)

    @contextmanager
    def switched_off(self) -> Iterator[None]:
        """Switch dynamo off within the block, as newer releases do themselves while they ask for a stance."""
        if self.first != "stance":
            yield
            return
        switch = torch._C._dynamo.eval_frame.set_eval_frame
        before = switch(None)
        try:
            yield
        finally:
            switch(before)


def compiler() -> Compiler | None:
    """Return how dynamo calls compiled code; `None` if it was not imported, or is of an unknown release."""
    frames = sys.modules.get("torch._dynamo.eval_frame")
    if frames is None or getattr(frames.__spec__, "_initializing", False):
        return None
    return _inspected(frames)


@cache
def _inspected(frames: Any) -> Compiler | None:
    stance, skip = "_callback_from_stance", "_is_skip_guard_eval_unsafe_stance"
    context = getattr(frames, "_TorchDynamoContext", None)
    codes = [] if context is None else [context.__call__.__code__]
    for code in codes:
        codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
        names = code.co_names
        if {stance, skip} <= set(names) and "fn" in code.co_freevars and code.co_varnames[:2] == ("args", "kwargs"):
            is_stance_first = names.index(stance) < names.index(skip)
            if hasattr(frames, "_stance") and (not is_stance_first or hasattr(frames, "skip_code")):
                return Compiler(frames, code, "stance" if is_stance_first else "skip_guard_eval_unsafe")
    warn(
        f"torch {torch.__version__.split('+')[0]} calls compiled code in a way that is not known here (tried: up to "
        f"{'.'.join(map(str, NEWEST_TRIED))}). Attention that runs within a compiled function is not read."
    )
    return None
