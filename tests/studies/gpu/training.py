"""A small language model that trains on a GPU, watched or not."""

from __future__ import annotations

import hashlib
import os
import sys
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from hdi_callback import RunHistory, load_history, watch_heads

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # deterministic products, read as CUDA begins

DEVICE = torch.device("cuda")
HEADS, LENGTH, VOCABULARY = 4, 64, 50


class Attention(nn.Module):
    """Causal attention with four projections, in one fused operation."""

    def __init__(self, head_dim: int, key_heads: int, dropout: float) -> None:
        super().__init__()
        width = HEADS * head_dim
        self.head_dim, self.dropout, self.is_grouped = head_dim, dropout, key_heads < HEADS
        self.query, self.mix = nn.Linear(width, width), nn.Linear(width, width)
        self.key, self.value = (nn.Linear(width, key_heads * head_dim) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            one(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for one in (self.query, self.key, self.value)
        )
        dropout = self.dropout if self.training else 0.0
        o = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True, enable_gqa=self.is_grouped)
        return self.mix(o.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, head_dim: int, key_heads: int, dropout: float) -> None:
        super().__init__()
        width = HEADS * head_dim
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.attention, self.drop = Attention(head_dim, key_heads, dropout), nn.Dropout(dropout)
        self.feed_forward = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.attention(self.norms[0](x)))
        return x + self.drop(self.feed_forward(self.norms[1](x)))


class Gpt(nn.Module):
    """Tokens to their loss."""

    def __init__(
        self,
        *,
        head_dim: int = 40,
        key_heads: int = HEADS,
        layers: int = 2,
        dropout: float = 0.1,
        checkpointed: bool = False,
    ) -> None:
        super().__init__()
        width = HEADS * head_dim
        self.embed, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList(Block(head_dim, key_heads, dropout) for _ in range(layers))
        self.head, self.checkpointed = nn.Linear(width, VOCABULARY), checkpointed

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.places.weight
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return F.cross_entropy(self.head(x[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())


KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}


def kernel(name: str | None) -> AbstractContextManager[Any]:
    """Let attention run by one kernel alone; by the one that torch takes if there is no name."""
    return nullcontext() if name is None else sdpa_kernel(KERNELS[name])


def batch(step: int, size: int = 8) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(VOCABULARY, (size, LENGTH), generator=generator).to(DEVICE)


@dataclass
class Outcome:
    """What must not depend on whether heads are watched, and what the watching has written."""

    losses: list[str] = field(default_factory=list)
    weights: str = ""
    random_states: tuple[str, ...] = ()
    history: RunHistory | None = field(default=None, compare=False)


def note(text: str) -> None:
    """Print what was measured; pytest shows it with -rA."""
    sys.stdout.write(f"{text}\n")


def bits(*tensors: Tensor) -> str:
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().cpu().flatten().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def random_states() -> tuple[str, ...]:
    on_device = [torch.cuda.get_rng_state()] if DEVICE.type == "cuda" else []
    return tuple(bits(state) for state in (torch.get_rng_state(), *on_device))


def train(
    folder: Path,
    *,
    is_watched: bool,
    precision: str = "32",
    kernel_name: str | None = None,
    compiled: str | None = None,
    steps: int = 6,
    **sizes: Any,
) -> Outcome:
    """Train a few steps; every second one is read."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Gpt(**sizes).to(DEVICE)
    called = model if compiled is None else torch.compile(model, backend=compiled)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler(DEVICE.type, enabled=precision == "fp16")
    cast = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(precision)
    outcome, losses = Outcome(), []
    heads: Any = watch_heads(called, optimizer, every_n_steps=2, log_dir=folder) if is_watched else nullcontext()
    with heads, kernel(kernel_name):
        for step in range(steps):
            with heads.step() if is_watched else nullcontext():
                with torch.autocast(DEVICE.type, dtype=cast, enabled=cast is not None):
                    loss = called(batch(step))
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                losses.append(loss.detach())
    outcome.losses = [bits(loss) for loss in losses]
    outcome.weights = bits(*model.state_dict().values())
    outcome.random_states = random_states()
    if is_watched:
        outcome.history = load_history(heads.history_path)
    return outcome
