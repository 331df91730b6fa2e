"""What looks like attention with heads and is not, or whose heads are none that rows could tell."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.attention.wild.idioms import attend, join, split
from tests.attention.wild.plain import Four
from tests.attention.wild.truth import WIDTH, Core, H, case, rows, separate


@case(none=True)
class LateInteraction(nn.Module):
    """ColBERT: each word of a question takes the best of its products with the words of a document."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(24, 12, bias=False), nn.Linear(24, 12, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, d = F.normalize(self.query(x), dim=-1), F.normalize(self.key(x.flip(0)), dim=-1)
        return (q[:, None] @ d[None].mT).max(-1).values.sum(-1)


@case(none=True)
class SequentialTransducer(nn.Module):
    """HSTU: a SiLU of scores, biased by time, weighs values; a norm and a gate follow."""

    def __init__(self) -> None:
        super().__init__()
        self.uvqk, self.o, self.norm = nn.Linear(24, 96), nn.Linear(24, 24), nn.LayerNorm(24)
        self.bias = nn.Parameter(torch.zeros(13))

    def forward(self, x: Tensor) -> Tensor:
        u, v, q, k = F.silu(self.uvqk(x)).chunk(4, -1)
        at = torch.arange(x.shape[1])
        scores = split(q) @ split(k).mT + self.bias[at[:, None] - at + 6]
        weights = F.silu(scores) / x.shape[1] * torch.ones(len(at), len(at)).tril().to(x.dtype)
        return self.o(self.norm(join(weights @ split(v))) * u) + x


@case(none=True)
class EquivariantAttention(Four):
    """TorchMD-Net: a SiLU of products, scaled by filters of distances and cut off, weighs messages."""

    def __init__(self) -> None:
        super().__init__()
        self.dk, self.dv = nn.Linear(5, 24), nn.Linear(5, 24)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (m(x).unflatten(-1, (H, WIDTH)) for m in (self.q, self.k, self.v))
        far = torch.cdist(x[..., :3], x[..., :3])[..., None]
        basis = torch.exp(-((far - torch.arange(5)) ** 2))
        dk, dv = (F.silu(m(basis)).unflatten(-1, (H, WIDTH)) for m in (self.dk, self.dv))
        attn = F.silu((q[:, :, None] * k[:, None] * dk).sum(-1)) * torch.exp(-far)
        return self.o((v[:, None] * dv * attn[..., None]).sum(2).flatten(2))


@case(none=True, inputs=("b c x y",), tokens=16)
class LargeKernelAttention(nn.Module):
    """VAN: what is called attention is a gate of wide filters."""

    def __init__(self) -> None:
        super().__init__()
        self.conv0, self.spatial = (
            nn.Conv2d(24, 24, 5, padding=2, groups=24),
            nn.Conv2d(24, 24, 3, padding=1, groups=24),
        )
        self.query, self.value, self.num_heads = nn.Conv2d(24, 24, 1), nn.Conv2d(24, 24, 1), H

    def forward(self, x: Tensor) -> Tensor:
        attention = self.query(self.spatial(self.conv0(F.gelu(x))))
        return self.value(x * attention) + x


@case(none=True, inputs=("b c x y", "b c x y"), tokens=16)
class GateOfASkip(nn.Module):
    """Attention U-Net: a sigmoid of a sum gates what skips."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.psi = nn.Conv2d(24, 12, 1), nn.Conv2d(24, 12, 1), nn.Conv2d(12, 1, 1)

    def forward(self, g: Tensor, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.psi(F.relu(self.query(g) + self.key(x))))


@case(none=True, inputs=("b n n c",), tokens=5)
class TriangleProduct(nn.Module):
    """Triangle multiplication: edges are products of two gated maps, summed over a third node."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.gate, self.out = nn.Linear(24, 48), nn.Linear(24, 48), nn.Linear(24, 24), nn.Linear(24, 24)
        self.norm, self.centre = nn.LayerNorm(24), nn.LayerNorm(24)

    def forward(self, z: Tensor) -> Tensor:
        y = self.norm(z)
        a, b = (F.glu(m(y)).permute(0, 3, 1, 2) for m in (self.a, self.b))
        return z + self.gate(y).sigmoid() * self.out(self.centre((a @ b.mT).permute(0, 2, 3, 1)))


