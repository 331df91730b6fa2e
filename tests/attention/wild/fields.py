"""Attention of images, series, tables, graphs, proteins and speech, as papers of each field write it."""

from __future__ import annotations

import math

import torch
from einops.layers.torch import Rearrange
from torch import Tensor, nn
from torch.nn import functional as F

from tests.attention.wild.idioms import attend, join, split
from tests.attention.wild.plain import Four
from tests.attention.wild.truth import MODEL, WIDTH, Core, H, case, fused, rows, separate


@case(
    Core(
        *(rows("qkv.0.weight", "(r h d) c", n_r=3, r=r) for r in range(3)), rows("out.1.weight", "c (h d)"),
    )
)  # fmt: skip
class RearrangedByModules(nn.Module):
    """Shapes are changed by modules of einops."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Sequential(nn.Linear(MODEL, 3 * MODEL), Rearrange("b n (r h d) -> r b h n d", r=3, h=H))
        self.out = nn.Sequential(Rearrange("b h n d -> b n (h d)"), nn.Linear(MODEL, MODEL))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x)
        return self.out(attend(q, k, v))


class _Patches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, MODEL, 2, 2)
        self.cls, self.pos = nn.Parameter(torch.zeros(1, 1, MODEL)), nn.Parameter(torch.zeros(1, 7, MODEL))
        self.norm = nn.LayerNorm(MODEL)
        self.q, self.k, self.v, self.o = (nn.Linear(MODEL, MODEL) for _ in range(4))
        self.head = nn.Linear(MODEL, 5)

    def forward(self, image: Tensor) -> Tensor:
        x = self.patch(image).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(len(x), -1, -1), x], 1) + self.pos
        y = self.norm(x)
        x = x + self.o(join(attend(split(self.q(y)), split(self.k(y)), split(self.v(y)))))
        return self.head(x[:, 0])


@case(Core(*(rows(f"{m}.weight", source="norm") for m in "qkv"), rows("o.weight", "c (h d)")), inputs=("b 3 4 6",))
class WholeViT(_Patches):
    """Patches, a class token, positions, one block, and a head that takes the class token alone."""


@case(
    Core(
        *(rows("qkv.weight", "(r h d) c", n_r=3, r=r) for r in range(3)), rows("proj.weight", "c (h d)"),
        scores="(b w) h q k",
    ),
    inputs=("b x y c",),
)  # fmt: skip
class ShiftedWindows(nn.Module):
    """Swin: windows of 2 x 2 of a shifted image, with a table of relative positions and a mask between regions."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(MODEL, 3 * MODEL), nn.Linear(MODEL, MODEL)
        self.table = nn.Parameter(torch.zeros(9, H))
        at = torch.stack(torch.meshgrid(torch.arange(2), torch.arange(2), indexing="ij")).flatten(1)
        apart = at[:, :, None] - at[:, None] + 1
        self.register_buffer("index", apart[0] * 3 + apart[1])

    def _windows(self, x: Tensor) -> Tensor:
        b, h, w, c = x.shape
        return x.view(b, h // 2, 2, w // 2, 2, c).transpose(2, 3).reshape(-1, 4, c)

    def forward(self, x: Tensor) -> Tensor:
        b, h, w, c = x.shape
        regions = torch.zeros(1, h, w, 1)
        regions[:, -2:], regions[:, -1:] = 1, 2
        mask = self._windows(regions).squeeze(-1)
        mask = (mask[:, None] - mask[:, :, None]).ne(0) * -100.0
        y = self._windows(torch.roll(x, (-1, -1), (1, 2)))
        q, k, v = self.qkv(y).view(len(y), 4, 3, H, c // H).permute(2, 0, 3, 1, 4)
        scores = q * WIDTH**-0.5 @ k.mT + self.table[self.index.view(-1)].view(4, 4, H).permute(2, 0, 1)
        scores = scores.view(b, len(mask), H, 4, 4) + mask[:, None].to(x.dtype)
        y = (scores.view(-1, H, 4, 4).softmax(-1) @ v).transpose(1, 2).reshape(-1, 4, c)
        y = self.proj(y).view(b, h // 2, w // 2, 2, 2, c).transpose(2, 3).reshape(b, h, w, c)
        return torch.roll(y, (1, 1), (1, 2))


@case(separate(heads_alone=True), inputs=("b x y c",), tokens=16)
class Neighbourhoods(Four):
    """Each pixel asks the 3 x 3 around it, by `unfold`."""

    def forward(self, x: Tensor) -> Tensor:
        b, h, w, c = x.shape
        q = self.q(x).view(b, h * w, H, WIDTH)
        k, v = (F.unfold(m(x).permute(0, 3, 1, 2), 3, padding=1).view(b, H, WIDTH, 9, h * w) for m in (self.k, self.v))
        scores = torch.einsum("bnhd,bhdkn->bhnk", q, k) / WIDTH**0.5
        out = torch.einsum("bhnk,bhdkn->bnhd", scores.softmax(-1), v)
        return self.o(out.reshape(b, h, w, c))


@case(separate(proved=("query", "key")), inputs=("b x y c",))
class PositionsOfValues(Four):
    """CSWin: a depthwise convolution of the values is added to what attention gives."""

    def __init__(self) -> None:
        super().__init__()
        self.lepe = nn.Conv2d(MODEL, MODEL, 3, padding=1, groups=MODEL)

    def forward(self, x: Tensor) -> Tensor:
        b, h, w, c = x.shape
        q, k, v = (m(x).view(b, h * w, c) for m in (self.q, self.k, self.v))
        lepe = self.lepe(v.mT.reshape(b, c, h, w)).flatten(2).mT
        return self.o(join(attend(split(q), split(k), split(v))) + lepe).view(b, h, w, c)


@case(
    Core(*(rows(f"{m}.weight", "(h d) c x y", h=1) for m in "qkv"), None, "b q k", heads=1, proved=()),
    inputs=("b c x y",),
)
class NonLocalBlock(nn.Module):
    """One head, by convolutions, and a residual with a gain that begins at zero (SAGAN)."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Conv2d(MODEL, 6, 1), nn.Conv2d(MODEL, 6, 1)
        self.v, self.gamma = nn.Conv2d(MODEL, MODEL, 1), nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        b, c, w, h = x.shape
        q, k = self.q(x).view(b, -1, w * h).permute(0, 2, 1), self.k(x).view(b, -1, w * h)
        weights = torch.softmax(torch.bmm(q, k), -1)
        return self.gamma * torch.bmm(self.v(x).view(b, -1, w * h), weights.permute(0, 2, 1)).view(b, c, w, h) + x


@case(none=True, inputs=("b c x y",))
class TransposedAttention(nn.Module):
    """Restormer: channels ask channels, behind depthwise convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.dw = (
            nn.Conv2d(MODEL, 3 * MODEL, 1),
            nn.Conv2d(3 * MODEL, 3 * MODEL, 3, padding=1, groups=3 * MODEL),
        )
        self.temperature, self.o = nn.Parameter(torch.ones(H, 1, 1)), nn.Conv2d(MODEL, MODEL, 1)

    def forward(self, x: Tensor) -> Tensor:
        b, c, h, w = x.shape
        q, k, v = (t.reshape(b, H, WIDTH, h * w) for t in self.dw(self.qkv(x)).chunk(3, 1))
        q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
        return self.o(((q @ k.mT * self.temperature).softmax(-1) @ v).reshape(b, c, h, w))


class _Decoder(nn.Module):
    """DETR: learned queries that are added to queries and keys of objects, and ask an image."""

    def __init__(self) -> None:
        super().__init__()
        self.sa, self.ca = Projected(), Projected()
        self.norm1, self.norm2 = nn.LayerNorm(MODEL), nn.LayerNorm(MODEL)

    def forward(self, tgt: Tensor, memory: Tensor, query_pos: Tensor, pos: Tensor) -> Tensor:
        q = tgt + query_pos
        tgt = self.norm1(tgt + self.sa(q, q, tgt))
        return self.norm2(tgt + self.ca(tgt + query_pos, memory + pos, memory))


class Projected(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(MODEL, MODEL) for _ in range(4))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.o(join(attend(split(self.q(q)), split(self.k(k)), split(self.v(v)))))


def _of(at: str, number: int) -> Core:
    q, k, v = (rows(f"{at}.{m}.weight") for m in "qkv")
    proved = ("query", "key")  # of one that feeds another, more than its own output notices
    return Core(q, k, v, rows(f"{at}.o.weight", "c (h d)"), number=number, heads_alone=True, proved=proved)


@case(_of("decoder.sa", 0), _of("decoder.ca", 1))
class WholeDETR(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.decoder, self.objects = _Decoder(), nn.Embedding(5, MODEL)
        self.pos = nn.Parameter(torch.randn(1, 7, MODEL))

    def forward(self, memory: Tensor) -> Tensor:
        objects = self.objects.weight[None].expand(len(memory), -1, -1)
        return self.decoder(torch.zeros_like(objects), memory, objects, self.pos[:, : memory.shape[1]])


@case(
    _of("h.mab0", 0), _of("h.mab1", 1),
)  # fmt: skip
class InducedSets(nn.Module):
    """Induced points ask a set, and the set asks them."""

    def __init__(self) -> None:
        super().__init__()
        self.h = nn.ModuleDict({"mab0": Projected(), "mab1": Projected()})
        self.points = nn.Parameter(torch.randn(1, 5, MODEL))

    def forward(self, x: Tensor) -> Tensor:
        points = self.points.expand(len(x), -1, -1)
        summary = points + self.h["mab0"](points, x, x)
        return x + self.h["mab1"](x, summary, summary)


@case(separate(), inputs=("b n c", "b n n 3"))
class BiasOfEdges(Four):
    """A graph transformer whose scores are biased by features of edges."""

    def __init__(self) -> None:
        super().__init__()
        self.edge = nn.Linear(3, H)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        q, k, v = (split(m(x)) for m in (self.q, self.k, self.v))
        scores = q @ k.mT / WIDTH**0.5 + self.edge(edges).permute(0, 3, 1, 2)
        return self.o(join(scores.softmax(-1) @ v))


@case(separate(), inputs=("b n c", "b n n 3"), may_refuse="adds|sum|single tokens|several|not products|edge|product")
class KeysOfEdges(Four):
    """Each pair of nodes has a key of its own: that of the node and that of the edge."""

    def __init__(self) -> None:
        super().__init__()
        self.edge = nn.Linear(3, MODEL)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        q, k, v = (m(x).unflatten(-1, (H, WIDTH)) for m in (self.q, self.k, self.v))
        e = self.edge(edges).unflatten(-1, (H, WIDTH))
        scores = torch.einsum("bihd,bijhd->bhij", q, k[:, None] + e) / WIDTH**0.5
        return self.o(torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), v).flatten(2))


@case(separate(), inputs=("b n c", "b n n"), may_refuse="no matrix|product|scatter|index|edge")
class GatesOfEdges(Four):
    """Scores are multiplied by gates of edges, and only neighbours are asked."""

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        q, k, v = (split(m(x)) for m in (self.q, self.k, self.v))
        gates = torch.sigmoid(adjacency)[:, None]
        scores = (q @ k.mT / WIDTH**0.5) * gates
        return self.o(join(scores.masked_fill(gates < 0.2, -1e4).softmax(-1) @ v))


@case(separate(heads_alone=True), inputs=("b x n c",))
class TiedRows(Four):
    """MSA transformer: the scores of all sequences are added up, so that all attend alike."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (m(x).unflatten(-1, (H, WIDTH)) for m in (self.q, self.k, self.v))
        scores = torch.einsum("brihd,brjhd->bhij", q, k) / (WIDTH * x.shape[1]) ** 0.5
        out = torch.einsum("bhij,brjhd->brihd", scores.softmax(-1), v)
        return self.o(out.flatten(-2))


@case(
    Core(
        None, rows("k.weight", h=1), rows("v.weight", h=1), rows("o.weight", "c (h d)"), "b h k", free=("query",),
        proved=("value", "output"),
    )
)  # fmt: skip
class GlobalColumns(nn.Module):
    """AlphaFold: the mean of the queries asks keys of one head, and the answer is gated for each token."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(MODEL, MODEL), nn.Linear(MODEL, WIDTH), nn.Linear(MODEL, WIDTH)
        self.gate, self.o = nn.Linear(MODEL, MODEL), nn.Linear(MODEL, MODEL)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x.mean(-2)).unflatten(-1, (H, WIDTH)) * WIDTH**-0.5
        weights = torch.softmax(q @ self.k(x).mT, -1)
        out = weights @ self.v(x)
        return self.o((self.gate(x).sigmoid().unflatten(-1, (H, WIDTH)) * out[:, None]).flatten(-2))


@case(
    Core(*(rows(f"{m}.weight", source="norm") for m in "qkv"), rows("o.weight", "c (h d)"), scores="(b x) h q k",
         heads_alone=True),
    inputs=("b x n c",),
)  # fmt: skip
class AxisOfProteins(Four):
    """One axis of a grid of pairs, with a bias of the pairs and a gate (triangle attention)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.bias, self.gate = nn.LayerNorm(MODEL), nn.Linear(MODEL, H, bias=False), nn.Linear(MODEL, MODEL)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        b, r, n, c = y.shape
        flat = y.reshape(b * r, n, c)
        bias = self.bias(y.mean(1))[:, None].permute(0, 3, 1, 2).repeat_interleave(r, 0)
        scores = split(self.q(flat)) @ split(self.k(flat)).mT / WIDTH**0.5 + bias
        out = join(scores.softmax(-1) @ split(self.v(flat))) * self.gate(flat).sigmoid()
        return x + self.o(out).view(b, r, n, c)


@case(separate(heads_alone=True))
class SeriesNormedOverTime(Four):
    """Series are normed over time, and embedded with a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(MODEL, MODEL)

    def forward(self, x: Tensor) -> Tensor:
        x = (x - x.mean(1, keepdim=True)) / (x.var(1, keepdim=True) + 1e-5).sqrt()
        y = x + F.gelu(self.embed(x))
        return self.o(join(attend(split(self.q(y)), split(self.k(y)), split(self.v(y)))))


@case(separate(proved=("key",), heads_alone=True), may_refuse="without the weights of its queries")
class SparseQuestions(Four):
    """Informer: only the queries whose scores vary most ask, the others get the mean."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split(m(x)) for m in (self.q, self.k, self.v))
        scores = q @ k.mT / WIDTH**0.5
        measure = scores.max(-1).values - scores.mean(-1)
        top = measure.topk(3, sorted=False).indices
        chosen = torch.gather(q, 2, top[..., None].expand(-1, -1, -1, WIDTH))
        out = v.mean(2, keepdim=True).expand(-1, -1, x.shape[1], -1).clone()
        asked = (chosen @ k.mT / WIDTH**0.5).softmax(-1) @ v
        out = out.scatter(2, top[..., None].expand(-1, -1, -1, WIDTH), asked)
        return self.o(join(out))


@case(none=True)
class AutoCorrelation(Four):
    """Autoformer: delays are weighted by their correlation, found by a Fourier transform."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split(m(x)).mT for m in (self.q, self.k, self.v))  # (b, h, d, n)
        correlation = torch.fft.irfft(torch.fft.rfft(q) * torch.fft.rfft(k).conj(), n=x.shape[1])
        mean = correlation.mean((0, 1, 2))
        top = mean.topk(2).indices
        weights = torch.softmax(correlation.mean((1, 2))[:, top], -1)
        out = sum(torch.roll(v, -int(at), -1) * weights[:, i, None, None, None] for i, at in enumerate(top))
        return self.o(join(out.mT))


class _Table(nn.Module):
    """FT-Transformer: each column of a table is a token."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(6, MODEL)), nn.Parameter(torch.randn(6, MODEL))
        self.cls = nn.Parameter(torch.randn(MODEL))

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.weight * x[..., None] + self.bias
        return torch.cat([self.cls.expand(len(x), 1, -1), tokens], 1)


@case(Core(*(rows(f"{m}.weight", source="tokens") for m in "qkv"), rows("o.weight", "c (h d)")), inputs=("b 6",))
class ColumnsOfATable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = _Table()
        self.q, self.k, self.v, self.o = (nn.Linear(MODEL, MODEL) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        y = self.tokens(x)
        return self.o(join(attend(split(self.q(y)), split(self.k(y)), split(self.v(y)))))[:, 0]


@case(separate(heads_alone=True, scores="n h q k"))
class RowsOfATable(Four):
    """SAINT: the samples of a batch are the tokens."""

    def forward(self, x: Tensor) -> Tensor:
        y = x.transpose(0, 1)
        return self.o(join(attend(split(self.q(y)), split(self.k(y)), split(self.v(y))))).transpose(0, 1)


@case(separate(proved=("value", "output")))
class SlotsOfObjects(nn.Module):
    """Slot attention: a softmax over slots, divided by the sum over tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.slots = nn.Parameter(torch.randn(1, 5, MODEL))
        self.q, self.k, self.v, self.o = (nn.Linear(MODEL, MODEL) for _ in range(4))
        self.gru = nn.GRUCell(MODEL, MODEL)

    def forward(self, x: Tensor) -> Tensor:
        slots = self.slots.expand(len(x), -1, -1)
        k, v = split(self.k(x)), split(self.v(x))
        weights = (split(self.q(slots)) @ k.mT / WIDTH**0.5).softmax(-2)
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-8)
        update = self.o(join(weights @ v))
        return self.gru(update.flatten(0, 1), slots.flatten(0, 1)).view_as(slots)


