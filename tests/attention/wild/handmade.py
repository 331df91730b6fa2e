"""Weights that are no plain maps: kept in one vector, updated by hand, rounded, factored, tied, mapped and plumbed."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

from tests.attention.wild.idioms import attend, join, rotate_half, split
from tests.attention.wild.plain import Four
from tests.attention.wild.truth import MODEL, WIDTH, Core, H, case, fused, rows, separate


def _computed(matrix_of: str, pattern: str = "(h d) c", **options: Any) -> Any:
    """A matrix that a module computes, in the shape of another parameter, which is not what is multiplied with."""
    return rows("o.weight", pattern, computed=matrix_of, **options)


@case(
    Core(*(rows("theta", "(r h d c)", n_r=4, n_c=24, r=r) for r in range(3)),
         rows("theta", "(r c h d)", n_r=4, n_c=24, r=3)),
    may_refuse="a matrix that is not a parameter",
)  # fmt: skip
class OneFlatVector(nn.Module):
    """All weights lie in one vector, as in evolution strategies and hand-made optimisers."""

    def __init__(self) -> None:
        super().__init__()
        self.theta = nn.Parameter(torch.empty(4 * 24 * 24))

    def forward(self, x: Tensor) -> Tensor:
        wq, wk, wv, wo = (one.view(24, 24) for one in self.theta.split(24 * 24))
        return F.linear(join(attend(*(split(F.linear(x, w)) for w in (wq, wk, wv)))), wo)


class _Conv1D(nn.Module):
    """GPT-2's map: a matrix that is stored as it is multiplied with."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf = nf
        self.weight, self.bias = nn.Parameter(torch.empty(nx, nf)), nn.Parameter(torch.zeros(nf))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view((*x.size()[:-1], self.nf))


@case(
    Core(*(rows("c_attn.weight", "c (r h d)", n_r=3, r=r) for r in range(3)), rows("c_proj.weight", "(h d) c"),
         rounds=2, heads_alone=True, proved=("query", "key")),
)  # fmt: skip
class CacheOfLayers(nn.Module):
    """GPT-2 with `layer_past`: a prompt is read, then its continuation, by the same maps."""

    def __init__(self) -> None:
        super().__init__()
        self.c_attn, self.c_proj = _Conv1D(72, 24), _Conv1D(24, 24)
        self.register_buffer("bias", torch.tril(torch.ones(32, 32, dtype=torch.bool)).view(1, 1, 32, 32))

    def attn(self, x: Tensor, layer_past: Tensor | None = None) -> tuple[Tensor, Tensor]:
        query, key, value = (split(t) for t in self.c_attn(x).split(24, dim=2))
        if layer_past is not None:
            key, value = (torch.cat((past, t), dim=-2) for past, t in zip(layer_past.unbind(0), (key, value)))
        present = torch.stack((key, value))
        nd, ns = query.size(-2), key.size(-2)
        weights = torch.matmul(query, key.transpose(-1, -2)) / math.sqrt(WIDTH)
        weights = torch.where(self.bias[:, :, ns - nd : ns, :ns], weights, torch.finfo(weights.dtype).min)
        return self.c_proj(join(weights.softmax(-1) @ value)), present

    def forward(self, x: Tensor) -> Tensor:
        first, past = self.attn(x[:, :5].contiguous())
        second, _ = self.attn(x[:, 5:].contiguous(), layer_past=past)
        return torch.cat((first, second), 1)


class _UpdatedInParts(nn.Module):
    """Low-rank updates of queries and values, added to parts of what one map gives."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(24, 72)
        self.a_q, self.b_q = nn.Linear(24, 3, bias=False), nn.Linear(3, 24, bias=False)
        self.a_v, self.b_v = nn.Linear(24, 3, bias=False), nn.Linear(3, 24, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(x)
        qkv[:, :, :24] += self.b_q(self.a_q(x))
        qkv[:, :, -24:] += self.b_v(self.a_v(x))
        return qkv

    def matrix(self) -> Tensor:
        nothing = torch.zeros(24, 24, dtype=self.qkv.weight.dtype)
        return self.qkv.weight + torch.cat(
            [self.b_q.weight @ self.a_q.weight, nothing, self.b_v.weight @ self.a_v.weight]
        )


@case(
    Core(*(rows("qkv.qkv.weight", "(r h d) c", n_r=3, r=r, computed="qkv") for r in range(3)),
         rows("proj.weight", "c (h d)"), scores="(b h) q k"),
)  # fmt: skip
class UpdatesInPlace(nn.Module):
    """LoRA for SAM: the map is replaced by one that adds updates in place to the parts of queries and of values."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = _UpdatedInParts(), nn.Linear(24, 24)

    def forward(self, x: Tensor) -> Tensor:
        B, N, _ = x.shape
        q, k, v = self.qkv(x).reshape(B, N, 3, H, -1).permute(2, 0, 3, 1, 4).reshape(3, B * H, N, -1).unbind(0)
        attn = ((q * WIDTH**-0.5) @ k.transpose(-2, -1)).softmax(dim=-1)
        return self.proj((attn @ v).view(B, H, N, -1).permute(0, 2, 1, 3).reshape(B, N, -1))


