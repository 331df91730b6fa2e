"""Heads that score, write or attend alike, by circuits and attention rows."""

from __future__ import annotations

from typing import ClassVar

from hdi_callback.arguments import number
from hdi_callback.monitoring.alerts import Alert, Finding, Rule, Series
from hdi_callback.monitoring.rules.groups import Groups, heads_in, new_since_loading, reported_groups, similar_groups
from hdi_callback.monitoring.rules.healthy_runs import healthy_peak
from hdi_callback.monitoring.rules.small_start import has_come_together
from hdi_callback.monitoring.rules.words import NO_REMEDY, SEPARATE, decimal, named_groups


class _SimilarHeads(Rule):
    """Some heads of a layer are alike by one measure; all of them are named."""

    matrix: ClassVar[str]
    what: ClassVar[str]
    measure: ClassVar[str]
    remedy: ClassVar[str]
    margin: ClassVar[float]
    judged: ClassVar[str] = ""
    """Key of the statistics of healthy runs, if it is not the metric."""
    lasts: ClassVar[int] = 1
    """Consecutive readings at the limit: heads that begin at zero all move the same way at first."""
    norms: ClassVar[str] = ""
    """Array of the norms of what is compared, if it has a size."""
    began_below: ClassVar[float | None] = None
    """Upper bound of the first reading; `None` to judge all layers."""

    def __init__(self, limit: float) -> None:
        self.limit = number(f"limit of {type(self).__name__}", limit, above=0, below=1, example=0.9)
        self.needs = (f"{self.matrix}_worst",)

    def judge(self, series: Series, active: Alert | None) -> Finding | None:
        """Find the heads that are alike."""
        limit = self.limit - (self.margin if active else 0)
        metric = f"{self.matrix}_worst"
        value = series.value(metric)
        _, curve = series.curve(metric)
        if value < limit or (active is None and min(curve[-self.lasts :]) < limit) or len(curve) < self.lasts:
            return None
        if self.began_below is not None and not series.first.values.get(metric, 1.0) < self.began_below:
            return None
        kept = () if active is None else reported_groups(active.finding)
        groups = self._groups(series, kept)
        # The first reading is kept without its matrix: only its worst pair says which heads were alike at first.
        groups = new_since_loading(groups, similar_groups(series.first, self.matrix, limit), series)
        if not groups:
            return None
        return Finding(
            f"{named_groups(groups, self.what)} ({self.measure} {decimal(value)})",
            "warning",
            value,
            self.limit,
            metric,
            heads_in(groups),
            series.since(lambda row: row.values[metric] >= limit, metric),
            healthy_peak(self.judged or metric, self.limit),
            self.remedy,
            is_from_start=series.holds_from_start(lambda row: row.values[metric] >= self.limit, metric),
            groups=groups,
        )

    def _groups(self, series: Series, kept: Groups) -> Groups:
        """The heads that are alike now, and have come together if what is compared has a size."""
        reported = {head: place for place, group in enumerate(kept) for head in group}
        loosened = self.margin / (1 - self.limit) + 1

        def has_merged(one: int, other: int, cosine: float) -> bool:
            was_reported = one in reported and reported[one] == reported.get(other)
            return has_come_together(series, self.norms, (one, other), cosine, loosened if was_reported else 1.0)

        return similar_groups(
            series.latest, self.matrix, self.limit, kept=kept, margin=self.margin, is_joined=has_merged
        )


class MergedScores(_SimilarHeads):
    """Query and key weights of some heads score alike: the cosine of their QK circuits reaches a limit.

    It covers cases that key subspaces cannot: query heads under grouped and multi-query attention, and heads as wide as
    the layer's input. Where weights begin small, heads are also alike as they all read what training learns first;
    they are named if what distinguishes them is no more than at the first reading.

    Args:
        limit: of the cosine.
    """

    name = "merged scores"
    matrix = "circuit_qk"
    norms = "circuit_qk_norm"
    what = "scoring alike"
    measure = "largest cosine of QK circuits"
    remedy = SEPARATE
    margin = 0.1

    def __init__(self, limit: float = 0.9) -> None:
        super().__init__(limit)


class MergedMessages(_SimilarHeads):
    """Value and output weights of some heads write the same: the cosine of their OV circuits reaches a limit.

    Heads whose output weights begin at zero all move the same way at first, so only layers with distinct heads at the
    first reading are judged. Of heads that begin small, those are named between which there is no more difference than
    at the first reading.

    Args:
        limit: of the cosine.
    """

    name = "merged messages"
    matrix = "circuit_ov"
    norms = "circuit_ov_norm"
    judged = name
    what = "writing the same"
    began_below = 0.5
    measure = "largest cosine of OV circuits"
    remedy = NO_REMEDY
    margin = 0.1

    def __init__(self, limit: float = 0.9) -> None:
        super().__init__(limit)


class AttendAlike(_SimilarHeads):
    """Some heads attend alike, beyond both being flat.

    Args:
        limit: limit of the cosine of their attention rows with the uniform part removed.
    """

    name = "attend alike"
    matrix = "attention_alike"
    what = "attending alike"
    measure = "largest cosine of their attention"
    remedy = SEPARATE
    margin = 0.02
    lasts = 3

    def __init__(self, limit: float = 0.98) -> None:
        super().__init__(limit)
