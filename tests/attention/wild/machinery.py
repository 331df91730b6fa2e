"""What stands between a weight and what is computed: updates, rounding, norms of weights, calls, own kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.attention.wild.idioms import attend, join, split
from tests.attention.wild.plain import Four
from tests.attention.wild.truth import MODEL, WIDTH, Core, H, case, rows, separate


def _computed(weight: str = "weight", **options: Any) -> Core:
    """Three maps that multiply with a matrix which they compute."""
    inputs = (rows(f"{role}.{weight}", computed=role) for role in "qkv")
    return Core(*inputs, rows("o.weight", "c (h d)"), **options)


class LoRALinear(nn.Module):
    """A map and an update of low rank beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(MODEL, MODEL)
        self.a, self.b = nn.Linear(MODEL, 3, bias=False), nn.Linear(3, MODEL, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 0.5 * self.b(self.a(x))

    def matrix(self) -> Tensor:
        return self.base.weight + 0.5 * self.b.weight @ self.a.weight


class LoRAInWeights(nn.Linear):
    """A map whose weight is the sum of a frozen one and an update."""

    def __init__(self) -> None:
        super().__init__(MODEL, MODEL)
        self.a, self.b = nn.Parameter(torch.randn(3, MODEL)), nn.Parameter(torch.randn(MODEL, 3))
        self.weight.requires_grad = False

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.matrix(), self.bias)

    def matrix(self) -> Tensor:
        return self.weight + self.b @ self.a


class Rounded(nn.Linear):
    """A map with rounded weights, and gradients that pass (quantisation-aware training)."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.matrix(), self.bias)

    def matrix(self) -> Tensor:
        scale = self.weight.abs().amax() / 127
        return self.weight + ((self.weight / scale).round() * scale - self.weight).detach()


class BitLinear(nn.Linear):
    """Ternary weights behind a norm of the input (BitNet)."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.rms_norm(x, (x.shape[-1],)), self.matrix(), self.bias)

    def matrix(self) -> Tensor:
        scale = 1.0 / self.weight.abs().mean().clamp(min=1e-5)
        weight = (self.weight * scale).round().clamp(-1, 1) / scale
        return self.weight + (weight - self.weight).detach()


class FromAnEmbedding(nn.Module):
    """A map whose weight another map makes of a learned vector."""

    def __init__(self) -> None:
        super().__init__()
        self.z, self.make = nn.Parameter(torch.randn(5)), nn.Linear(5, MODEL * MODEL)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.make(self.z).view(MODEL, MODEL))


class _Softmaxed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = torch.softmax(q @ k.mT * q.shape[-1] ** -0.5, -1)
        ctx.save_for_backward(q, k, v, weights)
        return weights @ v

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, weights = ctx.saved_tensors
        dv = weights.mT @ grad
        dp = grad @ v.mT
        ds = weights * (dp - (dp * weights).sum(-1, keepdim=True)) * q.shape[-1] ** -0.5
        return ds @ k, ds.mT @ q, dv


class _With(nn.Module):
    """Four maps of a class."""

    def __init__(self, make: type[nn.Module]) -> None:
        super().__init__()
        arguments = () if make in (LoRALinear, LoRAInWeights, FromAnEmbedding) else (MODEL, MODEL)
        self.q, self.k, self.v = (make(*arguments) for _ in range(3))
        self.o = nn.Linear(MODEL, MODEL)

    def forward(self, x: Tensor) -> Tensor:
        return self.o(join(attend(split(self.q(x)), split(self.k(x)), split(self.v(x)))))


@case(_computed("base.weight"))
class LoRABeside(_With):
    def __init__(self) -> None:
        super().__init__(LoRALinear)


@case(_computed())
class LoRAInside(_With):
    def __init__(self) -> None:
        super().__init__(LoRAInWeights)


@case(_computed())
class QuantisationAware(_With):
    def __init__(self) -> None:
        super().__init__(Rounded)


@case(_computed(proved=("output",)))
class TernaryWeights(_With):
    def __init__(self) -> None:
        super().__init__(BitLinear)


@case(Core(None, None, None, rows("o.weight", "c (h d)")), may_refuse="weights of its key projection are computed by")
class Hypernetwork(_With):
    def __init__(self) -> None:
        super().__init__(FromAnEmbedding)


