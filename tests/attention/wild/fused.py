"""One map for several roles, bare parameters, convolutions."""

from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F

from tests.attention.wild.idioms import attend, join, split
from tests.attention.wild.truth import MODEL, WIDTH, Core, H, Rows, case, fused, rows


class Fused(nn.Module):
    def __init__(self, features: int = 3 * MODEL) -> None:
        super().__init__()
        self.qkv, self.o = nn.Linear(MODEL, features), nn.Linear(MODEL, MODEL)


def _blocks(name: str, total: int, which: list[int], pattern: str = "(j d) c") -> tuple[Rows, ...]:
    return tuple(rows(name, pattern, h=1, n_j=total, j=j) for j in which)


@case(fused())
class FusedByReshape(Fused):
    def forward(self, x: Tensor) -> Tensor:
        B, N, C = x.shape
        q, k, v = self.qkv(x).reshape(B, N, 3, H, C // H).permute(2, 0, 3, 1, 4).unbind(0)
        return self.o((F.softmax(q * WIDTH**-0.5 @ k.transpose(-2, -1), -1) @ v).transpose(1, 2).reshape(B, N, C))


@case(fused())
class FusedBySplit(Fused):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).split(MODEL, dim=2)
        return self.o(join(F.scaled_dot_product_attention(split(q), split(k), split(v), is_causal=True)))


@case(fused(pattern="(h r d) c"))
class FusedForEachHead(Fused):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], H, 3 * WIDTH).transpose(1, 2).chunk(3, -1)
        return self.o(join(attend(q, k, v)))


@case(fused(pattern="(h d r) c"))
class FusedRoleLast(Fused):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], H, WIDTH, 3).transpose(1, 2).unbind(-1)
        return self.o(join(attend(q, k, v)))


@case(fused(pattern="(r d h) c"))
class FusedHeadsLast(Fused):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, WIDTH, H).permute(2, 0, 4, 1, 3)
        return self.o(join(attend(q, k, v)))


@case(fused(pattern="(d r h) c"))
class FusedByOddOrder(Fused):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = rearrange(self.qkv(x), "b n (d r h) -> r b h n d", r=3, h=H)
        return self.o(rearrange(attend(q, k, v), "b h n d -> b n (h d)"))


@case(fused(pattern="(d h r) c", out="c (d h)"))
class FusedAllBackwards(Fused):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = rearrange(self.qkv(x), "b n (d h r) -> r b h n d", r=3, h=H)
        return self.o(rearrange(attend(q, k, v), "b h n d -> b n (d h)"))


@case(fused())
class FusedByEinops(Fused):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = rearrange(self.qkv(x), "b n (qkv h d) -> qkv b h n d", qkv=3, h=H)
        return self.o(rearrange(F.scaled_dot_product_attention(q, k, v), "b h n d -> b n (h d)"))


@case(fused("qkv.weight", order="kqv"))
class FusedKeysFirst(Fused):
    def forward(self, x: Tensor) -> Tensor:
        k, q, v = (split(t) for t in self.qkv(x).tensor_split(3, -1))
        return self.o(join(attend(q, k, v)))


@case(
    Core(
        rows("q.weight"),
        rows("kv.weight", "(r h d) c", n_r=2, r=0),
        rows("kv.weight", "(r h d) c", n_r=2, r=1),
        rows("o.weight", "c (h d)"),
    )
)
class KeysAndValuesFused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv, self.o = nn.Linear(MODEL, MODEL), nn.Linear(MODEL, 2 * MODEL), nn.Linear(MODEL, MODEL)

    def forward(self, x: Tensor) -> Tensor:
        k, v = self.kv(x).unflatten(-1, (2, H, WIDTH)).permute(2, 0, 3, 1, 4)
        return self.o(join(attend(split(self.q(x)), k, v)))


@case(
    Core(
        rows("q.weight"),
        rows("kv.weight", "(h r d) c", n_r=2, r=0, takes=1),
        rows("kv.weight", "(h r d) c", n_r=2, r=1, takes=1),
        rows("o.weight", "c (h d)"),
    ),
    inputs=("b n c", "b m c"),
)
class KeysAndValuesFusedForEachHead(KeysAndValuesFused):
    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        k, v = rearrange(self.kv(context), "b m (h r d) -> r b h m d", r=2, h=H)
        return self.o(join(attend(split(self.q(x)), k, v)))


@case(
    Core(
        rows("qk.weight", "(r h d) c", n_r=2, r=0),
        rows("qk.weight", "(r h d) c", n_r=2, r=1),
        rows("v.weight"),
        rows("o.weight", "c (h d)"),
    )
)
class QueriesAndKeysFused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qk, self.v, self.o = nn.Linear(MODEL, 2 * MODEL), nn.Linear(MODEL, MODEL), nn.Linear(MODEL, MODEL)

    def forward(self, x: Tensor) -> Tensor:
        q, k = self.qk(x).chunk(2, -1)
        return self.o(join(attend(split(q), split(k), split(self.v(x)))))


