"""Attention of pictures, meshes, molecules, series and records, as their papers write it."""

from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F

from tests.attention.wild.idioms import attend, join, split
from tests.attention.wild.plain import Four
from tests.attention.wild.truth import WIDTH, Core, H, case, fused, rows, separate


@case(
    Core(*(rows(f"local.{i}.weight") for i in range(3)), rows("out.weight", "c (h d)"), proved=("query", "key")),
    Core(*(rows(f"whole.{i}.weight") for i in range(3)), rows("out.weight", "c (h d)"), number=1, query_token=0,
         proved=("query", "key", "value")),
)  # fmt: skip
class TheFirstTokenHasMapsOfItsOwn(nn.Module):
    """Longformer: a window for all, and the first token, by maps of its own, asks everything; one map behind both."""

    def __init__(self) -> None:
        super().__init__()
        self.local, self.whole = (nn.ModuleList(nn.Linear(24, 24) for _ in range(3)) for _ in range(2))
        self.out = nn.Linear(24, 24)

    def forward(self, x: Tensor) -> Tensor:
        at = torch.arange(x.shape[1])
        near = ((at[:, None] - at).abs() <= 2) | (at == 0)
        q, k, v = (split(m(x)) for m in self.local)
        y = join((q @ k.mT / WIDTH**0.5).masked_fill(~near, -1e9).softmax(-1) @ v)
        q, k, v = (split(m(part)) for m, part in zip(self.whole, (x[:, :1], x, x), strict=True))
        first = join((q @ k.mT / WIDTH**0.5).softmax(-1) @ v)
        return self.out(torch.cat([first, y[:, 1:]], 1))


