"""Ways to build and to run attention: layers of einops, ports, exported and traced graphs, frozen buffers, averages."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from einops import einsum, pack, repeat, unpack
from einops.layers.torch import EinMix
from torch import Tensor, nn
from torch.nn import functional as F

from tests.attention.wild.idioms import attend, join, split
from tests.attention.wild.plain import Four
from tests.attention.wild.truth import WIDTH, Core, H, case, fused, rows, separate


@case(
    Core(*(rows(f"to_{m}.weight", "h d c") for m in "qkv"), rows("to_o.weight", "h c d"), heads_alone=True),
)
class MapsByEinMix(nn.Module):
    """Every map is a layer of einops that names its axes; memory tokens are packed in front, and unpacked again."""

    def __init__(self) -> None:
        super().__init__()
        self.to_q, self.to_k, self.to_v = (
            EinMix("b t c -> b h t d", weight_shape="h d c", h=H, d=WIDTH, c=24) for _ in range(3)
        )
        self.to_o = EinMix("b h t d -> b t c", weight_shape="h c d", h=H, d=WIDTH, c=24)
        self.memory = nn.Parameter(torch.randn(2, 24))

    def forward(self, x: Tensor) -> Tensor:
        x, shapes = pack([repeat(self.memory, "m c -> b m c", b=len(x)), x], "b * c")
        q, k, v = self.to_q(x), self.to_k(x), self.to_v(x)
        weights = einsum(q, k, "b h i d, b h j d -> b h i j").mul(WIDTH**-0.5).softmax(dim=-1)
        y = self.to_o(einsum(weights, v, "b h i j, b h j d -> b h i d"))
        return unpack(y, shapes, "b * c")[1]


class _EinsumDense(nn.Module):
    """Keras: an equation, a kernel of as many axes as it names, a bias of its last ones."""

    def __init__(self, equation: str, kernel: tuple[int, ...], bias: tuple[int, ...]) -> None:
        super().__init__()
        self.equation = equation
        self.kernel, self.bias = nn.Parameter(torch.empty(kernel)), nn.Parameter(torch.zeros(bias))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum(self.equation, x, self.kernel) + self.bias


@case(
    Core(*(rows(f"_{m}_dense.kernel", "c h d", takes=i) for m, i in (("query", 0), ("key", 1), ("value", 1))),
         rows("_output_dense.kernel", "h d c")), inputs=("b n c", "b m c"),
)  # fmt: skip
class FromKeras(nn.Module):
    """keras.layers.MultiHeadAttention: equations for all maps, `acbe`, a masked softmax as a layer, scores returned."""

    def __init__(self) -> None:
        super().__init__()
        for role in ("query", "key", "value"):
            setattr(self, f"_{role}_dense", _EinsumDense("abc,cde->abde", (24, H, WIDTH), (H, WIDTH)))
        self._output_dense = _EinsumDense("abcd,cde->abe", (H, WIDTH, 24), (24,))
        self._softmax = nn.Softmax(dim=-1)

    def forward(self, query: Tensor, value: Tensor, key: Tensor | None = None, return_attention_scores: bool = False,
                training: bool | None = None) -> Any:  # fmt: skip
        key = value if key is None else key
        query, key, value = self._query_dense(query), self._key_dense(key), self._value_dense(value)
        query = torch.multiply(query, 1.0 / math.sqrt(WIDTH))
        scores = self._softmax(torch.einsum("aecd,abcd->acbe", key, query))
        output = self._output_dense(torch.einsum("acbe,aecd->abcd", scores, value))
        return (output, scores) if return_attention_scores else output


@case(separate(), convert=lambda module: torch.fx.symbolic_trace(module))
class TracedByFx(Four):
    """torch.fx: the layer runs as a graph module, whose forward was generated."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (m(x).unflatten(-1, (4, 6)).transpose(1, 2) for m in (self.q, self.k, self.v))
        weights = torch.matmul(q, k.transpose(-2, -1)).div(6**0.5).softmax(-1)
        return self.o(torch.matmul(weights, v).transpose(1, 2).flatten(2))


