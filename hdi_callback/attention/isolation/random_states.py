"""The random numbers of the user's: the state of every generator is put back."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def random_states_kept() -> Iterator[None]:
    """Put back the states of all generators when the block ends: Python's, numpy's, torch's on devices in use.

    Yields:
        Nothing.
    """
    numpy: Any = sys.modules.get("numpy.random")
    of_python = random.getstate()
    of_numpy = None if numpy is None else numpy.get_state()
    of_torch = [(generator, generator.get_state()) for generator in _generators()]
    queued = [(lazy, dict(vars(lazy))) for lazy in _seed_queues()]
    for _, state in queued:
        state["call_order"] = list(state.get("call_order", ()))
    try:
        yield
    finally:
        random.setstate(of_python)
        if of_numpy is not None:
            numpy.set_state(of_numpy)
        for generator, before in of_torch:
            generator.set_state(before)
        for lazy, attributes in queued:
            vars(lazy).update(attributes)


def _generators() -> Iterator[torch.Generator]:
    """Every global generator of torch; asking for that of a device that is not in use would initialise it."""
    yield torch.default_generator
    for device in devices_in_use():
        backend = getattr(torch, device)
        yield from getattr(backend, "default_generators", ())
        if device == "mps":
            yield backend._get_default_mps_generator()


def devices_in_use() -> Iterator[str]:
    """Name the accelerators that are initialised.

    Yields:
        Device types.
    """
    for device in ("cuda", "xpu"):
        backend = getattr(torch, device, None)
        if backend is not None and backend.is_initialized():
            yield device
    if torch.backends.mps.is_available():
        yield "mps"


def _seed_queues() -> Iterator[Any]:
    """Seeds that wait for a device to be initialised, which `torch.manual_seed` in user code would replace."""
    for device in ("cuda", "xpu"):
        lazy = getattr(getattr(torch, device, None), "_lazy_seed_tracker", None)
        if lazy is not None:
            yield lazy
