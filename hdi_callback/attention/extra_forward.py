"""An extra forward of which nothing remains: uncompiled, without autograd, with everything put back that it changes.

Compiled calls are watched by it, as a mode or a hook within a compiled call would change its graphs: right before the
call, its first sequences run once more. `check` uses it for the forward that it is given.
"""

from __future__ import annotations

import random
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import _pop_mode, _push_mode
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_unflatten

from hdi_callback.attention.calls import is_rehearsal
from hdi_callback.attention.compiled_calls import uncompiled_here
from hdi_callback.attention.kept_state import KeptState, KeptTensors
from hdi_callback.guard import warn, without_modes

__all__ = ["first_sequences", "inner_model", "is_extra", "nothing_remains"]

_here = threading.local()  # `is_extra`: whether an extra forward runs in this thread


def is_extra() -> bool:
    """Return whether an extra forward runs in this thread: one of ours, or one in which pipelining tries a stage."""
    return getattr(_here, "is_extra", False) or is_rehearsal()


def inner_model(model: nn.Module) -> nn.Module:
    """Return the module that `torch.compile` wraps, or the module itself."""
    while isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
        model = inner
    return model


def _warn_of(lost: list[str]) -> None:
    warn(f"A forward that ran once more, to show its attention, used {' and '.join(lost)}: this is not put back.")


@contextmanager
def nothing_remains(model: nn.Module, *roots: Any, on_lost: Callable[[list[str]], None] = _warn_of) -> Iterator[None]:
    """Run forwards uncompiled and without autograd, and put back what they change.

    Random states, tensors that are written, attributes and containers, the cache of autocast and the shards of FSDP2
    are restored; the user's dispatch and function modes are off.

    Args:
        model: the model.
        roots: what else the forwards reach: their arguments, or the function that runs them.
        on_lost: takes what has changed and cannot be put back, in words.

    Yields:
        Nothing.
    """
    with ExitStack() as stack:
        for context in (
            _without_modes(),
            torch.inference_mode(False),
            torch.no_grad(),
            uncompiled_here(),
            _random_states_kept(),
            _state_kept(model, roots, on_lost),
            _autocast_cache_off(),
            _FAST_PATH_OFF,
            _WARNINGS_OFF,
            _shards_kept(model),
        ):
            stack.enter_context(context)
        was_extra, _here.is_extra = getattr(_here, "is_extra", False), True
        stack.callback(setattr, _here, "is_extra", was_extra)
        yield


@contextmanager
def _state_kept(model: nn.Module, roots: tuple[Any, ...], on_lost: Callable[[list[str]], None]) -> Iterator[None]:
    state, tensors = KeptState([*model.modules(), *roots]), KeptTensors()
    lost: list[str] = []
    try:
        with tensors:
            yield
    finally:
        tensors.put_back()
        lost = state.put_back()
        if lost:
            on_lost(lost)


@contextmanager
def _without_modes() -> Iterator[None]:
    """Switch off the user's modes, but that of a default device, which forwards rely on."""
    modes: list[Any] = []
    while torch._C._len_torch_function_stack():
        modes.append(_pop_mode())
    of_devices = [mode for mode in reversed(modes) if isinstance(mode, DeviceContext)]
    with _disable_current_modes():
        for mode in of_devices:
            _push_mode(mode)
        try:
            yield
        finally:
            for _ in of_devices:
                _pop_mode()
            for mode in reversed(modes):
                _push_mode(mode)


@contextmanager
def _random_states_kept() -> Iterator[None]:
    """Restore the states of the default generators; nothing is seeded."""
    generators = [torch.default_generator]
    for name in ("cuda", "xpu"):
        backend = getattr(torch, name, None)
        if backend is not None and backend.is_initialized():
            generators += backend.default_generators
    if torch.backends.mps.is_available():
        generators.append(torch.mps._get_default_mps_generator())
    numpy: Any = sys.modules.get("numpy.random")
    states = [(generator, generator.get_state()) for generator in generators]
    of_python, of_numpy = random.getstate(), None if numpy is None else numpy.get_state()
    try:
        yield
    finally:
        for generator, state in states:
            generator.set_state(state)
        random.setstate(of_python)
        if of_numpy is not None:
            numpy.set_state(of_numpy)


