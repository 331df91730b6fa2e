"""Agents, graphs, molecules, users and boards: who asks whom is known, and heads are gated, summed or chosen."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.attention.wild.idioms import attend, join, split
from tests.attention.wild.plain import Four
from tests.attention.wild.truth import WIDTH, Core, H, case, rows, separate


@case(
    Core(*(tuple(rows(f"heads.{i}.{m}.weight", "d c u", h=1) for i in range(H)) for m in "qkv"),
         tuple(rows(f"heads.{i}.o.weight", "c d u", h=1) for i in range(H)), loop=True,
         proved=("query", "key", "output")),
)  # fmt: skip
class SumOverHeads(nn.Module):
    """Attentive neural processes: convolutions for each head, from its queries to its part of a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(
            nn.ModuleDict({**{m: nn.Conv1d(24, WIDTH, 1, bias=False) for m in "qkv"}, "o": nn.Conv1d(WIDTH, 24, 1)})
            for _ in range(H)
        )

    def forward(self, x: Tensor) -> Tensor:
        x, rep = x.permute(0, 2, 1), 0.0
        for head in self.heads:
            q, k, v = (head[m](x).permute(0, 2, 1) for m in "qkv")
            weights = torch.softmax(torch.einsum("bik,bjk->bij", q, k) / math.sqrt(WIDTH), dim=-1)
            rep = rep + head["o"](torch.bmm(weights, v).permute(0, 2, 1))
        return rep.permute(0, 2, 1)


@case(
    Core(rows("project_step.weight"), rows("project_node.weight", "(r h d) c", n_r=3, r=0),
         rows("project_node.weight", "(r h d) c", n_r=3, r=1), rows("project_out.weight", "c (h d)"),
         scores="h b u q k", heads_alone=True, free=("query",), proved=("key",)),
)  # fmt: skip
class NextStopOfATour(nn.Module):
    """Kool's decoder: heads glance at nodes that are left; a last product, capped, gives logarithms of chances."""

    def __init__(self) -> None:
        super().__init__()
        self.project_node, self.project_fixed = nn.Linear(24, 72, bias=False), nn.Linear(24, 24, bias=False)
        self.project_step, self.project_out = nn.Linear(24, 24, bias=False), nn.Linear(24, 24, bias=False)

    def forward(self, nodes: Tensor) -> Tensor:
        b, n, _ = nodes.shape
        glimpse_k, glimpse_v, logit_k = self.project_node(nodes[:, None]).chunk(3, dim=-1)
        query = self.project_fixed(nodes.mean(1))[:, None] + self.project_step(nodes[:, 1:2])
        mask = (torch.arange(n) < 2)[None, None, None, None]

        def heads(t: Tensor) -> Tensor:
            return t.contiguous().view(b, t.size(1), t.size(2), H, -1).expand(b, 1, -1, -1, -1).permute(3, 0, 1, 2, 4)

        q = query.view(b, 1, H, 1, WIDTH).permute(2, 0, 1, 3, 4)
        scores = torch.matmul(q, heads(glimpse_k).transpose(-2, -1)) / math.sqrt(WIDTH)
        out = torch.matmul(torch.softmax(scores.masked_fill(mask, -math.inf), dim=-1), heads(glimpse_v))
        glimpse = self.project_out(out.permute(1, 2, 3, 0, 4).contiguous().view(b, 1, 1, 24))
        logits = torch.tanh(torch.matmul(glimpse, logit_k.transpose(-2, -1)).squeeze(-2) / 24**0.5) * 10
        return torch.log_softmax(logits.masked_fill(mask[0, :, 0], -1e9), dim=-1)


