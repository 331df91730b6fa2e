"""Attention of images, video, points and diffusion as repositories of each field write it, channels first or folded."""

from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F

from tests.attention.wild.idioms import attend, join, split
from tests.attention.wild.plain import Four
from tests.attention.wild.truth import MODEL, WIDTH, Core, H, case, fused, rows, separate

_NO_SCORES = "not products|matrix product|no query"


@case(fused("qkv.weight", "(h r d) c 1", "proj.weight", "c (h d) 1", scores="(b h) q k", heads_alone=True),
      inputs=("b c x y",), tokens=16)  # fmt: skip
class GuidedDiffusion(nn.Module):
    """Normed over groups, one convolution for all roles, heads folded into the batch, channels first."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.proj = nn.GroupNorm(6, 24), nn.Conv1d(24, 72, 1), nn.Conv1d(24, 24, 1)

    def forward(self, x: Tensor) -> Tensor:
        b, c, *spatial = x.shape
        x = x.reshape(b, c, -1)
        qkv = self.qkv(self.norm(x))
        bs, width, length = qkv.shape
        ch = width // (3 * H)
        q, k, v = qkv.reshape(bs * H, ch * 3, length).split(ch, dim=1)
        scale = ch**-0.25
        weight = torch.einsum("bct,bcs->bts", q * scale, k * scale)
        a = torch.einsum("bts,bcs->bct", torch.softmax(weight.float().type(weight.dtype), dim=-1), v)
        return (x + self.proj(a.reshape(bs, -1, length))).reshape(b, c, *spatial)


@case(
    Core(
        rows("qkv.weight", "(r h d) c 1", n_r=3, r=0), rows("qkv.weight", "(r h d) c 1", n_r=3, r=1),
        rows("qkv.weight", "(r h d) c 1", n_r=3, r=2), rows("proj.weight", "c (h d) 1"), heads_alone=True,
        scores="(b h) q k",
    ),
    inputs=("b c x y", "b m c"), may_refuse="second token stream|another map|several maps|sums|two maps",
)  # fmt: skip
class TextBesidePixels(nn.Module):
    """GLIDE: keys and values of a text, by a map of its own, in front of those of the pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.kv, self.proj = nn.Conv1d(24, 72, 1), nn.Conv1d(24, 48, 1), nn.Conv1d(24, 24, 1)

    def forward(self, x: Tensor, text: Tensor) -> Tensor:
        b, c, *spatial = x.shape
        q, k, v = (t.reshape(b * H, WIDTH, -1) for t in self.qkv(x.flatten(2)).chunk(3, 1))
        ek, ev = (t.reshape(b * H, WIDTH, -1) for t in self.kv(text.mT).chunk(2, 1))
        k, v = torch.cat([ek, k], -1), torch.cat([ev, v], -1)
        weight = torch.einsum("bct,bcs->bts", q, k).softmax(-1)
        return self.proj(torch.einsum("bts,bcs->bct", weight, v).reshape(b, c, -1)).reshape(b, c, *spatial)


