"""How code is carried over and called: from JAX and MLX, by functions of torch, through tuples, hooks and wrappers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.attention.wild.idioms import attend, join, rotate_half, split
from tests.attention.wild.plain import Four
from tests.attention.wild.truth import WIDTH, Core, H, case, fused, rows, separate


@case(
    Core(rows("in_proj_weight", "(r h d) c", n_r=3, r=0), rows("in_proj_weight", "(r h d) c", n_r=3, r=1),
         rows("in_proj_weight", "(r h d) c", n_r=3, r=2), rows("out_proj.weight", "c (h d)"), scores="(b h) q k"),
    may_refuse="functional",
)  # fmt: skip
class TorchFunctionOfOneWeight(nn.Module):
    """fairseq: torch's own function, called with a packed weight, a padding mask and no weights asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.in_proj_weight, self.in_proj_bias = nn.Parameter(torch.empty(72, 24)), nn.Parameter(torch.zeros(72))
        self.out_proj = nn.Linear(24, 24)

    def forward(self, x: Tensor) -> Tensor:
        y = x.transpose(0, 1)
        padding = torch.zeros(x.shape[:2], dtype=torch.bool)
        out, _ = F.multi_head_attention_forward(
            y, y, y, 24, H, self.in_proj_weight, self.in_proj_bias, None, None, False, 0.0, self.out_proj.weight,
            self.out_proj.bias, self.training, padding, True, None,
        )  # fmt: skip
        return out.transpose(0, 1)


class _DenseGeneral(nn.Module):
    """Haiku's way: a `w` that is multiplied from the right, heads and widths in the shape of the output."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.empty(24, math.prod(shape)))
        self.b = nn.Parameter(torch.zeros(math.prod(shape)))
        self.shape = shape

    def __call__(self, x: Tensor) -> Tensor:
        return (torch.matmul(x, self.w) + self.b).reshape(*x.shape[:-1], *self.shape)


@case(
    Core(rows("query.w", "c (h d)"), rows("key.w", "c (h d)"), rows("value.w", "c (h d)"), rows("linear.w", "(h d) c")),
)
class FromHaiku(nn.Module):
    """hk.MultiHeadAttention, carried over line by line."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (_DenseGeneral(H, WIDTH) for _ in range(3))
        self.linear = _DenseGeneral(24)

    def forward(self, query: Tensor, mask: Tensor | None = None) -> Tensor:
        *leading_dims, sequence_length, _ = query.shape
        query_heads, key_heads, value_heads = self.query(query), self.key(query), self.value(query)
        attn_logits = torch.einsum("...thd,...Thd->...htT", query_heads, key_heads) * (1.0 / math.sqrt(WIDTH))
        if mask is not None:
            attn_logits = torch.where(mask, attn_logits, -1e30)
        attn = torch.einsum("...htT,...Thd->...thd", F.softmax(attn_logits, dim=-1), value_heads)
        return self.linear(torch.reshape(attn, (*leading_dims, sequence_length, -1)))


@case(separate("wq", "wk", "wv", "wo", keys=2))
class FromMLX(nn.Module):
    """mlx-lm: a cache that is None, `transpose(0, 2, 1, 3)`, masks by addition, groups by the kernel's broadcast."""

    def __init__(self) -> None:
        super().__init__()
        self.n_heads, self.n_kv_heads, self.scale = H, 2, WIDTH**-0.5
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(24, w, bias=False) for w in (24, 12, 12, 24))

    def forward(self, x: Tensor, mask: Tensor | None = None, cache: Any = None) -> Tensor:
        B, L, _ = x.shape
        queries = self.wq(x).reshape(B, L, self.n_heads, -1).permute(0, 2, 1, 3)
        keys, values = (m(x).reshape(B, L, self.n_kv_heads, -1).permute(0, 2, 1, 3) for m in (self.wk, self.wv))
        if cache is not None:
            keys, values = cache.update_and_fetch(keys, values)
        repeats = self.n_heads // self.n_kv_heads

        def repeat(a: Tensor) -> Tensor:
            return torch.cat([a.unsqueeze(2)] * repeats, dim=2).reshape(B, self.n_heads, L, -1)

        keys, values = map(repeat, (keys, values))
        scores = (queries * self.scale) @ keys.permute(0, 1, 3, 2)
        scores += torch.full((L, L), -1e9, dtype=x.dtype).triu(1)
        weights = torch.softmax(scores, dim=-1)
        return self.wo((weights @ values).permute(0, 2, 1, 3).reshape(B, L, -1))


