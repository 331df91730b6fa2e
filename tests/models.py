"""Small models and data that several rooms of tests share."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

WIDTH, HEADS, LENGTH, CLASSES = 32, 4, 12, 5


class Attention(nn.Module):
    """Attention with four projections of its own, as most of the world writes it."""

    def __init__(self, width: int = WIDTH, num_heads: int = HEADS, dropout: float = 0.0) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.dropout = dropout
        self.q_proj = nn.Linear(width, width)
        self.k_proj = nn.Linear(width, width)
        self.v_proj = nn.Linear(width, width)
        self.out_proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            proj(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)  # (B, H, T, d_k)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        out = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout if self.training else 0.0)
        return self.out_proj(out.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width: int = WIDTH, num_heads: int = HEADS, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attn = Attention(width, num_heads, dropout)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.attn(self.norm(x)))


class Classifier(nn.Module):
    """Two blocks over a short sequence of tokens, and a linear head on their mean."""

    def __init__(self, *, blocks: int = 2, dropout: float = 0.0, width: int = WIDTH, num_heads: int = HEADS) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, width)
        self.blocks = nn.Sequential(*(Block(width, num_heads, dropout) for _ in range(blocks)))
        self.head = nn.Linear(width, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.blocks(self.embed(tokens)).mean(1))


class Checkpointed(Classifier):
    """Recomputes its blocks in the backward."""

    def __init__(self, *, reentrant: bool = False, **options: Any) -> None:
        super().__init__(**options)
        self.reentrant = reentrant

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(x.mean(1))


LAYERS = ["blocks.0.attn", "blocks.1.attn"]
"""Names of the attention layers of `Classifier`."""


class LitClassifier(L.LightningModule):
    """`Classifier` under automatic optimization."""

    def __init__(self, dropout: float = 0.0, learning_rate: float = 0.01) -> None:
        super().__init__()
        self.net = Classifier(dropout=dropout)
        self.learning_rate = learning_rate
        self.losses: list[float] = []

    def training_step(self, batch, batch_idx):
        tokens, label = batch
        loss = F.cross_entropy(self.net(tokens), label)
        self.log("train_loss", loss)
        self.losses.append(float(loss.detach()))
        return loss

    def validation_step(self, batch, batch_idx):
        tokens, label = batch
        self.log("val_loss", F.cross_entropy(self.net(tokens), label))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.learning_rate)


LIT_LAYERS = [f"net.{name}" for name in LAYERS]
"""Names of the attention layers of `LitClassifier`."""


def tokens(batch: int = 6, seed: int = 0) -> Tensor:
    """Make tokens for a `Classifier`, the same for a seed."""
    return torch.randint(16, (batch, LENGTH), generator=torch.Generator().manual_seed(seed))


def batches(count: int = 16, size: int = 4) -> DataLoader:
    """The same `count` batches at every call."""
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(16, (count * size, LENGTH), generator=generator)
    return DataLoader(TensorDataset(tokens, tokens.sum(1) % CLASSES), batch_size=size)


def step(model: Classifier, optimizer: torch.optim.Optimizer, number: int) -> None:
    """Train on the batch of a number."""
    tokens = torch.randint(16, (4, LENGTH), generator=torch.Generator().manual_seed(number))
    F.cross_entropy(model(tokens), tokens.sum(1) % CLASSES).backward()
    optimizer.step()
    optimizer.zero_grad()
