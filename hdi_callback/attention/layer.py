"""`AttentionLayer`: one attention layer, whatever its module, and `HeadWeight`: where the weights of its heads lie."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial, reduce
from itertools import chain
from typing import Any, Literal

import torch
from torch import Tensor, nn

from hdi_callback.attention.dtensors import is_sharded, whole
from hdi_callback.attention.replay import Recipe
from hdi_callback.errors import UnsupportedAttentionError
from hdi_callback.guard import autocast_off

Role = Literal["query", "key", "value", "output"]
ROLES: tuple[Role, ...] = ("query", "key", "value", "output")
PLURAL = {"query": "queries", "key": "keys", "value": "values", "output": "outputs"}
ROOT = "the model"  # name of a layer that is the model itself

# --- where the weight of a head lies


@dataclass(frozen=True, eq=False, repr=False)
class WeightRows:
    """For each head some rows of a parameter.

    Element ``(h, i, j)`` is element ``starts[h, i] + j * stride`` of the parameter, counted as `Tensor.flatten` does.
    So packed, transposed, three-dimensional and pointwise convolutional weights need no case of their own.
    """

    module: nn.Module  # that the names start from
    names: tuple[str, ...]  # dotted name of the parameter, or one for each head; resolved anew at each reading
    starts: Tensor  # ``(heads, width)``, the first element of each row, on the CPU; one head if all share it
    columns: int  # elements of a row
    stride: int = 1  # elements from one column to the next: 1 along the rows of an `nn.Linear`
    gain: str = ""  # dotted name of a vector that the columns are multiplied with: the gain of a norm between two maps
    recipes: Mapping[str, Recipe] = field(default_factory=dict)  # of the names: how they are computed from parameters

    @property
    def heads(self) -> int:
        """Number of heads."""
        return int(self.starts.shape[0])

    @property
    def width(self) -> int:
        """Rows per head."""
        return int(self.starts.shape[1])

    def tensor(self) -> Tensor:
        """Return ``(heads, width, columns)``: a live view where the rows are one regular slice of one parameter."""
        if len(self.names) == 1:
            rows = self._read(self.names[0], self.starts)
        else:
            starts = self.starts.split(1)
            rows = torch.cat([self._read(name, start) for name, start in zip(self.names, starts, strict=True)])
        if self.gain:
            rows = rows * _stored(self.module, self.gain).to(rows.dtype)
        return rows

    def index(self, head: int) -> Tensor:
        """Return the numbers of a head's elements in its flattened parameter: ``(width, columns)``."""
        return self.starts[head][:, None] + torch.arange(self.columns, device="cpu") * self.stride

    def owners(self) -> list[tuple[nn.Module, str]]:
        """Return the modules that hold the parameters, with the names of the parameters there."""
        computed = (self.recipes[name].parameters if name in self.recipes else (name,) for name in self.names)
        return [owner_of(self.module, name) for name in (*chain(*computed), *([self.gain] if self.gain else []))]

    def _read(self, name: str, starts: Tensor) -> Tensor:
        recipe = self.recipes.get(name)
        parameter = _stored(self.module, name) if recipe is None else recipe(partial(_stored, self.module))
        if not parameter.is_floating_point() or parameter.dtype.itemsize < 2:
            raise UnsupportedAttentionError(f"`{name}` is quantised ({parameter.dtype}): its rows cannot be read.")
        return self.of(parameter, starts)

    def of(self, parameter: Tensor, starts: Tensor | None = None) -> Tensor:
        """Return ``(heads, width, columns)`` of a tensor that lies as the parameter does, such as its gradient."""
        starts = self.starts if starts is None else starts
        strides = self._regular if starts is self.starts else _strides(starts)
        if strides is None:
            at = starts[..., None] + torch.arange(self.columns, device="cpu") * self.stride
            return parameter.reshape(-1)[at.to(parameter.device)]
        flat = parameter if parameter.is_contiguous() else parameter.contiguous()
        shape = (*starts.shape, self.columns)
        by_head, by_row, first = strides
        return flat.as_strided(shape, (by_head, by_row, self.stride), flat.storage_offset() + first)

    @cached_property
    def _regular(self) -> tuple[int, int, int] | None:
        """The same at each reading."""
        return _strides(self.starts)


