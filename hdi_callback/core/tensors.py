"""What the functions of this room take: real tensors of floating point numbers, and where the host may read them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from hdi_callback.errors import ShapeError


def require_tensors(least: int = 0, **given: Any) -> None:
    """Refuse what is no tensor of real floating point numbers, or has too few dimensions.

    Args:
        least: the smallest number of dimensions.
        given: argument -> what came.

    Raises:
        ShapeError: for the first that cannot be computed with; says what came.

    Example:
        >>> require_tensors(weight=[1.0])
        Traceback (most recent call last):
        hdi_callback.errors.ShapeError: `weight` must be a tensor, got a list: write torch.as_tensor(...).
    """
    for name, value in given.items():
        if not isinstance(value, Tensor):
            raise ShapeError(f"`{name}` must be a tensor, got a {type(value).__name__}: write torch.as_tensor(...).")
        if not value.is_floating_point():
            raise ShapeError(
                f"`{name}` must hold real floating point numbers, got {str(value.dtype).removeprefix('torch.')}: write "
                f"{name}.float()."
            )
        if value.dim() < least:
            raise ShapeError(f"`{name}` must have at least {least} dimensions, got the shape {tuple(value.shape)}.")


def may_decide_on_host(weight: Tensor) -> bool:
    """Tell whether the host may read what float32 gives, and take another way where that is not exact enough.

    Args:
        weight: of which something is computed.

    Returns:
        True where that waits for no device, and the result is to be float32.
    """
    return weight.device.type == "cpu" and weight.dtype != torch.float64 and type(weight) in (Tensor, Parameter)
