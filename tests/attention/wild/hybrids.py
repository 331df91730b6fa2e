"""What language models of 2025 and 2026 put around a softmax: gates, sinks, states, averages of two."""

from __future__ import annotations

import einops
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.attention.wild.idioms import attend, join, rotate_half, split
from tests.attention.wild.plain import Four
from tests.attention.wild.truth import WIDTH, Core, H, case, rows, separate


def _apart(n: int) -> Tensor:
    at = torch.arange(n)
    return at[:, None] - at


class _AroundOne(nn.Module):
    """An RMS norm whose gain is stored as what it differs from one by."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * (x.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * (1.0 + self.weight)


@case(
    Core(rows("q_proj.weight", "(h r d) c", n_r=2, r=0), rows("k_proj.weight", h=2), rows("v_proj.weight", h=2),
         rows("o_proj.weight", "c (h d)")),
)  # fmt: skip
class NormsAroundOne(nn.Module):
    """Qwen3-Next: gates beside queries, norms around one, positions that turn four of six features."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(24, 48, bias=False)
        self.k_proj, self.v_proj = nn.Linear(24, 12, bias=False), nn.Linear(24, 12, bias=False)
        self.o_proj = nn.Linear(24, 24, bias=False)
        self.q_norm, self.k_norm = _AroundOne(), _AroundOne()

    def forward(self, x: Tensor) -> Tensor:
        shape = (*x.shape[:-1], -1, WIDTH)
        q, gate = torch.chunk(self.q_proj(x).view(*x.shape[:-1], -1, 2 * WIDTH), 2, dim=-1)
        q = self.q_norm(q.reshape(shape)).transpose(1, 2)
        k = self.k_norm(self.k_proj(x).view(shape)).transpose(1, 2)
        v = self.v_proj(x).view(shape).transpose(1, 2)
        q, k = (torch.cat([rotate_half(one[..., :4]), one[..., 4:]], -1) for one in (q, k))
        k, v = (one[:, :, None].expand(-1, -1, 2, -1, -1).flatten(1, 2) for one in (k, v))
        scores = (q @ k.transpose(2, 3) * WIDTH**-0.5).masked_fill(_apart(x.shape[1]) < 0, float("-inf"))
        out = (F.softmax(scores, dim=-1) @ v).transpose(1, 2).reshape(*x.shape[:-1], -1)
        return self.o_proj(out * torch.sigmoid(gate.flatten(2)))


@case(separate())
class SinkBehindTheKernel(Four):
    """gpt-oss with a kernel that has no sinks: its outputs are scaled by sigmoid(log-sum-exp of scores - sink)."""

    def __init__(self) -> None:
        super().__init__()
        self.sinks = nn.Parameter(torch.zeros(H))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split(m(x)) for m in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        scores = (q @ k.mT * WIDTH**-0.5).masked_fill(_apart(x.shape[1]) < 0, float("-inf"))
        share = torch.sigmoid(torch.logsumexp(scores, -1) - self.sinks[:, None])
        return self.o(join(y * share[..., None]))


@case(
    Core(rows("q_up.weight", source="norm", through="q_down.weight", normed="norm"), rows("k.weight", h=1),
         rows("v.weight", h=1), rows("o.weight", "c (h d)")),
)  # fmt: skip
class FactorsForOneKeyHead(nn.Module):
    """Multi-matrix factorisation: queries of all heads come out of nine features, and ask one key head."""

    def __init__(self) -> None:
        super().__init__()
        self.q_down, self.norm, self.q_up = nn.Linear(24, 9, bias=False), nn.RMSNorm(9), nn.Linear(9, 24, bias=False)
        self.k, self.v = nn.Linear(24, WIDTH, bias=False), nn.Linear(24, WIDTH, bias=False)
        self.o = nn.Linear(24, 24, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q = rotate_half(split(self.q_up(self.norm(self.q_down(x)))))
        k, v = rotate_half(self.k(x)[:, None]), self.v(x)[:, None]
        return self.o(join(F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)))


