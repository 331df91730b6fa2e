"""How weights are kept and how modules are called, where it is not by a Linear in a forward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_sequence, pad_packed_sequence, pad_sequence
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from tests.attention.wild.idioms import angles, attend, join, split
from tests.attention.wild.plain import Four
from tests.attention.wild.truth import WIDTH, Core, H, case, fused, rows, separate


@case(Core(rows("wq", "c h d"), rows("wk", "c h d"), rows("wv", "c h d"), rows("wo", "h d c")))
class TensorDots(nn.Module):
    """Three axes in each weight, and `tensordot` to meet them."""

    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wk, self.wv = (nn.Parameter(torch.empty(24, H, WIDTH)) for _ in range(3))
        self.wo = nn.Parameter(torch.empty(H, WIDTH, 24))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (torch.tensordot(x, w, dims=([2], [0])).movedim(2, 1) for w in (self.wq, self.wk, self.wv))
        return torch.tensordot(attend(q, k, v), self.wo, dims=([1, 3], [0, 1]))


@case(
    *(Core(*(rows("w_in", "l r (h d) c", n_l=2, l=at, n_r=3, r=r, source=f"norms.{at}") for r in range(3)),
           rows("w_out", "l c (h d)", n_l=2, l=at), number=at, proved=("query", "key")) for at in range(2)),
)  # fmt: skip
class AllLayersInTwoParameters(nn.Module):
    """The layers of a model are the first axis of its weights, as a scan wants it."""

    def __init__(self) -> None:
        super().__init__()
        self.w_in, self.w_out = nn.Parameter(torch.empty(2, 3, 24, 24)), nn.Parameter(torch.empty(2, 24, 24))
        self.norms = nn.ModuleList(nn.LayerNorm(24) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for norm, w_in, w_out in zip(self.norms, self.w_in.unbind(0), self.w_out.unbind(0)):
            q, k, v = (split(F.linear(norm(x), w)) for w in w_in)
            x = x + F.linear(join(attend(q, k, v)), w_out)
        return x


@case(Core(rows("vars.0"), rows("vars.2"), rows("vars.4"), rows("vars.6", "c (h d)")))
class VariablesInOrder(nn.Module):
    """MAML: a list of parameters, taken two by two, or those that a caller passes."""

    def __init__(self) -> None:
        super().__init__()
        self.vars = nn.ParameterList()
        for _ in range(4):
            self.vars += [nn.Parameter(torch.empty(24, 24)), nn.Parameter(torch.zeros(24))]

    def forward(self, x: Tensor, vars: list[nn.Parameter] | None = None) -> Tensor:
        if vars is None:
            vars = self.vars  # type: ignore[assignment]
        at, made = 0, []
        for _ in range(3):
            w, b = vars[at], vars[at + 1]  # type: ignore[index]
            made.append(split(F.linear(x, w, b)))
            at += 2
        return F.linear(join(attend(*made)), vars[at], vars[at + 1])  # type: ignore[index]


class _Apart(nn.Module):
    def forward(self, three: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, ...]:
        return tuple(split(one) for one in three)


class _Weigh(nn.Module):
    def forward(self, three: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        q, k, v = three
        return torch.softmax(torch.einsum("bhqd,bhkd->bhqk", q, k) / WIDTH**0.5, -1), v


class _Sum(nn.Module):
    def forward(self, two: tuple[Tensor, Tensor]) -> Tensor:
        return join(torch.einsum("bhqk,bhkd->bhqd", *two))


class _Fork(nn.Module):
    def __init__(self, *maps: nn.Module) -> None:
        super().__init__()
        self.maps = nn.ModuleList(maps)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(one(x) for one in self.maps)


@case(separate("steps.0.maps.0", "steps.0.maps.1", "steps.0.maps.2", "steps.4"))
class StepsInARow(nn.Module):
    """A Sequential in which tuples are passed from step to step."""

    def __init__(self) -> None:
        super().__init__()
        maps = (nn.Linear(24, 24) for _ in range(3))
        self.steps = nn.Sequential(_Fork(*maps), _Apart(), _Weigh(), _Sum(), nn.Linear(24, 24))

    def forward(self, x: Tensor) -> Tensor:
        return self.steps(x)


class _Called(Four):
    """Overrides `__call__`: no hook of the layer runs."""

    def __call__(self, x: Tensor) -> Tensor:
        return self.o(join(attend(split(self.q(x)), split(self.k(x)), split(self.v(x)))))


@case(separate("attend.q", "attend.k", "attend.v", "attend.o"))
class CalledWithoutAForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attend = _Called()

    def forward(self, x: Tensor) -> Tensor:
        return self.attend(x)


@case(separate())
class MethodsOfAnotherName(Four):
    """The layer is never called: `encode` asks it for keys once, and `read` for answers."""

    def encode(self, x: Tensor) -> dict[str, Tensor]:
        return {"k": split(self.k(x)), "v": split(self.v(x))}

    def read(self, x: Tensor, state: dict[str, Tensor]) -> Tensor:
        return self.o(join(attend(split(self.q(x)), state["k"], state["v"])))

    def forward(self, x: Tensor) -> Tensor:
        return self.read(x, self.encode(x))


def _ragged(module: nn.Module, x: Tensor) -> Any:
    return module({"items": [(x[0], {"length": x.shape[1]}), (x[1, :-2], {"length": x.shape[1] - 2})]})


@case(separate(proved=("key", "output")), call=_ragged)
class PaddedHere(Four):
    """Nested lists of items of unequal lengths, padded by the layer."""

    def forward(self, batch: dict[str, list[tuple[Tensor, dict[str, int]]]]) -> list[Tensor]:
        x = pad_sequence([one for one, _ in batch["items"]], batch_first=True)
        lengths = torch.tensor([about["length"] for _, about in batch["items"]])
        is_pad = torch.arange(x.shape[1]) >= lengths[:, None]
        scores = split(self.q(x)) @ split(self.k(x)).transpose(2, 3) * WIDTH**-0.5
        weights = F.softmax(scores.masked_fill(is_pad[:, None, None], -torch.inf), -1)
        out = self.o(join(weights @ split(self.v(x))))
        return [one[:length] for one, length in zip(out, lengths)]


def _packed(module: nn.Module, x: Tensor) -> Any:
    return module(pack_sequence([x[0], x[1, :-1]], enforce_sorted=False))


@case(
    Core(rows("q.weight", source="rnn.0"), rows("k.weight", source="rnn.0"), rows("v.weight", source="rnn.0"),
         rows("o.weight", "c (h d)"), proved=("output",)),
    call=_packed,
)  # fmt: skip
class OverAPackedSequence(Four):
    """A recurrent network gives a packed sequence, which is padded for attention."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(24, 12, bidirectional=True, batch_first=True)

    def forward(self, packed: Any) -> Tensor:
        hidden, lengths = pad_packed_sequence(self.rnn(packed)[0], batch_first=True)
        mask = torch.arange(hidden.shape[1])[None] < lengths[:, None]
        q, k, v = (split(m(hidden)) for m in (self.q, self.k, self.v))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None])
        return (hidden + self.o(join(out))) * mask[..., None]