@case(
    Core(rows("to_q.weight", source=None), rows("to_kv.weight", "(r h d) c", h=1, n_r=2, r=0),
         rows("to_kv.weight", "(r h d) c", h=1, n_r=2, r=1), rows("to_out.0.weight", "c (h d)"),
         heads_alone=True),
    inputs=("b n c", "b m c"), may_refuse="second token stream|several maps|sums|`context` is passed",
)  # fmt: skip
class OneKeyHeadWithContext(nn.Module):
    """Imagen: one key head, a null key, keys and values of a context by a normed map of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(24)
        self.null_kv = nn.Parameter(torch.randn(2, WIDTH))
        self.to_q, self.to_kv = nn.Linear(24, 24, bias=False), nn.Linear(24, 2 * WIDTH, bias=False)
        self.to_context = nn.Sequential(nn.LayerNorm(24), nn.Linear(24, 2 * WIDTH))
        self.to_out = nn.Sequential(nn.Linear(24, 24, bias=False), nn.LayerNorm(24))

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        x = self.norm(x)
        q, k, v = (self.to_q(x), *self.to_kv(x).chunk(2, dim=-1))
        q = rearrange(q, "b n (h d) -> b h n d", h=H) * WIDTH**-0.5
        nk, nv = (one.expand(len(x), 1, -1) for one in self.null_kv)
        k, v = torch.cat((nk, k), dim=-2), torch.cat((nv, v), dim=-2)
        if context is not None:
            ck, cv = self.to_context(context).chunk(2, dim=-1)
            k, v = torch.cat((ck, k), dim=-2), torch.cat((cv, v), dim=-2)
        sim = torch.einsum("b h i d, b j d -> b h i j", q, k)
        out = torch.einsum("b h i j, b j d -> b h i d", sim.softmax(dim=-1), v)
        return self.to_out(rearrange(out, "b h n d -> b n (h d)"))


class _LatentDiffusion(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.to_q, self.to_k, self.to_v = (nn.Linear(24, 24, bias=False) for _ in range(3))
        self.to_out = nn.Sequential(nn.Linear(24, 24), nn.Dropout(0.0))

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        context = x if context is None else context
        q, k, v = self.to_q(x), self.to_k(context), self.to_v(context)
        q, k, v = (rearrange(t, "b n (h d) -> (b h) n d", h=H) for t in (q, k, v))
        sim = torch.baddbmm(
            torch.empty(len(q), q.shape[1], k.shape[1], dtype=q.dtype), q, k.mT, beta=0, alpha=WIDTH**-0.5
        )
        out = torch.einsum("b i j, b j d -> b i d", sim.softmax(dim=-1), v)
        return self.to_out(rearrange(out, "(b h) n d -> b n (h d)", h=H))


def _diffused(name: str, number: int, **options: int) -> Core:
    return Core(
        rows(f"{name}.to_q.weight"), rows(f"{name}.to_k.weight", **options), rows(f"{name}.to_v.weight", **options),
        rows(f"{name}.to_out.0.weight", "c (h d)"), scores="(b h) q k", number=number, heads_alone=True,
        proved=("query", "key"),
    )  # fmt: skip


@case(_diffused("attn1", 0), _diffused("attn2", 1, takes=1), inputs=("b c x y", "b m c"), tokens=16)
class SpatialTransformer(nn.Module):
    """Stable Diffusion: pixels attend to themselves, then to a text."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.proj_in, self.proj_out = nn.GroupNorm(6, 24), nn.Conv2d(24, 24, 1), nn.Conv2d(24, 24, 1)
        self.attn1, self.attn2 = _LatentDiffusion(), _LatentDiffusion()
        self.norm1, self.norm2 = nn.LayerNorm(24), nn.LayerNorm(24)

    def forward(self, image: Tensor, context: Tensor) -> Tensor:
        _, _, height, width = image.shape
        x = rearrange(self.proj_in(self.norm(image)), "b c h w -> b (h w) c").contiguous()
        x = self.attn1(self.norm1(x)) + x
        x = self.attn2(self.norm2(x), context=context) + x
        return self.proj_out(rearrange(x, "b (h w) c -> b c h w", h=height, w=width)) + image


