"""Pictures, video and points: heads of pixels, windows that are unfolded or rolled, pairs of pictures."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.attention.wild.idioms import attend, join, split
from tests.attention.wild.plain import Four
from tests.attention.wild.truth import WIDTH, Core, H, case, fused, rows, separate

_PIXELS = {"inputs": ("b c x y",), "tokens": 16}


def _convs(q: str, k: str, v: str, o: str | None, **more: object) -> Core:
    made = (rows(f"{m}.weight", "(h d) c u w") for m in (q, k, v))
    return Core(*made, None if o is None else rows(f"{o}.weight", "c (h d) u w"), **more)  # type: ignore[arg-type]


@case(_convs("q", "k", "v", "o", scores="(b p h) q k", heads_alone=True), **_PIXELS)  # type: ignore[arg-type]
class Halo(nn.Module):
    """HaloNet: blocks of pixels ask themselves and a rim of neighbours, which `unfold` gives."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Conv2d(24, 24, 1, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        b, c, h, w = x.shape
        q = self.q(x).view(b, H, WIDTH, h // 2, 2, w // 2, 2).permute(0, 3, 5, 1, 4, 6, 2).reshape(-1, 4, WIDTH)
        kv = torch.cat([self.k(x), self.v(x)], dim=1)
        kv = F.unfold(kv, kernel_size=4, stride=2, padding=1).view(b, 2, H, WIDTH, 16, -1)
        k, v = kv.permute(1, 0, 5, 2, 4, 3).reshape(2, -1, 16, WIDTH)
        inside = F.unfold(x.new_ones(1, 1, h, w), 4, stride=2, padding=1).bool().mT.repeat_interleave(H, 1)
        inside = inside.view(-1, H, 16)[:, 0].repeat_interleave(H, 0).repeat(b, 1)
        sim = torch.bmm(q, k.mT) * WIDTH**-0.5
        out = sim.masked_fill(~inside[:, None], torch.finfo(sim.dtype).min).softmax(-1) @ v
        out = out.view(b, h // 2, w // 2, H, 2, 2, WIDTH).permute(0, 3, 6, 1, 4, 2, 5).reshape(b, c, h, w)
        return self.o(out)


@case(_convs("key_q", "key_k", "key_v", None, scores="b h q k", heads_alone=True), **_PIXELS)  # type: ignore[arg-type]
class StandAlone(nn.Module):
    """SASA: each pixel asks its nine neighbours; products and sums are written out over the features."""

    def __init__(self) -> None:
        super().__init__()
        self.key_q, self.key_k, self.key_v = (nn.Conv2d(24, 24, 1, bias=False) for _ in range(3))
        self.rel_h, self.rel_w = nn.Parameter(torch.randn(12, 1, 1, 3, 1)), nn.Parameter(torch.randn(12, 1, 1, 1, 3))

    def forward(self, x: Tensor) -> Tensor:
        b, c, h, w = x.shape
        padded = F.pad(x, [1, 1, 1, 1])
        q = self.key_q(x).view(b, H, WIDTH, h * w, 1)
        k, v = (m(padded).unfold(2, 3, 1).unfold(3, 3, 1) for m in (self.key_k, self.key_v))
        first, second = k.split(12, dim=1)
        k = torch.cat((first + self.rel_h, second + self.rel_w), dim=1)
        k, v = (one.contiguous().view(b, H, WIDTH, h * w, 9) for one in (k, v))
        weights = F.softmax((q * k).sum(2), dim=-1)
        return torch.einsum("bhnk,bhdnk->bhdn", weights, v).reshape(b, c, h, w)


@case(separate(heads_alone=True))
class RolledNeighbours(Four):
    """Neighbours by `roll`: a softmax over shifts, sums of elementwise products."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split(m(x)) for m in (self.q, self.k, self.v))
        shifts = range(-2, 3)
        k, v = (torch.stack([one.roll(shift, dims=2) for shift in shifts], dim=3) for one in (k, v))
        scores = (q.unsqueeze(3) * k).sum(-1) / WIDTH**0.5
        return self.o(join((scores.softmax(-1).unsqueeze(-1) * v).sum(3)))


@case(
    Core(
        rows("to_qk.weight", "(r h d) c u w", n_r=2, r=0), rows("to_qk.weight", "(r h d) c u w", n_r=2, r=1),
        rows("to_v.weight", "(h d) c u w", takes=1), rows("project.weight", "c (h d) u w"), heads_alone=True,
        proved=("query", "key", "output"),
    ),
    inputs=("b c x y", "b c x y"), tokens=16,
)  # fmt: skip
class GlobalMotion(nn.Module):
    """GMA: what looks alike moves alike: scores of a context average features of motion."""

    def __init__(self) -> None:
        super().__init__()
        self.to_qk, self.to_v = nn.Conv2d(24, 48, 1, bias=False), nn.Conv2d(24, 24, 1, bias=False)
        self.project, self.gamma = nn.Conv2d(24, 24, 1, bias=False), nn.Parameter(torch.ones(1))

    def forward(self, context: Tensor, motion: Tensor) -> Tensor:
        b, c, h, w = context.shape
        q, k = (one.view(b, H, WIDTH, h, w).permute(0, 1, 3, 4, 2) for one in self.to_qk(context).chunk(2, dim=1))
        sim = torch.einsum("bhxyd,bhuvd->bhxyuv", WIDTH**-0.5 * q, k).reshape(b, H, h * w, h * w)
        v = self.to_v(motion).view(b, H, WIDTH, h * w).transpose(2, 3)
        out = torch.einsum("bhij,bhjd->bhid", sim.softmax(dim=-1), v)
        out = out.permute(0, 1, 3, 2).reshape(b, c, h, w)
        return motion + self.gamma * self.project(out)


@case(
    Core(rows("q.weight", h=1), rows("k.weight", h=1, takes=1), None, None, heads=1, scores="(b h) q k"),
    inputs=("b n c", "b m c"), may_refuse="its values are constants",
)  # fmt: skip
class FlowByMatching(nn.Module):
    """GMFlow: a softmax over matches averages their coordinates."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(24, 24), nn.Linear(24, 24)

    def forward(self, one: Tensor, other: Tensor) -> Tensor:
        grid = torch.stack([torch.arange(other.shape[1]), torch.arange(other.shape[1]) ** 2], -1).to(one.dtype)
        matches = F.softmax(torch.matmul(self.q(one), self.k(other).permute(0, 2, 1)) / 24**0.5, dim=-1)
        return torch.matmul(matches, grid.expand(len(one), -1, -1)) - grid[: one.shape[1]]


class _Propagation(nn.Module):
    """SuperGlue's layer: heads are strided, maps are convolutions of width one over keypoints."""

    def __init__(self) -> None:
        super().__init__()
        self.proj, self.merge = nn.ModuleList(nn.Conv1d(24, 24, 1) for _ in range(3)), nn.Conv1d(24, 24, 1)
        self.mlp = nn.Sequential(nn.Conv1d(48, 48, 1), nn.ReLU(), nn.Conv1d(48, 24, 1))

    def forward(self, x: Tensor, source: Tensor) -> Tensor:
        b = x.size(0)
        q, k, v = (m(t).view(b, WIDTH, H, -1) for m, t in zip(self.proj, (x, source, source)))
        prob = F.softmax(torch.einsum("bdhn,bdhm->bhnm", q, k) / WIDTH**0.5, dim=-1)
        message = torch.einsum("bhnm,bdhm->bdhn", prob, v)
        return self.mlp(torch.cat([x, self.merge(message.contiguous().view(b, 24, -1))], dim=1))


def _glue(i: int) -> Core:
    three = (rows(f"layers.{i}.proj.{r}.weight", "(d h) c u") for r in range(3))
    return Core(*three, rows(f"layers.{i}.merge.weight", "c (d h) u"), number=2 * i, rounds=2, proved=())


@case(_glue(0), _glue(1), inputs=("b c n", "b c m"))  # each layer runs for both pictures, residuals lie between
class Glue(nn.Module):
    """Keypoints of two pictures: a layer asks its own picture, the next one the other."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.names = nn.ModuleList(_Propagation() for _ in range(2)), ["self", "cross"]

    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        for layer, name in zip(self.layers, self.names):
            of_a, of_b = (b, a) if name == "cross" else (a, b)
            a, b = a + layer(a, of_a), b + layer(b, of_b)
        return a, b


@case(separate("to_q", "to_k", "to_v", "to_out.0", scores="(b f) h q k", heads_alone=True), inputs=("b 3 n c",))
class FirstAndFormerFrame(nn.Module):
    """Tune-A-Video: each frame asks the first one and the one before it."""

    def __init__(self) -> None:
        super().__init__()
        self.to_q, self.to_k, self.to_v = (nn.Linear(24, 24, bias=False) for _ in range(3))
        self.to_out = nn.ModuleList([nn.Linear(24, 24), nn.Dropout(0.0)])

    def forward(self, video: Tensor) -> Tensor:
        b, f = video.shape[:2]
        x = video.flatten(0, 1)
        q, k, v = self.to_q(x), self.to_k(x), self.to_v(x)
        former = torch.arange(f) - 1
        former[0] = 0

        def both(t: Tensor) -> Tensor:
            t = t.unflatten(0, (b, f))
            return torch.cat([t[:, [0] * f], t[:, former]], dim=2).flatten(0, 1)

        q, k, v = (split(t) for t in (q, both(k), both(v)))
        out = join(F.scaled_dot_product_attention(q, k, v)).to(q.dtype)
        for one in self.to_out:
            out = one(out)
        return out.unflatten(0, (b, f))


@case(
    Core(*(rows("qkv.weight", "(r g h d) c", h=2, n_g=2, g=0, n_r=3, r=r) for r in range(3)),
         rows("o.weight", "c (g h d)", h=2, n_g=2, g=0), heads=2, scores="b t h q k", heads_alone=True),
    Core(*(rows("qkv.weight", "(r g h d) c", h=2, n_g=2, g=1, n_r=3, r=r) for r in range(3)),
         rows("o.weight", "c (g h d)", h=2, n_g=2, g=1), heads=2, scores="b s h q k", number=1, heads_alone=True),
    inputs=("b 3 n c",),
)  # fmt: skip
class HalfOfTheHeadsOverTime(nn.Module):
    """ViViT 4: of one map, two heads look through space and two through time."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.o = nn.Linear(24, 72), nn.Linear(24, 24)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(x).unflatten(-1, (3, H, WIDTH)).movedim(-3, 0)
        space, time = qkv.chunk(2, dim=-2)
        q, k, v = space.transpose(-2, -3)
        one = (torch.softmax(q @ k.mT / WIDTH**0.5, -1) @ v).transpose(-2, -3)
        q, k, v = time.permute(0, 1, 3, 4, 2, 5)
        other = (torch.softmax(q @ k.mT / WIDTH**0.5, -1) @ v).permute(0, 3, 1, 2, 4)
        return self.o(torch.cat([one, other], dim=-2).flatten(-2))


@case(fused("window.qkv.weight", "(r h d) c", "window.proj.weight", heads_alone=True, proved=("query", "key")))
class TokensThenFeatures(nn.Module):
    """DaViT: attention over tokens in one block, over features in groups in the next."""

    def __init__(self) -> None:
        super().__init__()
        self.window = nn.ModuleDict({"qkv": nn.Linear(24, 72), "proj": nn.Linear(24, 24)})
        self.channel = nn.ModuleDict({"qkv": nn.Linear(24, 72), "proj": nn.Linear(24, 24)})

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split(t) for t in self.window["qkv"](x).chunk(3, -1))
        x = x + self.window["proj"](join(attend(q, k, v)))
        q, k, v = (split(t) for t in self.channel["qkv"](x).chunk(3, -1))
        attention = ((k * WIDTH**-0.5).mT @ v).softmax(dim=-1)
        return x + self.channel["proj"](join((attention @ q.mT).mT))


@case(
    Core(rows("query_conv.weight", "(h d) c u w", h=1), rows("key_conv.weight", "(h d) c u w", h=1),
         rows("value_conv.weight", "(h d) c u w", h=1), None, heads=1, scores="(b h) q k", heads_alone=True,
         proved=("query", "key")),
    **_PIXELS,  # type: ignore[arg-type]
)  # fmt: skip
class PositionsAndChannels(nn.Module):
    """DANet: one head over positions, narrow in keys; beside it a map of the channels, without weights."""

    def __init__(self) -> None:
        super().__init__()
        self.query_conv, self.key_conv = nn.Conv2d(24, 3, 1), nn.Conv2d(24, 3, 1)
        self.value_conv = nn.Conv2d(24, 24, 1)
        self.gamma, self.beta = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        b, c, h, w = x.size()
        q = self.query_conv(x).view(b, -1, w * h).permute(0, 2, 1)
        attention = torch.softmax(torch.bmm(q, self.key_conv(x).view(b, -1, w * h)), dim=-1)
        out = torch.bmm(self.value_conv(x).view(b, -1, w * h), attention.permute(0, 2, 1)).view(b, c, h, w)
        flat = x.view(b, c, -1)
        energy = torch.bmm(flat, flat.permute(0, 2, 1))
        energy = torch.max(energy, -1, keepdim=True)[0].expand_as(energy) - energy
        channels = torch.bmm(torch.softmax(energy, dim=-1), flat).view(b, c, h, w)
        return self.gamma * out + self.beta * channels + 2 * x


@case(
    Core(*(rows("to_qkv.weight", "(r h d) c u w", n_r=3, r=r) for r in range(3)), None, heads_alone=True,
         proved=("query", "key", "value")),
    **_PIXELS,  # type: ignore[arg-type]
)  # fmt: skip
class Bottleneck(nn.Module):
    """BoTNet: positions of rows and columns are asked beside contents; no map follows."""

    def __init__(self) -> None:
        super().__init__()
        self.to_qkv = nn.Conv2d(24, 72, 1, bias=False)
        self.height, self.width = nn.Parameter(torch.randn(4, WIDTH)), nn.Parameter(torch.randn(4, WIDTH))

    def forward(self, fmap: Tensor) -> Tensor:
        b, _, h, w = fmap.shape
        q, k, v = (t.reshape(b, H, WIDTH, h * w).transpose(-1, -2) for t in self.to_qkv(fmap).chunk(3, dim=1))
        q = q * WIDTH**-0.5
        sim = torch.einsum("b h i d, b h j d -> b h i j", q, k)
        places = (self.height[:, None] + self.width[None]).flatten(0, 1)
        sim = sim + torch.einsum("b h i d, j d -> b h i j", q, places)
        out = torch.einsum("b h i j, b h j d -> b h i d", sim.softmax(dim=-1), v)
        return out.transpose(-1, -2).reshape(b, 24, h, w)


@case(fused("qkv.weight", "(r h d) c", "proj.weight", scores="b h w q k", heads_alone=True, proved=("key",)), tokens=16)
class QueriesPooledByMaxima(nn.Module):
    """Hiera: within a unit, queries are maxima over strides."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(24, 72), nn.Linear(24, 24)

    def forward(self, x: Tensor) -> Tensor:
        b, windows = len(x), 4
        qkv = self.qkv(x).reshape(b, -1, windows, 3, H, WIDTH).permute(3, 0, 4, 2, 1, 5)
        q, k, v = qkv[0], qkv[1], qkv[2]
        q = q.view(b, H, windows, 2, -1, WIDTH).max(dim=3).values
        x = F.scaled_dot_product_attention(q, k, v)
        return self.proj(x.transpose(1, 3).reshape(b, -1, 24))


@case(
    Core(rows("qk.weight"), rows("context_qk.weight", takes=1), rows("context_v.weight", takes=1),
         rows("out.weight", "c (h d)")),
    Core(rows("context_qk.weight", takes=1), rows("qk.weight"), rows("v.weight"), rows("context_out.weight", "c (h d)"),
         number=1, scores="b h k q", proved=()),
    inputs=("b n c", "b m c"), may_refuse="both|two|second|other|over queries",
)  # fmt: skip
class BothWays(nn.Module):
    """GLIP: one table of scores, a softmax over its rows for one modality and over its columns for the other."""

    def __init__(self) -> None:
        super().__init__()
        self.qk, self.context_qk, self.v, self.context_v = (nn.Linear(24, 24, bias=False) for _ in range(4))
        self.out, self.context_out = nn.Linear(24, 24), nn.Linear(24, 24)

    def forward(self, x: Tensor, context: Tensor) -> tuple[Tensor, Tensor]:
        qk, context_qk, v, context_v = (
            split(m(t)) for m, t in
            ((self.qk, x), (self.context_qk, context), (self.v, x), (self.context_v, context))
        )  # fmt: skip
        sim = torch.einsum("b h i d, b h j d -> b h i j", qk, context_qk) * WIDTH**-0.5
        attn, context_attn = sim.softmax(dim=-1), sim.softmax(dim=-2)
        out = torch.einsum("b h i j, b h j d -> b h i d", attn, context_v)
        context_out = torch.einsum("b h j i, b h j d -> b h i d", context_attn, v)
        return self.out(join(out)), self.context_out(join(context_out))


@case(
    *(Core(rows("q.weight"), rows(f"kv.{i}.weight", "(r h d) c", n_r=2, r=0, takes=i + 1),
           rows(f"kv.{i}.weight", "(r h d) c", n_r=2, r=1, takes=i + 1), rows("o.weight", "c (h d)"), heads_alone=True,
           proved=("query", "key", "value")) for i in range(2)),
    inputs=("b n c", "b m c", "b n c"), call=lambda module, x, *levels: module(x, list(levels)),
    may_refuse="stream|several|two|second|sum|join",
)  # fmt: skip
class LevelsOfFeatures(nn.Module):
    """Cross-attention over a list: each level of features has keys and values of its own, all are asked at once."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.o = nn.Linear(24, 24), nn.Linear(24, 24)
        self.kv = nn.ModuleList(nn.Linear(24, 48) for _ in range(2))

    def forward(self, x: Tensor, levels: list[Tensor]) -> Tensor:
        pairs = [kv(level).chunk(2, dim=-1) for kv, level in zip(self.kv, levels)]
        k, v = (split(torch.cat(each, dim=1)) for each in zip(*pairs))
        return self.o(join(attend(split(self.q(x)), k, v)))


@case(separate(), inputs=("b n c",))
class SameTransformForAll(Four):
    """GTA: a matrix of each view turns queries, keys and values; outputs are turned back."""

    def forward(self, x: Tensor) -> Tensor:
        n = x.shape[1]
        angle = torch.arange(n).to(x.dtype) * 0.7
        turn = torch.eye(WIDTH, dtype=x.dtype).repeat(n, 1, 1)
        turn[:, 0, 0] = turn[:, 1, 1] = angle.cos()
        turn[:, 0, 1], turn[:, 1, 0] = -angle.sin(), angle.sin()
        q, k, v = (torch.einsum("nij,bhnj->bhni", turn, split(m(x))) for m in (self.q, self.k, self.v))
        return self.o(join(torch.einsum("nji,bhnj->bhni", turn, attend(q, k, v))))


@case(
    Core(rows("q.weight"), rows("k.weight"), rows("v.weight"), rows("o.weight", "c (h d)"), heads_alone=True,
         scores="b q h k"),
)  # fmt: skip
class FourNearest(Four):
    """Points ask their four nearest ones, which an index gathers."""

    def forward(self, x: Tensor) -> Tensor:
        near = torch.cdist(x[..., :3].detach(), x[..., :3].detach()).topk(4, largest=False).indices
        at = torch.arange(len(x))[:, None, None]
        q, k, v = (m(x).unflatten(-1, (H, WIDTH)) for m in (self.q, self.k, self.v))
        scores = torch.einsum("bnhd,bnkhd->bnhk", q, k[at, near]) / WIDTH**0.5
        return self.o(torch.einsum("bnhk,bnkhd->bnhd", scores.softmax(-1), v[at, near]).flatten(2))


@case(
    Core(rows("to_q.weight", source="norm"), rows("to_k.weight", source="norm"), rows("to_v.weight", source="norm"),
         rows("to_out.weight", "c (h d)"), heads_alone=True, proved=("query", "key"), number=0),
    inputs=("b n c", "b c"),
)  # fmt: skip
class ShiftScaleGate(nn.Module):
    """DiT with registers: a time step shifts, scales and gates, in two layers of one block; q and k are normed."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(24, elementwise_affine=False)
        self.to_q, self.to_k, self.to_v, self.to_out = (nn.Linear(24, 24) for _ in range(4))
        self.q_scale, self.k_scale = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.ones(WIDTH))
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(24, 72))
        self.registers = nn.Parameter(torch.randn(1, 2, 24))

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        shift, scale, gate = self.modulation(t)[:, None].chunk(3, dim=-1)
        y = torch.cat([self.registers.expand(len(x), -1, -1), x], dim=1)
        y = torch.addcmul(shift, self.norm(y), 1 + scale)
        q, k, v = (split(m(y)) for m in (self.to_q, self.to_k, self.to_v))
        q, k = (g * one * torch.rsqrt(one.square().mean(-1, keepdim=True) + 1e-6)
                for one, g in ((q, self.q_scale), (k, self.k_scale)))  # fmt: skip
        out = self.to_out(join(F.scaled_dot_product_attention(q, k, v)))
        return x + gate * out[:, 2:]
