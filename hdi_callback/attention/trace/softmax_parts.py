"""Products that are parts of one softmax: their weights sum to 1 once the parts are combined.

Blockwise and ring attention multiply values with exponentials of scores block by block, and divide by the sum of all
of them at the end. Whatever happens in between, the outputs are averages of values: if all values were one, the outputs
would be one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from hdi_callback.attention.trace.cores import Core

_SUMS_TO_ONE = 1e-3


def parts_that_add_up(parts: Collection[Core], ends: Iterable[Tensor]) -> set[Core]:
    """Choose the products whose weights are those of averages, by their graphs.

    Args:
        parts: products of exponentials and values.
        ends: what may be made of their sums.

    Returns:
        Those that are averages together.
    """
    found: set[Core] = set()
    for end in ends:
        edges = [core.output for core in parts]
        # The derivative of a sum by its weights is the sum where all values are one.
        which = torch.ones_like(end).requires_grad_()
        acting = torch.autograd.grad(end, edges, which, create_graph=True, retain_graph=True, allow_unused=True)
        mine = [(core, one) for core, one in zip(parts, acting) if one is not None and bool(one.any())]
        sums = [(torch.nan_to_num(one) * _weights_times_one(core, one)).sum() for core, one in mine]
        if not sums or not sums[0].requires_grad:
            continue
        (made,) = torch.autograd.grad(torch.stack(sums).sum(), which, retain_graph=True)
        # Outputs of attention may have another tensor beside them.
        is_average = (made - 1).abs() < _SUMS_TO_ONE
        if bool(is_average.any()) and bool((is_average | (made.abs() < _SUMS_TO_ONE)).all()):
            found |= {core for core, _ in mine}
    return found


def _weights_times_one(core: Core, like: Tensor) -> Tensor:
    """Product weights @ 1, as where all values are one."""
    sums = core.weights.detach().sum(-1, keepdim=True).expand(-1, -1, core.values.shape[-1])  # (N, rows, width)
    return (sums.mT if core.is_turned else sums).reshape(like.shape)
