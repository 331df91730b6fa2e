"""Norms between a projection and attention, and what they do to the subspaces of heads.

The factor that a norm has for each token, and the gain of each feature, leave the subspace of a head as it is.
What a LayerNorm subtracts does not: the mean over a head takes a direction from it, and that over all heads moves them
all. So the rows that are read are centred as the norm centres what they give.

A BatchNorm behind the map needs nothing: it scales and shifts each feature by itself, with the same factor for all
tokens, by its running statistics in evaluation and by those of the batch in training. That is an invertible map within
each head, unless a gain is zero.
"""

from __future__ import annotations

import re
from dataclasses import replace

import torch
from torch import nn

from hdi_callback.attention.behaviour.probe import in_private
from hdi_callback.attention.heads import AttentionLayer, Centring, HeadProduct, HeadSlice, HeadWeight, Role
from hdi_callback.attention.isolation import isolated_copy

_NAMES: dict[Role, re.Pattern[str]] = {
    role: re.compile(rf"({role[0]}|{role})_?(norm|layer_?norm)$|norm_?{role[0]}$", re.IGNORECASE)
    for role in ("query", "key", "value")
}


def with_norms(layer: AttentionLayer) -> AttentionLayer:
    """Take into account what the norms of a module subtract.

    Args:
        layer: a layer whose slices are those of its projections.

    Returns:
        The layer, its slices centred where the module centres.
    """
    slices: dict[Role, HeadWeight] = dict(layer.slices)
    normed = set(layer.normed)
    for role in _NAMES:
        norm = _norm_behind(layer, role)
        if role not in slices or norm is None:
            continue
        normed.add(role)
        part = slices[role]
        centring = _centring(norm, part.heads, part.width)
        if centring and isinstance(part, HeadProduct):
            slices[role] = replace(part, outer=replace(part.outer, centring=centring))
        elif centring and isinstance(part, HeadSlice):
            slices[role] = replace(part, centring=centring)
    return replace(layer, slices=slices, normed=frozenset(normed))


def is_normed(layer: AttentionLayer, role: Role) -> bool:
    """Tell whether a norm follows the projection of a role.

    Args:
        layer: the layer.
        role: ``"query"``, ``"key"`` or ``"value"``.

    Returns:
        True if what the projection gives is scaled token by token before attention receives it.
    """
    return role in layer.normed


def _norm_behind(layer: AttentionLayer, role: Role) -> nn.Module | None:
    named = (child for name, child in layer.module.named_children() if _NAMES[role].match(name))
    norm = next(named, None)
    return norm if norm is not None and "norm" in type(norm).__name__.lower() else None


def _centring(norm: nn.Module, heads: int, width: int) -> Centring:
    """See over which features a norm subtracts the mean: adding one to all of them then changes nothing."""
    with in_private(0), torch.no_grad():
        trial = isolated_copy(norm)
        for module in trial.modules():
            object.__setattr__(module, "training", False)
            for name, parameter in module.named_parameters(recurse=False):
                drawn = torch.empty(parameter.shape).uniform_(0.5, 1.5)
                setattr(module, name, nn.Parameter(drawn, requires_grad=False))
        shapes: tuple[tuple[Centring, tuple[int, ...]], ...] = (
            ("layer", (2, heads * width)),
            ("head", (2, heads, width)),
        )
        for centring, shape in shapes:
            x = torch.randn(shape)
            try:
                given, moved = trial(x), trial(x + 1)
            except Exception:  # another shape is meant
                continue
            return centring if (given - moved).abs().max() < 1e-3 * given.abs().max() else ""
    return ""
