"""Speech, music, series and text: places in scores, decay, filters beside, complex numbers by hand, codebooks."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.attention.wild.idioms import angles, attend, join, split
from tests.attention.wild.plain import Four
from tests.attention.wild.truth import WIDTH, Core, H, case, fused, rows, separate


@case(separate())
class TurnedAndDecayed(Four):
    """xPos: what turns queries grows with the place, what turns keys shrinks."""

    def forward(self, x: Tensor) -> Tensor:
        n = x.shape[1]
        base = (torch.arange(0, WIDTH, 2) + 0.4 * WIDTH) / (1.4 * WIDTH)
        scale = (base ** ((torch.arange(n) - n // 2)[:, None] / 8)).to(x.dtype)
        theta = angles(n, WIDTH, x)

        def turn(t: Tensor, s: Tensor) -> Tensor:
            sin, cos = ((f(theta) * s).repeat_interleave(2, -1) for f in (torch.sin, torch.cos))
            across = torch.stack((-t[..., 1::2], t[..., ::2]), -1).flatten(-2)
            return t * cos + across * sin

        q, k, v = (split(m(x)) for m in (self.q, self.k, self.v))
        return self.o(join(F.scaled_dot_product_attention(turn(q, scale), turn(k, 1 / scale), v, is_causal=True)))


class _Weights(nn.Module):
    """Zipformer: one map gives queries, keys and, third, queries of places; the weights serve others."""

    def __init__(self) -> None:
        super().__init__()
        self.in_proj, self.linear_pos = nn.Linear(24, 72), nn.Linear(5, 24, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        n, b, _ = x.shape
        x = self.in_proj(x)
        q, k, p = x[..., :24], x[..., 24:48], x[..., 48:]
        q = q.reshape(n, b, H, WIDTH).permute(2, 1, 0, 3)
        p = p.reshape(n, b, H, WIDTH).permute(2, 1, 0, 3)
        k = k.reshape(n, b, H, WIDTH).permute(2, 1, 3, 0)
        scores = torch.matmul(q, k)
        at = torch.arange(-(n - 1), n)[:, None] / n * torch.arange(1, 6)
        places = self.linear_pos(torch.cos(at).to(x.dtype)).reshape(1, 2 * n - 1, H, WIDTH).permute(2, 0, 3, 1)
        by_place = torch.matmul(p, places)
        by_place = by_place.as_strided(
            (H, b, n, n), (by_place.stride(0), by_place.stride(1), by_place.stride(2) - by_place.stride(3),
                           by_place.stride(3)), storage_offset=by_place.stride(3) * (n - 1),
        )  # fmt: skip
        return (scores + by_place).softmax(dim=-1)


@case(
    Core(rows("weights.in_proj.weight", "(r h d) c", n_r=3, r=0), rows("weights.in_proj.weight", "(r h d) c", n_r=3,
         r=1), rows("v.weight"), rows("o.weight", "c (h d)"), scores="h b q k", proved=()),
    inputs=("n b c",), may_refuse="places|second|several|sum",
)  # fmt: skip
class WeightsForOthers(nn.Module):
    """Weights from one module, values and outputs in another, length first."""

    def __init__(self) -> None:
        super().__init__()
        self.weights, self.v, self.o = _Weights(), nn.Linear(24, 24), nn.Linear(24, 24)

    def forward(self, x: Tensor) -> Tensor:
        weights = self.weights(x)
        n, b, _ = x.shape
        v = self.v(x).reshape(n, b, H, -1).permute(2, 1, 0, 3)
        return x + self.o(torch.matmul(weights, v).permute(2, 1, 0, 3).reshape(n, b, -1))


@case(fused("linear_q_k_v.weight", "(r h d) c", "linear_out.weight", proved=("query", "key", "output")))
class MemoryOfAFilter(nn.Module):
    """SAN-M: a filter over the values of all heads is added to what attention gives."""

    def __init__(self) -> None:
        super().__init__()
        self.linear_q_k_v, self.linear_out = nn.Linear(24, 72), nn.Linear(24, 24)
        self.fsmn_block = nn.Conv1d(24, 24, 3, padding=0, groups=24, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = torch.split(self.linear_q_k_v(x), 24, dim=-1)
        memory = self.fsmn_block(F.pad(v.transpose(1, 2), (1, 1))).transpose(1, 2) + v
        q, k, v = (split(t) for t in (q, k, v))
        scores = torch.matmul(q * WIDTH**-0.5, k.transpose(-2, -1))
        return self.linear_out(join(torch.softmax(scores, dim=-1) @ v)) + memory


@case(separate("Wq", "Wk", "Wv", "fc"))
class Skewed(nn.Module):
    """Music Transformer: queries meet a table of distances, and a pad and a view move each row to its place."""

    def __init__(self) -> None:
        super().__init__()
        self.Wq, self.Wk, self.Wv, self.fc = (nn.Linear(24, 24) for _ in range(4))
        self.E = nn.Parameter(torch.randn(16, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        q, k, v = (m(x).reshape(b, n, H, -1).permute(0, 2, 1, 3) for m in (self.Wq, self.Wk, self.Wv))
        qe = torch.einsum("bhld,md->bhlm", q, self.E[16 - n :])
        mask = torch.ones(n, n, dtype=torch.bool).tril().flip(1)
        qe = qe.masked_fill(~mask, 0.0)
        skewed = F.pad(qe, (1, 0)).reshape(b, H, n + 1, n)[:, :, 1:]
        logits = (torch.matmul(q, k.permute(0, 1, 3, 2)) + skewed) / math.sqrt(WIDTH)
        logits = logits + torch.ones(n, n).triu(1).to(x.dtype) * -1e9
        return self.fc(torch.matmul(F.softmax(logits, -1), v).permute(0, 2, 1, 3).reshape(b, n, -1))


@case(
    Core(*(rows(f"{m}.weight", "(h d) c u") for m in ("query", "key", "content")), rows("proj.weight", "c (h d) u"),
         scores="b h k q", heads_alone=True),
    inputs=("b c n",),
)  # fmt: skip
class KeysByRows(nn.Module):
    """Demucs: scores lie with keys in front of queries, fall off at a speed that each place gives, none asks itself."""

    def __init__(self) -> None:
        super().__init__()
        self.content, self.query, self.key = (nn.Conv1d(24, 24, 1) for _ in range(3))
        self.query_decay, self.proj = nn.Conv1d(24, H * 2, 1), nn.Conv1d(24, 24, 1)

    def forward(self, x: Tensor) -> Tensor:
        B, _, T = x.shape
        at = torch.arange(T, dtype=x.dtype)
        delta = at[:, None] - at[None]
        queries, keys = (m(x).view(B, H, -1, T) for m in (self.query, self.key))
        dots = torch.einsum("bhct,bhcs->bhts", keys, queries) / keys.shape[2] ** 0.5
        decays = torch.arange(1, 3, dtype=x.dtype)
        slopes = torch.sigmoid(self.query_decay(x.detach()).view(B, H, -1, T)) / 2
        kernel = -decays.view(-1, 1, 1) * delta.abs() / 2**0.5
        dots = dots + torch.einsum("fts,bhfs->bhts", kernel, slopes)
        dots = dots.masked_fill(torch.eye(T, dtype=torch.bool), -100)
        weights = torch.softmax(dots, dim=2)
        result = torch.einsum("bhts,bhct->bhcs", weights, self.content(x).view(B, H, -1, T))
        return x + self.proj(result.reshape(B, -1, T))


@case(
    Core(rows("q_re.weight"), rows("k_re.weight"), rows("v_re.weight"), rows("o.weight", "c (h r d)", n_r=2, r=0),
         free=("query", "key", "value", "output"), proved=("query", "key", "value")),
    may_refuse="several terms|sums of|two|second",
)  # fmt: skip
class ComplexByHand(nn.Module):
    """Real and imaginary parts in maps of their own: scores are the sum of two products."""

    def __init__(self) -> None:
        super().__init__()
        self.q_re, self.k_re, self.v_re, self.q_im, self.k_im, self.v_im = (nn.Linear(24, 24) for _ in range(6))
        self.o = nn.Linear(48, 24)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v, r, s, w = (split(m(x)) for m in (self.q_re, self.k_re, self.v_re, self.q_im, self.k_im, self.v_im))
        scores = (q @ k.mT + r @ s.mT) / (2 * WIDTH) ** 0.5
        weights = scores.softmax(-1)
        return self.o(join(torch.cat([weights @ v, weights @ w], -1)))


@case(
    separate("query_proj", "key_proj", "value_proj", "dense", scores="(b h) q k", heads_alone=True,
             proved=("value", "output")),
    may_refuse="places|second|several|sum|adds",
)  # fmt: skip
class Disentangled(nn.Module):
    """DeBERTa: contents ask places and places ask contents, by the same maps, gathered by distance."""

    def __init__(self) -> None:
        super().__init__()
        self.query_proj, self.key_proj, self.value_proj, self.dense = (nn.Linear(24, 24) for _ in range(4))
        self.rel_embeddings = nn.Embedding(16, 24)

    def transpose_for_scores(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], H, -1).permute(0, 2, 1, 3).contiguous().view(-1, x.size(1), WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        q, k, v = (self.transpose_for_scores(m(x)) for m in (self.query_proj, self.key_proj, self.value_proj))
        rel = self.rel_embeddings.weight[None]
        scale = math.sqrt(WIDTH * 3)
        scores = torch.bmm(q, k.transpose(-1, -2) / scale)
        at = torch.arange(n)
        index = (at[:, None] - at[None]).clamp(-8, 7) + 8
        pos_k, pos_q = (self.transpose_for_scores(m(rel)).repeat(b, 1, 1) for m in (self.key_proj, self.query_proj))
        c2p = torch.bmm(q, pos_k.mT).gather(-1, index.expand(b * H, -1, -1))
        p2c = torch.bmm(k, pos_q.mT).gather(-1, (15 - index).expand(b * H, -1, -1)).transpose(-1, -2)
        probs = torch.softmax(scores + c2p / scale + p2c / scale, dim=-1)
        out = torch.bmm(probs, v).view(b, H, n, WIDTH).permute(0, 2, 1, 3).contiguous()
        return self.dense(out.flatten(2))


@case(
    separate(proved=("query", "value", "output")),
    may_refuse="code|quanti|nearest|not by a linear map|not equal|round",
)
class KeysOfACodebook(Four):
    """Transformer-VQ: keys are replaced by the nearest of a few codes, and the gradient goes straight through."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Parameter(torch.randn(H, 5, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split(m(x)) for m in (self.q, self.k, self.v))
        nearest = torch.cdist(k, self.codes.expand(len(x), -1, -1, -1)).argmin(-1)
        codes = torch.stack([self.codes[h][nearest[:, h]] for h in range(H)], 1)
        k = k + (codes - k).detach()
        return self.o(join(attend(q, k, v)))


