"""Attention as tutorials, forks and papers' own code write it: maps shared by heads, whole models, products of maps."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.attention.wild.idioms import attend, join, rotate_half, split
from tests.attention.wild.plain import Four
from tests.attention.wild.truth import MODEL, WIDTH, Core, H, case, rows, separate


@case(
    Core(rows("fc_out.weight", "c (h d)"), rows("fc_out.weight", "c (h d)"), None, None),
    refused="each of other features",
)
class OneSmallMapForAllHeads(nn.Module):
    """The maps are of a head's width, and every head's part of the input goes through the same one."""

    def __init__(self) -> None:
        super().__init__()
        self.values, self.keys, self.queries = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.fc_out = nn.Linear(MODEL, MODEL)

    def forward(self, x: Tensor) -> Tensor:
        n, length, _ = x.shape
        parts = x.reshape(n, length, H, WIDTH)
        v, k, q = self.values(parts), self.keys(parts), self.queries(parts)
        energy = torch.einsum("nqhd,nkhd->nhqk", [q, k])
        attention = torch.softmax(energy / (MODEL**0.5), dim=3)
        return self.fc_out(torch.einsum("nhql,nlhd->nqhd", [attention, v]).reshape(n, length, MODEL))


@case(
    Core(rows("o.weight", "c (h d)"), rows("o.weight", "c (h d)"), None, None),
    refused="an input of its own",
)
class ASmallMapForEachHead(nn.Module):
    """Each head has a map of its own, of its own part of the input."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Parameter(torch.randn(H, WIDTH, WIDTH)) for _ in range(3))
        self.o = nn.Linear(MODEL, MODEL)

    def forward(self, x: Tensor) -> Tensor:
        parts = x.unflatten(-1, (H, WIDTH))
        q, k, v = (torch.einsum("bnhd,hde->bhne", parts, m) for m in (self.q, self.k, self.v))
        return self.o(join(attend(q, k, v)))


@case(
    Core(
        *(rows(f"{m}.weight", "(h d) c 1", is_of_parts=True) for m in "qkv"), rows("o.weight", "c (h d)"),
        heads_alone=True,
    )
)  # fmt: skip
class GroupedConvolutions(nn.Module):
    """Maps that are 1x1 convolutions in groups, one for each head."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Conv1d(MODEL, MODEL, 1, groups=H) for _ in range(3))
        self.o = nn.Linear(MODEL, MODEL)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split(m(x.mT).mT) for m in (self.q, self.k, self.v))
        return self.o(join(attend(q, k, v)))


@case(
    Core(
        rows("toqueries.weight", "(h d) c"), rows("tokeys.weight", "(h d) c"), rows("tovalues.weight", "(h d) c"),
        rows("unifyheads.weight", "c (h d)"), scores="(b h) q k",
    )
)  # fmt: skip
class WideHeads(nn.Module):
    """Every head is as wide as the model."""

    def __init__(self) -> None:
        super().__init__()
        self.tokeys, self.toqueries, self.tovalues = (nn.Linear(MODEL, MODEL * H, bias=False) for _ in range(3))
        self.unifyheads = nn.Linear(H * MODEL, MODEL)

    def forward(self, x: Tensor) -> Tensor:
        b, t, e = x.size()
        keys, queries, values = (m(x).view(b, t, H, e) for m in (self.tokeys, self.toqueries, self.tovalues))
        keys, queries, values = (one.transpose(1, 2).contiguous().view(b * H, t, e) for one in (keys, queries, values))
        dot = torch.bmm(queries / e**0.25, (keys / e**0.25).transpose(1, 2))
        rows_, columns = torch.triu_indices(t, t, offset=1)
        dot = dot.clone()
        dot[:, rows_, columns] = float("-inf")
        out = torch.bmm(F.softmax(dot, dim=2), values).view(b, H, t, e)
        return self.unifyheads(out.transpose(1, 2).contiguous().view(b, t, H * e))


class GPTBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(MODEL), nn.LayerNorm(MODEL)
        self.attn = GPTAttention()
        self.mlp = nn.Sequential(nn.Linear(MODEL, 2 * MODEL), nn.GELU(), nn.Linear(2 * MODEL, MODEL))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPTAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(MODEL, 3 * MODEL), nn.Linear(MODEL, MODEL)
        self.register_buffer("bias", torch.tril(torch.ones(16, 16)).view(1, 1, 16, 16))
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(C, dim=2)
        q, k, v = (one.view(B, T, H, C // H).transpose(1, 2) for one in (q, k, v))
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.bias[:, :, :T, :T] == 0, float("-inf"))
        y = self.drop(F.softmax(att, dim=-1)) @ v
        return self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))


def _gpt_core(number: int) -> Core:
    at = f"h.{number}"
    q, k, v = (rows(f"{at}.attn.c_attn.weight", "(r h d) c", n_r=3, r=r, source=f"{at}.ln_1") for r in range(3))
    return Core(q, k, v, rows(f"{at}.attn.c_proj.weight", "c (h d)"), number=number)


def _as_tokens(module: nn.Module, x: Tensor) -> Any:
    return module((x[..., 0] * 1000).long().abs() % 50)


@case(_gpt_core(0), _gpt_core(1), call=_as_tokens)
class WholeGPT(nn.Module):
    """A language model of tokens, with embeddings that are tied to what it gives."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(50, MODEL), nn.Embedding(16, MODEL)
        self.h = nn.ModuleList(GPTBlock() for _ in range(2))
        self.ln_f, self.lm_head = nn.LayerNorm(MODEL), nn.Linear(MODEL, 50, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1]))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return logits, F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


