"""`SharedDirection`: one or few directions come to dominate all heads."""

from __future__ import annotations

from typing import ClassVar

from hdi_callback.arguments import number
from hdi_callback.monitoring.alerts import Alert, Finding, Rule, Series
from hdi_callback.monitoring.rules.healthy_runs import how_often_raised
from hdi_callback.monitoring.rules.lenses import HYSTERESIS, MEAN, TOGETHER
from hdi_callback.monitoring.rules.words import NO_REMEDY, decimal, shared_directions


class SharedDirection(Rule):
    """The same directions, mostly one, come to dominate all heads late and suddenly: the energy alignment jumps.

    Healthy heads come to share a direction early in training, as fast and as far. So the level alone says little; a
    quiet stretch before is required as well: over 20 readings that ended 15 readings ago the alignment moved by at most
    0.2, and since then it has risen by 0.4 or more.

    Args:
        limit: mean alignment in the energy lens.
    """

    name = "shared direction"
    needs = ("hdi_energy_alignment",)
    quiet: ClassVar[int] = 20
    recent: ClassVar[int] = 15
    calm: ClassVar[float] = 0.2
    rise: ClassVar[float] = 0.4

    def __init__(self, limit: float = 0.8) -> None:
        self.limit = number("limit of SharedDirection", limit, above=0, below=1, example=0.8)

    def judge(self, series: Series, active: Alert | None) -> Finding | None:
        """Find a late jump of the energy alignment."""
        now = series.value(MEAN["energy"])
        if active is not None:
            return active.finding if now >= self.limit - HYSTERESIS else None
        steps, curve = series.curve(MEAN["energy"])
        before = curve[-(self.quiet + self.recent) - 1 : -self.recent]
        has_mean_alert = series.latest.values.get(MEAN["subspace"], 0) >= TOGETHER
        if now < self.limit or len(before) <= self.quiet or has_mean_alert:
            return None
        if max(before) - min(before) > self.calm or now - max(before) < self.rise:
            return None
        return Finding(
            f"{shared_directions(series)} over all heads (mean alignment {decimal(now)} weighed by energy, at most "
            f"{decimal(max(before))} until step {steps[-self.recent - 1]})",
            "warning",
            now,
            self.limit,
            MEAN["energy"],
            since=steps[-self.recent - 1],
            certainty=how_often_raised(self.name, limit=self.limit),
            remedy=NO_REMEDY,
        )
