"""Calls of compiled code: running them as they are written, in this thread, and being told before they happen.

Both take the place of the stance of `torch.compiler.set_stance`, which dynamo asks at every call of compiled code.
`set_stance` itself is of the process: other threads would go on uncompiled, or raise under ``fullgraph=True``.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.compiler import set_stance

from hdi_callback.attention.releases import Compiler, compiler


class _Stance:
    """A dynamo stance that wraps the previous one; once left it delegates, even if a thread restores it."""

    def __init__(self, before: Any) -> None:
        self.before = before

    @property
    def stance(self) -> Any:
        return self.before.stance

    @property
    def skip_guard_eval_unsafe(self) -> bool:
        return bool(self.before.skip_guard_eval_unsafe)

    @property
    def backend(self) -> Any:
        return self.before.backend


class _EagerHere(_Stance):
    def __init__(self, before: Any) -> None:
        super().__init__(before)
        self.thread: int | None = threading.get_ident()

    @property
    def stance(self) -> Any:
        return "force_eager" if threading.get_ident() == self.thread else self.before.stance

    @property
    def skip_guard_eval_unsafe(self) -> bool:
        return threading.get_ident() != self.thread and bool(self.before.skip_guard_eval_unsafe)


@contextmanager
def uncompiled_here() -> Iterator[None]:
    """Run compiled code as it is written, in this thread; other threads go on with their graphs."""
    if "torch.nn.attention.flex_attention" in sys.modules:  # it compiles, and so imports dynamo, only when called
        import torch._dynamo.eval_frame  # noqa: F401
    dynamo = compiler()
    if dynamo is None:
        with nullcontext() if "torch._dynamo.eval_frame" not in sys.modules else set_stance("force_eager"):
            yield
        return
    stance = _EagerHere(dynamo.frames._stance)
    _put(dynamo, stance)
    try:
        yield
    finally:
        stance.thread = None
        _leave(dynamo, stance)


class BeforeCompiledCalls(_Stance):
    """Calls a function before each call of compiled code, outside of all tracing.

    Args:
        function: a method that takes the function that is compiled, as it is written, and the arguments of the call;
            it does not keep its object alive.
    """

    def __init__(self, function: Callable[[Any, tuple[Any, ...], dict[str, Any]], None]) -> None:
        self._function: Callable[[], Any] = weakref.WeakMethod(function, lambda _: self.remove())
        self._compiler, self._has_told = compiler(), threading.local()
        super().__init__(None if self._compiler is None else self._compiler.frames._stance)
        if self._compiler is not None:
            _put(self._compiler, self)

    def remove(self) -> None:
        """Stop listening; calling it again does nothing."""
        self._function = lambda: None
        if self._compiler is not None:
            _leave(self._compiler, self)

    @property
    def stance(self) -> Any:
        """The stance before; older releases ask for it first."""
        self._tell("stance")
        return self.before.stance

    @property
    def skip_guard_eval_unsafe(self) -> bool:
        """That of the stance before; newer releases ask for it first, with nothing compiled yet."""
        self._tell("skip_guard_eval_unsafe")
        return bool(self.before.skip_guard_eval_unsafe)

    def _tell(self, attribute: str) -> None:
        """Call the function where dynamo asks first, with the arguments of the call on the stack."""
        function = self._function()
        if function is None or self._compiler is None:
            return
        if attribute != self._compiler.first:
            self._has_told.thread = False
            return
        frame: FrameType | None = sys._getframe(2)
        for _ in range(3):
            if frame is not None and frame.f_code is self._compiler.wrapper:
                if self._compiler.first == "stance":  # which is asked for several times
                    if getattr(self._has_told, "thread", False):
                        return
                    self._has_told.thread = True
                local = frame.f_locals
                with self._compiler.switched_off():
                    function(local["fn"], local["args"], local["kwargs"])
                return
            frame = None if frame is None else frame.f_back


def is_within_compiled_call() -> bool:
    """Return whether compiled code is being called, by its frame on the stack."""
    dynamo = compiler()
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and dynamo is not None and frame.f_code is not dynamo.wrapper:
        frame = frame.f_back
    return frame is not None and dynamo is not None


def is_compiled(module: nn.Module) -> bool:
    """Return whether calls of a module run as compiled graphs, as far as the module shows it."""
    if isinstance(module, torch.jit.ScriptModule):
        return False
    is_wrapper = "_orig_mod" in module._modules
    forward = vars(module).get("forward", type(module).forward)
    return is_wrapper or module._compiled_call_impl is not None or hasattr(forward, "_torchdynamo_orig_callable")


def _put(dynamo: Compiler, stance: _Stance) -> None:
    for kind in (_Stance, _EagerHere, BeforeCompiledCalls):
        dynamo.skip_compiling(*(value.fget for value in vars(kind).values() if isinstance(value, property)))
    dynamo.skip_compiling(BeforeCompiledCalls._tell)
    dynamo.frames._stance = stance


def _leave(dynamo: Compiler, stance: _Stance) -> None:
    if dynamo.frames._stance is stance:
        dynamo.frames._stance = stance.before
        return
    outer = dynamo.frames._stance  # somebody waits as well, or has set another stance meanwhile
    while isinstance(outer, _Stance):
        if outer.before is stance:
            outer.before = stance.before
        outer = outer.before
