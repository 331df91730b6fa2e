"""Hooks that can be taken off and put back, stay behind when a model is copied or saved, and change no kernel.

`nn.TransformerEncoderLayer` leaves its fast path in evaluation as soon as any module in it has a forward hook. So the
calls of `nn.MultiheadAttention` are observed through a `forward` of the instance, which torch does not check.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from operator import attrgetter
from typing import Any, Protocol

import torch
from torch import nn

from hdi_callback.guard import attempt_each, guarded

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
Before = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], "Arguments | None"]
After = Callable[[nn.Module, tuple[Any, ...], dict[str, Any], Any], Any]


class Handle(Protocol):
    """A hook that can be removed and put back."""

    def remove(self) -> None:
        """Remove the hook."""

    def put_back(self) -> None:
        """Put the hook back after `remove`."""


class Hooks:
    """Hooks on some modules, which `_install` adds."""

    def __init__(self) -> None:
        self._handles: list[Handle] = []
        self._suspended: list[Handle] = []

    def suspend(self) -> None:
        """Remove the hooks until `resume`; those that cannot be are removed when it is called again."""
        self._suspended = [*self._suspended, *(handle for handle in self._handles if handle not in self._suspended)]
        remove_each(self._handles)

    def resume(self) -> None:
        """Put the hooks back after `suspend`, by the numbers that they had; calling it again does nothing."""
        for handle in self._suspended:
            if handle not in self._handles:
                self._handles.append(handle)  # before it is put back, so that it is removed even if that fails midway
                handle.put_back()
        self._suspended = []
        if self._handles:
            return
        try:
            for handle in self._install():
                self._handles.append(handle)
        except BaseException:
            remove_each(self._handles)
            raise

    def _install(self) -> Iterable[Handle]:
        raise NotImplementedError


def remove_each(handles: list[Handle]) -> None:
    """Remove hooks, each even if others cannot be; those stay in the list.

    Args:
        handles: the hooks.

    Raises:
        Exception: the first failure.
    """

    def remove(handle: Handle) -> None:
        handle.remove()
        handles.remove(handle)

    attempt_each([partial(remove, handle) for handle in handles])


@contextmanager
def all_or_no_hooks(model: nn.Module) -> Iterator[None]:
    """Take the hooks of this package that a block puts on a model off again if the block raises.

    Args:
        model: the model.

    Yields:
        Nothing.
    """
    before = {id(hook) for module in model.modules() for hook in _ours_on(module)}
    try:
        yield
    except BaseException:
        for module in model.modules():
            _take_off(module, {id(hook) for hook in _ours_on(module)} - before)
        raise


def _ours_on(module: nn.Module) -> Iterator[object]:
    for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
        if isinstance(hook, Hook):
            yield hook
    forward = vars(module).get("forward")
    if isinstance(forward, _ObservedForward):
        yield from (*forward.observers, *forward.eager)


def _take_off(module: nn.Module, ours: set[int]) -> None:
    hooks: dict[int, Any]
    for hooks, marks in (
        (module._forward_pre_hooks, [module._forward_pre_hooks_with_kwargs]),
        (module._forward_hooks, [module._forward_hooks_with_kwargs, module._forward_hooks_always_called]),
    ):
        for number in [number for number, hook in hooks.items() if id(hook) in ours]:
            del hooks[number]
            for mark in marks:
                mark.pop(number, None)
    forward = vars(module).get("forward")
    if isinstance(forward, _ObservedForward):
        for observers in (forward.observers, forward.eager):
            observers[:] = [observer for observer in observers if id(observer) not in ours]
        forward.take_off()


class Hook:
    """A hook that does nothing in a copy of the model, and needs nothing of this package when the model is loaded.

    Args:
        function: what is called.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: Any) -> Any:
        """Call the function."""
        return self._function(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (nullcontext(), "__exit__")  # takes what a hook takes, and returns None


def observe_calls(
    module: nn.Module,
    before: Before,
    after: After | None = None,
    *,
    eager_only: bool = False,
    without_hooks: bool = False,
) -> list[Handle]:
    """Call a function before each forward of a module, and another after it.

    Args:
        module: the module.
        before: takes the module and its arguments; may return others. `guarded`, as is `after`.
        after: takes the result as well, `None` if the forward raised; what it returns is not used.
        eager_only: leave compiled graphs as they are; the functions do nothing there.
        without_hooks: follow the calls through a `forward` of the instance, as those of torch's attention always are.

    Returns:
        Handles that take both off.
    """
    if without_hooks or isinstance(module, nn.MultiheadAttention):
        top = module.__dict__.get("forward")
        observed = top if isinstance(top, _ObservedForward) else _ObservedForward(module, top)
        return [_Observer(observed, before, after, eager_only=eager_only)]
    return [_Numbered(module, before, after)]


def has_own_forward(module: nn.Module) -> bool:
    """Return whether other code has set a `forward` on one module that is not that of its class.

    Args:
        module: the module, which may be observed.

    Returns:
        False where `observe_calls` alone has.
    """
    own = vars(module).get("forward")
    return own is not None and not (isinstance(own, _ObservedForward) and own.is_of_class)


class _Numbered:
    """Hooks of one module that keep their numbers when they are put back: compiled graphs are guarded by them."""

    def __init__(self, module: nn.Module, before: Before, after: After | None) -> None:
        # All that may fail is done before the first hook is on the module.
        first, last = Hook(before), None if after is None else Hook(after)
        self._hooks = [(module.register_forward_pre_hook(first, with_kwargs=True), first)]
        if last is not None:
            self._hooks.append((module.register_forward_hook(last, with_kwargs=True, always_call=True), last))

    def remove(self) -> None:
        """Remove the hooks."""
        for handle, _ in self._hooks:
            handle.remove()

    def put_back(self) -> None:
        """Put the hooks back after `remove`."""
        for handle, hook in self._hooks:
            for ref, value in ((handle.hooks_dict_ref, hook), *((ref, True) for ref in handle.extra_dict_ref)):
                known = ref()
                if known is not None:
                    known[handle.id] = value


class _Observer:
    """An observer of calls without a hook."""

    def __init__(self, observed: _ObservedForward, before: Before, after: After | None, *, eager_only: bool) -> None:
        self._observed, self._functions = observed, (before, after)
        self._list = observed.eager if eager_only else observed.observers
        self.put_back()

    def put_back(self) -> None:
        """Observe, from the next call on."""
        self._observed.put_on()
        self._list.append(self._functions)

    def remove(self) -> None:
        """Observe no more."""
        if self._functions in self._list:
            self._list.remove(self._functions)
        self._observed.take_off()


class _ObservedForward:
    """A `forward` of one instance, around that of its class."""

    def __init__(self, module: nn.Module, inner: Any) -> None:
        self._module, self._inner = module, inner
        self.observers: list[tuple[Before, After | None]] = []
        self.eager: list[tuple[Before, After | None]] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            for before, _ in self.observers:
                changed = before(self._module, args, kwargs)
                if changed is not None:
                    args, kwargs = changed
            return self._forward(self._module, args, kwargs)
        module, observers = self._called(), (*self.observers, *self.eager)
        for before, _ in observers:
            before(module, args, kwargs)
        result = None
        try:
            result = self._forward(module, args, kwargs)
        finally:
            for _, after in observers:
                if after is not None:
                    after(module, args, kwargs, result)
        return result

    @property
    def is_of_class(self) -> bool:
        """Whether nothing but the forward of the class is in it."""
        return self._inner is None

    def put_on(self) -> None:
        """Run before the module's own forward."""
        self._module.__dict__["forward"] = self

    def take_off(self) -> None:
        """Restore the module's own forward once nobody observes it; if it was wrapped again, only pass calls on."""
        if self.observers or self.eager or self._module.__dict__.get("forward") is not self:
            return
        if self._inner is None:
            del self._module.__dict__["forward"]
        else:
            self._module.__dict__["forward"] = self._inner

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._module, "forward")  # of a copy that has no attributes yet, so that of its class

    def _forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._inner is not None and module is self._module:
            return self._inner(*args, **kwargs)
        return type(module).forward(module, *args, **kwargs)

    @guarded("naming the module that runs", otherwise=attrgetter("_module"))
    def _called(self) -> nn.Module:
        """The module whose call this is: a replica of `nn.DataParallel` shares the attributes of the original."""
        caller = sys._getframe(3).f_locals.get("self")  # beyond the guard and `__call__`
        is_replica = isinstance(caller, nn.Module) and caller.__dict__.get("forward") is self
        return caller if is_replica else self._module  # type: ignore[return-value]

    def _failed(self, work: str, error: Exception) -> None:
        """Say nothing: it is the module of this forward, but in a replica."""
