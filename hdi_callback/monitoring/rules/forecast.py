"""`AlignmentForecast`: the alignment will reach its limit soon."""

from __future__ import annotations

import math
from typing import ClassVar

from hdi_callback.arguments import number
from hdi_callback.monitoring.alerts import Alert, Finding, Rule, Series
from hdi_callback.monitoring.rules.lenses import HYSTERESIS, MEAN, TOGETHER, WORST, pair_of
from hdi_callback.monitoring.rules.line import Line, fit_line, stretch
from hdi_callback.monitoring.rules.words import SEPARATE, decimal


class AlignmentForecast(Rule):
    """The heads of a layer, or two of them, approach each other and will soon be at the limit.

    A straight line through ``y = -log(1 - a)`` over the last 20 readings, whose slope is well above its standard error
    (for autocorrelated residuals: inflated by ``sqrt((1 + r) / (1 - r))``), which rises, does not slow down, and
    reaches the limit within 100 readings; three times in a row; and the weights have not shrunk to half. Subspace lens
    only: in the energy lens healthy heads approach each other as fast.

    Args:
        limit: the alignment that is forecast.
        deviations: standard errors by which the slope must exceed zero.
        rise: smallest rise of the alignment over the 20 readings.
    """

    name = "forecast"
    needs = ("hdi_alignment", "hdi_worst_alignment")
    readings: ClassVar[int] = 20
    horizon: ClassVar[int] = 100
    hits: ClassVar[int] = 3
    shrinks: ClassVar[float] = 0.5

    def __init__(self, limit: float = 0.9, deviations: float = 3.5, rise: float = 0.05) -> None:
        self.limit = number("limit of AlignmentForecast", limit, above=0, below=1, example=0.9)
        self.deviations = number("deviations of AlignmentForecast", deviations, above=0, below=math.inf, example=3.5)
        self.rise = number("rise of AlignmentForecast", rise, above=0, below=1, example=0.05)

    def judge(self, series: Series, active: Alert | None) -> Finding | None:
        """Find which of mean and closest pair reaches the limit first."""
        if active is not None:
            assert active.finding.metric is not None
            steps, curve = series.curve(active.finding.metric)
            fit = fit_line(steps, curve, self.readings)
            # It is resolved when the rise has ended, not when the alignment has reached the limit.
            is_rising = fit is not None and fit.slope > fit.error and not self._vanishes(series)
            return active.finding if is_rising or curve[-1] >= self.limit - HYSTERESIS else None
        found = []
        if series.value(MEAN["subspace"]) >= TOGETHER or self._vanishes(series):
            return None
        for metric in self.needs:
            steps, curve = series.curve(metric)
            fit = self._hit(steps, curve)
            if fit is not None and all(self._hit(steps[:-back], curve[:-back]) for back in range(1, self.hits)):
                found.append((self._arrival(fit, curve[-1]), metric, fit, steps, curve))
        if not found:
            return None
        arrival, metric, fit, steps, curve = min(found, key=lambda item: item[0])
        start = len(steps) - self.readings
        pair = pair_of(series.latest, "subspace") if metric == WORST["subspace"] else ()
        who = f"heads {pair[0]} and {pair[1]}" if pair else "all heads"
        return Finding(
            f"{who} are becoming alike (alignment {decimal(curve[-1])}, {decimal(curve[start])} "
            f"{steps[-1] - steps[start]} steps ago) and at this rate reach {decimal(self.limit)} near step "
            f"{round(steps[-1] + arrival)}",
            "warning",
            curve[-1],
            self.limit,
            metric,
            pair,
            since=steps[start],
            certainty=f"the slope is {fit.slope / max(fit.error, 1e-12):.1f} standard errors from zero",
            remedy=SEPARATE,
        )

    def _vanishes(self, series: Series) -> bool:
        """Return whether the weights shrink: the rest of vanishing weights is often aligned, which is no collapse."""
        _, norms = series.curve("hdi_head_norm")
        return len(norms) >= self.readings and norms[-1] <= self.shrinks * norms[-self.readings]

    def _hit(self, steps: list[int], curve: list[float]) -> Line | None:
        # The rise first: it is cheap, and most layers have none.
        if len(curve) < self.readings or not self.rise <= curve[-1] - curve[-self.readings]:
            return None
        fit = fit_line(steps, curve, self.readings)
        if fit is None or not self.deviations * fit.error < fit.slope or fit.late < fit.early:
            return None
        reading = (steps[-1] - steps[-self.readings]) / (self.readings - 1)
        is_near = curve[-1] < self.limit and self._arrival(fit, curve[-1]) <= self.horizon * reading
        return fit if is_near else None

    def _arrival(self, fit: Line, now: float) -> float:
        """Steps until the limit."""
        return (stretch(self.limit) - stretch(now)) / fit.slope
