"""Heads that score, write or attend alike, as circuits and attention rows show them."""

from __future__ import annotations

from typing import ClassVar

from hdi_callback.arguments import number
from hdi_callback.monitoring.alerts import Alert, Finding, Rule, Series
from hdi_callback.monitoring.rules.groups import heads_in, new_since_loading, similar_groups
from hdi_callback.monitoring.rules.thresholds import healthy_peak
from hdi_callback.monitoring.rules.words import NO_REMEDY, SEPARATE, decimal, named_groups


class _SimilarHeads(Rule):
    """Some heads of a layer do the same by one measure; all of them are named."""

    matrix: ClassVar[str]
    what: ClassVar[str]
    measure: ClassVar[str]
    remedy: ClassVar[str]
    margin: ClassVar[float]
    judged: ClassVar[str] = ""
    """Under what healthy runs are known, where that is not the metric."""
    lasts: ClassVar[int] = 1
    """Readings in a row at which the limit is reached: heads that begin at zero all move the same way at first."""
    began_below: ClassVar[float | None] = None
    """What the first reading must have been below; `None` to ask of all layers."""

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
        groups = similar_groups(series.latest, self.matrix, self.limit)
        if active is not None:
            reported = set(active.finding.heads) | set(heads_in(groups))
            near = similar_groups(series.latest, self.matrix, limit)
            groups = tuple(kept for group in near if len(kept := tuple(h for h in group if h in reported)) > 1)
        # The first reading keeps its worst pair and no matrix: what was so alike at first is known by it alone.
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


class MergedScores(_SimilarHeads):
    """Query and key weights of some heads have become one: the cosine of their QK circuits is at a limit.

    It sees what key subspaces cannot: query heads under grouped and multi-query attention, and heads as wide as the
    layer's input.

    Args:
        limit: of the cosine.
    """

    name = "merged scores"
    matrix = "circuit_qk"
    what = "scoring alike"
    measure = "largest cosine of QK circuits"
    remedy = SEPARATE
    margin = 0.1

    def __init__(self, limit: float = 0.9) -> None:
        super().__init__(limit)


class MergedMessages(_SimilarHeads):
    """Value and output weights of some heads have become one: the cosine of their OV circuits is at a limit.

    Heads whose outputs begin at zero all move the same way at first, and nothing is known of them at the first reading:
    only layers that began with heads of their own are judged.

    Args:
        limit: of the cosine.
    """

    name = "merged messages"
    matrix = "circuit_ov"
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
        limit: of the cosine of their attention rows with the uniform part taken out.
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
