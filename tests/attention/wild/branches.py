"""Who is asked is chosen: blocks, branches, caches, rings of chunks, neighbours, packed sequences."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.attention.wild.idioms import attend, join, rotate_half, split
from tests.attention.wild.plain import Four
from tests.attention.wild.truth import WIDTH, Core, H, case, fused, rows, separate


@case(
    Core(rows("to_q.weight"), rows("to_kv_cmp.weight", "(r h d) c", n_r=2, r=0), None, rows("o.weight", "c (h d)"),
         number=0, heads_alone=True, free=("key", "value"), proved=("query",)),
    Core(rows("to_q.weight"), rows("to_k.weight"), rows("to_v.weight"), rows("o.weight", "c (h d)"), number=1,
         heads_alone=True, proved=()),
    Core(rows("to_q.weight"), rows("to_k_win.weight"), rows("to_v_win.weight"), rows("o.weight", "c (h d)"), number=2,
         heads_alone=True, proved=()),
    tokens=8, may_refuse="another attention in it \\(its projection `phi_k.2` takes the output of another linear map",
)  # fmt: skip
class CompressedSelectedSliding(nn.Module):
    """NSA whole: an MLP compresses blocks, their weights choose two blocks, a window slides; three gates."""

    def __init__(self) -> None:
        super().__init__()
        self.to_q, self.to_kv_cmp = nn.Linear(24, 24, bias=False), nn.Linear(24, 48, bias=False)
        self.to_k, self.to_v, self.to_k_win, self.to_v_win = (nn.Linear(24, 24, bias=False) for _ in range(4))
        self.phi_k = nn.Sequential(nn.Linear(2 * WIDTH, 16), nn.ReLU(), nn.Linear(16, WIDTH))
        self.phi_v = nn.Sequential(nn.Linear(2 * WIDTH, 16), nn.ReLU(), nn.Linear(16, WIDTH))
        self.gate, self.o = nn.Sequential(nn.Linear(24, 3 * H), nn.Sigmoid()), nn.Linear(24, 24, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        n = x.shape[1]
        q = split(self.to_q(x))
        ck, cv = (split(t) for t in self.to_kv_cmp(x).chunk(2, -1))
        ck, cv = (phi(t.unflatten(2, (-1, 2)).flatten(3)) for phi, t in ((self.phi_k, ck), (self.phi_v, cv)))
        p_cmp = (q @ ck.mT / WIDTH**0.5).softmax(-1)
        o_cmp = p_cmp @ cv
        top = p_cmp.sum(1).topk(2, -1).indices
        picked = torch.zeros(len(x), n, n // 2, dtype=torch.bool).scatter(2, top, True).repeat_interleave(2, 2)[:, None]
        k, v, kw, vw = (split(m(x)) for m in (self.to_k, self.to_v, self.to_k_win, self.to_v_win))
        o_sel = (q @ k.mT / WIDTH**0.5).masked_fill(~picked, -1e9).softmax(-1) @ v
        at = torch.arange(n)
        o_win = (q @ kw.mT / WIDTH**0.5).masked_fill((at[:, None] - at).abs() > 2, -1e9).softmax(-1) @ vw
        g = self.gate(x).view(*x.shape[:2], 3, H).permute(2, 0, 3, 1).unsqueeze(-1)
        return self.o(join(g[0] * o_cmp + g[1] * o_sel + g[2] * o_win))


@case(separate("wq", "wk", "wv", "wo", heads_alone=True, proved=("key", "output")), tokens=8)
class BlocksByAffinity(nn.Module):
    """MoBA: queries choose blocks by the means of keys; the block they lie in is always asked."""

    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(24, 24, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        q, k, v = (m(x).view(b, s, H, WIDTH) for m in (self.wq, self.wk, self.wv))
        means = k.view(b, s // 2, 2, H, WIDTH).mean(dim=2)
        gate = torch.einsum("bshd,bnhd->bhsn", q, means)
        own = torch.arange(s)[:, None] // 2 == torch.arange(s // 2)
        gate = gate.masked_fill(own, float("inf"))
        chosen = torch.zeros_like(gate, dtype=torch.bool).scatter_(-1, gate.topk(3, dim=-1).indices, True)
        bias = torch.zeros(b, H, s, s, dtype=x.dtype).masked_fill(~chosen.repeat_interleave(2, dim=-1), -1e9)
        out = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=bias)
        return self.wo(out.transpose(1, 2).reshape(b, s, -1))


@case(separate("q_proj", "k_proj", "v_proj", "out_proj", proved=()), tokens=8)
class RingOfChunks(nn.Module):
    """Ring attention on one machine: chunks of keys come round; maxima and sums are kept up to date."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(24, 24) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split(m(x)) for m in (self.q_proj, self.k_proj, self.v_proj))
        out, lse = None, None
        for kc, vc in zip(k.chunk(4, dim=2), v.chunk(4, dim=2)):
            s = q @ kc.mT * WIDTH**-0.5
            block_lse = torch.logsumexp(s, dim=-1, keepdim=True)
            block_out = torch.exp(s - block_lse) @ vc
            if out is None:
                out, lse = block_out, block_lse
            else:
                new_lse = torch.logaddexp(lse, block_lse)
                out = torch.exp(lse - new_lse) * out + torch.exp(block_lse - new_lse) * block_out
                lse = new_lse
        return self.out_proj(join(out))


