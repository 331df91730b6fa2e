"""What is done to scores and weights; and what is no softmax over tokens."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.attention.wild import idioms
from tests.attention.wild.idioms import attend, join, split
from tests.attention.wild.plain import Four
from tests.attention.wild.truth import MODEL, WIDTH, Core, H, case, fused, rows, separate

_MIXED = "mix|several heads|between heads|heads share|more than one head|depend|across|talk|combin"


@case(separate())
class Softcap(Four):
    def forward(self, x: Tensor) -> Tensor:
        scores = 5.0 * torch.tanh(split(self.q(x)) @ split(self.k(x)).mT / WIDTH**0.5 / 5.0)
        return self.o(join(scores.softmax(-1) @ split(self.v(x))))


@case(separate())
class LearnedSinks(Four):
    """A column of its own that takes weight and gives nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.sinks = nn.Parameter(torch.zeros(H))

    def forward(self, x: Tensor) -> Tensor:
        scores = split(self.q(x)) @ split(self.k(x)).mT / WIDTH**0.5
        sinks = self.sinks[:, None, None].expand(*scores.shape[:3], 1)
        weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
        return self.o(join(weights @ split(self.v(x))))


@case(separate())
class LearnedKeysAndValues(Four):
    """Memory: keys and values that no token gave."""

    def __init__(self) -> None:
        super().__init__()
        self.mem_k, self.mem_v = nn.Parameter(torch.randn(H, 3, WIDTH)), nn.Parameter(torch.randn(H, 3, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        mem_k, mem_v = (m.expand(x.shape[0], -1, -1, -1) for m in (self.mem_k, self.mem_v))
        k, v = torch.cat([mem_k, split(self.k(x))], 2), torch.cat([mem_v, split(self.v(x))], 2)
        return self.o(join(attend(split(self.q(x)), k, v)))


@case(separate())
class NullKey(Four):
    def __init__(self) -> None:
        super().__init__()
        self.null = nn.Parameter(torch.randn(2, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        nk, nv = (n.expand(x.shape[0], H, 1, WIDTH) for n in self.null)
        k, v = torch.cat([nk, split(self.k(x))], -2), torch.cat([nv, split(self.v(x))], -2)
        return self.o(join(F.scaled_dot_product_attention(split(self.q(x)), k, v)))


@case(separate())
class ZeroKey(Four):
    """One more key of zeros (`add_zero_attn`)."""

    def forward(self, x: Tensor) -> Tensor:
        k, v = (F.pad(split(m(x)), (0, 0, 0, 1)) for m in (self.k, self.v))
        return self.o(join(attend(split(self.q(x)), k, v)))


@case(separate())
class SoftmaxOffByOne(Four):
    def forward(self, x: Tensor) -> Tensor:
        scores = split(self.q(x)) @ split(self.k(x)).mT / WIDTH**0.5
        weights = idioms.softmax_by_hand(F.pad(scores, (0, 1)), -1)[..., :-1]
        return self.o(join(weights @ split(self.v(x))))


@case(separate())
class SoftmaxByHand(Four):
    def forward(self, x: Tensor) -> Tensor:
        scores = split(self.q(x)) @ split(self.k(x)).mT / WIDTH**0.5
        return self.o(join(idioms.softmax_by_hand(scores, -1) @ split(self.v(x))))


@case(separate())
class SoftmaxAsAModule(Four):
    def __init__(self) -> None:
        super().__init__()
        self.attend = nn.Sequential(nn.Softmax(dim=-1), nn.Dropout(0.1))

    def forward(self, x: Tensor) -> Tensor:
        return self.o(join(self.attend(split(self.q(x)) @ split(self.k(x)).mT) @ split(self.v(x))))


@case(separate())
class SoftmaxInFloat(Four):
    def forward(self, x: Tensor) -> Tensor:
        scores = split(self.q(x)) @ split(self.k(x)).mT / WIDTH**0.5
        weights = F.softmax(scores, dim=-1, dtype=torch.promote_types(torch.float32, x.dtype)).type_as(x)
        return self.o(join(torch.matmul(weights, split(self.v(x)))))


@case(separate(), may_refuse="sparsemax|softmax")
class Sparsemax(Four):
    def forward(self, x: Tensor) -> Tensor:
        scores = split(self.q(x)) @ split(self.k(x)).mT / WIDTH**0.5
        return self.o(join(idioms.sparsemax(scores, -1) @ split(self.v(x))))


@case(separate())
class TopKeys(Four):
    def forward(self, x: Tensor) -> Tensor:
        scores = split(self.q(x)) @ split(self.k(x)).mT
        least = scores.topk(min(6, scores.shape[-1]), dim=-1).values[..., -1:]
        weights = scores.masked_fill(scores < least, float("-inf")).softmax(-1)
        return self.o(join(weights @ split(self.v(x))))


@case(separate())
class TemperatureOfEachHead(Four):
    def __init__(self) -> None:
        super().__init__()
        self.log_temperature = nn.Parameter(torch.zeros(H, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        scores = split(self.q(x)) @ split(self.k(x)).mT * self.log_temperature.exp()
        return self.o(join(scores.softmax(-1) @ split(self.v(x))))


@case(separate(), refused=_MIXED)
class TalkingHeads(Four):
    """Scores of all heads are mixed in front of the softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.talk = nn.Conv2d(H, H, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.talk(split(self.q(x)) @ split(self.k(x)).mT / WIDTH**0.5)
        return self.o(join(scores.softmax(-1) @ split(self.v(x))))


@case(Core(rows("q.weight"), rows("k.weight"), None, None, free=("value", "output")))
class TalkingAfterSoftmax(Four):
    """Weights of all heads are mixed behind the softmax: the values of one are averaged with those of all."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.randn(H, H))

    def forward(self, x: Tensor) -> Tensor:
        weights = (split(self.q(x)) @ split(self.k(x)).mT / WIDTH**0.5).softmax(-1)
        weights = torch.einsum("hg,bgnm->bhnm", self.mix, weights)
        return self.o(join(weights @ split(self.v(x))))


@case(separate(), refused=_MIXED)
class KeysOfAllHeadsMixed(Four):
    def __init__(self) -> None:
        super().__init__()
        self.knock = nn.Parameter(torch.randn(H, H))

    def forward(self, x: Tensor) -> Tensor:
        k = torch.einsum("hg,bgnd->bhnd", self.knock, split(self.k(x)))
        return self.o(join(attend(split(self.q(x)), k, split(self.v(x)))))


@case(separate(mixes=True))
class KeysOfSeveralTokens(Four):
    """Linformer: keys are mixtures of all tokens, and the features of a head are mixed with none of another."""

    def __init__(self) -> None:
        super().__init__()
        self.shorter = nn.Parameter(torch.randn(5, 7))

    def forward(self, x: Tensor) -> Tensor:
        k, v = (split(self.shorter @ m(x)) for m in (self.k, self.v))
        return self.o(join(attend(split(self.q(x)), k, v)))


@case(separate(), refused="activation|relu|nonlinear|not linear|no linear|linear|share features|mix")
class KeysThroughAnActivation(Four):
    """Rows of a map with a ReLU behind it do not span what keys can be; refused, or said so."""

    def forward(self, x: Tensor) -> Tensor:
        k = F.relu(split(self.k(x))) * split(self.k(x)).roll(1, 1).tanh()
        return self.o(join(attend(split(self.q(x)), k, split(self.v(x)))))


@case(separate())
class GateOfEachHead(Four):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(MODEL, H)

    def forward(self, x: Tensor) -> Tensor:
        out = attend(split(self.q(x)), split(self.k(x)), split(self.v(x)))
        return self.o(join(out * self.gate(x).mT[..., None].sigmoid()))


@case(separate())
class GateOfEachFeature(Four):
    def __init__(self) -> None:
        super().__init__()
        self.g = nn.Linear(MODEL, MODEL)

    def forward(self, x: Tensor) -> Tensor:
        return self.o(join(attend(split(self.q(x)), split(self.k(x)), split(self.v(x)))) * F.silu(self.g(x)))


@case(
    Core(rows("q.weight"), rows("k.weight"), None, None, free=("value", "output")),
    may_refuse="average|added|sum|values",
)
class ValuesThroughAShortcut(Four):
    """Values are added to what attention gives."""

    def forward(self, x: Tensor) -> Tensor:
        v = split(self.v(x))
        return self.o(join(attend(split(self.q(x)), split(self.k(x)), v) + v))


@case(separate())
class ScaledInTwoPlaces(Four):
    def forward(self, x: Tensor) -> Tensor:
        q, k = (split(m(x)) * WIDTH**-0.25 for m in (self.q, self.k))
        return self.o(join(torch.softmax(q @ k.mT, -1) @ split(self.v(x))))


@case(
    Core(
        rows("q.weight", "(h r d) c", n_r=2, r=0), rows("k.weight", "(h r d) c", n_r=2, r=0), rows("v.weight"),
        rows("o.weight", "c (h d)"),
    ),
    refused="two softmax|softmaxes|difference|differen|several|second|two weights",
)  # fmt: skip
class Differential(Four):
    """The difference of two softmaxes: half of the rows is half of a head."""

    def __init__(self) -> None:
        super().__init__(q=2 * MODEL, k=2 * MODEL)
        self.share = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        (q1, q2), (k1, k2) = (split(m(x)).chunk(2, -1) for m in (self.q, self.k))
        first, second = (F.softmax(q @ k.mT / WIDTH**0.5, -1) for q, k in ((q1, k1), (q2, k2)))
        return self.o(join((first - self.share * second) @ split(self.v(x))))


@case(separate(), may_refuse="additive|product|sum|tanh|activation")
class Additive(Four):
    """Bahdanau, of several heads: no product of queries and keys."""

    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Parameter(torch.randn(H, 1, 1, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        q, k = split(self.q(x))[:, :, :, None], split(self.k(x))[:, :, None]
        weights = (torch.tanh(q + k) * self.score).sum(-1).softmax(-1)
        return self.o(join(weights @ split(self.v(x))))


@case(separate(), may_refuse="distance|product|square")
class Distances(Four):
    """Scores are negative squared distances."""

    def forward(self, x: Tensor) -> Tensor:
        scores = -torch.cdist(split(self.q(x)), split(self.k(x))).square()
        return self.o(join(scores.softmax(-1) @ split(self.v(x))))


@case(separate(), may_refuse="product|sum")
class ProductByHand(Four):
    """Products of queries and keys as a sum of elementwise products."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = split(self.q(x)), split(self.k(x)), split(self.v(x))
        scores = (q[:, :, :, None] * k[:, :, None]).sum(-1)
        return self.o(join((scores.softmax(-1)[..., None] * v[:, :, None]).sum(-2)))


# No softmax over tokens


@case(none=True)
class LinearAttention(Four):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = F.elu(split(self.q(x))) + 1, F.elu(split(self.k(x))) + 1, split(self.v(x))
        return self.o(join(q @ (k.mT @ v) / (q @ k.sum(-2, keepdim=True).mT)))


@case(none=True)
class LinearAttentionQuadratic(Four):
    """The weights are there, and no softmax made them."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = F.elu(split(self.q(x))) + 1, F.elu(split(self.k(x))) + 1, split(self.v(x))
        weights = (q @ k.mT).tril()
        return self.o(join(weights / weights.sum(-1, keepdim=True) @ v))


@case(none=True)
class SigmoidAttention(Four):
    def forward(self, x: Tensor) -> Tensor:
        return self.o(join(torch.sigmoid(split(self.q(x)) @ split(self.k(x)).mT - 2.0) @ split(self.v(x))))


@case(none=True)
class Retention(Four):
    def forward(self, x: Tensor) -> Tensor:
        at = torch.arange(x.shape[1], device=x.device, dtype=x.dtype)
        decay = (0.9 ** (at[:, None] - at[None])).tril()
        return self.o(join(split(self.q(x)) @ split(self.k(x)).mT * decay @ split(self.v(x))))


@case(none=True)
class SoftmaxOverFeatures(Four):
    def forward(self, x: Tensor) -> Tensor:
        q, k = split(self.q(x)).softmax(-1), split(self.k(x)).softmax(-1)
        return self.o(join(q @ (k.mT @ split(self.v(x)))))


@case(none=True)
class ChannelAttention(Four):
    """XCA: channels attend to channels."""

    def forward(self, x: Tensor) -> Tensor:
        q, k = (F.normalize(split(m(x)), dim=-2) for m in (self.q, self.k))
        weights = (q.mT @ k).softmax(-1)
        return self.o(join((weights @ split(self.v(x)).mT).mT))


@case(none=True)
class Router(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(MODEL, H)
        self.experts = nn.ModuleList(nn.Linear(MODEL, MODEL) for _ in range(H))

    def forward(self, x: Tensor) -> Tensor:
        weights = self.gate(x).softmax(-1)
        return sum(weights[..., i, None] * expert(x) for i, expert in enumerate(self.experts))  # type: ignore[return-value]


@case(none=True)
class AttentionInNameOnly(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(MODEL, MODEL) for _ in range(3))
        self.num_heads = H

    def forward(self, x: Tensor) -> Tensor:
        return self.query(x) * torch.sigmoid(self.key(x)) + self.value(x)


@case(none=True)
class SqueezeAndExcite(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(MODEL, 6), nn.Linear(6, MODEL)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.up(F.relu(self.down(x.mean(1, keepdim=True)))).softmax(-1)


# What the weights are made of


@case(separate(), convert=lambda m: m.half(), cast=torch.float16)
class HalfPrecision(Four):
    def forward(self, x: Tensor) -> Tensor:
        return self.o(join(attend(split(self.q(x)), split(self.k(x)), split(self.v(x)))))


@case(fused(), convert=lambda m: m.bfloat16(), cast=torch.bfloat16)
class BFloat(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.o = nn.Linear(MODEL, 3 * MODEL), nn.Linear(MODEL, MODEL)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split(t) for t in self.qkv(x).chunk(3, -1))
        return self.o(join(F.scaled_dot_product_attention(q, k, v)))


@case(separate(), convert=lambda m: m.double(), cast=torch.float64)
class DoublePrecision(Four):
    def forward(self, x: Tensor) -> Tensor:
        return self.o(join(attend(split(self.q(x)), split(self.k(x)), split(self.v(x)))))


@case(separate(), convert=lambda m: m.to("meta"), may_refuse="meta")
class OnMeta(Four):
    def forward(self, x: Tensor) -> Tensor:
        return self.o(join(attend(split(self.q(x)), split(self.k(x)), split(self.v(x)))))


@case(separate(), convert=torch.jit.script, may_refuse="script")
class Scripted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(24, 24) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        B, N, C = x.shape
        q = self.q(x).view(B, N, 4, 6).transpose(1, 2)
        k = self.k(x).view(B, N, 4, 6).transpose(1, 2)
        v = self.v(x).view(B, N, 4, 6).transpose(1, 2)
        weights = torch.softmax(torch.matmul(q, k.transpose(2, 3)), dim=-1)
        return self.o(torch.matmul(weights, v).transpose(1, 2).reshape(B, N, C))


def _quantised(module: nn.Module) -> nn.Module:
    return torch.ao.quantization.quantize_dynamic(module, {nn.Linear}, dtype=torch.qint8)  # type: ignore[no-any-return]


@case(separate(), convert=_quantised, may_refuse="quanti|int8|packed|without a matrix")
class DynamicInt8(Four):
    def forward(self, x: Tensor) -> Tensor:
        return self.o(join(attend(split(self.q(x)), split(self.k(x)), split(self.v(x)))))


@case(separate(), convert=lambda m: nn.utils.parametrizations.weight_norm(m.k) and m, may_refuse="parametri")
class WeightNorm(Four):
    def forward(self, x: Tensor) -> Tensor:
        return self.o(join(attend(split(self.q(x)), split(self.k(x)), split(self.v(x)))))
