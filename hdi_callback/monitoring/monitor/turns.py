"""`Turns`: which layers a reading passes over, where what rules alone look at is measured in turn."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from hdi_callback.monitoring.metrics import OV, QK, ROWS, TOKENS

EVERY: Mapping[str, int] = {ROWS: 4, TOKENS: 4, QK: 8, OV: 8}
"""What takes most of a reading's time, and the number of readings in which each wide layer has its turn once. Weights
move slowly, and attention and its inputs may change at once, as by data of another kind. Of the rest, movement is that
between two readings, and NaN is to be found at once."""

_WIDE = 512 * 512
"""Numbers in the query weights beyond which a layer is wide."""


class Turns:
    """Choose the wide layers of which a reading measures what nobody asked for by name.

    The first reading of a process measures all layers, so that rules know how each began; after that each wide layer
    has its turn as often as `EVERY` says. Layers that are not wide have theirs every time. It follows from the number
    of readings alone, so that ranks that measure together choose alike.

    Args:
        sources: what is measured for rules alone.

    Example:
        >>> turns = Turns([ROWS])
        >>> layers = [{"name": name, "num_heads": 12, "head_dim": 64, "width": 768} for name in "abcde"]
        >>> for _ in range(3):
        ...     turns.begin(layers)
        ...     print(sorted(turns.waiting(ROWS)))
        ...     turns.end()
        []
        ['a', 'b', 'c', 'e']
        ['a', 'b', 'd', 'e']
    """

    def __init__(self, sources: Collection[str]) -> None:
        self._every = {source: every for source, every in EVERY.items() if source in sources}
        self._readings = 0
        self._waiting: dict[str, frozenset[str]] = {}

    def begin(self, layers: Iterable[Mapping[str, Any]]) -> None:
        """Choose layers for the reading that comes next.

        Args:
            layers: what is known of each, see `AttentionLayer.facts`; the same on all ranks that measure together.
        """
        wide = [str(facts["name"]) for facts in layers if is_wide(facts)]
        number = self._readings
        self._waiting = {
            source: frozenset(name for place, name in enumerate(wide) if number and (place + number) % every)
            for source, every in self._every.items()
        }

    def end(self) -> None:
        """Count a reading; what waited for its turn is known until the next one begins."""
        self._readings += 1

    def waiting(self, source: str) -> frozenset[str]:
        """Name the layers that this reading passes over.

        Args:
            source: what is measured.

        Returns:
            Their names; none where the source was asked for, or is not costly.
        """
        return self._waiting.get(source, frozenset())


def is_wide(facts: Mapping[str, Any]) -> bool:
    """Return whether a layer is so wide that what rules alone look at is measured in turn.

    Args:
        facts: see `AttentionLayer.facts`.

    Returns:
        True if it is.
    """
    return makes_wide(facts["num_heads"] * facts["head_dim"] * facts["width"])


def makes_wide(numbers: int) -> bool:
    """Return whether a weight has so many numbers that what rules alone look at is not measured of all of it.

    Args:
        numbers: how many a weight of all heads has.

    Returns:
        True if it has.
    """
    return numbers > _WIDE