@case(
    Core(rows("attn.q.weight", source="norm"), rows("attn.k.weight", source="norm"),
         rows("attn.v.weight", source="norm"), rows("attn.o.weight", "c (h d)"), proved=("query", "key", "output")),
    inputs=("b c",),
)  # fmt: skip
class LimbsOfABody(nn.Module):
    """Body transformer: each limb has a map into a token, neighbours alone are asked, each has a map to its torque."""

    def __init__(self) -> None:
        super().__init__()
        self.limbs = nn.ModuleList(nn.Linear(width, 24) for width in (3, 5, 4, 2, 6, 1, 3))
        self.torques = nn.ModuleList(nn.Linear(24, 2) for _ in range(7))
        self.norm, self.attn = nn.LayerNorm(24), nn.ModuleDict({m: nn.Linear(24, 24) for m in "qkvo"})

    def forward(self, observed: Tensor) -> Tensor:
        parts = observed.split([3, 5, 4, 2, 6, 1, 3], dim=-1)
        x = self.norm(torch.stack([limb(part) for limb, part in zip(self.limbs, parts)], dim=1))
        near = (torch.arange(7)[:, None] - torch.arange(7)).abs() < 4
        q, k, v = (split(self.attn[m](x)) for m in "qkv")
        y = self.attn["o"](join(F.scaled_dot_product_attention(q, k, v, attn_mask=near)))
        return torch.cat([torque(one) for torque, one in zip(self.torques, y.unbind(1))], dim=-1)


@case(
    Core(rows("qk.weight", "(r h d) c", n_r=2, r=0, source="norm"), rows("qk.weight", "(r h d) c", n_r=2, r=1,
         source="norm"), rows("v.weight", source="norm"), rows("post.weight", "c (h d)"), heads_alone=True,
         proved=("query", "key")),
    inputs=("b c", "b n c", "b m c"),
)  # fmt: skip
class WhatAnAgentSees(nn.Module):
    """Hide and seek: what an agent knows of itself goes to every entity it may see; the answers are averaged."""

    def __init__(self) -> None:
        super().__init__()
        self.me, self.boxes, self.others = nn.Linear(24, 24), nn.Linear(48, 24), nn.Linear(48, 24)
        self.qk, self.v, self.post = nn.Linear(24, 48, bias=False), nn.Linear(24, 24), nn.Linear(24, 24)
        self.norm = nn.LayerNorm(24)

    def forward(self, me: Tensor, boxes: Tensor, others: Tensor) -> Tensor:
        def entity(embed: nn.Module, them: Tensor) -> Tensor:
            return torch.relu(embed(torch.cat([me[:, None].expand_as(them), them], -1)))

        x = self.norm(torch.cat([self.me(me)[:, None], entity(self.boxes, boxes), entity(self.others, others)], 1))
        seen = torch.ones(len(x), x.shape[1])
        seen[:, 2::5] = 0
        q, k = self.qk(x).reshape(*x.shape[:2], 2, H, WIDTH).permute(2, 0, 3, 1, 4)
        logits = q @ k.mT / math.sqrt(WIDTH) - (1 - seen[:, None, None]) * 1e10
        x = x + self.post(join(logits.softmax(-1) @ split(self.v(x))))
        return (x * seen[..., None]).sum(1) / seen.sum(1, keepdim=True)


@case(
    Core(rows("q_lin.weight"), rows("k_lin.weight", takes=1), rows("v_lin.weight", takes=1),
         rows("a_lin.weight", "c (h d)"), heads_alone=True, free=("key", "value"), scores="b h q k"),
    inputs=("b n c", "b m c"),
)  # fmt: skip
class RelationsOfAGraph(nn.Module):
    """HGT: keys and values of a kind of edge go through a matrix of each head, scores are scaled by a prior."""

    def __init__(self) -> None:
        super().__init__()
        self.k_lin, self.q_lin, self.v_lin, self.a_lin = (nn.Linear(24, 24) for _ in range(4))
        self.a_rel, self.m_rel = (nn.Parameter(torch.randn(H, WIDTH, WIDTH)) for _ in range(2))
        self.p_rel, self.skip = nn.Parameter(torch.ones(H)), nn.Parameter(torch.ones(1))

    def forward(self, target: Tensor, source: Tensor) -> Tensor:
        k, v = (m(source).view(*source.shape[:2], H, WIDTH) for m in (self.k_lin, self.v_lin))
        k = k.transpose(1, 2) @ self.a_rel
        v = v.transpose(1, 2) @ self.m_rel
        q = split(self.q_lin(target))
        alpha = (q * self.p_rel.view(H, 1, 1)) @ k.mT / math.sqrt(WIDTH)
        out = self.a_lin(F.gelu(join(alpha.softmax(-1) @ v)))
        beta = self.skip.sigmoid()
        return beta * out + (1 - beta) * target


