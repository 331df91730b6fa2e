"""Ways in which heads collapse, each a force on the weights of one layer after every optimizer step, or on the loss."""

from __future__ import annotations

import torch
from torch import Tensor

from hdi_callback.attention import AttentionLayer, Role
from hdi_callback.core import diversity_penalty

KINDS = (
    "all heads, fast",
    "all heads, slow",
    "Q, K, V and O together",
    "keys only",
    "one pair",
    "shared direction",
    "tied initialisation",
    "rewarded alignment",
    "high learning rate",
    "falling rank",
)

# Share of the way to its goal that a weight goes at each step.
_RATES = {
    "all heads, fast": 0.05,
    "all heads, slow": 0.012,
    "Q, K, V and O together": 0.025,
    "keys only": 0.025,
    "one pair": 0.025,
    "falling rank": 0.025,
}


class Force:
    """Makes one layer collapse from a step on.

    Args:
        kind: one of `KINDS`, or ``"healthy"``.
        layer: the layer.
        start: first step at which it acts.
        seed: of what it draws.
    """

    def __init__(self, kind: str, layer: AttentionLayer, start: int, seed: int) -> None:
        self.kind, self.layer, self.start = kind, layer, start
        self.generator = torch.Generator().manual_seed(seed)
        self.pair = torch.randperm(layer.num_key_heads, generator=self.generator)[:2].tolist()
        width = layer.weight("key").shape[-1]
        self.direction = torch.nn.functional.normalize(torch.randn(width, generator=self.generator), dim=0)
        self.goal: Tensor | None = None

    @torch.no_grad()
    def before_training(self) -> None:
        if self.kind == "tied initialisation":
            for role in ("query", "key", "value"):
                weight = self.layer.weight(role)
                weight[:] = weight[:1].clone()

    def on_loss(self, loss: Tensor, step: int) -> Tensor:
        if self.kind == "rewarded alignment" and step >= self.start:
            return loss - 3 * diversity_penalty(self.layer.weight("key"))
        return loss

    @torch.no_grad()
    def after_step(self, step: int) -> None:
        if step < self.start:
            return
        rate = _RATES.get(self.kind)
        if self.kind in ("all heads, fast", "all heads, slow"):
            self._pull_together(("query", "key"), rate)
        elif self.kind == "Q, K, V and O together":
            self._pull_together(("query", "key", "value", "output"), rate)
        elif self.kind == "keys only":
            self._pull_together(("key",), rate)
        elif self.kind == "one pair":
            first, second = self.pair
            for role in ("query", "key") if self.layer.num_heads == self.layer.num_key_heads else ("key",):
                weight = self.layer.weight(role)
                weight[second] += rate * (weight[first] - weight[second])
        elif self.kind == "shared direction":
            weight = self.layer.weight("key")
            size = torch.linalg.vector_norm(weight, dim=(-2, -1)).mean()
            along = weight @ self.direction  # (H, d_k)
            now = torch.linalg.vector_norm(along, dim=-1, keepdim=True).clamp_min(1e-12)
            wanted = (now * 1.03).clamp(min=0.05 * size, max=5 * size)
            weight += ((wanted / now - 1) * along)[..., None] * self.direction
        elif self.kind == "falling rank":
            weight = self.layer.weight("key")
            if self.goal is None:
                self.goal = torch.linalg.svd(weight, full_matrices=False)[2][:, :1]  # each head's own first direction
            kept = (weight @ self.goal.mT) @ self.goal
            weight += rate * (kept - weight)

    def _pull_together(self, roles: tuple[Role, ...], rate: float) -> None:
        for role in roles:
            weight = self.layer.weight(role)
            weight += rate * (weight.mean(0, keepdim=True) - weight)
