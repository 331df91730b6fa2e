"""What a piece of work adds, in CPU time: runs without and with it in turn, and an interval by bootstrap."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Added:
    """CPU seconds that a run costs more with the work than without it.

    `low` and `high` enclose the median difference of a pair with 95 % confidence, by bootstrap.
    """

    median: float
    low: float
    high: float
    pairs: int


def added(without: Callable[[], object], with_it: Callable[[], object], *, pairs: int) -> Added:
    """Run without the work and with it, `pairs` times after a warm-up; they take turns in coming first.

    A pair is as short as can be, so that what else the machine does slows both alike.
    """
    differences = []
    for pair in range(-3, pairs):
        order = (without, with_it) if pair % 2 else (with_it, without)
        seconds = {work: _seconds(work) for work in order}
        if pair >= 0:
            differences.append(seconds[with_it] - seconds[without])
    low, high = interval(differences)
    return Added(statistics.median(differences), low, high, pairs)


def interval(values: Sequence[float], *, draws: int = 2000) -> tuple[float, float]:
    """The 95 % interval of the median, by bootstrap; the same at every call."""
    generator = random.Random(0)
    medians = sorted(statistics.median(generator.choices(values, k=len(values))) for _ in range(draws))
    return medians[int(0.025 * draws)], medians[int(0.975 * draws) - 1]


def _seconds(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start
