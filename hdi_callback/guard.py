"""The one guard between a training and this package: no failure and no warning of ours ends a training."""

from __future__ import annotations

import random
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import wraps
from typing import Any, TypeVar, cast

import torch
from torch.overrides import _pop_mode, _push_mode
from torch.utils._python_dispatch import _disable_current_modes

from hdi_callback.errors import HDIWarning, MonitoringWarning

F = TypeVar("F", bound=Callable[..., Any])


def warn(message: str, category: type[HDIWarning] = MonitoringWarning) -> None:
    """Warn the user, without a source line; where warnings are errors, print the message instead of raising."""
    text = message.encode("utf-8", "backslashreplace").decode("utf-8")  # lone surrogates, which streams refuse
    try:
        # A file name that is none, so that no line of source is printed beneath the message.
        warnings.warn_explicit(text, category, "<hdi_callback>", 1, module="hdi_callback")
    except Exception:  # made an error by a filter, or raised by somebody's `showwarning`
        print(f"{category.__name__}: {text}", file=sys.stderr)  # noqa: T201


def describe(error: BaseException) -> str:
    """Return type and message of an exception, even if its `__str__` raises."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return type(error).__name__


class Guard:
    """Turns failures of this package into one warning for each kind of work; interruptions pass."""

    def __init__(self) -> None:
        self.count: dict[str, int] = {}

    @contextmanager
    def __call__(self, work: str, *, passes: tuple[type[Exception], ...] = ()) -> Iterator[None]:
        """Turn any exception of the block but `passes` into a warning that says which `work` failed."""
        try:
            yield
        except passes:
            raise
        except Exception as error:
            self.failed(work, error)

    def failed(self, work: str, error: Exception) -> None:
        """Warn that `work` failed, once for each kind of work."""
        self.warn_once(work, f"{work[:1].upper()}{work[1:]} failed ({describe(error)}). Training goes on.")

    def warn_once(self, kind: str, message: str) -> None:
        """Warn with `message`, once for each `kind`."""
        self.count[kind] = self.count.get(kind, 0) + 1
        if self.count[kind] == 1:
            warn(message)


_LEFT = weakref.WeakSet[Any]()  # modes of ours that an interruption has left on the stack, while it was put aside


def take_off(mode: Any) -> None:
    """Exit a dispatch mode, wherever it is on the stack; if that is put aside, once the guard has put it back."""
    modes = _dispatch_modes()
    if mode not in modes:
        _LEFT.add(mode)
        return
    _LEFT.discard(mode)
    place = modes.index(mode)
    for each in reversed(modes[place:]):
        each.__exit__(None, None, None)
    for each in modes[place + 1 :]:
        each.__enter__()


def _dispatch_modes() -> list[Any]:
    return [torch._C._get_dispatch_stack_at(place) for place in range(torch._C._len_torch_dispatch_stack())]


def guarded(work: str, *, passes: tuple[type[Exception], ...] = ()) -> Callable[[F], F]:
    """Return a decorator of methods that a trainer calls: of failures the `_guard` of its object warns.

    Of them but `passes` the method returns `None`. Within it the user's dispatch and function modes, autocast and
    autograd are off. While a graph is compiled the method is called as it is.
    """

    def decorate(method: F) -> F:
        @wraps(method)
        def called(self: Any, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return method(self, *args, **kwargs)
            result = None
            with self._guard(work, passes=passes), without_modes():
                result = method(self, *args, **kwargs)
            for mode in filter(_LEFT.__contains__, _dispatch_modes()):
                take_off(mode)
            return result

        return cast("F", called)

    return decorate


@contextmanager
def pythons_generator_kept() -> Iterator[None]:
    """Put back the state of Python's generator: `rich`, and perhaps a dashboard, draws from it when imported."""
    state = random.getstate()
    try:
        yield
    finally:
        random.setstate(state)


@contextmanager
def without_modes() -> Iterator[None]:
    """Compute outside of the user's dispatch and function modes, of autocast and of autograd.

    A mode that is active around an optimizer's step would receive our operations: one that draws random numbers, or
    counts operations, would change the training.
    """
    is_cast = torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")
    if not (is_cast or torch._C._len_torch_function_stack() or torch._C._len_torch_dispatch_stack()):
        is_grad_enabled = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)  # as `torch.no_grad` does, at a third of its time
        try:
            yield
        finally:
            torch._C._set_grad_enabled(is_grad_enabled)
        return
    with modes_off(), torch.no_grad(), autocast_off("cpu", "cuda"):
        yield


@contextmanager
def autocast_off(*devices: str) -> Iterator[None]:
    """Switch off autocast. Leaving a context of torch's could forget the weights that the user's autocast has cast."""
    were_on = [device for device in devices if torch.is_autocast_enabled(device)]
    try:
        for device in were_on:
            torch.set_autocast_enabled(device, False)
        yield
    finally:
        for device in were_on:
            torch.set_autocast_enabled(device, True)


class _OfThread(type):
    thread: int  # in which all categories of warnings are its subclasses

    def __subclasscheck__(cls, category: type) -> bool:
        return cls.thread == threading.get_ident()


@contextmanager
def warnings_off() -> Iterator[None]:
    """Ignore warnings of this thread alone. `catch_warnings` makes Python forget which it has shown, in all threads."""
    filters: Any = warnings.filters
    category = _OfThread("Ignored", (Warning,), {"thread": threading.get_ident()})
    filters.insert(0, ignored := ("ignore", None, category, None, 0))
    try:
        yield
    finally:
        category.thread = 0  # wherever the filters were copied meanwhile
        with suppress(ValueError):  # a forward may have removed all
            filters.remove(ignored)


@contextmanager
def modes_off(but: tuple[type, ...] = ()) -> Iterator[None]:
    """Switch off the user's dispatch modes, and function modes `but` those of some kinds."""
    modes = []
    while torch._C._len_torch_function_stack():
        modes.append(_pop_mode())
    staying = [mode for mode in reversed(modes) if isinstance(mode, but)]
    with _disable_current_modes():
        for mode in staying:
            _push_mode(mode)
        try:
            yield
        finally:
            for _ in staying:
                _pop_mode()
            for mode in reversed(modes):
                _push_mode(mode)