@dataclass
class _Config:
    d_model: int = 24
    n_head: int = 4
    d_head: int = 6
    activation: Callable[[Tensor], Tensor] = field(default=torch.nn.functional.gelu)
    biases: dict[str, bool] = field(default_factory=lambda: {"q": True, "k": False, "v": True, "o": True})


@dataclass
class _State:
    hidden: Tensor
    layer: int = 0
    weights: list[Tensor] = field(default_factory=list)


@case(separate("proj.q", "proj.k", "proj.v", "proj.o"), call=lambda module, x: module(_State(x)).hidden)
class StateOfAStream(nn.Module):
    """Built of a config, takes and gives a record that it writes into."""

    def __init__(self) -> None:
        super().__init__()
        self.cfg = _Config()
        inner = self.cfg.n_head * self.cfg.d_head
        self.proj = nn.ModuleDict({n: nn.Linear(self.cfg.d_model, inner, bias=b) for n, b in self.cfg.biases.items()})

    def forward(self, state: _State) -> _State:
        q, k, v = (self.proj[n](state.hidden).unflatten(-1, (self.cfg.n_head, -1)).transpose(1, 2) for n in "qkv")
        weights = F.softmax(torch.matmul(q, k.mT).div(self.cfg.d_head**0.5), dim=-1, dtype=q.dtype)
        state.weights.append(weights)
        state.hidden = self.proj["o"](torch.matmul(weights, v).transpose(1, 2).flatten(-2))
        state.layer += 1
        return state


@case(separate())
class BuiltOnMeta(Four):
    """Made without memory, then given some, as large models are loaded."""

    def __init__(self) -> None:
        with torch.device("meta"):
            super().__init__()
        self.to_empty(device="cpu")
        for one in (self.q, self.k, self.v, self.o):
            one.reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        return self.o(join(attend(split(self.q(x)), split(self.k(x)), split(self.v(x)))))


@case(separate(key="q", proved=("value", "output")), may_refuse="same|share|both")
class OneWeightInTwoMaps(Four):
    """The weight of the keys is tied to that of the queries, their biases are not."""

    def __init__(self) -> None:
        super().__init__()
        self.k.weight = self.q.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.o(join(attend(split(self.q(x)), split(self.k(x)), split(self.v(x)))))