@case(separate())
class VectorsOfScales(Four):
    """IA3: learned vectors scale keys and values, feature by feature."""

    def __init__(self) -> None:
        super().__init__()
        self.l_k, self.l_v = nn.Parameter(torch.ones(MODEL)), nn.Parameter(torch.ones(MODEL))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = split(self.q(x)), split(self.k(x) * self.l_k), split(self.v(x) * self.l_v)
        return self.o(join(F.scaled_dot_product_attention(q, k, v)))


class _DoRA(nn.Linear):
    """The direction of a weight with an update, and a length of its own for each row."""

    def __init__(self) -> None:
        super().__init__(24, 24, bias=False)
        self.weight.requires_grad = False
        self.a, self.b = nn.Parameter(torch.empty(3, 24)), nn.Parameter(torch.empty(24, 3))
        self.magnitude = nn.Parameter(torch.ones(24))

    def matrix(self) -> Tensor:
        new = self.weight + 2.0 * self.b @ self.a
        return (self.magnitude / new.norm(dim=1).detach()).view(-1, 1) * new

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.matrix())


class _Int8(nn.Module):
    """Whole numbers with a scale for each row, made to floats when they are used."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        values = torch.randint(-127, 128, (24, 24), generator=torch.Generator().manual_seed(seed)).to(torch.int8)
        self.weight = nn.Parameter(values, requires_grad=False)
        self.scale = nn.Parameter(torch.ones(24, 1), requires_grad=False)

    def matrix(self) -> Tensor:
        return self.weight.to(self.scale.dtype) * self.scale / 127

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.matrix().to(x.dtype).t()


class _LowRank(nn.Module):
    """Two factors in place of a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(24, 8, bias=False), nn.Linear(8, 24)

    def matrix(self) -> Tensor:
        return self.up.weight @ self.down.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.up(self.down(x))


class _Kronecker(nn.Module):
    """A sum of Kronecker products (compacter, hypercomplex maps)."""

    def __init__(self) -> None:
        super().__init__()
        self.rule, self.small = nn.Parameter(torch.empty(4, 4, 4)), nn.Parameter(torch.empty(4, 6, 6))

    def matrix(self) -> Tensor:
        return torch.stack([torch.kron(a, b) for a, b in zip(self.rule, self.small)]).sum(0)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.matrix())


