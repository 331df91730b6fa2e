"""Attention of images, films and scenes, as it is written now: grids that are turned, shifted, striped and masked."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.attention.wild.idioms import join, rotate_half, split
from tests.attention.wild.plain import Four
from tests.attention.wild.truth import WIDTH, Core, H, case, fused, rows, separate


class _Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.proj = nn.LayerNorm(24), nn.Linear(24, 72), nn.Linear(24, 24)
        self.gamma = nn.Parameter(torch.full((24,), 1e-2))

    def forward(self, x: Tensor) -> Tensor:
        b, n, c = x.shape
        q, k, v = self.qkv(self.norm(x)).reshape(b, n, 3, H, c // H).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, n, c)
        return x + self.gamma * self.proj(y)


@case(
    Core(*(rows("frame.qkv.weight", "(r h d) c", n_r=3, r=r, source="frame.norm") for r in range(3)),
         rows("frame.proj.weight", "c (h d)"), scores="(b t) h q k", heads_alone=True, proved=("query", "key")),
    Core(*(rows("every.qkv.weight", "(r h d) c", n_r=3, r=r, source="every.norm") for r in range(3)),
         rows("every.proj.weight", "c (h d)"), number=1),
    inputs=("b 3 n c",),
)  # fmt: skip
class FramesThenAll(nn.Module):
    """VGGT: the tokens of each frame attend to each other, then those of all frames."""

    def __init__(self) -> None:
        super().__init__()
        self.frame, self.every = _Attends(), _Attends()

    def forward(self, x: Tensor) -> Tensor:
        b, s, p, c = x.shape
        x = self.frame(x.view(b * s, p, c))
        return self.every(x.view(b, s * p, c)).view(b, s, p, c)


class _Modulate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(24, elementwise_affine=False), nn.Linear(24, 48)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        shift, scale = self.linear(F.silu(condition)).unsqueeze(1).chunk(2, dim=-1)
        return self.norm(x) * (1 + scale) + shift


@case(
    Core(*(rows(f"to_{m}.weight", source="modulate") for m in "qkv"), rows("to_out.weight", "c (h d)"), spreads=True),
    inputs=("b n c", "b c"), tokens=8,
)  # fmt: skip
class TurnedInThreeDirections(nn.Module):
    """Wan: a condition shifts and scales tokens, queries and keys are normed over all heads and turned over a grid."""

    def __init__(self) -> None:
        super().__init__()
        self.modulate = _Modulate()
        self.to_q, self.to_k, self.to_v, self.to_out = (nn.Linear(24, 24) for _ in range(4))
        self.norm_q, self.norm_k = nn.RMSNorm(24), nn.RMSNorm(24)

    def _turn(self, x: Tensor) -> Tensor:
        grid = torch.meshgrid(*(torch.arange(2.0, dtype=x.dtype) for _ in range(3)), indexing="ij")
        theta = torch.stack([one.flatten() for one in grid], -1)  # an angle for each of three pairs
        pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(pairs * torch.polar(torch.ones_like(theta), theta)).flatten(-2)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        h = self.modulate(x, condition)
        q, k, v = split(self.norm_q(self.to_q(h))), split(self.norm_k(self.to_k(h))), split(self.to_v(h))
        return x + self.to_out(join(F.scaled_dot_product_attention(self._turn(q), self._turn(k), v)))


@case(separate(keys=2))
class SectionsOfThreePositions(Four):
    """M-RoPE: of the features of a head some are turned by time, some by height, some by width."""

    def __init__(self) -> None:
        super().__init__(k=12, v=12)

    def _turned(self, x: Tensor) -> Tensor:
        at = torch.arange(x.shape[-2])
        places = torch.stack([at, at // 2, at % 2]).to(x.dtype)  # (3, n)
        theta = places[:, :, None] * 10.0 ** -torch.arange(3, dtype=x.dtype)
        parts = torch.cat([theta, theta], -1).split([1, 1, 1] * 2, dim=-1)
        theta = torch.cat([part[i % 3] for i, part in enumerate(parts)], -1)
        first, second = x.chunk(2, -1)
        return x * theta.cos() + torch.cat([-second, first], -1) * theta.sin()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self._turned(split(self.q(x))), self._turned(split(self.k(x), 2)), split(self.v(x), 2)
        return self.o(join(F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)))


@case(fused(output="proj.weight"))
class PatchesTurnedRegistersNot(nn.Module):
    """DINOv3: keys have no bias, as a mask takes it away; places turn patches, and not the tokens in front of them."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(24, 72), nn.Linear(24, 24)
        self.register_buffer("bias_mask", torch.tensor([1.0, 0.0, 1.0]).repeat_interleave(24))

    def forward(self, x: Tensor) -> Tensor:
        qkv = F.linear(x, self.qkv.weight, self.qkv.bias * self.bias_mask)
        q, k, v = (one.transpose(1, 2) for one in qkv.unflatten(-1, (3, H, WIDTH)).unbind(2))
        q, k = (torch.cat((one[:, :, :2], rotate_half(one[:, :, 2:])), dim=-2) for one in (q, k))
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def _half(s: int, scores: str) -> Core:
    places = {"h": 2, "n_s": 2, "s": s}
    return Core(*(rows("qkv.weight", "(r s h d) c", n_r=3, r=r, **places) for r in range(3)),
                rows("proj.weight", "c (s h d)", **places), heads=2, number=s, scores=scores, heads_alone=True,
                proved=("query", "key"))  # fmt: skip