@case(
    Core(
        *(rows("inner.weight", "(p r h d) c", n_p=2, p=0, n_r=3, r=r) for r in range(3)),
        rows("o.weight", "c (p h d)", n_p=4, p=0),
    )
)
class ParallelFeedForward(nn.Module):
    """One map for attention and the feed-forward part beside it, one map out."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.o = nn.Linear(MODEL, 6 * MODEL), nn.Linear(4 * MODEL, MODEL)

    def forward(self, x: Tensor) -> Tensor:
        qkv, up = self.inner(x).split([3 * MODEL, 3 * MODEL], -1)
        out = join(attend(*(split(t) for t in qkv.chunk(3, -1))))
        return self.o(torch.cat([out, F.gelu(up)], -1))


@case(fused(order="qkvg"))
class FusedWithGate(Fused):
    def __init__(self) -> None:
        super().__init__(4 * MODEL)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v, gate = self.qkv(x).chunk(4, -1)
        return self.o(join(attend(split(q), split(k), split(v))) * gate.sigmoid())


class Conv1D(nn.Module):
    """A linear map whose weight lies the other way round."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.weight, self.bias = (
            nn.Parameter(torch.randn(out_features, in_features)),
            nn.Parameter(torch.zeros(in_features)),
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(*x.shape[:-1], -1)


@case(fused("c_attn.weight", "c (r h d)", "c_proj.weight", "(h d) c"))
class StoredTransposed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c_attn, self.c_proj = Conv1D(3 * MODEL, MODEL), Conv1D(MODEL, MODEL)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.c_attn(x).split(MODEL, 2)
        return self.c_proj(join(attend(split(q), split(k), split(v))))


_FUSED_GQA = Core(
    _blocks("qkv.weight", 8, [0, 1, 2, 3]), _blocks("qkv.weight", 8, [4, 5]), _blocks("qkv.weight", 8, [6, 7]),
    rows("o.weight", "c (h d)"),
)  # fmt: skip


@case(_FUSED_GQA)
class FusedGroups(Fused):
    def __init__(self) -> None:
        super().__init__(8 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).split([4 * WIDTH, 2 * WIDTH, 2 * WIDTH], -1)
        k, v = (split(t, 2).repeat_interleave(2, 1) for t in (k, v))
        return self.o(join(attend(split(q), k, v)))


_FUSED_BY_GROUP = Core(
    _blocks("qkv.weight", 8, [0, 1, 4, 5]), _blocks("qkv.weight", 8, [2, 6]), _blocks("qkv.weight", 8, [3, 7]),
    rows("o.weight", "c (h d)"),
)  # fmt: skip


@case(_FUSED_BY_GROUP)
class FusedByGroup(FusedGroups):
    """Two queries, their key, their value; then the next group."""

    def forward(self, x: Tensor) -> Tensor:
        t = self.qkv(x).view(*x.shape[:2], 2, 4, WIDTH)
        q = t[..., :2, :].flatten(2, 3).transpose(1, 2)
        k, v = (t[..., i, :].repeat_interleave(2, 2).transpose(1, 2) for i in (2, 3))
        return self.o(join(attend(q, k, v)))


# Bare parameters


@case(
    Core(*(rows(name, "h c d") for name in ("w_q", "w_k", "w_v")), rows("w_o", "h d c")),
)
class ParametersForEachHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w_q, self.w_k, self.w_v = (nn.Parameter(torch.randn(H, MODEL, WIDTH)) for _ in range(3))
        self.w_o = nn.Parameter(torch.randn(H, WIDTH, MODEL))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (torch.einsum("bnc,hcd->bhnd", x, w) for w in (self.w_q, self.w_k, self.w_v))
        return torch.einsum("bhnd,hdc->bnc", attend(q, k, v), self.w_o)