@dataclass(frozen=True, eq=False, repr=False)
class Term:
    """A product of rows, ``scale * first @ second @ ...``: one factor for a plain projection, two for a low rank."""

    factors: tuple[WeightRows, ...]  # the last takes the layer's input; one of a single head is shared by all heads
    scale: float = 1.0  # such as LoRA's ``alpha / r``

    def tensor(self) -> Tensor | None:
        """Return ``(heads, width, in_features)``; `None` while an adapter is merged into its base, or disabled."""
        if len(self.factors) > 1 and any(_is_off(rows) for rows in self.factors):
            return None
        if len(self.factors) == 1 and self.scale == 1.0:
            return self.factors[0].tensor()
        parts = [rows.tensor() for rows in self.factors]
        # Neither autocast nor the width of an adapter may round what is measured.
        with autocast_off(parts[0].device.type):
            dtype = reduce(torch.promote_types, (part.dtype for part in parts))
            return self.scale * reduce(torch.matmul, (part.to(dtype) for part in parts))


@dataclass(frozen=True, eq=False, repr=False)
class HeadWeight:
    """The weights of the heads for one role: a sum of products of rows of parameters.

    One term of one factor is a plain or packed projection; one term of two factors latent attention, a map of each head
    times one that all share; two terms are LoRA, the base and ``scale * B @ A``.

    Example:
        >>> linear = nn.Linear(16, 24, bias=False)  # query, key and value of head 0, then those of head 1
        >>> features = torch.tensor([[4, 5, 6, 7], [16, 17, 18, 19]])
        >>> keys = HeadWeight((Term((WeightRows(linear, ("weight",), features * 16, columns=16),)),))
        >>> torch.equal(keys.tensor()[1], linear.weight[16:20])
        True
    """

    terms: tuple[Term, ...]  #: the products that are summed

    @property
    def heads(self) -> int:
        """Number of distinct heads."""
        return max(rows.heads for term in self.terms for rows in term.factors)

    @property
    def width(self) -> int:
        """Features per head."""
        return self.terms[0].factors[0].width

    @property
    def in_features(self) -> int:
        """Features on the other side: of the input, or of the layer's output where the role is that."""
        return self.terms[0].factors[-1].columns

    @property
    def plain(self) -> WeightRows | None:
        """The rows of parameters that the weight is, if it is no sum or product."""
        only_one = len(self.terms) == len(self.terms[0].factors) == 1 and self.terms[0].scale == 1.0
        rows = self.terms[0].factors[0]
        return rows if only_one and not rows.gain and not rows.recipes else None

    @property
    def is_sharded(self) -> bool:
        """Whether reading the weight is a collective call, as other ranks hold a part of it."""
        return any(is_sharded(parameter) for parameter in self.parameters())

    def tensor(self) -> Tensor:
        """Return the weight of every head.

        Parameters that are spread over ranks are gathered: a collective call, in the same order on all of them.

        Returns:
            ``(heads, width, in_features)``, differentiable; a live view where it is one slice of one parameter.
        """
        total = reduce(torch.add, [summand for term in self.terms if (summand := term.tensor()) is not None])
        return total if total.shape[0] == self.heads else total.expand(self.heads, -1, -1)

    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters that the weight is made of, each once."""
        owners = [owner for term in self.terms for rows in term.factors for owner in rows.owners()]
        parameters = (owner._parameters.get(name) for owner, name in owners)
        return list(dict.fromkeys(parameter for parameter in parameters if parameter is not None))

    def index(self, head: int) -> tuple[nn.Parameter, Tensor]:
        """Return the parameter of a head, and ``(width, in_features)`` numbers of elements for `Tensor.put_`."""
        rows = self.plain
        if rows is None:
            raise UnsupportedAttentionError("The weight of its heads is computed from several parameters.")
        owner, name = owner_of(rows.module, rows.names[head if len(rows.names) > 1 else 0])
        parameter = owner._parameters.get(name)
        if parameter is None or is_sharded(parameter):
            why = "computed when it is used" if parameter is None else "spread over several ranks"
            raise UnsupportedAttentionError(f"`{name}` of {type(owner).__name__} is {why}: it cannot be written.")
        return parameter, rows.index(head).to(parameter.device)

    @torch.no_grad()
    def write(self, head: int, rows: Tensor) -> None:
        """Replace the weight of a head in place by rows ``(width, in_features)``."""
        parameter, index = self.index(head)
        parameter.put_(index, rows.to(parameter))


# --- reading parameters


def owner_of(module: nn.Module, name: str) -> tuple[nn.Module, str]:
    """Return the module that holds a parameter, and its name there."""
    path, _, last = name.rpartition(".")
    return module.get_submodule(path), last


def bias_beside(owner: nn.Module, name: str) -> Any:
    """Return the bias of a weight, by its name: that of `qkv_weight` is `qkv_bias`; `None` if there is none."""
    return getattr(owner, name.replace("weight", "bias"), None) if "weight" in name else None


def bias_of(weight: HeadWeight, head: int) -> tuple[nn.Parameter, Tensor] | None:
    """Return the bias of a head's query, key or value, and the ``(width,)`` numbers of its elements, if any."""
    rows = weight.plain
    if rows is None:
        return None
    owner, name = owner_of(rows.module, rows.names[head if len(rows.names) > 1 else 0])
    starts = rows.starts[head] // rows.columns if rows.stride == 1 else rows.starts[head]
    bias = bias_beside(owner, name)
    if isinstance(owner, nn.MultiheadAttention):  # one bias for all three, whether or not their weights are one
        bias = owner.in_proj_bias
        starts = starts + {"k_proj_weight": 1, "v_proj_weight": 2}.get(name, 0) * owner.embed_dim
    is_of_rows = isinstance(bias, nn.Parameter) and bias.dim() == 1 and int(starts.max()) < len(bias)
    return (bias, starts.to(bias.device)) if is_of_rows else None


