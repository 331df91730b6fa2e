"""`AttentionLayer`: one attention layer, whatever its module."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from torch import Tensor, nn

from hdi_callback.attention.layer.head_maps import HeadPieces, HeadProduct
from hdi_callback.attention.layer.head_slice import Centring, HeadSlice
from hdi_callback.errors import UnsupportedAttentionError

__all__ = [
    "INPUT_ROLES",
    "PLURAL",
    "ROLES",
    "AttentionLayer",
    "Centring",
    "Evidence",
    "HeadPieces",
    "HeadProduct",
    "HeadSlice",
    "HeadWeight",
    "RefusedError",
    "Role",
    "check_layer",
]

Role = Literal["query", "key", "value", "output"]
ROLES: tuple[Role, ...] = ("query", "key", "value", "output")
INPUT_ROLES: tuple[Role, ...] = ("query", "key", "value")
"""Those of what attention takes."""
PLURAL: dict[Role, str] = {"query": "queries", "key": "keys", "value": "values", "output": "head outputs"}
Evidence = Literal["layout", "trace", "forward"]
HeadWeight: TypeAlias = HeadSlice | HeadProduct | HeadPieces


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
        output_projection: the module whose input is the head outputs side by side, ``(..., H * d_v)`` or, of a
            convolution, ``(batch, H * d_v, ...)``, and which is really called; `None` if there is none to watch.
        normed: roles whose features go through a norm before attention.
        head_order: number of each head among those that the module computes, where it is another: heads that share a
            key head lie side by side here, whatever their order there; ``()`` if it is the same.
        left_out: what the layer's attention has beside the heads that are read, in words; ``""`` if they are all.
        evidence: what the claim rests on. ``"layout"``: code that is known, torch's own or a layout that a user
            registered; ``"trace"``: a traced run of a copy; ``"forward"``: the inputs of attention in a real forward.
    """

    name: str
    module: nn.Module = field(repr=False)
    num_heads: int
    num_key_heads: int
    head_dim: int
    value_dim: int
    kind: str
    slices: Mapping[Role, HeadWeight] = field(repr=False)
    output_projection: nn.Module | None = field(default=None, repr=False)
    normed: frozenset[Role] = field(default=frozenset(), repr=False)
    left_out: str = ""
    evidence: Evidence = "layout"
    head_order: tuple[int, ...] = ()

    @property
    def num_value_heads(self) -> int:
        """Number of distinct value heads: as many as key heads, unless each key head has several values."""
        return int(getattr(self.slices.get("value"), "heads", self.num_key_heads))

    def weight(self, role: Role) -> Tensor:
        """Read the weight of a role, head by head.

        Args:
            role: ``"query"``, ``"key"``, ``"value"`` or ``"output"``.

        Returns:
            ``(heads, width, in_features)``, of keys and values as many heads as there are distinct ones; for the output
            ``(heads, value_dim, out_features)``. A live view of the parameter where it is a part of one.

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
        """Return facts about the layer as plain data.

        Returns:
            Its name, counts, widths and layout, the roles behind which a norm follows, and whether one of its
            parameters, and whether all of them require a gradient.
        """
        values = {} if self.num_value_heads == self.num_key_heads else {"num_value_heads": self.num_value_heads}
        return {
            "name": self.name,
            "type": type(self.module).__name__,
            "num_heads": self.num_heads,
            "num_key_heads": self.num_key_heads,
            "head_dim": self.head_dim,
            "value_dim": self.value_dim,
            "width": self.slices["key"].in_features,
            **values,
            "kind": self.kind,
            "normed": sorted(self.normed),
            "trains": any(parameter.requires_grad for parameter in self.module.parameters()),
            "all_train": all(parameter.requires_grad for parameter in self.module.parameters()),
        }


class RefusedError(UnsupportedAttentionError):
    """The heads of a module cannot be established.

    Args:
        reason: why, as a clause such as "its heads mix".
        remedy: what to write instead, if there is more to say than the usual.
    """

    def __init__(self, reason: str, remedy: str = "") -> None:
        super().__init__(reason)
        self.reason, self.remedy = reason, remedy


def check_layer(layer: AttentionLayer) -> AttentionLayer:
    """Check the claims of a layout against each other.

    Args:
        layer: the claim.

    Returns:
        The same layer.

    Raises:
        RefusedError: if counts, widths and the shapes of the weights contradict each other.
    """
    contradiction = _contradiction(layer)
    if contradiction is not None:
        raise RefusedError(contradiction)
    return layer


def _contradiction(layer: AttentionLayer) -> str | None:
    if layer.num_heads < 1 or layer.num_key_heads < 1 or layer.num_heads % layer.num_key_heads:
        return f"{layer.num_heads} heads cannot share {layer.num_key_heads} key heads evenly"
    of_values = layer.num_key_heads if layer.evidence == "layout" else layer.num_value_heads
    if layer.num_heads % max(1, of_values):
        return f"{layer.num_heads} heads cannot share {of_values} value heads evenly"
    expected = {
        "query": (layer.num_heads, layer.head_dim),
        "key": (layer.num_key_heads, layer.head_dim),
        "value": (of_values, layer.value_dim),
        "output": (layer.num_heads, layer.value_dim),
    }
    for role, part in layer.slices.items():
        if (part.heads, part.width) != expected[role]:
            return f"its {role} weight is {part.heads} x {part.width}, expected {expected[role]}"
        found = part.contradiction(role == "output")
        if found is not None:
            return f"its {role} weight {found}"
    return None if "key" in layer.slices else "it has no key weight"
