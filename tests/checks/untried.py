"""Public reports that nobody had tried before `check` asked its questions: what it told first is in `docs/check.md`.

Unlike the corpus, which is mended until all of it is named, a report here keeps its first result for good.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.checks.corpus import VOCABULARY, Attention, B, D, Full, H, T, causal, rotated


class Decoder(nn.Module):
    """Embedding with positions, two blocks of attention with a residual, and a head, with a loss where labels are."""

    def __init__(self, kind: Callable[[], nn.Module], is_positioned: bool = True) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, D), nn.Linear(D, VOCABULARY)
        self.places = nn.Embedding(2 * T, D) if is_positioned else None
        self.blocks = nn.ModuleList(nn.ModuleDict({"norm": nn.LayerNorm(D), "attn": kind()}) for _ in range(2))

    def forward(
        self,
        tokens: Tensor,
        padding_mask: Tensor | None = None,
        labels: Tensor | None = None,
        position_ids: Tensor | None = None,
    ) -> Tensor:
        x = self.embed(tokens)
        if self.places is not None:
            x = x + self.place(torch.arange(tokens.shape[1])[None] if position_ids is None else position_ids)
        for block in self.blocks:
            x = x + block["attn"](block["norm"](x), padding_mask)
        logits = self.head(x)
        return logits if labels is None else F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())

    def place(self, position_ids: Tensor) -> Tensor:
        return self.places(position_ids)


class PositionsNotRead(Decoder):
    def place(self, position_ids):
        return self.places(torch.arange(position_ids.shape[-1]))[None]


class BatchForHeads(Attention):
    def merge(self, heads):
        b, h, n, d = heads.shape
        return heads.flatten(0, 1).view(h, b, n, d).permute(1, 2, 0, 3).reshape(b, n, h * d)


class HeadsFirstMerged(Attention):
    def merge(self, heads):
        return heads.transpose(0, 1).reshape(len(heads), heads.shape[2], -1)


class SequenceFirst(nn.Module):
    """torch's attention with the sequence first, given a batch that comes first."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(D, H)

    def turn(self, x):
        return x.transpose(0, 1)

    def forward(self, x, padding=None):
        y = self.turn(x)
        return self.attention(y, y, y, need_weights=False)[0].view(y.shape).transpose(0, 1).reshape(x.shape)


class ViewedForTransposed(SequenceFirst):
    def forward(self, x, padding=None):
        y = x.reshape(x.shape[1], x.shape[0], -1)
        return self.attention(y, y, y, need_weights=False)[0].reshape(x.shape)


class LeftInPlace(SequenceFirst):
    def forward(self, x, padding=None):
        return self.attention(x, x, x, need_weights=False)[0]


class HiddenByNumbers(Attention):
    """A query that is padding sees all tokens alike, and none is NaN."""

    def mask(self, scores, padding):
        scores = scores.masked_fill(~causal(scores), -1e9)
        return scores if padding is None else scores.masked_fill(padding[:, None, None], -1e9)


class PaddingNotPassed(HiddenByNumbers):
    def mask(self, scores, padding):
        return super().mask(scores, None)


class PaddingOfQueries(Attention):
    def mask(self, scores, padding):
        scores = super().mask(scores, None)
        return scores if padding is None else scores.masked_fill(padding[:, None, :, None], -math.inf)


class Window(Attention):
    sliding_window = 3

    def mask(self, scores, padding):
        seen = causal(scores) & ~causal(scores, -self.sliding_window)
        return scores.masked_fill(~seen, -math.inf)


class WindowOneTooMany(Window):
    def mask(self, scores, padding):
        seen = causal(scores) & ~causal(scores, -self.sliding_window - 1)
        return scores.masked_fill(~seen, -math.inf)


class WindowNegative(Window):
    def mask(self, scores, padding):
        return Attention.mask(self, scores, None)


class SoftmaxOverBatch(Full):
    def weigh(self, scores):
        return scores.flatten(0, 1).softmax(0).view(scores.shape)


