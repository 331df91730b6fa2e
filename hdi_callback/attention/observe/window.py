"""The time in which a forward is observed: from the first module that begins until it ends, in armed forwards only.

Hooks are on the modules between `open` and `close` alone, so that all other steps cost nothing. Modules that
cannot be observed without changing how they run get no hook; they are run with the mode taken off. Whether torch's own
encoder takes its fast path is known when it is called; it asks for hooks in all that it holds, and for modes, so the
calls in it are followed without hooks, and the mode is taken off for a call that takes the fast path.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode, _push_mode

from hdi_callback.attention.calls import is_inferring_shapes
from hdi_callback.attention.compiled import is_compiling_allowed
from hdi_callback.attention.fast_path import FAST_PATH, may_take_fast_path
from hdi_callback.attention.hooks import Handle, observe_calls, remove_each
from hdi_callback.attention.observe.forward import ObservedForward
from hdi_callback.attention.observe.mode_stack import put_back, take_off
from hdi_callback.attention.observe.quiet import unobservable_reason
from hdi_callback.guard import attempt_each, guarded

_IN_A_GRAPH = "it did not run outside of compiled graphs, which cannot be observed"


class Window:
    """Turn a mode on while the outermost module of a model runs.

    Where the user compiles a function that calls modules, hooks are in its graph, which is guarded by them: without
    them it would be compiled anew, and again when they are back, until torch gives up and runs the model uncompiled.
    So they stay on modules that were not observed to run while something was compiled, and do nothing.
    """

    def __init__(self) -> None:
        self._forward: ObservedForward | None = None
        self._handles: dict[nn.Module, list[Handle]] = {}
        self._detours: list[Handle] = []
        self._outermost: tuple[str, nn.Module] | None = None
        self._passed_over: list[tuple[nn.Module, list[TorchFunctionMode]]] = []
        self._thread = self._compiled = 0
        self._has_entered: set[nn.Module] = set()
        self._staying: dict[nn.Module, list[Handle]] = {}
        self.reason = ""
        self.has_run = self._is_suspended = self._is_abandoned = False
        self.skipped: dict[str, str] = {}

    def open(self, forward: ObservedForward, modules: Mapping[str, nn.Module], closed: Mapping[str, nn.Module]) -> None:
        """Wait for a forward.

        Args:
            forward: records it.
            modules: those that are observed, by path.
            closed: those that are run without the mode, by path.
        """
        self.close()
        self._forward, self._compiled = forward, _compiled_frames()
        self._thread, self.reason, self.has_run, self._is_abandoned = threading.get_ident(), "", False, False
        self.skipped = {name: _IN_A_GRAPH for name, module in modules.items() if module in self._staying}
        self._has_entered.clear()
        # Torch guards a graph by the hooks of those modules that have some.
        spared = set() if is_compiling_allowed() else {one for one in modules.values() if _has_hooks(one)}
        counted = {part for one in modules.values() if _records_hooks(one) for part in one.modules()}
        for name, module in modules.items():
            if module not in self._staying and module not in spared:
                begins, ends = _Boundary(self.enter, name), _Boundary(self.leave, name)
                is_counted = module in counted
                self._handles[module] = observe_calls(module, begins, ends, eager_only=True, without_hooks=is_counted)
        for module in closed.values():
            self._detours.append(_Detour(self, module))

    def close(self) -> None:
        """Remove everything that no graph was compiled with; calling it again does nothing."""
        if self._forward is None:
            return
        mode_off: Callable[[], object] = partial(take_off, self._forward.mode)  # also if `_end` fails
        keep = self._keep_what_graphs_have
        attempt_each([partial(remove_each, self._detours), self._end, mode_off, keep, self._disable_remaining])
        self._forward = None

    def _keep_what_graphs_have(self) -> None:
        if _compiled_frames() != self._compiled:
            for module in self._handles.keys() - self._has_entered:
                self._staying[module] = self._handles.pop(module)
            if not self.has_run:
                self.reason = self.reason or _IN_A_GRAPH

    def _disable_remaining(self) -> None:
        attempt_each([partial(remove_each, handles) for handles in self._handles.values()])
        self._handles.clear()

    def suspend(self) -> None:
        """Remove all hooks until `resume`."""
        self._is_suspended = True
        staying = [handle.remove for handles in self._staying.values() for handle in handles]
        attempt_each([self.close, *staying])

    def resume(self) -> None:
        """Put the hooks back that stay; calling it again does nothing."""
        if self._is_suspended:
            for handle in (handle for handles in self._staying.values() for handle in handles):
                handle.put_back()
        self._is_suspended = False

    @guarded("following a module")
    def enter(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note that a module begins, and turn the mode on if it is the first."""
        if self._forward is None or self._is_abandoned or threading.get_ident() != self._thread:
            return
        self._has_entered.add(module)
        if self._passed_over:
            return
        if may_take_fast_path(module, (*args, *kwargs.values())) and unobservable_reason() is None:
            self.skipped[name] = FAST_PATH
            above = [] if self._outermost is None else take_off(self._forward.mode)
            self._passed_over.append((module, above))
            return
        if self._outermost is None:
            if is_inferring_shapes():
                return
            reason = unobservable_reason()
            if reason is not None:
                self.reason = reason or self.reason
                return
            self._outermost, self.has_run = (name, module), True
            _push_mode(self._forward.mode)  # type: ignore[no-untyped-call]
        elif unobservable_reason() is not None:
            return
        self._forward.module_begins(name, module)

    @guarded("following a module", otherwise=lambda self: self._abandon_forward())
    def leave(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Note that a module ends, and turn the mode off if it was the first."""
        if self._forward is None or self._is_abandoned or threading.get_ident() != self._thread:
            return
        if self._passed_over:
            if self._passed_over[-1][0] is module:
                _, above = self._passed_over.pop()
                if self._outermost is not None:
                    put_back(self._forward.mode, above)
            return
        if self._outermost is None:
            return
        is_over = self._outermost == (name, module)
        try:
            if unobservable_reason() is None:
                self._forward.module_ends(name, module, args, kwargs, result)
            else:
                is_over = False
        finally:
            if is_over:
                self._end()

    @guarded("stepping aside")
    def step_aside(self) -> list[TorchFunctionMode] | None:
        """Take the mode off, if it is on, for a module that is not observed.

        Returns:
            What lay above it, for `step_back`.
        """
        if self._forward is None or self._outermost is None or self._passed_over or self._is_abandoned:
            return None
        return take_off(self._forward.mode) if threading.get_ident() == self._thread else None

    @guarded("stepping back")
    def step_back(self, above: list[TorchFunctionMode] | None) -> None:
        """Put the mode back.

        Args:
            above: the result of `step_aside`.
        """
        if above is not None and self._forward is not None and not self._is_abandoned:
            put_back(self._forward.mode, above)

    def _failed(self, work: str, error: Exception) -> None:
        if self._forward is not None:
            self._forward.failures.append(f"{work}: {type(error).__name__} ({error})")

    def _abandon_forward(self) -> None:
        """Observe nothing more of this forward, as it is not known any more which modules run."""
        self._is_abandoned = True
        if self._forward is not None:
            take_off(self._forward.mode)

    def _end(self) -> None:
        if self._forward is not None and self._outermost is not None:
            self._outermost = None
            take_off(self._forward.mode)
            self._forward.ends()


class _Detour:
    """A `forward` of one instance that runs with the mode taken off; a copy of the module is without it."""

    def __init__(self, window: Window, module: nn.Module) -> None:
        has_compiled = vars(module).get("_compiled_call_impl") is not None
        self._window, self._module = window, module
        self._name = "_compiled_call_impl" if has_compiled else "forward"
        self._is_own, self._was = self._name in module.__dict__, module.__dict__.get(self._name)
        self._run = getattr(module, self._name)
        self.put_back()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        above = self._window.step_aside()
        try:
            return self._run(*args, **kwargs)
        finally:
            self._window.step_back(above)

    def put_back(self) -> None:
        """Take the place of the attribute again."""
        self._module.__dict__[self._name] = self

    def remove(self) -> None:
        """Restore the attribute of the module."""
        if self._is_own:
            self._module.__dict__[self._name] = self._was
        else:
            self._module.__dict__.pop(self._name, None)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._module, self._name)  # of a copy that has no attributes yet, so that of its class


class _Boundary:
    """The hook at the beginning or at the end of a forward; in a compiled graph it does nothing."""

    def __init__(self, note: Callable[..., None], name: str) -> None:
        self._note, self._name = note, name

    def __call__(self, module: nn.Module, args: Any, kwargs: Any, *result: Any) -> None:
        if not torch.compiler.is_compiling():
            self._note(self._name, module, args, kwargs, *result)


def _has_hooks(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)


def _compiled_frames() -> int:
    """Number of frames that were compiled so far; imports nothing."""
    return int(getattr(sys.modules.get("torch._dynamo.convert_frame"), "FRAME_COUNTER", 0))


def _records_hooks(module: nn.Module) -> bool:
    return isinstance(module, (nn.TransformerEncoderLayer, nn.MultiheadAttention))
