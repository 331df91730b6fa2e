"""Intervals of 95 %, by SciPy."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import numpy as np
from scipy import stats

from examples.theory.claim import Number


def mean_of(name: str, values: Sequence[float], of: str) -> Number:
    """Give a mean with its interval (Student); the values are independent."""
    values = list(map(float, values))
    mean = statistics.fmean(values)
    if len(values) < 2:
        return Number(name, mean, of=of)
    half = stats.t.ppf(0.975, len(values) - 1) * stats.sem(values)
    return Number(name, mean, mean - half, mean + half, of)


def share_of(name: str, hits: int, trials: int, of: str) -> Number:
    """Give a share with its interval (Wilson)."""
    interval = stats.binomtest(hits, trials).proportion_ci(method="wilson")
    return Number(name, hits / trials, interval.low, interval.high, of)


def bootstrap(name: str, values: Sequence, statistic: Callable[[np.ndarray], float], of: str, seed: int = 0) -> Number:
    """Give a statistic of independent rows with its percentile interval, over 2000 resamples."""
    rows, draw = np.asarray(values), np.random.default_rng(seed)
    again = [statistic(rows[draw.integers(len(rows), size=len(rows))]) for _ in range(2000)]
    low, high = np.nanpercentile(again, [2.5, 97.5])
    return Number(name, float(statistic(rows)), float(low), float(high), of)


def rank_correlation(name: str, pairs: Sequence[tuple[float, float]], of: str) -> Number:
    """Give Spearman's correlation with its bootstrap interval."""
    return bootstrap(name, pairs, lambda rows: float(stats.spearmanr(rows[:, 0], rows[:, 1]).statistic), of)


def sign_test(differences: Sequence[float]) -> float:
    """Give the two-sided p-value of as many positive differences, ties left out."""
    nonzero = [value for value in differences if value != 0]
    return float(stats.binomtest(sum(value > 0 for value in nonzero), len(nonzero)).pvalue) if nonzero else 1.0