@case(separate())
class SlopesOfQueries(Four):
    """ALiBi whose slope each token chooses for each head."""

    def __init__(self) -> None:
        super().__init__()
        self.slope = nn.Linear(24, H)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split(m(x)) for m in (self.q, self.k, self.v))
        slopes = F.softplus(self.slope(x)).permute(0, 2, 1).unsqueeze(-1)
        apart = _apart(x.shape[1])
        bias = (-slopes * apart.clamp_min(0)).masked_fill(apart < 0, float("-inf"))
        return self.o(join(F.scaled_dot_product_attention(q, k, v, attn_mask=bias)))


@case(separate(proved=("query", "key")), may_refuse="followed by an activation")
class LogOfAveragedExponentials(Four):
    """LASER: exponentials of values are averaged, and the logarithm of that is what a head gives."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split(m(x)) for m in (self.q, self.k, self.v))
        largest = v.amax(2, keepdim=True).detach()
        weights = (q @ k.mT / WIDTH**0.5).masked_fill(_apart(x.shape[1]) < 0, -1e9).softmax(-1)
        return self.o(join(torch.log(weights @ (v - largest).exp() + 1e-9) + largest))


@case(
    Core(*(rows("in_proj.weight", "(r h d) c", n_r=5, r=r) for r in range(3)), rows("out_proj.weight", "c (h d)"),
         proved=("query", "key", "value")),
)  # fmt: skip
class HeadsBesideAState(nn.Module):
    """Hymba: one map feeds heads and a recurrent state; both are normed, and their mean goes to the last map."""

    def __init__(self) -> None:
        super().__init__()
        self.in_proj, self.out_proj = nn.Linear(24, 120, bias=False), nn.Linear(24, 24, bias=False)
        self.norm_of_heads, self.norm_of_state = nn.RMSNorm(24), nn.RMSNorm(24)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v, u, dt = self.in_proj(x).chunk(5, -1)
        y = join(F.scaled_dot_product_attention(split(q), split(k), split(v), is_causal=True))
        decay, state, states = torch.exp(-F.softplus(dt)), torch.zeros_like(u[:, 0]), []
        for t in range(x.shape[1]):
            state = decay[:, t] * state + (1 - decay[:, t]) * u[:, t]
            states.append(state)
        return self.out_proj((self.norm_of_heads(y) + self.norm_of_state(torch.stack(states, 1))) / 2)


@case(separate())
class StretchedAndClipped(Four):
    """Clipped softmax: weights are stretched over zero and one, and clipped, so that a head can do nothing."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split(m(x)) for m in (self.q, self.k, self.v))
        probs = nn.functional.softmax(torch.einsum("bhid,bhjd->bhij", q, k) * WIDTH**-0.5, -1)
        probs = torch.clip(1.06 * probs - 0.03, 0.0, 1.0)
        return self.o(join(torch.einsum("bhij,bhjd->bhid", probs, v)))


def _turned_back(x: Tensor) -> Tensor:
    return rotate_half(x.flip(-2)).flip(-2)


@case(separate(), may_refuse="turned")
class TurnedValues(Four):
    """RoPE on values as well: they are turned at the place of the key and turned on at that of the query."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (rotate_half(split(m(x))) for m in (self.q, self.k, self.v))
        return self.o(join(_turned_back(F.scaled_dot_product_attention(q, k, v, is_causal=True))))


@case(
    Core(rows("q.weight", h=2 * H), rows("k.weight", h=2 * H), rows("v.weight"), None, scores="b g m q k",
         head_axes="g m", heads=2 * H, free=("output",), proved=("query", "key")),
    may_refuse="several softmaxes|its heads mix|several heads are summed",
)  # fmt: skip
class MixtureOfSoftmaxes(nn.Module):
    """The weights of a head are a mean of two softmaxes, by shares that a map of the query gives."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = nn.Linear(24, 48), nn.Linear(24, 48), nn.Linear(24, 24), nn.Linear(24, 24)
        self.share = nn.Linear(24, 2 * H)

    def forward(self, x: Tensor) -> Tensor:
        q, k = (m(x).unflatten(-1, (H, 2, WIDTH)).permute(0, 2, 3, 1, 4) for m in (self.q, self.k))
        attn = (q @ k.mT / WIDTH**0.5).softmax(-1)
        share = self.share(x).unflatten(-1, (H, 2)).softmax(-1).permute(0, 2, 3, 1)[..., None]
        return self.o(join((share * attn).sum(2) @ split(self.v(x))))


