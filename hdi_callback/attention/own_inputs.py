"""Inputs that a model brings itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["own_forward"]


def own_forward(model: nn.Module) -> Callable[[], object] | None:
    """Give a forward on inputs that a model brings itself; `None` if it brings none.

    They are Lightning's ``example_input_array``, ``dummy_inputs`` of transformers and ``input_size`` of timm.
    """  # noqa: DOC201
    return _of_lightning(model) or _of_transformers(model) or _of_timm(model)


def _of_lightning(model: Any) -> Callable[[], object] | None:
    given = getattr(model, "example_input_array", None)
    if given is None:
        return None
    given = _moved(given, model)
    if isinstance(given, dict):
        return lambda: model(**given)
    return (lambda: model(*given)) if isinstance(given, tuple) else lambda: model(given)


def _of_transformers(model: Any) -> Callable[[], object] | None:
    if getattr(model, "main_input_name", None) is None:
        return None
    try:
        given = _moved(dict(model.dummy_inputs), model)
    except Exception:  # properties of some models ask for what is not there
        return None
    return lambda: model(**given)


def _of_timm(model: Any) -> Callable[[], object] | None:
    size = (
        (getattr(model, "pretrained_cfg", None) or {}).get("input_size") if hasattr(model, "pretrained_cfg") else None
    )
    if size is None:
        return None
    given = _moved(torch.zeros(2, *size), model)
    return lambda: model(given)


def _moved(given: Any, model: nn.Module) -> Any:
    """Put inputs where the model is, in its precision."""
    first = next(model.parameters(), None)
    if isinstance(given, Tensor) and first is not None:
        return given.to(first.device, first.dtype if given.is_floating_point() else None)
    if isinstance(given, dict):
        return {name: _moved(one, model) for name, one in given.items()}
    return tuple(_moved(one, model) for one in given) if isinstance(given, (list, tuple)) else given
