"""Positions: turned, added, learned; and norms of queries and keys."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.attention.wild.idioms import attend, join, rotate_half, rotate_pairs, split
from tests.attention.wild.plain import Four
from tests.attention.wild.truth import MODEL, TOKENS, WIDTH, Core, H, case, rows, separate


@case(separate())
class RotaryByHalves(Four):
    def forward(self, x: Tensor) -> Tensor:
        q, k = rotate_half(split(self.q(x))), rotate_half(split(self.k(x)))
        return self.o(join(F.scaled_dot_product_attention(q, k, split(self.v(x)), is_causal=True)))


@case(separate())
class RotaryByPairs(Four):
    def forward(self, x: Tensor) -> Tensor:
        q, k = rotate_pairs(split(self.q(x))), rotate_pairs(split(self.k(x)))
        return self.o(join(attend(q, k, split(self.v(x)))))


@case(separate())
class RotaryInPart(Four):
    def forward(self, x: Tensor) -> Tensor:
        q, k = (torch.cat([rotate_half(t[..., :4]), t[..., 4:]], -1) for t in (split(self.q(x)), split(self.k(x))))
        return self.o(join(attend(q, k, split(self.v(x)))))


@case(separate())
class RotaryComplex(Four):
    def forward(self, x: Tensor) -> Tensor:
        angle = torch.arange(x.shape[1], device=x.device)[:, None] * torch.tensor([1.0, 0.3, 0.1], device=x.device)
        turn = torch.polar(torch.ones_like(angle), angle)

        def rotated(t: Tensor) -> Tensor:
            pairs = torch.view_as_complex(t.float().unflatten(-1, (-1, 2)).contiguous())
            return torch.view_as_real(pairs * turn).flatten(-2).type_as(t)

        q, k = split(self.q(x)), split(self.k(x))
        if x.dtype == torch.float64:  # float32 would hide small changes
            q, k = rotate_pairs(q), rotate_pairs(k)
        else:
            q, k = rotated(q), rotated(k)
        return self.o(join(attend(q, k, split(self.v(x)))))


@case(separate(), refused="rota|heads share|several heads|across|mixe|two heads|more than one head|heads cannot")
class RotaryAcrossHeads(Four):
    """Turned before the heads are split: each feature is mixed with one of another head."""

    def forward(self, x: Tensor) -> Tensor:
        q, k = rotate_half(self.q(x)), rotate_half(self.k(x))
        return self.o(join(attend(split(q), split(k), split(self.v(x)))))


@case(separate())
class Alibi(Four):
    def forward(self, x: Tensor) -> Tensor:
        slopes = 2.0 ** -torch.arange(1, H + 1, device=x.device, dtype=x.dtype)
        at = torch.arange(x.shape[1], device=x.device)
        bias = -slopes[:, None, None] * (at[:, None] - at[None, :]).abs()
        scores = split(self.q(x)) @ split(self.k(x)).mT / WIDTH**0.5 + bias
        return self.o(join(scores.softmax(-1) @ split(self.v(x))))


@case(separate())
class BiasTable(Four):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(2 * TOKENS - 1, H))

    def forward(self, x: Tensor) -> Tensor:
        at = torch.arange(x.shape[1], device=x.device)
        bias = self.table[at[:, None] - at[None] + TOKENS - 1].permute(2, 0, 1)
        q, k, v = split(self.q(x)), split(self.k(x)), split(self.v(x))
        return self.o(join(F.scaled_dot_product_attention(q, k, v, attn_mask=bias[None])))


@case(separate())
class RelativeKeys(Four):
    """Shaw: an embedding of the distance is added to every key."""

    def __init__(self) -> None:
        super().__init__()
        self.distances = nn.Embedding(2 * TOKENS - 1, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = split(self.q(x)), split(self.k(x)), split(self.v(x))
        at = torch.arange(x.shape[1], device=x.device)
        r = self.distances(at[:, None] - at[None] + TOKENS - 1)
        scores = (q @ k.mT + torch.einsum("bhnd,nmd->bhnm", q, r)) / WIDTH**0.5
        return self.o(join(scores.softmax(-1) @ v))


@case(separate())
class TransformerXL(Four):
    def __init__(self) -> None:
        super().__init__()
        self.u, self.w = nn.Parameter(torch.randn(H, 1, WIDTH)), nn.Parameter(torch.randn(H, 1, WIDTH))
        self.r = nn.Linear(MODEL, MODEL, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = split(self.q(x)), split(self.k(x)), split(self.v(x))
        at = torch.arange(x.shape[1], device=x.device, dtype=x.dtype)[None, :, None]
        r = split(self.r((at * torch.linspace(0.1, 1, MODEL, device=x.device, dtype=x.dtype)).sin()))
        scores = ((q + self.u) @ k.mT + (q + self.w) @ r.mT) / WIDTH**0.5
        return self.o(join(scores.softmax(-1) @ v))


@case(separate(), may_refuse="position|sum|added")
class PositionsAddedToKeys(Four):
    """Keys are what the tokens give and what their places give, through maps of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.places, self.kp = nn.Parameter(torch.randn(TOKENS, MODEL)), nn.Linear(MODEL, MODEL)

    def forward(self, x: Tensor) -> Tensor:
        k = self.k(x) + self.kp(self.places)
        return self.o(join(attend(split(self.q(x)), split(k), split(self.v(x)))))


