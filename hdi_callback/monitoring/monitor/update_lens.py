"""Updates of the heads since the last reading, W(t) - W(t - k), through the lenses for weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from hdi_callback.attention import Role
from hdi_callback.core import CircuitSimilarity, head_update, ov_circuits, qk_circuits, weight_update
from hdi_callback.core.whitening import DEFAULT_BUDGET
from hdi_callback.monitoring.monitor.movement import LastWeights


@dataclass(frozen=True)
class KeyUpdates:
    """Diversity of the key weights' updates; a head that did not move is left out.

    Attributes:
        index: HDI of the updates.
        energy_index: the same with directions weighted by their energy.
        worst: largest overlap of two updates.
        worst_pair: ``(2,)``, the two key heads; -1 if fewer than two moved.
        overlap: ``(G, G)``.
        energy_overlap: ``(G, G)``.
        entropy: ``(G,)``, spectral entropy: 1 spread evenly over directions, 0 one direction; NaN if it did not move.
    """

    index: Tensor
    energy_index: Tensor
    worst: Tensor
    worst_pair: Tensor
    overlap: Tensor
    energy_overlap: Tensor
    entropy: Tensor


class UpdateLens:
    """Measure updates of weights.

    Args:
        last: the weights of the last reading.
        rank_tol: singular values below ``rank_tol`` times a head's largest do not count.
        memory_budget: see `head_diversity`.
    """

    def __init__(self, last: LastWeights, *, rank_tol: float, memory_budget: int = DEFAULT_BUDGET) -> None:
        self._last = last
        self._options: dict[str, Any] = {"rank_tol": rank_tol, "memory_budget": memory_budget}

    def keys(self, names: Sequence[str], weights: Mapping[Role, Tensor]) -> KeyUpdates:
        """Diversity of the updates of the key weights.

        Args:
            names: of some layers.
            weights: their key weights, ``(layers, heads, width, features)``.

        Returns:
            What is measured; NaN in layers of which no earlier weight is known.
        """
        update = head_update(weights["key"], self._last.before(names, weights)["key"], **self._options)
        found = update.diversity
        return KeyUpdates(
            found.index,
            found.energy_index,
            found.worst,
            found.worst_pair,
            found.overlap,
            found.energy_overlap,
            update.spectral_entropy,
        )

    def qk(self, names: Sequence[str], weights: Mapping[Role, Tensor]) -> CircuitSimilarity:
        """Cosines of the QK circuits of the updates.

        Args:
            names: of some layers.
            weights: their query and key weights.

        Returns:
            What is measured; NaN in layers of which no earlier weight is known.
        """
        update = self._updates(names, weights)
        return qk_circuits(update["query"], update["key"], **self._options)

    def ov(self, names: Sequence[str], weights: Mapping[Role, Tensor]) -> CircuitSimilarity:
        """Cosines of the OV circuits of the updates.

        Args:
            names: of some layers.
            weights: their value and output weights.

        Returns:
            What is measured; NaN in layers of which no earlier weight is known.
        """
        update = self._updates(names, weights)
        return ov_circuits(update["value"], update["output"], **self._options)

    def _updates(self, names: Sequence[str], weights: Mapping[Role, Tensor]) -> dict[Role, Tensor]:
        before = self._last.before(names, weights)
        return {role: weight_update(weight, before[role]) for role, weight in weights.items()}
