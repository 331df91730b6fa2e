"""Products of parts of tokens with a matrix each, in a traced run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hdi_callback.attention.trace.traced_run import Leaf

if TYPE_CHECKING:
    from hdi_callback.attention.trace.graph_cut import GraphCut


def by_each_matrix(cut: GraphCut, name: str, x: Tensor, stack: Tensor) -> Any:
    """Answer in place of a product of parts of tokens with a matrix each.

    Args:
        cut: of the run.
        name: of the parameter.
        x: ``(..., H, n, d)``.
        stack: ``(H, d, width)``.

    Returns:
        ``(..., H, n, width)``; `NotImplemented` where maps gave the parts, of which each head has one already.
    """
    if stack.shape[0] == 1 or x.dim() < 3:
        return NotImplemented
    heads, _, width = stack.shape
    taken = x.movedim(-3, -2).flatten(-2)
    if _is_made_of_maps(x, cut.run.tensors):
        # If no map takes it after, this is the output projection, and what it gives of each head is summed later.
        cut.run.stacked.append(Leaf(name, torch.empty(width), taken, axes=(2,)))
        return NotImplemented
    answer = cut.answer(name, taken, heads * width, axes=(0, 2), is_of_parts=True)
    return answer.view(*answer.shape[:-1], heads, width).movedim(-2, -3)


def _is_made_of_maps(x: Tensor, outputs: list[Tensor]) -> bool:
    with torch._C.DisableTorchFunction():
        if not x.requires_grad or not outputs:
            return False
        found = torch.autograd.grad(x.sum(), outputs, retain_graph=True, allow_unused=True)
    return any(one is not None for one in found)