@dataclass
class _Args:
    dim: int = 24
    n_heads: int = H
    use_bias: bool = False


class _Batch(NamedTuple):
    tokens: Tensor
    positions: Tensor


def _of_tuples(module: nn.Module, x: Tensor) -> Any:
    return module(inputs=_Batch(x, torch.arange(x.shape[1])), layer_kwargs={"scale": WIDTH**-0.5})


@case(fused("maps.in.weight", output="maps.out.weight", order="vqk"), call=_of_tuples)
class NamedTupleAndKwargs(nn.Module):
    """A dataclass configures, a named tuple comes in by keyword, maps lie in a dictionary, values come first."""

    def __init__(self, args: _Args = _Args()) -> None:  # noqa: B008
        super().__init__()
        self.args = args
        self.maps = nn.ModuleDict({"in": nn.Linear(args.dim, 3 * args.dim, args.use_bias), "out": nn.Linear(24, 24)})

    def forward(self, *, inputs: _Batch, layer_kwargs: Mapping[str, Any], **unused: Any) -> dict[str, Tensor]:
        v, q, k = torch.tensor_split(self.maps["in"](inputs.tokens), 3, dim=-1)
        return {"hidden": self.maps["out"](self._core(q, k, v, inputs.positions, **layer_kwargs))}

    def _core(self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, scale: float) -> Tensor:
        q, k, v = (split(t, self.args.n_heads) for t in (q, k, v))
        allowed = positions[:, None] >= positions
        scores = torch.where(allowed, q @ k.mT * scale, torch.tensor(float("-inf"), dtype=q.dtype))
        return join(F.softmax(scores, -1) @ v)


class _Scaled(torch.autograd.Function):
    """Scores with derivatives forward and back."""

    @staticmethod
    def forward(q: Tensor, k: Tensor) -> Tensor:
        return q @ k.mT / WIDTH**0.5

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        q, k = ctx.saved_tensors
        return grad @ k / WIDTH**0.5, grad.mT @ q / WIDTH**0.5


@case(separate())
class ScoresOfAFunction(Four):
    """A Function with a context of its own makes the scores; the rest is plain."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split(m(x)) for m in (self.q, self.k, self.v))
        return self.o(join(torch.softmax(_Scaled.apply(q, k), -1) @ v))


class _Eighths(nn.Linear):
    """A weight that is rounded to eight bits with a scale for the whole of it, as fp8 is tried out."""

    def matrix(self) -> Tensor:
        scale = self.weight.detach().abs().amax() / 448.0
        w8 = (self.weight / scale).to(torch.float8_e4m3fn).to(self.weight.dtype) * scale
        return self.weight + (w8 - self.weight).detach()

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight if x.dtype == torch.float64 else self.matrix(), self.bias)


@case(Core(*(rows(f"{m}.weight", computed=m) for m in "qkv"), rows("o.weight", "c (h d)", computed="o")))
class EightBitsInEachForward(nn.Module):
    """fp8 by hand: weights are cast and cast back when they are used."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (_Eighths(24, 24) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.o(join(attend(*(split(m(x)) for m in (self.q, self.k, self.v)))))


@case(
    Core(*(tuple(rows(f"{m}.{i}", "c d", h=1) for i in range(H)) for m in ("wq", "wk", "wv")), rows("wo", "(h d) c"),
         proved=()),
    may_refuse="not followed|not by a linear map",
)  # fmt: skip
class MatricesInLists(nn.Module):
    """A parameter for each head in lists, stacked when they are used; one matrix behind."""

    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wk, self.wv = (
            nn.ParameterList(nn.Parameter(torch.empty(24, WIDTH)) for _ in range(H)) for _ in range(3)
        )
        self.wo = nn.Parameter(torch.empty(24, 24))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (torch.einsum("bnc,hcd->bhnd", x, torch.stack(list(w))) for w in (self.wq, self.wk, self.wv))
        return join(attend(q, k, v)) @ self.wo