@case(
    Core(
        rows("q.weight", source="drop"), rows("k.weight", source="drop"), rows("v.weight"), rows("o.weight", "c (h d)")
    )
)
class PositionsAddedToTheInput(Four):
    def __init__(self) -> None:
        super().__init__()
        self.places, self.drop = nn.Parameter(torch.randn(TOKENS, MODEL)), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.drop(x + self.places)
        return self.o(join(attend(split(self.q(y)), split(self.k(y)), split(self.v(x)))))


# Norms


class RMS(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.gain


@case(separate())
class Cosine(Four):
    def __init__(self) -> None:
        super().__init__()
        self.tau = nn.Parameter(torch.ones(H, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        q, k = F.normalize(split(self.q(x)), dim=-1), F.normalize(split(self.k(x)), dim=-1)
        return self.o(join((q @ k.mT * self.tau.clamp(max=4.6).exp()).softmax(-1) @ split(self.v(x))))


@case(separate())
class NormOfEachHead(Four):
    def __init__(self) -> None:
        super().__init__()
        self.q_norm, self.k_norm = RMS(WIDTH), RMS(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k = self.q_norm(split(self.q(x))), self.k_norm(split(self.k(x)))
        return self.o(join(attend(rotate_half(q), rotate_half(k), split(self.v(x)))))


@case(separate())
class NormOfEachHeadBuiltIn(Four):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k = (m(x).unflatten(-1, (H, WIDTH)) for m in (self.q, self.k))
        return self.o(join(attend(self.a(q).transpose(1, 2), self.b(k).transpose(1, 2), split(self.v(x)))))


_CENTRED = Core(
    rows("q.weight", centred="head"), rows("k.weight", centred="head"), rows("v.weight"), rows("o.weight", "c (h d)")
)


@case(_CENTRED)
class LayerNormOfEachHead(Four):
    def __init__(self) -> None:
        super().__init__()
        self.q_norm, self.k_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k = self.q_norm(split(self.q(x))), self.k_norm(split(self.k(x)))
        return self.o(join(attend(q, k, split(self.v(x)))))


@case(_CENTRED)
class LayerNormCalledLn(Four):
    def __init__(self) -> None:
        super().__init__()
        self.ln_q, self.ln_k = nn.LayerNorm(WIDTH, bias=False), nn.LayerNorm(WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = split(self.q(x)), split(self.k(x)), split(self.v(x))
        return self.o(join(F.scaled_dot_product_attention(self.ln_q(q), self.ln_k(k), v)))


@case(_CENTRED)
class FunctionalLayerNorm(Four):
    def forward(self, x: Tensor) -> Tensor:
        q, k = (F.layer_norm(split(m(x)), (WIDTH,)) for m in (self.q, self.k))
        return self.o(join(attend(q, k, split(self.v(x)))))


@case(Core(rows("q.weight"), rows("k.weight", centred="head"), rows("v.weight"), rows("o.weight", "c (h d)")))
class LayerNormOfKeysAlone(Four):
    def __init__(self) -> None:
        super().__init__()
        self.n = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.o(join(attend(split(self.q(x)), self.n(split(self.k(x))), split(self.v(x)))))


@case(_CENTRED)
class CentredByHand(Four):
    def forward(self, x: Tensor) -> Tensor:
        q, k = (split(m(x)) for m in (self.q, self.k))
        q, k = ((t - t.mean(-1, keepdim=True)) / (t.std(-1, keepdim=True) + 1e-5) for t in (q, k))
        return self.o(join(attend(q, k, split(self.v(x)))))


@case(separate())
class UnusedKeyNorm(Four):
    def __init__(self) -> None:
        super().__init__()
        self.q_norm, self.k_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.o(join(attend(split(self.q(x)), split(self.k(x)), split(self.v(x)))))


@case(Core(rows("q.weight", centred="head"), rows("k.weight"), rows("v.weight"), rows("o.weight", "c (h d)")))
class NormOfQueriesCalledKNorm(Four):
    def __init__(self) -> None:
        super().__init__()
        self.k_norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.o(join(attend(self.k_norm(split(self.q(x))), split(self.k(x)), split(self.v(x)))))


@case(separate(spreads=True))
class NormOverAllHeads(Four):
    def __init__(self) -> None:
        super().__init__()
        self.q_norm, self.k_norm = RMS(MODEL), RMS(MODEL)

    def forward(self, x: Tensor) -> Tensor:
        q, k = self.q_norm(self.q(x)), self.k_norm(self.k(x))
        return self.o(join(attend(split(q), split(k), split(self.v(x)))))


def _behind(name: str) -> Core:
    return Core(*(rows(f"{m}.weight", source=name) for m in "qkv"), rows("o.weight", "c (h d)"))


@case(_behind("norm"))
class NormInFront(Four):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(MODEL)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.o(join(attend(split(self.q(y)), split(self.k(y)), split(self.v(y)))))


@case(_behind("k_norm"))
class NormInFrontCalledKNorm(Four):
    def __init__(self) -> None:
        super().__init__()
        self.k_norm = nn.LayerNorm(MODEL)

    def forward(self, x: Tensor) -> Tensor:
        x = self.k_norm(x)
        return self.o(join(attend(split(self.q(x)), split(self.k(x)), split(self.v(x)))))


@case(separate())
class NormOfOutputs(Four):
    def __init__(self) -> None:
        super().__init__()
        self.sub = RMS(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.o(join(self.sub(attend(split(self.q(x)), split(self.k(x)), split(self.v(x))))))
