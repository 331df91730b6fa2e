"""A fourth round of public reports: caches, adapters, norms, masks and positions, as a search of issues gave them.

As in `untried`, a report keeps its first result for good.
"""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional as F

from tests.checks.corpus import Attention, D, Full, Fused, H, causal
from tests.checks.untried import Decoder, HiddenByNumbers, Report
from tests.checks.untried_later import CrossAttention, FeedForward, Pair


class MaskByElements(Full):
    """Heads lie ahead of samples, and masks are repeated sample by sample."""

    def forward(self, x, padding=None):
        q, k, v = (part.transpose(0, 1).flatten(0, 1) for part in self.project(x))
        scores = self.score(q, k).masked_fill(self.of_heads(padding)[:, None], -1e9)
        return self.out_proj((scores.softmax(-1) @ v).unflatten(0, (H, -1)).permute(1, 2, 0, 3).flatten(2))

    def of_heads(self, padding):
        return padding.repeat_interleave(H, 0)


class MaskTiled(MaskByElements):
    def of_heads(self, padding):
        return padding.repeat(H, 1)


class MaskOverKeyHeads(Attention):
    """Queries in groups, with a mask of samples that lacks the axis of groups: as many samples as key heads."""

    key_heads = 3
    heads = 6

    def __init__(self):
        super().__init__()
        self.d = 8
        self.q_proj, self.out_proj = nn.Linear(D, 48, bias=False), nn.Linear(48, D, bias=False)
        self.k_proj, self.v_proj = nn.Linear(D, 24, bias=False), nn.Linear(D, 24, bias=False)

    def forward(self, x, padding=None):
        q, k, v = self.project(x)
        scores = q.unflatten(1, (3, 2)) @ k.mT[:, :, None] / math.sqrt(8)
        hidden = ~causal(scores) | padding[:, None, None]
        scores = scores.masked_fill(self.of_groups(hidden), -1e9)
        return self.out_proj(self.merge((scores.softmax(-1) @ v[:, :, None]).flatten(1, 2)))

    def of_groups(self, hidden):
        return hidden


class MaskOfGroups(MaskOverKeyHeads):
    def of_groups(self, hidden):
        return hidden[:, :, None]


class Cached(Decoder):
    """A decoder that is given keys and values of earlier tokens, or an empty cache."""

    def forward(self, tokens, cache=()):
        past = cache[0][0].shape[2] if cache else 0
        x = self.embed(tokens) + self.places(torch.arange(past, past + tokens.shape[1]))
        for at, block in enumerate(self.blocks):
            x = x + block["attn"](block["norm"](x), cache[at] if cache else None)
        return self.head(x)


class OffsetMask(Attention):
    """Queries follow the tokens of the cache."""

    def forward(self, x, past=None):
        q, k, v = self.project(x)
        k, v = (k, v) if past is None else (torch.cat([old, new], 2) for old, new in zip(past, (k, v)))
        return self.out_proj(self.merge(self.mask(self.score(q, k), past).softmax(-1) @ v))

    def mask(self, scores, past):
        return scores.masked_fill(~causal(scores, scores.shape[-1] - scores.shape[-2]), -math.inf)


class NoMaskBesideACache(OffsetMask):
    def mask(self, scores, past):
        return super().mask(scores, past) if past is None else scores


class MaskAtTheTopLeft(OffsetMask):
    def mask(self, scores, past):
        return scores.masked_fill(~causal(scores), -math.inf)


class SlopesOfKeys(OffsetMask):
    """ALiBi for all keys, those of the cache too."""

    def mask(self, scores, past):
        slopes = 0.5 ** torch.arange(1, H + 1)
        return super().mask(scores + slopes[:, None, None] * self.at(*scores.shape[-2:]), past)

    def at(self, queries, keys):
        return torch.arange(keys) - torch.arange(keys - queries, keys)[:, None]


class SlopesOfQueries(SlopesOfKeys):
    """The bias is built over the queries, of which there is one, and so is 0 for all keys."""

    def at(self, queries, keys):
        return torch.zeros(1, 1) if queries == 1 else super().at(queries, keys)


class KeepsItsCache(Attention):
    """The cache of the sequence before is not reset."""

    resets, past = False, None

    def place(self, q, k, v):
        old, self.past = None if self.resets else self.past, (k.detach(), v.detach())
        return (q, *((k, v) if old is None else (torch.cat(pair, 2) for pair in zip(old, (k, v)))))

    def mask(self, scores, padding):
        return scores.masked_fill(~causal(scores, scores.shape[-1] - scores.shape[-2]), -math.inf)


class ResetsItsCache(KeepsItsCache):
    resets = True


