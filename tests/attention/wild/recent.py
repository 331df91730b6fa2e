"""Attention as recent models write it: overlapping windows, sinks, gates, arguments that may be left out."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.attention.wild.idioms import attend, join, rotate_half, split
from tests.attention.wild.plain import Four
from tests.attention.wild.truth import MODEL, WIDTH, Core, H, case, rows, separate


@case(separate(), inputs=("b n c", "b n c"), may_refuse="values are (sums|its inputs)|`first` is passed|other maps")
class ValuesOfAnEarlierLayer(Four):
    """Values are mixed with those of the first layer, where it is not the first itself."""

    def forward(self, x: Tensor, first: Tensor | None = None) -> Tensor:
        q, k, v = (split(m(x)) for m in (self.q, self.k, self.v))
        v = v if first is None else 0.5 * v + 0.5 * split(first)
        return self.o(join(attend(q, k, v)))


@case(
    Core(
        rows("q.weight"), rows("k.weight"), rows("v.weight"), rows("o.weight", "c (h d)"), joint=(0, 7)
    ),
    Core(
        rows("add_q.weight", takes=1), rows("add_k.weight", takes=1), rows("add_v.weight", takes=1),
        rows("add_o.weight", "c (h d)"), joint=(7, 16),
    ),
    inputs=("b n c", "b m c"), may_refuse="second token stream|`context` is passed",
)  # fmt: skip
class SecondStreamIfGiven(Four):
    """Attention of one stream, or of two that attend to each other."""

    def __init__(self) -> None:
        super().__init__()
        self.add_q, self.add_k, self.add_v, self.add_o = (nn.Linear(MODEL, MODEL) for _ in range(4))

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        q, k, v = (split(m(x)) for m in (self.q, self.k, self.v))
        if context is None:
            return self.o(join(attend(q, k, v)))
        others = (split(m(context)) for m in (self.add_q, self.add_k, self.add_v))
        q, k, v = (torch.cat(pair, 2) for pair in zip((q, k, v), others))
        out = join(attend(q, k, v))
        x, context = out.split([x.shape[1], context.shape[1]], 1)
        return torch.cat([self.o(x), self.add_o(context)], 1)


class HeadsApart(nn.Module):
    """Gives its heads in a dim of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(MODEL, MODEL) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split(m(x)) for m in (self.q, self.k, self.v))
        return attend(q, k, v).transpose(1, 2)


@case(Core(rows("inner.q.weight"), rows("inner.k.weight"), rows("inner.v.weight"), rows("o.weight", "c (h d)")))
class HeadsApartUntilTheEnd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.o = HeadsApart(), nn.Linear(MODEL, MODEL)

    def forward(self, x: Tensor) -> Tensor:
        return self.o(self.inner(x).flatten(2))


@case(
    Core(
        rows("q.weight", "(h r d) c", n_r=2, r=0), rows("k.weight", h=2), rows("v.weight", h=2),
        rows("o.weight", "c (h d)"),
    )
)  # fmt: skip
class GatesBesideQueries(Four):
    """Queries and gates of one map head by head, normed, turned, in groups, gated by a sigmoid."""

    def __init__(self) -> None:
        super().__init__(q=2 * MODEL, k=2 * WIDTH, v=2 * WIDTH)
        self.q_gain, self.k_gain = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        q, gate = self.q(x).view(*x.shape[:2], H, 2 * WIDTH).chunk(2, -1)
        k, v = (split(m(x), 2).repeat_interleave(2, 1) for m in (self.k, self.v))
        q = rotate_half(F.rms_norm(q.transpose(1, 2), (WIDTH,), self.q_gain))
        k = rotate_half(F.rms_norm(k, (WIDTH,), self.k_gain))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(join(out) * gate.flatten(2).sigmoid())


@case(Core(rows("q.weight"), rows("k.weight"), rows("v.weight"), rows("o.weight", "c (h d)"), query_token=0))
class PooledByAQuestion(Four):
    """The first token alone asks."""

    def forward(self, x: Tensor) -> Tensor:
        return self.o(join(attend(split(self.q(x[:, :1])), split(self.k(x)), split(self.v(x)))))[:, 0]


@case(separate())
class CappedScores(Four):
    """Scores are capped by a tanh, and a slope for each head is added by distance."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split(m(x)) for m in (self.q, self.k, self.v))
        places = torch.arange(x.shape[1])
        slopes = 2.0 ** -torch.arange(1, H + 1)
        scores = 5.0 * torch.tanh(q @ k.mT / WIDTH**0.5 / 5.0)
        scores = scores - slopes.view(-1, 1, 1) * (places[:, None] - places).abs()
        return self.o(join(scores.softmax(-1) @ v))


@case(Core(None, rows("k.weight"), rows("v.weight"), rows("o.weight", "c (h d)"), free=("query",)), tokens=9)
class LatentsThatLearn(nn.Module):
    """Learned latents ask a sequence, with a projection of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.latents = nn.Parameter(torch.randn(5, MODEL))
        self.q, self.k, self.v, self.o = (nn.Linear(MODEL, MODEL) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q = split(self.q(self.latents).expand(len(x), -1, -1))
        return self.o(join(attend(q, split(self.k(x)), split(self.v(x)))))
