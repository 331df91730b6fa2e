"""An eighth round of public reports, first of eight searches of issues, after the seventh round was mended.

As in `untried`, a report keeps its first result for good. What was said of the first one was said of its right twin
too, and does not count.
"""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.nn import functional as F

from tests.checks.untried_fifth import N, Own, W, ids, noise


class ZeroKeysHidden(nn.Module):
    """Keys whose features are all zero are padding: here that is looked at before positions are added."""

    looks_behind = False

    def __init__(self, heads=4):
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v = (nn.Sequential(nn.Linear(W, W), nn.ReLU()) for _ in range(3))
        self.norm = nn.LayerNorm(W)

    def forward(self, x, embedded):
        q, k, v = (torch.cat(part(x).split(W // self.heads, 2)) for part in (self.q, self.k, self.v))
        scores = q @ k.mT / math.sqrt(W // self.heads)
        key_masks = (x if self.looks_behind else embedded).sum(-1).abs().sign()
        scores = scores.masked_fill(key_masks.repeat(self.heads, 1)[:, None] == 0, -(2.0**32) + 1)
        heads = torch.cat((scores.softmax(-1) @ v).chunk(self.heads), 2)
        return self.norm(heads + x)


class ZeroKeysBehindPositions(ZeroKeysHidden):
    looks_behind = True


class EncoderOfWords(nn.Module):
    attention = ZeroKeysHidden

    def __init__(self):
        super().__init__()
        self.lookup, self.position, self.out = nn.Embedding(20, W, padding_idx=0), nn.Embedding(N, W), nn.Linear(W, 20)
        self.blocks = nn.ModuleList(self.attention() for _ in range(2))

    def forward(self, x):
        embedded = self.lookup(x) * W**0.5
        enc = embedded + self.position(torch.arange(x.shape[1]))
        for block in self.blocks:
            enc = block(enc, embedded)
        return self.out(enc)


class EncoderBehindPositions(EncoderOfWords):
    attention = ZeroKeysBehindPositions


class HookedAttention(nn.Module):
    def __init__(self, heads=4):
        super().__init__()
        self.W_Q, self.W_K, self.W_V = (nn.Parameter(torch.randn(heads, W, W // heads) * W**-0.5) for _ in range(3))
        self.W_O = nn.Parameter(torch.randn(heads, W // heads, W) * W**-0.5)

    def forward(self, x, hidden):
        q, k, v = (torch.einsum("bpm,hmd->bphd", x, w) for w in (self.W_Q, self.W_K, self.W_V))
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5
        pattern = scores.masked_fill(hidden[:, None], -1e5).softmax(-1)
        return torch.einsum("bhqk,bkhd,hdm->bqm", pattern, v, self.W_O)


class Hooked(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.pos_embed, self.unembed = nn.Embedding(20, W), nn.Embedding(N, W), nn.Linear(W, 20)
        self.ln = nn.ModuleList(nn.LayerNorm(W) for _ in range(2))
        self.attn = nn.ModuleList(HookedAttention() for _ in range(2))

    def real(self, tokens, attention_mask):
        return attention_mask == 1

    def forward(self, tokens, attention_mask):
        real = self.real(tokens, attention_mask)
        t = tokens.shape[1]
        hidden = torch.ones(t, t, dtype=torch.bool).triu(1) | ~real[:, None]
        x = self.embed(tokens) + self.pos_embed((real.cumsum(1) - 1).clamp(min=0))
        for ln, attn in zip(self.ln, self.attn):
            x = x + attn(ln(x), hidden)
        return self.unembed(x)


class HookedInfersItsMask(Hooked):
    def real(self, tokens, attention_mask):
        return tokens != 0


def shown():
    mask = torch.ones(3, N, dtype=torch.long)
    mask[0, :3], mask[2, :2] = 0, 0
    return {"tokens": ids(), "attention_mask": mask}


class WindowedVision(nn.Module):
    """Patches are put in the order of windows for the attention, and back behind it."""

    height, width, window = 4, 6, 2

    def __init__(self):
        super().__init__()
        self.patch_embed, self.norm = nn.Conv2d(3, W, 2, 2), nn.LayerNorm(W)
        self.pos = nn.Parameter(torch.randn(self.height * self.width, W))
        self.attn = nn.MultiheadAttention(W, 4, batch_first=True)

    def window_index(self):
        at = torch.arange(self.height * self.width).view(self.height // 2, 2, self.width // 2, 2)
        return at.permute(0, 2, 1, 3).flatten()

    def reverse(self, index):
        return index.argsort()

    def forward(self, image):
        x, index = self.patch_embed(image).flatten(2).transpose(1, 2) + self.pos, self.window_index()
        x = x[:, index]
        y = self.norm(x).reshape(-1, self.window**2, W)
        x = x + self.attn(y, y, y, need_weights=False)[0].reshape(x.shape)
        return x[:, self.reverse(index)]


class WindowedVisionNotReversed(WindowedVision):
    def reverse(self, index):
        return index


class Reader(nn.Module):
    """A language model that reads the patches of an image before its words."""

    vision = WindowedVision

    def __init__(self):
        super().__init__()
        self.visual, self.embed, self.lm_head = self.vision(), nn.Embedding(20, W), nn.Linear(W, 20)
        self.positions = nn.Embedding(24 + N, W)
        self.layer = nn.TransformerEncoderLayer(W, 4, 48, dropout=0.0, batch_first=True, norm_first=True)

    def forward(self, pixel_values, input_ids):
        x = torch.cat([self.visual(pixel_values), self.embed(input_ids)], 1)
        t = x.shape[1]
        x = x + self.positions(torch.arange(t))
        x = self.layer(x, src_mask=torch.ones(t, t, dtype=torch.bool).triu(1))
        return self.lm_head(x[:, -input_ids.shape[1] :])


class ReaderNotReversed(Reader):
    vision = WindowedVisionNotReversed


class PackedModel(nn.Module):
    """Documents in one row, whose positions start again."""

    isolates = True

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(20, W), nn.Linear(W, 20)
        self.qkv, self.o = (
            nn.ModuleList(nn.Linear(W, 3 * W) for _ in range(2)),
            nn.ModuleList(nn.Linear(W, W) for _ in range(2)),
        )
        self.norm = nn.ModuleList(nn.RMSNorm(W) for _ in range(2))

    @staticmethod
    def rope(x, position_ids):
        angles = position_ids[:, None, :, None] * 100.0 ** -(torch.arange(3) / 3)
        cos, sin = (torch.cat([part, part], -1) for part in (angles.cos(), angles.sin()))
        return x * cos + torch.cat([-x[..., 3:], x[..., :3]], -1) * sin

    def forward(self, input_ids, position_ids):
        x, document = self.embed(input_ids), (position_ids == 0).cumsum(1)
        mask = torch.ones(N, N, dtype=torch.bool).tril()[None]
        if self.isolates:
            mask = mask & (document[:, :, None] == document[:, None])
        for qkv, o, norm in zip(self.qkv, self.o, self.norm):
            q, k, v = qkv(norm(x)).unflatten(-1, (3, 4, 6)).permute(2, 0, 3, 1, 4)
            y = F.scaled_dot_product_attention(self.rope(q, position_ids), self.rope(k, position_ids), v, mask[:, None])
            x = x + o(y.transpose(1, 2).flatten(2))
        return self.head(x)


class PackedResetAlone(PackedModel):
    isolates = False


class GameAttention(nn.Module):
    """Entities of a game attend to each other, but for those that are not there."""

    def __init__(self, head_num=4):
        super().__init__()
        self.head_num = head_num
        self.attention_pre, self.project, self.dropout = nn.Linear(W, 3 * W), nn.Linear(W, W), nn.Dropout(0.1)

    def hide(self, score, mask):
        return score.masked_fill_(~mask, value=-1e9)

    def forward(self, x, mask):
        q, k, v = self.attention_pre(x).chunk(3, dim=2)
        q, k, v = (z.unflatten(-1, (self.head_num, -1)).transpose(1, 2) for z in (q, k, v))
        score = torch.matmul(q, k.mT) / math.sqrt(W // self.head_num)
        self.hide(score, mask[:, None, None])
        score = self.dropout(F.softmax(score, dim=-1))
        return self.project((score @ v).transpose(1, 2).reshape(x.shape))


class GameAttentionNotInPlace(GameAttention):
    def hide(self, score, mask):
        return score.masked_fill(~mask, value=-1e9)


class Game(nn.Module):
    attention = GameAttention

    def __init__(self):
        super().__init__()
        self.embedding, self.policy = nn.Sequential(nn.Linear(5, W), nn.ReLU()), nn.Linear(W, 3)
        self.attn = nn.ModuleList(self.attention() for _ in range(2))
        self.ln1, self.ln2 = (nn.ModuleList(nn.LayerNorm(W) for _ in range(2)) for _ in range(2))
        self.mlp = nn.ModuleList(nn.Sequential(nn.Linear(W, 48), nn.ReLU(), nn.Linear(48, W)) for _ in range(2))

    def forward(self, entities, mask):
        x = self.embedding(entities)
        for attn, ln1, mlp, ln2 in zip(self.attn, self.ln1, self.mlp, self.ln2):
            x = ln1(x + attn(x, mask))
            x = ln2(x + mlp(x))
        return self.policy(x)


class GameNotInPlace(Game):
    attention = GameAttentionNotInPlace


def entities():
    mask = torch.ones(3, N, dtype=torch.bool)
    mask[0, 5:], mask[2, 6:] = False, False
    return {"entities": noise(3, N, 5), "mask": mask}


class AnomalyBlock(nn.Module):
    """Windows of a map of features."""

    window = 2

    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.proj = nn.LayerNorm(W), nn.Linear(W, 3 * W), nn.Linear(W, W)

    def partition(self, x):
        b, h, w, c = x.shape
        x = x.view(b, h // self.window, self.window, w // self.window, self.window, c)
        return x.permute(0, 1, 3, 2, 4, 5).reshape(-1, self.window**2, c)

    def reverse(self, windows, shape):
        b, h, w, c = shape
        x = windows.view(b, h // self.window, w // self.window, self.window, self.window, c)
        return x.permute(0, 1, 3, 2, 4, 5).reshape(shape)

    def forward(self, x):
        y = self.partition(self.norm(x))
        q, k, v = self.qkv(y).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        y = self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.reverse(y, x.shape)


class AnomalyBlockViewed(AnomalyBlock):
    def partition(self, x):
        return x.reshape(-1, self.window**2, x.shape[-1])

    def reverse(self, windows, shape):
        return windows.view(shape)


class Anomalies(nn.Module):
    block = AnomalyBlock

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Conv2d(3, W, 2, 2), nn.ConvTranspose2d(W, 3, 2, 2)
        self.blocks = nn.ModuleList(self.block() for _ in range(2))

    def forward(self, image):
        x = self.encoder(image).permute(0, 2, 3, 1)
        for block in self.blocks:
            x = block(x)
        return self.decoder(x.permute(0, 3, 1, 2))


class AnomaliesViewed(Anomalies):
    block = AnomalyBlockViewed


class Served(nn.Module):
    """A decoder whose heads have slopes of a geometric series."""

    first = 1

    def __init__(self, heads=4):
        super().__init__()
        self.heads = heads
        self.embed, self.head = nn.Embedding(20, W), nn.Linear(W, 20)
        self.qkv, self.o = (
            nn.ModuleList(nn.Linear(W, 3 * W) for _ in range(2)),
            nn.ModuleList(nn.Linear(W, W) for _ in range(2)),
        )
        self.norm = nn.ModuleList(nn.LayerNorm(W) for _ in range(2))

    def forward(self, input_ids):
        x, at = self.embed(input_ids), torch.arange(input_ids.shape[1])
        slopes = 2.0 ** (-8 * (torch.arange(self.heads) + self.first) / self.heads)
        bias = (slopes[:, None, None] * (at - at[:, None])).masked_fill(at > at[:, None], -math.inf)
        for qkv, o, norm in zip(self.qkv, self.o, self.norm):
            q, k, v = qkv(norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
            scores = q @ k.mT / math.sqrt(q.shape[-1]) + bias
            x = x + o((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
        return self.head(x)


class ServedSlopesFromOne(Served):
    first = 0


class EagerAttention(nn.Module):
    adds = False

    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(W, W, bias=False) for _ in range(4))
        self.q_norm, self.k_norm = nn.RMSNorm(6), nn.RMSNorm(6)

    def forward(self, x, attention_mask):
        q, k, v = (p(x).unflatten(-1, (4, -1)) for p in (self.q_proj, self.k_proj, self.v_proj))
        q, k, v = self.q_norm(q).transpose(1, 2), self.k_norm(k).transpose(1, 2), v.transpose(1, 2)
        attn_weights = q @ k.mT * q.shape[-1] ** -0.5
        if self.adds:
            attn_weights = attn_weights + attention_mask
        else:
            attn_weights = attn_weights.masked_fill(~attention_mask, torch.finfo(x.dtype).min)
        attn_weights = F.softmax(attn_weights, dim=-1, dtype=torch.float32).to(q.dtype)
        return self.o_proj((attn_weights @ v).transpose(1, 2).flatten(2))


class EagerAttentionAdds(EagerAttention):
    adds = True


class Qwen(nn.Module):
    attention = EagerAttention

    def __init__(self):
        super().__init__()
        self.embed_tokens, self.positions, self.lm_head = nn.Embedding(20, W), nn.Embedding(N, W), nn.Linear(W, 20)
        self.self_attn = nn.ModuleList(self.attention() for _ in range(2))
        self.input_layernorm = nn.ModuleList(nn.RMSNorm(W) for _ in range(2))

    def forward(self, input_ids, attention_mask):
        x = self.embed_tokens(input_ids) + self.positions(torch.arange(input_ids.shape[1]))
        for attn, norm in zip(self.self_attn, self.input_layernorm):
            x = x + attn(norm(x), attention_mask)
        return self.lm_head(x)


class QwenAdds(Qwen):
    attention = EagerAttentionAdds


def triangles():
    return {"input_ids": ids(), "attention_mask": torch.ones(3, 1, N, N, dtype=torch.bool).tril()}


EIGHTH = (
    Own(
        "Kyubyong/transformer 3", EncoderBehindPositions, EncoderOfWords,
        given=lambda: {"x": ids(3, N, (3, 0, 2))},
    ),
    Own("TransformerLensOrg/TransformerLens 467", HookedInfersItsMask, Hooked, given=shown, first=True),
    Own(
        "lablup/mlxcel 1600", ReaderNotReversed, Reader,
        given=lambda: {"pixel_values": noise(3, 3, 8, 12), "input_ids": ids()},
    ),
    Own(
        "DeepOpt-com/WrinkleFree-Monorepo 53", PackedResetAlone, PackedModel,
        given=lambda: {"input_ids": ids(), "position_ids": (torch.arange(N) % 5).expand(3, N)}, first=True,
    ),
    Own("opendilab/DI-engine 333", GameNotInPlace, Game, given=entities, first=True),
    Own("ByChelsea/CMOS 4", AnomaliesViewed, Anomalies, given=lambda: {"image": noise(3, 3, 8, 8)}),
    Own("paiml/aprender 2143", ServedSlopesFromOne, Served, given=lambda: {"input_ids": ids()}),
    Own("huggingface/transformers 41443", QwenAdds, Qwen, given=triangles, first=True),
)  # fmt: skip