@case(
    Core(
        *(rows("attn.qkv.weight", "(r h d) c", n_r=3, r=r) for r in range(3)), rows("attn.proj.weight", "c (h d)"),
        heads_alone=True,
    ),
    inputs=("b n c", "b c"),
)  # fmt: skip
class ModulatedByACondition(nn.Module):
    """DiT: shift, scale and gate of a condition, whose map starts at zero."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(24, elementwise_affine=False, eps=1e-6)
        self.attn = nn.ModuleDict({"qkv": nn.Linear(24, 72), "proj": nn.Linear(24, 24)})
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(24, 72))

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        shift, scale, gate = self.adaLN_modulation(c).chunk(3, dim=1)
        y = self.norm(x) * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)
        q, k, v = self.attn["qkv"](y).reshape(*y.shape[:2], 3, H, WIDTH).permute(2, 0, 3, 1, 4).unbind(0)
        out = F.scaled_dot_product_attention(q, k, v)
        return x + gate.unsqueeze(1) * self.attn["proj"](out.transpose(1, 2).reshape(x.shape))


@case(
    Core(None, rows("to_kv.weight", "(r h d) c", n_r=2, r=0), rows("to_kv.weight", "(r h d) c", n_r=2, r=1),
         rows("to_out.weight", "c (h d)"), free=("query",), heads_alone=True),
)  # fmt: skip
class Resampler(nn.Module):
    """Flamingo: learned latents ask the frames and themselves, by one map for both."""

    def __init__(self) -> None:
        super().__init__()
        self.latents = nn.Parameter(torch.randn(5, 24))
        self.norm_media, self.norm_latents = nn.LayerNorm(24), nn.LayerNorm(24)
        self.to_q, self.to_kv = nn.Linear(24, 24, bias=False), nn.Linear(24, 48, bias=False)
        self.to_out = nn.Linear(24, 24, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        latents = self.norm_latents(self.latents.expand(len(x), -1, -1))
        k, v = self.to_kv(torch.cat((self.norm_media(x), latents), dim=-2)).chunk(2, dim=-1)
        q, k, v = (rearrange(t, "b n (h d) -> b h n d", h=H) for t in (self.to_q(latents), k, v))
        sim = torch.einsum("... i d, ... j d -> ... i j", q * WIDTH**-0.5, k)
        sim = sim - sim.amax(dim=-1, keepdim=True).detach()
        out = torch.einsum("... i j, ... j d -> ... i d", sim.softmax(dim=-1), v)
        return self.to_out(rearrange(out, "b h n d -> b n (h d)"))


@case(
    Core(rows("to_q.weight"), rows("to_kv.weight", "(r h d) c", n_r=2, r=0, takes=1),
         rows("to_kv.weight", "(r h d) c", n_r=2, r=1, takes=1), rows("to_out.weight", "c (h d)"), heads_alone=True),
    inputs=("b n c", "b x y c"),
)  # fmt: skip
class MaskedMedia(nn.Module):
    """Flamingo: a text asks the image before it; the gate is the tanh of a number that starts at zero."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(24)
        self.to_q, self.to_kv = nn.Linear(24, 24, bias=False), nn.Linear(24, 48, bias=False)
        self.to_out, self.gate = nn.Linear(24, 24, bias=False), nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor, media: Tensor) -> Tensor:
        images, latents = media.shape[1:3]
        q = rearrange(self.to_q(self.norm(x)), "b n (h d) -> b h n d", h=H) * WIDTH**-0.5
        kv = self.to_kv(rearrange(media, "b t n d -> b (t n) d"))
        k, v = (rearrange(t, "b n (h d) -> b h n d", h=H) for t in kv.chunk(2, -1))
        sim = torch.einsum("... i d, ... j d -> ... i j", q, k)
        at = 1 + torch.arange(x.shape[1]) * images // x.shape[1]
        of = torch.arange(images).repeat_interleave(latents) + 1
        sim = sim.masked_fill(at[:, None] != of, float("-inf"))
        out = torch.einsum("... i j, ... j d -> ... i d", sim.softmax(-1), v)
        return x + self.to_out(rearrange(out, "b h n d -> b n (h d)")) * self.gate.tanh()


