"""Two heads of a layer are nearly one."""

from __future__ import annotations

from hdi_callback.monitoring.alerts import Alert, Finding, Rule, Series
from hdi_callback.monitoring.rules.lenses import HYSTERESIS, MEAN, TOGETHER, WORST, Lens, is_first_step, pair_of
from hdi_callback.monitoring.rules.thresholds import TRIED, certainty_of, check_limit
from hdi_callback.monitoring.rules.words import decimal, pair_earlier


class WorstPair(Rule):
    """Two heads of a layer are nearly one, whatever the others do.

    Args:
        subspace: limit of the subspace lens.
        energy: limit of the energy lens.
    """

    name = "worst pair"
    needs = ("hdi_worst_alignment", "hdi_energy_worst_alignment")

    def __init__(self, subspace: float | None = 0.8, energy: float | None = None) -> None:
        limits: dict[Lens, float | None] = {"subspace": subspace, "energy": energy}
        checked = {lens: check_limit(f"{lens} of WorstPair", limit) for lens, limit in limits.items()}
        self.limits = {lens: limit for lens, limit in checked.items() if limit is not None}

    def judge(self, series: Series, active: Alert | None) -> Finding | None:
        """Find the pair that is further beyond its limit."""
        if is_first_step(series):
            return None
        margin = HYSTERESIS if active else 0
        reached = []
        for lens, limit in self.limits.items():
            # Where all heads close up, the mean says so, and a pair is nothing to name.
            if active is None and series.latest.values.get(MEAN[lens], 0) >= TOGETHER:
                continue
            value = series.value(WORST[lens])
            if value >= limit - margin:
                reached.append((value - limit, lens, limit))
        if not reached:
            return None
        _, lens, limit = max(reached)
        metric, pair = WORST[lens], pair_of(series.latest, lens)
        value = series.value(metric)
        return Finding(
            f"heads {pair[0]} and {pair[1]} are nearly one head (alignment {decimal(value)}"
            f"{', weighed by energy' if lens == 'energy' else ''}{pair_earlier(series, lens, pair)})",
            "warning",
            value,
            limit,
            metric,
            pair,
            series.since(lambda row: row.values.get(metric, 0) >= limit - HYSTERESIS and pair_of(row, lens) == pair),
            certainty_of(limit, TRIED.pair if lens == "subspace" else TRIED.energy_pair),
            "ReviveHeads or DiversityPenalty" if len(pair) == 2 else "",
            is_from_start=series.holds_from_start(
                lambda row: row.values.get(metric, 0) >= limit and pair_of(row, lens) == pair
            ),
        )