@case(separate(proved=("key",), heads_alone=True), may_refuse="without the weights of its queries")
class StatesOfAHopfieldNetwork(Four):
    """Queries are replaced by what they retrieve, twice, before values are read."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split(m(x)) for m in (self.q, self.k, self.v))
        for _ in range(2):
            q = (q @ k.mT / WIDTH**0.5).softmax(-1) @ k
        return self.o(join((q @ k.mT / WIDTH**0.5).softmax(-1) @ v))


@case(separate(number=1))
class RoutedHeads(Four):
    """Mixture of heads: a router leaves two of four heads to each token."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(MODEL, H)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split(m(x)) for m in (self.q, self.k, self.v))
        gates = self.router(x).softmax(-1)
        kept = torch.zeros_like(gates).scatter(-1, gates.topk(2, -1).indices, 1.0)
        out = attend(q, k, v) * (gates * kept).transpose(1, 2)[..., None]
        return self.o(join(out))


@case(separate(), may_refuse="another|several")
class MixerBeside(Four):
    """A hybrid head: a gated convolution beside attention, and their mean."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.conv, self.out = (
            nn.Linear(MODEL, 2 * MODEL),
            nn.Conv1d(MODEL, MODEL, 3, padding=2, groups=MODEL),
            nn.Linear(MODEL, MODEL),
        )

    def forward(self, x: Tensor) -> Tensor:
        a = join(attend(split(self.q(x)), split(self.k(x)), split(self.v(x))))
        y, gate = self.inp(x).chunk(2, -1)
        y = F.silu(self.conv(y.mT)[..., : x.shape[1]].mT) * F.silu(gate)
        return 0.5 * (self.o(F.rms_norm(a, (MODEL,))) + self.out(F.rms_norm(y, (MODEL,))))


@case(separate(), may_refuse="another|several")
class StreamsThatMix(nn.Module):
    """Hyper-connections: several residual streams, mixed before and behind attention."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(MODEL, MODEL) for _ in range(4))
        self.take, self.give = nn.Parameter(torch.randn(3)), nn.Parameter(torch.randn(3))
        self.mix, self.norm = nn.Parameter(torch.eye(3)), nn.RMSNorm(MODEL)

    def forward(self, x: Tensor) -> Tensor:
        streams = torch.stack([x, x, x], 2)
        y = torch.einsum("bnsc,s->bnc", streams, self.take)
        y = self.o(join(attend(split(self.q(y)), split(self.k(y)), split(self.v(y)))))
        streams = torch.einsum("bnsc,st->bntc", streams, self.mix) + y[:, :, None] * self.give[:, None]
        return streams.sum(2)