@case(
    Core(
        *(rows("qkv.weight", "(r h d) c", n_r=3, r=r) for r in range(3)), rows("proj.weight", "c (h d)"),
    )
)  # fmt: skip
class SwinOfTheSecondKind(nn.Module):
    """Cosines with a temperature that is bounded, a bias by a small network, biases of queries and values alone."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(24, 72, bias=False), nn.Linear(24, 24)
        self.q_bias, self.v_bias = nn.Parameter(torch.zeros(24)), nn.Parameter(torch.zeros(24))
        self.logit_scale = nn.Parameter(torch.full((H, 1, 1), 2.3))
        self.cpb_mlp = nn.Sequential(nn.Linear(1, 8), nn.ReLU(inplace=True), nn.Linear(8, H, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        b, n, c = x.shape
        bias = torch.cat((self.q_bias, torch.zeros_like(self.v_bias, requires_grad=False), self.v_bias))
        qkv = F.linear(input=x, weight=self.qkv.weight, bias=bias).reshape(b, n, 3, H, -1).permute(2, 0, 3, 1, 4)
        q, k, v = qkv[0], qkv[1], qkv[2]
        attn = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-2, -1)
        attn = attn * torch.clamp(self.logit_scale, max=4.6052).exp()
        at = torch.arange(n, dtype=x.dtype)
        table = 16 * torch.sigmoid(self.cpb_mlp((at[:, None] - at)[..., None]))
        attn = (attn + table.permute(2, 0, 1).unsqueeze(0)).softmax(-1)
        return self.proj((attn @ v).transpose(1, 2).reshape(b, n, c))


@case(
    Core(
        *(rows("to_qkv.weight", "(r h d) c", n_r=3, r=r) for r in range(3)), rows("to_out.weight", "c (h d)"),
        scores="w h q k", heads_alone=True,
    ),
    inputs=("b c x y",),
)  # fmt: skip
class Grid(nn.Module):
    """MaxViT: tokens that lie two apart attend to each other."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(24)
        self.to_qkv, self.to_out = nn.Linear(24, 72, bias=False), nn.Linear(24, 24, bias=False)
        self.bias = nn.Embedding(9, H)

    def forward(self, image: Tensor) -> Tensor:
        x = self.norm(rearrange(image, "b d (w1 x) (w2 y) -> b x y w1 w2 d", w1=2, w2=2))
        _, height, width, *_ = x.shape
        x = rearrange(x, "b x y w1 w2 d -> (b x y) (w1 w2) d")
        q, k, v = (rearrange(t, "b n (h d) -> b h n d", h=H) for t in self.to_qkv(x).chunk(3, dim=-1))
        at = torch.stack(torch.meshgrid(torch.arange(2), torch.arange(2), indexing="ij")).flatten(1)
        apart = ((at[:, :, None] - at[:, None] + 1) * torch.tensor([3, 1])[:, None, None]).sum(0)
        sim = q @ k.mT * WIDTH**-0.5 + rearrange(self.bias(apart), "i j h -> h i j")
        out = self.to_out(rearrange(sim.softmax(-1) @ v, "b h n d -> b n (h d)"))
        return rearrange(out, "(b x y) (w1 w2) d -> b d (w1 x) (w2 y)", x=height, y=width, w1=2)


@case(
    Core(*(rows(f"{m}.weight", "(h d) c x y", h=1) for m in "qkv"), None, heads=1, scores="b x y k",
         free=("output",), proved=()),
    inputs=("b c x y",), may_refuse="single|softmax|several|two|one head|part",
)  # fmt: skip
class CrissCross(nn.Module):
    """A pixel attends to its row and its column, in one softmax over both."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Conv2d(24, 6, 1), nn.Conv2d(24, 6, 1), nn.Conv2d(24, 24, 1)
        self.gamma = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        b, _, h, w = x.shape
        q, k, v = self.q(x), self.k(x), self.v(x)
        q_h, k_h, v_h = (t.permute(0, 3, 1, 2).reshape(b * w, -1, h) for t in (q, k, v))
        q_w, k_w, v_w = (t.permute(0, 2, 1, 3).reshape(b * h, -1, w) for t in (q, k, v))
        own = torch.diag(torch.full((h,), float("inf"), dtype=x.dtype)).nan_to_num(posinf=1e9)
        energy_h = (torch.bmm(q_h.mT, k_h) - own).view(b, w, h, h).permute(0, 2, 1, 3)
        energy_w = torch.bmm(q_w.mT, k_w).view(b, h, w, w)
        weights = F.softmax(torch.cat([energy_h, energy_w], 3), dim=3)
        att_h = weights[..., :h].permute(0, 2, 1, 3).reshape(b * w, h, h)
        att_w = weights[..., h:].reshape(b * h, w, w)
        out_h = torch.bmm(v_h, att_h.mT).view(b, w, -1, h).permute(0, 2, 3, 1)
        out_w = torch.bmm(v_w, att_w.mT).view(b, h, -1, w).permute(0, 2, 1, 3)
        return self.gamma * (out_h + out_w) + x


@case(
    Core(rows("to_q.weight"), rows("to_k.weight"), rows("to_v.weight"), rows("o.weight", "c (h d)"), heads_alone=True),
    inputs=("b c x y",),
    tokens=16,
)
class ConvolvedTokens(nn.Module):
    """CvT: a depthwise convolution with a norm in front of each map, with a stride for keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.dw = nn.ModuleDict(
            {
                name: nn.Sequential(nn.Conv2d(24, 24, 3, stride, 1, groups=24, bias=False), nn.BatchNorm2d(24))
                for name, stride in (("q", 1), ("k", 2), ("v", 2))
            }
        )
        self.to_q, self.to_k, self.to_v, self.o = (nn.Linear(24, 24) for _ in range(4))

    def forward(self, image: Tensor) -> Tensor:
        q, k, v = (rearrange(self.dw[name](image), "b c h w -> b (h w) c") for name in "qkv")
        q, k, v = (
            rearrange(m(t), "b t (h d) -> b h t d", h=H) for m, t in ((self.to_q, q), (self.to_k, k), (self.to_v, v))
        )
        weights = F.softmax(torch.einsum("bhlk,bhtk->bhlt", q, k) * 24**-0.5, dim=-1)
        x = torch.einsum("bhlt,bhtv->bhlv", weights, v)
        return self.o(rearrange(x, "b h t d -> b t (h d)"))