@case(fused("Wqkv.weight", output="out_proj.weight", proved=()), tokens=8)
class SequencesWithoutPadding(nn.Module):
    """ModernBERT: all tokens of a batch in one row, with `cu_seqlens`, and a loop in place of flash."""

    def __init__(self) -> None:
        super().__init__()
        self.Wqkv, self.out_proj = nn.Linear(24, 72, bias=False), nn.Linear(24, 24, bias=False)

    def varlen(self, qkv: Tensor, cu_seqlens: Tensor) -> Tensor:
        outs = []
        for start, end in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist()):
            q, k, v = qkv[start:end].unbind(dim=1)
            q, k, v = (t.transpose(0, 1).unsqueeze(0) for t in (q, k, v))
            outs.append(F.scaled_dot_product_attention(q, k, v).squeeze(0).transpose(0, 1))
        return torch.cat(outs, dim=0)

    def forward(self, x: Tensor) -> Tensor:
        lengths = torch.tensor([x.shape[1], x.shape[1] - 3])
        mask = torch.arange(x.shape[1]) < lengths[:, None]
        cu_seqlens = F.pad(lengths.cumsum(0), (1, 0))
        tokens = x[mask]
        qkv = self.Wqkv(tokens).view(-1, 3, H, WIDTH)
        out = self.out_proj(self.varlen(qkv, cu_seqlens).reshape(len(tokens), 24))
        padded = torch.zeros_like(x)
        padded[mask] = out
        return padded


@case(separate(heads_alone=True, proved=("query", "output")), may_refuse="several|softmaxes|memory|past|buffer")
class NearestOfAMemory(Four):
    """kNN-attention: each head takes the three nearest keys of a memory, in one softmax with what is near."""

    def __init__(self) -> None:
        super().__init__()
        memory = torch.randn(2, H, 20, WIDTH, generator=torch.Generator().manual_seed(5))
        self.register_buffer("mem_k", memory[0])
        self.register_buffer("mem_v", memory[1])

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split(m(x)) for m in (self.q, self.k, self.v))
        near = torch.einsum("bhid,hjd->bhij", q, self.mem_k.to(q.dtype)).topk(3, -1).indices  # (b, h, n, 3)
        at = torch.arange(H)[None, :, None, None]
        mk, mv = self.mem_k.to(q.dtype)[at, near], self.mem_v.to(q.dtype)[at, near]
        far = torch.einsum("bhid,bhijd->bhij", q, mk) / math.sqrt(WIDTH)
        local = torch.einsum("bhid,bhjd->bhij", q, k) / math.sqrt(WIDTH)
        local = local.masked_fill(torch.ones(x.shape[1], x.shape[1]).triu(1).bool(), -1e9)
        p = torch.cat([far, local], -1).softmax(-1)
        out = torch.einsum("bhij,bhijd->bhid", p[..., :3], mv) + p[..., 3:] @ v
        return self.o(join(out))


@case(separate(proved=("value", "output"), rounds=5), tokens=9)
class PrefillThenDecode(Four):
    """A generation loop: a prompt fills a cache, then tokens come one by one; the answers are joined."""

    def step(self, x: Tensor, cache: dict[str, Tensor]) -> Tensor:
        past = cache["k"].shape[2] if "k" in cache else 0
        q, k, v = (split(m(x)) for m in (self.q, self.k, self.v))
        if past:
            k, v = torch.cat([cache["k"], k], dim=2), torch.cat([cache["v"], v], dim=2)
        cache["k"], cache["v"] = k, v
        at = torch.arange(past, past + x.shape[1])
        mask = torch.arange(k.shape[2])[None] <= at[:, None]
        return self.o(join(F.scaled_dot_product_attention(q, k, v, attn_mask=mask)))

    def forward(self, x: Tensor) -> Tensor:
        cache: dict[str, Tensor] = {}
        out = [self.step(x[:, :5], cache)]
        out.extend(self.step(x[:, t : t + 1], cache) for t in range(5, x.shape[1]))
        return torch.cat(out, 1)


