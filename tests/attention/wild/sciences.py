"""Speech, proteins, graphs, robots, pictures that are made: attention as other sciences write it."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.attention.wild.idioms import join, rotate_half, split
from tests.attention.wild.plain import Four
from tests.attention.wild.truth import WIDTH, Core, H, case, fused, rows, separate


@case(
    Core(rows("linear_q.weight", source="layer_norm"), rows("linear_k.weight", source="layer_norm"),
         rows("linear_v.weight", source="layer_norm"), rows("linear_out.weight", "c (h d)"),
         proved=("query", "key", "value", "output")),
)  # fmt: skip
class ConformerBlock(nn.Module):
    """ESPnet: half a feed-forward, relative positions with two biases and a shift, a convolution, the other half."""

    def __init__(self) -> None:
        super().__init__()
        self.layer_norm, self.norm_conv = nn.LayerNorm(24), nn.LayerNorm(24)
        self.linear_q, self.linear_k, self.linear_v, self.linear_out = (nn.Linear(24, 24) for _ in range(4))
        self.linear_pos = nn.Linear(24, 24, bias=False)
        self.pos_bias_u, self.pos_bias_v = (nn.Parameter(torch.zeros(H, WIDTH)) for _ in range(2))
        self.ff = nn.Sequential(nn.Linear(24, 48), nn.SiLU(), nn.Linear(48, 24))
        self.pointwise1, self.pointwise2 = nn.Conv1d(24, 48, 1), nn.Conv1d(24, 24, 1)
        self.depthwise = nn.Conv1d(24, 24, 3, padding=1, groups=24)

    def rel_shift(self, x: Tensor) -> Tensor:
        x_padded = torch.cat([torch.zeros(*x.shape[:3], 1, dtype=x.dtype), x], dim=-1)
        x_padded = x_padded.view(*x.size()[:2], x.size(3) + 1, x.size(2))
        return x_padded[:, :, 1:].view_as(x)[:, :, :, : x.size(-1) // 2 + 1]

    def forward(self, x: Tensor) -> Tensor:
        x = x + 0.5 * self.ff(x)
        y = self.layer_norm(x)
        b, n, _ = y.shape
        at = torch.arange(n - 1, -n, -1)[:, None] * 10.0 ** (-torch.arange(12) / 12)
        p = self.linear_pos(torch.cat([at.sin(), at.cos()], -1).to(x.dtype)[None]).view(1, -1, H, WIDTH).transpose(1, 2)
        q, k, v = (m(y).view(b, -1, H, WIDTH) for m in (self.linear_q, self.linear_k, self.linear_v))
        k, v = k.transpose(1, 2), v.transpose(1, 2)
        q_u, q_v = (q + self.pos_bias_u).transpose(1, 2), (q + self.pos_bias_v).transpose(1, 2)
        matrix_bd = self.rel_shift(torch.matmul(q_v, p.transpose(-2, -1)))
        scores = (torch.matmul(q_u, k.transpose(-2, -1)) + matrix_bd) / math.sqrt(WIDTH)
        out = torch.matmul(torch.softmax(scores, dim=-1), v).transpose(1, 2).contiguous().view(b, -1, 24)
        x = x + self.linear_out(out)
        y = F.glu(self.pointwise1(self.norm_conv(x).transpose(1, 2)), dim=1)
        x = x + self.pointwise2(F.silu(self.depthwise(y))).transpose(1, 2)
        return x + 0.5 * self.ff(x)


@case(
    Core(rows("x_qkv.weight", "(r h d) c", n_r=3, r=0), rows("x_qkv.weight", "(r h d) c", n_r=3, r=1),
         rows("x_qkv.weight", "(r h d) c", n_r=3, r=2), rows("x_out.weight", "c (h d)"), joint=(9, 16), proved=()),
    Core(rows("c_qkv.weight", "(r h d) c", n_r=3, r=0, takes=1), rows("c_qkv.weight", "(r h d) c", n_r=3, r=1, takes=1),
         rows("c_qkv.weight", "(r h d) c", n_r=3, r=2, takes=1), rows("c_out.weight", "c (h d)"), joint=(0, 9),
         proved=()),
    inputs=("b n c", "b m c", "b c"),
)  # fmt: skip
class DoubleStreamOfFlux(nn.Module):
    """Flux: picture and text are modulated, joined, normed head by head, turned, and gated on their way back."""

    def __init__(self) -> None:
        super().__init__()
        self.x_mod, self.c_mod = nn.Linear(24, 72), nn.Linear(24, 72)
        self.x_norm, self.c_norm = (nn.LayerNorm(24, elementwise_affine=False) for _ in range(2))
        self.x_qkv, self.c_qkv, self.x_out, self.c_out = (nn.Linear(24, w) for w in (72, 72, 24, 24))
        self.q_norm, self.k_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)

    def forward(self, img: Tensor, txt: Tensor, vec: Tensor) -> tuple[Tensor, Tensor]:
        ishift, iscale, igate = self.x_mod(F.silu(vec))[:, None].chunk(3, -1)
        cshift, cscale, cgate = self.c_mod(F.silu(vec))[:, None].chunk(3, -1)
        made = []
        for x, norm, shift, scale, qkv in ((txt, self.c_norm, cshift, cscale, self.c_qkv),
                                           (img, self.x_norm, ishift, iscale, self.x_qkv)):  # fmt: skip
            y = (1 + scale) * norm(x) + shift
            made.append(qkv(y).unflatten(-1, (3, H, WIDTH)).permute(2, 0, 3, 1, 4))
        q, k, v = torch.cat(made, dim=3)
        q, k = rotate_half(self.q_norm(q)), rotate_half(self.k_norm(k))
        attn = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        c_attn, x_attn = attn[:, : txt.shape[1]], attn[:, txt.shape[1] :]
        return img + igate * self.x_out(x_attn), txt + cgate * self.c_out(c_attn)


@case(
    separate("lin_query", "lin_key", "lin_value", "lin_out", proved=("query", "key"), scores="q k h"), inputs=("n c",)
)
class GraphAsAMask(nn.Module):
    """A graph transformer on one dense graph: no batch, edges as a mask with loops, a beta gate with the skip."""

    def __init__(self) -> None:
        super().__init__()
        self.lin_query, self.lin_key, self.lin_value, self.lin_out = (nn.Linear(24, 24) for _ in range(4))
        self.lin_skip, self.lin_beta = nn.Linear(24, 24), nn.Linear(72, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        n = x.size(0)
        at = torch.arange(n)
        adj = ((at[:, None] - at) % n < 5) | torch.eye(n, dtype=torch.bool)
        q, k, v = (m(x).view(n, H, WIDTH) for m in (self.lin_query, self.lin_key, self.lin_value))
        alpha = torch.einsum("ihd,jhd->ijh", q, k) / math.sqrt(WIDTH)
        alpha = alpha.masked_fill(~adj.unsqueeze(-1), float("-inf")).softmax(dim=1)
        out = self.lin_out(torch.einsum("ijh,jhd->ihd", alpha, v).reshape(n, -1))
        x_r = self.lin_skip(x)
        beta = self.lin_beta(torch.cat([out, x_r, out - x_r], dim=-1)).sigmoid()
        return beta * x_r + (1 - beta) * out


@case(
    Core(rows("w_q.weight"), rows("w_k.weight"), rows("w_v.weight"), None, free=("output",), scores="b q k h",
         heads_alone=True, proved=("query", "key")),
    inputs=("b n c", "b n 3"),
    may_refuse="by no map|mixed|several",
)  # fmt: skip
class ScalarsAndVectors(nn.Module):
    """Equivariant: scores of scalars, less distances, weigh scalars and, in the same heads, directions."""

    def __init__(self) -> None:
        super().__init__()
        self.w_q, self.w_k, self.w_v = (nn.Linear(24, 24, bias=False) for _ in range(3))
        self.gamma, self.w_o, self.w_u = nn.Parameter(torch.ones(H)), nn.Linear(24, 24), nn.Linear(H, 1, bias=False)

    def forward(self, s: Tensor, pos: Tensor) -> tuple[Tensor, Tensor]:
        rel = pos[:, :, None] - pos[:, None]
        d = rel.square().sum(-1, keepdim=True)
        q, k, v = (m(s).unflatten(-1, (H, WIDTH)) for m in (self.w_q, self.w_k, self.w_v))
        logits = torch.einsum("bihc,bjhc->bijh", q, k) / WIDTH**0.5 - F.softplus(self.gamma) * d
        a = logits.softmax(dim=2)
        ds = self.w_o(torch.einsum("bijh,bjhc->bihc", a, v).flatten(2))
        dx = self.w_u(torch.einsum("bijh,bijx->bixh", a, rel)).squeeze(-1)
        return s + ds, pos + dx


@case(
    Core(None, rows("mab.fc_k.weight"), rows("mab.fc_v.weight"), None, free=("query", "output"), scores="(h b) q k",
         proved=("value",), heads_alone=True),
    tokens=9,
)  # fmt: skip
class PoolingBySeeds(nn.Module):
    """Set transformer, the authors' way: heads in the batch by split and cat, the model's scale, Q + A(V)."""

    class MAB(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc_q, self.fc_k, self.fc_v, self.fc_o = (nn.Linear(24, 24) for _ in range(4))
            self.ln0, self.ln1 = nn.LayerNorm(24), nn.LayerNorm(24)

        def forward(self, Q: Tensor, K: Tensor) -> Tensor:
            Q = self.fc_q(Q)
            K, V = self.fc_k(K), self.fc_v(K)
            Q_, K_, V_ = (torch.cat(t.split(WIDTH, 2), 0) for t in (Q, K, V))
            A = torch.softmax(Q_.bmm(K_.transpose(1, 2)) / math.sqrt(24), 2)
            O = torch.cat((Q_ + A.bmm(V_)).split(Q.size(0), 0), 2)  # noqa: E741
            O = self.ln0(O)  # noqa: E741
            return self.ln1(O + F.relu(self.fc_o(O)))

    def __init__(self) -> None:
        super().__init__()
        self.S, self.mab = nn.Parameter(torch.randn(1, 4, 24)), self.MAB()

    def forward(self, X: Tensor) -> Tensor:
        return self.mab(self.S.repeat(X.size(0), 1, 1), X)


@case(
    Core(rows("qkv.weight", "(r h d) c x y", n_r=3, r=0, n_x=1, n_y=1), rows("qkv.weight", "(r h d) c x y", n_r=3, r=1,
         n_x=1, n_y=1), rows("qkv.weight", "(r h d) c x y", n_r=3, r=2, n_x=1, n_y=1),
         rows("proj_out.weight", "c (h d) u"), scores="(b h) q k", proved=()),
    inputs=("b c x y",), tokens=16,
)  # fmt: skip
class PixelsBehindAGroupNorm(nn.Module):
    """A diffusion U-Net's block: a group norm, one 1x1 convolution for all roles, a 1d one behind."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.proj_out = nn.GroupNorm(6, 24), nn.Conv2d(24, 72, 1), nn.Conv1d(24, 24, 1)

    def forward(self, x: Tensor) -> Tensor:
        b, c, *spatial = x.shape
        qkv = self.qkv(self.norm(x)).reshape(b, 3 * c, -1)
        q, k, v = qkv.chunk(3, dim=1)
        scale = 1 / math.sqrt(math.sqrt(WIDTH))
        q, k = ((t * scale).view(b * H, WIDTH, -1) for t in (q, k))
        weight = torch.softmax(torch.einsum("bct,bcs->bts", q, k), dim=-1)
        h = torch.einsum("bts,bcs->bct", weight, v.reshape(b * H, WIDTH, -1)).reshape(b, c, -1)
        return x + self.proj_out(h).reshape(b, c, *spatial)