@case(
    Core(*(rows("qkv.weight", "(r h d) c", n_r=3, r=r) for r in range(3)), rows("proj.weight", "c (h d)"),
         heads_alone=True, proved=("query", "key", "value")),
    tokens=16,
)  # fmt: skip
class PooledHeads(nn.Module):
    """MViT: queries, keys and values of each head are pooled by one convolution for all heads, queries come back."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(24, 72), nn.Linear(24, 24)
        self.pool_q, self.pool_k, self.pool_v = (
            nn.Conv2d(WIDTH, WIDTH, 3, s, 1, groups=WIDTH, bias=False) for s in (1, 2, 2)
        )
        self.norm_k = nn.LayerNorm(WIDTH, elementwise_affine=False)

    def pool(self, x: Tensor, conv: nn.Module) -> Tensor:
        b, h, _, d = x.shape
        x = x.reshape(b * h, 4, 4, d).permute(0, 3, 1, 2)
        return conv(x).flatten(2).mT.reshape(b, h, -1, d)

    def forward(self, x: Tensor) -> Tensor:
        b, n, c = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, H, -1).permute(2, 0, 3, 1, 4).unbind(0)
        q, k, v = self.pool(q, self.pool_q), self.pool(k, self.pool_k), self.pool(v, self.pool_v)
        out = attend(q, k, v) + q
        return self.proj(out.transpose(1, 2).reshape(b, n, c))


@case(
    *(
        Core(*(rows(f"{m}.qkv.weight", "(r h d) c", n_r=3, r=r) for r in range(3)), rows(f"{m}.proj.weight", "c (h d)"),
             scores="w h q k", number=i, heads_alone=True, proved=("query", "key"))
        for i, m in enumerate(("time", "space"))
    ),
    inputs=("b 3 n c",),
)  # fmt: skip
class TimeThenSpace(nn.Module):
    """TimeSformer: two attentions over the axes of a video, folded into the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.time, self.space = (nn.ModuleDict({"qkv": nn.Linear(24, 72), "proj": nn.Linear(24, 24)}) for _ in range(2))

    def _one(self, part: nn.ModuleDict, x: Tensor) -> Tensor:
        q, k, v = (split(t) for t in part["qkv"](x).chunk(3, -1))
        return part["proj"](join(attend(q, k, v)))

    def forward(self, x: Tensor) -> Tensor:
        b = len(x)
        x = x + rearrange(self._one(self.time, rearrange(x, "b t n c -> (b n) t c")), "(b n) t c -> b t n c", b=b)
        return x + rearrange(self._one(self.space, rearrange(x, "b t n c -> (b t) n c")), "(b t) n c -> b t n c", b=b)


@case(
    Core(rows("q.weight"), rows("k.weight"), rows("v.weight"), rows("o.weight", "c (h d)"), rounds=2,
         heads_alone=True, scores="w h q k"),
    inputs=("b 3 n c",),
)  # fmt: skip
class OneMapForRowsAndColumns(Four):
    """Axial: rows, then columns, by the same maps."""

    def once(self, x: Tensor) -> Tensor:
        b = len(x)
        y = rearrange(x, "b t n c -> (b t) n c")
        out = self.o(join(attend(split(self.q(y)), split(self.k(y)), split(self.v(y)))))
        return rearrange(out, "(b t) n c -> b t n c", b=b)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.once(x) + self.once(x.transpose(1, 2)).transpose(1, 2)