class ShownForHidden(Attention):
    hides = True

    def forward(self, x, padding=None):
        q, k, v = self.project(x)
        hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        shown = ~hidden if self.hides else hidden
        return self.out_proj(self.merge(F.scaled_dot_product_attention(q, k, v, attn_mask=shown)))


class ShownForHiddenBad(ShownForHidden):
    hides = False


class ScaledByWidth(Full):
    def score(self, q, k):
        return q @ k.mT / math.sqrt(self.d * self.heads)


class RotatedByOwnLength(Attention):
    """Keys are turned from where the sequence starts, and queries as if it were the end of it."""

    def place(self, q, k, v):
        return rotated(q, q.shape[-2]), rotated(k), v


class RotatedAlike(Attention):
    rotary = True


@dataclass(frozen=True)
class Report:
    """A bug and its right twin, as a public report has it."""

    source: str
    kind: Callable[[], nn.Module]
    twin: Callable[[], nn.Module]
    batch: str = ""  # "padded left", "padded right", "labels", "positions", "documents" or "source"
    model: Callable[..., nn.Module] = Decoder
    right: Callable[..., nn.Module] = Decoder
    first: bool = False  # whether it was told before any question was asked

    def build(self, is_twin: bool = False) -> nn.Module:
        torch.manual_seed(0)
        return (self.right if is_twin else self.model)(self.twin if is_twin else self.kind).eval()

    def inputs(self) -> dict[str, Tensor]:
        tokens = torch.randint(1, VOCABULARY, (B + 1, 2 * T - 2), generator=torch.Generator().manual_seed(1))
        given = {"tokens": tokens}
        padding = torch.zeros(tokens.shape, dtype=torch.bool)
        if self.batch == "padded left":
            padding[1, :3] = True
        if self.batch == "padded right":
            padding[1, -3:] = True
        if "padded" in self.batch:
            given |= {"tokens": tokens.masked_fill(padding, 0), "padding_mask": padding}
        if self.batch == "labels":
            given["labels"] = tokens
        if self.batch == "source":
            given["source"] = tokens.roll(3, 1)
        if self.batch == "positions":
            given["position_ids"] = torch.arange(2, tokens.shape[1] + 2).expand(tokens.shape)
        if self.batch == "documents":
            given["position_ids"] = (torch.arange(tokens.shape[1]) % 5).expand(tokens.shape)
        if self.batch == "lengths":
            given |= {"tokens": tokens[:1], "cu_seqlens": torch.tensor([0, 4, tokens.shape[1]])}
        if self.batch in {"prefill", "cache", "decode"}:
            seed, past = torch.Generator().manual_seed(2), 0 if self.batch == "prefill" else 2
            given["tokens"] = tokens[:, :1] if self.batch == "decode" else tokens
            given["cache"] = [torch.randn(2, len(tokens), H, past, D // H, generator=seed).unbind() for _ in range(2)]
        return given


REPORTS = (
    Report("gazelle93/Transformer-Various-Positional-Encoding 1", BatchForHeads, Attention),
    Report("meta-pytorch/opacus 825", HeadsFirstMerged, Attention, first=True),
    Report("rish-16/tokenlearner-pytorch 1", ViewedForTransposed, SequenceFirst),
    Report("IBM/TabFormer 14", LeftInPlace, SequenceFirst, first=True),
    Report("huggingface/transformers 48745", Full, Attention, "labels"),
    Report("ml-explore/mlx-lm 1906", PaddingNotPassed, HiddenByNumbers, "padded left"),
    Report("hyunwoongko/transformer 40", PaddingOfQueries, Attention, "padded right"),
    Report("huggingface/transformers 26792", WindowOneTooMany, Window),
    Report("proger/hippogriff 7", WindowNegative, Window),
    Report("PetrochukM/PyTorch-NLP 2", SoftmaxOverBatch, Full, first=True),
    Report("rasbt/LLMs-from-scratch 1062", ShownForHiddenBad, ShownForHidden, first=True),
    Report("juho-lee/set_transformer 18", ScaledByWidth, Full, first=True),
    Report("NVIDIA/Megatron-LM 453", Attention, Attention, "positions", PositionsNotRead),
    Report("sgl-project/SpecForge 414", RotatedByOwnLength, RotatedAlike),
)
