"""`WorstPair`: two or more heads of a layer are nearly one."""

from __future__ import annotations

from hdi_callback.monitoring.alerts import Alert, Finding, Rule, Series
from hdi_callback.monitoring.rules.groups import aligned_groups, heads_in, new_since_loading, reported_groups
from hdi_callback.monitoring.rules.healthy_runs import healthy_peak
from hdi_callback.monitoring.rules.lenses import HYSTERESIS, MEAN, TOGETHER, WORST, Lens, is_first_step, pair_of
from hdi_callback.monitoring.rules.thresholds import check_limit
from hdi_callback.monitoring.rules.tied_heads import equal_heads
from hdi_callback.monitoring.rules.words import NO_REMEDY, SEPARATE, decimal, named_groups, pair_earlier


class WorstPair(Rule):
    """Some heads of a layer are nearly one, whatever the others do: all of them are named.

    In pretrained weights, heads that were as close at the first reading are ignored.

    Args:
        subspace: limit in the subspace lens.
        energy: limit in the energy lens.
    """

    name = "worst pair"
    needs = ("hdi_worst_alignment", "hdi_energy_worst_alignment")

    def __init__(self, subspace: float | None = 0.8, energy: float | None = None) -> None:
        limits: dict[Lens, float | None] = {"subspace": subspace, "energy": energy}
        checked = {lens: check_limit(f"{lens} of WorstPair", limit) for lens, limit in limits.items()}
        self.limits = {lens: limit for lens, limit in checked.items() if limit is not None}

    def judge(self, series: Series, active: Alert | None) -> Finding | None:
        """Find the closest heads, by the lens that is further beyond its limit."""
        if is_first_step(series):
            return None
        reached = []
        for lens, limit in self.limits.items():
            # If all heads move together, `MeanAlignment` reports and names them.
            if active is None and series.latest.values.get(MEAN[lens], 0) >= TOGETHER:
                continue
            value = series.value(WORST[lens])
            if value >= limit - (HYSTERESIS if active else 0):
                reached.append((value - limit, lens, limit))
        if not reached:
            return None
        _, lens, limit = max(reached)
        kept = () if active is None else reported_groups(active.finding)
        groups = aligned_groups(series.latest, series.facts, lens, limit, kept=kept, margin=HYSTERESIS)
        if active is None:
            equal = set(equal_heads(series.latest))  # reported as tied
            groups = tuple(group for group in groups if group not in equal)
        first = aligned_groups(series.first, series.facts, lens, limit - HYSTERESIS)
        groups = new_since_loading(groups, first, series)
        if not groups:
            return None
        metric, pair = WORST[lens], pair_of(series.latest, lens)
        value = series.value(metric)
        largest = (
            "alignment" if heads_in(groups) == tuple(sorted(pair)) else f"closest {pair[0]} and {pair[1]}: alignment"
        )
        return Finding(
            f"{named_groups(groups)} ({largest} {decimal(value)}{', weighed by energy' if lens == 'energy' else ''}"
            f"{pair_earlier(series, lens, pair)})",
            "warning",
            value,
            limit,
            metric,
            heads_in(groups),
            series.since(lambda row: row.values.get(metric, 0) >= limit - HYSTERESIS and pair_of(row, lens) == pair),
            healthy_peak(metric, limit),
            SEPARATE if lens == "subspace" else NO_REMEDY,
            is_from_start=series.holds_from_start(
                lambda row: row.values.get(metric, 0) >= limit and pair_of(row, lens) == pair
            ),
            groups=groups,
        )
