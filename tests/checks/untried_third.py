"""A third round of public reports, as a search of issues gave them: what `check` told of them before any was tried.

As in `untried`, a report keeps its first result for good.
"""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional as F

from tests.checks.corpus import Attention, D, Full, H
from tests.checks.untried import Decoder, HiddenByNumbers, Report
from tests.checks.untried_later import CrossAttention, Pair


class NormInTheStream(Decoder):
    """What attention gives is added to its normed input, so that the stream is normed anew in each block."""

    def forward(self, tokens, padding_mask=None, labels=None, position_ids=None):
        x = self.embed(tokens) + self.place(torch.arange(tokens.shape[1])[None])
        for block in self.blocks:
            x = self.around(block, x)
        return self.head(x)

    def around(self, block, x):
        y = block["norm"](x)
        return y + block["attn"](y)


class NoResidual(NormInTheStream):
    def around(self, block, x):
        return block["attn"](block["norm"](x))


class OutputUnused(NormInTheStream):
    def around(self, block, x):
        block["attn"](block["norm"](x))
        return x


class NormOfQueries(Attention):
    """A norm in the attention, ahead of the maps."""

    def __init__(self):
        super().__init__()
        self.norm_in = nn.LayerNorm(self.width)

    def project(self, x):
        y = self.norm_in(x)
        q, _, _ = super().project(y)
        _, k, v = super().project(self.for_keys(x, y))
        return q, k, v

    def for_keys(self, x, y):
        return x


class NormOfAll(NormOfQueries):
    def for_keys(self, x, y):
        return y


class NoNormAround(NormInTheStream):
    """The attention norms what it is given itself."""

    def around(self, block, x):
        return x + block["attn"](x)


class NormsUnused(Attention):
    def __init__(self):
        super().__init__()
        self.q_norm, self.k_norm = nn.LayerNorm(self.d), nn.LayerNorm(self.d)

    def place(self, q, k, v):
        return q, k, v


class NormsUsed(NormsUnused):
    def place(self, q, k, v):
        return self.q_norm(q), self.k_norm(k), v


class FramesOfChannels(Full):
    """Attention within the frames of a video, which lies as (batch, channels, frames, places)."""

    def forward(self, x, padding=None):
        video = x.mT.unflatten(2, (2, -1))
        y = super().forward(self.frames(video).reshape(-1, D, video.shape[-1]).mT).mT
        return self.whole(y, video).flatten(2).mT

    def frames(self, video):
        return video

    def whole(self, y, video):
        return y.reshape(video.shape)


class Frames(FramesOfChannels):
    def frames(self, video):
        return video.transpose(1, 2)

    def whole(self, y, video):
        return y.unflatten(0, (-1, 2)).transpose(1, 2)


class ImageViewed(nn.Module):
    """Attention in an image with maps that are filters: what heads give is viewed as (heads, width, places)."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Conv2d(D, 3 * D, 1), nn.Conv2d(D, D, 1)

    def forward(self, x, padding=None):
        image = x.mT.unflatten(2, (2, -1))
        q, k, v = (part.unflatten(1, (H, -1)).flatten(3).mT for part in self.qkv(image).chunk(3, 1))
        heads = (q @ k.mT / math.sqrt(D // H)).softmax(-1) @ v
        return self.out(self.turn(heads).reshape(image.shape)).flatten(2).mT

    def turn(self, heads):
        return heads


class ImageTurned(ImageViewed):
    def turn(self, heads):
        return heads.mT


class DropoutMadeInForward(Attention):
    def weigh(self, scores):
        return nn.Dropout(0.1)(scores.softmax(-1))


class DropoutUnused(Attention):
    def weigh(self, scores):
        return scores.softmax(-1)


class PaddingInverted(Full):
    hides = False

    def forward(self, x, padding=None):
        q, k, v = self.project(x)
        shown = padding[:, None, None] != self.hides
        return self.out_proj(self.merge(F.scaled_dot_product_attention(q, k, v, attn_mask=shown)))


class PaddingShown(PaddingInverted):
    hides = True


class Packed(Decoder):
    """Documents in a row, of which the positions start again."""

    hides = False

    def forward(self, tokens, padding_mask=None, labels=None, position_ids=None):
        number = (position_ids == 0).cumsum(1)
        x = self.embed(tokens)
        for block in self.blocks:
            block["attn"].documents = number[:, None, :, None] != number[:, None, None] if self.hides else None
            block["attn"].position_ids = position_ids
            x = x + block["attn"](block["norm"](x))
        return self.head(x)


class PackedRight(Packed):
    hides = True


class OfDocuments(Attention):
    def place(self, q, k, v):
        return self.turned(q), self.turned(k), v

    def turned(self, x):
        half = x.shape[-1] // 2
        angles = self.position_ids[:, None, :, None] * 100 ** (-torch.arange(half) / half)
        angles = torch.cat([angles, angles], -1)
        return x * angles.cos() + torch.cat([-x[..., half:], x[..., :half]], -1) * angles.sin()

    def mask(self, scores, padding):
        scores = super().mask(scores, None)
        return scores if self.documents is None else scores.masked_fill(self.documents, -math.inf)


class PaddingForCausal(HiddenByNumbers):
    """A mask that is given takes the place of the causal one."""

    def mask(self, scores, padding):
        return super().mask(scores, None) if padding is None else Full.mask(self, scores, padding)


class FilledAndForgotten(Attention):
    """`masked_fill` in the place of `masked_fill_`, where a mask of padding is given."""

    forgets = True

    def forward(self, x, padding=None):
        if padding is None:
            return super().forward(x)
        q, k, v = self.project(x)
        hidden, lowest = ~torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril(), torch.finfo(x.dtype).min
        bias = torch.zeros(len(x), 1, *hidden.shape).masked_fill(padding[:, None, None], lowest)
        filled = bias.masked_fill(hidden, lowest)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias if self.forgets else filled)
        return self.out_proj(self.merge(y))


class Filled(FilledAndForgotten):
    forgets = False


class MasksOfOthers(nn.Module):
    """torch's attention with a mask for each sample and head, which lie as (samples, heads), and not the reverse."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(D, H, batch_first=True)

    def forward(self, x, padding=None):
        hidden = padding[:, None].expand(-1, x.shape[1], -1)
        return self.attention(x, x, x, attn_mask=self.of_heads(hidden), need_weights=False)[0]

    def of_heads(self, hidden):
        return hidden.repeat(H, 1, 1)


