"""Models that the tests of audits name as ``tests.audits.models:...``."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Encoder(nn.Module):
    """Torch's own encoder, which needs no forward to be read."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), layers, enable_nested_tensor=False
        )
        for layer in self.encoder.layers:  # else all layers begin as copies of one
            nn.init.xavier_uniform_(layer.self_attn.in_proj_weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.encoder(x)


class Attention(nn.Module):
    """Four heads of eight, of layers of its own: `is_softmax=False` for sigmoid attention."""

    def __init__(self, is_softmax: bool = True) -> None:
        super().__init__()
        self.is_softmax = is_softmax
        self.query, self.key, self.value, self.out = (nn.Linear(32, 32) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (4, 8)).transpose(1, 2) for layer in (self.query, self.key, self.value))
        scores = q @ k.mT / 8**0.5
        weights = F.softmax(scores, -1) if self.is_softmax else torch.sigmoid(scores)
        return self.out((weights @ v).transpose(1, 2).flatten(-2))


class Blocks(nn.Module):
    """A stack of attention: one letter a layer, ``s`` for softmax and ``g`` for sigmoid."""

    def __init__(self, kinds: str = "ss") -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Attention(kind == "s") for kind in kinds)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def build_encoder() -> Encoder:
    torch.manual_seed(0)
    return Encoder(2)


def build_blocks() -> tuple[Blocks, Tensor]:
    torch.manual_seed(0)
    return Blocks("ss"), torch.randn(2, 5, 32)


def build_mixed() -> tuple[Blocks, Tensor]:
    torch.manual_seed(0)
    return Blocks("sg"), torch.randn(2, 5, 32)


def build_without_batch() -> Blocks:
    return Blocks("ss")


def build_without_attention() -> tuple[nn.Module, Tensor]:
    return nn.Linear(4, 4), torch.randn(2, 4)


def build_many() -> Encoder:
    torch.manual_seed(0)
    return Encoder(48)


def build_with_argument(size: int) -> Encoder:
    return Encoder(size)


NOT_A_MODEL = 3
BUILT = build_encoder()


def copy_head(weight: Tensor, source: int, target: int, width: int = 8) -> None:
    """Make one head's rows those of another."""
    with torch.no_grad():
        weight[target * width : (target + 1) * width] = weight[source * width : (source + 1) * width]
