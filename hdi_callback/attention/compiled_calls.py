"""Calls of compiled code: running them as they are written, in this thread, and being told before they happen.

Both take the place of the stance of `torch.compiler.set_stance`, which dynamo asks at every call of compiled code.
`set_stance` itself is of the process: other threads would go on uncompiled, or raise under ``fullgraph=True``.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from torch import nn


class _Stance:
    """Stands before another stance, until it is left; then it is the one before, also where a thread puts it back."""

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
    frames: Any = sys.modules.get("torch._dynamo.eval_frame")
    if frames is None:
        yield
        return
    stance = _EagerHere(frames._stance)
    frames._stance = stance
    try:
        yield
    finally:
        stance.thread = None
        _leave(frames, stance)


class BeforeCompiledCalls(_Stance):
    """Calls a function before each call of compiled code, outside of all tracing.

    Args:
        function: a method that takes the function that is compiled, as it is written, and the arguments of the call;
            it does not keep its object alive.
    """

    def __init__(self, function: Callable[[Any, tuple[Any, ...], dict[str, Any]], None]) -> None:
        self._function: Callable[[], Any] = weakref.WeakMethod(function, lambda _: self.remove())
        frames: Any = sys.modules.get("torch._dynamo.eval_frame")
        super().__init__(None if frames is None else frames._stance)
        self._frames = frames
        if frames is not None:
            frames._stance = self

    def remove(self) -> None:
        """Let calls pass again; calling it again does nothing."""
        self._function = lambda: None
        if self._frames is not None:
            _leave(self._frames, self)

    @property
    def skip_guard_eval_unsafe(self) -> bool:
        """Dynamo asks for it first, with the arguments of the call on the stack and nothing compiled yet."""
        frame: FrameType | None = sys._getframe(1)
        for _ in range(3):
            function = self._function()
            if frame is not None and frame.f_code.co_name == "compile_wrapper" and function is not None:
                local = frame.f_locals
                function(local["fn"], local["args"], local["kwargs"])
                break
            frame = None if frame is None else frame.f_back
        return bool(self.before.skip_guard_eval_unsafe)


def is_within_compiled_call() -> bool:
    """Return whether compiled code is being called, by its frame on the stack."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != "compile_wrapper":
        frame = frame.f_back
    return frame is not None


def is_compiled(module: nn.Module) -> bool:
    """Return whether calls of a module run as compiled graphs, as far as the module shows it."""
    is_wrapper = isinstance(getattr(module, "_orig_mod", None), nn.Module)
    forward = vars(module).get("forward", type(module).forward)
    return is_wrapper or module._compiled_call_impl is not None or hasattr(forward, "_torchdynamo_orig_callable")


def _leave(frames: Any, stance: _Stance) -> None:
    if frames._stance is stance:
        frames._stance = stance.before
        return
    outer = frames._stance  # somebody waits as well, or has set another stance meanwhile
    while isinstance(outer, _Stance):
        if outer.before is stance:
            outer.before = stance.before
        outer = outer.before
