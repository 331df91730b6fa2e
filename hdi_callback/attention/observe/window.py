"""The time in which a forward is observed: from the first module that begins until it ends, in armed forwards only.

Hooks stand on the modules between `open` and `close` alone, so that all other steps cost nothing. Modules that
cannot be observed without changing how they run get no hook; they are run with the mode taken off.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode, _push_mode
from torch.utils.hooks import RemovableHandle

from hdi_callback.attention.observe.quiet import in_the_way


class Watcher(Protocol):
    """What is told of a forward."""

    @property
    def mode(self) -> TorchFunctionMode:
        """The mode that is on while it runs."""

    def entered(self, name: str, module: nn.Module) -> None:
        """A module begins."""

    def left(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """A module ends; of one that raised there is no result."""

    def ended(self) -> None:
        """The outermost module has ended."""


class Window:
    """Turn a mode on while the outermost module of a model runs.

    Where a graph was compiled while hooks were there, it is guarded by their number: they stay, and do nothing.
    """

    def __init__(self) -> None:
        self._watcher: Watcher | None = None
        self._handles: dict[nn.Module, tuple[RemovableHandle, RemovableHandle]] = {}
        self._detours: list[tuple[nn.Module, str, Any, bool]] = []
        self._outermost: tuple[str, nn.Module] | None = None
        self._thread = self._compiled = 0
        self._stays = False
        self.reason = ""
        self.has_run = False

    def open(self, watcher: Watcher, modules: Mapping[str, nn.Module], closed: Mapping[str, nn.Module]) -> None:
        """Wait for a forward.

        Args:
            watcher: what is told of it.
            modules: those that are observed, by path.
            closed: those that are run without the mode, by path.
        """
        self.close()
        self._watcher, self._compiled = watcher, _compiled_frames()
        self._thread, self.reason, self.has_run = threading.get_ident(), "", False
        for name, module in modules.items():
            if module not in self._handles:
                before, after = _Entrance(self, name), _Exit(self, name)
                # The second is called whatever happens in the forward.
                self._handles[module] = (
                    module.register_forward_pre_hook(before),
                    module.register_forward_hook(after, with_kwargs=True, always_call=True),
                )
        for module in closed.values():
            self._detour(module)

    def close(self) -> None:
        """Take everything off again that no graph was compiled with; calling it again does nothing."""
        if self._watcher is None:
            return
        for module, name, was, is_own in self._detours:
            if is_own:
                module.__dict__[name] = was
            else:
                module.__dict__.pop(name, None)
        self._detours.clear()
        self._end()
        self._watcher = None
        self._stays = self._stays or _compiled_frames() != self._compiled
        if not self._stays:
            self.remove()
            return
        # In evaluation torch's own encoder looks for hooks in all that it holds.
        torchs_own = [
            one for one in self._handles if isinstance(one, (nn.TransformerEncoderLayer, nn.MultiheadAttention))
        ]
        for module in {part for one in torchs_own for part in one.modules()}:
            self._take_off(module)

    def remove(self) -> None:
        """Take all hooks off."""
        for module in list(self._handles):
            self._take_off(module)

    def _take_off(self, module: nn.Module) -> None:
        for handle in self._handles.pop(module, ()):
            handle.remove()

    def enter(self, name: str, module: nn.Module) -> None:
        """Note that a module begins, and turn the mode on if it is the first."""
        if self._watcher is None or threading.get_ident() != self._thread:
            return
        if self._outermost is None:
            reason = in_the_way()
            if reason is not None:
                self.reason = reason or self.reason
                return
            self._outermost, self.has_run = (name, module), True
            _push_mode(self._watcher.mode)  # type: ignore[no-untyped-call]
        elif in_the_way() is not None:
            return
        self._watcher.entered(name, module)

    def leave(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Note that a module ends, and turn the mode off if it was the first."""
        if self._watcher is None or self._outermost is None:
            return
        if threading.get_ident() != self._thread or in_the_way() is not None:
            return
        self._watcher.left(name, module, args, kwargs, result)
        if self._outermost == (name, module):
            self._end()

    def _end(self) -> None:
        if self._watcher is not None and self._outermost is not None:
            self._outermost = None
            _take_off(self._watcher.mode)
            self._watcher.ended()

    def _detour(self, module: nn.Module) -> None:
        name = "_compiled_call_impl" if getattr(module, "_compiled_call_impl", None) is not None else "forward"
        is_own, run = name in module.__dict__, getattr(module, name)

        def without_mode(*args: Any, **kwargs: Any) -> Any:
            watcher = self._watcher
            if watcher is None or self._outermost is None or threading.get_ident() != self._thread:
                return run(*args, **kwargs)
            with _off(watcher.mode):
                return run(*args, **kwargs)

        self._detours.append((module, name, module.__dict__.get(name), is_own))
        module.__dict__[name] = without_mode


class _Entrance:
    """The hook before a forward."""

    def __init__(self, window: Window, name: str) -> None:
        self._window, self._name = window, name

    def __call__(self, module: nn.Module, args: Any) -> None:
        if not torch.compiler.is_compiling():  # all that a graph sees of it is that it is nothing
            self._window.enter(self._name, module)


class _Exit:
    """The hook after a forward."""

    def __init__(self, window: Window, name: str) -> None:
        self._window, self._name = window, name

    def __call__(self, module: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
        if not torch.compiler.is_compiling():
            self._window.leave(self._name, module, args, kwargs, result)


def _compiled_frames() -> int:
    """How many frames were compiled so far; nothing is imported for it."""
    return int(getattr(sys.modules.get("torch._dynamo.convert_frame"), "FRAME_COUNTER", 0))


def _take_off(mode: TorchFunctionMode) -> list[TorchFunctionMode]:
    """Take a mode out of the stack, wherever it stands; modes above it stay."""
    if mode not in _get_current_function_mode_stack():  # type: ignore[no-untyped-call]
        return []
    above: list[TorchFunctionMode] = []
    while (top := _pop_mode()) is not mode:  # type: ignore[no-untyped-call]
        above.append(top)
    for one in reversed(above):
        _push_mode(one)  # type: ignore[no-untyped-call]
    return above


@contextmanager
def _off(mode: TorchFunctionMode) -> Iterator[None]:
    """Run without a mode, and put it back to its place."""
    above = _take_off(mode)
    try:
        yield
    finally:
        for _ in above:
            _pop_mode()  # type: ignore[no-untyped-call]
        _push_mode(mode)  # type: ignore[no-untyped-call]
        for one in reversed(above):
            _push_mode(one)  # type: ignore[no-untyped-call]
