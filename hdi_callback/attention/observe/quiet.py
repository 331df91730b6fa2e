"""Tensor operations within the user's forward without an effect on it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.utils._python_dispatch

from hdi_callback.attention.autocast import without_autocast

# Of a torch that has moved it, selective checkpointing is observed as anything else.
_disable_current_modes: Any = getattr(torch.utils._python_dispatch, "_disable_current_modes", None)


@contextmanager
def quiet(device: torch.device) -> Iterator[None]:
    """Compute without gradients, autocast, function modes and dispatch modes.

    Selective activation checkpointing and FLOP counters are dispatch modes: they would record what is computed here,
    and the former would return it in the recomputation in place of what the model computes.

    Args:
        device: where the tensors are.

    Yields:
        Nothing.
    """
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(without_autocast(device))
        stack.enter_context(torch._C.DisableTorchFunction())
        if _disable_current_modes is not None:
            stack.enter_context(_disable_current_modes())
        yield


@contextmanager
def unnoticed(name: str, device: torch.device, failures: list[str]) -> Iterator[None]:
    """Compute quietly, and continue the user's forward whatever fails.

    Args:
        name: of what is observed.
        device: where the tensors are.
        failures: where a failure is recorded, so that the reading states why it is not whole.

    Yields:
        Nothing.
    """
    try:
        with quiet(device):
            yield
    except Exception as error:
        failures.append(f"{name}: {type(error).__name__} ({error})")


def is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is one that holds its numbers here: no DTensor, nested, quantised, fake or mapped one.

    Args:
        tensor: any tensor.

    Returns:
        True if so.
    """
    is_usual = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
    return is_usual and not is_transformed(tensor)


def is_transformed(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is one of `torch.func`, such as `vmap` passes to the function that it maps.

    Args:
        tensor: any tensor.

    Returns:
        True if so.
    """
    functorch = getattr(torch._C, "_functorch", None)
    return functorch is not None and bool(functorch.is_functorch_wrapped_tensor(tensor))


def without_transforms(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor that a transform of `torch.func` maps over.

    Args:
        tensor: any tensor.

    Returns:
        The innermost one; the same where there is no transform.
    """
    while is_transformed(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


def holds_numbers(tensor: torch.Tensor) -> bool:
    """Return whether the numbers of a tensor can be compared: it is plain, and not on the meta device.

    Args:
        tensor: any tensor.

    Returns:
        True if so.
    """
    return is_plain(tensor) and not tensor.is_meta


def unobservable_reason() -> str | None:
    """Return why the forward that begins now cannot be observed.

    Returns:
        A clause, ``""`` where nothing needs to be said (a recomputation within backward, a graph that is traced),
        `None` if it can.
    """
    if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
        return ""
    if torch._C._current_graph_task_id() != -1:
        return ""
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return "a CUDA graph is being captured"
    functorch = getattr(torch._C, "_functorch", None)
    if functorch is not None and functorch.peek_interpreter_stack() is not None:
        return "it runs under a transform of torch.func"
    return None