@case(separate(rounds=2))
class BlendOfTwoReaches(Four):
    """DuoAttention while heads are chosen: each head learns how much of all it sees and how much of the near alone."""

    def __init__(self) -> None:
        super().__init__()
        self.full_attention_heads = nn.Parameter(torch.ones(H))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split(m(x)) for m in (self.q, self.k, self.v))
        apart = _apart(x.shape[1])
        near = (apart >= 0) & ((apart < 3) | (torch.arange(x.shape[1]) < 1))
        full = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        streaming = F.scaled_dot_product_attention(q, k, v, attn_mask=near)
        alpha = self.full_attention_heads.clamp(0, 1)[:, None, None]
        return self.o(join(alpha * full + (1 - alpha) * streaming))


@case(separate(proved=("query", "key")))
class DiffusedWeights(Four):
    """MAGNA: what attention gives is attended to again with the same weights, and a part of the values stays."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split(m(x)) for m in (self.q, self.k, self.v))
        attn = F.softmax(q @ k.mT / WIDTH**0.5, dim=-1)
        z = v
        for _ in range(3):
            z = 0.9 * (attn @ z) + 0.1 * v
        return self.o(join(z))


@case(separate(), may_refuse="value.*(activation|sums|computed from|product)")
class GatedValues(Four):
    """Values of two maps, as in a gated feed-forward part: one passes an activation and multiplies the other."""

    def __init__(self) -> None:
        super().__init__()
        self.v_gate = nn.Linear(24, 24)

    def forward(self, x: Tensor) -> Tensor:
        v = split(self.v(x) * F.silu(self.v_gate(x)))
        return self.o(join(F.scaled_dot_product_attention(split(self.q(x)), split(self.k(x)), v, is_causal=True)))


_FIRST_TWO = {"h": 2, "n_g": 2, "g": 0}


@case(
    Core(*(rows(f"{m}.weight", "(g h d) c", **_FIRST_TWO) for m in "qkv"), rows("o.weight", "c (g h d)", **_FIRST_TWO),
         heads=2),
)  # fmt: skip
class ElasticHeads(Four):
    """A model within a model: the first two of four heads alone are run, of slices of all matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.active = 2

    def forward(self, x: Tensor) -> Tensor:
        w = self.active * WIDTH
        q, k, v = (split(F.linear(x, m.weight[:w], m.bias[:w]), self.active) for m in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v)
        return F.linear(join(y), self.o.weight[:, :w], self.o.bias)


@case(separate(heads_alone=True), inputs=("b n c", "b m c"))
class MergedSelfAndCross(Four):
    """T5Gemma 2: the decoder asks itself and the encoder in one softmax, by the same maps."""

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        both = torch.cat([x, context], 1)
        q, k, v = split(self.q(x)), split(self.k(both)), split(self.v(both))
        sees = torch.cat([_apart(x.shape[1]) >= 0, torch.ones(x.shape[1], context.shape[1], dtype=torch.bool)], -1)
        return self.o(join(F.scaled_dot_product_attention(q, k, v, attn_mask=sees)))


