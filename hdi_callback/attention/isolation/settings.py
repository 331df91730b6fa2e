"""Settings of torch and of the process: kept away from code that runs isolated, and put back."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch.nn.modules import module as module_hooks
from torch.overrides import _get_current_function_mode_stack, _pop_mode, _push_mode
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _disable_current_modes


def _flags() -> Iterator[tuple[Callable[[], Any], Callable[[Any], Any]]]:
    """Settings of torch as pairs of the functions that read and write them."""
    cudnn, cuda = torch.backends.cudnn, torch.backends.cuda
    yield torch.get_default_dtype, torch.set_default_dtype
    yield _deterministic, lambda mode: torch.use_deterministic_algorithms(mode[0], warn_only=mode[1])
    yield torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly
    yield torch.get_num_threads, torch.set_num_threads
    yield torch.get_float32_matmul_precision, torch.set_float32_matmul_precision
    for backend, names in (
        (cudnn, ("enabled", "benchmark", "deterministic", "allow_tf32")),
        (cuda.matmul, ("allow_tf32", "allow_fp16_reduced_precision_reduction")),
    ):
        for name in names:
            yield partial(getattr, backend, name), partial(setattr, backend, name)
    yield cuda.flash_sdp_enabled, cuda.enable_flash_sdp
    yield cuda.mem_efficient_sdp_enabled, cuda.enable_mem_efficient_sdp
    yield cuda.math_sdp_enabled, cuda.enable_math_sdp
    yield cuda.cudnn_sdp_enabled, cuda.enable_cudnn_sdp


def _deterministic() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


@contextmanager
def flags_kept() -> Iterator[None]:
    """Put back torch's settings when the block ends; deterministic algorithms and anomaly detection are off in it.

    Yields:
        Nothing.
    """
    kept = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for read, write in _flags():
            with suppress(Exception):  # torch refuses to read some once others were written
                kept.append((read, write, read()))
    with suppress(Exception):
        if torch.are_deterministic_algorithms_enabled():  # which refuses some of what only a copy's run computes
            torch.use_deterministic_algorithms(False)
        if torch.is_anomaly_enabled():  # it would warn of what such a run is meant to find
            torch.autograd.set_detect_anomaly(False)
    try:
        yield
    finally:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for read, write, before in kept:
                with suppress(Exception):
                    if read() != before:
                        write(before)


def default_device() -> torch.device:
    """Return the device of new tensors; asking torch for it may initialise that device.

    Returns:
        The device.
    """
    for mode in reversed(_get_current_function_mode_stack()):  # type: ignore[no-untyped-call]
        if isinstance(mode, DeviceContext):
            return mode.device
    return torch.device("cpu")


@contextmanager
def defaults(device: torch.device, dtype: torch.dtype) -> Iterator[None]:
    """Make new tensors on a device, of a type.

    Args:
        device: where.
        dtype: of those whose type is not stated.

    Yields:
        Nothing.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with device:
            yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def environment_kept() -> Iterator[None]:
    """Put back the environment of the process when the block ends.

    Yields:
        Nothing.
    """
    before = dict(os.environ)
    try:
        yield
    finally:
        if os.environ != before:
            os.environ.clear()
            os.environ.update(before)


@contextmanager
def without_global_hooks() -> Iterator[None]:
    """Empty torch's registries of hooks that fire for every module, and fill them again.

    Yields:
        Nothing.
    """
    kept = {name: value for name, value in vars(module_hooks).items() if name.startswith("_global_")}
    items = {name: list(value.items()) for name, value in kept.items() if isinstance(value, dict)}
    for name in items:
        kept[name].clear()
    try:
        yield
    finally:
        for name, value in kept.items():
            if name in items:
                value.clear()
                value.update(items[name])
            setattr(module_hooks, name, value)


@contextmanager
def without_saved_tensor_hooks() -> Iterator[None]:
    """Override saved-tensor hooks of the user, as for offloading or checkpointing, by hooks that do nothing.

    Yields:
        Nothing.
    """
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    if top is None or top(True) is None:
        yield
        return
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        yield


@contextmanager
def without_modes() -> Iterator[None]:
    """Disable modes of the user that see every operation, such as counters of operations.

    Yields:
        Nothing.
    """
    modes = [_pop_mode() for _ in _get_current_function_mode_stack()]  # type: ignore[no-untyped-call]
    try:
        with _disable_current_modes():
            yield
    finally:
        for mode in reversed(modes):
            _push_mode(mode)  # type: ignore[no-untyped-call]


@contextmanager
def without_compilation() -> Iterator[None]:
    """Run compiled parts as they were written: graphs of such a run would count against the user's limit.

    Yields:
        Nothing.
    """
    if "torch._dynamo" not in sys.modules or torch.compiler.is_compiling():
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield
