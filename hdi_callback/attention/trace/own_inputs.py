"""Heads with inputs of their own: the same column of two heads' weights acts on different features."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from hdi_callback.attention.layer.heads import PLURAL, Role
from hdi_callback.attention.trace.head_rows import NoHeadsError, Rows
from hdi_callback.attention.trace.traced_cores import TracedCores

OWN_INPUTS = (
    "each of its heads computes its {roles} from an input of its own, so that the weights of two heads do not compare"
)


def refuse_inputs_of_their_own(trace: TracedCores, rows: Mapping[Role, list[Rows]]) -> None:
    """Refuse heads whose projections take different features of the tokens, or features changed per head.

    Args:
        trace: of one run.
        rows: of each role, those of each head.

    Raises:
        NoHeadsError: if two heads of a role take other features.
    """
    for role, of_role in rows.items():
        map_input = [[] if row.inner else inputs_of_rows(trace, row) for row in of_role]
        for one in map_input[1:]:
            if one and map_input[0] and not any(_may_be_the_same(a, b) for a in map_input[0] for b in one):
                raise NoHeadsError(OWN_INPUTS.format(roles=PLURAL[role]))


def inputs_of_rows(trace: TracedCores, rows: Rows) -> list[Tensor]:
    """Return the inputs of the map of some rows, one for each of its calls that output them.

    Args:
        trace: of one run.
        rows: of one head.

    Returns:
        ``(..., in_features)`` each.
    """
    return [
        leaf.input.detach()
        for leaf in trace.leaves
        if leaf.parameter == rows.parameter
        and leaf.start <= min(rows.features)
        and max(rows.features) < leaf.start + leaf.output.shape[-1]
    ]


def _may_be_the_same(one: Tensor, other: Tensor) -> bool:
    """Return whether two inputs may hold the same features of tokens, whichever tokens, and in whatever order."""
    if one is other or one.shape[-1] != other.shape[-1]:
        return one is other
    # NaN equals NaN: the input may hold nothing else.
    rows, others = (inputs.reshape(-1, inputs.shape[-1]).nan_to_num() for inputs in (one, other))
    if len(rows) != len(others):  # as where some of the tokens, or windows of them, are taken
        return True
    chosen = others[torch.linspace(0, len(others) - 1, min(4, len(others))).long()]
    return any(bool((rows == row).all(-1).any()) for row in chosen)
