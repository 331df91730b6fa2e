"""Small causal language models and vision transformers that really learn, on real data, in seconds on one core."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

from examples.train_gpt import read_standard_library

LENGTH = 64


@dataclass(frozen=True)
class Shape:
    """What a model looks like."""

    task: Literal["text", "digits"] = "text"
    layers: int = 2
    heads: int = 4
    key_heads: int = 4
    width: int = 64
    norm: Literal["pre", "post"] = "pre"
    positions: Literal["learned", "rotary"] = "learned"


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.num_heads, self.num_key_value_heads = shape.heads, shape.key_heads
        self.is_causal, self.is_rotary = shape.task == "text", shape.positions == "rotary"
        width, head = shape.width, shape.width // shape.heads
        self.q_proj = nn.Linear(width, width, bias=False)
        self.k_proj = nn.Linear(width, shape.key_heads * head, bias=False)
        self.v_proj = nn.Linear(width, shape.key_heads * head, bias=False)
        self.out_proj = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q_proj(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        k = self.k_proj(x).unflatten(-1, (self.num_key_value_heads, -1)).transpose(1, 2)
        v = self.v_proj(x).unflatten(-1, (self.num_key_value_heads, -1)).transpose(1, 2)
        if self.is_rotary:
            q, k = rotate(q), rotate(k)
        groups = self.num_heads // self.num_key_value_heads
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=self.is_causal)
        return self.out_proj(heads.transpose(1, 2).flatten(2))


def rotate(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    rates = 100.0 ** (-torch.arange(half) / half)
    angles = torch.arange(x.shape[-2])[:, None] * rates
    left, right = x[..., :half], x[..., half:]
    return torch.cat([left * angles.cos() - right * angles.sin(), left * angles.sin() + right * angles.cos()], -1)


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.is_pre = shape.norm == "pre"
        self.norm_attention, self.norm_mlp = nn.LayerNorm(shape.width), nn.LayerNorm(shape.width)
        self.attention = Attention(shape)
        self.mlp = nn.Sequential(
            nn.Linear(shape.width, 4 * shape.width), nn.GELU(), nn.Linear(4 * shape.width, shape.width)
        )

    def forward(self, x: Tensor) -> Tensor:
        if self.is_pre:
            x = x + self.attention(self.norm_attention(x))
            return x + self.mlp(self.norm_mlp(x))
        x = self.norm_attention(x + self.attention(x))
        return self.norm_mlp(x + self.mlp(x))


class Model(nn.Module):
    """Embeddings, blocks and a linear layer: over the bytes of a text, or over the patches of an image."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.task = shape.task
        is_text = shape.task == "text"
        self.embed: nn.Module = nn.Embedding(256, shape.width) if is_text else nn.Linear(4, shape.width)
        places = LENGTH if is_text else 16
        self.places = nn.Parameter(0.02 * torch.randn(places, shape.width)) if shape.positions == "learned" else None
        self.blocks = nn.Sequential(*(Block(shape) for _ in range(shape.layers)))
        self.norm, self.head = nn.LayerNorm(shape.width), nn.Linear(shape.width, 256 if is_text else 10, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02 if is_text else shape.width**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        x = x if self.places is None else x + self.places[: x.shape[1]]
        x = self.norm(self.blocks(x))
        return self.head(x if self.task == "text" else x.mean(1))

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self(x).flatten(0, -2), y.flatten())


class Data:
    """Batches of a task, drawn by a generator of their own, and a fixed validation set."""

    def __init__(self, task: Literal["text", "digits"], seed: int, batch: int) -> None:
        self.task, self.batch = task, batch
        self.generator = torch.Generator().manual_seed(seed)
        self.train, self.validation = _read(task)

    def draw(self) -> tuple[Tensor, Tensor]:
        if self.task == "text":
            starts = torch.randint(len(self.train) - LENGTH - 1, (self.batch,), generator=self.generator)
            return _windows(self.train, starts)
        x, y = self.train
        chosen = torch.randint(len(x), (4 * self.batch,), generator=self.generator)
        return x[chosen], y[chosen]

    def validate(self, model: Model) -> float:
        with torch.no_grad():
            if self.task == "text":
                starts = torch.arange(200) * ((len(self.validation) - LENGTH - 1) // 200)
                return float(model.loss(*_windows(self.validation, starts)))
            return float(model.loss(*self.validation))


def _windows(text: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
    tokens = text[starts[:, None] + torch.arange(LENGTH + 1)].long()
    return tokens[:, :-1], tokens[:, 1:]


@cache
def _read(task: str):
    if task == "text":
        return read_standard_library()
    images, labels = load_digits(return_X_y=True)
    x = torch.tensor(images, dtype=torch.float32).view(-1, 4, 2, 4, 2).permute(0, 1, 3, 2, 4).reshape(-1, 16, 4) / 8 - 1
    y = torch.tensor(labels)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    train, validation = order[:1400], order[1400:]
    return (x[train], y[train]), (x[validation], y[validation])
