"""Attention as people write it by hand, in the layouts that are known and in those that only look like them."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hdi_callback.attention import survey

D, H, B, T = 32, 4, 3, 6


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """(batch, length, heads, width) each -> (batch, length, heads * width)"""
    q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
    k, v = (tensor.repeat_interleave(q.shape[1] // tensor.shape[1], 1) for tensor in (k, v))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


class NanoGPT(nn.Module):
    """All queries, all keys, all values, taken apart by `split`."""

    def __init__(self):
        super().__init__()
        self.n_head, self.n_embd = H, D
        self.c_attn, self.c_proj = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.attn_dropout = nn.Dropout(0.1)

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(self.n_embd, dim=2)
        q, k, v = (tensor.view(B, T, self.n_head, C // self.n_head) for tensor in (q, k, v))
        return self.c_proj(attend(q, k, v))


class Timm(nn.Module):
    """A dimension of three in front of the heads."""

    def __init__(self):
        super().__init__()
        self.num_heads, self.head_dim = H, D // H
        self.qkv, self.proj = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.q_norm, self.k_norm = nn.LayerNorm(D // H), nn.LayerNorm(D // H)

    def forward(self, x):
        B, N, _ = x.shape
        qkv = self.qkv(x).reshape(B, N, 3, self.num_heads, self.head_dim).permute(2, 0, 1, 3, 4)
        q, k, v = qkv.unbind(0)
        return self.proj(attend(self.q_norm(q), self.k_norm(k), v))


class Einops(nn.Module):
    """`to_qkv` in three chunks, and an output projection in a sequence."""

    def __init__(self):
        super().__init__()
        self.heads, self.dim_head = H, 16
        self.to_qkv = nn.Linear(D, 3 * H * 16, bias=False)
        self.to_out = nn.Sequential(nn.Linear(H * 16, D), nn.Dropout(0.0))

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (self.heads, -1)) for part in self.to_qkv(x).chunk(3, dim=-1))
        return self.to_out(attend(q, k, v))


class EinopsCross(nn.Module):
    """`to_q` from one width, `to_k` and `to_v` from another."""

    def __init__(self):
        super().__init__()
        self.heads = H
        self.to_q, self.to_k, self.to_v = nn.Linear(D, D), nn.Linear(20, D), nn.Linear(20, D)
        self.to_out = nn.Sequential(nn.Linear(D, D))

    def forward(self, x, context=None):
        context = x[..., :20] if context is None else context
        q, k, v = (
            to(y).unflatten(-1, (self.heads, -1))
            for to, y in ((self.to_q, x), (self.to_k, context), (self.to_v, context))
        )
        return self.to_out(attend(q, k, v))


class Grouped(nn.Module):
    """Fewer key heads than query heads."""

    def __init__(self, key_heads: int = 2):
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = H, key_heads, 8
        self.q_proj, self.o_proj = nn.Linear(D, H * 8), nn.Linear(H * 8, D)
        self.k_proj, self.v_proj = nn.Linear(D, key_heads * 8), nn.Linear(D, key_heads * 8)

    def forward(self, x):
        q, k, v = (proj(x).unflatten(-1, (-1, 8)) for proj in (self.q_proj, self.k_proj, self.v_proj))
        return self.o_proj(attend(q, k, v))


class FusedGrouped(nn.Module):
    """All queries, then fewer keys, then as few values, in one projection."""

    def __init__(self):
        super().__init__()
        self.num_heads, self.num_key_value_heads, self.head_dim = H, 2, 8
        self.qkv, self.out_proj = nn.Linear(D, (H + 4) * 8), nn.Linear(D, D)

    def forward(self, x):
        q, k, v = self.qkv(x).split([32, 16, 16], dim=-1)
        return self.out_proj(attend(*(tensor.unflatten(-1, (-1, 8)) for tensor in (q, k, v))))


class Separate(nn.Module):
    """Four projections of one width; what is done with them is left to others."""

    def __init__(self):
        super().__init__()
        self.num_heads = H
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(D, D) for _ in range(4))

    def heads(self, x, count=H):
        return (proj(x).unflatten(-1, (count, -1)) for proj in (self.q_proj, self.k_proj, self.v_proj))


class LengthFirst(Separate):
    """(length, batch, width), as torch has it by default."""

    def forward(self, x):
        return self.out_proj(attend(*(tensor.transpose(0, 1) for tensor in self.heads(x))).transpose(0, 1))


class ThreeInputs(Separate):
    """Queries, keys and values from three inputs, and plain products."""

    def forward(self, q, k, v, mask):
        (q, _, _), (_, k, _), (_, _, v) = (
            [tensor.transpose(1, 2) for tensor in self.heads(tensor)] for tensor in (q, k, v)
        )
        scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
        weights = (scores if mask is None else scores.masked_fill(mask, -1e9)).softmax(-1)
        return self.out_proj((weights @ v).transpose(1, 2).flatten(2))


class AlwaysDrops(NanoGPT):
    """Causal, and with dropout in evaluation as well, as much code has it by mistake."""

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (H, -1)).transpose(1, 2) for part in self.c_attn(x).split(D, dim=2))
        out = F.scaled_dot_product_attention(q, k, v, dropout_p=0.3, is_causal=True)
        return self.c_proj(F.dropout(out.transpose(1, 2).flatten(2), 0.3))


class OneRowPerToken(NanoGPT):
    """Tokens of all sequences in one dimension, as `Conv1D` has them."""

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (H, -1)) for part in self.c_attn(x.flatten(0, 1)).split(D, dim=1))
        q, k, v = (tensor.unflatten(0, x.shape[:2]) for tensor in (q, k, v))
        return self.c_proj(attend(q, k, v).flatten(0, 1)).view(x.shape)


# --- those that only look like it


class KeysFirst(NanoGPT):
    """Rows of keys, then of queries, then of values."""

    def forward(self, x):
        k, q, v = (part.unflatten(-1, (H, -1)) for part in self.c_attn(x).split(D, dim=2))
        return self.c_proj(attend(q, k, v))


class ValuesFirst(NanoGPT):
    """Rows of values, then of keys, then of queries."""

    def forward(self, x):
        v, k, q = (part.unflatten(-1, (H, -1)) for part in self.c_attn(x).split(D, dim=2))
        return self.c_proj(attend(q, k, v))


class OverChannels(NanoGPT):
    """Attention between channels, not between tokens (XCiT)."""

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (H, -1)).permute(0, 2, 3, 1) for part in self.c_attn(x).split(D, dim=2))
        return self.c_proj(((q @ k.mT).softmax(-1) @ v).permute(0, 3, 1, 2).flatten(2))


class OutputsInAnotherOrder(NanoGPT):
    """Feature 0 of every head, then feature 1 of every head, ... before the output projection."""

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (H, -1)) for part in self.c_attn(x).split(D, dim=2))
        return self.c_proj(attend(q, k, v).unflatten(-1, (H, -1)).transpose(2, 3).flatten(2))


class KeysMixed(Separate):
    """Heads attend with each other's keys, by a matrix that is called a scale and is the identity at first."""

    def __init__(self):
        super().__init__()
        self.head_scale = nn.Parameter(torch.eye(H))

    def forward(self, x):
        q, k, v = self.heads(x)
        return self.out_proj(attend(q, torch.einsum("gh,bthd->btgd", self.head_scale, k), v))


