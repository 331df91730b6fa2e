"""What is true of a module that was written by hand: where each role of each head lies, as data.

A part of a parameter is given by a pattern in the manner of einops: ``"(r h d) c"`` with ``r=1`` are the rows of a
fused projection that come second. Of an axis `c` the features are named that the projection takes, or, of an output,
gives.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

H, WIDTH, MODEL = 4, 6, 24  # heads, width of a head, width of the model; all counts differ, so that none is mixed up
BATCH, TOKENS = 2, 7


@dataclass(frozen=True)
class Rows:
    """The heads' part of one parameter.

    `source` is the module whose output the projection takes, the input of the whole (number `takes`) where none is
    named; `through` the weight of a map in front, where the heads' weight is the product of two, and `normed` the norm
    between them, whose gain, and mean, belong to that product. `centred` says what a
    LayerNorm behind the projection takes away. `computed` is a module whose `matrix()` is multiplied with in place of
    the parameter.
    """

    parameter: str
    pattern: str
    sizes: dict[str, int]
    pick: dict[str, int]
    source: str | None = None
    takes: int = 0
    through: str | None = None
    normed: str | None = None
    centred: str = ""
    computed: str = ""
    is_of_parts: bool = False  # each head takes as many features as the one before, and others

    def index(self, shape: Sequence[int]) -> Tensor:
        """Give the elements ``(heads, width, features)`` of the flat parameter."""
        axes = re.findall(r"\([^)]*\)|\S+", self.pattern)
        letters, sizes = [], []
        for axis, size in zip(axes, shape, strict=True):
            names = axis.strip("()").split()
            known = 1
            for name in names:
                known *= self.sizes.get(name, 1)
            letters += names
            sizes += [self.sizes.get(name, size // known) for name in names]
        elements = torch.arange(torch.Size(shape).numel()).reshape(sizes)
        for name, at in self.pick.items():
            elements = elements.movedim(letters.index(name), 0)[at]
            letters.remove(name)
        for name in "hdc":
            if name not in letters:
                elements, letters = elements[..., None], [*letters, name]
        rest = [letters.index(name) for name in letters if name not in "hdc"]
        return (
            elements.permute(*rest, *(letters.index(name) for name in "hdc")).flatten(0, len(rest))
            if rest
            else (elements.permute(*(letters.index(name) for name in "hdc")))
        )

    def weight(self, model: nn.Module) -> Tensor:
        """Read what is true of a model: ``(heads, width, features)``."""
        parameter = model.get_parameter(self.parameter).detach()
        matrix = parameter if not self.computed else model.get_submodule(self.computed).matrix().detach()  # type: ignore[operator]
        weight = matrix.flatten()[self.index(parameter.shape).to(parameter.device)]
        if self.is_of_parts:
            weight = torch.block_diag(*weight).unflatten(0, weight.shape[:2])
        if self.through is not None:
            inner = model.get_parameter(self.through).detach()[: weight.shape[-1]]
            if self.normed is not None:
                norm = model.get_submodule(self.normed)
                weight = weight * norm.get_parameter("weight").detach()
                inner = inner - inner.mean(0) if isinstance(norm, nn.LayerNorm) else inner
            weight = weight @ inner
        if self.centred:
            weight = weight - weight.mean(1 if self.centred == "head" else (0, 1), keepdim=True)
        return weight


Role = Rows | tuple[Rows, ...] | None  # a tuple: a parameter for each head


def rows(parameter: str, pattern: str = "(h d) c", *, h: int = H, **more: Any) -> Rows:
    names = {"source", "takes", "through", "normed", "centred", "computed", "is_of_parts"}
    options = {name: more.pop(name) for name in names & more.keys()}
    sizes = {name[2:]: more.pop(name) for name in list(more) if name.startswith("n_")}
    return Rows(parameter, pattern, {"h": h, **sizes}, more, **options)


def parts_of(role: Role) -> tuple[Rows, ...]:
    if role is None:
        return ()
    return role if isinstance(role, tuple) else (role,)


def weight_of(role: Role, model: nn.Module) -> Tensor | None:
    parts = [part.weight(model) for part in parts_of(role)]
    return torch.cat(parts) if parts else None


@dataclass(frozen=True)
class Core:
    """One softmax over tokens: the rows of its heads, and how its scores ``(b, h, q, k)`` lie.

    `number` counts the softmaxes of a forward; `groups` gives the key head of each head where there are fewer.
    """

    query: Role
    key: Role
    value: Role
    output: Role
    scores: str = "b h q k"
    number: int = 0
    heads: int = H
    groups: tuple[int, ...] | None = None
    spreads: bool = False  # a norm over all heads: a row scales the scores of the others
    loop: bool = False  # a softmax for each head, one after the other, from `number` on
    rounds: int = 1  # softmaxes with the same maps, one after the other
    head_axes: str = "h"  # the letters of `scores` that number heads
    free: tuple[str, ...] = ()  # roles of which anything may be claimed
    mixes: bool = False  # keys and values are sums over tokens, each with weights of its own
    joint: tuple[int, int] | None = None  # tokens of this stream within those of all streams
    query_token: int | None = None  # the one token that asks
    proved: tuple[str, ...] = ("query", "key", "value", "output")  # not those that reach what comes out elsewhere too
    heads_alone: bool = False  # tokens are mixed before or behind maps: which head notices is proved, not which token

    def group(self, head: int, count: int) -> int:
        return self.groups[head] if self.groups else head // (self.heads // count)


@dataclass(frozen=True)
class Case:
    """A module, its inputs and its truth.

    `cores` is what is true of it. Where it must be refused, `refused` is what the reason may say (a pattern), and
    `cores` what would be true if it were what it looks like, which is disproved. `may_refuse`: it can be read, and a
    refusal that says this is true as well. `none`: it has no softmax over tokens.
    """

    make: Callable[[], nn.Module]
    cores: tuple[Core, ...] = ()
    refused: str = ""
    may_refuse: str = ""
    none: bool = False
    inputs: tuple[str, ...] = ("b n c",)
    call: Callable[..., Any] | None = None
    convert: Callable[[nn.Module], nn.Module] | None = None
    tokens: int = TOKENS
    cast: torch.dtype = torch.float32

    @property
    def name(self) -> str:
        return self.make.__name__


CASES: list[Case] = []


def case(*cores: Core, **options: Any) -> Callable[[type[nn.Module]], type[nn.Module]]:
    """Add a module to the cases."""

    def add(make: type[nn.Module]) -> type[nn.Module]:
        CASES.append(Case(make, tuple(cores), **options))
        return make

    return add


def separate(
    query: str = "q", key: str = "k", value: str = "v", output: str = "o", pattern: str = "(h d) c", *, keys: int = H,
    takes: int = 0, **options: Any
) -> Core:  # fmt: skip
    """Four linear maps."""
    mirrored = " ".join(reversed(re.findall(r"\([^)]*\)|\S+", pattern)))
    return Core(
        rows(f"{query}.weight", pattern),
        rows(f"{key}.weight", pattern, h=keys, takes=takes),
        rows(f"{value}.weight", pattern, h=keys, takes=takes),
        rows(f"{output}.weight", mirrored),
        **options,
    )


def fused(
    name: str = "qkv.weight", pattern: str = "(r h d) c", output: str = "o.weight", out: str = "c (h d)", *,
    order: str = "qkv", **options: Any
) -> Core:  # fmt: skip
    """One map for queries, keys and values, in the given order."""
    q, k, v = (rows(name, pattern, n_r=len(order), r=order.index(role)) for role in "qkv")
    return Core(q, k, v, rows(output, out), **options)
