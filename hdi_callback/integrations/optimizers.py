"""The optimizer under what others put around it."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from hdi_callback.arguments import shown
from hdi_callback.errors import MisconfigurationError

_MOST_WRAPPERS = 10  # objects that have every attribute end nowhere


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
    for _ in range(_MOST_WRAPPERS):
        if isinstance(inner, Optimizer) and not hasattr(inner, "optimizer"):
            return inner
        if not hasattr(inner, "optimizer"):
            break
        inner = inner.optimizer
    raise MisconfigurationError(
        f"`optimizer` must be a torch optimizer, or a list of them, got {shown(optimizer)}: write "
        "torch.optim.AdamW(model.parameters()) or the like."
    )