def _stored(module: nn.Module, name: str) -> Tensor:
    """Return a parameter or buffer, or what the last forward has made of it, as pruning does."""
    owner, last = owner_of(module, name)
    for stored in (owner._parameters, owner._buffers, vars(owner)):
        if (tensor := stored.get(last)) is not None:
            return whole(tensor)
    raise UnsupportedAttentionError(f"{type(owner).__name__} has no parameter or buffer `{last}` any more.")


def _strides(starts: Tensor) -> tuple[int, int, int] | None:
    """Return the strides from head to head and from row to row and the first number, if they are regular."""
    heads, width = starts.shape
    by_head = int(starts[1, 0] - starts[0, 0]) if heads > 1 else 0
    by_row = int(starts[0, 1] - starts[0, 0]) if width > 1 else 0
    expected = torch.arange(heads)[:, None] * by_head + torch.arange(width) * by_row + starts[0, 0]
    if min(by_head, by_row) < 0 or not torch.equal(starts, expected):
        return None
    return by_head, by_row, int(starts[0, 0])


def _is_off(rows: WeightRows) -> bool:
    """Whether an adapter on the way to a parameter is merged or disabled, as those of peft can be."""
    module = rows.module
    for step in rows.names[0].split(".")[:-1]:
        if getattr(module, "merged", False) is True or getattr(module, "disable_adapters", False) is True:
            return True
        module = getattr(module, step)
    return False


# --- layers


@dataclass(frozen=True)
class Site:
    """Where a layer's attention runs in a forward, as it is recognised again.

    Names of dims: ``"b"`` batch, ``"h"`` head, ``"q"`` query; ``"bh"`` is batch times heads, ``"hb"`` the reverse.
    """

    path: str  # dotted name of the module whose forward runs it
    # Its number among softmaxes and fused attentions of that module, modulo `period`; of another normaliser that of its
    # product of queries and keys, among products of batches.
    ordinal: int
    kind: str  # "fused", "softmax" or "normaliser"
    heads: int  # that it computes
    rows: tuple[str, ...] = ("b", "h", "q")  # dims of the softmax but the one that it runs over; of queries if fused
    out: tuple[str, ...] = ("b", "h", "q")  # dims of what the product with the values returns, but the features
    keys: int = -1  # the dim that the softmax runs over
    flipped: bool = False  # the product returns features times queries
    period: int = 1  # after so many the same attentions come again: loops, shared modules
    order: tuple[int, ...] = ()  # number of each of the layer's heads among those computed here; ``()`` if the same
    # Of a normaliser: which operation returns its scores, and the how manieth of that name after the product it is (0
    # for the product itself); the same of its weights; whether it hides later keys, perhaps by a mask on weights.
    scores: tuple[str, int] = ("", 0)
    weights: tuple[str, int] = ("", 0)
    is_causal: bool = False
    is_softmax: bool = False  # written out, so that keys without weight are hidden

    @property
    def place(self) -> tuple[str, bool]:
        """What `ordinal` counts: the module, and whether products of batches in place of softmaxes."""
        return self.path, self.kind == "normaliser"


