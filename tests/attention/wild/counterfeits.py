"""What has the names or the shapes of attention, and heads that rows cannot tell, or none at all."""

from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F

from tests.attention.wild.idioms import attend, join, split
from tests.attention.wild.plain import Four
from tests.attention.wild.truth import WIDTH, Core, H, case, rows, separate

_MIXED = "mix|share|several of its heads|not followed|depend|not products of queries and keys"


@case(
    Core(rows("q.weight"), rows("k1.weight"), rows("v1.weight"), rows("o.weight", "c (h d)"), scores="b h q k"),
    refused="of three tokens",
)  # fmt: skip
class PairsAreAsked(nn.Module):
    """Two-simplicial attention: each score is of a query and two keys, and what is averaged are pairs of values."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k1, self.k2, self.v1, self.v2, self.o = (nn.Linear(24, 24, bias=False) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        q, k1, k2, v1, v2 = (split(m(x)) for m in (self.q, self.k1, self.k2, self.v1, self.v2))
        scores = torch.einsum("bhid,bhjd,bhkd->bhijk", q, k1, k2) / WIDTH
        weights = scores.flatten(-2).softmax(-1).view_as(scores)
        return self.o(join(torch.einsum("bhijk,bhjd,bhkd->bhid", weights, v1, v2)))


@case(
    Core(rows("to_out.weight", "c (h d)"), rows("to_out.weight", "c (h d)"), None, None), refused=_MIXED,
)  # fmt: skip
class SlicesOfAMesh(nn.Module):
    """Transolver: points go to five slices of each head, slices ask each other by maps that all heads share."""

    def __init__(self) -> None:
        super().__init__()
        self.in_project_x, self.in_project_fx = nn.Linear(24, 24), nn.Linear(24, 24)
        self.in_project_slice = nn.Linear(WIDTH, 5)
        self.to_q, self.to_k, self.to_v = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.to_out, self.temperature = nn.Linear(24, 24), nn.Parameter(torch.full((1, H, 1, 1), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        fx, points = split(self.in_project_fx(x)), split(self.in_project_x(x))
        share = torch.softmax(self.in_project_slice(points) / self.temperature, dim=-1)
        token = torch.einsum("bhnc,bhng->bhgc", fx, share) / (share.sum(2)[..., None] + 1e-5)
        out = attend(self.to_q(token), self.to_k(token), self.to_v(token))
        return self.to_out(rearrange(torch.einsum("bhgc,bhng->bhnc", out, share), "b h n d -> b n (h d)"))


@case(
    Core(*(rows(f"{m}.weight", h=2) for m in "qkv"), rows("o.weight", "c (h d)", h=2), heads=2, scores="b (p h) q k",
         heads_alone=True), tokens=8,
)  # fmt: skip
class TokensInGroupsBecomeHeads(Four):
    """Efficient Conformer: pairs of tokens are cut into four heads, which are two: even ones ask even ones."""

    def forward(self, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        q, k, v = (m(x).reshape(b, n // 2, H, 2 * WIDTH).transpose(1, 2) for m in (self.q, self.k, self.v))
        return self.o(attend(q, k, v).transpose(1, 2).reshape(b, n, 24))


@case(separate(), refused=_MIXED)
class ScoresOfTwoHeadsMeet(Four):
    """Multi-token attention with a filter over heads: scores of neighbouring heads are mixed before the softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.over = nn.Conv2d(H, H, 1, groups=2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split(m(x)) for m in (self.q, self.k, self.v))
        return self.o(join(self.over(q @ k.mT / WIDTH**0.5).softmax(-1) @ v))


@case(
    Core(rows("to_g.weight"), rows("to_m.weight"), None, None, scores="b h q k"), inputs=("b n c", "b n n 24"),
    refused="not products of queries and keys|no query|computed from", call=lambda module, x, pairs: module(x, pairs),
)  # fmt: skip
class AveragedByPairs(nn.Module):
    """AlphaFold 3's pair-weighted averaging: a map of the pairs alone gives the weights; nobody asks."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.to_b = nn.LayerNorm(24), nn.Linear(24, H, bias=False)
        self.to_m, self.to_g, self.to_out = (nn.Linear(24, 24, bias=False) for _ in range(3))

    def forward(self, m: Tensor, z: Tensor) -> Tensor:
        m = self.norm(m)
        weights = self.to_b(z).permute(0, 3, 1, 2).softmax(-1)
        return self.to_out(self.to_g(m).sigmoid() * join(weights @ split(self.to_m(m))))


@case(none=True)
class MemoryByGradientSteps(nn.Module):
    """TTT: queries, keys and values of heads, and a matrix that takes a step of gradient descent at every token."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(24, 24, bias=False) for _ in range(4))
        self.lr, self.num_heads, self.start = nn.Linear(24, H), H, nn.Parameter(torch.zeros(H, WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split(m(x)) for m in (self.q_proj, self.k_proj, self.v_proj))
        rate = self.lr(x).sigmoid().transpose(1, 2)[..., None, None]
        w, out = self.start.expand(len(x), -1, -1, -1), []
        for t in range(x.shape[1]):
            kt, vt, qt = k[:, :, t, :, None], v[:, :, t, :, None], q[:, :, t, :, None]
            w = w - rate[:, :, t] * (w @ kt - vt) @ kt.mT
            out.append((w @ qt)[..., 0])
        return self.o_proj(join(torch.stack(out, 2)))


class _Spike(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return (x > 0).to(x.dtype)

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad


@case(none=True)
class SpikesOfQueries(Four):
    """Spikformer: queries, keys and values are spikes, products are scaled, and no softmax follows."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split(_Spike.apply(F.layer_norm(m(x), (24,)))) for m in (self.q, self.k, self.v))
        return self.o(_Spike.apply(join((q @ k.mT) @ v * 0.125)))


@case(none=True)
class FocusOfContexts(nn.Module):
    """Focal modulation: filters of growing reach, gates of each level, and a product with the query."""

    def __init__(self) -> None:
        super().__init__()
        self.f, self.h, self.proj = nn.Linear(24, 51), nn.Conv1d(24, 24, 1), nn.Linear(24, 24)
        self.focal_layers = nn.ModuleList(nn.Conv1d(24, 24, w, padding=w // 2, groups=24) for w in (3, 5))

    def forward(self, x: Tensor) -> Tensor:
        q, ctx, gates = self.f(x).mT.split([24, 24, 3], 1)
        every = torch.zeros_like(ctx)
        for level, layer in enumerate(self.focal_layers):
            ctx = F.gelu(layer(ctx))
            every = every + ctx * gates[:, level : level + 1]
        every = every + F.gelu(ctx.mean(-1, keepdim=True)) * gates[:, 2:]
        return self.proj((q * self.h(every)).mT)
