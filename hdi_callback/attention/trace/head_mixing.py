"""`HeadMixing`: maps that mix the weights of all heads after the softmax, which a traced run leaves out and notes."""

from __future__ import annotations

import torch
from torch import Tensor

from hdi_callback.attention.trace.cores import products_behind
from hdi_callback.attention.trace.support import Support
from hdi_callback.attention.trace.traced_run import TracedRun

# Nodes that leave numbers as they are, in another shape.
_VIEWS = (
    "Alias", "Clone", "Permute", "Reshape", "Slice", "Squeeze", "ToCopy", "Transpose", "Unsafe", "Unsqueeze", "View",
)  # fmt: skip


class HeadMixing:
    """Recognises what takes the weights of attention, those of all heads for a pair of tokens.

    Args:
        run: where they are noted.
        known: maps that took weights of attention -> whether those of all heads, which the first run of a copy tells:
            where maps answer nothing, nothing depends on them.
    """

    def __init__(self, run: TracedRun, known: dict[str, bool]) -> None:
        self.run, self.known = run, known

    def is_at(self, parameter: str, taken: Tensor, dim: int = -1) -> bool:
        """Return whether a map mixes heads, and note it.

        Args:
            parameter: of the map.
            taken: its input.
            dim: that of its features.

        Returns:
            True if so.
        """
        node = taken.grad_fn
        while node is not None and "Softmax" not in node.name():
            is_view = node.name().startswith(_VIEWS)
            node = node.next_functions[0][0] if is_view and len(node.next_functions) == 1 else None
        scores = None if node is None else self.run.scores.get(node)
        if scores is None or scores.numel() != taken.numel() or not products_behind(scores):
            return False
        if parameter not in self.known:
            with torch._C.DisableTorchFunction():
                self.known[parameter] = self._is_over_heads(taken.movedim(dim, -1))
        if self.known[parameter]:
            self.run.mixed.setdefault(node, parameter.removesuffix(".weight"))
        return self.known[parameter]

    def _is_over_heads(self, weights: Tensor) -> bool:
        """Return whether two weights of the same pair of tokens are of different features; those of tokens are not."""
        found = []
        for number in range(min(2, weights.shape[-1])):
            one = torch.zeros(weights.shape)
            one.view(-1, weights.shape[-1])[-1, number] = 1.0
            support = Support.of(weights, one, self.run.tensors)
            found.append({(leaf, feature) for leaf in support.masks for feature in support.features(leaf)})
        return len(found) > 1 and found[0] != found[1]