class ProjectionNotReturned(Attention):
    def forward(self, x, padding=None):
        q, k, v = self.project(x)
        output = self.merge(self.weigh(self.mask(self.score(q, k), padding)) @ v)
        self.out_proj(output)
        return output


class AdaptedByHead(Fused):
    """Low-rank matrices of queries and values, for a map whose rows are queries, keys and values of each head."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(D, 4, bias=False), nn.Linear(4, 2 * D, bias=False)

    def project(self, x):
        whole = self.qkv(x) + self.spread(self.b(self.a(x)))
        return whole.unflatten(2, (H, 3, self.d)).permute(3, 0, 2, 1, 4)

    def spread(self, added):
        q, v = (part.unflatten(2, (H, self.d)) for part in added.chunk(2, -1))
        return torch.stack([q, torch.zeros_like(q), v], 3).flatten(2)


class AdaptedInARow(AdaptedByHead):
    def spread(self, added):
        q, v = added.chunk(2, -1)
        return torch.cat([q, torch.zeros_like(q), v], -1)


class OutputAdapted(Attention):
    """What an adapter of the output projection adds is added to the weight for the call."""

    times = 1

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(4, D) / 8), nn.Parameter(torch.randn(D, 4) / 8)
        self.out_proj.requires_grad_(False)

    def forward(self, x, padding=None):
        q, k, v = self.project(x)
        output = self.merge(self.weigh(self.mask(self.score(q, k), padding)) @ v)
        return F.linear(output, self.out_proj.weight + self.times * (self.b @ self.a))


class OutputAdaptedTwice(OutputAdapted):
    times = 2


class OneNormForBoth(FeedForward):
    """Pre-norm blocks; attention and the feed-forward part share a norm."""

    norm = "norm"

    def __init__(self, kind):
        super().__init__(kind)
        for block in self.blocks if self.norm == "norm" else ():
            del block["norm2"]

    def forward(self, tokens, padding_mask=None, labels=None, position_ids=None):
        x = self.embed(tokens) + self.place(torch.arange(tokens.shape[1])[None])
        for block in self.blocks:
            x = x + block["attn"](block["norm"](x), padding_mask)
            x = x + block["mlp"](block[self.norm](x))
        return self.head(x)


class NormForEach(OneNormForBoth):
    norm = "norm2"


class WindowOpenToTheRight(Attention):
    sliding_window, ends = 3, False

    def mask(self, scores, padding):
        seen = ~causal(scores, -self.sliding_window)
        return scores.masked_fill(~(seen & causal(scores) if self.ends else seen), -math.inf)


class WindowClosed(WindowOpenToTheRight):
    ends = True


class NormScalesUnused(Attention):
    """Norms of queries and keys, with factors for each head that are made and not used."""

    def __init__(self):
        super().__init__()
        self.q_scale, self.k_scale = (nn.Parameter(1 + torch.rand(H, 1, self.d)) for _ in range(2))

    def place(self, q, k, v):
        return F.normalize(q, dim=-1), F.normalize(k, dim=-1), v


class NormScalesUsed(NormScalesUnused):
    def place(self, q, k, v):
        q, k, _ = super().place(q, k, v)
        return q * self.q_scale, k * self.k_scale, v


class MaskOfTheSource(CrossAttention):
    def forward(self, x, memory, padding=None):
        q = self.split(self.q_proj(x), self.heads)
        k, v = self.split(self.k_proj(memory), self.heads), self.split(self.v_proj(memory), self.heads)
        scores = self.score(q, k)
        scores = scores if padding is None else scores.masked_fill(padding[:, None, None], -1e9)
        return self.out_proj(self.merge(scores.softmax(-1) @ v))


class SourcePadded(Pair):
    """The mask of the source goes to the encoder and to the cross-attention."""

    passes = True

    def __init__(self, kind):
        super().__init__(kind)
        self.cross = MaskOfTheSource()

    def forward(self, tokens, padding_mask):
        source, tokens = tokens, tokens.roll(3, 1).clamp(min=1)
        at = torch.arange(tokens.shape[1])
        memory, x = self.source(source) + self.places(at), self.target(tokens) + self.places(at)
        memory = memory + self.encoder(self.norms[0](memory), padding_mask)
        x = x + self.decoder(self.norms[1](x))
        shown = padding_mask if self.passes else None
        return self.head(x + self.cross(self.norms[2](x), self.norms[3](memory), shown))


class MaskDiscarded(SourcePadded):
    passes = False


class LengthsUsed(Decoder):
    """Documents in a row, with the places where they end."""

    uses = True

    def forward(self, tokens, cu_seqlens):
        number = torch.bucketize(torch.arange(tokens.shape[1]), cu_seqlens[1:], right=True)
        others = (number[:, None] != number)[None] if self.uses else None
        x = self.embed(tokens) + self.places(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = x + block["attn"](block["norm"](x), others)
        return self.head(x)


class LengthsDropped(LengthsUsed):
    uses = False


class HidesOthers(Attention):
    def mask(self, scores, others):
        scores = super().mask(scores, None)
        return scores if others is None else scores.masked_fill(others, -math.inf)


class PlacesFromTheLeft(Decoder):
    """Positions are counted from the first column, padding or not."""

    def forward(self, tokens, padding_mask=None):
        x = self.embed(tokens) + self.places(self.count(padding_mask))
        for block in self.blocks:
            x = x + block["attn"](block["norm"](x), padding_mask)
        return self.head(x)

    def count(self, padding_mask):
        return torch.arange(padding_mask.shape[1])


class PlacesOfTokens(PlacesFromTheLeft):
    def count(self, padding_mask):
        return ((~padding_mask).cumsum(1) - 1).clamp(min=0)


class DividesByTheInverse(nn.Module):
    """A norm by the root of the mean square that divides by its inverse."""

    power = 1

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(D))

    def forward(self, x):
        return x * x.pow(2).mean(-1, keepdim=True).add(1e-6).rsqrt() ** -self.power * self.weight


class MultipliesByTheInverse(DividesByTheInverse):
    power = -1


class NormInverted(Decoder):
    norm = DividesByTheInverse

    def __init__(self, kind):
        super().__init__(kind)
        for block in self.blocks:
            block["norm"] = self.norm()


class NormRight(NormInverted):
    norm = MultipliesByTheInverse


class DisentangledRight(Full):
    """Scores of content and content, content and place, and place and content."""

    sign = 1

    def __init__(self):
        super().__init__()
        self.places, self.pk, self.pq = nn.Embedding(64, D), nn.Linear(D, D), nn.Linear(D, D)

    def score(self, q, k):
        at = torch.arange(q.shape[2])
        table = self.places.weight[None]
        pk, pq = self.split(self.pk(table), H), self.split(self.pq(table), H)
        to_place = (q @ pk.mT).gather(-1, (at[:, None] - at + 32).expand(len(q), H, -1, -1))
        of_place = (k @ pq.mT).gather(-1, (self.sign * (at[:, None] - at) + 32).expand(len(q), H, -1, -1)).mT
        return (q @ k.mT + to_place + of_place) / math.sqrt(3 * self.d)


class PlaceIndexReversed(DisentangledRight):
    sign = -1


FOURTH = (
    Report("lsdefine/attention-is-all-you-need-keras 36", MaskByElements, MaskTiled, "padded right", first=True),
    Report("ml-explore/mlx-lm 1903", MaskOverKeyHeads, MaskOfGroups, "padded right"),
    Report("Mikyx-1/TinyLLM 17", NoMaskBesideACache, OffsetMask, "prefill", Cached, Cached),
    Report("hyprstream/hyprstream 1521", MaskAtTheTopLeft, OffsetMask, "cache", Cached, Cached),
    Report("keras-team/keras-hub 2862", SlopesOfQueries, SlopesOfKeys, "decode", Cached, Cached),
    Report("time-series-foundation-models/lag-llama 81", KeepsItsCache, ResetsItsCache),
    Report("ethen8181/machine-learning 13", ProjectionNotReturned, Attention, first=True),
    Report("Lightning-AI/litgpt 891", AdaptedInARow, AdaptedByHead),
    Report("huggingface/peft 3774", OutputAdaptedTwice, OutputAdapted),
    Report("allenai/OLMo 222", Attention, Attention, model=OneNormForBoth, right=NormForEach),
    Report("jax-ml/jax 39576", WindowOpenToTheRight, WindowClosed),
    Report("lucidrains/x-transformers 352", NormScalesUnused, NormScalesUsed),
    Report("huggingface/transformers 47946", Pair, Pair, "padded right", MaskDiscarded, SourcePadded, first=True),
    Report("NVIDIA-NeMo/RL 2105", HidesOthers, HidesOthers, "lengths", LengthsDropped, LengthsUsed, first=True),
    Report("ndif-team/nnsight 673", HiddenByNumbers, HiddenByNumbers, "padded left", PlacesFromTheLeft, PlacesOfTokens),
    Report("mosaicml/llm-foundry 372", Attention, Attention, model=NormInverted, right=NormRight),
    Report("nntrainer/nntrainer 3982", PlaceIndexReversed, DisentangledRight),
)  # fmt: skip
