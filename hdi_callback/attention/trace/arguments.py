"""Arguments of a forward with other tensors in the place of theirs, apart from the user's."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


def with_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Copy containers and objects, and replace the tensors that they hold.

    Args:
        value: of an argument.
        change: gives the tensor that takes the place of another.

    Returns:
        The same with other tensors; a cache of keys and values is left out, as it would be written to.
    """
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(with_tensors(item, change) for item in value))
    if type(value) in (tuple, list):
        return type(value)(with_tensors(item, change) for item in value)
    if type(value) is dict:
        return {name: with_tensors(item, change) for name, item in value.items()}
    is_plain = value is None or isinstance(value, (bool, int, float, str, bytes, type, torch.dtype, torch.device))
    if is_plain or isinstance(value, (nn.Module, types.ModuleType, types.FunctionType)):
        return value
    if "cache" in type(value).__name__.lower():
        return None
    other = copy.copy(value)
    if isinstance(other, dict):
        for name in list(other):
            dict.__setitem__(other, name, with_tensors(value[name], change))
    if hasattr(other, "__dict__"):
        vars(other).update({name: with_tensors(item, change) for name, item in vars(value).items()})
    return other
