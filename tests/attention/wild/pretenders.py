"""What looks like heads and has none that rows could tell, and what is called attention and has no softmax."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.attention.wild.idioms import attend, join, split
from tests.attention.wild.plain import Four
from tests.attention.wild.truth import WIDTH, H, case, fused, separate

_MIXED = "mix|share|several of its heads|not followed|not by a linear map|are computed by|depend|turned"


@case(separate(), refused=_MIXED)
class RandomHadamard(Four):
    """Signs and a transform of Hadamard go over all features of queries and keys, as quantised caches want it."""

    def forward(self, x: Tensor) -> Tensor:
        h = torch.ones(1, 1)
        for _ in range(3):
            h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)], 0)
        h = torch.block_diag(h, h, h).to(x.dtype) / math.sqrt(8)  # 24 features, heads of 6
        turn = torch.arange(24) * 7 % 24
        q, k = (split(m(x)[..., turn] @ h) for m in (self.q, self.k))
        return self.o(join(attend(q, k, split(self.v(x)))))


@case(fused("qkv.weight"), refused=_MIXED + "|view|no product")
class HeadsOfTheWrongView(nn.Module):
    """(b, n, 3c) is viewed as (b, 3, h, n, d) without a permutation: tokens and features are scrambled."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.o = nn.Linear(24, 72), nn.Linear(24, 24)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(len(x), 3, H, x.shape[1], WIDTH).unbind(1)
        return self.o(join(attend(q, k, v)))


@case(separate(), refused=_MIXED + "|before the softmax|input of its own")
class RouterOfHeadsInFront(Four):
    """Each token's heads are put in the order of their lengths before anything is asked."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (m(x).unflatten(-1, (H, WIDTH)) for m in (self.q, self.k, self.v))
        order = q.norm(dim=-1).argsort(-1)[..., None].expand_as(q)
        q, k, v = (torch.gather(t, 2, order).transpose(1, 2) for t in (q, k, v))
        return self.o(join(attend(q, k, v)))


@case(none=True)
class GatedSlots(nn.Module):
    """GLA: gates of each feature, states that are multiplied and added, chunk by chunk; no softmax over tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(24, 24, bias=False) for _ in range(4))
        self.gk_proj = nn.Sequential(nn.Linear(24, 4, bias=False), nn.Linear(4, 24))
        self.num_heads, self.norm = H, nn.RMSNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split(m(x)) for m in (self.q_proj, self.k_proj, self.v_proj))
        g = split(F.logsigmoid(self.gk_proj(x)) / 16).cumsum(2)
        scores = torch.einsum("bhid,bhjd->bhij", q * g.exp() * WIDTH**-0.5, k * (-g).exp())
        return self.o_proj(join(self.norm(scores.tril() @ v)))


@case(none=True)
class WeightsOfALastState(nn.Module):
    """A time-mixing layer of RWKV: tokens are shifted, keys decay, receptances gate."""

    def __init__(self) -> None:
        super().__init__()
        self.key, self.value, self.receptance, self.output = (nn.Linear(24, 24, bias=False) for _ in range(4))
        self.time_decay, self.time_first, self.mix = (nn.Parameter(torch.rand(24)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        before = torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], 1)
        y = x * self.mix + before * (1 - self.mix)
        k, v, r = self.key(y), self.value(y), self.receptance(y).sigmoid()
        num = den = torch.zeros_like(k[:, 0])
        out = []
        for t in range(x.shape[1]):
            now = (self.time_first + k[:, t]).exp()
            out.append((num + now * v[:, t]) / (den + now))
            decay = torch.exp(-self.time_decay.exp())
            num, den = decay * num + k[:, t].exp() * v[:, t], decay * den + k[:, t].exp()
        return self.output(r * torch.stack(out, 1))


@case(none=True)
class HeadsOfCodes(nn.Module):
    """Softmaxes over a codebook and over heads, with `query`, `key` and `num_heads`, and none over tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.head_dim = H, WIDTH
        self.query, self.key, self.out = nn.Linear(24, 24), nn.Linear(24, 24), nn.Linear(24, 24)
        self.codes = nn.Parameter(torch.randn(11, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        q, k = (m(x).unflatten(-1, (H, WIDTH)) for m in (self.query, self.key))
        share = (q * k).sum(-1, keepdim=True).softmax(2)
        picked = (q @ self.codes.T).softmax(-1) @ self.codes
        return self.out((picked * share).flatten(2))