@case(
    Core(rows("q.0.weight", "(h d) c", source="every"), rows("kv.0.weight", "(h r d) c", n_r=2, r=0),
         rows("kv.0.weight", "(h r d) c", n_r=2, r=1), rows("proj.1.weight", "c (h d)"), free=("query", "key", "value"),
         heads_alone=True, proved=("query", "key")),
)  # fmt: skip
class FewerTokensAsk(nn.Module):
    """LeViT: every second token asks, batch norms lie behind all maps, an activation in front of the last."""

    class Every(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x[:, ::2]

    def __init__(self) -> None:
        super().__init__()
        self.every = self.Every()
        self.q, self.kv = nn.ModuleList([nn.Linear(24, 24, bias=False), nn.BatchNorm1d(24)]), nn.ModuleList(
            [nn.Linear(24, 48, bias=False), nn.BatchNorm1d(48)])  # fmt: skip
        self.proj = nn.Sequential(nn.Hardswish(), nn.Linear(24, 24, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        q, kv = self.q[0](self.every(x)), self.kv[0](x)
        q, kv = self.q[1](q.flatten(0, 1)).view_as(q), self.kv[1](kv.flatten(0, 1)).view_as(kv)
        k, v = kv.unflatten(-1, (H, 2 * WIDTH)).transpose(1, 2).split(WIDTH, -1)
        return self.proj(join(attend(split(q), k, v)))


@case(
    Core(*(rows("qkv.weight", "(r h d) c u w", n_r=3, r=r) for r in range(3)), rows("proj.weight", "c (h d) u w"),
         scores="b h p q k", heads_alone=True),
    inputs=("b c x y",), may_refuse="unfold",
)  # fmt: skip
class DilationsOfHeads(nn.Module):
    """DilateFormer: each pixel asks nine around it; half of the heads look next to it, half two steps away."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Conv2d(24, 72, 1, bias=False), nn.Conv2d(24, 24, 1)

    def forward(self, x: Tensor) -> Tensor:
        b, _, height, width = x.shape
        parts = []
        roles = rearrange(self.qkv(x), "b (r g c) x y -> g r b c x y", r=3, g=2)
        for step, (q, k, v) in zip((1, 2), roles, strict=True):
            k, v = (
                F.unfold(t, 3, dilation=step, padding=step)
                .view(b, H // 2, WIDTH, 9, height * width)
                .permute(0, 1, 4, 3, 2)
                for t in (k, v)
            )
            q = q.reshape(b, H // 2, WIDTH, height * width).permute(0, 1, 3, 2).unsqueeze(3)
            parts.append((q * WIDTH**-0.5, k, v))
        q, k, v = (torch.cat(t, 1) for t in zip(*parts, strict=True))
        out = (q @ k.transpose(-2, -1)).softmax(-1) @ v
        return self.proj(rearrange(out, "b h (x y) u d -> b (h u d) x y", x=height))


@case(
    Core(*(rows("attn_qkv.weight", "(r h d) c", n_r=3, r=r, h=2) for r in range(3)), None, heads=2,
         free=("output",), heads_alone=True, proved=("query", "key", "value")),
    may_refuse="part of",
)  # fmt: skip
class PartOfTheChannelsAttends(nn.Module):
    """Inception transformer: twelve features attend, the others are pooled or filtered; one map mixes all."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attn_qkv = nn.LayerNorm(24), nn.Linear(12, 36)
        self.filter, self.fuse = nn.Conv1d(6, 6, 3, padding=1, groups=6), nn.Linear(24, 24)

    def forward(self, x: Tensor) -> Tensor:
        low, filtered, pooled = self.norm(x).split([12, 6, 6], -1)
        q, k, v = (split(t, 2) for t in self.attn_qkv(low).chunk(3, -1))
        low = join(F.scaled_dot_product_attention(q, k, v))
        filtered = self.filter(filtered.mT).mT
        pooled = F.max_pool1d(pooled.mT, 3, 1, 1).mT
        return x + self.fuse(torch.cat([low, filtered, pooled], -1))


@case(separate(heads_alone=True, proved=("query", "key", "output")), tokens=8)
class MergedTokens(Four):
    """ToMe: of every second token the two that are most like a neighbour are merged, and spread again behind."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            y = F.normalize(x, dim=-1)
            best, where = (y[:, ::2] @ y[:, 1::2].mT).max(-1)
            order = best.argsort(-1, descending=True)
            merged, rest = order[:, :2], order[:, 2:].sort(-1).values
        take = lambda t, index: t.gather(1, index[..., None].expand(-1, -1, t.shape[-1]))  # noqa: E731
        target = where.gather(1, merged)[..., None].expand(-1, -1, 24)
        odd = x[:, 1::2].scatter_reduce(1, target, take(x[:, ::2], merged), reduce="mean")
        tokens = torch.cat([take(x[:, ::2], rest), odd], 1)
        tokens = self.o(join(attend(split(self.q(tokens)), split(self.k(tokens)), split(self.v(tokens)))))
        few, odd = tokens.split([rest.shape[1], odd.shape[1]], 1)
        even = torch.zeros_like(x[:, ::2]).scatter(1, rest[..., None].expand(-1, -1, 24), few)
        even = even.scatter(1, merged[..., None].expand(-1, -1, 24), take(odd, where.gather(1, merged)))
        return torch.stack([even, odd], 2).flatten(1, 2)


@case(separate(heads_alone=True, scores="b h g q k", proved=("query", "key", "output")), tokens=8)
class AtomsInWindows(Four):
    """AlphaFold 3: blocks of two atoms ask the six around them, in a padded sequence; a condition scales and gates."""

    def __init__(self) -> None:
        super().__init__()
        self.condition, self.bias = nn.Linear(24, 48), nn.Parameter(torch.zeros(H, 1, 2, 6))
        self.gate = nn.Linear(24, 24)

    def forward(self, x: Tensor) -> Tensor:
        scale, shift = self.condition(x.mean(1, keepdim=True)).chunk(2, -1)
        s = F.layer_norm(x, (24,)) * scale.sigmoid() + shift
        q, k, v = (split(m(s)) for m in (self.q, self.k, self.v))
        q = q.unflatten(2, (-1, 2))
        real = F.pad(torch.ones(x.shape[1], dtype=torch.bool), (2, 2)).unfold(0, 6, 2)
        k, v = (F.pad(t, (0, 0, 2, 2)).unfold(2, 6, 2) for t in (k, v))  # (b, h, g, d, 6)
        scores = q @ k / WIDTH**0.5 + self.bias
        weights = scores.masked_fill(~real[:, None], -1e9).softmax(-1)
        y = (weights @ v.mT).flatten(2, 3)
        return self.o(join(y) * self.gate(s).sigmoid())


@case(separate(heads_alone=True, scores="b h q k"), may_refuse="a key of 7 features depends on only 6")
class OnTheHyperboloid(Four):
    """Lorentz attention: each head's vectors get a time of their own; scores are inner products that take it away."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split(m(x)) for m in (self.q, self.k, self.v))
        q, k, v = (torch.cat([(1 + t.square().sum(-1, keepdim=True)).sqrt(), t], -1) for t in (q, k, v))
        inner = torch.cat([-q[..., :1], q[..., 1:]], -1) @ k.mT
        y = ((2 + 2 * inner) * self.scale).softmax(-1) @ v
        length = (y[..., :1].square() - y[..., 1:].square().sum(-1, keepdim=True)).clamp_min(1e-8).sqrt()
        return self.o(join((y / length)[..., 1:]))


@case(
    Core(rows("q.weight"), rows("k.weight"), None, rows("o.weight", "c (h d)"), heads_alone=True, mixes=True,
         free=("value", "output"), proved=("query", "key")), tokens=8, may_refuse="complex|Fourier|fft",
)  # fmt: skip
class ModesAskModes(nn.Module):
    """FEDformer: frequencies of queries ask those of keys; the softmax is of the sizes of complex products."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.o = (nn.Linear(24, 24) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        q, k = (split(m(x)).mT for m in (self.q, self.k))  # (b, h, d, n)
        modes_q, modes_k = (torch.fft.rfft(t, dim=-1) for t in (q, k))
        scores = torch.einsum("bhex,bhey->bhxy", modes_q, modes_k).abs().softmax(dim=-1)
        y = torch.einsum("bhxy,bhey->bhex", torch.complex(scores, torch.zeros_like(scores)), modes_k)
        return self.o(join(torch.fft.irfft(y / 24, n=x.shape[1]).mT))


@case(
    Core(rows("ask.weight"), rows("answer.weight", "(r h d) c", n_r=2, r=0, takes=1),
         rows("answer.weight", "(r h d) c", n_r=2, r=1, takes=1), rows("back.weight", "c (h d)"),
         scores="b h q k", heads_alone=True), inputs=("b n c", "b x m c"),
)  # fmt: skip
class RetrievedDocuments(nn.Module):
    """Fusion in the decoder: four retrieved documents are one long memory, with a place of each document added."""

    def __init__(self) -> None:
        super().__init__()
        self.ask, self.answer = nn.Linear(24, 24, bias=False), nn.Linear(24, 48, bias=False)
        self.back, self.rank = nn.Linear(24, 24, bias=False), nn.Parameter(torch.zeros(4, H))

    def forward(self, x: Tensor, documents: Tensor) -> Tensor:
        b, r, m, _ = documents.shape
        k, v = rearrange(self.answer(documents), "b r m (two h d) -> two b h (r m) d", two=2, h=H)
        bias = self.rank.T.repeat_interleave(m, 1)[None, :, None]
        y = F.scaled_dot_product_attention(split(self.ask(x)), k, v, attn_mask=bias.expand(b, H, x.shape[1], r * m))
        return self.back(join(y))


@case(
    Core(rows("q.weight"), rows("kv.weight", "(r h d) c", n_r=2, r=0), rows("kv.weight", "(r h d) c", n_r=2, r=1),
         rows("o.weight", "c (h d)"), query_token=6),
)  # fmt: skip
class LastTokensAskAll(nn.Module):
    """Perceiver AR: the last three tokens ask the whole sequence, causally, and alone go on."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv, self.o = nn.Linear(24, 24), nn.Linear(24, 48), nn.Linear(24, 24)

    def forward(self, x: Tensor) -> Tensor:
        last = x[:, -3:]
        k, v = (split(t) for t in self.kv(x).chunk(2, -1))
        mask = torch.ones(3, x.shape[1], dtype=torch.bool).tril(x.shape[1] - 3)
        return last + self.o(join(F.scaled_dot_product_attention(split(self.q(last)), k, v, attn_mask=mask)))


@case(fused(heads_alone=False), inputs=("b n c",))
class AnglesThatLearn(nn.Module):
    """RoPE-Mixed: places of a grid turn pairs by angles that each head learns for rows and for columns."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.o = nn.Linear(24, 72), nn.Linear(24, 24)
        self.freqs = nn.Parameter(torch.rand(2, H, WIDTH // 2))

    def forward(self, x: Tensor) -> Tensor:
        at = torch.arange(x.shape[1], dtype=x.dtype)
        theta = torch.einsum("n,hd->hnd", at // 3, self.freqs[0]) + torch.einsum("n,hd->hnd", at % 3, self.freqs[1])
        turn = torch.polar(torch.ones_like(theta), theta)
        q, k, v = self.qkv(x).reshape(*x.shape[:2], 3, H, WIDTH).permute(2, 0, 3, 1, 4)
        q, k = (torch.view_as_real(torch.view_as_complex(t.unflatten(-1, (-1, 2)).contiguous()) * turn).flatten(3)
                for t in (q, k))  # fmt: skip
        return self.o(join(F.scaled_dot_product_attention(q, k, v)))


@case(
    Core(rows("to_q.weight", takes=1), rows("to_k.weight"), rows("to_v.weight"), rows("to_out.weight", "c (h d)"),
         heads_alone=True), inputs=("b n c", "b m c", "b c"),
    may_refuse="and not as their sum",
)  # fmt: skip
class AConditionScalesQueries(nn.Module):
    """FiLM in attention: a vector of the whole sample scales queries and keys, feature by feature; a set is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.to_q, self.to_k, self.to_v, self.to_out = (nn.Linear(24, 24, bias=False) for _ in range(4))
        self.film = nn.Sequential(nn.SiLU(), nn.Linear(24, 48))

    def forward(self, items: Tensor, query: Tensor, condition: Tensor) -> Tensor:
        of_q, of_k = (1 + self.film(condition)).chunk(2, -1)
        q, k, v = self.to_q(query) * of_q[:, None], self.to_k(items) * of_k[:, None], self.to_v(items)
        return self.to_out(join(attend(split(q), split(k), split(v))))


@case(
    Core(*(tuple(rows(f"maps.{m}{i}.weight", h=1) for i in range(H)) for m in "qkv"), rows("mix.weight", "c (h d)"),
         loop=True),
)  # fmt: skip
class HeadsByName(nn.Module):
    """Maps of each head in one dictionary, found by `f"q{i}"`, with a temperature each; joined and mixed."""

    def __init__(self) -> None:
        super().__init__()
        self.maps = nn.ModuleDict({f"{m}{i}": nn.Linear(24, WIDTH, bias=False) for i in range(H) for m in "qkv"})
        self.heat = nn.ParameterDict({f"t{i}": nn.Parameter(torch.ones(())) for i in range(H)})
        self.mix = nn.Linear(24, 24)

    def head(self, x: Tensor, i: int) -> Tensor:
        q, k, v = (self.maps[f"{m}{i}"](x) for m in "qkv")
        return F.softmax(q @ k.mT / self.heat[f"t{i}"].abs().clamp_min(0.1), dim=-1) @ v

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(torch.cat([self.head(x, i) for i in range(H)], dim=-1))


@case(
    *(Core(rows(f"heads.{i}.q.weight", h=1), rows(f"heads.{i}.k.weight", h=1), rows(f"heads.{i}.v.weight", h=1),
           rows(f"heads.{i}.o.weight", "c (h d)", h=1), heads=1, number=i, loop=True) for i in range(3)),
    may_refuse="width",
)  # fmt: skip
class HeadsOfEveryWidth(nn.Module):
    """An architecture search left heads of widths 4, 8 and 10, whose parts are summed."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(
            nn.ModuleDict({**{m: nn.Linear(24, w, bias=False) for m in "qkv"}, "o": nn.Linear(w, 24, bias=False)})
            for w in (4, 8, 10)
        )

    def forward(self, x: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for head in self.heads:
            q, k, v = (head[m](x) for m in "qkv")  # type: ignore[index]
            out = out + head["o"](attend(q, k, v))  # type: ignore[index]
        return out


@case(separate("proj_q", "proj_k", "proj_v", "fc", heads_alone=True, scores="b h q k"))
class MoreHeadsForTheFuture(nn.Module):
    """A forecaster: learned queries of the horizon are added to the last state, and ask the past, decayed by time."""

    def __init__(self) -> None:
        super().__init__()
        self.proj_q, self.proj_k, self.proj_v, self.fc = (nn.Linear(24, 24) for _ in range(4))
        self.horizon, self.decay = nn.Parameter(torch.randn(5, 24)), nn.Parameter(torch.zeros(H))

    def forward(self, x: Tensor) -> Tensor:
        ahead = x[:, -1:] + self.horizon
        q, k, v = split(self.proj_q(ahead)), split(self.proj_k(x)), split(self.proj_v(x))
        age = torch.arange(x.shape[1] - 1, -1, -1, dtype=x.dtype)
        bias = -F.softplus(self.decay)[:, None, None] * torch.log1p(age)
        return self.fc(join(torch.softmax(q @ k.mT / WIDTH**0.5 + bias, -1) @ v))
