"""A small real model, a training in the open for interventions to act on, and readings with alerts."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hdi_callback.attention.layer import AttentionLayer, HeadWeight
from hdi_callback.record import Alert, LayerRecord, Record
from tests.attention.models import blocks


class Attention(nn.Module):
    """Self-attention with grouped keys; `largest` holds the largest score of each head of the last forward."""

    def __init__(self, width: int = 64, heads: int = 4, keys: int = 4, *, bias: bool = False) -> None:
        super().__init__()
        self.heads, self.keys, self.head_dim = heads, keys, width // heads
        self.q_proj = nn.Linear(width, width, bias=bias)
        self.k_proj = nn.Linear(width, keys * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(width, keys * self.head_dim, bias=bias)
        self.out_proj = nn.Linear(width, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            project(x).unflatten(-1, (count, self.head_dim)).transpose(1, 2)
            for project, count in ((self.q_proj, self.heads), (self.k_proj, self.keys), (self.v_proj, self.keys))
        )
        k, v = (one.repeat_interleave(self.heads // self.keys, 1) for one in (k, v))
        scores = q @ k.mT / self.head_dim**0.5
        self.largest = scores.detach().amax((0, 2, 3))
        return self.out_proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))

    def layer(self, name: str) -> AttentionLayer:
        def rows(projection: str, count: int) -> HeadWeight:
            return blocks(self, f"{projection}.weight", heads=count, width=self.head_dim)

        weights = {
            "query": rows("q_proj", self.heads), "key": rows("k_proj", self.keys), "value": rows("v_proj", self.keys),
            "output": blocks(self, "out_proj.weight", heads=self.heads, width=self.head_dim, dim=1),
        }  # fmt: skip
        key_of = tuple(head * self.keys // self.heads for head in range(self.heads))
        return AttentionLayer(
            name, self, weights, key_of, value_of=key_of, value_dim=self.head_dim, kind="by hand",
            output_module=self.out_proj
        )  # fmt: skip


class Torch(nn.MultiheadAttention):
    """torch's own attention as self-attention."""

    def __init__(self, width: int = 32, heads: int = 4, *, bias: bool = False) -> None:
        super().__init__(width, heads, bias=bias, batch_first=True)

    def layer(self, name: str) -> AttentionLayer:
        weights = {
            role: blocks(self, "in_proj_weight", heads=self.num_heads, width=self.head_dim, start=start)
            for role, start in (("query", 0), ("key", self.embed_dim), ("value", 2 * self.embed_dim))
        }
        weights["output"] = blocks(self, "out_proj.weight", heads=self.num_heads, width=self.head_dim, dim=1)
        every = tuple(range(self.num_heads))
        return AttentionLayer(name, self, weights, every, value_of=every, value_dim=self.head_dim)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x, x, x, need_weights=False)[0]


class Model(nn.Module):
    """Two layers of attention that learn to tell sequences apart."""

    def __init__(self, make=Attention, *, depth: int = 2, **options) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(make(**options) for _ in range(depth))
        self.width = self.blocks[0].out_proj.out_features

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x

    def layers(self) -> dict[str, AttentionLayer]:
        return {f"blocks.{place}": block.layer(f"blocks.{place}") for place, block in enumerate(self.blocks)}

    def loss(self, seed: int) -> Tensor:
        draw = torch.Generator().manual_seed(seed)
        x = torch.randn(4, 9, self.width, generator=draw)
        return F.mse_loss(self(x), x.roll(1, 1))


class Open:
    """A training that remembers what was done to it."""

    def __init__(self, model: Model, *optimizers: torch.optim.Optimizer) -> None:
        self.trainer, self.layers, self.optimizers = self, model.layers(), list(optimizers)
        self.step = 0
        self.is_stopped, self.saved, self.expected = False, [], []

    def stop(self) -> None:
        self.is_stopped = True

    def save(self, name: str) -> str:
        self.saved.append(name)
        return f"{name}.ckpt"

    def expect_change(self, layer, heads, step, by) -> None:
        self.expected.append((layer, list(heads), step))


def alert(
    where="blocks.0",
    heads=(),
    *,
    rule="worst pair",
    also=(),
    level="warning",
    step=100,
    since=100,
    unit="heads",
    status="new",
):
    where = {where: tuple(heads)} if isinstance(where, str) else where
    return Alert(step, rule, level, where, "something happened", since=since, also=also, unit=unit, status=status)


def reading(*active: Alert, alerts=(), step: int = 100, logits=None) -> Record:
    layers = {name: LayerRecord(heads={"attention_logit": list(scores)}) for name, scores in (logits or {}).items()}
    return Record(step, layers, alerts=tuple(alerts), active=active)


def copy_head(layer: AttentionLayer, one: int, other: int, roles=("query", "key", "value")) -> None:
    """Make a key head, its value and its query heads equal to another's."""
    group = layer.num_heads // layer.num_key_heads
    with torch.no_grad():
        for role in roles:
            weight, size = layer.weight(role), group if role == "query" else 1
            weight[other * size : (other + 1) * size] = weight[one * size : (one + 1) * size]
