"""Attention of series, tables, molecules, graphs, recommendation and agents, as the code beside papers writes it."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.attention.wild.idioms import attend, join, split
from tests.attention.wild.plain import Four
from tests.attention.wild.truth import MODEL, WIDTH, Core, H, Rows, case, fused, rows, separate


def _of_each(name: str) -> tuple[Rows, ...]:
    return tuple(rows(name.format(i), "d c") for i in range(H))


@case(
    Core(*(rows(f"{m}.weight", source="embed", through="embed.weight") for m in "qkv"),
         rows("o.weight", "c (h d)"), proved=("query", "key")),
    inputs=("b 16 n",),
)  # fmt: skip
class VariatesAreTokens(Four):
    """iTransformer: each variate, its whole past embedded, is a token."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.projector = nn.Linear(16, MODEL), nn.Linear(MODEL, 3)

    def forward(self, x_enc: Tensor) -> Tensor:
        means = x_enc.mean(1, keepdim=True).detach()
        x_enc = x_enc - means
        stdev = torch.sqrt(torch.var(x_enc, dim=1, keepdim=True, unbiased=False) + 1e-5)
        x = self.embed((x_enc / stdev).permute(0, 2, 1))
        q, k, v = (m(x).view(*x.shape[:2], H, -1) for m in (self.q, self.k, self.v))
        A = torch.softmax(WIDTH**-0.5 * torch.einsum("blhe,bshe->bhls", q, k), dim=-1)
        x = x + self.o(torch.einsum("bhls,bshd->blhd", A, v).contiguous().view(*x.shape))
        return self.projector(x).permute(0, 2, 1) * stdev + means


class _InformerLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query_projection, self.key_projection, self.value_projection = (nn.Linear(24, 24) for _ in range(3))
        self.out_projection = nn.Linear(24, 24)

    def forward(self, queries: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, None]:
        B, L, _ = queries.shape
        _, S, _ = keys.shape
        queries = self.query_projection(queries).view(B, L, H, -1)
        keys = self.key_projection(keys).view(B, S, H, -1)
        values = self.value_projection(values).view(B, S, H, -1)
        scores = torch.einsum("blhe,bshe->bhls", queries, keys)
        A = torch.softmax(WIDTH**-0.5 * scores, dim=-1)
        V = torch.einsum("bhls,bshd->blhd", A, values)
        return self.out_projection(V.contiguous().view(B, L, -1)), None


