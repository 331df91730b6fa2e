"""A straight line through a curve of alignments, with the standard error of its slope."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass


def stretch(alignment: float) -> float:
    """``-log(1 - a)``, in which a steady approach to 1 is a straight line.

    Args:
        alignment: at most 1.

    Returns:
        At most 21.
    """
    return -math.log1p(-min(alignment, 1 - 1e-9))


@dataclass(frozen=True)
class Line:
    """A straight line through ``-log(1 - a)`` over steps: slope, its standard error, and the slopes of the halves."""

    slope: float
    error: float
    early: float
    late: float


def fit_line(steps: Sequence[int], curve: Sequence[float], readings: int) -> Line | None:
    """Fit a line through the last readings of a curve.

    Args:
        steps: the steps of the readings.
        curve: their alignments.
        readings: number of readings to fit.

    Returns:
        The line; `None` if there are too few readings.
    """
    if len(curve) < readings:
        return None
    x, y = list(steps[-readings:]), [stretch(value) for value in curve[-readings:]]
    if x[-1] == x[0]:
        return None
    slope, intercept = statistics.linear_regression(x, y)
    rest = [b - intercept - slope * a for a, b in zip(x, y)]
    squares = math.fsum(value * value for value in rest)
    spread = math.fsum((a - statistics.fmean(x)) ** 2 for a in x)
    correlation = 0.0 if squares == 0 else math.fsum(a * b for a, b in itertools.pairwise(rest)) / squares
    correlation = min(max(correlation, 0.0), 0.99)
    error = math.sqrt(squares / (readings - 2) / spread * (1 + correlation) / (1 - correlation))
    half = readings // 2
    early = statistics.linear_regression(x[:half], y[:half]).slope
    late = statistics.linear_regression(x[half:], y[half:]).slope
    return Line(slope, error, early, late)
