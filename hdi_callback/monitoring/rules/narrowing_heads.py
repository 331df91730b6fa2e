"""`NarrowingHeads`: the keys of heads lose directions quickly."""

from __future__ import annotations

from typing import ClassVar

from hdi_callback.arguments import number
from hdi_callback.monitoring.alerts import Alert, Finding, Rule, Series
from hdi_callback.monitoring.rules.healthy_runs import healthy_peak
from hdi_callback.monitoring.rules.named import was_named
from hdi_callback.monitoring.rules.small_start import has_lost_directions
from hdi_callback.monitoring.rules.words import NO_REMEDY, decimal, named_heads


class NarrowingHeads(Rule):
    """The key weights of a head have come to read few directions within a few readings.

    Directions are lost, or one grows far beyond the others. It needs no second head to compare with, so it works under
    multi-query attention too. Healthy training makes spectra uneven as well, but slowly. Heads that begin at zero have
    no first spectrum to compare with, and where fresh key weights are small, a growing direction alone is no finding.

    Args:
        share: share of the spectral flatness that is a warning: both of the least in the layer twelve readings before
            (or at the first reading, if there are fewer) and of the head's own at the first reading. The alert is
            resolved half way back.
    """

    name = "narrowing heads"
    needs = ("hdi_min_flatness",)
    within: ClassVar[int] = 12

    def __init__(self, share: float = 0.4) -> None:
        self.share = number("share of NarrowingHeads", share, above=0, below=1, example=0.4)

    def judge(self, series: Series, active: Alert | None) -> Finding | None:
        """Find the heads whose flatness has fallen."""
        now, first = series.latest.per_head("flatness"), series.first.per_head("flatness")
        steps, curve = series.curve("hdi_min_flatness")
        place = max(0, len(curve) - 1 - self.within)
        limit = self.share * curve[place]
        since, loosened = steps[place], self.share**-0.5
        if active is not None:  # compared with the reading at which the alert was raised
            limit, since = active.finding.threshold or 0.0, active.finding.since or since
        heads = [
            head
            for head, (after, before) in enumerate(zip(now, first))
            if 0 < after <= (margin := loosened if was_named(active, head) else 1.0) * min(limit, self.share * before)
            and head not in series.rewritten
            and has_lost_directions(series, head, margin * self.share)
        ]
        if not heads:
            return None
        worst = min(heads, key=lambda head: now[head])
        wide, began = (row.per_head("effective_rank")[worst] for row in (series.latest, series.first))
        return Finding(
            f"the keys of {named_heads(heads)} have come to read few directions within {self.within} readings (head "
            f"{worst}: spectral flatness {decimal(now[worst])}, {decimal(limit / self.share)} or more at step {since}; "
            f"effective rank {wide:.1f}, {began:.1f} at step {series.first.step})",
            "warning",
            now[worst],
            limit,
            "hdi_min_flatness",
            tuple(heads),
            since,
            healthy_peak(self.name, self.share),
            NO_REMEDY,
        )