@case(
    Core(None, rows("k.weight"), rows("v.weight"), None, free=("query", "output"), heads_alone=True, proved=("key",)),
    Core(rows("q.weight"), rows("q.weight"), None, rows("o.weight", "c (h d)"), number=1, free=("value", "output"),
         heads_alone=True, proved=("query", "output")),
)  # fmt: skip
class Agents(Four):
    """Agent attention: pooled queries ask the tokens, and the tokens ask the pooled queries."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split(m(x)) for m in (self.q, self.k, self.v))
        agents = F.adaptive_avg_pool1d(q.flatten(0, 1).mT, 3).mT.unflatten(0, q.shape[:2])
        summary = (agents @ k.mT * WIDTH**-0.5).softmax(-1) @ v
        return self.o(join((q @ agents.mT * WIDTH**-0.5).softmax(-1) @ summary))


@case(
    Core(rows("k_conv.weight", "(h d) c 1", h=1), rows("k_conv.weight", "(h d) c 1", h=1),
         rows("v_conv.weight", "(h d) c 1", h=1), None, heads=1, scores="b q k", free=("output", "query"), proved=()),
    inputs=("b c n",), may_refuse="norm|average|single|one head|sum|share",
)  # fmt: skip
class PointCloud(nn.Module):
    """PCT: queries are keys, weights are normed a second time over the other axis, and what is taken is the offset."""

    def __init__(self) -> None:
        super().__init__()
        self.q_conv, self.k_conv = nn.Conv1d(24, 6, 1, bias=False), nn.Conv1d(24, 6, 1, bias=False)
        self.q_conv.weight = self.k_conv.weight
        self.v_conv, self.trans, self.norm = nn.Conv1d(24, 24, 1), nn.Conv1d(24, 24, 1), nn.BatchNorm1d(24)

    def forward(self, x: Tensor) -> Tensor:
        energy = torch.bmm(self.q_conv(x).permute(0, 2, 1), self.k_conv(x))
        weights = torch.softmax(energy, dim=-1)
        weights = weights / (1e-9 + weights.sum(dim=1, keepdim=True))
        taken = torch.bmm(self.v_conv(x), weights)
        return x + F.relu(self.norm(self.trans(x - taken)))


@case(separate(scores="b q k (h d)"), refused=_NO_SCORES, inputs=("b n c", "b n 3"))
class VectorsOfPoints(Four):
    """Point transformer: a weight for each feature, of the difference of queries and keys."""

    def __init__(self) -> None:
        super().__init__()
        self.pos = nn.Sequential(nn.Linear(3, MODEL), nn.ReLU(), nn.Linear(MODEL, MODEL))
        self.mlp = nn.Sequential(nn.Linear(MODEL, MODEL), nn.ReLU(), nn.Linear(MODEL, MODEL))

    def forward(self, x: Tensor, at: Tensor) -> Tensor:
        q, k, v = self.q(x), self.k(x), self.v(x)
        apart = self.pos(at[:, :, None] - at[:, None])
        weights = F.softmax(self.mlp(q[:, :, None] - k[:, None] + apart) / WIDTH**0.5, dim=-2)
        return self.o(torch.einsum("bmnf,bmnf->bmf", weights, v[:, None] + apart))


@case(separate(proved=()), may_refuse=_NO_SCORES)
class Deformable(Four):
    """Deformable DETR in one dimension: weights of a map of the query, values that are sampled at places it gives."""

    def __init__(self) -> None:
        super().__init__()
        self.weights, self.offsets = nn.Linear(MODEL, H * 3), nn.Linear(MODEL, H * 3)

    def forward(self, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        v = split(self.v(x)).flatten(0, 1).mT[:, :, None]  # (b h) d 1 n
        weights = F.softmax(self.weights(x).view(b, n, H, 3), -1)
        weights = weights.transpose(1, 2).reshape(b * H, 1, n, 3)
        at = torch.linspace(-1, 1, n, dtype=x.dtype)[:, None] + self.offsets(x).view(b, n, H, 3).transpose(1, 2).tanh()
        grid = torch.stack([at, torch.zeros_like(at)], -1).flatten(0, 1)
        taken = F.grid_sample(v, grid, align_corners=False)
        return self.o(join((taken * weights).sum(-1).mT.unflatten(0, (b, H))))


@case(
    separate(heads_alone=True, proved=("value", "output")),
    may_refuse="which tokens|single tokens|several",
)
class KeysWhereTheQueriesLook(Four):
    """DAT: keys and values of tokens that are sampled at places which the queries give."""

    def __init__(self) -> None:
        super().__init__()
        self.offset = nn.Linear(MODEL, 1)

    def forward(self, x: Tensor) -> Tensor:
        q, n = self.q(x), x.shape[1]
        at = torch.linspace(-1, 1, n, dtype=x.dtype) + 0.1 * self.offset(q)[..., 0].tanh()
        grid = torch.stack([at, torch.zeros_like(at)], -1)[:, None]
        sampled = F.grid_sample(x.mT[:, :, None], grid, align_corners=False)[:, :, 0].mT
        return self.o(join(attend(split(q), split(self.k(sampled)), split(self.v(sampled)))))


@case(separate(proved=()), may_refuse=_NO_SCORES, inputs=("b c x y",))
class Outlook(nn.Module):
    """VOLO: weights of a window by a map of its middle."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(24, 24), nn.Linear(24, 24), nn.Linear(24, 24, bias=False)
        self.attn, self.o = nn.Linear(24, 81 * H), nn.Linear(24, 24)

    def forward(self, image: Tensor) -> Tensor:
        b, c, h, w = image.shape
        x = image.permute(0, 2, 3, 1)
        v = self.v(x).permute(0, 3, 1, 2)
        v = F.unfold(v, 3, padding=1).reshape(b, H, WIDTH, 9, h * w).permute(0, 1, 4, 3, 2)
        weights = self.attn(x).reshape(b, h * w, H, 9, 9).permute(0, 2, 1, 3, 4).mul(WIDTH**-0.5).softmax(-1)
        out = (weights @ v).permute(0, 1, 4, 3, 2).reshape(b, c * 9, h * w)
        return self.o(F.fold(out, (h, w), 3, padding=1).permute(0, 2, 3, 1))


