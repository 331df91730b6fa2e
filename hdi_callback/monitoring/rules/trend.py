"""`AlignmentTrend`: a notice that the alignment of a layer has begun to rise."""

from __future__ import annotations

import itertools
import math
import statistics
from typing import ClassVar

from hdi_callback.arguments import number
from hdi_callback.monitoring.alerts import Alert, Finding, Rule, Series
from hdi_callback.monitoring.rules.lenses import LENSES, MEAN
from hdi_callback.monitoring.rules.line import stretch
from hdi_callback.monitoring.rules.words import decimal


class AlignmentTrend(Rule):
    """The alignment of a layer has begun to rise: worth a line in the log, never an alarm.

    A CUSUM (Page 1954) over the increments of ``y = -log(1 - a)``, in units of their standard deviation over the first
    20 readings that are kept; its limit is Siegmund's for `false_alarms` of them over all layers and both lenses.

    Args:
        rise: smallest rise of y since the change began.
        false_alarms: chance of a notice in 64 readings of a model whose alignment does not move.
    """

    name = "trend"
    needs = ("hdi_alignment", "hdi_energy_alignment")
    warm_up: ClassVar[int] = 20
    allowance: ClassVar[float] = 0.5

    def __init__(self, rise: float = 0.05, false_alarms: float = 0.05) -> None:
        self.rise = number("rise of AlignmentTrend", rise, above=0, below=math.inf, example=0.05)
        self.false_alarms = number("false_alarms of AlignmentTrend", false_alarms, above=0, below=1, example=0.05)

    def judge(self, series: Series, active: Alert | None) -> Finding | None:
        """Find the lens in which the change is clearer."""
        found = []
        for lens in LENSES:
            steps, curve = series.curve(MEAN[lens])
            if len(curve) <= self.warm_up + 1:
                continue
            y = [stretch(value) for value in curve]
            if y[-1] - min(y) < self.rise:
                continue
            moves = [later - earlier for earlier, later in itertools.pairwise(y)]
            spread = statistics.stdev(moves[: self.warm_up])
            if not spread > 0:
                continue
            total, start, peak, begun = 0.0, self.warm_up, 0.0, self.warm_up
            for place in range(self.warm_up, len(moves)):
                total += moves[place] / spread - self.allowance
                if total <= 0:
                    total, start = 0.0, place + 1
                if total >= peak:
                    peak, begun = total, start
            if total >= self._limit(series.siblings) and y[-1] - y[begun] >= self.rise:
                found.append((total, lens, steps[begun], curve[begun], curve[-1]))
        if not found:
            return None
        total, lens, since, before, now = max(found)
        if active is not None:
            return active.finding
        return Finding(
            f"the mean alignment rises ({decimal(now)}{', weighed by energy' if lens == 'energy' else ''}, "
            f"{decimal(before)} before)",
            "notice",
            now,
            None,
            MEAN[lens],
            since=since,
            certainty="many healthy runs do this",
        )

    def _limit(self, layers: int) -> float:
        k, series = self.allowance, 2 * max(1, layers)
        return math.log(2 * k * k * series * 64 / self.false_alarms) / (2 * k) - 1.166
