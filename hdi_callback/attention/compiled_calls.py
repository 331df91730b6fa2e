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

from hdi_callback.attention.calls import running_frames
from hdi_callback.attention.releases import Compiler, compiler


class _Stance:
    """A dynamo stance that wraps the previous one; once left it delegates, even if a thread restores it."""

    def __init__(self, before: Any) -> None:
        self.before, self.eager_thread = before, 0  # in which compiled code runs as it is written

    @property
    def stance(self) -> Any:
        """The stance before; older releases ask for it first."""
        self._tell("stance")
        return "force_eager" if threading.get_ident() == self.eager_thread else self.before.stance

    @property
    def skip_guard_eval_unsafe(self) -> bool:
        """That of the stance before; newer releases ask for it first, with nothing compiled yet."""
        self._tell("skip_guard_eval_unsafe")
        return threading.get_ident() != self.eager_thread and bool(self.before.skip_guard_eval_unsafe)

    @property
    def backend(self) -> Any:
        return self.before.backend

    def _tell(self, attribute: str) -> None:
        pass


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
    stance = _Stance(dynamo.frames._stance)
    stance.eager_thread = threading.get_ident()
    _put(dynamo, stance)
    try:
        yield
    finally:
        stance.eager_thread = 0
        _leave(dynamo, stance)


class BeforeCompiledCalls(_Stance):
    """Calls a method, whose object it does not keep alive, before each call of compiled code, outside of all tracing.

    The method takes the function that is compiled, as it is written, and the arguments of the call.
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

    def _tell(self, attribute: str) -> None:
        """Call the function where dynamo asks first, with the arguments of the call on the stack."""
        function, dynamo = self._function(), self._compiler
        if function is None or dynamo is None:
            return
        if attribute != dynamo.first:
            self._has_told.thread = False
            return
        frame: FrameType | None = sys._getframe(2)
        for _ in range(2):  # older releases would compile a generator here
            if frame is not None and frame.f_code is not dynamo.wrapper:
                frame = frame.f_back
        if frame is None or frame.f_code is not dynamo.wrapper:
            return
        if attribute == "stance" and getattr(self._has_told, "thread", False):
            return  # older releases ask for it several times
        self._has_told.thread = True
        local = frame.f_locals
        with dynamo.switched_off():
            function(local["fn"], local["args"], local["kwargs"])


def is_within_compiled_call() -> bool:
    """Return whether compiled code is being called, by its frame on the stack."""
    dynamo = compiler()
    return dynamo is not None and any(frame.f_code is dynamo.wrapper for frame in running_frames())


def is_compiled(module: nn.Module) -> bool:
    """Return whether calls of a module run as compiled graphs, as far as the module shows it."""
    if isinstance(module, torch.jit.ScriptModule):
        return False
    is_wrapped = module._compiled_call_impl is not None or "_orig_mod" in module._modules
    return is_wrapped or hasattr(module.forward, "_torchdynamo_orig_callable")


def _put(dynamo: Compiler, stance: _Stance) -> None:
    properties = (value.fget for value in vars(_Stance).values() if isinstance(value, property))
    dynamo.skip_compiling(*properties, _Stance._tell, BeforeCompiledCalls._tell)
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
