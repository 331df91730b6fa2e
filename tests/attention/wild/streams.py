"""Attention between several inputs, as models of images and texts, video, diffusion, points and sound write it."""

from __future__ import annotations

import math

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F

from tests.attention.wild.idioms import angles, attend, join, rotate_half, split
from tests.attention.wild.plain import Four
from tests.attention.wild.truth import MODEL, WIDTH, Core, H, case, fused, rows, separate


@case(separate(heads_alone=True), inputs=("b n c", "b m c"))
class ReferenceOnly(Four):
    """Reference attention: the hidden states of another picture are asked by the same maps."""

    def forward(self, x: Tensor, reference: Tensor) -> Tensor:
        both = torch.cat([x, reference], dim=1)
        q, k, v = self.q(x), self.k(both), self.v(both)
        q, k, v = (rearrange(t, "b n (h d) -> b h n d", h=H).contiguous() for t in (q, k, v))
        return self.o(rearrange(F.scaled_dot_product_attention(q, k, v), "b h n d -> b n (h d)")) + x


@case(
    Core(rows("to_q.weight"), rows("to_k.weight"), rows("to_v.weight"), rows("to_out.0.weight", "c (h d)"),
         scores="(b m) h q k", heads_alone=True, proved=("query", "key")),
    inputs=("b n m c",),
)  # fmt: skip
class MotionModule(nn.Module):
    """AnimateDiff: frames attend to each other at every place, with positions added and a last map of zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(24)
        self.to_q, self.to_k, self.to_v = (nn.Linear(24, 24, bias=False) for _ in range(3))
        self.to_out = nn.Sequential(nn.Linear(24, 24), nn.Dropout(0.0))
        self.proj_out = nn.Linear(24, 24)
        nn.init.zeros_(self.proj_out.weight)
        angle = angles(32, 24, torch.zeros(1))
        self.register_buffer("pe", torch.cat([angle.sin(), angle.cos()], -1)[None])

    def forward(self, video: Tensor) -> Tensor:
        d = video.shape[2]
        x = rearrange(video, "b f d c -> (b d) f c")
        x = self.norm(x) + self.pe[:, : x.shape[1]].to(x.dtype)
        q, k, v = (rearrange(m(x), "b n (h d) -> b h n d", h=H) for m in (self.to_q, self.to_k, self.to_v))
        scores = torch.einsum("bhid,bhjd->bhij", q, k) * WIDTH**-0.5
        x = self.to_out(rearrange(scores.softmax(dim=-1) @ v, "b h n d -> b n (h d)"))
        return video + self.proj_out(rearrange(x, "(b d) f c -> b f d c", d=d))


@case(fused(heads_alone=True), inputs=("b n c",), tokens=16)
class TurnedOverTwoAxes(nn.Module):
    """DINOv3: half of the features turn with rows, half with columns; class and register tokens do not turn."""

    def __init__(self) -> None:
        super().__init__()
        self.prefix = nn.Parameter(torch.randn(1, 3, 24))
        self.qkv, self.o = nn.Linear(24, 72, bias=False), nn.Linear(24, 24)

    def rope(self, length: int, like: Tensor) -> tuple[Tensor, Tensor]:
        side = int(math.sqrt(length))
        grid = torch.stack(torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij"), -1).flatten(0, 1)
        angle = 2 * math.pi * ((grid.to(like.dtype) + 0.5) / side * 2 - 1)[:, :, None] / torch.tensor([1.0])
        angle = torch.cat([angle.flatten(1, 2), grid.to(like.dtype).sum(1, keepdim=True) / side], -1).tile(2)
        return angle.sin(), angle.cos()

    def forward(self, patches: Tensor) -> Tensor:
        x = torch.cat([self.prefix.expand(len(patches), -1, -1), patches], 1)
        q, k, v = torch.unbind(self.qkv(x).reshape(*x.shape[:2], 3, H, WIDTH), 2)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        sin, cos = self.rope(patches.shape[1], x)
        first = q.shape[-2] - sin.shape[-2]

        def turn(t: Tensor) -> Tensor:
            rest = t[:, :, first:]
            x1, x2 = rest.chunk(2, dim=-1)
            return torch.cat((t[:, :, :first], rest * cos + torch.cat([-x2, x1], dim=-1) * sin), dim=-2)

        y = F.scaled_dot_product_attention(turn(q), turn(k), v).transpose(1, 2)
        return self.o(y.reshape(*x.shape))[:, 3:]


class _Narrow(nn.Module):
    """SAM's attention: inside it is half as wide."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(24, 12) for _ in range(3))
        self.out_proj = nn.Linear(12, 24)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (split(m(t)) for m, t in ((self.q_proj, q), (self.k_proj, k), (self.v_proj, v)))
        attn = torch.softmax(q @ k.permute(0, 1, 3, 2) / math.sqrt(q.shape[-1]), dim=-1)
        return self.out_proj(join(attn @ v))


@case(
    separate("t2i.q_proj", "t2i.k_proj", "t2i.v_proj", "t2i.out_proj", takes=1, heads_alone=True,
             proved=("query", "key")),
    Core(
        rows("i2t.q_proj.weight", takes=1), rows("i2t.k_proj.weight", source="norm"),
        rows("i2t.v_proj.weight", source="norm"), rows("i2t.out_proj.weight", "c (h d)"), number=1, heads_alone=True,
        proved=("key",),
    ),
    inputs=("b n c", "b m c"),
)  # fmt: skip
class TwoWay(nn.Module):
    """SAM: prompts ask the picture, and the picture asks them; positions are added to queries and keys alone."""

    def __init__(self) -> None:
        super().__init__()
        self.t2i, self.i2t, self.norm = _Narrow(), _Narrow(), nn.LayerNorm(24)
        self.pe_prompt, self.pe_image = nn.Parameter(torch.randn(7, 24)), nn.Parameter(torch.randn(9, 24))

    def forward(self, prompts: Tensor, image: Tensor) -> tuple[Tensor, Tensor]:
        q, k = prompts + self.pe_prompt, image + self.pe_image
        prompts = self.norm(prompts + self.t2i(q=q, k=k, v=image))
        q = prompts + self.pe_prompt
        image = image + self.i2t(q=k, k=q, v=prompts)
        return torch.cat([image, prompts], 1), prompts


class _BertAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(24, 24) for _ in range(3))
        self.dense, self.LayerNorm = nn.Linear(24, 24), nn.LayerNorm(24)

    def transpose_for_scores(self, x: Tensor) -> Tensor:
        return x.view(*x.size()[:-1], H, WIDTH).permute(0, 2, 1, 3)

    def forward(self, hidden: Tensor, encoder_hidden: Tensor | None = None) -> Tensor:
        is_cross = encoder_hidden is not None
        context = encoder_hidden if is_cross else hidden
        key, value = self.transpose_for_scores(self.key(context)), self.transpose_for_scores(self.value(context))
        scores = torch.matmul(self.transpose_for_scores(self.query(hidden)), key.transpose(-1, -2)) / math.sqrt(WIDTH)
        probs = nn.Softmax(dim=-1)(scores)
        out = torch.matmul(probs, value).permute(0, 2, 1, 3).contiguous().view(*hidden.size()[:-1], 24)
        return self.LayerNorm(self.dense(out) + hidden)


def _bert(name: str, number: int, source: str | None, takes: int | None = None) -> Core:
    keys = {"source": source} if takes is None else {"takes": takes}
    return Core(
        rows(f"{name}.query.weight", source=source), rows(f"{name}.key.weight", **keys),
        rows(f"{name}.value.weight", **keys), rows(f"{name}.dense.weight", "c (h d)"), number=number, heads_alone=True,
        proved=("query", "key"),
    )  # fmt: skip


@case(
    _bert("attention", 0, "embed_norm"), _bert("crossattention", 1, "attention.LayerNorm", takes=1),
    inputs=("b n c", "b m c"),
)  # fmt: skip
class QFormer(nn.Module):
    """BLIP-2: learned queries and a text attend to each other; then the queries alone ask a picture."""

    def __init__(self) -> None:
        super().__init__()
        self.query_tokens = nn.Parameter(torch.randn(1, 5, 24))
        self.embed_norm = nn.LayerNorm(24)
        self.attention, self.crossattention = _BertAttention(), _BertAttention()

    def forward(self, text: Tensor, image: Tensor) -> Tensor:
        x = self.embed_norm(torch.cat([self.query_tokens.expand(len(text), -1, -1), text], dim=1))
        x = self.attention(x)
        queries = self.crossattention(x[:, :5], encoder_hidden=image)
        return torch.cat([queries, x[:, 5:]], dim=1)


@case(fused("qkv.weight", "(r h d) c", "proj.weight"))
class BiasOfQueriesAndValues(nn.Module):
    """BEiT: one map, with biases of queries and values alone, and a table of relative places."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(24, 72, bias=False), nn.Linear(24, 24)
        self.q_bias, self.v_bias = nn.Parameter(torch.zeros(24)), nn.Parameter(torch.zeros(24))
        self.table = nn.Parameter(torch.zeros(13, H))
        at = torch.arange(7)
        self.register_buffer("index", at[:, None] - at[None] + 6)

    def forward(self, x: Tensor) -> Tensor:
        B, N, C = x.shape
        qkv_bias = torch.cat((self.q_bias, torch.zeros_like(self.v_bias, requires_grad=False), self.v_bias))
        qkv = F.linear(input=x, weight=self.qkv.weight, bias=qkv_bias)
        qkv = qkv.reshape(B, N, 3, H, -1).permute(2, 0, 3, 1, 4)
        q, k, v = qkv[0], qkv[1], qkv[2]
        attn = (q * WIDTH**-0.5) @ k.transpose(-2, -1)
        bias = self.table[self.index.view(-1)].view(N, N, -1).permute(2, 0, 1).contiguous()
        attn = (attn + bias.unsqueeze(0)).softmax(dim=-1)
        return self.proj((attn @ v).transpose(1, 2).reshape(B, N, C))


@case(
    Core(*(rows("h_qkv.weight", "(r h d) c", h=2, n_r=3, r=r) for r in range(3)), rows("h_proj.weight", "c (h d)", h=2),
         heads=2, scores="b w h q k", heads_alone=True),
    Core(rows("l_q.weight", h=2), rows("l_kv.weight", "(r h d) c", h=2, n_r=2, r=0),
         rows("l_kv.weight", "(r h d) c", h=2, n_r=2, r=1), rows("l_proj.weight", "c (h d)", h=2), heads=2, number=1,
         heads_alone=True),
    inputs=("b x y c",), tokens=16,
)  # fmt: skip
class HighAndLow(nn.Module):
    """LITv2: two heads attend within windows, two ask the means of windows."""

    def __init__(self) -> None:
        super().__init__()
        self.h_qkv, self.h_proj = nn.Linear(24, 36), nn.Linear(12, 12)
        self.l_q, self.l_kv, self.l_proj = nn.Linear(24, 12), nn.Linear(24, 24), nn.Linear(12, 12)
        self.sr = nn.AvgPool2d(2, 2)

    def hifi(self, x: Tensor) -> Tensor:
        B, h, w, C = x.shape
        x = x.reshape(B, h // 2, 2, w // 2, 2, C).transpose(2, 3)
        qkv = self.h_qkv(x).reshape(B, 4, 4, 3, 2, WIDTH).permute(3, 0, 1, 4, 2, 5)
        q, k, v = qkv[0], qkv[1], qkv[2]
        attn = ((q @ k.transpose(-2, -1)) * WIDTH**-0.5).softmax(dim=-1)
        out = (attn @ v).transpose(2, 3).reshape(B, h // 2, w // 2, 2, 2, 12).transpose(2, 3)
        return self.h_proj(out.reshape(B, h, w, 12))

    def lofi(self, x: Tensor) -> Tensor:
        B, h, w, C = x.shape
        q = self.l_q(x).reshape(B, h * w, 2, WIDTH).permute(0, 2, 1, 3)
        x_ = self.sr(x.permute(0, 3, 1, 2)).reshape(B, C, -1).permute(0, 2, 1)
        k, v = self.l_kv(x_).reshape(B, -1, 2, 2, WIDTH).permute(2, 0, 3, 1, 4)
        attn = ((q @ k.transpose(-2, -1)) * WIDTH**-0.5).softmax(dim=-1)
        return self.l_proj((attn @ v).transpose(1, 2).reshape(B, h, w, 12))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat((self.hifi(x), self.lofi(x)), dim=-1)


@case(separate(heads_alone=True, scores="p h q k", proved=("query", "key")), inputs=("n c", "n 3"), tokens=8)
class SerializedPoints(Four):
    """Point Transformer V3: points are put in the order of a curve through space, and attend within patches of four."""

    def forward(self, x: Tensor, coordinates: Tensor) -> Tensor:
        grid = (coordinates * 4).floor().long() + 20
        code = torch.zeros(len(grid), dtype=torch.long)
        for bit in range(6):
            for axis in range(3):
                code = code | ((grid[:, axis] >> bit & 1) << (3 * bit + axis))
        order = code.argsort()
        inverse = torch.zeros_like(order).scatter_(0, order, torch.arange(len(order)))
        q, k, v = (m(x)[order].reshape(-1, 4, H, WIDTH).permute(0, 2, 1, 3) for m in (self.q, self.k, self.v))
        attn = torch.softmax((q * WIDTH**-0.5) @ k.transpose(-2, -1), dim=-1)
        return self.o((attn @ v).transpose(1, 2).reshape(-1, MODEL)[inverse])


@case(
    Core(*(rows("qkv.weight", "(r h d) c", n_r=3, r=r, source="norm") for r in range(3)),
         rows("proj.weight", "c (h d)"), heads_alone=True, proved=("query", "key")),
    inputs=("b n c",), tokens=16,
)  # fmt: skip
class WhatAMaskLeaves(nn.Module):
    """MAE: most of the patches are left out at random, and the rest attends, a class token in front."""

    def __init__(self) -> None:
        super().__init__()
        self.cls_token, self.pos_embed = nn.Parameter(torch.randn(1, 1, 24)), nn.Parameter(torch.randn(1, 17, 24))
        self.norm, self.qkv, self.proj = nn.LayerNorm(24), nn.Linear(24, 72), nn.Linear(24, 24)

    def random_masking(self, x: Tensor, ratio: float) -> tuple[Tensor, Tensor]:
        N, L, D = x.shape
        keep = int(L * (1 - ratio))
        shuffle = torch.argsort(torch.rand(N, L), dim=1)
        ids = shuffle[:, :keep]
        return torch.gather(x, dim=1, index=ids.unsqueeze(-1).repeat(1, 1, D)), ids

    def forward(self, x: Tensor) -> Tensor:
        x, _ = self.random_masking(x + self.pos_embed[:, 1:], 0.5)
        x = torch.cat(((self.cls_token + self.pos_embed[:, :1]).expand(len(x), -1, -1), x), dim=1)
        q, k, v = self.qkv(self.norm(x)).reshape(*x.shape[:2], 3, H, WIDTH).permute(2, 0, 3, 1, 4)
        return x + self.proj(join(F.scaled_dot_product_attention(q, k, v)))


@case(separate(heads_alone=True, scores="(b h) q k"))
class MeansOfSegments(Four):
    """Emformer: a summary of each segment, made by a mean, is asked beside the tokens."""

    def forward(self, x: Tensor) -> Tensor:
        summary = F.avg_pool1d(x.permute(0, 2, 1), kernel_size=3, stride=3, ceil_mode=True).permute(0, 2, 1)
        both = torch.cat([summary, x], dim=1)
        q, k, v = split(self.q(x)), split(self.k(both)), split(self.v(both))
        weights = torch.bmm(q.flatten(0, 1) * WIDTH**-0.5, k.flatten(0, 1).mT).float().type_as(x).softmax(-1)
        return self.o(join(torch.bmm(weights, v.flatten(0, 1)).unflatten(0, (len(x), H))))


@case(separate("q_proj", "k_proj", "v_proj", "out_proj", scores="(b h) q k", heads_alone=True), inputs=("n b c",))
class GatedRelativeBias(nn.Module):
    """WavLM: a table of relative places, whose entries a gate of each token and head scales; length first."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(24, 24) for _ in range(4))
        self.relative_attention_bias = nn.Embedding(20, H)
        self.grep_linear, self.grep_a = nn.Linear(WIDTH, 8), nn.Parameter(torch.ones(1, H, 1, 1))

    def forward(self, query: Tensor) -> Tensor:
        tgt_len, bsz, _ = query.size()
        at = torch.arange(tgt_len)
        bias = self.relative_attention_bias((at[None] - at[:, None]).clamp(-9, 9) + 10).permute(2, 0, 1)
        bias = bias.unsqueeze(0).repeat(bsz, 1, 1, 1).view(bsz * H, tgt_len, tgt_len)
        layer = query.transpose(0, 1).view(bsz, tgt_len, H, -1).permute(0, 2, 1, 3)
        gate_a, gate_b = self.grep_linear(layer).view(bsz, H, tgt_len, 2, 4).sum(-1).sigmoid().chunk(2, dim=-1)
        gate = gate_a * (gate_b * self.grep_a - 1.0) + 2.0
        bias = gate.view(bsz * H, -1, 1) * bias
        q = self.q_proj(query) * WIDTH**-0.5
        q, k, v = (t.contiguous().view(tgt_len, bsz * H, WIDTH).transpose(0, 1)
                   for t in (q, self.k_proj(query), self.v_proj(query)))  # fmt: skip
        weights = F.softmax(torch.bmm(q, k.transpose(1, 2)) + bias, dim=-1)
        attn = torch.bmm(weights, v).transpose(0, 1).contiguous().view(tgt_len, bsz, 24)
        return self.out_proj(attn)


@case(
    Core(rows("q.weight", "(h d) c 1 1", h=H), rows("k.weight", "(h d) c 1 1", h=H), None, None,
         free=("value", "output"),
         proved=()),
    inputs=("b c x y",), tokens=4, may_refuse="activation|share or mix|several tokens|frequenc",
)  # fmt: skip
class FramesOfASpectrum(nn.Module):
    """TF-GridNet: frames attend to each other; a head's query is all frequencies of few channels, behind a PReLU."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Conv2d(24, 8, 1), nn.Conv2d(24, 8, 1), nn.Conv2d(24, 24, 1)
        self.act, self.proj = nn.ModuleDict({m: nn.PReLU() for m in "qkv"}), nn.Conv2d(24, 24, 1)
        self.norm = nn.LayerNorm((2, 4))

    def forward(self, x: Tensor) -> Tensor:
        B, C, T, Freq = x.shape
        q, k, v = (self.act[m](getattr(self, m)(x)).view(B * H, -1, T, Freq) for m in "qkv")
        q, k = (self.norm(t.transpose(1, 2)).flatten(2) for t in (q, k))
        v = v.transpose(1, 2).flatten(2)
        out = F.softmax(q @ k.transpose(1, 2) / q.shape[-1] ** 0.5, dim=2) @ v
        out = out.view(B, H, T, C // H, Freq).permute(0, 1, 3, 2, 4).reshape(B, C, T, Freq)
        return self.proj(out) + x


def _expert(kind: str, number: int) -> Core:
    return Core(
        *(rows(f"{kind}_qkv.weight", "(r h d) c", n_r=3, r=r) for r in range(3)),
        rows(f"{kind}_dense.weight", "c (h d)"), number=number, proved=(),
    )  # fmt: skip


@case(
    _expert("vision", 0),
    _expert("language", 0),
    may_refuse="second token stream|several maps|sums|not by a linear map|values of",
)
class MapsOfEachKindOfToken(nn.Module):
    """CogVLM: tokens of a picture have maps of their own, and all tokens attend to each other."""

    def __init__(self) -> None:
        super().__init__()
        self.vision_qkv, self.vision_dense = nn.Linear(24, 72, bias=False), nn.Linear(24, 24)
        self.language_qkv, self.language_dense = nn.Linear(24, 72), nn.Linear(24, 24)

    def forward(self, x: Tensor) -> Tensor:
        is_vision = torch.zeros(x.shape[:2], dtype=torch.bool)
        is_vision[:, 1:4] = True
        mixed = torch.empty((*x.shape[:-1], 72), dtype=x.dtype)
        mixed[is_vision] = self.vision_qkv(x[is_vision]).to(x.dtype)
        mixed[~is_vision] = self.language_qkv(x[~is_vision]).to(x.dtype)
        q, k, v = (split(t) for t in torch.split(mixed, 24, dim=-1))
        context = join(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        out = torch.empty_like(x)
        out[is_vision] = self.vision_dense(context[is_vision]).to(x.dtype)
        out[~is_vision] = self.language_dense(context[~is_vision]).to(x.dtype)
        return out


@case(_expert("vision", 0), _expert("language", 0), inputs=("b n c", "b m c"),
      may_refuse="second token stream|several maps|sums")  # fmt: skip
class TransformersOfEachModality(nn.Module):
    """Mixture of transformers: each modality has all maps of its own; sequences are joined for attention alone."""

    def __init__(self) -> None:
        super().__init__()
        self.vision_qkv, self.vision_dense = nn.Linear(24, 72), nn.Linear(24, 24)
        self.language_qkv, self.language_dense = nn.Linear(24, 72), nn.Linear(24, 24)

    def forward(self, language: Tensor, vision: Tensor) -> Tensor:
        parts = [
            qkv(x).unflatten(-1, (3, H, WIDTH)) for qkv, x in ((self.language_qkv, language), (self.vision_qkv, vision))
        ]
        q, k, v = torch.cat(parts, 1).permute(2, 0, 3, 1, 4)
        out = join(F.scaled_dot_product_attention(q, k, v)).split([language.shape[1], vision.shape[1]], 1)
        return torch.cat([self.language_dense(out[0]), self.vision_dense(out[1])], 1)


@case(
    Core(*(rows(f"{m}_proj.weight", source="norm") for m in "qkv"), rows("o_proj.weight", "c (h d)"),
         proved=("query", "key")),
    inputs=("b n c", "b 3 c"),
)  # fmt: skip
class PicturesAmongWords(nn.Module):
    """LLaVA: features of a picture are written over placeholders, and three axes of positions turn (Qwen2-VL)."""

    def __init__(self) -> None:
        super().__init__()
        self.mm_projector, self.norm = nn.Sequential(nn.Linear(24, 24), nn.GELU(), nn.Linear(24, 24)), nn.RMSNorm(24)
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(24, 24) for _ in range(4))

    def forward(self, words: Tensor, picture: Tensor) -> Tensor:
        b, n, _ = words.shape
        is_picture = torch.zeros(b, n, 1, dtype=torch.bool)
        is_picture[:, 2:5] = True
        x = words.masked_scatter(is_picture, self.mm_projector(picture))
        places = torch.stack([torch.arange(n), torch.arange(n) // 2, torch.arange(n) % 2]).to(words.dtype)
        frequencies = 100.0 ** (-torch.arange(0, WIDTH, 2) / WIDTH).to(words.dtype)
        theta = (places[:, :, None] * frequencies).repeat(1, 1, 2)
        cos, sin = (torch.cat([m[i % 3] for i, m in enumerate(f(theta).split([1, 1, 1] * 2, dim=-1))], dim=-1)
                    for f in (torch.cos, torch.sin))  # fmt: skip
        y = self.norm(x)
        q, k, v = (split(m(y)) for m in (self.q_proj, self.k_proj, self.v_proj))

        def turn(t: Tensor) -> Tensor:
            return t * cos + torch.cat((-t[..., WIDTH // 2 :], t[..., : WIDTH // 2]), dim=-1) * sin

        out = F.scaled_dot_product_attention(turn(q), turn(k), v, is_causal=True)
        return x + self.o_proj(out.transpose(1, 2).reshape(b, n, -1).contiguous())


class _Mllama(nn.Module):
    def __init__(self, is_cross: bool) -> None:
        super().__init__()
        self.is_cross, self.norm = is_cross, nn.RMSNorm(24)
        self.q_proj, self.o_proj = nn.Linear(24, 24, bias=False), nn.Linear(24, 24, bias=False)
        self.k_proj, self.v_proj = nn.Linear(24, 2 * WIDTH, bias=False), nn.Linear(24, 2 * WIDTH, bias=False)
        if is_cross:
            self.q_norm, self.k_norm, self.gate = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH), nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor, vision: Tensor | None = None) -> Tensor:
        y = self.norm(x)
        states = vision if self.is_cross and vision is not None else y
        q, k, v = split(self.q_proj(y)), split(self.k_proj(states), 2), split(self.v_proj(states), 2)
        k, v = (torch.repeat_interleave(t, H // 2, dim=1) for t in (k, v))
        if self.is_cross:
            q, k = self.q_norm(q), self.k_norm(k)
            return x + self.gate.tanh() * self.o_proj(join(F.scaled_dot_product_attention(q, k, v)))
        q, k = rotate_half(q), rotate_half(k)
        return x + self.o_proj(join(F.scaled_dot_product_attention(q, k, v, is_causal=True)))


def _of_layer(number: int, is_cross: bool) -> Core:
    at = f"layers.{number}"
    keys = {"takes": 1} if is_cross else {"source": f"{at}.norm"}
    return Core(
        rows(f"{at}.q_proj.weight", source=f"{at}.norm"), rows(f"{at}.k_proj.weight", h=2, **keys),
        rows(f"{at}.v_proj.weight", h=2, **keys), rows(f"{at}.o_proj.weight", "c (h d)"), number=number,
        proved=("query", "key"),
    )  # fmt: skip


@case(_of_layer(0, False), _of_layer(1, True), _of_layer(2, False), inputs=("b n c", "b m c"))
class EverySecondLayerLooks(nn.Module):
    """Llama 3.2 Vision: between layers of words stand layers that ask a picture, behind a gate that starts at zero."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Mllama(is_cross) for is_cross in (False, True, False))

    def forward(self, words: Tensor, vision: Tensor | None = None) -> Tensor:
        x = words
        for layer in self.layers:
            if layer.is_cross and vision is None:
                continue
            x = layer(x, vision)
        return x


