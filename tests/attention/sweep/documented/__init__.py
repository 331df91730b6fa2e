"""Forwards as the documentation of a model shows them, where its inputs cannot be guessed from their names."""

from __future__ import annotations

from typing import Any

from torch import nn

from tests.attention.sweep.documented import audio, joint, text, vision
from tests.attention.sweep.documented.made import LENGTH

__all__ = ["LENGTH", "documented", "is_documented"]

_FORWARDS = vision.FORWARDS | audio.FORWARDS | text.FORWARDS | joint.FORWARDS


def is_documented(model: nn.Module) -> bool:
    """Tell models, and parts of models, whose inputs are known."""
    return type(model).__name__ in _FORWARDS


def documented(model: nn.Module, batch: int) -> dict[str, Any] | None:
    """Give the keyword arguments of a model by its class; `None` where they are guessed."""
    make = _FORWARDS.get(type(model).__name__)
    return None if make is None else make(model, batch)
