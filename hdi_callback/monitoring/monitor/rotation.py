"""`LayerRotation`: which wide layers a reading skips, for metrics that only rules need."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from hdi_callback.monitoring.metrics import OV, QK, ROWS, TOKENS

EVERY: Mapping[str, int] = {ROWS: 4, TOKENS: 4, QK: 8, OV: 8}
"""Costly sources -> each wide layer is measured once in so many readings. Circuits, made of weights, change slowly;
attention and inputs may change at once, for instance with other data. Other sources cannot wait: movement compares two
consecutive readings, and NaN must be found at once."""

_WIDE = 512 * 512
"""Entries of the query weights beyond which a layer is wide."""


class LayerRotation:
    """Choose, reading by reading, the wide layers on which costly metrics for rules are measured.

    The first reading of a process measures all layers, so that rules know how each began; later ones measure each wide
    layer as often as `EVERY` says, and the other layers every time. The choice depends on the number of readings alone,
    so that all ranks choose alike.

    Args:
        sources: sources that are measured for rules alone.

    Example:
        >>> rotation = LayerRotation([ROWS])
        >>> layers = [{"name": name, "num_heads": 12, "head_dim": 64, "width": 768} for name in "abcde"]
        >>> for _ in range(3):
        ...     rotation.begin(layers)
        ...     print(sorted(rotation.skipped(ROWS)))
        ...     rotation.end()
        []
        ['a', 'b', 'c', 'e']
        ['a', 'b', 'd', 'e']
    """

    def __init__(self, sources: Collection[str]) -> None:
        self._every = {source: every for source, every in EVERY.items() if source in sources}
        self._readings = 0
        self._skipped: dict[str, frozenset[str]] = {}

    def begin(self, layers: Iterable[Mapping[str, Any]]) -> None:
        """Choose layers for the reading that comes next.

        Args:
            layers: `AttentionLayer.facts` of each; the same on all ranks that measure together.
        """
        wide = [str(facts["name"]) for facts in layers if is_wide(facts)]
        number = self._readings
        self._skipped = {
            source: frozenset(name for place, name in enumerate(wide) if number and (place + number) % every)
            for source, every in self._every.items()
        }

    def end(self) -> None:
        """Count a reading; `skipped` stays as it is until the next one begins."""
        self._readings += 1

    def skipped(self, source: str) -> frozenset[str]:
        """Names of the layers that this reading skips.

        Args:
            source: the source in question.

        Returns:
            Their names; none where the source was asked for, or is not costly.
        """
        return self._skipped.get(source, frozenset())


def is_wide(facts: Mapping[str, Any]) -> bool:
    """Return whether a layer is so wide that metrics for rules alone are measured in turn.

    Args:
        facts: see `AttentionLayer.facts`.

    Returns:
        True if it is.
    """
    return is_wide_weight(facts["num_heads"] * facts["head_dim"] * facts["width"])


def is_wide_weight(numbers: int) -> bool:
    """Return whether a weight has so many entries that metrics for rules alone are measured on a sample.

    Args:
        numbers: entries of a weight of all heads.

    Returns:
        True if it has.
    """
    return numbers > _WIDE
