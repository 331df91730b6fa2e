"""A training in the open, for interventions to act on, and alerts to answer."""

from __future__ import annotations

import torch
from torch import nn

from hdi_callback import find_attention
from hdi_callback.monitoring.alerts import Alert, Finding


class Open:
    """A `Training` that remembers what was done to it."""

    def __init__(self, model: nn.Module, *optimizers: torch.optim.Optimizer, scale: float = 1.0) -> None:
        self.layers = {layer.name: layer for layer in find_attention(model)}
        self.optimizers = list(optimizers)
        self.scale, self.is_stopped, self.saved = scale, False, []

    def loss_scale(self, optimizer) -> float:
        return self.scale

    def stop(self) -> None:
        self.is_stopped = True

    def save_checkpoint(self, name: str) -> str:
        self.saved.append(name)
        return f"{name}.ckpt"


def alert(
    layer: str = "blocks.0.attn",
    *,
    step: int = 100,
    rule: str = "mean alignment",
    level: str = "warning",
    heads: tuple[int, ...] = (),
    is_resolved: bool = False,
) -> Alert:
    return Alert(step, layer, rule, level, "something happened", Finding("something", level, heads=heads), is_resolved)
