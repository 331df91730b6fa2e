"""Weights of heads that an intervention may write: which layers allow it, their biases, the optimizer's state."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hdi_callback.attention.layer import AttentionLayer, HeadWeight, owner_of
from hdi_callback.errors import MisconfigurationError, UnsupportedAttentionError


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


def refuse(layer: AttentionLayer, name: str, why: str) -> None:
    """Raise an error if there is a reason not to act on a layer."""
    if why:
        raise MisconfigurationError(
            f"{name} cannot act on `{layer.name}`: {why}. Leave the layer out of what is watched with "
            f"exclude=[{layer.name!r}], or leave out {name}."
        )


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


def read_bias(weight: HeadWeight, head: int) -> Tensor | None:
    """Return the bias of a head, ``(width,)``, if there is one."""
    bias = bias_of(weight, head)
    return None if bias is None else bias[0].detach().flatten()[bias[1]]


def output_bias(layer: AttentionLayer) -> nn.Parameter | None:
    """Return the bias of the output projection, if there is one."""
    rows = layer.weights["output"].plain
    if rows is None:
        return None
    owner, _ = owner_of(rows.module, rows.names[0])
    bias = getattr(owner, "bias", None)
    return bias if isinstance(bias, nn.Parameter) else None


@torch.no_grad()
def clear_state(optimizers: Sequence[Optimizer], parameter: nn.Parameter, index: Tensor) -> None:
    """Set what optimizers keep of some elements of a parameter to zero: momentum, mean squares."""
    for optimizer in optimizers:
        for state in optimizer.state.get(parameter, {}).values():
            if isinstance(state, Tensor) and state.shape == parameter.shape:
                state.put_(
                    index.to(state.device), torch.zeros((), dtype=state.dtype, device=state.device).expand_as(index)
                )