class _Symmetric(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.triu() + x.triu(1).transpose(-1, -2)


class _Parametrized(nn.Linear):
    def __init__(self) -> None:
        super().__init__(24, 24)
        parametrize.register_parametrization(self, "weight", _Symmetric())

    def matrix(self) -> Tensor:
        return self.weight


class _Mixed(nn.Module):
    """A sum of the matrices of experts, with weights that are learned (as merged models are searched)."""

    def __init__(self) -> None:
        super().__init__()
        self.experts, self.alpha = nn.Parameter(torch.empty(3, 24, 24)), nn.Parameter(torch.ones(3))

    def matrix(self) -> Tensor:
        return torch.einsum("e,eoi->oi", self.alpha.softmax(0), self.experts)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.matrix().mT


def _made(make: Any) -> Any:
    class Made(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v = (make(i) for i in range(3))
            self.o = nn.Linear(24, 24)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = split(self.q(x)), split(self.k(x)), split(self.v(x))
            return self.o(join(F.scaled_dot_product_attention(q, k, v, is_causal=True)))

    return Made


_BY_MATRICES = Core(_computed("q"), _computed("k"), _computed("v"), rows("o.weight", "c (h d)"), proved=("output",))


@case(_BY_MATRICES)
class DirectionsAndLengths(_made(lambda i: _DoRA())):  # type: ignore[misc]
    """DoRA, by hand."""


@case(_BY_MATRICES, may_refuse="without a matrix that is read")
class WholeNumbers(_made(_Int8)):  # type: ignore[misc]
    """Weights of eight bits, made to floats when they are used."""


@case(_BY_MATRICES)
class FactoredMaps(_made(lambda i: _LowRank())):  # type: ignore[misc]
    """Each map is a product of two narrow ones."""


@case(_BY_MATRICES, may_refuse="not by a linear map|several maps")
class KroneckerMaps(_made(lambda i: _Kronecker())):  # type: ignore[misc]
    """Each matrix is a sum of Kronecker products."""


@case(_BY_MATRICES)
class SymmetricByParametrization(_made(lambda i: _Parametrized())):  # type: ignore[misc]
    """Each matrix is symmetric by a parametrization of its own."""


@case(replace(_BY_MATRICES, number=3), may_refuse="not by a linear map|several maps|are computed by")
class MixedMatrices(_made(lambda i: _Mixed())):  # type: ignore[misc]
    """Each matrix is a learned mixture of several."""


@case(separate(heads_alone=True), may_refuse="pre-hook|forward hook|hook")
class PositionsByAPreHook(Four):
    """Positions reach queries and keys by hooks in front of their maps."""

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Parameter(torch.randn(7, MODEL) / 5)
        for one in (self.q, self.k):
            one.register_forward_pre_hook(lambda module, args: (args[0] + self.places.detach(),))

    def forward(self, x: Tensor) -> Tensor:
        return self.o(join(attend(split(self.q(x)), split(self.k(x)), split(self.v(x)))))


@torch.compile(backend="eager")
def _compiled_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.einsum("bhqd,bhkd->bhqk", q, k) * q.shape[-1] ** -0.5
    return torch.einsum("bhqk,bhkd->bhqd", scores.softmax(-1), v)


@case(separate(proved=()))
class CompiledInside(Four):
    """The function that computes scores is compiled, the module is not."""

    def forward(self, x: Tensor) -> Tensor:
        return self.o(join(_compiled_attention(split(self.q(x)), split(self.k(x)), split(self.v(x)))))


@case(separate(proved=()), may_refuse="flex", convert=lambda m: m.requires_grad_(False))
class FlexAttention(Four):
    """torch's flexible kernel, with a function that changes scores; frozen, as it has no backward on a CPU."""

    def forward(self, x: Tensor) -> Tensor:
        from torch.nn.attention.flex_attention import flex_attention

        def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return torch.where(q_idx >= kv_idx, score, -float("inf"))

        return self.o(join(flex_attention(split(self.q(x)), split(self.k(x)), split(self.v(x)), score_mod=score_mod)))


@case(separate(rounds=1))
class CheckpointedOverArguments(Four):
    """Scores and values in a checkpointed closure over tensors of the module's forward."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split(m(x)) for m in (self.q, self.k, self.v))

        def core(*tensors: Tensor) -> Tensor:
            return (tensors[0] @ tensors[1].mT * WIDTH**-0.5).softmax(dim=-1) @ tensors[2]

        out = checkpoint(core, rotate_half(q), rotate_half(k), v, use_reentrant=False, preserve_rng_state=False)
        return self.o(join(out))


@dataclass
class _Output:
    last_hidden_state: Tensor
    attentions: Tensor | None = None


class _Config(NamedTuple):
    hidden_size: int = MODEL
    heads: int = H


@case(fused("in_proj.weight", "(r h d) c", "out_proj.weight", order="vqk"))
class PlumbedThrough(nn.Module):
    """Arguments by `*args` and `**kwargs`, a configuration as a tuple, an output as a dataclass, values first."""

    def __init__(self, config: _Config = _Config()) -> None:  # noqa: B008
        super().__init__()
        self.config = config
        self.in_proj = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.out_proj = nn.Linear(config.hidden_size, config.hidden_size)

    def _project(self, *args: Any) -> tuple[Tensor, ...]:
        (x,) = args
        return tuple(
            t.unflatten(-1, (self.config.heads, -1)).movedim(-2, -3) for t in self.in_proj(x).tensor_split(3, -1)
        )

    def _attend(self, **kwargs: Any) -> _Output:
        v, q, k = kwargs["projected"]
        weights = torch.nn.functional.softmax(torch.matmul(q, k.swapaxes(-1, -2)).div(k.size(-1) ** 0.5), dim=-1)
        return _Output(self.out_proj(torch.matmul(weights, v).movedim(-3, -2).flatten(-2)), weights)

    def forward(self, *args: Any, **kwargs: Any) -> _Output:
        return self._attend(projected=self._project(*args), **kwargs)


@case(
    separate("self_attn.q", "self_attn.k", "self_attn.v", "self_attn.o"),
    may_refuse="functional|another|not by a linear map",
)
class CalledWithOtherWeights(nn.Module):
    """A step of MAML: the whole layer is called with weights that a step of gradient descent has changed."""

    def __init__(self) -> None:
        super().__init__()
        self.self_attn = _Inner()

    def forward(self, x: Tensor) -> Tensor:
        fast = {name: weight * 1.0 for name, weight in self.self_attn.named_parameters()}
        return torch.func.functional_call(self.self_attn, fast, (x,))


class _Inner(Four):
    def forward(self, x: Tensor) -> Tensor:
        return self.o(join(attend(split(self.q(x)), split(self.k(x)), split(self.v(x)))))


@case(separate())
class RoundedToBrainFloats(Four):
    """Maps in full, scores in bfloat16 without autocast, a softmax in full, as memory is saved by hand."""

    def forward(self, x: Tensor) -> Tensor:
        low = torch.float64 if x.dtype == torch.float64 else torch.bfloat16
        q, k, v = (split(m(x)).to(low) for m in (self.q, self.k, self.v))
        weights = (q @ k.mT * WIDTH**-0.5).to(x.dtype).softmax(-1).to(low)
        return self.o(join((weights @ v).to(x.dtype)))


@case(
    Core(*(rows(f"maps.{m}", "h c d") for m in ("q", "k", "v")), rows("maps.o", "h d c"), scores="(h b) q k"),
)
class BatchedProducts(nn.Module):
    """Stacks of matrices by `baddbmm`, with the heads in front of everything."""

    def __init__(self) -> None:
        super().__init__()
        self.maps = nn.ParameterDict({m: nn.Parameter(torch.empty(H, 24, WIDTH)) for m in "qkv"})
        self.maps["o"] = nn.Parameter(torch.empty(H, WIDTH, 24))
        self.biases = nn.ParameterDict({m: nn.Parameter(torch.zeros(H, 1, WIDTH)) for m in "qkv"})

    def forward(self, x: Tensor) -> Tensor:
        b, n, c = x.shape
        flat = x.reshape(1, b * n, c).expand(H, -1, -1)
        q, k, v = (torch.baddbmm(self.biases[m], flat, self.maps[m]).view(H * b, n, WIDTH) for m in "qkv")
        weights = torch.bmm(q, k.transpose(1, 2)).mul_(WIDTH**-0.5).softmax(-1)
        out = torch.bmm(weights, v).view(H, b * n, WIDTH)
        return torch.bmm(out, self.maps["o"]).sum(0).view(b, n, c)


@case(
    Core(*(rows(f"maps.{m}", "h c d") for m in "qkv"),
         tuple(rows("maps.o", "g d c", h=1, n_g=H, g=H - 1 - i) for i in range(H)), scores="(h b) q k"),
)  # fmt: skip
class HeadsTurnedRoundInFrontOfTheStack(BatchedProducts):
    """The outputs of heads are flipped before each meets a matrix of the last stack."""

    def forward(self, x: Tensor) -> Tensor:
        b, n, c = x.shape
        flat = x.reshape(1, b * n, c).expand(H, -1, -1)
        q, k, v = (torch.bmm(flat, self.maps[m]).view(H * b, n, WIDTH) for m in "qkv")
        out = torch.bmm((q @ k.mT * WIDTH**-0.5).softmax(-1), v).view(H, b * n, WIDTH)
        return torch.bmm(out.flip(0), self.maps["o"]).sum(0).view(b, n, c)


class _AdaptedInParts(_UpdatedInParts):
    """The same with a ReLU between the factors."""

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(x)
        qkv[:, :, :24] += self.b_q(F.relu(self.a_q(x)))
        qkv[:, :, -24:] += self.b_v(F.relu(self.a_v(x)))
        return qkv


@case(
    Core(None, rows("qkv.qkv.weight", "(r h d) c", n_r=3, r=1), rows("qkv.qkv.weight", "(r h d) c", n_r=3, r=2),
         rows("proj.weight", "c (h d)"), scores="(b h) q k", proved=("key", "output")),
    may_refuse="takes the output of another linear map",
)  # fmt: skip
class AdaptersInPlace(UpdatesInPlace):
    """What is added in place is no linear map, so that no matrix gives the queries and the values."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = _AdaptedInParts()
