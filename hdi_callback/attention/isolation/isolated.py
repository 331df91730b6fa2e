"""`isolated`: a block in which code of the user's runs and leaves nothing changed."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from hdi_callback.attention.isolation.collectives import (
    answered_locally,
    collectives_as_stated,
    refusing_still,
)
from hdi_callback.attention.isolation.deadline import Deadline
from hdi_callback.attention.isolation.printing import muted
from hdi_callback.attention.isolation.random_states import devices_in_use, random_states_kept
from hdi_callback.attention.isolation.settings import (
    default_device,
    defaults,
    environment_kept,
    flags_kept,
    without_compilation,
    without_global_hooks,
    without_modes,
    without_saved_tensor_hooks,
)
from hdi_callback.attention.isolation.signals import comes_from_signal
from hdi_callback.attention.isolation.user_data import UserData
from hdi_callback.errors import HDIError

MOST_SECONDS = 60.0
"""Of processor time, to search the heads of one kind of module."""


class IsolationError(HDIError):
    """User code cannot be run apart: it would end the process, or its module cannot be copied."""


@contextmanager
def isolated(
    *modules: nn.Module, seed: int | None = None, seconds: float | None = None, keeps_defaults: bool = False
) -> Iterator[None]:
    """Run the block so that nothing of the user's is left changed, and nothing of the user's acts on it.

    Put back are the states of all generators of random numbers (Python's, numpy's, torch's on every device that is in
    use; no device is initialised for it), data that the code of `modules` reaches (see `UserData`), the environment,
    and torch's settings: default type, gradients, deterministic algorithms, cuDNN, precision. Switched off are
    autocast, modes and saved-tensor hooks of the user's, torch's global module hooks, compilation, warnings, and what
    this thread prints. New tensors lie on the CPU, in float32, unless `keeps_defaults` is set; nor are collective calls
    sent then, as other ranks may never come to them (see `answered_locally`).

    Blocks may be nested: random states are put back at the end of each, everything else at the end of the outermost.

    Args:
        modules: whose code will run.
        seed: of the CPU's generator within; where it is missing, the generator continues from its state.
        seconds: of processor time that the block may take, three times as many by the clock: after that, any call of
            torch raises an error.
        keeps_defaults: make new tensors where and as the user's code does, for code that works on the user's own.

    Raises:
        IsolationError: if the block takes too long, or code within raises `SystemExit` or another exception that is
            meant to end the process, other than `KeyboardInterrupt` and what a signal handler raises.
        KeyboardInterrupt: if the user interrupts.

    Example:
        >>> before = torch.get_rng_state()
        >>> with isolated(seed=0):
        ...     first = torch.randn(3)
        >>> with isolated(seed=0):
        ...     second = torch.randn(3)
        >>> torch.equal(first, second), torch.equal(torch.get_rng_state(), before)
        (True, True)
    """
    is_outermost = _active.data is None
    try:
        with ExitStack() as stack:
            stack.enter_context(random_states_kept())
            if is_outermost:
                _active.data = UserData()
                stack.callback(_forget)
                _isolate(stack)
            data = _active.data
            assert data is not None
            data.note(modules)
            if seed is not None:
                # That of the CPU alone: `torch.manual_seed` would seed every device.
                torch.default_generator.manual_seed(seed)
            if keeps_defaults:
                stack.enter_context(defaults(*_active.defaults))
            elif not _active.answers_locally:  # the user's own tensors may be spread over ranks
                stack.enter_context(_answered_locally())
            if seconds is not None:
                stack.enter_context(_Clock(seconds))
            yield
    except (Exception, KeyboardInterrupt):
        raise
    except BaseException as error:
        if comes_from_signal(error):
            raise
        raise IsolationError(f"its code raises {type(error).__name__}, which would end the run") from error


class _Clock(TorchFunctionMode):
    """Ends a run that takes too long, at the next of its operations."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._seconds, self._deadline = seconds, Deadline(seconds)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._deadline.has_passed:
            raise IsolationError(f"it takes more than {self._seconds:g} s")
        return func(*args, **(kwargs or {}))


class _Active(threading.local):
    data: UserData | None = None
    answers_locally = False
    defaults: tuple[torch.device, torch.dtype] = (torch.device("cpu"), torch.float32)  # the user's


_active = _Active()


@contextmanager
def without_other_ranks() -> Iterator[None]:
    """Refuse collective calls in the block, or answer them locally if an outer block does.

    A block that `collectives_within` opened for ranks that all run this code may call them.

    Raises:
        CollectiveError: from a call that is refused.
    """
    if _active.answers_locally:
        yield
        return
    with collectives_as_stated():
        yield


@contextmanager
def _answered_locally() -> Iterator[None]:
    _active.answers_locally = True
    try:
        with answered_locally():
            yield
    finally:
        _active.answers_locally = False


def _forget() -> None:
    data, _active.data = _active.data, None
    if data is not None:
        data.restore()


def _isolate(stack: ExitStack) -> None:
    """Keep the user's settings away, and put them back when the stack ends."""
    _active.defaults = default_device(), torch.get_default_dtype()
    stack.enter_context(flags_kept())
    stack.enter_context(environment_kept())
    stack.enter_context(without_global_hooks())
    stack.enter_context(without_saved_tensor_hooks())
    stack.enter_context(without_modes())
    stack.enter_context(refusing_still())
    has_gradients = torch.is_grad_enabled()
    if torch.is_inference_mode_enabled():
        stack.enter_context(torch.inference_mode(False))
    stack.enter_context(torch.set_grad_enabled(has_gradients))
    for device in {"cpu", *(device for device in devices_in_use() if torch.is_autocast_enabled(device))}:
        stack.enter_context(torch.autocast(device, enabled=False))
    stack.enter_context(defaults(torch.device("cpu"), torch.float32))
    stack.enter_context(without_compilation())
    stack.enter_context(muted())
    stack.enter_context(warnings.catch_warnings())
    warnings.simplefilter("ignore")