@case(none=True)
class SoftmaxOverHeads(Four):
    """A mistake that trains: without a dim, or with the wrong one, heads compete for each pair of tokens."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split(m(x)) for m in (self.q, self.k, self.v))
        return self.o(join((q @ k.mT / WIDTH**0.5).softmax(dim=1) @ v))


@case(none=True)
class MonotonicAlignment(nn.Module):
    """Each step goes on from where the last one stopped: sigmoids and running products, no softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(24, 24) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        stop = torch.sigmoid(self.q(x) @ self.k(x).mT / 24**0.5)
        going = torch.cumprod(F.pad(1 - stop, (1, 0), value=1.0), -1)[..., :-1]
        before = F.one_hot(torch.zeros(len(x), dtype=torch.long), x.shape[1]).to(x.dtype)
        out = []
        for t in range(x.shape[1]):
            before = stop[:, t] * going[:, t] * torch.cumsum(before / going[:, t].clamp(1e-6), -1)
            out.append(before)
        return torch.stack(out, 1) @ self.v(x)


_NO_SCORES = "not products of queries and keys|single tokens|sums of a term|matrix product|not by a linear map"


@case(Core(None, None, None, rows("o.weight", "c (h d)"), proved=()), may_refuse=_NO_SCORES)
class AttentionFree(Four):
    """AFT: a softmax of keys over tokens, feature by feature; queries gate."""

    def forward(self, x: Tensor) -> Tensor:
        weights = torch.softmax(self.k(x), dim=1)
        return self.o(torch.sigmoid(self.q(x)) * (weights * self.v(x)).sum(dim=1, keepdim=True))


@case(Core(None, None, rows("v.weight"), rows("o.weight", "c (h d)"), proved=("value", "output"), scores="u h q k"),
      may_refuse=_NO_SCORES)  # fmt: skip
class RandomSynthesizer(nn.Module):
    """Scores are parameters: nobody asks."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Parameter(torch.empty(1, H, 7, 7))
        self.v, self.o = nn.Linear(24, 24), nn.Linear(24, 24)

    def forward(self, x: Tensor) -> Tensor:
        return self.o(join(F.dropout(self.scores.softmax(-1), 0.1, False) @ split(self.v(x))))


_MIXED = "mix|share|several of its heads|an input of its own|not by a linear map|are computed by|depend"


@case(separate(), refused=_MIXED)
class ReflectedAcrossHeads(Four):
    """Householder reflections of queries and keys go across all heads."""

    def __init__(self) -> None:
        super().__init__()
        self.across = nn.Parameter(torch.randn(2, 24))

    def reflect(self, x: Tensor, u: Tensor) -> Tensor:
        u = u / u.norm()
        return x - 2 * (x @ u)[..., None] * u

    def forward(self, x: Tensor) -> Tensor:
        q, k = (split(self.reflect(m(x), u)) for m, u in zip((self.q, self.k), self.across))
        return self.o(join(attend(q, k, split(self.v(x)))))


@case(separate(), refused=_MIXED)
class NeighbouringHeads(Four):
    """A filter along the axis of heads blends queries and keys of neighbours."""

    def __init__(self) -> None:
        super().__init__()
        self.blend = nn.Conv1d(1, 1, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        def blended(m: nn.Module) -> Tensor:
            heads = m(x).unflatten(-1, (H, WIDTH)).transpose(-1, -2)  # (b, n, d, h)
            return self.blend(heads.flatten(0, 2)[:, None])[:, 0].unflatten(0, heads.shape[:3]).permute(0, 3, 1, 2)

        return self.o(join(attend(blended(self.q), blended(self.k), split(self.v(x)))))


@case(
    Core(None, rows("k.weight", h=1), rows("v.weight", h=1), None, heads=2, number=1, free=("query", "output"),
         scores="b h q k", heads_alone=True, proved=("key",)),
    may_refuse="no output projection was found",
)  # fmt: skip
class ChosenExperts(nn.Module):
    """Mixture of attention heads: each token takes the two experts of queries that its router likes."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.k, self.v = nn.Linear(24, H), nn.Linear(24, WIDTH), nn.Linear(24, WIDTH)
        self.wq, self.wo = nn.Parameter(torch.empty(H, WIDTH, 24)), nn.Parameter(torch.empty(H, 24, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(2)
        q = torch.einsum("bnedc,bnc->bned", self.wq[chosen], x)
        scores = torch.einsum("bned,bmd->benm", q, self.k(x)) / WIDTH**0.5
        out = torch.einsum("benm,bmd->bned", scores.softmax(-1), self.v(x)) * weights[..., None]
        return torch.einsum("bned,bnecd->bnc", out, self.wo[chosen])