@case(separate(scores="b h w q k", heads_alone=True), tokens=8)
class LocalWithLookBack(Four):
    """Buckets of 4 tokens, each of which sees the one before as well."""

    def forward(self, x: Tensor) -> Tensor:
        n = x.shape[1]
        q, k, v = (split(F.pad(m(x), (0, 0, 0, -n % 4))) for m in (self.q, self.k, self.v))
        q, k, v = (t.unflatten(2, (-1, 4)) for t in (q, k, v))
        k, v = (torch.cat([F.pad(t, (0, 0, 0, 0, 1, -1)), t], 3) for t in (k, v))
        scores = q @ k.mT / WIDTH**0.5
        out = scores.softmax(-1) @ v
        return self.o(join(out.flatten(2, 3)[:, :, :n]))


@case(separate(proved=("value", "output"), scores="b h w q k"), tokens=8, may_refuse="which tokens it attends to")
class SortedBuckets(nn.Module):
    """Reformer: queries are keys, tokens are sorted by a hash, and each bucket attends to itself."""

    def __init__(self) -> None:
        super().__init__()
        self.k, self.v, self.o = (nn.Linear(MODEL, MODEL) for _ in range(3))
        self.q = self.k
        self.register_buffer("turns", torch.randn(WIDTH, 1, generator=torch.Generator().manual_seed(0)))

    def forward(self, x: Tensor) -> Tensor:
        k, v = split(self.k(x)), split(self.v(x))
        order = (k @ self.turns.to(x.dtype)).squeeze(-1).argsort(-1)
        k, v = (t.gather(2, order[..., None].expand_as(t)).unflatten(2, (-1, 4)) for t in (k, v))
        out = attend(k, F.normalize(k, dim=-1), v).flatten(2, 3)
        return self.o(join(out.gather(2, order.argsort(-1)[..., None].expand_as(out))))