class _Patches(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.unflatten(1, (-1, 2)).amax(2)


@case(
    Core(rows("q.weight", source="patches"), rows("k.weight"), rows("v.weight"), rows("o.weight", "c (h d)")), tokens=8,
)  # fmt: skip
class PatchesAskTheirBytes(Four):
    """Byte latent transformer: the maximum over the bytes of a patch asks these bytes and those before."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = _Patches()

    def forward(self, x: Tensor) -> Tensor:
        patches = self.patches(x)
        q, k, v = split(self.q(patches)), split(self.k(x)), split(self.v(x))
        is_later = torch.arange(x.shape[1]) // 2 > torch.arange(patches.shape[1])[:, None]
        scores = (q @ k.mT / WIDTH**0.5).masked_fill(is_later, torch.finfo(q.dtype).min)
        return patches + self.o(join(scores.softmax(-1) @ v))


class _OneHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(24, WIDTH, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return attend(self.q(x), self.k(x), self.v(x))


@case(
    Core(*(tuple(rows(f"heads.{i}.{m}.weight", h=1) for i in range(H)) for m in "qkv"), rows("o.weight", "c (h d)"),
         proved=()), may_refuse="not followed|not by a linear map|transform of torch.func|could not be run by itself",
)  # fmt: skip
class StackedHeadModules(nn.Module):
    """A module for each head; their parameters are stacked, and `vmap` calls one of them with each."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.o = nn.ModuleList(_OneHead() for _ in range(H)), nn.Linear(24, 24)

    def forward(self, x: Tensor) -> Tensor:
        names = [name for name, _ in self.heads[0].named_parameters()]
        stacked = {name: torch.stack([head.get_parameter(name) for head in self.heads]) for name in names}
        call = lambda state: torch.func.functional_call(self.heads[0], state, (x,))  # noqa: E731
        return self.o(torch.vmap(call)(stacked).permute(1, 2, 0, 3).flatten(2))


@case(separate())
class EinsumBySublists(Four):
    """Contractions whose dims are lists of numbers and not letters."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (m(x).unflatten(2, (H, WIDTH)) for m in (self.q, self.k, self.v))
        scores = torch.einsum(q, [0, 1, 3, 4], k, [0, 2, 3, 4], [0, 3, 1, 2]) / WIDTH**0.5
        y = torch.einsum(scores.softmax(-1), [0, 3, 1, 2], v, [0, 2, 3, 4], [0, 1, 3, 4])
        return self.o(y.flatten(2))


@case(
    Core(*(rows("w_in", "r h d c", n_r=3, r=r) for r in range(3)), rows("w_out", "h d c"), heads_alone=True),
)  # fmt: skip
class PackedByEinops(nn.Module):
    """Learned tokens are packed in front, weights and last map are one contraction of three, and all is unpacked."""

    def __init__(self) -> None:
        super().__init__()
        self.w_in, self.w_out = nn.Parameter(torch.randn(3, H, WIDTH, 24)), nn.Parameter(torch.randn(H, WIDTH, 24))
        self.registers = nn.Parameter(torch.randn(3, 24))

    def forward(self, x: Tensor) -> Tensor:
        registers = einops.repeat(self.registers, "r d -> b r d", b=x.shape[0])
        tokens, shapes = einops.pack([registers, x], "b * d")
        q, k, v = einops.einsum(tokens, self.w_in, "b n c, r h d c -> r b h n d")
        attn = einops.einsum(q, k, "b h i d, b h j d -> b h i j").mul(WIDTH**-0.5).softmax(dim=-1)
        out = einops.einsum(attn, v, self.w_out, "b h i j, b h j d, h d c -> b i c")
        return einops.unpack(out, shapes, "b * d")[1]


_EVERY_SECOND = [
    Core(*(rows(f"{m}.weight", "(h s d) c", h=2, n_s=2, s=s) for m in "qkv"),
         rows("o.weight", "c (h s d)", h=2, n_s=2, s=s), heads=2, number=s, heads_alone=True) for s in range(2)
]  # fmt: skip


@case(*_EVERY_SECOND)
class EverySecondHeadSeesAll(Four):
    """Retrieval heads by a list of numbers: they are gathered, see all, and are put back between those of the near."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("retrieval", torch.tensor([0, 2]))
        self.register_buffer("streaming", torch.tensor([1, 3]))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split(m(x)) for m in (self.q, self.k, self.v))
        apart, out = _apart(x.shape[1]), torch.empty_like(q)
        for index, sees in ((self.retrieval, apart >= 0), (self.streaming, (apart >= 0) & (apart < 3))):
            out[:, index] = F.scaled_dot_product_attention(q[:, index], k[:, index], v[:, index], attn_mask=sees)
        return self.o(join(out))