class KeysRolled(Separate):
    """Each head attends with its neighbour's keys."""

    def forward(self, x):
        q, k, v = self.heads(x)
        return self.out_proj(attend(q, k.roll(1, 2), v))


class TokensMixed(Separate):
    """Queries see the token before."""

    def forward(self, x):
        q, k, v = self.heads(x)
        return self.out_proj(attend(q + q.roll(1, 1), k, v))


class ValuesSquashed(Separate):
    """What is averaged is not linear in the values."""

    def forward(self, x):
        q, k, v = self.heads(x)
        return self.out_proj(attend(q, k, v.tanh()))


class KeysIgnored(Separate):
    """The mean of the values, whatever the keys."""

    def forward(self, x):
        q, k, v = self.heads(x)
        return self.out_proj(attend(q, 0 * k, v) + 0 * q.flatten(2))


class Strided(Separate):
    """Every fourth row belongs to a head."""

    def forward(self, x):
        return self.out_proj(attend(*(tensor.flatten(2).unflatten(-1, (-1, H)).mT for tensor in self.heads(x))))


class TwiceAsMany(Separate):
    """Twice the heads that it names."""

    def forward(self, x):
        return self.out_proj(attend(*self.heads(x, 2 * H)))


class HalfAsMany(Separate):
    """Half the heads that it names."""

    def forward(self, x):
        return self.out_proj(attend(*self.heads(x, H // 2)))


class DifferentialByConstant(Separate):
    """Two softmaxes a head, one subtracted from the other, and no parameter that tells."""

    def forward(self, x):
        (q, k, _), (_, _, v) = self.heads(x, 2 * H), self.heads(x)
        one, other = attend(q, k, v.repeat_interleave(2, 2)).unflatten(-1, (H, 2, -1)).unbind(-2)
        return self.out_proj((one - 0.8 * other).flatten(2))


class GroupsTiled(Grouped):
    """Query head h takes key head h modulo 2, not h over 2."""

    def forward(self, x):
        q, k, v = (proj(x).unflatten(-1, (-1, 8)) for proj in (self.q_proj, self.k_proj, self.v_proj))
        return self.o_proj(attend(q, k.repeat(1, 1, 2, 1), v.repeat(1, 1, 2, 1)))


class GroupsOfTwoSizes(Grouped):
    """Three query heads take the first key head, and one the second."""

    def forward(self, x):
        q, k, v = (proj(x).unflatten(-1, (-1, 8)) for proj in (self.q_proj, self.k_proj, self.v_proj))
        return self.o_proj(attend(q, *(one[:, :, [0, 0, 0, 1]] for one in (k, v))))


class LowRankMLA(nn.Module):
    """Latent attention by the short name alone."""

    def __init__(self):
        super().__init__()
        self.num_heads = H
        self.down, self.up = nn.Linear(D, 8), nn.Linear(8, 3 * D)


class Interleaved(nn.Module):
    """Query, key and value of head 0, then of head 1, ...: a popular tutorial's way."""

    def __init__(self):
        super().__init__()
        self.num_heads, self.head_dim = H, D // H
        self.qkv_proj, self.o_proj = nn.Linear(D, 3 * D), nn.Linear(D, D)

    def forward(self, x):
        batch_size, seq_length, _ = x.size()
        qkv = self.qkv_proj(x)
        qkv = qkv.reshape(batch_size, seq_length, self.num_heads, 3 * self.head_dim)
        q, k, v = qkv.chunk(3, dim=-1)
        return self.o_proj(attend(q, k, v))


class InterleavedBySplit(nn.Module):
    """The same under the most usual of names, by way of a split in each head."""

    def __init__(self):
        super().__init__()
        self.num_heads, self.head_dim = H, D // H
        self.qkv, self.proj = nn.Linear(D, 3 * D), nn.Linear(D, D)

    def forward(self, x):
        q, k, v = self.qkv(x).view(*x.shape[:2], self.num_heads, -1).split([8, 8, 8], dim=3)
        return self.proj(attend(q, k, v))


class InterleavedByEinops(nn.Module):
    """The same as an einops pattern."""

    def __init__(self):
        super().__init__()
        self.heads = H
        self.to_qkv, self.to_out = nn.Linear(D, 3 * D), nn.Linear(D, D)

    def forward(self, x):
        q, k, v = rearrange(self.to_qkv(x), "b n (h d qkv) -> qkv b n h d", h=self.heads, qkv=3)  # noqa: F821
        return self.to_out(attend(q, k, v))


class Differential(nn.Module):
    """Names as usual, and twice as many key heads, mixed by learned weights."""

    def __init__(self):
        super().__init__()
        self.num_heads = H
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(D, D) for _ in range(4))
        self.lambda_q1 = nn.Parameter(torch.zeros(4))


class KnockingHeads(nn.Module):
    """A shared projection after those of each head."""

    def __init__(self):
        super().__init__()
        self.num_heads = H
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(D, D) for _ in range(4))
        self.knock = nn.Linear(8, 8)


class SaysNothing(nn.Module):
    """No head count anywhere."""

    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(D, D) for _ in range(4))


