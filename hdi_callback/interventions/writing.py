"""Weights of heads that an intervention may write: which layers allow it, and their biases."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from hdi_callback.attention.layer import AttentionLayer, HeadWeight, owner_of
from hdi_callback.errors import UnsupportedAttentionError


def why_not_writable(layer: AttentionLayer, roles: Sequence[str]) -> str:
    """Return why the heads of a layer cannot be written in place; empty if they can."""
    for role in roles:
        if role not in layer.weights:
            return f"it has no {role} weight of its own"
        try:
            for head in range(layer.weights[role].heads):
                layer.weights[role].index(head)
        except UnsupportedAttentionError as error:
            return f"its {role} heads cannot be written in place ({error})"
    return ""


def bias_of(weight: HeadWeight, head: int) -> tuple[nn.Parameter, Tensor] | None:
    """Return the bias of a head's query, key or value, and the ``(width,)`` numbers of its elements, if any."""
    rows = weight.plain
    if rows is None:
        return None
    owner, name = owner_of(rows.module, rows.names[head if len(rows.names) > 1 else 0])
    starts = rows.starts[head] // rows.columns if rows.stride == 1 else rows.starts[head]
    bias = getattr(owner, "bias", None)
    if isinstance(owner, nn.MultiheadAttention):  # one bias for all three, whether or not their weights are one
        bias = owner.in_proj_bias
        starts = starts + {"k_proj_weight": 1, "v_proj_weight": 2}.get(name, 0) * owner.embed_dim
    return None if not isinstance(bias, nn.Parameter) else (bias, starts.to(bias.device))