@case(
    Core(rows("q_content.weight"), rows("k_content.weight", takes=1), rows("v.weight", takes=1),
         rows("o.weight", "c (h d)"), free=("query", "key"), proved=("query", "key", "value", "output")),
    inputs=("b n c", "b m c"), may_refuse="several|two|sum|second|places|positions|stream",
)  # fmt: skip
class ContentBesidePlace(nn.Module):
    """Conditional DETR: in each head, features of contents lie beside features of places."""

    def __init__(self) -> None:
        super().__init__()
        self.q_content, self.k_content, self.v, self.o = (nn.Linear(24, 24) for _ in range(4))
        self.q_place, self.k_place = nn.Linear(24, 24), nn.Linear(24, 24)
        self.asked, self.place = nn.Parameter(torch.randn(7, 24)), nn.Parameter(torch.randn(9, 24))

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        b, n, m = len(x), x.shape[1], memory.shape[1]
        q = torch.cat([self.q_content(x).view(b, n, H, WIDTH), self.q_place(self.asked).view(1, n, H, WIDTH).expand(
            b, -1, -1, -1)], dim=3).flatten(2)  # fmt: skip
        k = torch.cat([self.k_content(memory).view(b, m, H, WIDTH), self.k_place(self.place).view(1, m, H,
            WIDTH).expand(b, -1, -1, -1)], dim=3).flatten(2)  # fmt: skip
        scores = split(q) @ split(k).mT / math.sqrt(2 * WIDTH)
        return self.o(join(scores.softmax(-1) @ split(self.v(memory))))


@case(separate())
class HardGates(Four):
    """Hard concrete gates decide which heads live; some are closed, and in training noise moves them."""

    def __init__(self) -> None:
        super().__init__()
        self.log_alpha = nn.Parameter(torch.tensor([4.0, -8.0, 2.0, 3.0]))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            noise = torch.empty(H).uniform_(0.3, 0.7).to(x.dtype)
            gate = torch.sigmoid((noise.log() - (1 - noise).log() + self.log_alpha.abs()) / 0.66)
        else:
            gate = torch.sigmoid(self.log_alpha)
        gate = (gate * 1.2 - 0.1).clamp(0, 1)
        out = attend(split(self.q(x)), split(self.k(x)), split(self.v(x)))
        return self.o(join(out * gate.view(1, H, 1, 1)))


@case(
    separate("w_qs", "w_ks", "w_vs", "fc", heads_alone=True, proved=("query", "key"), scores="(h b) q k"),
    inputs=("b n c", "b n n"),
)
class BiasOfAMap(nn.Module):
    """RNA: chances of pairs go through convolutions and bias the scores; a temperature, a norm behind the residual."""

    def __init__(self) -> None:
        super().__init__()
        self.w_qs, self.w_ks, self.w_vs, self.fc = (nn.Linear(24, 24, bias=False) for _ in range(4))
        self.conv = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, H, 1))
        self.layer_norm, self.softmax = nn.LayerNorm(24, eps=1e-6), nn.Softmax(dim=2)

    def forward(self, x: Tensor, pairs: Tensor) -> Tensor:
        b, n, _ = x.size()
        q, k, v = (m(x).view(b, n, H, WIDTH).permute(2, 0, 1, 3).contiguous().view(-1, n, WIDTH)
                   for m in (self.w_qs, self.w_ks, self.w_vs))  # fmt: skip
        bias = self.conv(pairs[:, None]).transpose(0, 1).reshape(-1, n, n)
        attn = self.softmax(torch.bmm(q, k.transpose(1, 2)) / 2.5 + bias)
        out = torch.bmm(attn, v).view(H, b, n, WIDTH).permute(1, 2, 0, 3).contiguous().view(b, n, -1)
        return self.layer_norm(self.fc(out) + x)