@case(
    Core(None, rows("sender.key_projection.weight"), rows("sender.value_projection.weight"),
         rows("sender.out_projection.weight", "c (h d)"), free=("query",), proved=("key",), heads_alone=True),
    Core(rows("receiver.query_projection.weight"),
         rows("receiver.key_projection.weight", source="sender.out_projection"),
         rows("receiver.value_projection.weight", source="sender.out_projection"),
         rows("receiver.out_projection.weight", "c (h d)"), number=1, heads_alone=True, proved=("query", "key")),
)  # fmt: skip
class RoutersBetweenDimensions(nn.Module):
    """Crossformer: a few learned routers ask all dimensions, and the dimensions ask what the routers gathered."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Parameter(torch.randn(5, 24))
        self.sender, self.receiver = _InformerLayer(), _InformerLayer()

    def forward(self, x: Tensor) -> Tensor:
        router = self.router[None].repeat(len(x), 1, 1)
        buffer, _ = self.sender(router, x, x)
        received, _ = self.receiver(x, buffer, buffer)
        return x + received


@case(
    Core(_of_each("qs.{}.weight"), _of_each("ks.{}.weight"), rows("v.weight", h=1), None, loop=True,
         free=("output",), proved=("query", "key")),
    may_refuse="several heads are summed",
)  # fmt: skip
class InterpretableHeads(nn.Module):
    """Temporal fusion transformer: all heads have the same values, and their mean is mapped."""

    def __init__(self) -> None:
        super().__init__()
        self.v = nn.Linear(MODEL, WIDTH)
        self.qs, self.ks = (nn.ModuleList([nn.Linear(MODEL, WIDTH) for _ in range(H)]) for _ in range(2))
        self.w_h = nn.Linear(WIDTH, MODEL, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        heads, attns = [], []
        vs = self.v(x)
        for i in range(H):
            attn = torch.bmm(self.qs[i](x), self.ks[i](x).permute(0, 2, 1)) / WIDTH**0.5
            attn = torch.softmax(attn, dim=2)
            heads.append(torch.bmm(attn, vs))
            attns.append(attn)
        head, attn = torch.stack(heads, dim=2), torch.stack(attns, dim=2)
        return self.w_h(torch.mean(head, dim=2)), attn


@case(separate(heads_alone=True))
class StationaryFactors(Four):
    """Non-stationary transformer: scores are scaled and shifted by numbers that a network makes of the raw series."""

    def __init__(self) -> None:
        super().__init__()
        self.tau = nn.Sequential(nn.Linear(MODEL, 8), nn.ReLU(), nn.Linear(8, 1))
        self.delta = nn.Sequential(nn.Linear(7, 8), nn.ReLU(), nn.Linear(8, 7, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            raw = x.mean(-1)
        tau, delta = self.tau(x.std(1).detach()).exp(), self.delta(raw)
        q, k, v = (m(x).view(*x.shape[:2], H, -1) for m in (self.q, self.k, self.v))
        scores = torch.einsum("blhe,bshe->bhls", q, k) * tau[:, None, None] + delta[:, None, None]
        return self.o(torch.einsum("bhls,bshd->blhd", F.softmax(scores / WIDTH**0.5, -1), v).flatten(2))


@case(fused("qkv_proj.weight", output="o_proj.weight"))
class ScaledFeatureByFeature(nn.Module):
    """TimesFM: each feature of a query has a learned scale behind a softplus."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv_proj, self.o_proj = nn.Linear(24, 72), nn.Linear(24, 24)
        self.scaling = nn.Parameter(torch.empty((WIDTH,)))

    def forward(self, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        xq, xk, xv = self.qkv_proj(x).split([24, 24, 24], dim=-1)
        xq, xk, xv = (t.view(b, -1, H, WIDTH) for t in (xq, xk, xv))
        xq = xq * (1.442695041 / WIDTH**0.5 * F.softplus(self.scaling)[None, None, None, :])
        q, k, v = xq.transpose(1, 2), xk.transpose(1, 2), xv.transpose(1, 2)
        scores = torch.matmul(q, k.transpose(2, 3))
        scores = scores + torch.triu(torch.full((n, n), -2.3819763e38, dtype=x.dtype), diagonal=1)
        output = torch.matmul(F.softmax(scores, dim=-1).type_as(q), v)
        return self.o_proj(output.transpose(1, 2).contiguous().view(b, n, -1))


@case(separate())
class SameVariateOrNot(Four):
    """Moirai: each head has one bias for tokens of the same variate, and one for those of others."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(2, H)

    def forward(self, x: Tensor) -> Tensor:
        ids = torch.arange(x.shape[1]) % 3
        is_same = (ids[:, None] == ids).long()[None, None]
        weight = self.emb.weight.t()[None, :, :, None, None]
        bias = (1 - is_same) * weight[:, :, 0] + is_same * weight[:, :, 1]
        q, k, v = (split(m(x)) for m in (self.q, self.k, self.v))
        return self.o(
            join(F.scaled_dot_product_attention(q, k, v, attn_mask=bias.to(q.dtype).expand(len(x), -1, -1, -1)))
        )


def _pfn(name: str, number: int, scores: str) -> Core:
    return Core(
        *(rows(f"{name}._w_qkv", "r h d c", n_r=3, r=r) for r in range(3)), rows(f"{name}._w_out", "h d c"),
        number=number, scores=scores, heads_alone=True, proved=(),
    )  # fmt: skip


class _TabPFNAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self._w_qkv, self._w_out = nn.Parameter(torch.empty(3, H, WIDTH, 24)), nn.Parameter(torch.empty(H, WIDTH, 24))

    def forward(self, x: Tensor, x_kv: Tensor | None = None) -> Tensor:
        shape = x.shape
        x = x.reshape(-1, *shape[-2:])
        if x_kv is None:
            qkv = torch.einsum("... s, j h d s -> ... j h d", x, self._w_qkv)
            q, k, v = qkv.unbind(dim=-3)
        else:
            x_kv = x_kv.reshape(-1, *x_kv.shape[-2:])
            q = torch.einsum("... s, h d s -> ... h d", x, self._w_qkv[0])
            k, v = torch.einsum("... s, j h d s -> ... j h d", x_kv, self._w_qkv[1:]).unbind(dim=-3)
        logits = torch.einsum("b q h d, b k h d -> b q k h", q, k) * torch.sqrt(torch.tensor(1.0 / WIDTH)).to(x.dtype)
        ps = torch.softmax(logits, dim=2)
        heads = torch.einsum("b q k h, b k h d -> b q h d", ps, v)
        return torch.einsum("... h d, h d s -> ... s", heads, self._w_out).reshape(shape)


@case(_pfn("features", 0, "b n q k h"), _pfn("items", 1, "b m q k h"), inputs=("b n m c",))
class FeaturesThenItems(nn.Module):
    """TabPFN: features of an item attend to each other, then items of a feature ask those whose labels are known."""

    def __init__(self) -> None:
        super().__init__()
        self.features, self.items = _TabPFNAttention(), _TabPFNAttention()

    def forward(self, table: Tensor) -> Tensor:
        table = table + self.features(table)
        x = table.transpose(1, 2)
        return F.layer_norm(x + self.items(x, x[:, :, :4]), (24,)).transpose(1, 2)


@case(
    Core(rows("Q_w.weight"), rows("K_w.weight"), rows("V_w.weight"), None, scores="(h b) q k", heads_alone=True),
)  # fmt: skip
class IntervalsBetweenClicks(nn.Module):
    """TiSASRec: keys and values of places and of the time between are added; heads stand before the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.Q_w, self.K_w, self.V_w = (nn.Linear(24, 24) for _ in range(3))
        self.abs_pos_K, self.abs_pos_V = nn.Embedding(16, 24), nn.Embedding(16, 24)
        self.time_K, self.time_V = nn.Embedding(9, 24), nn.Embedding(9, 24)

    def forward(self, queries: Tensor) -> Tensor:
        Q, K, V = self.Q_w(queries), self.K_w(queries), self.V_w(queries)
        n = queries.shape[1]
        at = torch.arange(n)
        between = (at[:, None] * 3 - at * 3).abs().clamp(max=8).expand(len(queries), -1, -1)
        heads = [torch.cat(torch.split(t, WIDTH, dim=2), dim=0) for t in (Q, K, V)]
        tK, tV = (torch.cat(torch.split(e(between), WIDTH, dim=3), dim=0) for e in (self.time_K, self.time_V))
        pK, pV = (torch.cat(torch.split(e(at).expand(len(queries), -1, -1), WIDTH, dim=2), dim=0)
                  for e in (self.abs_pos_K, self.abs_pos_V))  # fmt: skip
        Q_, K_, V_ = heads
        weights = Q_.matmul(torch.transpose(K_, 1, 2))
        weights = weights + Q_.matmul(torch.transpose(pK, 1, 2))
        weights = weights + tK.matmul(Q_.unsqueeze(-1)).squeeze(-1)
        weights = (weights / WIDTH**0.5).masked_fill(at[:, None] < at, -(2.0**31) + 1).softmax(-1)
        outputs = weights.matmul(V_) + weights.matmul(pV)
        outputs = outputs + weights.unsqueeze(2).matmul(tV).reshape(outputs.shape)
        return queries + torch.cat(torch.split(outputs, len(queries), dim=0), dim=2)


@case(
    Core(rows("W_Query", "c (h d)"), rows("W_key", "c (h d)"), rows("W_Value", "c (h d)"), None, scores="h b q k"),
)
class InteractingFields(nn.Module):
    """AutoInt: fields of a row attend, heads stacked in front, with a residual map in place of one for the output."""

    def __init__(self) -> None:
        super().__init__()
        self.W_Query, self.W_key, self.W_Value, self.W_Res = (nn.Parameter(torch.empty(24, 24)) for _ in range(4))

    def forward(self, inputs: Tensor) -> Tensor:
        querys, keys, values = (torch.tensordot(inputs, w, dims=([-1], [0]))
                                for w in (self.W_Query, self.W_key, self.W_Value))  # fmt: skip
        querys, keys, values = (torch.stack(torch.split(t, WIDTH, dim=2)) for t in (querys, keys, values))
        scores = torch.einsum("bnik,bnjk->bnij", querys, keys) / WIDTH**0.5
        result = torch.matmul(F.softmax(scores, dim=-1), values)
        result = torch.squeeze(torch.cat(torch.split(result, 1), dim=-1), dim=0)
        return F.relu(result + torch.tensordot(inputs, self.W_Res, dims=([-1], [0])))


@case(
    Core(
        None, _of_each("keys.{}.weight"), None, None, loop=True, free=("query", "value", "output"), proved=("key",),
        query_token=0, heads_alone=True,
    ),
    inputs=("b n c", "b c", "b n"), may_refuse="values are its inputs|matrix product|without a projection",
)  # fmt: skip
class CreditsOfAgents(nn.Module):
    """Qatten: the state of all asks what each agent sees; what is averaged are the values of the agents' actions."""

    def __init__(self) -> None:
        super().__init__()
        self.selectors = nn.ModuleList(
            nn.Sequential(nn.Linear(24, 12), nn.ReLU(), nn.Linear(12, WIDTH, bias=False)) for _ in range(H)
        )
        self.keys = nn.ModuleList(nn.Linear(24, WIDTH, bias=False) for _ in range(H))
        self.v = nn.Sequential(nn.Linear(24, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, agents: Tensor, state: Tensor, agent_qs: Tensor) -> Tensor:
        q_heads = []
        for selector, key in zip(self.selectors, self.keys):
            lambda_weight = torch.matmul(selector(state).view(-1, 1, WIDTH), key(agents).permute(0, 2, 1))
            attend_weights = F.softmax(lambda_weight / WIDTH**0.5, dim=2)
            q_heads.append((agent_qs.view(-1, 1, agents.shape[1]) * attend_weights).sum(dim=2))
        return torch.stack(q_heads, dim=1).sum(dim=1) + self.v(state)


@case(
    Core(_of_each("selectors.{}.weight"), _of_each("keys.{}.weight"), None, None, loop=True,
         free=("value", "output"), proved=()),
    may_refuse="activation|which tokens|matrix product",
)  # fmt: skip
class CriticsOfOthers(nn.Module):
    """MAAC: each agent asks all others, in a loop over agents and heads; values pass a leaky ReLU."""

    def __init__(self) -> None:
        super().__init__()
        self.keys, self.selectors = (
            nn.ModuleList(nn.Linear(24, WIDTH, bias=False) for _ in range(H)) for _ in range(2)
        )
        self.values = nn.ModuleList(nn.Sequential(nn.Linear(24, WIDTH), nn.LeakyReLU()) for _ in range(H))
        self.critic = nn.Linear(48, 1)

    def forward(self, agents: Tensor) -> Tensor:
        states = agents.unbind(1)
        out = []
        for i, mine in enumerate(states):
            others = [j for j in range(len(states)) if j != i]
            heads = []
            for key, value, selector in zip(self.keys, self.values, self.selectors):
                keys, values = ([m(states[j]) for j in others] for m in (key, value))
                logits = torch.matmul(selector(mine).view(len(mine), 1, -1), torch.stack(keys).permute(1, 2, 0))
                weights = F.softmax(logits / WIDTH**0.5, dim=2)
                heads.append((torch.stack(values).permute(1, 2, 0) * weights).sum(dim=2))
            out.append(self.critic(torch.cat((mine, *heads), dim=1)))
        return torch.cat(out, 1)


class _OpenFold(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear_q, self.linear_k, self.linear_v = (nn.Linear(24, 24, bias=False) for _ in range(3))
        self.linear_g, self.linear_o = nn.Linear(24, 24), nn.Linear(24, 24)

    def forward(self, x: Tensor, biases: list[Tensor]) -> Tensor:
        q, k, v = (m(x).view((*x.shape[:-1], H, -1)).transpose(-2, -3)
                   for m in (self.linear_q, self.linear_k, self.linear_v))  # fmt: skip
        q = q / WIDTH**0.5
        a = torch.matmul(q, k.permute(0, 1, 2, 4, 3))
        for b in biases:
            a += b
        a = torch.nn.functional.softmax(a, dim=-1)
        o = torch.matmul(a, v).transpose(-2, -3)
        o = o * torch.sigmoid(self.linear_g(x)).view(o.shape)
        return self.linear_o(o.reshape((*o.shape[:-2], -1)))


def _fold(name: str, number: int, scores: str) -> Core:
    return Core(
        *(rows(f"{name}.linear_{m}.weight", source=f"norm_{name}") for m in "qkv"),
        rows(f"{name}.linear_o.weight", "c (h d)"), number=number, scores=scores, heads_alone=True, proved=(),
    )  # fmt: skip


@case(_fold("row", 0, "b m h q k"), _fold("column", 1, "b n h q k"), inputs=("b m n c", "b n n c"))
class RowsAndColumnsOfAnAlignment(nn.Module):
    """AlphaFold: residues of a sequence attend with a bias of the pairs, then sequences of a residue; both gated."""

    def __init__(self) -> None:
        super().__init__()
        self.row, self.column = _OpenFold(), _OpenFold()
        self.norm_row, self.norm_column, self.norm_z = (nn.LayerNorm(24) for _ in range(3))
        self.linear_z = nn.Linear(24, H, bias=False)

    def forward(self, m: Tensor, z: Tensor) -> Tensor:
        mask = m.new_ones(m.shape[:-1])
        z = self.linear_z(self.norm_z(z)).permute(0, 3, 1, 2).unsqueeze(-4)
        mask_bias = (1e9 * (mask - 1))[..., :, None, None, :]
        m = m + self.row(self.norm_row(m), [mask_bias, z])
        m = m.transpose(-2, -3)
        m = m + self.column(self.norm_column(m), [(1e9 * (mask.transpose(-1, -2) - 1))[..., :, None, None, :]])
        return m.transpose(-2, -3)


@case(
    Core(rows("q.weight"), rows("k.weight"), rows("v.weight"), rows("o.weight", "c (r h d)", n_r=2, r=0),
         heads_alone=True, proved=("query", "key", "value")),
    may_refuse="second|several|sum|adds|distance|point|other maps",
)  # fmt: skip
class InvariantPointsThatLearn(Four):
    """AlphaFold's structure module: products, a bias of pairs, and distances of points in frames, all trained."""

    def __init__(self) -> None:
        super().__init__(o=MODEL + H * 2 * 3)
        self.qp, self.kp, self.vp = (nn.Linear(MODEL, H * 2 * 3) for _ in range(3))
        self.head_weights = nn.Parameter(torch.zeros(H))

    def forward(self, s: Tensor) -> Tensor:
        b, n, _ = s.shape
        turns = torch.linalg.qr(torch.randn(n, 3, 3, generator=torch.Generator().manual_seed(0)).to(s.dtype)).Q
        q, k, v = (m(s).view(b, n, H, -1) for m in (self.q, self.k, self.v))
        qp, kp, vp = (
            torch.einsum("nij,bnhpj->bnhpi", turns, m(s).view(b, n, H, 2, 3)) for m in (self.qp, self.kp, self.vp)
        )
        a = torch.einsum("bihd,bjhd->bhij", q, k) * (1.0 / (3 * WIDTH)) ** 0.5
        apart = (qp.unsqueeze(2) - kp.unsqueeze(1)).square().sum(-1).sum(-1)
        a = (a - 0.5 * F.softplus(self.head_weights)[:, None, None] * apart.permute(0, 3, 1, 2)).softmax(-1)
        o = torch.einsum("bhij,bjhd->bihd", a, v).flatten(2)
        points = torch.einsum("nji,bnhpj->bnhpi", turns, torch.einsum("bhij,bjhpc->bihpc", a, vp))
        return self.o(torch.cat([o, points.flatten(2)], -1))


@case(
    Core(rows("q.weight"), rows("k.weight"), rows("v.weight"), None, proved=(), free=("output",)), inputs=("n c",),
    may_refuse="matrix product|not products|edges|index|softmax",
)  # fmt: skip
class EdgesOfAList(nn.Module):
    """A graph transformer on a list of edges: exponentials of products, normed by a sum over each target."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.skip = (nn.Linear(24, 24) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        n = len(x)
        at = torch.arange(n)
        src, dst = torch.cat([at, (at + 1) % n, (at + 3) % n]), torch.cat([at, at, at])
        q, k, v = (m(x).view(n, H, WIDTH) for m in (self.q, self.k, self.v))
        alpha = (q[dst] * k[src]).sum(dim=-1) / WIDTH**0.5
        top = torch.full((n, H), -1e9, dtype=x.dtype)
        top = top.scatter_reduce(0, dst[:, None].expand_as(alpha), alpha.detach(), reduce="amax")
        alpha = (alpha - top[dst]).exp()
        total = torch.zeros(n, H, dtype=x.dtype).index_add(0, dst, alpha)
        alpha = alpha / (total[dst] + 1e-16)
        out = torch.zeros(n, H, WIDTH, dtype=x.dtype).index_add(0, dst, v[src] * alpha[..., None])
        return out.view(n, 24) + self.skip(x)


@case(separate(proved=("query", "key")))
class GatedResidual(Four):
    """GTrXL: a gated recurrent unit stands where the residual was."""

    def __init__(self) -> None:
        super().__init__()
        self.gru, self.gate_bias = nn.ModuleList(nn.Linear(MODEL, MODEL, bias=False) for _ in range(6)), 2.0

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.o(join(attend(split(self.q(x)), split(self.k(x)), split(self.v(x))))))
        wr, ur, wz, uz, wg, ug = self.gru
        r, z = torch.sigmoid(wr(y) + ur(x)), torch.sigmoid(wz(y) + uz(x) - self.gate_bias)
        return (1 - z) * x + z * torch.tanh(wg(y) + ug(r * x))


@case(
    Core(rows("q.weight", "(h d) c 1"), rows("k.weight", "(h d) c 1"), None, rows("o.weight", "c (h d)"),
         free=("query", "key", "value"), proved=("output",), heads_alone=True),
    may_refuse="several tokens|filter|kernel|of 3|tokens|not followed|not by a linear map",
)  # fmt: skip
class ConvolvedQueriesAndKeys(nn.Module):
    """LogTrans: queries and keys are a causal convolution over three steps, so that shapes ask shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Conv1d(24, 24, 3), nn.Conv1d(24, 24, 3)
        self.v, self.o = nn.Linear(24, 24), nn.Linear(24, 24)

    def forward(self, x: Tensor) -> Tensor:
        padded = F.pad(x.mT, (2, 0))
        q, k, v = split(self.q(padded).mT.contiguous()), split(self.k(padded).mT.contiguous()), split(self.v(x))
        return self.o(join(F.scaled_dot_product_attention(q, k, v, is_causal=True)))