@case(
    Core(rows("qkv_net.weight", "(r h d) c", n_r=3, r=0), rows("qkv_net.weight", "(r h d) c", n_r=3, r=1),
         rows("qkv_net.weight", "(r h d) c", n_r=3, r=2), rows("o_net.weight", "c (h d)"), scores="q k b h",
         proved=(), heads_alone=True),
    inputs=("b n 3", "b n 2", "b n 1"), may_refuse="sums|several",
)  # fmt: skip
class ReturnsStatesActions(nn.Module):
    """A decision transformer with memory: three embeddings interleaved, length first, gated like a GRU (GTrXL)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_s, self.embed_a, self.embed_r = (nn.Linear(w, 24) for w in (3, 2, 1))
        self.embed_t, self.ln = nn.Embedding(20, 24), nn.LayerNorm(24)
        self.qkv_net, self.o_net = nn.Linear(24, 72, bias=False), nn.Linear(24, 24, bias=False)
        self.gate, self.predict = nn.GRUCell(24, 24), nn.Linear(24, 2)

    def forward(self, states: Tensor, actions: Tensor, returns: Tensor) -> Tensor:
        b, n, _ = states.shape
        t = self.embed_t(torch.arange(n))
        stacked = torch.stack([self.embed_r(returns) + t, self.embed_s(states) + t, self.embed_a(actions) + t], 1)
        x = self.ln(stacked.permute(0, 2, 1, 3).reshape(b, 3 * n, 24)).transpose(0, 1)
        q, k, v = (part.view(3 * n, b, H, WIDTH) for part in self.qkv_net(x).chunk(3, dim=-1))
        score = torch.einsum("ibnd,jbnd->ijbn", q, k).mul(WIDTH**-0.5)
        mask = torch.ones(3 * n, 3 * n).triu(1).bool()[:, :, None, None]
        prob = F.softmax(score.masked_fill(mask, -1e30), dim=1)
        y = self.o_net(torch.einsum("ijbn,jbnd->ibnd", prob, v).reshape(3 * n, b, 24))
        x = self.gate(y.flatten(0, 1), x.flatten(0, 1)).view(3 * n, b, 24).transpose(0, 1)
        return self.predict(x.view(b, n, 3, 24)[:, :, 1])


@case(
    Core(rows("attn.wq.weight"), rows("attn.wk.weight", h=2), rows("attn.wv.weight", h=2), rows("attn.wo.weight",
         "c (h d)"), proved=(), heads_alone=True),
)  # fmt: skip
class EveryThirdLayerAttends(nn.Module):
    """Jamba or Kimi Linear: gated recurrences, and one layer of attention in between, without positions."""

    class Recurrence(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.beta, self.o = nn.Linear(24, 72), nn.Linear(24, H), nn.Linear(24, 24)
            self.conv, self.a = nn.Conv1d(72, 72, 3, groups=72, padding=2), nn.Linear(24, H)

        def forward(self, x: Tensor) -> Tensor:
            mixed = F.silu(self.conv(self.qkv(x).mT)[..., : x.shape[1]].mT)
            q, k, v = (split(t) for t in mixed.chunk(3, -1))
            q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
            beta, g = self.beta(x).sigmoid().mT, (-F.softplus(self.a(x))).exp().mT
            state, out = x.new_zeros(len(x), H, WIDTH, WIDTH), []
            for t in range(x.shape[1]):
                kt, vt = k[:, :, t], v[:, :, t]
                state = state * g[:, :, t, None, None]
                old = torch.einsum("bhkv,bhk->bhv", state, kt)
                state = state + torch.einsum("bhk,bhv->bhkv", kt, (vt - old) * beta[:, :, t, None])
                out.append(torch.einsum("bhkv,bhk->bhv", state, q[:, :, t]))
            return self.o(join(torch.stack(out, 2)))

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = self.Recurrence(), self.Recurrence()
        self.attn = nn.ModuleDict({f"w{m}": nn.Linear(24, w) for m, w in zip("qkvo", (24, 12, 12, 24))})
        self.norms = nn.ModuleList(nn.RMSNorm(24) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.first(self.norms[0](x))
        y = self.norms[1](x)
        q, k, v = split(self.attn["wq"](y)), split(self.attn["wk"](y), 2), split(self.attn["wv"](y), 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.attn["wo"](join(y))
        return x + self.last(self.norms[2](x))


@case(fused("qkv.weight", output="proj.weight", proved=("query", "key", "output")), inputs=("b n c", "b n n"))
class EmbeddingOfPairs(nn.Module):
    """ESMFold's gated self attention: a map of pairs is the bias, queries are scaled first, a sigmoid gates."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj, self.g = nn.Linear(24, 72, bias=False), nn.Linear(24, 24), nn.Linear(24, 24)
        self.bias = nn.Sequential(nn.LayerNorm(1, elementwise_affine=False), nn.Linear(1, H, bias=False))
        nn.init.zeros_(self.g.weight)

    def forward(self, x: Tensor, pairs: Tensor) -> Tensor:
        from einops import rearrange

        bias = self.bias[1](pairs[..., None])
        t = rearrange(self.qkv(x), "b l (r h c) -> r b h l c", r=3, h=H)
        q, k, v = t[0] * WIDTH**-0.5, t[1], t[2]
        a = torch.einsum("bhqc,bhkc->bhqk", q, k) + rearrange(bias, "... lq lk h -> ... h lq lk")
        y = torch.einsum("bhqk,bhkc->bqhc", F.softmax(a, dim=-1), v)
        y = rearrange(y, "... h c -> ... (h c)", h=H)
        return self.proj(self.g(x).sigmoid() * y)