@case(Core(*(rows("w", "r h c d", n_r=3, r=r) for r in range(3)), rows("w_o", "c h d")))
class OneParameterForAll(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(3, H, MODEL, WIDTH))
        self.w_o = nn.Parameter(torch.randn(MODEL, H, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = torch.einsum("bnc,rhcd->rbhnd", x, self.w)
        return torch.einsum("bhnd,chd->bnc", attend(q, k, v), self.w_o)


@case(Core(*(rows(name, "c (h d)") for name in ("wq", "wk", "wv")), rows("wo", "(h d) c")))
class Matrices(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Parameter(torch.randn(MODEL, MODEL)) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        return join(attend(split(x @ self.wq), split(x @ self.wk), split(x @ self.wv))) @ self.wo


@case(Core(*(rows(name, "h d c") for name in ("wq", "wk", "wv")), rows("wo", "c (h d)")))
class MatmulForEachHead(nn.Module):
    """The input against a stack of matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wk, self.wv = (nn.Parameter(torch.randn(H, WIDTH, MODEL)) for _ in range(3))
        self.wo = nn.Parameter(torch.randn(MODEL, MODEL))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (x[:, None] @ w.mT for w in (self.wq, self.wk, self.wv))
        return F.linear(join(attend(q, k, v)), self.wo)


@case(Core(*(rows("in_proj", "(r h d) c", n_r=3, r=r) for r in range(3)), rows("out_proj", "c (h d)")))
class FunctionalLinear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.in_proj, self.out_proj = nn.Parameter(torch.randn(3 * MODEL, MODEL)), nn.Parameter(torch.randn(24, 24))
        self.in_bias = nn.Parameter(torch.zeros(3 * MODEL))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = F.linear(x, self.in_proj, self.in_bias).chunk(3, -1)
        return F.linear(join(attend(split(q), split(k), split(v))), self.out_proj)


@case(Core(*(rows(f"w.{name}", "c (h d)") for name in "qkv"), rows("w.o", "(h d) c")))
class ParametersInADict(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.ParameterDict({name: torch.randn(MODEL, MODEL) for name in "qkvo"})

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split(torch.matmul(x, self.w[name])) for name in "qkv")
        return join(attend(q, k, v)) @ self.w["o"]


@case(Core(*(rows(f"maps.{name}.weight") for name in ("query", "key", "value")), rows("maps.out.weight", "c (h d)")))
class MapsInADict(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.maps = nn.ModuleDict({name: nn.Linear(MODEL, MODEL) for name in ("query", "key", "value", "out")})

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split(self.maps[name](x)) for name in ("query", "key", "value"))
        return self.maps["out"](join(attend(q, k, v)))


@case(Core(*(rows(f"linears.{i}.weight") for i in range(3)), rows("linears.3.weight", "c (h d)")))
class MapsInAList(nn.Module):
    """As in the annotated transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.linears = nn.ModuleList([nn.Linear(MODEL, MODEL) for _ in range(4)])
        self.h, self.d_k, self.attn = H, WIDTH, None

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = [
            lin(one).view(x.size(0), -1, self.h, self.d_k).transpose(1, 2) for lin, one in zip(self.linears, (x, x, x))
        ]
        self.attn = (q @ k.transpose(-2, -1) / self.d_k**0.5).softmax(dim=-1)
        return self.linears[-1]((self.attn @ v).transpose(1, 2).contiguous().view(x.size(0), -1, self.h * self.d_k))


# Convolutions


@case(
    Core(*(rows("qkv.weight", "(r h d) c x y", n_r=3, r=r) for r in range(3)), rows("o.weight", "c (h d) x y")),
    inputs=("b c x y",), tokens=16,
)  # fmt: skip
class Pixels(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.o = nn.Conv2d(MODEL, 3 * MODEL, 1), nn.Conv2d(MODEL, MODEL, 1)

    def forward(self, x: Tensor) -> Tensor:
        B, C, X, Y = x.shape
        q, k, v = self.qkv(x).view(B, 3, H, WIDTH, X * Y).transpose(-1, -2).unbind(1)
        return self.o(attend(q, k, v).transpose(-1, -2).reshape(B, C, X, Y))


@case(
    Core(*(rows("qkv.weight", "(h r d) c x y", n_r=3, r=r) for r in range(3)), rows("o.weight", "c (h d) x y")),
    inputs=("b c x y",), tokens=16,
)  # fmt: skip
class PixelsForEachHead(Pixels):
    """As in diffusion models: by einsum over channels."""

    def forward(self, x: Tensor) -> Tensor:
        B, C, X, Y = x.shape
        q, k, v = self.qkv(x).view(B, H, 3, WIDTH, X * Y).unbind(2)
        weights = torch.einsum("bhdn,bhdm->bhnm", q, k).softmax(-1)
        return x + self.o(torch.einsum("bhnm,bhdm->bhdn", weights, v).reshape(B, C, X, Y))


@case(
    Core(*(rows(f"{name}.weight", "(h d) c x") for name in "qkv"), rows("o.weight", "c (h d) x")),
    inputs=("b c n",),
)
class Signals(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Conv1d(MODEL, MODEL, 1) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (m(x).unflatten(1, (H, WIDTH)) for m in (self.q, self.k, self.v))
        weights = F.softmax(q.mT @ k / WIDTH**0.5, dim=-1)
        return self.o((v @ weights.mT).flatten(1, 2))


@case(
    Core(
        rows("q.weight"),
        rows("kv.weight", "(r h d) c", n_r=2, r=0, source="norm"),
        rows("kv.weight", "(r h d) c", n_r=2, r=1, source="norm"),
        rows("o.weight", "c (h d)"),
    ),
    tokens=16,
)
class KeysOfFewerPixels(nn.Module):
    """Keys and values of a picture that a filter has made smaller (PVT)."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv, self.o = nn.Linear(MODEL, MODEL), nn.Linear(MODEL, 2 * MODEL), nn.Linear(MODEL, MODEL)
        self.sr, self.norm = nn.Conv2d(MODEL, MODEL, 2, 2), nn.LayerNorm(MODEL)

    def forward(self, x: Tensor) -> Tensor:
        small = self.sr(x.mT.unflatten(-1, (4, 4))).flatten(2).mT
        k, v = self.kv(self.norm(small)).chunk(2, -1)
        return self.o(join(attend(split(self.q(x)), split(k), split(v))))