@torch.jit.script
def _masked_softmax(scores: Tensor, mask: Tensor, scale: float) -> Tensor:
    return torch.softmax((scores * scale).masked_fill(mask, -10000.0), dim=-1)


@case(separate(proved=()), may_refuse="script|softmax")  # a softmax in a scripted function cannot be silenced
class ScriptedSoftmax(Four):
    """Megatron: mask, scale and softmax are one scripted function."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split(m(x)) for m in (self.q, self.k, self.v))
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        return self.o(join(_masked_softmax(q @ k.mT, mask, WIDTH**-0.5) @ v))


@torch.jit.script
def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


@case(separate())
class ScriptedTurns(Four):
    """GPT-NeoX: what turns queries and keys is a scripted function."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split(m(x)) for m in (self.q, self.k, self.v))
        theta = angles(x.shape[1], WIDTH, x)
        return self.o(join(attend(_turned(q, theta.cos(), theta.sin()), _turned(k, theta.cos(), theta.sin()), v)))


class _Turn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        a, b = x[..., 0::2], x[..., 1::2]
        out = torch.empty_like(x)
        out[..., 0::2], out[..., 1::2] = a * cos - b * sin, a * sin + b * cos
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        a, b = grad[..., 0::2], grad[..., 1::2]
        out = torch.empty_like(grad)
        out[..., 0::2], out[..., 1::2] = a * cos + b * sin, b * cos - a * sin
        return out, None, None


