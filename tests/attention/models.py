"""Attention as people write it by hand, in the layouts that are known and in those that only look like them."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

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


# --- those that only look like it


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