class Contradicts(SaysNothing):
    """A head count and a head width that do not multiply to the projection."""

    def __init__(self):
        super().__init__()
        self.num_heads, self.head_dim = 4, 16


class ContradictsItself(SaysNothing):
    """Two head counts."""

    def __init__(self):
        super().__init__()
        self.num_heads, self.n_heads = 4, 8


class DoesNotDivide(SaysNothing):
    """A head count that does not divide the width."""

    def __init__(self):
        super().__init__()
        self.num_heads = 5


class TooFewKeys(nn.Module):
    """Key rows for two heads, and a claim of four."""

    def __init__(self):
        super().__init__()
        self.num_heads = H
        self.q_proj, self.out_proj = nn.Linear(D, D), nn.Linear(D, D)
        self.k_proj, self.v_proj = nn.Linear(D, 16), nn.Linear(D, 16)


class OddOutput(SaysNothing):
    """An output projection of another width than the heads."""

    def __init__(self):
        super().__init__()
        self.num_heads = H
        self.out_proj = nn.Linear(2 * D, D)


class HiddenAttention(nn.Module):
    """Attention by its name, with parameters that nobody knows."""

    def __init__(self):
        super().__init__()
        self.mixing_a, self.mixing_b = nn.Parameter(torch.zeros(D, D)), nn.Parameter(torch.zeros(D, D))


def refusal_of(module: nn.Module) -> str:
    """Give the reason why a module is refused, alone and by itself: no layer is found, and nothing else is named."""
    found = survey(nn.Sequential(module))
    assert found.layers == ()
    (refusal,) = found.refused
    assert refusal.name == "0"
    return refusal.reason
