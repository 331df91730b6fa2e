r"""Whether the weights of a layer are fresh from initialisation, by the spectra of its heads.

Entries that are drawn independently, whatever the scale, give a head ``(d_k, d)`` a spectrum that is known: Mauchly's
statistic of sphericity, to which the spectral flatness is a power, has an exact law for Gaussian entries and nearly the
same for uniform ones. Orthogonal rows have flatness 1. Training bends the spectrum far away from both.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

DEVIATIONS = 6.0
"""Standard deviations of the flatness of an initialisation from which on the weights of a layer count as trained."""


def has_been_trained(arrays: Mapping[str, Sequence[Any]], facts: Mapping[str, Any]) -> bool:
    """Return whether the key weights of a layer had been trained before they were read first.

    Heads of zeros count as fresh. Of 1,530 fresh layers of six initialisations none counts as trained
    (`test_no_fresh_layer_is_classified_as_trained`); training of a few dozen steps, or of heads whose weights hardly
    move, may go unnoticed. Heads wider than the layer's input show nothing, and count as fresh.

    Args:
        arrays: of the first reading: ``flatness`` and ``rank`` of the heads.
        facts: ``width`` and ``head_dim`` of the layer.

    Returns:
        True if the spectrum of the median head is too uneven for an initialisation.
    """
    d, k = facts.get("width"), facts.get("head_dim")
    ranks = arrays.get("rank", ())
    flatness = [value for value, rank in zip(arrays.get("flatness", ()), ranks) if rank == k and value > 0]
    if d is None or k is None or not 2 <= k <= d:
        return False
    if len(flatness) < max(1, len(ranks) / 2):
        return False  # zeros
    mean, deviation = _law(k, d)
    return (mean - statistics.median(map(math.log, flatness))) / deviation > DEVIATIONS


@cache
def _law(k: int, d: int) -> tuple[float, float]:
    """Mean and standard deviation of the logarithm of the flatness of k independent Gaussian rows in d dimensions."""
    mean = sum(_digamma((d - i) / 2) for i in range(k)) / k - _digamma(k * d / 2) + math.log(k)
    variance = sum(_trigamma((d - i) / 2) for i in range(k)) / k**2 - _trigamma(k * d / 2)
    return mean, math.sqrt(variance)


def _digamma(x: float) -> float:
    """The derivative of log-gamma, to 1e-12: by its recurrence up to 12, and its asymptotic series from there."""
    below = 0.0
    while x < 12:
        below -= 1 / x
        x += 1
    y = 1 / (x * x)
    return below + math.log(x) - 0.5 / x - y * (1 / 12 - y * (1 / 120 - y * (1 / 252 - y * (1 / 240 - y / 132))))


def _trigamma(x: float) -> float:
    """The second derivative of log-gamma, in the same way."""
    below = 0.0
    while x < 12:
        below += 1 / (x * x)
        x += 1
    y = 1 / (x * x)
    return below + 1 / x + y / 2 + y / x * (1 / 6 - y * (1 / 30 - y * (1 / 42 - y * (1 / 30 - y * 5 / 66))))
