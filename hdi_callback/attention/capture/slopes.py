"""Slopes of the loss with respect to each head, from the gradients at head outputs in the backward pass.

A hook on the tensor reads its gradient and returns nothing. Until then it holds the head outputs, which autograd
holds as well for the weight of the output projection, unless that is frozen.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable

import torch
from torch import Tensor

from hdi_callback.attention.autocast import without_autocast
from hdi_callback.attention.compiled import is_backward_compiled
from hdi_callback.guard import guarded

SlopeReducer = Callable[[Tensor, Tensor], Tensor]
"""Takes head outputs and their gradients, ``(sequences, tokens, H, d_v)``, to slopes ``(sequences, H)``."""

NO_BACKWARD = "no backward reached its head outputs"
_COMPILED = "gradients are not read inside compiled graphs"
_COMPILED_BACKWARD = "gradients are not read where the backward is compiled"
_NOT_KEPT = "activation checkpointing, or another hook on saved tensors, frees its head outputs before the backward"
_TWICE = "several backward passes went through one forward, and which of them trains is not known"
_DIFFERENTIATED = "a backward with create_graph=True reached it, which need not be that of the loss"
_CHANGED = "its head outputs were changed in place before the backward"


class HeadSlopes:
    """Collect the slopes of one layer over the backward passes of one step.

    Args:
        heads: H.
        reduce: computes slopes.

    Attributes:
        failure: why there are none; `None` if nothing failed.
    """

    def __init__(self, heads: int, reduce: SlopeReducer) -> None:
        self.failure: str | None = None
        self._heads, self._reduce = heads, reduce
        self._by_sequences: dict[int, Tensor] = {}
        self._lock = threading.Lock()  # backward passes run in a thread for each device

    def compiled(self) -> None:
        """Note a forward in a compiled graph, of which nothing can be read."""
        self.failure = self.failure or _COMPILED

    def follow(
        self, tensor: Tensor, outputs: Tensor, first_sequence: int, gradient_of: Callable[[Tensor], Tensor]
    ) -> None:
        """Read the gradient of a tensor of the forward when a backward computes it.

        Args:
            tensor: the one whose gradient is read.
            outputs: ``(..., length, H * d_v)``, the head outputs.
            first_sequence: number of the first of these sequences; those of one number are the same sequences.
            gradient_of: takes the gradient of `tensor` to that of `outputs`.
        """
        if not tensor.requires_grad:
            self.failure = self.failure or "autograd computes no gradient of its head outputs"
        elif is_backward_compiled():
            self.failure = self.failure or _COMPILED_BACKWARD
        elif _are_saved_elsewhere():
            self.failure = self.failure or _NOT_KEPT
        elif outputs.shape[-1] % self._heads or hasattr(outputs, "placements"):
            self.failure = self.failure or "its heads are sharded over ranks"
        if self.failure is None:
            tensor.register_hook(_Reader(self, outputs, first_sequence, gradient_of))  # type: ignore[no-untyped-call]

    def total(self) -> Tensor | None:
        """Return the slopes of all sequences.

        Returns:
            ``(sequences, H)``; `None` if no backward ran, or something failed.
        """
        if self.failure is not None or not self._by_sequences:
            return None
        return torch.cat(list(self._by_sequences.values()))

    def take(self, first_sequence: int, outputs: Tensor, gradient: Tensor) -> None:
        """Add the slopes of one forward.

        Args:
            first_sequence: see `follow`.
            outputs: see `follow`.
            gradient: of the same shape.
        """
        by_head = (*outputs.shape[-2:-1], self._heads, outputs.shape[-1] // self._heads)
        both = (tensor.reshape(outputs.shape[:-2].numel(), *by_head) for tensor in (outputs, gradient))
        slopes = self._reduce(*both)
        with self._lock:
            before = self._by_sequences.get(first_sequence)
            self._by_sequences[first_sequence] = slopes if before is None else before + slopes


class _Reader:
    """The hook on one tensor, which goes with its graph."""

    def __init__(
        self, slopes: HeadSlopes, outputs: Tensor, first_sequence: int, gradient_of: Callable[[Tensor], Tensor]
    ) -> None:
        self._slopes = weakref.ref(slopes)
        self._held: Tensor | None = outputs.detach()
        self._version = outputs._version
        self._first_sequence, self._gradient_of = first_sequence, gradient_of

    @guarded("reading gradients")
    def __call__(self, gradient: Tensor) -> None:
        slopes, outputs = self._slopes(), self._held
        self._held = None
        if slopes is None or slopes.failure is not None:
            return
        if torch.is_grad_enabled():
            slopes.failure = _DIFFERENTIATED
        elif outputs is None:
            slopes.failure = _TWICE
        elif outputs._version != self._version:
            slopes.failure = _CHANGED
        else:
            with without_autocast(outputs.device):
                slopes.take(self._first_sequence, outputs, self._gradient_of(gradient.detach()))

    def _failed(self, work: str, error: Exception) -> None:
        slopes = self._slopes()
        if slopes is not None:
            slopes.failure = f"its gradients cannot be read ({type(error).__name__}: {error})"


def _are_saved_elsewhere() -> bool:
    """Return whether other code keeps what autograd saves, or computes it again."""
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return top is not None and top(True) is not None
