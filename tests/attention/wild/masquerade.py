"""Counter-examples: heads that rows of matrices cannot tell, and code with queries and keys that holds no attention."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.attention.wild.idioms import attend, join, split
from tests.attention.wild.plain import Four
from tests.attention.wild.truth import WIDTH, H, case, separate

_MIXED = "mix|share|several of its heads|not followed|depend"


@case(separate(), refused=_MIXED)
class ValuesOfAllHeadsMixed(Four):
    """A learned matrix makes the values of each head of those of all."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.eye(H) + 0.1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split(m(x)) for m in (self.q, self.k, self.v))
        return self.o(join(attend(q, k, torch.einsum("bhnd,hg->bgnd", v, self.mix))))


@case(separate(), refused=_MIXED)
class ScoresCascadeOverHeads(Four):
    """Each head adds its scores to those of all heads before it."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split(m(x)) for m in (self.q, self.k, self.v))
        scores = torch.cumsum(q @ k.mT / WIDTH**0.5, dim=1)
        return self.o(join(F.softmax(scores, dim=-1) @ v))


@case(separate(), refused=_MIXED)
class WeightsOfPairsAveraged(Four):
    """Two heads each weigh their values with the mean of their weights."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split(m(x)) for m in (self.q, self.k, self.v))
        weights = F.softmax(q @ k.mT / WIDTH**0.5, dim=-1)
        return self.o(join((weights + weights.flip(1)) / 2 @ v))


@case(none=True)
class BoundariesOfChunks(nn.Module):
    """H-Net: queries and keys of neighbours say where a chunk begins, and a moving average smooths the rest."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.out_proj = (nn.Linear(24, 24, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        q, k = F.normalize(self.q_proj(x[:, 1:]), dim=-1), F.normalize(self.k_proj(x[:, :-1]), dim=-1)
        boundary = F.pad(((1 - torch.einsum("bnc,bnc->bn", q, k)) / 2).clamp(0, 1), (1, 0), value=1.0)
        past, out = torch.zeros_like(x[:, 0]), []
        for t in range(x.shape[1]):
            share = boundary[:, t, None]
            past = share * x[:, t] + (1 - share) * past
            out.append(past)
        return x + self.out_proj(torch.stack(out, 1))


@case(none=True)
class GeneralisedDelta(nn.Module):
    """RWKV-7: receptance, keys and values of heads, and a state that a delta rule changes; no softmax anywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.receptance, self.key, self.value, self.output = (nn.Linear(24, 24, bias=False) for _ in range(4))
        self.decay, self.rate, self.ln_x = nn.Linear(24, 24), nn.Linear(24, 24), nn.GroupNorm(H, 24)

    def forward(self, x: Tensor) -> Tensor:
        r, k, v, w, a = (split(m(x)) for m in (self.receptance, self.key, self.value, self.decay, self.rate))
        w, a, kk = torch.exp(-0.6 * w.sigmoid()), a.sigmoid(), F.normalize(k, dim=-1)
        state, out = x.new_zeros(x.shape[0], H, WIDTH, WIDTH), []
        for t in range(x.shape[1]):
            removed = (state @ kk[:, :, t, :, None]) @ (kk * a)[:, :, t, None]
            state = state * w[:, :, t, None] - removed + v[:, :, t, :, None] @ k[:, :, t, None]
            out.append((state @ r[:, :, t, :, None]).squeeze(-1))
        y = torch.stack(out, 2).transpose(1, 2).flatten(2)
        return self.output(self.ln_x(y.flatten(0, 1)).view_as(x))