@case(separate(number=0, rounds=3), inputs=("b n c",), tokens=5)
class OneLayerThreeTimes(nn.Module):
    """The same attention in every layer (ALBERT)."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(MODEL, MODEL) for _ in range(4))

    def once(self, x: Tensor) -> Tensor:
        return x + self.o(join(attend(split(self.q(x)), split(self.k(x)), split(self.v(x)))))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = self.once(x)
        return x


@case(separate(), inputs=("b n c",))
class KeysWrittenIntoACache(Four):
    """Keys and values are written into a buffer of the longest length, and read from there."""

    def forward(self, x: Tensor, start: int = 0) -> Tensor:
        B, T, _ = x.shape
        q, k, v = (m(x).view(B, T, H, WIDTH) for m in (self.q, self.k, self.v))
        cache_k, cache_v = (torch.zeros(B, 16, H, WIDTH, dtype=x.dtype) for _ in range(2))
        cache_k[:, start : start + T] = k
        cache_v[:, start : start + T] = v
        k, v = cache_k[:, : start + T], cache_v[:, : start + T]
        q, k, v = (one.transpose(1, 2) for one in (q, k, v))
        return self.o(join(attend(q, k, v)))


@case(
    Core(
        rows("wq.weight"), rows("wk.weight", h=2), rows("wv.weight", h=2), rows("wo.weight", "c (h d)"),
        scores="b g r q k", head_axes="g r",
    )
)  # fmt: skip
class GroupsByBroadcasting(nn.Module):
    """Groups are a dim of the queries that the keys do not have."""

    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wo = nn.Linear(MODEL, MODEL, bias=False), nn.Linear(MODEL, MODEL, bias=False)
        self.wk, self.wv = (nn.Linear(MODEL, 2 * WIDTH, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        B, T, _ = x.shape
        q = self.wq(x).view(B, T, 2, 2, WIDTH).permute(0, 2, 3, 1, 4)
        k, v = (m(x).view(B, T, 2, 1, WIDTH).permute(0, 2, 3, 1, 4) for m in (self.wk, self.wv))
        out = (q @ k.transpose(-1, -2) / WIDTH**0.5).softmax(-1) @ v
        return self.wo(out.permute(0, 3, 1, 2, 4).reshape(B, T, MODEL))


@case(
    Core(
        rows("linear1.weight", "(p h d) c", n_h=H, n_d=WIDTH, p=0), rows("linear1.weight", "(p h d) c", n_d=WIDTH, p=1),
        rows("linear1.weight", "(p h d) c", n_d=WIDTH, p=2), rows("linear2.weight", "c (p h d)", n_d=WIDTH, p=0),
    )
)  # fmt: skip
class SingleStream(nn.Module):
    """Attention and feed-forward share a map in front and a map behind (Flux)."""

    def __init__(self) -> None:
        super().__init__()
        self.linear1, self.linear2 = nn.Linear(MODEL, 5 * MODEL), nn.Linear(3 * MODEL, MODEL)

    def forward(self, x: Tensor) -> Tensor:
        qkv, mlp = self.linear1(x).split([3 * MODEL, 2 * MODEL], -1)
        q, k, v = (split(one) for one in qkv.chunk(3, -1))
        out = join(F.scaled_dot_product_attention(q, k, v))
        return self.linear2(torch.cat([out, F.gelu(mlp)], -1))


@case(
    Core(
        rows("qkv_w", "r (h d) c", r=0), rows("qkv_w", "r (h d) c", r=1), rows("qkv_w", "r (h d) c", r=2),
        rows("out_w", "c (h d)"),
    ),
    may_refuse="`ve` is passed|adds",
)  # fmt: skip
class SpeedrunAttention(nn.Module):
    """Maps of one parameter, norms without gains, values mixed with an embedding, gates of heads."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv_w, self.out_w = nn.Parameter(torch.randn(3, MODEL, MODEL)), nn.Parameter(torch.randn(MODEL, MODEL))
        self.lambdas = nn.Parameter(torch.tensor([0.5, 0.5]))
        self.gate = nn.Linear(6, H, bias=False)

    def forward(self, x: Tensor, ve: Tensor | None = None) -> Tensor:
        B, T, _ = x.shape
        q, k, v = F.linear(x, self.qkv_w.flatten(end_dim=1)).view(B, T, 3 * H, WIDTH).chunk(3, dim=-2)
        q, k = (rotate_half(F.rms_norm(one, (WIDTH,)).transpose(1, 2)) for one in (q, k))
        v = self.lambdas[0] * v if ve is None else self.lambdas[0] * v + self.lambdas[1] * ve.view_as(v)
        y = F.scaled_dot_product_attention(q, k, v.transpose(1, 2), is_causal=True, scale=0.12).transpose(1, 2)
        y = y * torch.sigmoid(self.gate(x[..., :6])).view(B, T, H, 1)
        return F.linear(y.contiguous().view(B, T, MODEL), self.out_w)