@dataclass(frozen=True, eq=False)
class AttentionLayer:
    """A multi-head attention layer of a model."""

    name: str  #: dotted path of the module in the model; "the model" if it is that
    module: nn.Module = field(repr=False)  #: the module itself
    #: Role -> weight of its heads; a role that no parameter makes is absent.
    weights: Mapping[str, HeadWeight] = field(repr=False)
    key_of: tuple[int, ...] = field(repr=False)  #: key head of each query head
    value_of: tuple[int, ...] = field(repr=False)  #: value head of each query head
    value_dim: int  #: width of a value head, d_v
    kind: str = ""  #: how the weights are laid out, in readable words
    normed: frozenset[str] = field(default=frozenset(), repr=False)  #: roles that a norm follows before attention
    #: The module that is called with the head outputs side by side; `None` if there is none.
    output_module: nn.Module | None = field(default=None, repr=False)
    sites: tuple[Site, ...] = field(default=(), repr=False)  #: where its attention runs in a forward, if that is known
    unread: frozenset[str] = field(default=frozenset(), repr=False)  #: parameters that the first forward did not take
    notes: str = ""  #: what of the layer's attention is left out, in words; ``""`` if nothing is

    @property
    def num_heads(self) -> int:
        """Number of query heads, H."""
        return len(self.key_of)

    @property
    def num_key_heads(self) -> int:
        """Number of distinct key heads, G; fewer than H under grouped-query attention."""
        return self.weights["key"].heads

    @property
    def num_value_heads(self) -> int:
        """Number of distinct value heads."""
        return max(self.value_of) + 1

    @property
    def head_dim(self) -> int:
        """Width of a query and key head, d_k."""
        return self.weights["key"].width

    def weight(self, role: str) -> Tensor:
        """Return the weight of a role, head by head.

        Args:
            role: ``"query"``, ``"key"``, ``"value"`` or ``"output"``.

        Returns:
            ``(heads, width, in_features)``, of keys and values as many heads as there are distinct ones; for the output
            ``(num_heads, value_dim, out_features)``. Differentiable; a live view of the parameter where it is a part
            of one. A collective call where ranks share parameters.

        Raises:
            UnsupportedAttentionError: if the layer has no weight of this role.
        """
        if role not in self.weights:
            raise UnsupportedAttentionError(f"`{self.name}` has no {role!r} weight; it has {sorted(self.weights)}.")
        return self.weights[role].tensor()

    def description(self) -> dict[str, Any]:
        """Return what describes the layer as plain data: counts, widths, layout, whether its parameters train."""
        parameters = list(self.module.parameters())
        key = self.weights.get("key")
        return {
            "name": self.name,
            "num_heads": self.num_heads,
            "num_key_heads": self.num_key_heads,
            "num_value_heads": self.num_value_heads,
            "head_dim": self.head_dim,
            "value_dim": self.value_dim,
            "width": None if key is None else key.in_features,
            "kind": self.kind,
            "has_softmax": all(site.kind != "normaliser" or site.is_softmax for site in self.sites),
            "normed": sorted(self.normed),
            "trains": any(parameter.requires_grad for parameter in parameters),
            "all_train": all(parameter.requires_grad for parameter in parameters),
            "unread": sorted(self.unread),
            "parameters": {name: parameter.dim() for name, parameter in self.further_parameters().items()},
        }

    def further_parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters besides the weights of heads, as adapters, gains and biases, but for that of keys.

        A constant that the bias of keys adds to the scores of a query is ignored by the softmax.
        """
        plain = {role: rows for role, weight in self.weights.items() if (rows := weight.plain) is not None}
        weights = {id(parameter) for role in plain for parameter in self.weights[role].parameters()}
        if "key" in plain and not (plain["query"].names == plain["key"].names if "query" in plain else False):
            weights.add(id(bias_beside(*owner_of(plain["key"].module, plain["key"].names[0]))))
        parameters = self.module.named_parameters()
        return {name: parameter for name, parameter in parameters if id(parameter) not in weights}


@dataclass(frozen=True)
class Refusal:
    """An attention that is not watched."""

    name: str  # dotted path of the module; "the model" if it is that
    reason: str  # why, as a clause
    module_type: str = ""  # the module's class

    def __str__(self) -> str:
        module_type = f" ({self.module_type})" if self.module_type else ""
        return f"`{self.name}`{module_type}: {self.reason}"


@dataclass(frozen=True)
class Survey:
    """The attention of a model: what is watched, and what is not, in model order."""

    layers: tuple[AttentionLayer, ...] = ()
    refused: tuple[Refusal, ...] = ()