@case(separate(takes=1, heads_alone=True, scores="(b w) h q k", proved=("query", "key")), inputs=("b n c", "b 2 m c"),
      tokens=9)  # fmt: skip
class ChunksAskNeighbours(Four):
    """RETRO: chunks of a sequence, moved by almost a chunk, ask what was retrieved for the chunk before."""

    def forward(self, x: Tensor, retrieved: Tensor) -> Tensor:
        b, chunks, _, c = retrieved.shape
        moved = F.pad(x[:, 2:], (0, 0, 0, 1))
        moved = moved[:, : chunks * 4].reshape(b * chunks, 4, c)
        q, k, v = split(self.q(moved)), split(self.k(retrieved.flatten(0, 1))), split(self.v(retrieved.flatten(0, 1)))
        out = self.o(join(attend(q, k, v))).view(b, chunks * 4, c)
        return x + F.pad(out, (0, 0, 1, 0))[:, : x.shape[1]]


def _seq(name: str, number: int, queries: str, keys: str) -> Core:
    return Core(
        rows(f"{name}.wq.weight", source=queries), rows(f"{name}.wk.weight", source=keys),
        rows(f"{name}.wv.weight", source=keys), rows(f"{name}.wo.weight", "c (h d)"), number=number,
        proved=("query", "key"),
    )  # fmt: skip