@case(
    Core(None, None, None, None, free=("query", "key", "value", "output"), heads=2, proved=()),
    may_refuse="its key projection is followed by an activation|without a projection",
)  # fmt: skip
class TapeOfAMachine(nn.Module):
    """A neural Turing machine reads: keys of two heads, sharpened cosines, and memory is both asked and read."""

    def __init__(self) -> None:
        super().__init__()
        self.keys, self.sharp, self.write = nn.Linear(24, 16), nn.Linear(24, 2), nn.Linear(24, 8)
        self.memory, self.out = nn.Parameter(torch.randn(9, 8)), nn.Linear(16, 24)

    def forward(self, x: Tensor) -> Tensor:
        memory = self.memory + torch.tanh(self.write(x)).mean(1, keepdim=True)
        keys = self.keys(x).unflatten(-1, (2, 8))
        near = F.cosine_similarity(keys[:, :, :, None], memory[:, None, None], dim=-1)
        weights = F.softmax(F.softplus(self.sharp(x))[..., None] * near, dim=-1)
        return self.out(torch.einsum("bnhm,bmd->bnhd", weights, memory).flatten(2))


@case(separate(heads_alone=True, proved=("query", "key", "output")))
class BiasOfTheWholeBoard(Four):
    """Smolgen: an MLP of all squares makes a bias of each head for every pair of squares."""

    def __init__(self) -> None:
        super().__init__()
        self.squeeze = nn.Linear(24, 3, bias=False)
        self.dense = nn.Sequential(nn.Linear(21, 16), nn.SiLU(), nn.LayerNorm(16), nn.Linear(16, H * 8), nn.SiLU())
        self.weights = nn.Linear(8, 49, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split(m(x)) for m in (self.q, self.k, self.v))
        bias = self.weights(self.dense(self.squeeze(x).flatten(1)).view(-1, H, 8)).view(-1, H, 7, 7)
        return self.o(join((q @ k.mT / WIDTH**0.5 + bias).softmax(-1) @ v))


@case(
    Core(rows("W_Q", "c h d"), rows("W_K", "c h d"), rows("W_V", "c h d"), rows("W_O", "h d c"), heads_alone=True),
)
class SummedLast(nn.Module):
    """Results of heads are kept apart, of all heads and tokens, and summed at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.W_Q, self.W_K, self.W_V = (nn.Parameter(torch.empty(24, H, WIDTH)) for _ in range(3))
        self.W_O, self.b_O = nn.Parameter(torch.empty(H, WIDTH, 24)), nn.Parameter(torch.zeros(24))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (torch.einsum("btd,dhk->bthk", x, w) for w in (self.W_Q, self.W_K, self.W_V))
        pattern = torch.softmax(torch.einsum("bthk,bshk->bhts", q, k) / WIDTH**0.5, -1)
        result = torch.einsum("bhts,bshd,hdo->bhto", pattern, v, self.W_O)
        return result.sum(1) + self.b_O


@case(
    Core(rows("q.weight", h=3), rows("k.weight", h=3), rows("v.weight", h=3), rows("o.weight", "c (h d)", h=3), heads=3,
         scores="(b p h) q k", heads_alone=True),
    Core(rows("q2.weight", h=2), rows("k2.weight", h=1), rows("v2.weight", h=1), rows("o2.weight", "c (h d)", h=2),
         heads=2, number=1, heads_alone=True, proved=("query", "key", "value")),
    inputs=("b n c",), tokens=8,
)  # fmt: skip
class HeadsOfTwoWidths(nn.Module):
    """Three heads of eight over pairs of neighbours, then two of seven with one key head over everything."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(24, 24) for _ in range(4))
        self.q2, self.k2, self.v2, self.o2 = nn.Linear(24, 14), nn.Linear(24, 7), nn.Linear(24, 7), nn.Linear(14, 24)

    def forward(self, x: Tensor) -> Tensor:
        b, n, c = x.shape
        pairs = x.view(b * n // 4, 4, c)
        q, k, v = (m(pairs).view(-1, 4, 3, 8).transpose(1, 2).reshape(-1, 4, 8) for m in (self.q, self.k, self.v))
        y = torch.baddbmm(torch.zeros(1, 1, 1, dtype=x.dtype), q, k.mT, alpha=8**-0.5).softmax(-1) @ v
        x = self.o(y.view(-1, 3, 4, 8).transpose(1, 2).reshape(b, n, c))
        q, k, v = self.q2(x).view(b, n, 2, 7), self.k2(x), self.v2(x)
        weights = torch.einsum("bqhd,bkd->bhqk", q, k).softmax(-1)
        return self.o2(torch.einsum("bhqk,bkd->bqhd", weights, v).flatten(2))
