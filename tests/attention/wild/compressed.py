"""Keys and values that are compressed, borrowed or doubled: latents, values of other layers, rounds."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.attention.wild.idioms import attend, join, rotate_half, rotate_pairs, split
from tests.attention.wild.truth import WIDTH, Core, H, case, fused, rows, separate


@case(
    Core(rows("q_b_proj.weight", "(h r d) c", n_r=2, r=0, source="q_a_norm", normed="q_a_norm",
              through="q_a_proj.weight"),
         *(rows("kv_b_proj.weight", "(h r d) c", n_r=2, r=r, source="kv_a_norm", normed="kv_a_norm",
                through="kv_a_proj_with_mqa.weight") for r in range(2)), rows("o_proj.weight", "c (h d)")),
)  # fmt: skip
class LatentsNormedAndTurned(nn.Module):
    """DeepSeek V3 for a prompt: both latents are normed, and a part of queries and one key of all heads turn."""

    def __init__(self, nope: int = WIDTH, rope: int = WIDTH) -> None:
        super().__init__()
        self.nope, self.rope = nope, rope
        self.q_a_proj, self.q_a_norm = nn.Linear(24, 14, bias=False), nn.RMSNorm(14)
        self.q_b_proj = nn.Linear(14, H * (nope + rope), bias=False)
        self.kv_a_proj_with_mqa, self.kv_a_norm = nn.Linear(24, 10 + rope, bias=False), nn.RMSNorm(10)
        self.kv_b_proj = nn.Linear(10, H * 2 * nope, bias=False)
        self.o_proj = nn.Linear(24, 24, bias=False)
        self.softmax_scale = (nope + rope) ** -0.5

    def forward(self, hidden_states: Tensor) -> Tensor:
        bsz, q_len, _ = hidden_states.size()
        q = self.q_b_proj(self.q_a_norm(self.q_a_proj(hidden_states)))
        q = q.view(bsz, q_len, H, self.nope + self.rope).transpose(1, 2)
        q_nope, q_pe = torch.split(q, [self.nope, self.rope], dim=-1)
        compressed_kv, k_pe = torch.split(self.kv_a_proj_with_mqa(hidden_states), [10, self.rope], dim=-1)
        kv = self.kv_b_proj(self.kv_a_norm(compressed_kv)).view(bsz, q_len, H, 2 * self.nope).transpose(1, 2)
        k_nope, value_states = torch.split(kv, [self.nope, self.nope], dim=-1)
        q_pe, k_pe = rotate_pairs(q_pe), rotate_pairs(k_pe.view(bsz, 1, q_len, self.rope))
        query_states = k_pe.new_empty(bsz, H, q_len, self.nope + self.rope)
        query_states[..., : self.nope], query_states[..., self.nope :] = q_nope, q_pe
        key_states = k_pe.new_empty(bsz, H, q_len, self.nope + self.rope)
        key_states[..., : self.nope], key_states[..., self.nope :] = k_nope, k_pe
        attn_weights = torch.matmul(query_states, key_states.transpose(2, 3)) * self.softmax_scale
        causal = torch.full((q_len, q_len), float("-inf"), dtype=q.dtype).triu(1)
        attn_weights = F.softmax(attn_weights + causal, dim=-1, dtype=q.dtype)
        attn_output = torch.matmul(attn_weights, value_states).transpose(1, 2).contiguous()
        return self.o_proj(attn_output.reshape(bsz, q_len, H * self.nope))


@case(
    Core(rows("wq.weight"), rows("w_uk.weight", h=2, source="norm", through="w_dkv.weight", normed="norm"),
         rows("w_uv.weight", h=2, source="norm", through="w_dkv.weight", normed="norm"), rows("wo.weight", "c (h d)"),
         scores="b g r q k", head_axes="g r"),
)  # fmt: skip
class LatentsOfGroups(nn.Module):
    """Grouped latents: a normed latent is expanded to two heads of keys, which two queries share each."""

    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wo = nn.Linear(24, 24, bias=False), nn.Linear(24, 24, bias=False)
        self.w_dkv, self.norm = nn.Linear(24, 9, bias=False), nn.LayerNorm(9)
        self.w_uk, self.w_uv = nn.Linear(9, 12, bias=False), nn.Linear(9, 12, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        latent = self.norm(self.w_dkv(x))
        q = rotate_half(self.wq(x).view(b, t, 2, 2, WIDTH).permute(0, 2, 3, 1, 4))  # (b, g, r, t, d)
        k = rotate_half(self.w_uk(latent).view(b, t, 2, WIDTH).transpose(1, 2))
        v = self.w_uv(latent).view(b, t, 2, WIDTH).transpose(1, 2)
        scores = torch.einsum("bgrid,bgjd->bgrij", q, k).mul(WIDTH**-0.5)
        ctx = torch.einsum("bgrij,bgjd->bgrid", scores.softmax(-1), v)
        return self.wo(ctx.permute(0, 3, 1, 2, 4).flatten(2))


@case(
    *(Core(rows(f"layers.{i}.c_attn.weight", "(r h d) c", n_r=3, r=0, source=f"layers.{i}.ln"),
           rows(f"layers.{i}.c_attn.weight", "(r h d) c", n_r=3, r=1, source=f"layers.{i}.ln"),
           rows(f"layers.{i}.c_attn.weight", "(r h d) c", n_r=3, r=2, source=f"layers.{i}.ln"),
           rows(f"layers.{i}.c_proj.weight", "c (h d)"), number=i, proved=("query", "key")) for i in range(3)),
    may_refuse="adds to",
)  # fmt: skip
class ValueResiduals(nn.Module):
    """ResFormer: every layer mixes the values of the first into its own, by a share that is learned."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.ln, self.c_attn, self.c_proj = nn.LayerNorm(24), nn.Linear(24, 72), nn.Linear(24, 24)
            self.lamb = nn.Parameter(torch.tensor(0.5))

        def forward(self, x: Tensor, v1: Tensor | None) -> tuple[Tensor, Tensor]:
            q, k, v = (split(t) for t in self.c_attn(self.ln(x)).chunk(3, -1))
            if v1 is None:
                v1 = v
            v = (1 - self.lamb) * v + self.lamb * v1.view_as(v)
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            return x + self.c_proj(join(y)), v1

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(self.Layer() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        v1 = None
        for layer in self.layers:
            x, v1 = layer(x, v1)
        return x


class _Borrowing(nn.Module):
    def __init__(self, index: int, owns: bool) -> None:
        super().__init__()
        self.layer_idx, self.owns = index, owns
        self.norm, self.q_proj, self.o_proj = nn.RMSNorm(24), nn.Linear(24, 24), nn.Linear(24, 24)
        if owns:
            self.k_proj, self.v_proj = nn.Linear(24, 12), nn.Linear(24, 12)

    def forward(self, x: Tensor, shared_kv: dict[int, tuple[Tensor, Tensor]]) -> Tensor:
        h = self.norm(x)
        if self.owns:
            shared_kv[self.layer_idx] = split(self.k_proj(h), 2), split(self.v_proj(h), 2)
        k, v = shared_kv[max(i for i in shared_kv if i <= self.layer_idx)]
        q = split(self.q_proj(h))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return x + self.o_proj(join(y))


def _borrowed(i: int) -> Core:
    owner = i // 2 * 2
    return Core(
        rows(f"blocks.{i}.q_proj.weight", source=f"blocks.{i}.norm"),
        rows(f"blocks.{owner}.k_proj.weight", h=2, source=f"blocks.{owner}.norm"),
        rows(f"blocks.{owner}.v_proj.weight", h=2, source=f"blocks.{owner}.norm"),
        rows(f"blocks.{i}.o_proj.weight", "c (h d)"), number=i,
        proved=("query", "key") if i == owner else ("query",),
    )  # fmt: skip


@case(*(_borrowed(i) for i in range(4)), may_refuse="without the weights of its keys|another module|share|its inputs")
class KeysOfEverySecondLayer(nn.Module):
    """Cross-layer attention: a dictionary carries keys and values from each even layer to the odd one behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Borrowing(i, i % 2 == 0) for i in range(4))

    def forward(self, x: Tensor) -> Tensor:
        shared: dict[int, tuple[Tensor, Tensor]] = {}
        for block in self.blocks:
            x = block(x, shared)
        return x


@case(
    Core(rows("wq.weight"), rows("wkv.weight"), rows("wkv.weight"), rows("wo.weight", "c (h d)"),
         free=("value",), proved=("query", "key", "output")),
)  # fmt: skip
class TurnedKeysAreValues(nn.Module):
    """One map for keys and values: the keys turn, and the values are the same features as they came."""

    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wkv, self.wo = (nn.Linear(24, 24, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        q, kv = (m(x).view(*x.shape[:-1], H, WIDTH) for m in (self.wq, self.wkv))
        q, k = (rotate_pairs(t.transpose(1, 2)) for t in (q, kv))
        y = F.scaled_dot_product_attention(q, k, kv.transpose(1, 2), is_causal=True)
        return self.wo(y.transpose(1, 2).flatten(2))


@case(separate("shared.q", "shared.k", "shared.v", "shared.o", rounds=3, proved=("query", "key"), heads_alone=True))
class OneBlockForEveryDepth(nn.Module):
    """A recursive transformer: one block is run three times, with a gain of its own for each round."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.ModuleDict({m: nn.Linear(24, 24, bias=False) for m in "qkvo"})
        self.gains = nn.ParameterList(nn.Parameter(torch.ones(24)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for gain in self.gains:
            q, k, v = (split(self.shared[m](x)) for m in "qkv")
            x = x + gain * self.shared["o"](join(attend(q, k, v)))
        return x


@case(
    fused("Wqkv.weight", output="Wo.weight"),
)
class ForgettingGateOfEachHead(nn.Module):
    """FoX: a gate of each head and token is summed up over time and forgets; a norm and a gate behind."""

    def __init__(self) -> None:
        super().__init__()
        self.Wqkv, self.Wf, self.Wg, self.Wo = (nn.Linear(24, w, bias=False) for w in (72, H, 24, 24))
        self.q_norm, self.k_norm, self.out_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.Wqkv(x).unflatten(-1, (3, H, WIDTH)).unbind(2)
        q, k = self.q_norm(q), self.k_norm(k)
        log_f = F.logsigmoid(self.Wf(x)).cumsum(1).transpose(1, 2)  # (b, h, t)
        decay = log_f[..., :, None] - log_f[..., None, :]
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(WIDTH) + decay
        scores = scores.masked_fill(torch.ones(x.shape[1], x.shape[1]).triu(1).bool(), float("-inf"))
        y = self.out_norm(torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v)).flatten(2)
        return self.Wo(y * F.silu(self.Wg(x)))


@case(fused("in_proj.weight", "(h r d) c", proved=("value", "output")), may_refuse="mix")
class SelectiveByAHead(nn.Module):
    """Selective attention: what the first head gives to earlier tokens is summed and taken from the scores of all."""

    def __init__(self) -> None:
        super().__init__()
        self.in_proj, self.o = nn.Linear(24, 72), nn.Linear(24, 24)

    def forward(self, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        q, k, v = self.in_proj(x).view(b, n, H, 3 * WIDTH).transpose(1, 2).split(WIDTH, dim=-1)
        logits = (q @ k.mT / math.sqrt(WIDTH)).masked_fill(torch.ones(n, n).triu(1).bool(), -1e30)
        chosen = logits[:, 0].clamp_min(0) * (1 - torch.eye(n, dtype=x.dtype))
        chosen = torch.cat([torch.zeros_like(chosen[..., :1]), chosen[..., 1:]], -1).cumsum(1).roll(1, 1)
        chosen = torch.cat([torch.zeros_like(chosen[:, :1]), chosen[:, 1:]], 1)
        weights = F.softmax(logits - chosen[:, None], dim=-1)
        return self.o((weights @ v).transpose(1, 2).reshape(b, n, 24))