class MasksOfSamples(MasksOfOthers):
    def of_heads(self, hidden):
        return hidden.repeat_interleave(H, 0)


class PlacesOfSamples(Decoder):
    """Positions are counted along the batch."""

    def place(self, position_ids):
        return self.places(torch.arange(3))[:, None]


class PlacesNotAssigned(Decoder):
    def place(self, position_ids):
        self.places(position_ids)
        return 0


class SelfForCross(Pair):
    """The cross-attention is made, and the self-attention called in its place."""

    def attend(self, x, memory):
        borrowed = self.decoder
        q = borrowed.split(borrowed.q_proj(x), H)
        k, v = (borrowed.split(part(memory), H) for part in (borrowed.k_proj, borrowed.v_proj))
        return borrowed.out_proj(borrowed.merge(borrowed.score(q, k).softmax(-1) @ v))


class CrossWithBias(CrossAttention):
    def forward(self, x, memory, bias=None):
        q = self.split(self.q_proj(x), self.heads)
        k, v = self.split(self.k_proj(memory), self.heads), self.split(self.v_proj(memory), self.heads)
        scores = self.score(q, k)
        scores = scores if bias is None else scores + bias
        weights = scores.softmax(-1)
        bias = torch.zeros_like(scores) if bias is None else bias
        return self.out_proj(self.merge(weights @ v)), weights, bias


class WeightsForBias(Pair):
    """Later layers take the weights of the first for the bias that it returns behind them."""

    at = 1

    def __init__(self, kind):
        super().__init__(kind)
        self.cross, self.second = CrossWithBias(), CrossWithBias()

    def attend(self, x, memory):
        first = self.cross(x, memory)
        return first[0] + self.second(x + first[0], memory, first[self.at])[0]


class BiasForBias(WeightsForBias):
    at = 2


class CausalBesideAMask(Attention):
    """The causal mask is combined with a mask that is given, and forgotten where none is."""

    causal = True

    def mask(self, scores, padding):
        return scores if padding is None else super().mask(scores, padding)


class CausalAlways(Attention):
    causal = True


THIRD = (
    Report("facebookresearch/xformers 103", CausalBesideAMask, CausalAlways),
    Report("QwenLM/Qwen 933", FilledAndForgotten, Filled, "padded right"),
    Report("Howuhh/faster-trajectory-transformer 3", Attention, Attention, model=NormInTheStream),
    Report("jadore801120/attention-is-all-you-need-pytorch 142", NormOfQueries, NormOfAll,
           model=NoNormAround, right=NoNormAround),
    Report("Cerebras/modelzoo 85", NormsUnused, NormsUsed, first=True),
    Report("rixwew/pytorch-fm 27", Full, Full, model=NoResidual, first=True),
    Report("lucidrains/audiolm-pytorch 265", Attention, Attention, model=OutputUnused, first=True),
    Report("huggingface/nanoVLM 204", OfDocuments, OfDocuments, "documents", Packed, PackedRight, first=True),
    Report("unslothai/unsloth-zoo 963", PaddingForCausal, HiddenByNumbers, "padded left"),
    Report("PKU-YuanGroup/Open-Sora-Plan 171", FramesOfChannels, Frames),
    Report("leaderj1001/Attention-Augmented-Conv2d 21", ImageViewed, ImageTurned),
    Report("jrzaurin/pytorch-widedeep 189", DropoutMadeInForward, Attention, first=True),
    Report("zhouhaoyi/Informer2020 97", DropoutUnused, Attention),
    Report("InseeFrLab/torchTextClassifiers 92", PaddingInverted, PaddingShown, "padded right", first=True),
    Report("ArrowLuo/CLIP4Clip 22", MasksOfOthers, MasksOfSamples, "padded right", first=True),
    Report("cmu-l3/anlp-fall2025-code 1", Attention, Attention, model=PlacesOfSamples, first=True),
    Report("Lightning-AI/pytorch-lightning 19138", Attention, Attention, model=PlacesNotAssigned),
    Report("zomux/lanmt 11", Pair, Pair, "source", SelfForCross, Pair),
    Report("huggingface/transformers 4499", Pair, Pair, "source", WeightsForBias, BiasForBias),
)  # fmt: skip