@case(none=True)
class ExternalMemory(nn.Module):
    """Two maps as keys and values of a memory, normed over tokens and over memory."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.mk, self.mv = (
            nn.Linear(MODEL, MODEL),
            nn.Linear(WIDTH, 5, bias=False),
            nn.Linear(5, WIDTH, bias=False),
        )
        self.o = nn.Linear(MODEL, MODEL)

    def forward(self, x: Tensor) -> Tensor:
        weights = self.mk(split(self.q(x))).softmax(-1)
        return self.o(join(self.mv(weights / weights.sum(-1, keepdim=True))))


@case(
    Core(
        *(rows("in_proj_weight", "(r h d) c", n_r=3, r=r) for r in range(3)), rows("out_proj.weight", "c (h d)"),
        scores="(b h) q k",
    )
)  # fmt: skip
class TorchWithTurnedPositions(nn.MultiheadAttention):
    """torch's attention, subclassed for a rotation of queries and keys."""

    def __init__(self) -> None:
        super().__init__(MODEL, H, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        q, k, v = F.linear(x, self.in_proj_weight, self.in_proj_bias).chunk(3, -1)
        theta = torch.arange(x.shape[1], dtype=x.dtype)[:, None] * torch.ones(WIDTH // 2, dtype=x.dtype)
        turned = []
        for t in (q, k):
            pairs = torch.view_as_complex(split(t).unflatten(-1, (-1, 2)).contiguous())
            turned.append(torch.view_as_real(pairs * torch.polar(torch.ones_like(theta), theta)).flatten(-2))
        q, k = turned
        weights = torch.softmax((q @ k.mT / math.sqrt(WIDTH)).flatten(0, 1), -1)
        return self.out_proj(join((weights @ split(v).flatten(0, 1)).unflatten(0, (-1, H))))


@case(fused("kernel", "c (r h d)", "o"), may_refuse="order")
class Transposed(nn.Module):
    """One parameter that is stored as it is multiplied with."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel, self.o = nn.Parameter(torch.randn(MODEL, 3 * MODEL)), nn.Parameter(torch.randn(MODEL, MODEL))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split(one) for one in (x @ self.kernel).chunk(3, -1))
        return join(attend(q, k, v)) @ self.o.T


@case(
    Core(
        rows("w", "r c (h d)", r=0),
        rows("w", "r c (h d)", r=1),
        rows("w", "r c (h d)", r=2),
        rows("w", "r (h d) c", r=3),
    )
)
class StackedMatrices(nn.Module):
    """Four matrices in one parameter, each multiplied with as it is stored."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(4, MODEL, MODEL))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split(x @ self.w[i]) for i in range(3))
        return join(attend(q, k, v)) @ self.w[3]


@case(
    Core(
        *(rows("w", "(r h d) c", n_r=4, r=r) for r in range(3)), rows("w", "(r c) (h d)", n_r=4, r=3),
    )
)  # fmt: skip
class FourInOneView(nn.Module):
    """All four maps in one matrix, taken apart by views (as speed runs of GPT-2 do)."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(4 * MODEL, MODEL))

    def forward(self, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        stack = self.w.view(4, MODEL, MODEL)
        q, k, v = F.linear(x, stack[:3].flatten(end_dim=1)).view(b, n, 3, H, WIDTH).unbind(2)
        q, k = (F.rms_norm(one, (WIDTH,)) for one in (q, k))
        y = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True)
        return F.linear(join(y), stack[3])