def _exported(module: nn.Module) -> nn.Module:
    return torch.export.export(module, (torch.randn(2, 7, 24),)).module()


@case(separate(), convert=_exported, may_refuse="torch.export made")
class Exported(Four):
    """torch.export: a graph of operators that takes one size of batch and tokens, and holds the parameters."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (m(x).view(x.shape[0], -1, H, WIDTH).transpose(1, 2) for m in (self.q, self.k, self.v))
        return self.o(join(F.scaled_dot_product_attention(q, k, v, is_causal=True)))


@case(fused(), convert=lambda module: torch.optim.swa_utils.AveragedModel(module))
class AverageOfWeights(nn.Module):
    """The model that is run is an average of the weights of another."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.o = nn.Linear(24, 72), nn.Linear(24, 24)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split(t) for t in self.qkv(x).tensor_split(3, dim=-1))
        return self.o(join(F.scaled_dot_product_attention(q, k, v)))


@dataclass
class _Sizes:
    dim: int = 24
    heads: dict[str, int] = field(default_factory=lambda: {"query": H, "key": 2})
    width: int = WIDTH


class _Attend(nn.Module):
    kinds: ClassVar[dict[str, type[_Attend]]] = {}

    def __init_subclass__(cls, kind: str) -> None:
        cls.kinds[kind] = cls

    def __new__(cls, sizes: _Sizes, kind: str = "dense") -> _Attend:
        return super().__new__(cls.kinds[kind])

    def __init__(self, sizes: _Sizes, kind: str = "dense") -> None:
        super().__init__()
        self.sizes = sizes
        for role, heads in {**sizes.heads, "value": sizes.heads["key"]}.items():
            self.add_module(f"{role}_{kind}", nn.Linear(sizes.dim, heads * sizes.width, bias=False))
        self.register_module("output", nn.Linear(sizes.dim, sizes.dim, bias=False))


