"""What language models of the last two years do to keys, values and scores."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.attention.wild.idioms import attend, join, rotate_half, split
from tests.attention.wild.plain import Four
from tests.attention.wild.truth import WIDTH, Core, H, case, fused, rows, separate


def _causal(n: int) -> Tensor:
    return torch.ones(n, n, dtype=torch.bool).triu(1)


class _AsksAPool(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.q_proj, self.o_proj = nn.RMSNorm(24), nn.Linear(24, 24), nn.Linear(24, 24)

    def forward(self, x: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q = split(self.q_proj(self.norm(x)))
        return x + self.o_proj(join(F.scaled_dot_product_attention(q, k, v, is_causal=True)))


@case(
    *(Core(rows(f"layers.{i}.q_proj.weight", source=f"layers.{i}.norm"),
           rows("k_pool.weight", "(l h d) c", h=1, n_l=2, l=i), rows("v_pool.weight", "(l h d) c", h=1, n_l=2, l=i),
           rows(f"layers.{i}.o_proj.weight", "c (h d)"), number=i,
           proved=("query", "key", "output") if i else ("query", "key")) for i in range(2)),
    may_refuse="without the weights of its keys|another module|another linear map",
)  # fmt: skip
class KeysOfAPool(nn.Module):
    """MLKV: all key heads of the model are made once, of its input, and each layer asks one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.k_pool, self.v_pool = nn.Linear(24, 2 * WIDTH, bias=False), nn.Linear(24, 2 * WIDTH, bias=False)
        self.layers = nn.ModuleList(_AsksAPool() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        keys, values = (m(x).unflatten(-1, (2, 1, WIDTH)).permute(2, 0, 3, 1, 4) for m in (self.k_pool, self.v_pool))
        for layer, k, v in zip(self.layers, keys, values, strict=True):
            x = layer(x, k.expand(-1, H, -1, -1), v.expand(-1, H, -1, -1))
        return x


@case(
    Core(rows("q.weight"),
         *(tuple(rows(f"up_{m}.{g}.weight", h=2, source=f"down.{g}", through=f"down.{g}.weight") for g in range(2))
           for m in "kv"), rows("o.weight", "c (h d)")),
    may_refuse="two projections in a row that are both split into heads",
)  # fmt: skip
class LatentOfEachGroup(nn.Module):
    """Grouped latent attention: each half of the heads has a latent of its own, with two heads of keys each."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.o = nn.Linear(24, 24, bias=False), nn.Linear(24, 24, bias=False)
        self.down = nn.ModuleList(nn.Linear(24, 7, bias=False) for _ in range(2))
        self.up_k, self.up_v = (nn.ModuleList(nn.Linear(7, 12, bias=False) for _ in range(2)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        latents = [down(x) for down in self.down]
        k, v = (torch.cat([up(c) for up, c in zip(ups, latents, strict=True)], -1) for ups in (self.up_k, self.up_v))
        q = rotate_half(split(self.q(x)))
        return self.o(join(F.scaled_dot_product_attention(q, rotate_half(split(k)), split(v), is_causal=True)))


@case(
    Core(rows("q.weight"), rows("k.weight"), rows("v_of_k.weight", source="k", through="k.weight"),
         rows("o.weight", "c (h d)")),
)  # fmt: skip
class ValuesOutOfKeys(nn.Module):
    """Slim attention: values are the whole of the keys times a square matrix, so that keys alone are cached."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v_of_k, self.o = (nn.Linear(24, 24, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        k = self.k(x)
        v = self.v_of_k(k)
        return self.o(join(attend(split(self.q(x)), split(k), split(v))))


@case(separate())
class WithoutItsOwnValue(Four):
    """Exclusive attention: what lies along a token's own value is taken from what its head gives."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split(m(x)) for m in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        own = F.normalize(v, dim=-1)
        y = y - (y * own).sum(dim=-1, keepdim=True) * own
        return self.o(join(y))


@case(
    Core(rows("wq", "h c d"), rows("wk", "h c d"), rows("wv", "h c d"), rows("wo", "h d c"), heads_alone=True),
    may_refuse="input of its own",
)
class EachHeadChoosesItsTokens(nn.Module):
    """MoSA: a router of each head takes six tokens, which ask each other; what it gives goes back to their places."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(24, H, bias=False)
        self.wq, self.wk, self.wv = (nn.Parameter(torch.randn(H, 24, WIDTH)) for _ in range(3))
        self.wo = nn.Parameter(torch.randn(H, WIDTH, 24))

    def forward(self, x: Tensor) -> Tensor:
        b, n, c = x.shape
        score, index = self.router(x).sigmoid().transpose(1, 2).topk(6, dim=-1)  # (b, h, k)
        picked = x[:, None].expand(b, H, n, c).gather(2, index[..., None].expand(-1, -1, -1, c))
        q, k, v = (torch.einsum("bhkc,hcd->bhkd", picked, w) for w in (self.wq, self.wk, self.wv))
        logits = q @ k.mT / WIDTH**0.5
        logits = logits.masked_fill(index[..., :, None] < index[..., None, :], -1e9)
        y = torch.einsum("bhkd,hdc->bhkc", logits.softmax(-1) @ v, self.wo) * score[..., None]
        return torch.zeros_like(x).scatter_add(1, index.flatten(1)[..., None].expand(-1, -1, c), y.flatten(1, 2))


@case(
    *(Core(*(rows(f"{m}.weight") for m in "qkv"), rows("o.weight", "c (h d)"), number=i, heads_alone=True,
           proved=("query", "value", "output")) for i in (1,)),
)  # fmt: skip
class KeysKeptByTheLastQueries(Four):
    """SnapKV: the weights of the last two queries say which six tokens each head keeps of the past."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split(m(x)) for m in (self.q, self.k, self.v))
        with torch.no_grad():
            votes = (q[:, :, -2:] @ k.mT / WIDTH**0.5).softmax(-1).sum(2)
        kept = votes.topk(6, -1).indices.sort(-1).values[..., None].expand(-1, -1, -1, WIDTH)
        k, v = k.gather(2, kept), v.gather(2, kept)
        return self.o(join((q @ k.mT / WIDTH**0.5).softmax(-1) @ v))


@case(separate(), may_refuse="its keys are sums of the outputs of")
class PathOfReflections(Four):
    """PaTH: between two tokens lie the reflections of all tokens in between, of vectors that a map gives."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.beta = nn.Linear(24, 24, bias=False), nn.Linear(24, H)

    def forward(self, x: Tensor) -> Tensor:
        n = x.shape[1]
        q, k, v, w = (split(m(x)) for m in (self.q, self.k, self.v, self.w))
        w, beta = F.normalize(w, dim=-1), 2 * self.beta(x).sigmoid().transpose(1, 2)
        columns, keys = [], k[:, :, :0]
        for t in range(n):
            wt = w[:, :, t : t + 1]
            keys = keys - beta[:, :, t, None, None] * (keys * wt).sum(-1, keepdim=True) * wt
            keys = torch.cat([keys, k[:, :, t : t + 1]], 2)
            columns.append(F.pad((q[:, :, t : t + 1] * keys).sum(-1), (0, n - t - 1), value=-1e9))
        scores = torch.stack(columns, 2) / math.sqrt(WIDTH)
        return self.o(join(F.softmax(scores, dim=-1) @ v))


@case(separate(heads_alone=True))
class ScoresNormedOverKeys(Four):
    """NormSoftmax: the scores of a query lose their mean and get the same spread before the softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(H, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split(m(x)) for m in (self.q, self.k, self.v))
        scores = q @ k.mT
        spread = scores.std(-1, keepdim=True, unbiased=False)
        scores = (scores - scores.mean(-1, keepdim=True)) / (spread + 1e-6)
        return self.o(join(torch.softmax(self.gain * scores, -1) @ v))


@case(fused("c_attn.weight", output="c_proj.weight"))
class SpansThatLearn(nn.Module):
    """Adaptive span: weights are multiplied with a ramp whose reach each head learns, and normed again."""

    def __init__(self) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(24, 72), nn.Linear(24, 24)
        self.span = nn.Parameter(torch.full((H, 1, 1), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        n = x.shape[1]
        q, k, v = (split(t) for t in self.c_attn(x).split(24, dim=2))
        attn = ((q @ k.transpose(-2, -1)) / WIDTH**0.5).masked_fill(_causal(n), float("-inf")).softmax(-1)
        distance = (torch.arange(n)[:, None] - torch.arange(n)).to(x.dtype)
        ramp = ((self.span.sigmoid() * n + 3 - distance) / 3 + 1).clamp(0, 1)
        attn = attn * ramp
        attn = attn / (attn.sum(-1, keepdim=True) + 1e-8)
        return self.c_proj(join(attn @ v))


@case(
    *(Core(rows(f"attn.{i}.q.weight", source=f"norms.{i}"), rows(f"attn.{i}.k.weight", source=f"norms.{i}"),
           rows(f"attn.{i}.v.weight", source=f"norms.{i}"), rows(f"attn.{i}.o.weight", "c (h d)"), number=2 * i + 1,
           heads_alone=True, proved=("query", "key")) for i in range(2)),
)  # fmt: skip
class LayersWeighTheLayersBefore(nn.Module):
    """Attention residuals: what a layer takes is an average of all layers before, by a vector and a norm of each."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.ModuleList(nn.ModuleDict({m: nn.Linear(24, 24, bias=False) for m in "qkvo"}) for _ in range(2))
        self.norms = nn.ModuleList(nn.RMSNorm(24) for _ in range(2))
        self.asks = nn.ParameterList(nn.Parameter(torch.zeros(24)) for _ in range(3))

    def _take(self, past: list[Tensor], ask: Tensor) -> Tensor:
        stack = torch.stack(past)
        weights = torch.einsum("c,lbnc->lbn", ask, F.rms_norm(stack, (24,))).softmax(0)
        return torch.einsum("lbn,lbnc->bnc", weights, stack)

    def forward(self, x: Tensor) -> Tensor:
        past = [x]
        for maps, norm, ask in zip(self.attn, self.norms, self.asks, strict=False):
            h = norm(self._take(past, ask))
            q, k, v = (split(maps[m](h)) for m in "qkv")  # type: ignore[index]
            past.append(maps["o"](join(F.scaled_dot_product_attention(q, k, v, is_causal=True))))  # type: ignore[index]
        return self._take(past, self.asks[-1])


@case(
    Core(*(rows(f"wq_wk_wv.{i}.weight", computed=f"wq_wk_wv.{i}") for i in range(3)),
         rows("wo.weight", "c (h d)", computed="wo"), heads_alone=True, proved=("query", "key", "value")),
)  # fmt: skip
class WeightsOfUnitRows(nn.Module):
    """nGPT as some write it: every matrix is normed when it is used, and queries and keys once more."""

    class Unit(nn.Module):
        def __init__(self, dim: int) -> None:
            super().__init__()
            self.weight, self.dim = nn.Parameter(torch.randn(24, 24)), dim

        def matrix(self) -> Tensor:
            return F.normalize(self.weight, dim=self.dim)

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.matrix())

    def __init__(self) -> None:
        super().__init__()
        self.wq_wk_wv = nn.ModuleList(self.Unit(-1) for _ in range(3))
        self.wo = self.Unit(0)
        self.s_qk = nn.Parameter(torch.ones(H, 1, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split(m(x)) for m in self.wq_wk_wv)
        q, k = (F.normalize(t, dim=-1) * self.s_qk for t in (q, k))
        return F.normalize(x + self.wo(join(F.scaled_dot_product_attention(q, k, v, scale=WIDTH**0.5))), dim=-1)


@case(separate("q_proj", "k_proj", "v_proj", "o_proj", keys=2))
class QueriesScaledByAMap(nn.Module):
    """Scale-aware attention: a map of the token gives each query head a temperature; groups, norms, an output gate."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.o_proj = nn.Linear(24, 24, bias=False), nn.Linear(24, 24, bias=False)
        self.k_proj, self.v_proj = nn.Linear(24, 12, bias=False), nn.Linear(24, 12, bias=False)
        self.heat, self.gate_down, self.gate_up = nn.Linear(24, H), nn.Linear(24, 3), nn.Linear(3, 24)
        self.q_norm = self.k_norm = nn.RMSNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = split(self.q_proj(x)), split(self.k_proj(x), 2), split(self.v_proj(x), 2)
        q, k = self.q_norm(q) * F.softplus(self.heat(x)).transpose(1, 2)[..., None], self.k_norm(k)
        y = F.scaled_dot_product_attention(rotate_half(q), rotate_half(k), v, is_causal=True, enable_gqa=True)
        return self.o_proj(join(y) * self.gate_up(self.gate_down(x)).sigmoid())


@case(
    Core(*(rows(f"query_key_value.{i}.weight") for i in range(3)), rows("dense.weight", "c (h d)")),
    inputs=("b n c", "b n c"),
)
class EmbeddingBesideValues(nn.Module):
    """Value embeddings: a second input, times a number of each head, is added to the values before they are weighed."""

    def __init__(self) -> None:
        super().__init__()
        self.query_key_value = nn.ModuleList(nn.Linear(24, 24, bias=False) for _ in range(3))
        self.dense, self.lambdas = nn.Linear(24, 24, bias=False), nn.Parameter(torch.ones(H))

    def forward(self, x: Tensor, ve: Tensor) -> Tensor:
        q, k, v = (split(m(x)) for m in self.query_key_value)
        v = v + self.lambdas[:, None, None] * split(ve)
        return self.dense(join(F.scaled_dot_product_attention(q, k, v, is_causal=True)))


@case(
    Core(rows("q.weight"), rows("k.weight"), rows("v.weight"), rows("o.weight", "c (h d)"), heads_alone=True,
         scores="b h q k"),
    tokens=8,
)  # fmt: skip
class SequenceForHeads(Four):
    """Ulysses on one machine: two ranks hold halves of the tokens, trade them for halves of the heads, and back."""

    @staticmethod
    def _trade(parts: list[Tensor], split_dim: int, cat_dim: int) -> list[Tensor]:
        pieces = [part.chunk(2, split_dim) for part in parts]
        return [torch.cat([pieces[rank][other] for rank in range(2)], cat_dim) for other in range(2)]

    def forward(self, x: Tensor) -> Tensor:
        ranks = x.chunk(2, 1)
        q, k, v = (self._trade([m(part).unflatten(-1, (H, WIDTH)) for part in ranks], 2, 1)
                   for m in (self.q, self.k, self.v))  # fmt: skip
        q, k, v = (torch.cat(t, 2).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2)
        y = self._trade(list(y.chunk(2, 2)), 1, 2)
        return torch.cat([self.o(part.flatten(2)) for part in y], 1)
