"""A second round of public reports: what `check` told of them, questions and all, before any was tried.

As in `untried`, a report keeps its first result for good.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.checks.corpus import VOCABULARY, Attention, D, Full, H, causal
from tests.checks.untried import Decoder, Report


class BlockSummaries(Attention):
    """Keys and values of a token get the mean of its block of four, which later tokens are part of."""

    leaks = True

    def place(self, q, k, v):
        blocks = torch.arange(q.shape[2]) // 4
        same = blocks[:, None] == blocks
        share = (same if self.leaks else same.tril()).float()
        share = share / share.sum(1, keepdim=True)
        return q, k + share @ k, v + share @ v


class RunningSummaries(BlockSummaries):
    leaks = False


class ShiftedGroups(Attention):
    """Half of the heads attend in groups that are shifted by half a group, around the end of the sequence."""

    wraps, group = True, 5

    def mask(self, scores, padding):
        count = scores.shape[-1]
        at = torch.arange(count)
        seen = (at[:, None] // self.group == at // self.group) & causal(scores)
        moved = (at - self.group // 2) % count
        shifted = (moved[:, None] // self.group == moved // self.group) & (moved[:, None] >= moved)
        seen = torch.stack([seen, seen, shifted if self.wraps else shifted & causal(scores), shifted & causal(scores)])
        return scores.masked_fill(~seen, -math.inf)


class ShiftedGroupsCut(ShiftedGroups):
    wraps = False


class OneKeyHead(Attention):
    key_heads = 1

    def forward(self, x, padding=None):
        q, k, v = self.project(x)
        return self.out_proj(
            self.merge(F.scaled_dot_product_attention(q, self.expand(k), self.expand(v), is_causal=True))
        )


class TokensRepeated(OneKeyHead):
    def expand(self, k):
        return k.repeat_interleave(self.heads, 2)


class GroupedByBroadcast(Attention):
    key_heads = 2

    def forward(self, x, padding=None):
        q, k, v = self.project(x)
        scores = torch.einsum("bghqd,bgkd->bghqk", q.unflatten(1, (2, -1)), k) / math.sqrt(self.d)
        weights = scores.masked_fill(~causal(scores), -math.inf).softmax(-1)
        return self.out_proj(self.merge(torch.einsum("bghqk,bgkd->bghqd", weights, v).flatten(1, 2)))


class QueriesSummedOverGroups(GroupedByBroadcast):
    """An einsum drops the group of a query: queries that share keys are added up, and share their output."""

    def forward(self, x, padding=None):
        q, k, v = self.project(x)
        scores = torch.einsum("bghqd,bgkd->bgqk", q.unflatten(1, (2, -1)), k) / math.sqrt(self.d)
        weights = scores.masked_fill(~causal(scores), -math.inf).softmax(-1)
        return self.out_proj(self.merge((weights @ v).repeat_interleave(2, 1)))


class Pair(nn.Module):
    """An encoder and a decoder with cross-attention, given a source and a target."""

    def __init__(self, _: object) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(VOCABULARY, D), nn.Embedding(VOCABULARY, D)
        self.places, self.head = nn.Embedding(32, D), nn.Linear(D, VOCABULARY)
        self.encoder, self.decoder, self.cross = Full(), Attention(), CrossAttention()
        self.norms = nn.ModuleList(nn.LayerNorm(D) for _ in range(4))

    def forward(self, source: Tensor, tokens: Tensor) -> Tensor:
        at = torch.arange(tokens.shape[1])
        memory, x = self.source(source) + self.places(at), self.target(tokens) + self.places(at)
        memory = memory + self.encoder(self.norms[0](memory))
        x = x + self.decoder(self.norms[1](x))
        return self.head(x + self.attend(self.norms[2](x), self.norms[3](memory)))

    def attend(self, x, memory):
        return self.cross(x, memory)


class CrossAttention(Full):
    def forward(self, x, memory):
        q = self.split(self.q_proj(x), self.heads)
        k, v = self.split(self.k_proj(memory), self.heads), self.split(self.v_proj(memory), self.heads)
        return self.out_proj(self.merge(self.score(q, k).softmax(-1) @ v))


class QueriesOfTheEncoder(Pair):
    def attend(self, x, memory):
        return self.cross(memory, x)


class MemoryIgnored(Pair):
    def attend(self, x, memory):
        return self.cross(x, x)


class NormOfEach(Full):
    """Two streams of tokens in one attention, as in a model of text and images: each with norms of its own."""

    def __init__(self):
        super().__init__()
        names = ("q", "k", "added_q", "added_k")
        self.norms = nn.ModuleDict({name: nn.LayerNorm(self.d) for name in names})
        for norm in self.norms.values():
            nn.init.normal_(norm.weight, 1, 0.2)

    key_norm = "added_k"

    def forward(self, x, padding=None):
        half = x.shape[1] // 2
        q, k, v = self.project(x)
        q = torch.cat([self.norms["q"](q[:, :, :half]), self.norms["added_q"](q[:, :, half:])], 2)
        k = torch.cat([self.norms["k"](k[:, :, :half]), self.norms[self.key_norm](k[:, :, half:])], 2)
        return self.out_proj(self.merge(F.scaled_dot_product_attention(q, k, v)))


class NormOfQueriesForKeys(NormOfEach):
    key_norm = "added_q"


class Decoupled(Full):
    """Attention to the text, plus attention of the same queries to features of an image."""

    def __init__(self):
        super().__init__()
        self.image_k, self.image_v = nn.Linear(D, D, bias=False), nn.Linear(D, D, bias=False)

    def forward(self, x, padding=None):
        q, k, v = self.project(x)
        image = x.roll(1, 1)
        pair = self.split(self.image_k(image), H), self.split(self.image_v(image), H)
        return self.out_proj(self.merge(F.scaled_dot_product_attention(q, k, v) + self.second(q, (k, v), pair)))

    def second(self, q, pair, image_pair):
        return F.scaled_dot_product_attention(q, *image_pair)


class TextForImage(Decoupled):
    def second(self, q, pair, image_pair):
        return F.scaled_dot_product_attention(q, *pair)


class OnePlaceForAll(Decoder):
    def place(self, position_ids):
        return self.places(position_ids[:, -1:])


class FeedForward(Decoder):
    """Post-norm blocks with a feed-forward part."""

    def __init__(self, kind: Any) -> None:
        super().__init__(kind)
        for block in self.blocks:
            block["mlp"] = nn.Sequential(nn.Linear(D, 4 * D), nn.GELU(), nn.Linear(4 * D, D))
            block["norm2"] = nn.LayerNorm(D)

    def forward(self, tokens, padding_mask=None, labels=None, position_ids=None):
        x = self.embed(tokens) + self.place(torch.arange(tokens.shape[1])[None])
        for block in self.blocks:
            y = block["norm"](x + block["attn"](x, padding_mask))
            x = block["norm2"](self.skipped(x, y) + block["mlp"](y))
        return self.head(x)

    def skipped(self, x, y):
        return y


class InputForAttention(FeedForward):
    def skipped(self, x, y):
        return x


class SoftmaxOverHeadsAndKeys(Full):
    """Weights are flattened over heads and places before the softmax."""

    def weigh(self, scores):
        return scores.transpose(1, 2).flatten(2).softmax(-1).view_as(scores.transpose(1, 2)).transpose(1, 2)


class DropsScores(Attention):
    def weigh(self, scores):
        return self.drop(scores).softmax(-1)


class Shifted(Full):
    """Windows of five tokens, shifted in every second layer; the shifted ones have a mask around the end."""

    masks_all, window, shift = False, 5, 0

    def forward(self, x, padding=None):
        count, shift = x.shape[1], self.shift
        q, k, v = (part.roll(-shift, 2).unflatten(2, (-1, self.window)) for part in self.project(x))
        ends = (torch.arange(count) >= count - 2).view(-1, self.window)
        seen = ends[:, :, None] == ends[:, None]
        scores = q @ k.mT / math.sqrt(self.d)
        if shift or self.masks_all:
            scores = scores.masked_fill(~seen, -100.0)
        return self.out_proj(self.merge((scores.softmax(-1) @ v).flatten(2, 3).roll(shift, 2)))


class ShiftedMaskedAlways(Shifted):
    masks_all = True


class Windows(Decoder):
    """A layer without a shift, and one with it."""

    def __init__(self, kind: Any) -> None:
        super().__init__(kind)
        self.blocks[1]["attn"].shift = 2


class HeadsRegistered(Attention):
    """One module for each head."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(D, 3 * self.d, bias=False) for _ in range(H))
        del self.q_proj, self.k_proj, self.v_proj

    def project(self, x):
        return torch.stack([part(x) for part in self.parts], 1).chunk(3, -1)


