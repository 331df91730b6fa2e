"""The time in which a forward is observed: from the first module that begins until it ends, in armed forwards only.

Hooks stand on the modules between `open` and `close` alone, so that nothing is there in all other steps. Modules that
cannot be observed without changing how they run get no hook; they are run with the mode taken off.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode, _push_mode
from torch.utils.hooks import RemovableHandle

from hdi_callback.attention.observe.quiet import in_the_way


class Window:
    """Turn a mode on while the outermost module of a model runs.

    Args:
        mode: the mode.
        entered: called with path and module when one begins.
        left: called with path, module, arguments and result when one ends.
        ended: called when the outermost one has ended.
    """

    def __init__(
        self,
        mode: TorchFunctionMode,
        entered: Callable[[str, nn.Module], None],
        left: Callable[[str, nn.Module, tuple[Any, ...], dict[str, Any], Any], None],
        ended: Callable[[], None],
    ) -> None:
        self._mode, self._entered, self._left, self._ended = mode, entered, left, ended
        self._handles: list[RemovableHandle] = []
        self._detours: list[tuple[nn.Module, str, Any, bool]] = []
        self._outermost: tuple[str, nn.Module] | None = None
        self._thread = 0
        self.reason = ""
        self.has_run = False

    def open(self, modules: Mapping[str, nn.Module], closed: Mapping[str, nn.Module]) -> None:
        """Wait for a forward.

        Args:
            modules: those that are observed, by path.
            closed: those that are run without the mode, by path.
        """
        self.close()
        self._thread, self.reason, self.has_run = threading.get_ident(), "", False
        for name, module in modules.items():
            before, after = _Entrance(self, name), _Exit(self, name)
            # The second is called whatever happens in the forward.
            self._handles.append(module.register_forward_pre_hook(before))
            self._handles.append(module.register_forward_hook(after, with_kwargs=True, always_call=True))
        for module in closed.values():
            self._detour(module)

    def close(self) -> None:
        """Take everything off again; calling it again does nothing."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for module, name, was, is_own in self._detours:
            if is_own:
                module.__dict__[name] = was
            else:
                module.__dict__.pop(name, None)
        self._detours.clear()
        self._end()

    def enter(self, name: str, module: nn.Module) -> None:
        """Note that a module begins, and turn the mode on if it is the first."""
        if threading.get_ident() != self._thread:
            return
        if self._outermost is None:
            reason = in_the_way()
            if reason is not None:
                self.reason = reason or self.reason
                return
            self._outermost, self.has_run = (name, module), True
            _push_mode(self._mode)  # type: ignore[no-untyped-call]
        elif in_the_way() is not None:
            return
        self._entered(name, module)

    def leave(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Note that a module ends, and turn the mode off if it was the first."""
        if threading.get_ident() != self._thread or self._outermost is None or in_the_way() is not None:
            return
        self._left(name, module, args, kwargs, result)
        if self._outermost == (name, module):
            self._end()

    def _end(self) -> None:
        if self._outermost is not None:
            self._outermost = None
            _take_off(self._mode)
            self._ended()

    def _detour(self, module: nn.Module) -> None:
        name = "_compiled_call_impl" if getattr(module, "_compiled_call_impl", None) is not None else "forward"
        is_own, run = name in module.__dict__, getattr(module, name)

        def without_mode(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != self._thread or self._outermost is None:
                return run(*args, **kwargs)
            with _off(self._mode):
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
