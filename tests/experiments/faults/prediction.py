"""Which reading, early in a run, goes with its final loss? Rank correlations, out of sample."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import numpy as np
from scipy.stats import rankdata, spearmanr

from tests.experiments.faults.monitors import MONITORS, Result
from tests.experiments.faults.plan import EVERY, HEALTHY

SHARES = {"a tenth": 0.1, "a quarter": 0.25, "a half": 0.5}
Pairs = list[tuple[float, float]]


def pairs_of(runs: Sequence[Result], healthy: Sequence[Result], monitor: str, share: float) -> Pairs:
    """Give the score at a share of the steps and the final loss, both against the median of the healthy twins."""
    found = []
    scores = {id(run): _score(run, monitor, share) for run in (*runs, *healthy)}
    for run in runs:
        twins = [twin for twin in healthy if twin["base"] == run["base"] and twin is not run]
        score, final = scores[id(run)], run["validation"][-1]
        typical = [value for twin in twins if (value := scores[id(twin)]) is not None]
        if score is None or not typical:
            continue
        gap = math.inf if final is None else final - statistics.median(twin["validation"][-1] for twin in twins)
        found.append((score - statistics.median(typical), gap))
    return found


def correlation(pairs: Pairs, draws: int = 500) -> tuple[float, float, float]:
    """Rank correlation of scores and gaps with its 95 % interval (bootstrap over runs)."""
    both = np.array(pairs)
    generator = np.random.default_rng(0)
    drawn = both[generator.integers(len(both), size=(draws, len(both)))]
    scores, gaps = (rankdata(drawn[..., column], axis=1) for column in (0, 1))
    scores, gaps = (ranks - ranks.mean(1, keepdims=True) for ranks in (scores, gaps))
    spread = np.sqrt((scores**2).sum(1) * (gaps**2).sum(1))
    found = (scores * gaps).sum(1)[spread > 0] / spread[spread > 0]
    low, high = np.percentile(found, [2.5, 97.5])
    return _spearman(both), float(low), float(high)


def table(looked_at: Sequence[Result], confirming: Sequence[Result]) -> list[str]:
    """One row a reading, in the order of what looked-at runs gave at half of training."""
    healthy = [run for run in (*looked_at, *confirming) if run["kind"] == HEALTHY]
    chosen = {}
    for monitor in MONITORS:
        pairs = pairs_of(looked_at, healthy, monitor, SHARES["a half"])
        if len({score for score, _ in pairs}) > 2:
            chosen[monitor] = _spearman(np.array(pairs))
    lines = [f"| reading | looked-at, a half | {' | '.join(f'confirming, {name}' for name in SHARES)} |",
             "|---|---|---|---|---|"]  # fmt: skip
    for monitor in sorted(chosen, key=lambda name: -abs(chosen[name])):
        cells = []
        for share in SHARES.values():
            pairs = pairs_of(confirming, healthy, monitor, share)
            known = len({score for score, _ in pairs}) > 2
            cells.append("{:+.2f} ({:+.2f} to {:+.2f})".format(*correlation(pairs)) if known else "-")
        lines.append(f"| {monitor} | {chosen[monitor]:+.2f} | {' | '.join(cells)} |")
    return lines


def _score(run: Result, monitor: str, share: float) -> float | None:
    step = share * EVERY * (len(run["validation"]) - 1)
    scores = [score for at, score in MONITORS[monitor](run) if at <= step and math.isfinite(score)]
    return scores[-1] if scores else None


def _spearman(both: np.ndarray) -> float:
    if len(set(both[:, 0])) < 2 or len(set(both[:, 1])) < 2:
        return math.nan
    return float(spearmanr(both[:, 0], both[:, 1]).statistic)