class HeadsInAList(HeadsRegistered):
    """Heads in a Python list, which registers none of them."""

    def __init__(self):
        super().__init__()
        parts = list(self.parts)
        del self.parts
        self.parts = parts


LATER = (
    Report("karpathy/nanochat 844", BlockSummaries, RunningSummaries, first=True),
    Report("JIA-Lab-research/LongLoRA 15", ShiftedGroups, ShiftedGroupsCut, first=True),
    Report("PrimeIntellect-ai/prime-rl 2681", TokensRepeated, OneKeyHead, first=True),
    Report("fkodom/grouped-query-attention-pytorch 5", QueriesSummedOverGroups, GroupedByBroadcast),
    Report("rexrex9/nlp_torchtext 2", Pair, Pair, "source", QueriesOfTheEncoder, Pair),
    Report("kyegomez/FlashMHA 3", Pair, Pair, "source", MemoryIgnored, Pair),
    Report("huggingface/diffusers 13533", NormOfQueriesForKeys, NormOfEach),
    Report("Francis-Rings/StableAnimator 111", TextForImage, Decoupled),
    Report("DiffPoseTalk/DiffPoseTalk 20", Full, Full, model=OnePlaceForAll, first=True),
    Report("strutive07/transformer-tensorflow2.0 14", Full, Full, model=InputForAttention, right=FeedForward),
    Report("facebookresearch/detr 247", SoftmaxOverHeadsAndKeys, Full),
    Report("PaddlePaddle/Parakeet 74", DropsScores, Attention),
    Report("JingyunLiang/SwinIR 153", ShiftedMaskedAlways, Shifted, model=Windows, right=Windows),
    Report("pytorch/pytorch 72580", HeadsInAList, HeadsRegistered),
)
