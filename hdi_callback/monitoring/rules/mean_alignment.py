"""The heads of a layer have moved together."""

from __future__ import annotations

from hdi_callback.monitoring.alerts import Alert, Finding, Level, Rule, Series
from hdi_callback.monitoring.rules.lenses import HYSTERESIS, MEAN, Lens, is_active_at, is_first_step
from hdi_callback.monitoring.rules.thresholds import TRIED, certainty_of, check_limit
from hdi_callback.monitoring.rules.words import SEPARATE, decimal, earlier

_MOVES: dict[tuple[Level, Lens], str] = {
    ("warning", "subspace"): "all heads are closing up",
    ("critical", "subspace"): "all heads are nearly one",
    ("warning", "energy"): "one direction has taken over all heads",
}


class MeanAlignment(Rule):
    """The heads of a layer have moved together: the mean over their pairs is at a limit.

    Args:
        subspace: limit of the subspace lens that is a warning.
        energy: limit of the energy lens that is a warning.
        critical: limit of the subspace lens that is critical.
    """

    name = "mean alignment"
    needs = ("hdi_alignment", "hdi_energy_alignment")

    def __init__(self, subspace: float | None = 0.5, energy: float | None = 0.95, critical: float | None = 0.9) -> None:
        limits: list[tuple[Level, Lens, float | None]] = [
            ("critical", "subspace", critical),
            ("warning", "subspace", subspace),
            ("warning", "energy", energy),
        ]
        checked = [(level, lens, check_limit("a limit of MeanAlignment", limit)) for level, lens, limit in limits]
        self.limits = [(level, lens, limit) for level, lens, limit in checked if limit is not None]

    def judge(self, series: Series, active: Alert | None) -> Finding | None:
        """Find the most serious limit that is reached, by the lens that is further beyond it."""
        if is_first_step(series):
            return None
        reached = []
        for level, lens, limit in self.limits:
            margin = HYSTERESIS if is_active_at(active, level) else 0
            value = series.value(MEAN[lens])
            if value >= limit - margin:
                reached.append((level == "critical", value - limit, level, lens, limit))
        if not reached:
            return None
        *_, level, lens, limit = max(reached)
        metric = MEAN[lens]
        value = series.value(metric)
        heads = series.latest.values.get("hdi_effective_heads")
        left = "" if heads is None or lens == "energy" else f", {heads:.1f} effective heads are left"
        weighed = ", weighed by energy" if lens == "energy" else ""
        return Finding(
            f"{_MOVES[level, lens]} (mean alignment {decimal(value)}{weighed}{earlier(series, metric)}{left})",
            level,
            value,
            limit,
            metric,
            since=series.since(lambda row: row.values.get(metric, 0) >= limit - HYSTERESIS),
            is_from_start=series.holds_from_start(lambda row: row.values.get(metric, 0) >= limit),
            certainty=certainty_of(limit, TRIED.mean if lens == "subspace" else TRIED.energy_mean),
            remedy=SEPARATE,
        )