@case(
    Core(rows("wq.weight"), rows("wk.weight", h=1), rows("wv.weight", h=1), rows("wo.weight", "c (h d)"),
         proved=("query",), heads_alone=True),
    may_refuse="mix|share|filter|several",
)  # fmt: skip
class LogitsOfTwoTokens(nn.Module):
    """Multi-token attention: scores of neighbouring queries and keys are blended by a filter of each head."""

    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wo = nn.Linear(24, 24, bias=False), nn.Linear(24, 24, bias=False)
        self.wk, self.wv = nn.Linear(24, WIDTH, bias=False), nn.Linear(24, WIDTH, bias=False)
        self.mta_kernel = nn.Parameter(torch.randn(H, 1, 2, 3))

    def forward(self, x: Tensor) -> Tensor:
        n = x.shape[1]
        q, k, v = split(self.wq(x)), self.wk(x).unsqueeze(1), self.wv(x).unsqueeze(1)
        causal = torch.ones(n, n).tril().bool()
        scores = (q @ k.transpose(2, 3) / math.sqrt(WIDTH)).masked_fill(~causal, 0.0)
        scores = F.conv2d(F.pad(scores, (1, 1, 1, 0)), self.mta_kernel, groups=H)
        scores = scores.masked_fill(~causal, float("-inf"))
        return self.wo(join(F.softmax(scores.float() if x.dtype != torch.float64 else scores, -1).type_as(q) @ v))


@case(fused("qkv.weight", output="proj.weight", scores="b h q k", proved=()), tokens=9)
class WindowsOfAStride(nn.Module):
    """Longformer in chunks with `as_strided`: every token asks itself and two on both sides."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(24, 72), nn.Linear(24, 24)

    def forward(self, x: Tensor) -> Tensor:
        b, n, c = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, H, c // H).permute(2, 0, 3, 1, 4)
        k, v = (F.pad(t, (0, 0, 2, 2)).contiguous() for t in (k, v))
        size = (b, H, n, 5, c // H)
        k, v = (t.as_strided(size, (*t.stride()[:2], t.stride(2), t.stride(2), t.stride(3))) for t in (k, v))
        out_of = F.pad(torch.zeros(n), (2, 2), value=1.0).unfold(0, 5, 1).bool()
        scores = (q[..., None, :] @ k.mT).squeeze(-2) * (c // H) ** -0.5
        weights = scores.masked_fill(out_of, float("-inf")).softmax(-1)
        out = (weights[..., None, :] @ v).squeeze(-2)
        return self.proj(out.transpose(1, 2).reshape(b, n, c))


@case(
    Core(rows("to_q.weight"), rows("to_kv.weight", "(r h d) c", n_r=2, r=0, takes=1), rows("to_kv.weight", "(r h d) c",
         n_r=2, r=1, takes=1), rows("to_out.0.weight", "c (h d)"), free=("key",), heads_alone=True, proved=("query",)),
    inputs=("b n c", "b m c"), may_refuse="tokens of|concat|two inputs|second token stream|streams",
)  # fmt: skip
class LatentsAmongWhatTheyAsk(nn.Module):
    """Flamingo's resampler as lucidrains writes it: keys are those of media and latents joined."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_media, self.norm_latents = nn.Identity(), nn.Identity()
        self.to_q, self.to_kv = nn.Linear(24, 24, bias=False), nn.Linear(24, 48, bias=False)
        self.to_out = nn.Sequential(nn.Linear(24, 24, bias=False), nn.Dropout(0.0))

    def forward(self, latents: Tensor, x: Tensor) -> Tensor:
        from einops import rearrange

        x, latents = self.norm_media(x), self.norm_latents(latents)
        q = self.to_q(latents)
        k, v = self.to_kv(torch.cat((x, latents), dim=-2)).chunk(2, dim=-1)
        q, k, v = (rearrange(t, "b n (h d) -> b h n d", h=H) for t in (q, k, v))
        sim = torch.einsum("... i d, ... j d -> ... i j", q * WIDTH**-0.5, k)
        sim = sim - sim.amax(dim=-1, keepdim=True).detach()
        out = torch.einsum("... i j, ... j d -> ... i d", sim.softmax(dim=-1), v)
        return self.to_out(rearrange(out, "b h n d -> b n (h d)"))


@case(separate(proved=("query", "key")), may_refuse="its queries are|sum")
class TurnedByContents(Four):
    """CoPE-like: the angle by which keys and queries turn is a running sum that a map of each token gives."""

    def __init__(self) -> None:
        super().__init__()
        self.delta = nn.Linear(24, H)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            at = F.softplus(self.delta(x)).cumsum(1).transpose(1, 2)[..., None]  # (b, h, n, 1)
        freqs = at * 0.5 ** torch.arange(WIDTH // 2).to(x.dtype)
        cos, sin = freqs.cos().repeat(1, 1, 1, 2), freqs.sin().repeat(1, 1, 1, 2)

        def turned(t: Tensor) -> Tensor:
            a, b = t.chunk(2, -1)
            return t * cos + torch.cat((-b, a), -1) * sin

        return self.o(join(attend(turned(split(self.q(x))), turned(split(self.k(x))), split(self.v(x)))))


@case(separate())
class SwappedByGather(Four):
    """Tokens are put in a random order, which is the same in each forward, attend, and are put back."""

    def forward(self, x: Tensor) -> Tensor:
        order = torch.randperm(x.shape[1], generator=torch.Generator().manual_seed(0))
        back = order.argsort()
        y = torch.gather(x, 1, order[None, :, None].expand_as(x))
        y = self.o(join(attend(*(rotate_half(split(m(y))) for m in (self.q, self.k)), split(self.v(y)))))
        return y.index_select(1, back)