class _OneClass(nn.Module):
    """One class for all three: what is asked, and what may be seen, are arguments."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        self.mode = mode
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(24, 24) for _ in range(4))

    def forward(self, *args: Tensor, **kwargs: Tensor) -> dict[str, Tensor]:
        x = args[0]
        memory = kwargs["memory"] if self.mode == "cross" else x
        q, k, v = split(self.wq(x)), split(self.wk(memory)), split(self.wv(memory))
        scores = q @ k.mT / WIDTH**0.5
        if self.mode == "causal":
            scores = scores + torch.full(scores.shape[-2:], float("-inf"), dtype=x.dtype).triu(1)
        weights = scores.softmax(-1)
        return {"out": self.wo(join(weights @ v)), "weights": weights}


@case(
    _seq("enc", 0, "enc_norm", "enc_norm"), _seq("dec", 1, "dec_norm", "dec_norm"),
    _seq("cross", 2, "cross_norm", "memory_norm"),
    inputs=("b n c", "b m c"), call=lambda module, x, y: module({"src": y, "tgt": x})["logits"],
    may_refuse="could not be run with synthetic inputs",
)  # fmt: skip
class TranslatorInOneClass(nn.Module):
    """An encoder and a decoder whose three attentions are one class in three modes, with dictionaries in and out."""

    def __init__(self) -> None:
        super().__init__()
        self.enc, self.dec, self.cross = _OneClass("full"), _OneClass("causal"), _OneClass("cross")
        self.enc_norm, self.memory_norm, self.dec_norm, self.cross_norm = (nn.LayerNorm(24) for _ in range(4))
        self.head = nn.Linear(24, 11)

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        y = batch["src"]
        memory = self.memory_norm(y + self.enc(self.enc_norm(y))["out"])
        x = batch["tgt"]
        x = x + self.dec(self.dec_norm(x))["out"]
        x = x + self.cross(self.cross_norm(x), memory=memory)["out"]
        return {"logits": self.head(x)}


@case(separate(heads_alone=True), inputs=("b n c",))
class PrefixesOfANetwork(Four):
    """P-tuning: keys and values in front are made by a small network of learned tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.prefix = nn.Embedding(3, 8)
        self.trans = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 2 * MODEL))

    def forward(self, x: Tensor) -> Tensor:
        past = self.trans(self.prefix(torch.arange(3)).expand(len(x), -1, -1)).view(len(x), 3, 2, H, WIDTH)
        past_k, past_v = past.permute(2, 0, 3, 1, 4)
        k, v = torch.cat([past_k, split(self.k(x))], dim=2), torch.cat([past_v, split(self.v(x))], dim=2)
        return self.o(join(F.scaled_dot_product_attention(split(self.q(x)), k, v)))


@case(separate(heads_alone=True, scores="(b r) h q k"), may_refuse="which tokens|depends on values")
class RegionsThatAreGathered(Four):
    """BiFormer in one dimension: each region asks the tokens of the two regions whose means are nearest, gathered."""

    def forward(self, x: Tensor) -> Tensor:
        b, n, c = x.shape
        x = F.pad(x, (0, 0, 0, -n % 4))
        q, k, v = (m(x).view(b, -1, 4, c) for m in (self.q, self.k, self.v))
        r = q.shape[1]
        index = (q.mean(2).detach() @ k.mean(2).detach().mT).topk(min(2, r), -1).indices
        index = index.view(b, r, -1, 1, 1).expand(-1, -1, -1, 4, c)
        k, v = (t.unsqueeze(1).expand(-1, r, -1, -1, -1).gather(2, index).flatten(2, 3) for t in (k, v))
        q, k, v = (rearrange(t, "b r n (h d) -> (b r) h n d", h=H) for t in (q, k, v))
        out = rearrange((q * WIDTH**-0.5 @ k.mT).softmax(-1) @ v, "(b r) h n d -> b (r n) (h d)", r=r)
        return self.o(out)[:, :n]