def _linear_bn() -> nn.Module:
    class LinearBN(nn.Sequential):
        def __init__(self) -> None:
            super().__init__()
            self.add_module("c", nn.Linear(24, 24, bias=False))
            self.add_module("bn", nn.BatchNorm1d(24))

        def forward(self, x: Tensor) -> Tensor:
            x = self.c(x)
            return self.bn(x.flatten(0, 1)).reshape_as(x)

    return LinearBN()


@case(Core(*(rows(f"{m}.c.weight") for m in "qkv"), rows("o.weight", "c (h d)"), heads_alone=True))
class BatchNormBehindMaps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = _linear_bn(), _linear_bn(), _linear_bn(), nn.Linear(24, 24)

    def forward(self, x: Tensor) -> Tensor:
        return self.o(join(attend(split(self.q(x)), split(self.k(x)), split(self.v(x)))))


@case(
    Core(rows("fc_q.weight"), rows("fc_k.weight", takes=1), rows("fc_v.weight", takes=1),
         rows("fc_o.weight", "c (h d)"), scores="(h b) q k", proved=("query", "key")),
    inputs=("b n c", "b m c"),
)  # fmt: skip
class SetBlock(nn.Module):
    """Set transformer, as its authors wrote it: queries are added to what attention gives, before the last map."""

    def __init__(self) -> None:
        super().__init__()
        self.fc_q, self.fc_k, self.fc_v, self.fc_o = (nn.Linear(24, 24) for _ in range(4))

    def forward(self, Q: Tensor, K: Tensor) -> Tensor:
        Q = self.fc_q(Q)
        K, V = self.fc_k(K), self.fc_v(K)
        q, k, v = (torch.cat(t.split(WIDTH, 2), 0) for t in (Q, K, V))
        weights = torch.softmax(q.bmm(k.transpose(1, 2)) / 24**0.5, 2)
        out = torch.cat((q + weights.bmm(v)).split(Q.size(0), 0), 2)
        return out + F.relu(self.fc_o(out))