@case(
    Core(rows("wq", "h c d"), rows("wk", "h c d"), rows("wv", "h c d"), rows("wo", "h d c"), scores="h q k",
         proved=("query", "key")),
    inputs=("n c",),
)  # fmt: skip
class OneSequenceOfAMap(nn.Module):
    """Equinox: written for one token and one head, mapped over tokens and heads by nested `vmap`."""

    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wk, self.wv = (nn.Parameter(torch.empty(H, 24, WIDTH)) for _ in range(3))
        self.wo = nn.Parameter(torch.empty(H, WIDTH, 24))

    def forward(self, x: Tensor) -> Tensor:
        def project(w: Tensor) -> Tensor:
            return torch.vmap(lambda token: token @ w)(x)

        def weights(q: Tensor, k: Tensor) -> Tensor:
            return q @ k.T / math.sqrt(WIDTH)

        q, k, v = (torch.vmap(project)(w) for w in (self.wq, self.wk, self.wv))
        attn = torch.softmax(torch.vmap(weights)(q, k), dim=-1)
        out = torch.vmap(lambda a, v, w: a @ v @ w)(attn, v, self.wo)
        return out.sum(0)


def _sliding(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return (q_idx >= kv_idx) & (q_idx - kv_idx < 4)


@case(separate(proved=()), may_refuse="flex", convert=lambda m: m.requires_grad_(False))
class FlexWithABlockMask(Four):
    """flex_attention with a block mask that is kept, groups and a bias of heads that is a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("slopes", 2.0 ** -torch.arange(1.0, H + 1))

    def forward(self, x: Tensor) -> Tensor:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        mask = create_block_mask(_sliding, None, None, x.shape[1], x.shape[1], device=str(x.device))

        def alibi(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return score - self.slopes[h] * (q_idx - kv_idx)

        q, k, v = (split(m(x)) for m in (self.q, self.k, self.v))
        return self.o(join(flex_attention(rotate_half(q), rotate_half(k), v, score_mod=alibi, block_mask=mask)))


@case(
    Core(rows("to_qkv.weight", "(d h r) c", n_r=3, r=0, n_d=WIDTH), rows("to_qkv.weight", "(d h r) c", n_r=3, r=1,
         n_d=WIDTH), rows("to_qkv.weight", "(d h r) c", n_r=3, r=2, n_d=WIDTH), rows("to_out.weight", "c (d h)",
         n_d=WIDTH)),
)  # fmt: skip
class StridesOfEverything(nn.Module):
    """Roles lie innermost, heads next, taken by steps; outputs go back in the same order."""

    def __init__(self) -> None:
        super().__init__()
        self.to_qkv, self.to_out = nn.Linear(24, 72), nn.Linear(24, 24)

    def forward(self, x: Tensor) -> Tensor:
        flat = self.to_qkv(x)
        q, k, v = (flat[..., r::3] for r in range(3))
        q, k, v = (torch.stack([t[..., h::H] for h in range(H)], 1) for t in (q, k, v))
        out = attend(q, k, v)  # (b, h, n, d)
        return self.to_out(out.permute(0, 2, 3, 1).reshape(x.shape))


@case(separate("inner.q", "inner.k", "inner.v", "inner.o", takes=1), inputs=("b n c", "b m c"))
class WrappedTwice(nn.Module):
    """A pre-norm wrapper around a residual wrapper around attention, with `partial` and keywords of a caller."""

    class Inner(Four):
        def forward(self, x: Tensor, context: Tensor | None = None, mask: Tensor | None = None, **rest: Any) -> Tensor:
            context = x if context is None else context
            q, k, v = split(self.q(x)), split(self.k(context)), split(self.v(context))
            return self.o(join(F.scaled_dot_product_attention(q, k, v, attn_mask=mask)))

    def __init__(self) -> None:
        super().__init__()
        self.inner = self.Inner()

    def residual(self, fn: Any, x: Tensor, **kwargs: Any) -> Tensor:
        return x + fn(x, **kwargs)

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        return self.residual(partial(self.inner, context=context), x, mask=None)