@case(fused("Wqkv.weight", "(r h d) c", "out_proj.weight"))
class TurnsWithABackward(nn.Module):
    """flash-attn: positions turn queries and keys of a fused map together, with a backward of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.Wqkv, self.out_proj = nn.Linear(24, 72), nn.Linear(24, 24)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.Wqkv(x).unflatten(-1, (3, H, WIDTH))
        theta = angles(x.shape[1], WIDTH, x)[:, None]
        qk = _Turn.apply(qkv[:, :, :2].flatten(2, 3), theta.cos(), theta.sin()).unflatten(2, (2, H))
        q, k, v = (one.transpose(1, 2) for one in (*qk.unbind(2), qkv[:, :, 2]))
        return self.out_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


@case(
    *(Core(rows(f"layers.{i}.0.q.weight", source=f"norms.{i}"), rows(f"layers.{i}.0.k.weight", source=f"norms.{i}"),
           rows(f"layers.{i}.0.v.weight", source=f"norms.{i}"), rows(f"layers.{i}.0.o.weight", "c (h d)"), number=i,
           proved=()) for i in range(2)),
)  # fmt: skip
class CheckpointedInSegments(nn.Module):
    """Blocks of a Sequential are checkpointed by segments."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(24) for _ in range(2))
        self.layers = nn.ModuleList(nn.Sequential(_Self(), nn.Dropout(0.0)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        blocks = [nn.Sequential(norm, layer) for norm, layer in zip(self.norms, self.layers)]
        return checkpoint_sequential(blocks, 2, x.requires_grad_(x.is_leaf), use_reentrant=False)


class _Self(Four):
    def forward(self, x: Tensor) -> Tensor:
        return self.o(join(attend(split(self.q(x)), split(self.k(x)), split(self.v(x)))))


@case(
    Core(*(rows(f"{m}_proj.weight", source="ln")
           for m in "qkv"), rows("out_proj.weight", "c (h d)"), proved=("query", "key")),
)  # fmt: skip
class RecomputedByAKeyword(nn.Module):
    """A checkpoint that takes keyword arguments, behind a norm, with a residual and a second checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.ln = nn.LayerNorm(24)
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(24, 24) for _ in range(4))
        self.mlp = nn.Sequential(nn.Linear(24, 48), nn.GELU(), nn.Linear(48, 24))

    def _attend(self, x: Tensor, *, scale: float, mask: Tensor | None = None) -> Tensor:
        q, k, v = (m(x).view(*x.shape[:2], H, -1).transpose(1, 2) for m in (self.q_proj, self.k_proj, self.v_proj))
        scores = q @ k.mT * scale if mask is None else q @ k.mT * scale + mask
        return self.out_proj(join(scores.softmax(-1) @ v))

    def forward(self, x: Tensor) -> Tensor:
        x = x + checkpoint(self._attend, self.ln(x), use_reentrant=False, scale=WIDTH**-0.5)
        return x + checkpoint(self.mlp, x, use_reentrant=False)


class _Store(nn.Module):
    """A pool of pages of keys and values, and which pages belong to which sequence."""

    def __init__(self, pages: int = 12, size: int = 2) -> None:
        super().__init__()
        self.register_buffer("pool", torch.zeros(2, pages, size, H, WIDTH), persistent=False)
        self.size = size

    def write_and_read(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        b, n = k.shape[:2]
        each = -(-n // self.size)
        table = torch.arange(b * each).flip(0).view(b, each)
        at = torch.arange(n)
        pool = self.pool.to(k.dtype).clone()
        pool[0, table[:, at // self.size], at % self.size] = k
        pool[1, table[:, at // self.size], at % self.size] = v
        k, v = (one[table].flatten(1, 2)[:, :n].transpose(1, 2) for one in pool)
        return k, v


@case(separate())
class PagesOfACache(Four):
    """Keys and values go to pages of a pool and are read through a table of pages."""

    def __init__(self) -> None:
        super().__init__()
        self.store = _Store()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (m(x).unflatten(-1, (H, WIDTH)) for m in (self.q, self.k, self.v))
        k, v = self.store.write_and_read(k, v)
        return self.o(join(F.scaled_dot_product_attention(q.transpose(1, 2), k, v, is_causal=True)))


@case(separate(), may_refuse="round|gradient|not followed|not by a linear map")
class KeysKeptInFewBits(Four):
    """A cache whose keys and values are rounded to steps."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split(m(x)) for m in (self.q, self.k, self.v))
        k, v = ((one * 2048).round().clamp(-(2**15), 2**15 - 1) / 2048 for one in (k, v))
        return self.o(join(attend(q, k, v)))


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = SimpleNamespace()

    def add(self, name: str, *shape: int) -> None:
        setattr(self.w, name, nn.Parameter(torch.empty(shape)))
        self.register_parameter(name, getattr(self.w, name))


@case(Core(*(rows(f"attn_{m}", "c (h d)") for m in "qkv"), rows("attn_o", "(h d) c")))
class ParametersByName(_Net):
    """Matrices `(in, out)` that are registered by name and used through a namespace; a product with `@`."""

    def __init__(self) -> None:
        super().__init__()
        for name in "qkvo":
            self.add(f"attn_{name}", 24, 24)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split(x @ getattr(self, f"attn_{name}")) for name in "qkv")
        return join(attend(q, k, v)) @ self.attn_o


@case(separate("keep.query", "keep.key", "keep.value", "keep.out"))
class PrunedHeads(nn.Module):
    """Six heads were trained; two were cut off with `index_select`, as BERT's are."""

    def __init__(self) -> None:
        super().__init__()
        kept = torch.cat([torch.arange(6) + 6 * head for head in (0, 2, 3, 5)])
        self.keep = nn.ModuleDict()
        for name in ("query", "key", "value", "out"):
            old = nn.Linear(24, 36) if name != "out" else nn.Linear(36, 24)
            new = nn.Linear(24, 24)
            new.weight = nn.Parameter(old.weight.index_select(int(name == "out"), kept).clone().detach())
            self.keep[name] = new
        self.num_attention_heads, self.pruned_heads = 6, {1, 4}

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self.keep[n](x).view(*x.shape[:-1], -1, 6).permute(0, 2, 1, 3) for n in ("query", "key", "value"))
        probs = nn.functional.softmax(q @ k.transpose(-1, -2) / 6**0.5, dim=-1)
        return self.keep["out"]((probs @ v).permute(0, 2, 1, 3).reshape(*x.shape[:-1], -1))


@case(
    *(separate(f"m.{i}.q", f"m.{i}.k", f"m.{i}.v", f"m.{i}.o", number=i, proved=("query", "key")) for i in range(2)),
)
class TwoOfAnEnsemble(nn.Module):
    """Members of an ensemble answer, and what counts is their mean and how much they disagree."""

    def __init__(self) -> None:
        super().__init__()
        self.m = nn.ModuleList(_Self() for _ in range(2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        answers = torch.stack([one(x) for one in self.m])
        return answers.mean(0), answers.var(0, unbiased=False)


@case(
    Core(rows("big.weight", "(r h d) c", n_r=4, r=0),
         rows("big.weight", "(r h d) c", n_r=4, r=1), rows("big.weight", "(r h d) c", n_r=4, r=2),
         rows("big.weight", "(r c) (h d)", n_r=4, r=3)),
)  # fmt: skip
class FourQuartersOfOneMatrix(nn.Module):
    """One Linear that is never called; views of its weight are kept in a list for each call."""

    def __init__(self) -> None:
        super().__init__()
        self.big = nn.Linear(24, 96, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        *three, out = self.big.weight.view(4, 24, 24)
        q, k, v = (split(torch.nn.functional.linear(x, w)) for w in three)
        return F.linear(join(attend(q, k, v)), out)
