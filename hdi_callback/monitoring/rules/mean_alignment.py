"""`MeanAlignment`: the mean alignment of a layer's heads reaches a limit."""

from __future__ import annotations

from hdi_callback.monitoring.alerts import Alert, Finding, Level, Rule, Series
from hdi_callback.monitoring.rules.groups import aligned_groups, heads_in
from hdi_callback.monitoring.rules.healthy_runs import healthy_peak
from hdi_callback.monitoring.rules.lenses import HYSTERESIS, MEAN, NEARLY_ONE, Lens, is_active_at, is_first_step
from hdi_callback.monitoring.rules.thresholds import check_limit
from hdi_callback.monitoring.rules.tied_heads import equal_heads
from hdi_callback.monitoring.rules.words import (
    NO_REMEDY,
    SEPARATE,
    decimal,
    earlier,
    named_groups,
    shared_directions,
)


class MeanAlignment(Rule):
    """The heads of a layer have moved together: their mean alignment reaches a limit.

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
        is_from_start = series.holds_from_start(lambda row: row.values.get(metric, 0) >= limit)
        if series.is_pretrained and series.first.values.get(metric, 0) >= limit - HYSTERESIS and active is None:
            return None  # pretrained with this alignment
        if active is None and len(heads_in(equal_heads(series.latest))) == series.facts.get("num_key_heads"):
            return None  # reported as tied
        value = series.value(metric)
        effective = series.latest.values.get("hdi_effective_heads")
        left = "" if effective is None or lens == "energy" else f", {effective:.1f} effective heads are left"
        weighed = ", weighed by energy" if lens == "energy" else ""
        groups = aligned_groups(series.latest, series.facts, lens, NEARLY_ONE) if lens == "subspace" else ()
        heads = heads_in(groups)
        is_all = not groups or len(heads) == series.facts.get("num_key_heads", len(heads))
        if lens == "energy":
            what = f"{shared_directions(series)} over all heads"
        elif level == "critical" or (groups and not is_all):
            what = (
                named_groups(groups)
                if groups and not (is_all and len(groups) == 1)
                else "all heads are nearly identical"
            )
        else:
            what = "all heads are converging"
        return Finding(
            f"{what} (mean alignment {decimal(value)}{weighed}{earlier(series, metric)}{left})",
            level,
            value,
            limit,
            metric,
            since=series.since(lambda row: row.values.get(metric, 0) >= limit - HYSTERESIS),
            is_from_start=is_from_start,
            certainty=healthy_peak(metric, limit),
            remedy=SEPARATE if lens == "subspace" else NO_REMEDY,
            heads=() if is_all else heads,
            groups=groups,
        )