class _Dense(_Attend, kind="dense"):
    def forward(self, x: Tensor) -> Tensor:
        roles = {name.removesuffix("_dense"): child(x) for name, child in self.named_children() if name != "output"}
        q, k, v = (roles[role].unflatten(-1, (-1, self.sizes.width)) for role in ("query", "key", "value"))
        k, v = (t.repeat_interleave(q.shape[2] // t.shape[2], dim=2) for t in (k, v))
        weights = torch.einsum("...qhd,...khd->...hqk", q, k).mul(q.shape[-1] ** -0.5).softmax(-1)
        return self.get_submodule("output")(torch.einsum("...hqk,...khd->...qhd", weights, v).flatten(-2))


@case(separate("layer.query_dense", "layer.key_dense", "layer.value_dense", "layer.output", keys=2))
class MadeByARegistry(nn.Module):
    """A dataclass with defaults, subclasses that register themselves, children by name, ellipses in all sums."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = _Attend(_Sizes(), kind="dense")

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


@case(
    Core(rows("W_Q"), rows("W_K"), rows("v.weight"), rows("o.weight", "c (h d)"), proved=("value", "output")),
    may_refuse="without a projection",
)  # fmt: skip
class QueriesAndKeysAreBuffers(nn.Module):
    """Frozen random scores: the matrices of queries and keys are buffers, values and outputs are learned."""

    def __init__(self) -> None:
        super().__init__()
        made = torch.Generator().manual_seed(5)
        self.register_buffer("W_Q", torch.randn(24, 24, generator=made) / 5)
        self.register_buffer("W_K", torch.randn(24, 24, generator=made) / 5)
        self.v, self.o = nn.Linear(24, 24), nn.Linear(24, 24)

    def get_parameter(self, target: str) -> Any:  # so that the truth can name them
        return self.get_buffer(target) if target in ("W_Q", "W_K") else super().get_parameter(target)

    def forward(self, x: Tensor) -> Tensor:
        return self.o(join(attend(split(x @ self.W_Q.T), split(x @ self.W_K.T), split(self.v(x)))))


@case(separate(), call=lambda module, x: module({"tokens": x, "info": [None]})["out"]["tokens"])
class NestedDictionaries(Four):
    """Everything passes through dictionaries of dictionaries, with an assertion on shapes and cached intermediates."""

    def forward(self, batch: dict[str, Any]) -> dict[str, Any]:
        x = batch["tokens"]
        assert x.ndim == 3
        assert x.shape[-1] == self.q.in_features, f"expected {self.q.in_features}"
        state = {"query": self.q(x), "key": self.k(x), "value": self.v(x)}
        state = {role: value.reshape(*x.shape[:-1], H, -1).permute(0, 2, 1, 3) for role, value in state.items()}
        state["scores"] = torch.matmul(state["query"], state["key"].mT).mul_(WIDTH**-0.5)
        state["weights"] = torch.softmax(state.pop("scores"), dim=-1)
        state["mixed"] = torch.matmul(state["weights"], state["value"])
        return {"out": {"tokens": self.o(join(state["mixed"]))}, **batch}


@case(separate("qkvo.q", "qkvo.k", "qkvo.v", "qkvo.o", scores="h q k", rounds=2))
class OneDocumentAtATime(nn.Module):
    """A list of documents of other lengths: maps run once over all tokens, `split` and a loop over documents follow."""

    def __init__(self) -> None:
        super().__init__()
        self.qkvo = nn.ModuleDict({m: nn.Linear(24, 24) for m in "qkvo"})

    def forward(self, x: Tensor) -> Tensor:
        documents = [x[0], x[1, :5]]
        tokens, lengths = torch.cat(documents), [len(document) for document in documents]
        q, k, v = (self.qkvo[m](tokens).unflatten(-1, (H, WIDTH)).split(lengths) for m in "qkv")
        done = [
            attend(*(t.transpose(0, 1) for t in one)).transpose(0, 1).flatten(1) for one in zip(q, k, v, strict=True)
        ]
        return self.qkvo["o"](torch.nn.utils.rnn.pad_sequence(done, batch_first=True))


@case(separate("query.0", "key.0", "value.0", "output.1", heads_alone=True))
class GainsAroundMaps(nn.Module):
    """Each map stands in a Sequential with a learned scale behind it (layer scale), the last with one in front."""

    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gamma = nn.Parameter(torch.ones(24))

        def forward(self, x: Tensor) -> Tensor:
            return x.mul(self.gamma)

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Sequential(nn.Linear(24, 24), self.Scale()) for _ in range(3))
        self.output = nn.Sequential(self.Scale(), nn.Linear(24, 24))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split(m(x)) for m in (self.query, self.key, self.value))
        return self.output(join(attend(q, k, v)))


@case(
    Core(rows("to_q.weight"), rows("to_k.weight"), rows("to_v.weight"), rows("to_o.weight", "c (h d)"), number=0,
         proved=("query", "key", "value")),
    Core(rows("self_q.weight"), rows("self_k.weight"), rows("self_v.weight"), rows("to_o.weight", "c (h d)"), number=1,
         proved=("query", "key", "value")),
)  # fmt: skip
class TwoAnswersOneLastMap(nn.Module):
    """Local by keys of two steps and global attention are summed before the one last map, each by maps of its own."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("to_q", "to_k", "to_v", "self_q", "self_k", "self_v", "to_o"):
            setattr(self, name, nn.Linear(24, 24, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        at = torch.arange(x.shape[1])
        near = (at[:, None] - at).abs() <= 2
        whole = attend(*(split(m(x)) for m in (self.to_q, self.to_k, self.to_v)))
        q, k, v = (split(m(x)) for m in (self.self_q, self.self_k, self.self_v))
        return self.to_o(join(whole + F.scaled_dot_product_attention(q, k, v, attn_mask=near)))
