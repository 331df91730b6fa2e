"""A decoder of any size, and a step of its training."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY = 256  # cut: the output layer of 50,257 tokens would hide what a reading costs


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.is_causal = heads, True
        self.qkv, self.mix = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (one.unflatten(-1, (self.heads, -1)).transpose(1, 2) for one in self.qkv(x).chunk(3, -1))
        return self.mix(F.scaled_dot_product_attention(q, k, v, is_causal=self.is_causal).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm, self.norm_after, self.attention = nn.LayerNorm(width), nn.LayerNorm(width), Attention(width, heads)
        self.feed_forward = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.feed_forward(self.norm_after(x))


class GPT(nn.Module):
    """Tokens to their loss."""

    def __init__(self, layers: int, width: int, heads: int, length: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.norm(self.blocks(self.tokens(tokens) + self.places.weight))
        return F.cross_entropy(self.head(x)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


class Training:
    """Steps of one model, under `watch_heads` or not."""

    def __init__(self, sizes: tuple[int, int, int, int], batch: int, device: str, dtype: torch.dtype | None) -> None:
        torch.manual_seed(0)
        self.model = GPT(*sizes).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.batch = torch.randint(VOCABULARY, (batch, sizes[-1]), device=device)
        self.heads: Any = None
        self._cast = torch.autocast(device, dtype=dtype) if dtype is not None else nullcontext()

    def step(self) -> None:
        with self.heads.step() if self.heads is not None else nullcontext():
            with self._cast:
                loss = self.model(self.batch)
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