@case(
    Core(*(rows("qkv_projector.weight", "(h r d) c", n_r=3, r=r) for r in range(3)), None, heads_alone=True,
         free=("query", "key", "value"), proved=()),
    may_refuse="norm|mix|share|activation",
)  # fmt: skip
class NormOverAllRoles(nn.Module):
    """Relational memory: one norm over queries, keys and values of all heads, behind their common map."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = nn.Parameter(torch.randn(3, 24))
        self.qkv_projector, self.qkv_layernorm = nn.Linear(24, 72), nn.LayerNorm(72)

    def forward(self, x: Tensor) -> Tensor:
        memory = torch.cat([self.memory.expand(len(x), -1, -1), x], dim=1)
        qkv = self.qkv_layernorm(self.qkv_projector(memory)).view(*memory.shape[:2], H, 3 * WIDTH).permute(0, 2, 1, 3)
        q, k, v = torch.split(qkv, WIDTH, -1)
        weights = F.softmax(torch.matmul(q * WIDTH**-0.5, k.permute(0, 1, 3, 2)), dim=-1)
        return torch.matmul(weights, v).permute(0, 2, 1, 3).contiguous().flatten(2)[:, :3]


@case(
    Core(rows("wq.weight", source="ln"), rows("wkv.weight", "(r h d) c", n_r=2, r=0, source="ln"),
         rows("wkv.weight", "(r h d) c", n_r=2, r=1, source="ln"), rows("wo.weight", "c (h d)"), number=0,
         proved=("query", "key", "value", "output")),
)  # fmt: skip
class BucketsWithoutAScale(nn.Module):
    """T5 of its own kind: no scale, logarithmic buckets, values of inner width, an RMS norm in front."""

    def __init__(self) -> None:
        super().__init__()
        self.ln = nn.RMSNorm(24)
        self.wq, self.wkv = nn.Linear(24, 20, bias=False), nn.Linear(24, 40, bias=False)
        self.wo = nn.Linear(20, 24, bias=False)
        self.buckets = nn.Embedding(8, H)

    def forward(self, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        y = self.ln(x)
        q = self.wq(y).reshape(b, n, H, 5).swapaxes(1, 2)
        k, v = self.wkv(y).reshape(b, n, 2, H, 5).permute(2, 0, 3, 1, 4)
        apart = (torch.arange(n)[:, None] - torch.arange(n)).clamp(min=0)
        bucket = torch.where(apart < 4, apart, 4 + (apart / 4).clamp(min=1).log().mul(2).long().clamp(max=3))
        bias = self.buckets(bucket).permute(2, 0, 1)
        probs = F.softmax((q @ k.swapaxes(2, 3) + bias).to(x.dtype), dim=-1)
        return self.wo((probs @ v).swapaxes(1, 2).reshape(b, n, 20))


@case(
    Core(rows("ask.weight", source=None), rows("keys.weight"), rows("values.weight"), rows("out.weight", "c (h d)"),
         scores="b h k q", heads_alone=True, rounds=3, query_token=0, proved=("key",)),
)  # fmt: skip
class AskedByACell(nn.Module):
    """A captioner: the state of an LSTM cell asks a picture at every step, and what it gets enters the next."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(24, 24)
        self.ask, self.keys, self.values, self.out = (nn.Linear(24, 24) for _ in range(4))
        self.word = nn.Linear(24, 11)

    def forward(self, image: Tensor) -> Tensor:
        k, v = split(self.keys(image)), split(self.values(image))
        h, c = image.mean(1), torch.zeros_like(image[:, 0])
        said = []
        for _ in range(3):
            q = self.ask(h).view(-1, H, 1, WIDTH)
            context = self.out(((q * k).sum(-1, keepdim=True) / WIDTH**0.5).softmax(2).mul(v).sum(2).flatten(1))
            h, c = self.cell(context, (h, c))
            said.append(self.word(h))
        return torch.stack(said, 1)