@case(
    Core(rows("q.weight"), rows("k.weight", takes=1), rows("v.weight", takes=1), rows("o.weight", "c (h d)"),
         scores="(b p) h q k", heads_alone=True, proved=()),
    inputs=("b n c", "b n 5 c"),
)  # fmt: skip
class ViewsOfAPixel(Four):
    """NeRF with pictures (IBRNet): each point on a ray asks what five cameras see of it."""

    def forward(self, points: Tensor, views: Tensor) -> Tensor:
        b, n, s, c = views.shape
        q = self.q(points).view(b * n, 1, H, WIDTH).transpose(1, 2)
        k, v = (m(views).view(b * n, s, H, WIDTH).transpose(1, 2) for m in (self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v)
        return points + self.o(y.transpose(1, 2).reshape(b, n, c))


@case(
    Core(rows("W_q.weight"), rows("W_k.weight"), rows("W_v.weight"), rows("W_o.weight", "c (h d)"), proved=(),
         scores="b q k h"), tokens=9,
)  # fmt: skip
class NeighboursOfAProtein(nn.Module):
    """StructureTransformer: each residue asks its four nearest, gathered; scores are sums of elementwise products."""

    def __init__(self) -> None:
        super().__init__()
        self.W_q, self.W_k, self.W_v, self.W_o = (nn.Linear(24, 24, bias=False) for _ in range(4))

    def forward(self, h_V: Tensor) -> Tensor:
        b, n, _ = h_V.shape
        at = torch.arange(n)
        e_idx = (at[:, None] - at).abs().topk(4, dim=-1, largest=False).indices.expand(b, -1, -1)
        index = e_idx.reshape(b, -1, 1).expand(-1, -1, 24)
        h_E = torch.gather(h_V, 1, index).view(b, n, 4, 24)
        Q = self.W_q(h_V).view(b, n, 1, H, 1, WIDTH)
        K = self.W_k(h_E).view(b, n, 4, H, WIDTH, 1)
        V = self.W_v(h_E).view(b, n, 4, H, WIDTH)
        logits = torch.matmul(Q, K).view(b, n, 4, H).transpose(-2, -1) / math.sqrt(WIDTH)
        attend_ = F.softmax(logits, -1)
        update = torch.matmul(attend_.unsqueeze(-2), V.transpose(2, 3)).view(b, n, 24)
        return self.W_o(update)
