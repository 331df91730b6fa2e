"""Heads among the outputs of linear maps, found by the equality of features."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hdi_callback.attention.layer.heads import Role
from hdi_callback.attention.observe.compare.cores import ObservedCore
from hdi_callback.attention.observe.compare.features import find_features, find_rotated, may_hold, tolerance
from hdi_callback.attention.observe.compare.samples import MapCall


@dataclass(frozen=True, eq=False)
class FoundRows:
    """Heads that were found by observation alone.

    Attributes:
        map: name of the linear map.
        rows: ``(heads, width)``, features of the map.
        how: ``"as they are"`` or ``"rotated"``; then it is not known which feature of a pair is which.
        is_transposed: the map keeps its matrix as ``(in_features, out_features)``.
        call: the call of the map.
    """

    map: str
    rows: Tensor
    how: str
    is_transposed: bool = False
    call: MapCall | None = None


def find_rows(
    core: ObservedCore, maps: Sequence[MapCall], role: Role, *, of_all_tokens: bool = False
) -> FoundRows | None:
    """Find the heads of attention among the outputs of maps before it.

    Args:
        core: the attention.
        maps: maps that they may come from.
        role: which of its arguments.
        of_all_tokens: only a map that made all tokens of attention.

    Returns:
        The map and its features; None unless all of them were found in one map.
    """
    calls = [one for one in maps if one.kind == "linear" and one.order < core.order and one.outputs.numel()]
    length = core.queries if role == "query" else core.keys
    observed = []
    for arrangement in core.samples.get(role, ()):
        x = _distinct(arrangement.features)
        is_of_all = core.axes is None or arrangement.tokens == core.axes.sequences * length * core.tied
        if _lie_in_groups(arrangement.features, x) and (is_of_all or not of_all_tokens):
            observed.append((arrangement.tokens, x.cpu()))
    alike = [[one for one in calls if one.tokens == tokens and len(one.outputs) == len(x)] for tokens, x in observed]
    worth = [
        {id(one) for one, is_near in zip(some, may_hold(x, [one.outputs for one in some])) if is_near}
        for (_, x), some in zip(observed, alike)
    ]
    for call in reversed(calls):
        for (_, x), near in zip(observed, worth):
            if id(call) not in near:
                continue
            y = call.outputs.cpu()
            tol = tolerance(x, y)
            rows = find_features(x.flatten(1), y, tol).view(x.shape[1:])
            how = "as they are"
            if bool((rows < 0).any()) and core.tied == 1:
                rotated = find_rotated(x, y, tol)
                rows = torch.where(rows < 0, rotated, rows) if bool((rotated >= 0).any()) else rows
                how = "rotated"
            if are_all_found(rows):
                return FoundRows(call.name, rows + call.rows, how, call.is_transposed, call)
    return None


def are_all_found(rows: Tensor) -> bool:
    """Return whether every feature was found, and none twice.

    Args:
        rows: ``(heads, width)``, features of a map; -1 where none is equal.

    Returns:
        True if so.
    """
    return bool((rows >= 0).all()) and len(set(rows.flatten().tolist())) == rows.numel()


def find_columns(core: ObservedCore, maps: Sequence[MapCall]) -> FoundRows | None:
    """Find the output projection: the first map after an attention that takes its head outputs.

    Args:
        core: the attention.
        maps: all maps of the forward.

    Returns:
        The map, and which features of its input each head is; None if there is none.
    """
    after = [one for one in maps if one.kind == "linear" and one.order > core.order and one.inputs.numel()]
    for call in after[:4]:
        for arrangement in core.samples.get("output", ()):
            x, inputs = arrangement.features.cpu(), call.inputs.cpu()
            if arrangement.tokens != call.tokens or len(x) != len(inputs):
                continue
            rows = find_features(x.flatten(1), inputs, tolerance(x, inputs)).view(x.shape[1:])
            if are_all_found(rows):
                return FoundRows(call.name, rows, "as they are", call.is_transposed, call)
    return None


def _lie_in_groups(features: Tensor, distinct: Tensor) -> bool:
    """Return whether heads that share a key lie side by side, as fewer key heads than heads imply."""
    heads, groups = features.shape[1], distinct.shape[1]
    return heads % groups == 0 and torch.equal(features, distinct.repeat_interleave(heads // groups, 1))


def _distinct(features: Tensor) -> Tensor:
    """Leave out heads that are repetitions of another, as those of groups are."""
    kept: list[int] = []
    for head in range(features.shape[1]):
        if not any(torch.equal(features[:, head], features[:, other]) for other in kept):
            kept.append(head)
    return features[:, kept]
