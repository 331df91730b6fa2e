"""`HeadMixing`: maps that mix the weights of all heads after the softmax, which a traced run leaves out and notes."""

from __future__ import annotations

import torch
from torch import Tensor

from hdi_callback.attention.trace.products import nearest_products
from hdi_callback.attention.trace.support import Support, element
from hdi_callback.attention.trace.traced_run import TracedRun

# Nodes that leave numbers as they are, in another shape.
_VIEWS = (
    "Alias", "Clone", "Permute", "Reshape", "Slice", "Squeeze", "ToCopy", "Transpose", "Unsafe", "Unsqueeze", "View",
)  # fmt: skip


class HeadMixing:
    """Recognises maps of attention weights, those of all heads for a pair of tokens.

    Args:
        run: where they are noted.
        known: maps that took weights of attention -> whether those of all heads, as the first run of a copy shows:
            where maps have no random outputs, nothing depends on them.
    """

    def __init__(self, run: TracedRun, known: dict[str, bool]) -> None:
        self.run, self.known = run, known

    def is_at(self, parameter: str, map_input: Tensor, dim: int = -1) -> bool:
        """Return whether a map mixes the attention weights of several heads, and record it.

        Args:
            parameter: of the map.
            map_input: its input.
            dim: that of its features.

        Returns:
            True if so.
        """
        node = map_input.grad_fn
        while node is not None and "Softmax" not in node.name():
            is_view = node.name().startswith(_VIEWS)
            node = node.next_functions[0][0] if is_view and len(node.next_functions) == 1 else None
        scores = None if node is None else self.run.scores.get(node)
        if scores is None or scores.numel() != map_input.numel() or not nearest_products(scores):
            return False
        if parameter not in self.known:
            with torch._C.DisableTorchFunction():
                self.known[parameter] = self._is_over_heads(map_input.movedim(dim, -1))
        if self.known[parameter]:
            self.run.mixed.setdefault(node, parameter.removesuffix(".weight"))
        return self.known[parameter]

    def _is_over_heads(self, weights: Tensor) -> bool:
        """Return whether two weights of the same pair of tokens are of different features; those of tokens are not."""
        flat = weights.reshape(-1, weights.shape[-1])
        some = [element(flat.shape, -1, number) for number in range(min(2, weights.shape[-1]))]
        found = [Support.of_combination(flat, one, self.run.tensors) for one in some]
        return len({frozenset(self.run.features(support)) for support in found}) > 1
