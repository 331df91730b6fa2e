"""`AttentionLayer`: what an attention layer has to tell, whatever its module looks like."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, Literal

import torch
from torch import Tensor, nn

from hdi_callback.errors import UnsupportedAttentionError

Role = Literal["query", "key", "value", "output"]
ROLES: tuple[Role, ...] = ("query", "key", "value", "output")


@dataclass(frozen=True)
class HeadSlice:
    """The heads' part of one linear map: `heads` blocks of `width` features each, one after the other.

    Attributes:
        module: the module that `parameter` starts from.
        parameter: dotted path of the parameter, followed anew at every reading, so that parametrizations and replaced
            modules are seen.
        heads: number of blocks.
        width: features per block.
        start: first feature of the first block.
        transposed: the parameter is stored ``(in_features, out_features)``, as in GPT-2's ``Conv1D``.
    """

    module: nn.Module
    parameter: str
    heads: int
    width: int
    start: int = 0
    transposed: bool = False

    def matrix(self) -> Tensor:
        """Read the whole matrix of the linear map.

        Returns:
            ``(out_features, in_features)``, a view of the parameter.
        """
        weight: Tensor = reduce(getattr, self.parameter.split("."), self.module)  # type: ignore[assignment]
        return weight.mT if self.transposed else weight

    def rows(self) -> Tensor:
        """Read heads that are blocks of output features, as those of a query, key or value projection are.

        Returns:
            ``(heads, width, in_features)``, a view of the parameter.
        """
        rows = self.matrix()[self.start : self.start + self.heads * self.width]
        return rows.view(self.heads, self.width, rows.shape[1])

    def columns(self) -> Tensor:
        """Read heads that are blocks of input features, as those of an output projection are.

        Returns:
            ``(heads, width, out_features)``, a view of the parameter.
        """
        columns = self.matrix().mT[self.start : self.start + self.heads * self.width]
        return columns.view(self.heads, self.width, columns.shape[1])


@dataclass(frozen=True, eq=False)
class AttentionLayer:
    """A multi-head attention layer of a model.

    Attributes:
        name: dotted path of the module in the model.
        module: the module itself.
        num_heads: number of query heads, H.
        num_key_heads: number of distinct key heads, G; fewer than H under grouped-query attention.
        head_dim: width of a query and key head, d_k.
        value_dim: width of a value head, d_v.
        kind: how the weights are laid out, in readable words.
        slices: role -> where its weight lies. ``"output"`` may be missing.
        output_projection: the module whose input is the head outputs side by side, ``(..., H * d_v)``, and which is
            really called; `None` if there is none to watch.
    """

    name: str
    module: nn.Module
    num_heads: int
    num_key_heads: int
    head_dim: int
    value_dim: int
    kind: str
    slices: Mapping[Role, HeadSlice] = field(repr=False)
    output_projection: nn.Module | None = field(default=None, repr=False)

    def weight(self, role: Role) -> Tensor:
        """Read the weight of a role, head by head.

        Args:
            role: ``"query"``, ``"key"``, ``"value"`` or ``"output"``.

        Returns:
            ``(heads or key heads, width, in_features)``; for the output ``(heads, value_dim, out_features)``. A live
            view of the parameter.

        Raises:
            UnsupportedAttentionError: if the layer has no weight of this role.

        Example:
            >>> from hdi_callback import find_attention
            >>> (layer,) = find_attention(nn.Sequential(nn.MultiheadAttention(32, num_heads=4)))
            >>> tuple(layer.weight("key").shape), tuple(layer.weight("output").shape)
            ((4, 8, 32), (4, 8, 32))
        """
        if role not in self.slices:
            raise UnsupportedAttentionError(
                f"`{self.name}` ({type(self.module).__name__}) has no {role!r} weight; it has {sorted(self.slices)}."
            )
        part = self.slices[role]
        return part.columns() if role == "output" else part.rows()

    def facts(self) -> dict[str, Any]:
        """Tell what is known of the layer as plain data.

        Returns:
            Its name, counts, widths and layout.
        """
        return {
            "name": self.name,
            "type": type(self.module).__name__,
            "num_heads": self.num_heads,
            "num_key_heads": self.num_key_heads,
            "head_dim": self.head_dim,
            "value_dim": self.value_dim,
            "width": int(self.weight("key").shape[-1]),
            "kind": self.kind,
        }


def check_layer(layer: AttentionLayer) -> AttentionLayer:
    """Check that what a layout claims holds together in itself.

    Args:
        layer: the claim.

    Returns:
        The same layer.

    Raises:
        UnsupportedAttentionError: if counts, widths and the shapes of the weights contradict each other.
    """
    contradiction = _contradiction(layer)
    if contradiction is not None:
        where = f"`{layer.name}` ({type(layer.module).__name__}, {layer.kind})"
        remedy = f"Describe it with `register_layout`, or skip it with exclude=[{layer.name!r}]."
        raise UnsupportedAttentionError(f"The heads of {where} cannot be told apart: {contradiction}. {remedy}")
    return layer


def _contradiction(layer: AttentionLayer) -> str | None:
    if layer.num_heads < 1 or layer.num_key_heads < 1 or layer.num_heads % layer.num_key_heads:
        return f"{layer.num_heads} heads cannot share {layer.num_key_heads} key heads evenly"
    expected = {
        "query": (layer.num_heads, layer.head_dim),
        "key": (layer.num_key_heads, layer.head_dim),
        "value": (layer.num_key_heads, layer.value_dim),
        "output": (layer.num_heads, layer.value_dim),
    }
    for role, part in layer.slices.items():
        if (part.heads, part.width) != expected[role]:
            return f"its {role} weight is {part.heads} x {part.width}, expected {expected[role]}"
        matrix = part.matrix()
        if not isinstance(matrix, torch.Tensor) or matrix.dim() != 2:
            return f"its {role} weight is not a matrix"
        features = matrix.shape[1 if role == "output" else 0]
        if part.start + part.heads * part.width > features:
            return f"its {role} weight has {features} features, fewer than {part.heads} heads of {part.width}"
    return None if "key" in layer.slices else "it has no key weight"
