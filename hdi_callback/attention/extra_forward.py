"""An extra forward of which nothing remains: uncompiled, without autograd, with everything put back that it changes.

Compiled calls are watched by it, as a mode or a hook within a compiled call would change its graphs: right before the
call, its first sequences run once more. `check` uses it for the forward that it is given.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import BaseTorchFunctionMode
from torch.utils._device import DeviceContext
from torch.utils._pytree import tree_flatten, tree_unflatten

from hdi_callback.attention.calls import is_rehearsal
from hdi_callback.attention.compiled_calls import uncompiled_here
from hdi_callback.attention.kept_state import KeptState, KeptTensors
from hdi_callback.guard import modes_off, warnings_off, without_modes

_here = threading.local()  # `is_extra`: whether an extra forward runs in this thread


def is_extra() -> bool:
    """Return whether an extra forward runs in this thread: one of ours, or one in which pipelining tries a stage."""
    return getattr(_here, "is_extra", False) or is_rehearsal()


def inner_model(model: nn.Module) -> nn.Module:
    """Return the module that `torch.compile` wraps, or the module itself."""
    while isinstance(inner := getattr(model, "_orig_mod", None), nn.Module):
        model = inner
    return model


@contextmanager
def nothing_remains(model: nn.Module, *roots: Any, is_training: bool = False) -> Iterator[None]:
    """Run forwards uncompiled and without autograd, and put back what they change.

    Random states, tensors that are written, attributes and containers, the cache of autocast and the shards of FSDP2
    are restored; the user's dispatch and function modes are off, but that of a default device. What else the forwards
    reach are `roots`: their arguments, or the function that runs them.

    Raises:
        CannotRunAgainError: in a training, where something is held that could not be put back.
    """
    outside = modes_off((DeviceContext,))
    with outside, torch.inference_mode(False), torch.no_grad(), uncompiled_here(), ExitStack() as stack:
        state, tensors = KeptState([*model.modules(), *roots, *_default_generators()]), KeptTensors()
        if is_training and state.beyond:
            beyond = " and ".join(sorted(state.beyond))
            raise CannotRunAgainError(f"its compiled calls would run twice, and {beyond} could not be put back")
        stack.callback(state.put_back)
        stack.callback(tensors.put_back)
        stack.callback(torch.set_autocast_cache_enabled, torch.is_autocast_cache_enabled())
        torch.set_autocast_cache_enabled(False)  # which the forward that trains goes on with
        # The real forward gives the warnings too. With a function mode torch leaves its fast path, which packs tokens.
        for context in (tensors, warnings_off(), BaseTorchFunctionMode(), _shards_kept(model)):
            stack.enter_context(context)
        was_extra, _here.is_extra = getattr(_here, "is_extra", False), True
        stack.callback(setattr, _here, "is_extra", was_extra)
        yield


class CannotRunAgainError(Exception):
    """A call holds what could not be put back if it ran once more."""


def _default_generators() -> list[Any]:
    """Return the generators of torch, Python and numpy that are used where none is named."""
    generators: list[Any] = [torch.default_generator, random._inst]
    for name in ("cuda", "xpu"):
        backend = getattr(torch, name, None)
        if backend is not None and backend.is_initialized():
            generators += backend.default_generators
    if torch.backends.mps.is_available():
        generators.append(torch.mps._get_default_mps_generator())
    return [*generators, np.random.mtrand._rand]


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
    """Return arguments of a call with the first sequences of its batch, and of how many; as they are and `None` if not.

    Only where nothing but a batch can be meant: every tensor of at least one dimension begins with the same size, or
    with 1 and has more dimensions.
    """
    with without_modes():
        # An object of another kind may hold more of the batch.
        leaves, structure = tree_flatten(inputs, lambda value: not isinstance(value, (list, tuple, dict)))
        tensors = [leaf for leaf in leaves if type(leaf) is Tensor and leaf.layout is torch.strided]
        constants = sum(isinstance(leaf, (type(None), int, float, str, torch.dtype, torch.device)) for leaf in leaves)
        if len(tensors) + constants < len(leaves) or any(tensor.is_nested for tensor in tensors):
            return inputs, None
        sizes = {tensor.shape[0] for tensor in tensors if tensor.dim() and (tensor.shape[0] != 1 or tensor.dim() == 1)}
        size = next(iter(sizes), 1)
        if len(sizes) != 1 or size <= most:
            return inputs, None
        is_cut = [type(leaf) is Tensor and leaf.dim() > 0 and leaf.shape[0] == size for leaf in leaves]
        return tree_unflatten([leaf[:most] if cut else leaf for leaf, cut in zip(leaves, is_cut)], structure), size
