"""The optimizer under what others put around it."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from hdi_callback.errors import MisconfigurationError


def inner_optimizer(optimizer: Any) -> Optimizer:
    """Take the wrapper off an optimizer, such as that of accelerate, which calls no hooks of its own.

    Args:
        optimizer: a torch optimizer, or what holds one as ``optimizer``.

    Returns:
        The torch optimizer.

    Raises:
        MisconfigurationError: if there is none.
    """
    inner = optimizer
    while not isinstance(inner, Optimizer) or hasattr(inner, "optimizer"):
        if not hasattr(inner, "optimizer"):
            raise MisconfigurationError(
                f"`optimizer` must be a torch optimizer, or a list of them, got {type(optimizer).__name__}: write "
                "torch.optim.AdamW(model.parameters()) or the like."
            )
        inner = inner.optimizer
    return inner