@contextmanager
def _autocast_cache_off() -> Iterator[None]:
    """No weight that is cast without autograd may be found in the cache by the forward that trains."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)
        torch.clear_autocast_cache()  # an autocast that was made earlier, as accelerate does, switches its own cache on


class _SettingOff:
    """A setting of the process, which several threads switch off at once: the last of them puts it back."""

    def __init__(self, switch_off: Callable[[], Callable[[], object]]) -> None:
        self._switch_off, self._lock, self._count = switch_off, threading.Lock(), 0
        self._put_back: Callable[[], object] = lambda: None

    def __enter__(self) -> None:
        with self._lock:
            if self._count == 0:
                self._put_back = self._switch_off()
            self._count += 1

    def __exit__(self, *exception: Any) -> None:
        with self._lock:
            self._count -= 1
            if self._count == 0:
                self._put_back()


def _fast_path_off() -> Callable[[], object]:
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    return lambda: torch.backends.mha.set_fastpath_enabled(before)


def _warnings_off() -> Callable[[], object]:
    context = warnings.catch_warnings()
    context.__enter__()
    warnings.simplefilter("ignore")
    return lambda: context.__exit__(None, None, None)


# In evaluation mode, before training begins, torch's encoder would pack its tokens into nested tensors.
_FAST_PATH_OFF = _SettingOff(_fast_path_off)
# The real forward gives the same warnings; where they are errors they would end this one.
_WARNINGS_OFF = _SettingOff(_warnings_off)


@contextmanager
def _shards_kept(model: nn.Module) -> Iterator[None]:
    """FSDP2 leaves some parameters whole after a forward, until a backward that here does not come."""
    try:
        yield
    finally:
        for module in model.modules():
            if hasattr(module, "reshard") and hasattr(module, "unshard"):
                module.reshard()  # type: ignore[operator]
                for group in getattr(module._get_fsdp_state(), "_fsdp_param_groups", ()):  # type: ignore[operator]
                    # Else the backward of the real forward would gather groups that it does not need.
                    group.comm_ctx.post_forward_order.clear()
                    group._post_forward_indices.clear()


def first_sequences(inputs: Any, most: int) -> tuple[Any, int | None]:
    """Return the first sequences of a batch.

    Only where nothing but a batch can be meant: every tensor of at least one dimension begins with the same size, or
    with 1 and has more dimensions.

    Args:
        inputs: arguments of a call: tensors in lists, tuples, dicts.
        most: how many sequences are taken.

    Returns:
        The inputs with few sequences, and of how many they were taken; or the inputs as they are, and `None`.
    """
    with without_modes():
        # An object of another kind may hold more of the batch.
        leaves, structure = tree_flatten(inputs, lambda value: not isinstance(value, (list, tuple, dict)))
        tensors = [leaf for leaf in leaves if type(leaf) is Tensor and leaf.layout is torch.strided]
        constants = sum(leaf is None or isinstance(leaf, _NO_BATCH) for leaf in leaves)
        if len(tensors) + constants < len(leaves) or any(tensor.is_nested for tensor in tensors):
            return inputs, None
        sizes = {tensor.shape[0] for tensor in tensors if tensor.dim() and (tensor.shape[0] != 1 or tensor.dim() == 1)}
        size = next(iter(sizes), 1)
        if len(sizes) != 1 or size <= most:
            return inputs, None
        is_cut = [type(leaf) is Tensor and leaf.dim() > 0 and leaf.shape[0] == size for leaf in leaves]
        return tree_unflatten([leaf[:most] if cut else leaf for leaf, cut in zip(leaves, is_cut)], structure), size


_NO_BATCH = (bool, int, float, str, torch.dtype, torch.device)
