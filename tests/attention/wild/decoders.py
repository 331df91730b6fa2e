"""Language models as single-file repositories and speed runs of 2024 to 2026 write them, in odd orders of splits."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.attention.wild.idioms import angles, attend, join, rotate_half, split
from tests.attention.wild.plain import Four
from tests.attention.wild.truth import MODEL, WIDTH, Core, H, case, rows, separate

G = 2  # key heads, where there are fewer


def _causal(scores: Tensor) -> Tensor:
    mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    return scores.masked_fill(mask, float("-inf"))


def _repeat_kv(x: Tensor, times: int) -> Tensor:
    b, n, heads, width = x.shape
    return x[:, :, :, None, :].expand(b, n, heads, times, width).reshape(b, n, heads * times, width)


def _rotate_as_llama(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    theta = angles(q.shape[1], q.shape[-1], q)[None, :, None]
    cos, sin = theta.cos(), theta.sin()
    turned = []
    for x in (q, k):
        r, i = x.float().to(x.dtype).reshape((*x.shape[:-1], -1, 2)).unbind(-1)
        turned.append(torch.stack([r * cos - i * sin, r * sin + i * cos], dim=-1).flatten(3))
    return turned[0].type_as(q), turned[1].type_as(k)


@case(separate("wq", "wk", "wv", "wo", keys=G))
class LlamaInOneFile(nn.Module):
    """llama2.c: keys repeated by expand, pairs turned by real numbers, a mask as a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.n_local_heads, self.n_local_kv_heads, self.head_dim = H, G, WIDTH
        self.wq, self.wo = nn.Linear(MODEL, H * WIDTH, bias=False), nn.Linear(H * WIDTH, MODEL, bias=False)
        self.wk, self.wv = (nn.Linear(MODEL, G * WIDTH, bias=False) for _ in range(2))
        self.attn_dropout, self.resid_dropout = nn.Dropout(0.1), nn.Dropout(0.1)
        self.register_buffer("mask", torch.triu(torch.full((1, 1, 32, 32), float("-inf")), diagonal=1))

    def forward(self, x: Tensor) -> Tensor:
        bsz, seqlen, _ = x.shape
        xq = self.wq(x).view(bsz, seqlen, self.n_local_heads, self.head_dim)
        xk = self.wk(x).view(bsz, seqlen, self.n_local_kv_heads, self.head_dim)
        xv = self.wv(x).view(bsz, seqlen, self.n_local_kv_heads, self.head_dim)
        xq, xk = _rotate_as_llama(xq, xk)
        xk, xv = _repeat_kv(xk, H // G), _repeat_kv(xv, H // G)
        xq, xk, xv = xq.transpose(1, 2), xk.transpose(1, 2), xv.transpose(1, 2)
        scores = torch.matmul(xq, xk.transpose(2, 3)) / math.sqrt(self.head_dim)
        scores = scores + self.mask[:, :, :seqlen, :seqlen]
        scores = self.attn_dropout(F.softmax(scores.float(), dim=-1).type_as(xq))
        output = torch.matmul(scores, xv).transpose(1, 2).contiguous().view(bsz, seqlen, -1)
        return self.resid_dropout(self.wo(output))


def _of_four(index: int, pattern: str = "(h d) c") -> Any:
    return rows("qkvo_w", f"r {pattern}", n_r=4, r=index)


@case(Core(_of_four(0), _of_four(1), _of_four(2), rows("qkvo_w", "r c (h d)", n_r=4, r=3)))
class SpeedrunOfOneParameter(nn.Module):
    """A later speed run: one parameter of four matrices, a gate by the first features, scores with a fixed scale."""

    def __init__(self) -> None:
        super().__init__()
        self.qkvo_w = nn.Parameter(torch.empty(4, H * WIDTH, MODEL))
        self.attn_gate = nn.Linear(12, H)
        self.lambdas = nn.Parameter(torch.tensor([0.5, 0.5]))

    def forward(self, x: Tensor) -> Tensor:
        b, t = x.shape[:2]
        q, k, v = F.linear(x, self.qkvo_w[:3].flatten(end_dim=1)).view(b, t, 3 * H, WIDTH).chunk(3, dim=-2)
        q, k = F.rms_norm(q, (WIDTH,)), F.rms_norm(k, (WIDTH,))
        q, k = (rotate_half(one.transpose(1, 2)) for one in (q, k))
        v = self.lambdas[0] * v
        y = F.scaled_dot_product_attention(q, k, v.transpose(1, 2), is_causal=True, scale=0.12).transpose(1, 2)
        y = y * torch.sigmoid(self.attn_gate(x[..., :12].detach())).view(b, t, H, 1)
        return F.linear(y.contiguous().view(b, t, H * WIDTH), self.qkvo_w[3])


@case(separate("c_q", "c_k", "c_v", "c_proj"))
class KeysOffsetInPart(nn.Module):
    """A speed run's keys: the second half of the features is that of the token before."""

    def __init__(self) -> None:
        super().__init__()
        self.c_q, self.c_k, self.c_v, self.c_proj = (nn.Linear(MODEL, MODEL, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = (m(x).view(b, t, H, -1) for m in (self.c_q, self.c_k, self.c_v))
        moved = torch.cat([k[:, :1, :, WIDTH // 2 :], k[:, :-1, :, WIDTH // 2 :]], dim=1)
        k = torch.cat([k[..., : WIDTH // 2], moved], -1)
        y = F.scaled_dot_product_attention(*(one.transpose(1, 2) for one in (q, k, v)))
        return self.c_proj(y.transpose(1, 2).contiguous().view_as(x))


@case(separate())
class TurnedTogether(Four):
    """Queries and keys are stacked, normed and turned in one go."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        qk = torch.stack((split(self.q(x)), split(self.k(x))))
        q, k = rotate_half(self.norm(qk)).unbind(0)
        return self.o(join(F.scaled_dot_product_attention(q, k, split(self.v(x)), is_causal=True)))


@case(
    Core(rows("q_proj.weight", centred="head"), rows("k_proj.weight", h=G, centred="head"), rows("v_proj.weight", h=G),
         rows("o_proj.weight", "c (h d)")),
)  # fmt: skip
class NormForEachHead(nn.Module):
    """StableLM 2: each head has a layer norm of its own, in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.o_proj = nn.Linear(MODEL, MODEL, bias=False), nn.Linear(MODEL, MODEL, bias=False)
        self.k_proj, self.v_proj = (nn.Linear(MODEL, G * WIDTH, bias=False) for _ in range(2))
        self.q_norms = nn.ModuleList(nn.LayerNorm(WIDTH, bias=False) for _ in range(H))
        self.k_norms = nn.ModuleList(nn.LayerNorm(WIDTH, bias=False) for _ in range(G))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = split(self.q_proj(x)), split(self.k_proj(x), G), split(self.v_proj(x), G)
        q = torch.cat([norm(one) for norm, one in zip(self.q_norms, torch.split(q, 1, dim=1))], dim=1)
        k = torch.cat([norm(one) for norm, one in zip(self.k_norms, torch.split(k, 1, dim=1))], dim=1)
        k, v = (one.repeat_interleave(H // G, dim=1) for one in (k, v))
        return self.o_proj(join(attend(rotate_half(q), rotate_half(k), v)))


@case(separate(keys=G, groups=(0, 1, 1, 0)), may_refuse="order|group")
class GroupsByIndex(Four):
    """Which key head a query head asks stands in a table."""

    def __init__(self) -> None:
        super().__init__(k=G * WIDTH, v=G * WIDTH)
        self.register_buffer("of_head", torch.tensor([0, 1, 1, 0]))

    def forward(self, x: Tensor) -> Tensor:
        k, v = split(self.k(x), G)[:, self.of_head], split(self.v(x), G).index_select(1, self.of_head)
        return self.o(join(_causal(split(self.q(x)) @ k.mT / WIDTH**0.5).softmax(-1) @ v))


@case(separate(heads_alone=True))
class KeysUnfolded(Four):
    """A sliding window without a mask: keys and values are unfolded, and each query asks the few that are its own."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split(m(x)) for m in (self.q, self.k, self.v))
        k, v = (F.pad(one, (0, 0, 3, 0)).unfold(2, 4, 1) for one in (k, v))
        dots = torch.einsum("bhnd,bhndw->bhnw", q * WIDTH**-0.5, k)
        is_before = torch.arange(x.shape[1])[:, None] + torch.arange(4) < 3
        weights = dots.masked_fill(is_before, torch.finfo(dots.dtype).min).softmax(dim=-1)
        return self.o(join(torch.einsum("bhnw,bhndw->bhnd", weights, v)))


@case(separate())
class HeadsOfTwoReaches(Four):
    """Half of the heads see four tokens, half see all; places turn the former alone."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split(m(x)) for m in (self.q, self.k, self.v))
        q, k = (torch.cat([rotate_half(one[:, : H // 2]), one[:, H // 2 :]], dim=1) for one in (q, k))
        at = torch.arange(x.shape[1])
        apart = at[:, None] - at
        masks = torch.stack([(apart < 0) | (apart > 3)] * (H // 2) + [apart < 0] * (H // 2))
        return self.o(join((q @ k.mT / WIDTH**0.5).masked_fill(masks, float("-inf")).softmax(-1) @ v))


@case(separate(heads_alone=True))
class RegistersInside(Four):
    """Learned tokens are put in front of the sequence inside of the layer, and dropped behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.registers = nn.Parameter(torch.randn(2, MODEL))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.cat([self.registers.expand(len(x), -1, -1), x], dim=1)
        out = self.o(join(F.scaled_dot_product_attention(split(self.q(y)), split(self.k(y)), split(self.v(y)))))
        return out[:, 2:]


@case(separate(rounds=2, heads_alone=True), tokens=8)
class SegmentsWithAPast(Four):
    """A training in segments: keys and values of the segment before are kept, without gradients, and asked as well."""

    def segment(self, x: Tensor, past: tuple[Tensor, Tensor] | None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        q, k, v = split(self.q(x)), split(self.k(x)), split(self.v(x))
        if past is not None:
            k, v = torch.cat((past[0], k), dim=-2), torch.cat((past[1], v), dim=-2)
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.o(join(out)), (k.detach(), v.detach())

    def forward(self, x: Tensor) -> Tensor:
        past, out = None, []
        for part in x.split(4, dim=1):
            y, past = self.segment(part, past)
            out.append(y)
        return torch.cat(out, 1)


@case(
    Core(
        tuple(rows("qkv.weight", "(r h d) c", h=1, n_r=8, r=r) for r in range(4)),
        tuple(rows("qkv.weight", "(r h d) c", h=1, n_r=8, r=r) for r in (4, 5)),
        tuple(rows("qkv.weight", "(r h d) c", h=1, n_r=8, r=r) for r in (6, 7)),
        rows("out.weight", "c (h d)"), scores="g r q k", head_axes="g r",
    ),
    inputs=("n c",),
)  # fmt: skip
class SinksWithoutABatch(nn.Module):
    """gpt-oss: tokens without a batch, groups as an axis, one more logit for each head that takes weight and goes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.sinks = nn.RMSNorm(MODEL, elementwise_affine=False), nn.Parameter(torch.empty(H))
        self.qkv, self.out = nn.Linear(MODEL, WIDTH * (H + 2 * G)), nn.Linear(H * WIDTH, MODEL)

    def sdpa(self, Q: Tensor, K: Tensor, V: Tensor) -> Tensor:
        n_tokens, n_heads, q_mult, d_head = Q.shape
        K = K[:, :, None, :].expand(-1, -1, q_mult, -1)
        V = V[:, :, None, :].expand(-1, -1, q_mult, -1)
        S = self.sinks.reshape(n_heads, q_mult, 1, 1).expand(-1, -1, n_tokens, -1)
        mask = torch.triu(Q.new_full((n_tokens, n_tokens), -float("inf")), diagonal=1)
        QK = torch.einsum("qhmd,khmd->hmqk", Q, K) * d_head**-0.5
        W = torch.softmax(torch.cat([QK + mask[None, None, :, :], S], dim=-1), dim=-1)[..., :-1]
        return torch.einsum("hmqk,khmd->qhmd", W, V).reshape(n_tokens, -1)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(x)
        q = qkv[:, : H * WIDTH].contiguous().view(-1, G, H // G, WIDTH)
        k = qkv[:, H * WIDTH : (H + G) * WIDTH].contiguous().view(-1, G, WIDTH)
        v = qkv[:, (H + G) * WIDTH :].contiguous().view(-1, G, WIDTH)
        return x + self.out(self.sdpa(q, k, v))


@case(
    Core(
        tuple(rows("fused_attn_ff_proj.weight", "(r h d) c", h=1, n_r=14, r=r) for r in range(4)),
        rows("fused_attn_ff_proj.weight", "(r h d) c", h=1, n_r=14, r=4),
        rows("fused_attn_ff_proj.weight", "(r h d) c", h=1, n_r=14, r=5),
        rows("attn_out.weight", "c (h d)"),
    ),
)
class PaLM(nn.Module):
    """One map for attention of one key head and a gated feed-forward part; both are added."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(MODEL, elementwise_affine=False)
        self.fused_dims = (H * WIDTH, WIDTH, WIDTH, 8 * WIDTH)
        self.fused_attn_ff_proj = nn.Linear(MODEL, sum(self.fused_dims), bias=False)
        self.attn_out, self.ff_out = nn.Linear(MODEL, MODEL, bias=False), nn.Linear(4 * WIDTH, MODEL, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v, ff = self.fused_attn_ff_proj(x).split(self.fused_dims, dim=-1)
        q = q.unflatten(-1, (H, WIDTH)).transpose(1, 2) * WIDTH**-0.5
        sim = _causal(torch.einsum("b h i d, b j d -> b h i j", q, k))
        out = torch.einsum("b h i j, b j d -> b h i d", sim.softmax(dim=-1), v)
        a, gate = ff.chunk(2, dim=-1)
        return self.attn_out(join(out)) + self.ff_out(F.silu(gate) * a)


@case(
    Core(
        rows("wq.weight"), rows("wkv_b.weight", "(h r d) c", n_r=2, r=0), rows("wkv_b.weight", "(h r d) c", n_r=2, r=1),
        rows("wo.weight", "c (h d)"), free=("query", "key", "value"), proved=(),
    ),
    may_refuse="share|all heads|gain|norm",
)  # fmt: skip
class LatentInOneMap(nn.Module):
    """DeepSeek V3: one map gives latents and the turned key of all heads; latents are normed with gains."""

    def __init__(self) -> None:
        super().__init__()
        self.wq = nn.Linear(MODEL, H * (WIDTH + 4), bias=False)
        self.wkv_a, self.kv_norm = nn.Linear(MODEL, 10 + 4), nn.RMSNorm(10)
        self.wkv_b, self.wo = nn.Linear(10, H * 2 * WIDTH, bias=False), nn.Linear(MODEL, MODEL)

    def forward(self, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        q_nope, q_pe = torch.split(self.wq(x).view(b, n, H, -1).transpose(1, 2), [WIDTH, 4], dim=-1)
        kv, k_pe = torch.split(self.wkv_a(x), [10, 4], dim=-1)
        kv = self.wkv_b(self.kv_norm(kv)).view(b, n, H, 2 * WIDTH).transpose(1, 2)
        k_nope, v = torch.split(kv, [WIDTH, WIDTH], dim=-1)
        q = torch.cat([q_nope, rotate_half(q_pe)], dim=-1)
        k = torch.cat([k_nope, rotate_half(k_pe.unsqueeze(1)).expand(-1, H, -1, -1)], dim=-1)
        return self.wo(join(F.scaled_dot_product_attention(q, k, v, is_causal=True)))


@case(separate())
class ScaledByPlaces(Four):
    """Llama 4: where nothing is turned, queries grow with the logarithm of their place."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split(m(x)) for m in (self.q, self.k, self.v))
        places = torch.arange(x.shape[1], dtype=x.dtype)
        scales = torch.log1p(torch.floor((places + 1.0) / 4)) * 0.1 + 1.0
        q = (q * scales.view(1, 1, -1, 1)).to(q.dtype)
        return self.o(join(F.scaled_dot_product_attention(q, k, v, is_causal=True)))


def _after(name: str, q: str, k: str, v: str, o: str, number: int, source: str) -> Core:
    return Core(
        rows(f"{name}.{q}.weight", source=source), rows(f"{name}.{k}.weight", source=source),
        rows(f"{name}.{v}.weight", source=source), rows(f"{name}.{o}.weight", "c (h d)"), number=number,
        proved=("query", "key"),
    )  # fmt: skip


class _Gemma(nn.Module):
    def __init__(self, window: int) -> None:
        super().__init__()
        self.window = window
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(MODEL, MODEL, bias=False) for _ in range(4))
        self.q_norm, self.k_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split(m(x)) for m in (self.q_proj, self.k_proj, self.v_proj))
        q, k = rotate_half(self.q_norm(q)), rotate_half(self.k_norm(k))
        scores = _causal(50.0 * torch.tanh(q @ k.mT / 50.0))
        if self.window:
            too_far = torch.ones_like(scores, dtype=torch.bool).tril(-self.window)
            scores = scores.masked_fill(too_far, -2.3819763e38)
        return self.o_proj(join(scores.softmax(-1) @ v))


@case(
    _after("layers.0.attn", "q_proj", "k_proj", "v_proj", "o_proj", 0, "layers.0.norm"),
    _after("layers.1.attn", "q_proj", "k_proj", "v_proj", "o_proj", 1, "layers.1.norm"),
    _after("layers.2.attn", "q_proj", "k_proj", "v_proj", "o_proj", 2, "layers.2.norm"),
    call=lambda module, x: module((x[..., 0] * 1000).long().abs() % 50),
)
class LocalLocalGlobal(nn.Module):
    """Gemma in small: two layers that see four tokens, then one that sees all, norms in front and behind."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, MODEL)
        self.layers = nn.ModuleList(
            nn.ModuleDict({"norm": nn.RMSNorm(MODEL), "attn": _Gemma(window), "post_norm": nn.RMSNorm(MODEL)})
            for window in (4, 4, 0)
        )

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) * MODEL**0.5
        for layer in self.layers:
            x = x + layer["post_norm"](layer["attn"](layer["norm"](x)))
        return F.linear(x, self.embed.weight)


@case(separate(heads_alone=True, rounds=2))
class ChunksOfQueries(Four):
    """Queries are taken four at a time, so that the scores of all are never held at once."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split(m(x)) for m in (self.q, self.k, self.v))
        out = torch.empty_like(q)
        for at in range(0, q.shape[2], 4):
            end = min(at + 4, q.shape[2])
            out[:, :, at:end] = (q[:, :, at:end] @ k.mT / WIDTH**0.5).softmax(dim=-1) @ v
        return self.o(join(out))


@case(separate(proved=()))
class SoftmaxInPieces(Four):
    """Flash attention by hand: keys in blocks, with a running largest score and a running sum."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split(m(x)) for m in (self.q, self.k, self.v))
        top = q.new_full((*q.shape[:3], 1), -1e9)
        total, out = torch.zeros_like(top), torch.zeros_like(v)
        for k_block, v_block in zip(k.split(3, dim=2), v.split(3, dim=2)):
            scores = q @ k_block.mT * WIDTH**-0.5
            new_top = torch.maximum(top, scores.amax(-1, keepdim=True))
            weights, shrink = torch.exp(scores - new_top), torch.exp(top - new_top)
            total = total * shrink + weights.sum(-1, keepdim=True)
            out = out * shrink + weights @ v_block
            top = new_top
        return self.o(join(out / total))


@case(separate(proved=("value", "output")), may_refuse="mix|several heads|share")
class SelectiveMask(Four):
    """Selective attention: what the first head asks is summed over the queries before, and taken from all scores."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split(m(x)) for m in (self.q, self.k, self.v))
        logits = _causal(q @ k.mT / WIDTH**0.5)
        said = F.relu(logits[:, 0].masked_fill(logits[:, 0].isinf(), 0.0))
        said = said * (1 - torch.eye(x.shape[1], dtype=x.dtype))
        said = torch.cat([said[:, :, :1] * 0, said[:, :, 1:]], -1).roll(1, -2)
        said = torch.cat([said[:, :1] * 0, said[:, 1:]], 1).cumsum(dim=-2)
        return self.o(join((logits - said[:, None]).softmax(dim=-1) @ v))


@case(separate(), refused="mix|several heads|other heads|sums of several terms")
class ComposedHeads(Four):
    """DCFormer: scores of all heads are mixed by matrices that queries and keys give."""

    def __init__(self) -> None:
        super().__init__()
        self.of_query, self.of_key = nn.Linear(MODEL, 2 * H), nn.Linear(MODEL, 2 * H)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split(m(x)) for m in (self.q, self.k, self.v))
        logits = q @ k.mT / WIDTH**0.5
        for dynamic, is_query in ((self.of_query, True), (self.of_key, False)):
            into, back = dynamic(x).unflatten(-1, (2, H)).unbind(2)
            axis = "t" if is_query else "s"
            small = torch.einsum(f"bhts,b{axis}h->bts", logits, into)
            logits = logits + torch.einsum(f"bts,b{axis}h->bhts", small, back)
        return self.o(join(logits.softmax(-1) @ v))


@case(
    Core(
        rows("q.weight", source="canon"), rows("k.weight", source="canon"), rows("v.weight", source="canon"),
        rows("o.weight", "c (h d)"),
    ),
)  # fmt: skip
class FilterInFront(Four):
    """Canon A: a token and the three before it, by a filter of each feature, are added to the input of all maps."""

    def __init__(self) -> None:
        super().__init__()
        self.canon = nn.Identity()
        self.filter = nn.Conv1d(MODEL, MODEL, 4, groups=MODEL, padding=3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.canon(x + self.filter(x.mT)[..., : x.shape[1]].mT)
        return self.o(join(attend(split(self.q(y)), split(self.k(y)), split(self.v(y)))))


@case(
    Core(*(rows("qkv.weight", "(r h d) c", n_r=3, r=r) for r in range(3)), rows("o.weight", "c (h d)"),
         heads_alone=True),
)  # fmt: skip
class FilterBehind(nn.Module):
    """Canon B: the same behind one map for queries, keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.o = nn.Linear(MODEL, 3 * MODEL, bias=False), nn.Linear(MODEL, MODEL)
        self.filter = nn.Conv1d(3 * MODEL, 3 * MODEL, 4, groups=3 * MODEL, padding=3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.qkv(x)
        y = y + self.filter(y.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2)
        q, k, v = (split(one) for one in y.chunk(3, -1))
        return self.o(join(F.scaled_dot_product_attention(q, k, v, is_causal=True)))


@case(separate(heads_alone=True))
class BlocksByTheirMeans(Four):
    """MoBA: the means of blocks of keys say which blocks a query may ask."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split(m(x)) for m in (self.q, self.k, self.v))
        size, n = 3, x.shape[1]
        of_block = torch.arange(n) // size
        count = int(of_block[-1]) + 1
        means = torch.stack([k[:, :, of_block == i].mean(2) for i in range(count)], 2)
        gate = torch.einsum("bhnd,bhcd->bhnc", q, means)
        gate = gate.masked_fill(torch.arange(count) == of_block[:, None], float("inf"))
        chosen = torch.zeros_like(gate, dtype=torch.bool).scatter(-1, gate.topk(2, -1).indices, True)
        scores = (q @ k.mT / WIDTH**0.5).masked_fill(~chosen[..., of_block], float("-inf"))
        return self.o(join(scores.softmax(-1) @ v))


@case(
    separate("q", "kv", "kv", "o", free=("query", "key"), proved=("query", "value", "output")),
    may_refuse="share|several maps|sum|same rows|all heads",
)
class KeysTiedToValues(nn.Module):
    """GTA: the first features of a key are those of the value, the others are turned and the same for all heads."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv, self.o = (nn.Linear(MODEL, MODEL, bias=False) for _ in range(3))
        self.k_rope = nn.Linear(MODEL, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, v = split(self.q(x)), split(self.kv(x))
        q = torch.cat([q[..., :4], rotate_half(q[..., 4:])], -1)
        turned = rotate_half(self.k_rope(x)[:, None]).expand(-1, H, -1, -1)
        return self.o(join(F.scaled_dot_product_attention(q, torch.cat([v[..., :4], turned], -1), v, is_causal=True)))


@case(separate(proved=("query", "key")), may_refuse="average|negative|sign")
class SignedWeights(Four):
    """Cog attention: a softmax of the sizes of scores, times their signs."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split(m(x)) for m in (self.q, self.k, self.v))
        scores = q @ k.mT / WIDTH**0.5
        return self.o(join((scores.sign() * scores.abs().softmax(-1)) @ v))


@case(separate(proved=()))
class EntmaxOfThreeHalves(Four):
    """Exact 1.5-entmax by sorting: its weights sum to one, and some are zero."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split(m(x)) for m in (self.q, self.k, self.v))
        z = q @ k.mT / WIDTH**0.5 / 2
        z = z - z.amax(-1, keepdim=True)
        ordered = z.sort(-1, descending=True).values
        count = torch.arange(1, z.shape[-1] + 1, dtype=z.dtype)
        mean, square = ordered.cumsum(-1) / count, (ordered**2).cumsum(-1) / count
        delta = (1 - count * (square - mean**2)) / count
        tau = mean - delta.clamp_min(0).sqrt()
        support = (tau <= ordered).sum(-1, keepdim=True)
        return self.o(join((z - tau.gather(-1, support - 1)).clamp_min(0) ** 2 @ v))


@case(separate(proved=()), may_refuse="softmax|not normalised")
class StickBreaking(Four):
    """Stick-breaking attention: what each key leaves is passed on to the one before."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split(m(x)) for m in (self.q, self.k, self.v))
        logits = q @ k.mT / WIDTH**0.5
        n = x.shape[1]
        mask = torch.ones(n, n, dtype=torch.bool).triu(0)
        log_z = F.logsigmoid(logits).masked_fill(mask, -1e5)
        log_beta = F.logsigmoid(-logits).masked_fill(mask, 0.0)
        re_cum = log_beta.flip(-1).cumsum(-1).flip(-1) - log_beta
        return self.o(join(torch.exp(log_z + re_cum) @ v))


@case(separate(proved=()), may_refuse="softmax|not normalised")
class Softpick(Four):
    """Rectified exponentials that need not sum to one."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split(m(x)) for m in (self.q, self.k, self.v))
        scores = q @ k.mT / WIDTH**0.5
        top = scores.amax(-1, keepdim=True).clamp_min(0)
        e = torch.exp(scores - top) - torch.exp(-top)
        return self.o(join(F.relu(e) / (e.abs().sum(-1, keepdim=True) + 1e-6) @ v))


@case(separate(heads_alone=True, proved=("query", "key")), may_refuse="softmaxes|several|memory|past")
class MemorizingTransformer(Four):
    """Keys and values of earlier text are asked by the same queries in a softmax of their own; a gate mixes both."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(H, 1, 1))
        self.register_buffer("memory", torch.randn(2, H, 9, WIDTH, generator=torch.Generator().manual_seed(3)))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split(m(x)) for m in (self.q, self.k, self.v))
        local = _causal(q @ k.mT / WIDTH**0.5).softmax(-1) @ v
        far = (q @ self.memory[0].mT / WIDTH**0.5).softmax(-1) @ self.memory[1]
        gate = self.bias.sigmoid()
        return self.o(join(far * gate + local * (1 - gate)))


@case(separate(proved=("query", "key")))
class DroppedHeads(Four):
    """Whole heads are dropped at random in training, and the others made larger."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split(m(x)) for m in (self.q, self.k, self.v))
        out = attend(q, k, v)
        if self.training:
            keep = (torch.rand(len(x), H, 1, 1) > 0.3).to(out.dtype)
            out = out * keep * (H / keep.sum(1, keepdim=True).clamp_min(1))
        return self.o(join(out))


@case(separate(proved=("query", "key")))
class AHeadIsMasked(Four):
    """BERT's mask of heads, with one head pruned by a zero."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("head_mask", torch.tensor([1.0, 1.0, 0.0, 1.0]))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split(m(x)) for m in (self.q, self.k, self.v))
        probs = nn.Softmax(dim=-1)(torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(WIDTH))
        context = torch.matmul(probs * self.head_mask.view(1, -1, 1, 1).to(probs.dtype), v)
        context = context.permute(0, 2, 1, 3).contiguous()
        return self.o(context.view(*context.size()[:-2], MODEL))


@case(separate(proved=("query", "key")), may_refuse="some of its heads do not|multiplied by zero|gives nothing")
class OutputsOfAHeadAreMasked(AHeadIsMasked):
    """The same by what the head gives, and not by its weights."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split(m(x)) for m in (self.q, self.k, self.v))
        return self.o(join(attend(q, k, v) * self.head_mask.view(1, -1, 1, 1)))


@case(separate(proved=("query", "key")))
class TheFirstHeadIsMasked(Four):
    """The head that is pruned comes first, and the mask is causal."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("head_mask", torch.tensor([0.0, 1.0, 1.0, 1.0]))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split(m(x)) for m in (self.q, self.k, self.v))
        weights = _causal(q @ k.mT / WIDTH**0.5).softmax(-1) * self.head_mask[:, None, None]
        return self.o(join(weights @ v))


def _half(role: int) -> Any:
    return rows("attn.qkv.weight", "(r h d) c", n_r=3, r=role, source="norm")


@case(Core(_half(0), _half(1), _half(2), rows("attn.proj.weight", "c (h d)")))
class HalfOfTheStreams(nn.Module):
    """A reversible layer: half of the features attend, and are added to the other half."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(12)
        self.attn = nn.ModuleDict({"qkv": nn.Linear(12, 72), "proj": nn.Linear(24, 12)})
        self.ff = nn.Sequential(nn.LayerNorm(12), nn.Linear(12, 24), nn.GELU(), nn.Linear(24, 12))

    def forward(self, x: Tensor) -> Tensor:
        x1, x2 = x.chunk(2, dim=-1)
        q, k, v = (split(one) for one in self.attn["qkv"](self.norm(x2)).chunk(3, dim=-1))
        y1 = x1 + self.attn["proj"](join(F.scaled_dot_product_attention(q, k, v)))
        return torch.cat([y1, x2 + self.ff(y1)], -1)


@case(
    Core(
        rows("W_Q", "h c d"), rows("W_K", "h c d"), rows("W_V", "h c d"), rows("W_O", "h d c"),
    ),
)  # fmt: skip
class WrittenForInterpreting(nn.Module):
    """Parameters of each head, biases of each head, and what each head gives kept apart until it is summed."""

    def __init__(self) -> None:
        super().__init__()
        self.W_Q, self.W_K, self.W_V = (nn.Parameter(torch.empty(H, MODEL, WIDTH)) for _ in range(3))
        self.b_Q, self.b_K, self.b_V = (nn.Parameter(torch.zeros(H, WIDTH)) for _ in range(3))
        self.W_O, self.b_O = nn.Parameter(torch.empty(H, WIDTH, MODEL)), nn.Parameter(torch.zeros(MODEL))
        self.register_buffer("IGNORE", torch.tensor(-1e5))

    def forward(self, normalized_resid_pre: Tensor) -> Tensor:
        import einops

        q, k, v = (
            einops.einsum(normalized_resid_pre, w, "b posn d_model, n d_model d_head -> b posn n d_head") + bias
            for w, bias in ((self.W_Q, self.b_Q), (self.W_K, self.b_K), (self.W_V, self.b_V))
        )
        scores = einops.einsum(q, k, "b posn_Q n d, b posn_K n d -> b n posn_Q posn_K")
        mask = torch.triu(torch.ones(scores.size(-2), scores.size(-1)), diagonal=1).bool()
        pattern = (scores / WIDTH**0.5).masked_fill_(mask, self.IGNORE).softmax(-1)
        z = einops.einsum(v, pattern, "b posn_K n d, b n posn_Q posn_K -> b posn_Q n d")
        result = einops.einsum(z, self.W_O, "b posn n d, n d d_model -> b posn n d_model")
        return einops.reduce(result, "b posn n d_model -> b posn d_model", "sum") + self.b_O


@case(
    Core(*(rows("tiny.weight", "(r h d) c", h=1, n_r=3, r=r) for r in range(3)),
         rows("tiny_out.weight", "c (h d)", h=1), scores="b q k", heads=1, head_axes="", proved=("query", "key")),
)  # fmt: skip
class TinyAttentionBesideAGate(nn.Module):
    """aMLP: one small head beside a gate over places."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(24, 48), nn.Linear(24, 24)
        self.places, self.norm = nn.Conv1d(7, 7, 1), nn.LayerNorm(24)
        self.tiny, self.tiny_out = nn.Linear(24, 24), nn.Linear(8, 24)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.tiny(x).chunk(3, -1)
        said = self.tiny_out(F.softmax(q @ k.mT * 8**-0.5, dim=-1) @ v)
        u, g = F.gelu(self.into(x)).chunk(2, dim=-1)
        return self.out(u * (self.places(self.norm(g)) + said))
