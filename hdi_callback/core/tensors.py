"""Checks of tensor arguments: real floating point numbers, dimensions, and whether the host may read their values."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from hdi_callback.errors import ShapeError


def require_tensors(least: int = 0, **given: Any) -> None:
    """Check that arguments are tensors of real floating point numbers with enough dimensions.

    Args:
        least: the smallest number of dimensions.
        given: argument -> its value.

    Raises:
        ShapeError: for the first argument that is not; the message says what was passed.

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
    """Return whether the host may inspect a float32 result, and choose another method where it is not exact enough.

    Args:
        weight: the argument of the computation.

    Returns:
        True if that waits for no device, and the result is to be float32.
    """
    return weight.device.type == "cpu" and weight.dtype != torch.float64 and type(weight) in (Tensor, Parameter)