@case(separate())
class OwnBackward(Four):
    """Attention with a backward of its own."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split(m(x)) for m in (self.q, self.k, self.v))
        return self.o(join(_Softmaxed.apply(q, k, v)))


@case(separate())
class ReentrantCheckpoint(Four):
    """The older way of checkpointing, which runs without gradients first."""

    def _attend(self, x: Tensor) -> Tensor:
        return join(attend(split(self.q(x)), split(self.k(x)), split(self.v(x))))

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            x = x.requires_grad_() if not x.requires_grad and x.is_leaf else x
            return self.o(checkpoint(self._attend, x, use_reentrant=True))
        return self.o(self._attend(x))


@case(separate())
class KernelUnderCheckpointing(Four):
    """The scores alone are recomputed."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split(m(x)) for m in (self.q, self.k, self.v))
        return self.o(join(checkpoint(attend, q, k, v, use_reentrant=False)))


@case(separate())
class UnderAutocast(Four):
    def forward(self, x: Tensor) -> Tensor:
        kind = x.dtype
        with torch.autocast("cpu", torch.bfloat16, enabled=kind == torch.float32):
            return self.o(join(attend(split(self.q(x)), split(self.k(x)), split(self.v(x))))).to(kind)


@case(separate())
class AutocastOffForScores(Four):
    """Mixed precision, and scores in full."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=x.dtype == torch.float32):
            q, k, v = (split(m(x)) for m in (self.q, self.k, self.v))
            with torch.autocast("cpu", enabled=False):
                kind = torch.float64 if x.dtype == torch.float64 else torch.float32
                weights = (q.to(kind) @ k.to(kind).mT / WIDTH**0.5).softmax(-1)
            return self.o(join(weights.to(v.dtype) @ v)).to(x.dtype)


@case(
    Core(rows("q.weight"), rows("k.weight"), rows("v.weight"), rows("o.weight", "c (h d)"), free=("key",)),
    convert=lambda m: nn.utils.parametrizations.spectral_norm(m.k) and m,
)
class SpectralNorm(Four):
    def forward(self, x: Tensor) -> Tensor:
        return self.o(join(attend(split(self.q(x)), split(self.k(x)), split(self.v(x)))))


@case(separate(), convert=lambda m: torch.compile(m, backend="eager"), may_refuse="compile")
class Compiled(Four):
    def forward(self, x: Tensor) -> Tensor:
        return self.o(join(attend(split(self.q(x)), split(self.k(x)), split(self.v(x)))))


@case(separate(), convert=lambda m: m.compile(backend="eager") or m, may_refuse="compile")
class CompiledInPlace(Four):
    def forward(self, x: Tensor) -> Tensor:
        return self.o(join(attend(split(self.q(x)), split(self.k(x)), split(self.v(x)))))


@case(
    Core(rows("q_w"), rows("k_w"), rows("v_w"), rows("o.weight", "c (h d)"), scores="(b h) q k", query_token=None),
    may_refuse="functional",
)
class TorchFunctionWithSeparateWeights(nn.Module):
    """torch's own function, given three weights."""

    def __init__(self) -> None:
        super().__init__()
        self.q_w, self.k_w, self.v_w = (nn.Parameter(torch.randn(MODEL, MODEL)) for _ in range(3))
        self.bias, self.o = nn.Parameter(torch.zeros(3 * MODEL)), nn.Linear(MODEL, MODEL)

    def forward(self, x: Tensor) -> Tensor:
        y = x.transpose(0, 1)
        out, _ = F.multi_head_attention_forward(
            y, y, y, MODEL, H, None, self.bias, None, None, False, 0.0, self.o.weight, self.o.bias,
            training=self.training, need_weights=True, use_separate_proj_weight=True,
            q_proj_weight=self.q_w, k_proj_weight=self.k_w, v_proj_weight=self.v_w,
        )  # fmt: skip
        return out.transpose(0, 1)