@case(
    Core(
        None, rows("wkv_a.weight", "(h d) c", h=1), rows("wkv_a.weight", "(h d) c", h=1), None,
        free=("query", "output", "key", "value"), scores="b q h k",
    ),
    may_refuse="mixed or normalised before",
)  # fmt: skip
class LatentAbsorbed(nn.Module):
    """DeepSeek's way to decode: the keys' second map is multiplied into the queries."""

    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wkv_a = nn.Linear(MODEL, MODEL, bias=False), nn.Linear(MODEL, 10, bias=False)
        self.wkv_b, self.wo = nn.Linear(10, 2 * MODEL, bias=False), nn.Linear(MODEL, MODEL, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q = self.wq(x).unflatten(-1, (H, WIDTH))
        kv = self.wkv_a(x)
        wkv_b = self.wkv_b.weight.view(H, 2 * WIDTH, 10)
        q = torch.einsum("bshd,hdc->bshc", q, wkv_b[:, :WIDTH])
        scores = torch.einsum("bshc,btc->bsht", q, kv) * WIDTH**-0.5
        out = torch.einsum("bsht,btc->bshc", scores.softmax(-1), kv)
        out = torch.einsum("bshc,hdc->bshd", out, wkv_b[:, WIDTH:])
        return self.wo(out.flatten(2))


def _flash_core(number: int, part: int) -> Core:
    q, k = (rows(f"{m}.weight", "(h p d) c", n_p=2, n_d=WIDTH, p=part) for m in "qk")
    return Core(
        q, k, rows("v.weight", "(h d) c", h=H), rows("o.weight", "c (h d)"), number=number, proved=("query", "key")
    )


@case(_flash_core(0, 0), _flash_core(1, 1), may_refuse="several of its softmaxes")
class DifferentialInTwoCalls(nn.Module):
    """Differential attention by two calls of a fused kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = (nn.Linear(MODEL, 2 * MODEL, bias=False) for _ in range(2))
        self.v, self.o = nn.Linear(MODEL, 2 * MODEL, bias=False), nn.Linear(2 * MODEL, MODEL, bias=False)
        self.lamb, self.subln = nn.Parameter(torch.tensor(0.3)), nn.RMSNorm(2 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        B, T, _ = x.shape
        q, k = (m(x).view(B, T, H, 2, WIDTH).permute(3, 0, 2, 1, 4) for m in (self.q, self.k))
        v = self.v(x).view(B, T, H, 2 * WIDTH).transpose(1, 2)
        one, two = (F.scaled_dot_product_attention(q[i], k[i], v, is_causal=True) for i in range(2))
        return self.o(join(self.subln(one - self.lamb * two)))


class _Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.sqk = nn.Parameter(torch.ones(MODEL))

    def forward(self, t: Tensor) -> Tensor:
        return F.normalize(t, dim=-1) * self.sqk.view(H, 1, WIDTH)


@case(separate())
class NormalisedTransformer(Four):
    """Queries and keys of unit length, with a learned gain for each feature (nGPT)."""

    def __init__(self) -> None:
        super().__init__()
        self.scaled = _Scaled()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split(m(x)) for m in (self.q, self.k, self.v))
        return F.normalize(self.o(join(attend(self.scaled(q) * WIDTH, self.scaled(k), v))), dim=-1)


@case(separate(), inputs=("b n c",), may_refuse="earlier|adds|several")
class ScoresOfALayerBefore(nn.Module):
    """RealFormer: a layer adds the scores of the one before."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(MODEL, MODEL) for _ in range(4))

    def forward(self, x: Tensor, before: Tensor | None = None) -> tuple[Tensor, Tensor]:
        q, k, v = (split(m(x)) for m in (self.q, self.k, self.v))
        scores = q @ k.mT * WIDTH**-0.5
        if before is not None:
            scores = scores + before
        return self.o(join(scores.softmax(-1) @ v)), scores


class _Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attn = nn.LayerNorm(MODEL), ScoresOfALayerBefore()

    def forward(self, x: Tensor, before: Tensor | None) -> tuple[Tensor, Tensor]:
        out, scores = self.attn(self.norm(x), before)
        return x + out, scores


def _residual_core(number: int) -> Core:
    at = f"layers.{number}"
    q, k, v = (rows(f"{at}.attn.{m}.weight", source=f"{at}.norm") for m in "qkv")
    return Core(q, k, v, rows(f"{at}.attn.o.weight", "c (h d)"), number=number)


@case(_residual_core(0), _residual_core(1), may_refuse="earlier|adds|several|before|passed")
class RealFormer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Residual() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        scores = None
        for layer in self.layers:
            x, scores = layer(x, scores)
        return x


class _Weights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.in_proj = nn.Linear(MODEL, 2 * MODEL)

    def forward(self, x: Tensor) -> Tensor:
        q, k = (split(one) for one in self.in_proj(x).chunk(2, -1))
        return (q @ k.mT / WIDTH**0.5).softmax(-1)


class _Averages(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.in_proj, self.out_proj = nn.Linear(MODEL, MODEL), nn.Linear(MODEL, MODEL)

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        return self.out_proj(join(weights @ split(self.in_proj(x))))


@case(
    Core(
        *(rows("weights.in_proj.weight", "(r h d) c", n_r=2, r=r) for r in range(2)),
        rows("first.in_proj.weight"), rows("first.out_proj.weight", "c (h d)"), free=("value", "output"),
    ),
    may_refuse="another|several|two",
)  # fmt: skip
class WeightsUsedTwice(nn.Module):
    """One module gives the weights, and two average with them (Zipformer)."""

    def __init__(self) -> None:
        super().__init__()
        self.weights, self.first, self.second = _Weights(), _Averages(), _Averages()

    def forward(self, x: Tensor) -> Tensor:
        weights = self.weights(x)
        x = x + self.first(x, weights)
        return x + self.second(x, weights)


@case(
    separate(proved=("query", "key", "value")),
    separate("q", "k_ip", "v_ip", takes=1, number=1, proved=("query", "key", "value")),
    inputs=("b n c", "b m c"), may_refuse="another attention|several|sum",
)  # fmt: skip
class TwoPromptsOneQuestion(Four):
    """The same queries ask texts and images, and the answers are added (IP-Adapter)."""

    def __init__(self) -> None:
        super().__init__()
        self.k_ip, self.v_ip = nn.Linear(MODEL, MODEL), nn.Linear(MODEL, MODEL)

    def forward(self, x: Tensor, image: Tensor) -> Tensor:
        q = split(self.q(x))
        out = F.scaled_dot_product_attention(q, split(self.k(x)), split(self.v(x)))
        out = out + 0.7 * F.scaled_dot_product_attention(q, split(self.k_ip(image)), split(self.v_ip(image)))
        return self.o(join(out))


class Processor:
    """No module: it computes what a module holds."""

    def __call__(self, attn: nn.Module, x: Tensor) -> Tensor:
        q, k, v = (split(m(x)) for m in (attn.to_q, attn.to_k, attn.to_v))
        return attn.to_out[1](attn.to_out[0](join(F.scaled_dot_product_attention(q, k, v))))


@case(
    Core(rows("to_q.weight"), rows("to_k.weight"), rows("to_v.weight"), rows("to_out.0.weight", "c (h d)")),
)
class ByAProcessor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.to_q, self.to_k, self.to_v = (nn.Linear(MODEL, MODEL, bias=False) for _ in range(3))
        self.to_out = nn.ModuleList([nn.Linear(MODEL, MODEL), nn.Dropout(0.0)])
        self.processor = Processor()

    def forward(self, x: Tensor) -> Tensor:
        return self.processor(self, x)


@case(separate(number=1, proved=("query", "key")), may_refuse="several softmaxes")
class GatedPrompts(Four):
    """Learned prompts have a softmax and a gate of their own (LLaMA-Adapter)."""

    def __init__(self) -> None:
        super().__init__()
        self.prompts, self.gate = nn.Parameter(torch.randn(3, MODEL)), nn.Parameter(torch.ones(H, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split(m(x)) for m in (self.q, self.k, self.v))
        prompts = self.prompts.expand(len(x), -1, -1)
        pk, pv = split(self.k(prompts)), split(self.v(prompts))
        asked = F.softmax(q @ pk.mT / WIDTH**0.5, -1) * self.gate.tanh()
        weights = torch.cat([asked, F.softmax(q @ k.mT / WIDTH**0.5, -1)], -1)
        return self.o(join(weights @ torch.cat([pv, v], 2)))


@case(separate(), refused="query heads share features")
class CollaborativeHeads(nn.Module):
    """All heads share queries and keys, each with gains of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(MODEL, MODEL) for _ in range(4))
        self.mixing = nn.Parameter(torch.randn(H, MODEL))

    def forward(self, x: Tensor) -> Tensor:
        q, k = self.q(x), self.k(x)
        scores = (q[:, None] * self.mixing[:, None]) @ k[:, None].mT / WIDTH**0.5
        return self.o(join(scores.softmax(-1) @ split(self.v(x))))


@case(separate(heads_alone=True))
class ConvolvedScores(Four):
    """A convolution over the map of scores of each head (multi-token attention)."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(H, H, 3, padding=1, groups=H)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split(m(x)) for m in (self.q, self.k, self.v))
        return self.o(join(self.conv(q @ k.mT / WIDTH**0.5).softmax(-1) @ v))


@case(separate(proved=("query", "key")))
class ShapedAttention(Four):
    """Identity and a centring matrix beside the softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.alpha, self.beta, self.gamma = (nn.Parameter(torch.ones(H, 1, 1)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split(m(x)) for m in (self.q, self.k, self.v))
        n = x.shape[1]
        weights = (q @ k.mT / WIDTH**0.5).softmax(-1)
        weights = (
            self.alpha * torch.eye(n, dtype=x.dtype)
            + self.beta * weights
            - self.gamma * torch.full((n, n), 1 / n, dtype=x.dtype)
        )
        return self.o(join(weights @ v))


@case(separate(proved=("query", "key")))
class StraightThrough(Four):
    """Hard attention by a straight-through softmax."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split(m(x)) for m in (self.q, self.k, self.v))
        soft = (q @ k.mT / WIDTH**0.5).softmax(-1)
        hard = torch.zeros_like(soft).scatter_(-1, soft.argmax(-1, keepdim=True), 1.0)
        return self.o(join((hard - soft.detach() + soft) @ v))


@case(separate())
class GumbelAttention(Four):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split(m(x)) for m in (self.q, self.k, self.v))
        return self.o(join(F.gumbel_softmax(q @ k.mT / WIDTH**0.5, tau=0.7, dim=-1) @ v))


@case(separate())
class DroppedKeys(Four):
    """Keys are dropped at random before the softmax."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split(m(x)) for m in (self.q, self.k, self.v))
        scores = q @ k.mT / WIDTH**0.5
        scores = scores + torch.bernoulli(torch.full_like(scores, 0.2)) * -1e4
        return self.o(join(scores.softmax(-1) @ v))


@case(separate(heads_alone=True))
class TokensShifted(Four):
    """Each map takes a mixture of a token and the one before (RWKV)."""

    def __init__(self) -> None:
        super().__init__()
        self.mu = nn.Parameter(torch.rand(3, MODEL))

    def forward(self, x: Tensor) -> Tensor:
        before = F.pad(x, (0, 0, 1, -1))
        q, k, v = (split(m(x * mu + before * (1 - mu))) for m, mu in zip((self.q, self.k, self.v), self.mu))
        return self.o(join(attend(q, k, v)))


@case(separate(heads_alone=True), may_refuse="mix them all")
class KeysOfAllTokens(Four):
    """Keys and values are mixed over tokens to fewer (Linformer)."""

    def __init__(self) -> None:
        super().__init__()
        self.e, self.f = nn.Parameter(torch.randn(7, 4)), nn.Parameter(torch.randn(7, 4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.q(x), self.k(x), self.v(x)
        k = torch.einsum("bnd,nk->bkd", k, self.e[: x.shape[1]])
        v = torch.einsum("bnd,nk->bkd", v, self.f[: x.shape[1]])
        return self.o(join(attend(split(q), split(k), split(v))))


@case(none=True)
class SharedMapForGates(nn.Module):
    """Attention-free transformer: exponentials of keys weigh values, feature by feature."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(MODEL, MODEL) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.q(x), self.k(x), self.v(x)
        weights = (k - k.amax(1, keepdim=True)).exp()
        return self.o(q.sigmoid() * (weights * v).cumsum(1) / weights.cumsum(1))


@case(
    Core(rows("q.weight"), rows("k.weight"), rows("v.weight"), rows("o.weight", "c (h d)")),
    refused="scores are not products",
)
class DenseSynthesizer(nn.Module):
    """Scores are made of a token alone."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(MODEL, MODEL), nn.Linear(MODEL, H * 7)
        self.v, self.o = nn.Linear(MODEL, MODEL), nn.Linear(MODEL, MODEL)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.k(F.relu(self.q(x))).unflatten(-1, (H, 7)).transpose(1, 2)[..., : x.shape[1]]
        return self.o(join(scores.softmax(-1) @ split(self.v(x))))