@case(_half(0, "(b y) h q k"), _half(1, "(b x) h q k"), tokens=16)
class StripesOfHalves(nn.Module):
    """CSWin: two heads attend along rows, two along columns; a filter over places of the values is added."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(24, 72), nn.Linear(24, 24)
        self.get_v = nn.ModuleList(nn.Conv2d(12, 12, 3, padding=1, groups=12) for _ in range(2))

    @staticmethod
    def _stripes(x: Tensor, is_column: bool) -> Tensor:  # (b, n, c) -> (b * stripes, h, places, d)
        x = x.unflatten(1, (4, 4))
        x = x.transpose(1, 2) if is_column else x
        return x.flatten(0, 1).unflatten(-1, (2, WIDTH)).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(x).unflatten(-1, (3, 24)).permute(2, 0, 1, 3)
        halves = []
        for i, part in enumerate(qkv.chunk(2, -1)):
            q, k, v = (self._stripes(one, bool(i)) for one in part)
            attn = torch.softmax(q * WIDTH**-0.5 @ k.transpose(-2, -1), dim=-1)
            y = (attn @ v).transpose(1, 2).flatten(2).unflatten(0, (x.shape[0], 4))
            y = (y.transpose(1, 2) if i else y).flatten(1, 2)
            image = part[2].transpose(1, 2).unflatten(2, (4, 4))
            halves.append(y + self.get_v[i](image).flatten(2).transpose(1, 2))
        return self.proj(torch.cat(halves, dim=2))


@case(fused(output="proj.weight", scores="(b w) h q k", heads_alone=True), tokens=16)
class FilmInShiftedWindows(nn.Module):
    """Video Swin: windows of two frames and two by two places, shifted by a frame, with a table of distances."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(24, 72), nn.Linear(24, 24)
        self.relative_position_bias_table = nn.Parameter(torch.zeros(27, H))
        at = torch.stack(torch.meshgrid(*(torch.arange(2) for _ in range(3)), indexing="ij")).flatten(1)
        apart = at[:, :, None] - at[:, None, :] + 1
        self.register_buffer("index", apart[0] * 9 + apart[1] * 3 + apart[2])

    def forward(self, x: Tensor) -> Tensor:
        b = x.shape[0]
        film = x.view(b, 4, 2, 2, 24).roll(-1, dims=1)
        windows = film.view(b, 2, 2, 2, 2, 24).flatten(0, 1).flatten(1, 3)  # (b * windows, 8, c)
        q, k, v = self.qkv(windows).reshape(-1, 8, 3, H, WIDTH).permute(2, 0, 3, 1, 4)
        attn = (q * WIDTH**-0.5) @ k.transpose(-2, -1)
        attn = attn + self.relative_position_bias_table[self.index.view(-1)].view(8, 8, H).permute(2, 0, 1)
        frame = torch.tensor([0, 0, 0, 1]).view(2, 2).repeat_interleave(4, 1)  # the last window holds the first frame
        mask = (frame[:, :, None] != frame[:, None, :]).to(x.dtype) * -100.0
        attn = (attn.view(b, 2, H, 8, 8) + mask[None, :, None]).view(-1, H, 8, 8).softmax(dim=-1)
        y = self.proj((attn @ v).transpose(1, 2).reshape(-1, 8, 24))
        return y.view(b, 4, 2, 2, 24).roll(1, dims=1).reshape(b, 16, 24)


@case(separate(takes=1, heads_alone=True), inputs=("b n c", "b m c"))
class MasksOfThePredictionBefore(Four):
    """Mask2Former: objects ask the pixels alone that the prediction before gave them."""

    def forward(self, x: Tensor, pixels: Tensor) -> Tensor:
        mask = (torch.einsum("bqc,bpc->bqp", x, pixels).sigmoid() < 0.5).detach()
        mask[torch.where(mask.sum(-1) == mask.shape[-1])] = False
        q, k, v = split(self.q(x)), split(self.k(pixels)), split(self.v(pixels))
        scores = (q @ k.mT / WIDTH**0.5).masked_fill(mask[:, None].repeat(1, H, 1, 1), float("-inf"))
        return self.o(join(scores.softmax(-1) @ v))


@case(
    Core(rows("q.weight"), rows("kv.weight", "(r h d) c", n_r=2, r=0, source="norm"),
         rows("kv.weight", "(r h d) c", n_r=2, r=1, source="norm"), rows("proj.weight", "c (h d)")), tokens=8,
)  # fmt: skip
class KeysCompressedByAFilter(nn.Module):
    """PixArt: a filter of stride two makes fewer tokens, a norm follows, and keys and values are made of these."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv, self.proj = nn.Linear(24, 24), nn.Linear(24, 48), nn.Linear(24, 24)
        self.sr, self.norm = nn.Conv1d(24, 24, 2, stride=2, groups=24), nn.LayerNorm(24)

    def forward(self, x: Tensor) -> Tensor:
        fewer = self.norm(self.sr(x.transpose(1, 2)).transpose(1, 2))
        k, v = (split(one) for one in self.kv(fewer).chunk(2, dim=-1))
        return self.proj(join(F.scaled_dot_product_attention(split(self.q(x)), k, v)))


@case(separate(scores="b h q (k)"))
class QueriesCompete(Four):
    """The softmax runs over queries: each token is shared out among them, and what each gets is summed."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split(m(x)) for m in (self.q, self.k, self.v))
        return self.o(join(torch.softmax(q @ k.mT / WIDTH**0.5, dim=-2) @ v))
