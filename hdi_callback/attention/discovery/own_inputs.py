"""Inputs that a model brings itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["own_forward"]


def own_forward(model: nn.Module) -> Callable[[], object] | None:
    """Return a forward on inputs that a model brings itself, as Lightning, transformers and timm have; or `None`."""
    return _of_lightning(model) or _of_transformers(model) or _of_timm(model)


def _of_lightning(model: Any) -> Callable[[], object] | None:
    example = getattr(model, "example_input_array", None)
    if example is None:
        return None
    inputs = _moved(example, model)
    if isinstance(inputs, dict):
        return lambda: model(**inputs)
    return (lambda: model(*inputs)) if isinstance(inputs, tuple) else lambda: model(inputs)


def _of_transformers(model: Any) -> Callable[[], object] | None:
    if getattr(model, "main_input_name", None) is None:
        return None
    try:
        inputs = _moved(dict(model.dummy_inputs), model)
    except Exception:  # properties of some models ask for what is not there
        return None
    return lambda: model(**inputs)


def _of_timm(model: Any) -> Callable[[], object] | None:
    size = (getattr(model, "pretrained_cfg", None) or {}).get("input_size")
    if size is None:
        return None
    images = _moved(torch.zeros(2, *size), model)
    return lambda: model(images)


def _moved(inputs: Any, model: nn.Module) -> Any:
    """Return inputs on the model's device, in its precision."""
    first = next(model.parameters(), None)
    if isinstance(inputs, Tensor) and first is not None:
        return inputs.to(first.device, first.dtype if inputs.is_floating_point() else None)
    if isinstance(inputs, dict):
        return {name: _moved(value, model) for name, value in inputs.items()}
    return tuple(_moved(value, model) for value in inputs) if isinstance(inputs, (list, tuple)) else inputs