@case(separate(), may_refuse="functional|another")
class FunctionalCall(nn.Module):
    """The module is called with parameters that are handed in."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(MODEL, MODEL) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        call = torch.func.functional_call
        out = [split(call(one, dict(one.named_parameters()), (x,))) for one in (self.q, self.k, self.v)]
        return self.o(join(attend(*out)))


@case(
    Core(rows("q", "h d c"), rows("k", "h d c"), rows("v", "h d c"), rows("o.weight", "c (h d)"), proved=()),
    may_refuse="in a way that is not followed|not by a linear map|transform of torch.func",
)
class MappedOverHeads(nn.Module):
    """One head is written, and `vmap` makes all of it."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Parameter(torch.randn(H, WIDTH, MODEL)) for _ in range(3))
        self.o = nn.Linear(MODEL, MODEL)

    def forward(self, x: Tensor) -> Tensor:
        def head(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return attend(x @ q.mT, x @ k.mT, x @ v.mT)

        out = torch.vmap(head)(self.q, self.k, self.v)
        return self.o(out.permute(1, 2, 0, 3).flatten(2))


@case(separate(), may_refuse="could not be run by itself")
class Packed(Four):
    """Sequences of several lengths in one nested tensor."""

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype == torch.float64:  # for the proof
            return self.o(join(F.scaled_dot_product_attention(split(self.q(x)), split(self.k(x)), split(self.v(x)))))
        nested = torch.nested.nested_tensor([x[0], x[1][:5]], layout=torch.jagged)
        q, k, v = (m(nested).unflatten(-1, (H, WIDTH)).transpose(1, 2) for m in (self.q, self.k, self.v))
        out = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2)
        return self.o(out).to_padded_tensor(0.0)


@case(
    Core(
        *(tuple(rows(f"heads.{i}.{r}.weight", "d c") for i in range(H)) for r in range(3)),
        rows("o.weight", "c (h d)"), loop=True,
    ),
)  # fmt: skip
class HeadsInAListOfLists(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.ModuleList(nn.Linear(MODEL, WIDTH) for _ in range(3)) for _ in range(H))
        self.o = nn.Linear(MODEL, MODEL)

    def forward(self, x: Tensor) -> Tensor:
        return self.o(torch.cat([attend(q(x), k(x), v(x)) for q, k, v in self.heads], -1))


@case(
    Core(rows("o.weight", "c (h d)"), rows("o.weight", "c (h d)"), None, None, loop=True),
    refused="an input of its own",
)  # fmt: skip
class HeadsOfPartsOfTheInput(nn.Module):
    """A list of heads, each of which takes a part of the features alone."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3)) for _ in range(H))
        self.o = nn.Linear(MODEL, MODEL)

    def forward(self, x: Tensor) -> Tensor:
        parts = zip(self.heads, x.chunk(H, -1))
        return self.o(torch.cat([attend(q(one), k(one), v(one)) for (q, k, v), one in parts], -1))


@case(
    Core(rows("o.weight", "c (h d)"), rows("o.weight", "c (h d)"), None, None, loop=True),
    refused="an input of its own",
)  # fmt: skip
class HeadsInACascade(nn.Module):
    """A head takes its part of the features, and what the head before gave (EfficientViT)."""

    def __init__(self) -> None:
        super().__init__()
        self.qkvs = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(H))
        self.o = nn.Linear(MODEL, MODEL)

    def forward(self, x: Tensor) -> Tensor:
        out: list[Tensor] = []
        for qkv, part in zip(self.qkvs, x.chunk(H, -1)):
            q, k, v = qkv(part if not out else part + out[-1]).chunk(3, -1)
            out.append(attend(q, k, v))
        return self.o(torch.cat(out, -1))


@case(
    Core(rows("o.weight", "c (h d)"), rows("o.weight", "c (h d)"), None, None, loop=True),
    refused="an input of its own|two projections in a row",
)  # fmt: skip
class HeadsOfInputsOfTheirOwn(nn.Module):
    """Each head takes a view of its own of the input, as wide as the model."""

    def __init__(self) -> None:
        super().__init__()
        self.views = nn.ModuleList(nn.Sequential(nn.Linear(MODEL, MODEL), nn.GELU()) for _ in range(H))
        self.heads = nn.ModuleList(nn.ModuleList(nn.Linear(MODEL, WIDTH) for _ in range(3)) for _ in range(H))
        self.o = nn.Linear(MODEL, MODEL)

    def forward(self, x: Tensor) -> Tensor:
        out = []
        for view, (q, k, v) in zip(self.views, self.heads):
            y = view(x)
            out.append(attend(q(y), k(y), v(y)))
        return self.o(torch.cat(out, -1))


@case(Core(rows("w.0"), rows("w.1"), rows("w.2"), rows("w.3", "c (h d)")))
class MapsInParameters(nn.Module):
    """Weights lie in a list of parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.ParameterList(nn.Parameter(torch.randn(MODEL, MODEL)) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split(x @ w.t()) for w in list(self.w)[:3])
        return join(attend(q, k, v)) @ self.w[3].t()