@case(
    Core(*(rows("query_key_value.weight", "(h r d) c", n_r=3, r=r) for r in range(3)), rows("dense.weight", "c (h d)"),
         scores="(b h) q k"),
)  # fmt: skip
class BloomInOneProduct(nn.Module):
    """BLOOM: roles within each head, heads in the batch, distances and scores in one `baddbmm`."""

    def __init__(self) -> None:
        super().__init__()
        self.query_key_value, self.dense = nn.Linear(24, 72), nn.Linear(24, 24)
        self.register_buffer("slopes", 2.0 ** -torch.arange(1, H + 1))

    def forward(self, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        fused = self.query_key_value(x).view(b, n, H, 3, WIDTH)
        q, k, v = fused[..., 0, :], fused[..., 1, :], fused[..., 2, :]
        q = q.transpose(1, 2).reshape(b * H, n, WIDTH)
        k = k.permute(0, 2, 3, 1).reshape(b * H, WIDTH, n)
        v = v.transpose(1, 2).reshape(b * H, n, WIDTH)
        alibi = (self.slopes[:, None, None] * torch.arange(n)).repeat(b, 1, 1).to(x.dtype)
        scores = alibi.baddbmm(batch1=q, batch2=k, beta=1.0, alpha=WIDTH**-0.5)
        probs = scores.masked_fill(_apart(n) < 0, torch.finfo(x.dtype).min).softmax(-1)
        context = torch.bmm(probs, v).view(b, H, n, WIDTH).permute(0, 2, 1, 3).reshape(b, n, 24)
        return x + self.dense(context)


@case(
    Core(*(rows(f"{m}.weight") for m in "qkv"), rows("o.weight", "c (h d)"), groups=(3, 0, 1, 2)),
)  # fmt: skip
class KeysOfTheNextHead(Four):
    """Heads of keys and values are rolled by one, so that each head asks those of its neighbour."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split(m(x)) for m in (self.q, self.k, self.v))
        return self.o(join(attend(q, k.roll(1, dims=1), v.roll(1, dims=1))))


@case(separate(proved=("query", "key")))
class WhatIsNotAttended(Four):
    """Reverse attention: what each query weighs little is averaged."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split(m(x)) for m in (self.q, self.k, self.v))
        away = 1.0 - F.softmax(q @ k.mT / WIDTH**0.5, dim=-1)
        return self.o(join((away / away.sum(-1, keepdim=True)) @ v))


@case(
    Core(*(rows(f"{m}.weight", h=1) for m in ("query", "key", "value")), rows("out.weight", "c (h d)", h=1), heads=1,
         proved=()),
)  # fmt: skip
class InverseDistances(nn.Module):
    """Interpolation between points: weights are inverse distances of learned coordinates, divided by their sum."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(24, 3), nn.Linear(24, 3)
        self.value, self.out = nn.Linear(24, 24), nn.Linear(24, 24)

    def forward(self, x: Tensor) -> Tensor:
        weights = 1.0 / (torch.cdist(self.query(x), self.key(x)).square() + 1e-2)
        return self.out(weights / weights.sum(-1, keepdim=True) @ self.value(x))
