"""Weights that are no longer numbers."""

from __future__ import annotations

from hdi_callback.monitoring.alerts import Alert, Finding, Rule, Series
from hdi_callback.monitoring.readings import NOT_FINITE


class NonFinite(Rule):
    """The weights of a layer are no longer numbers."""

    name = "weights not finite"

    def judge(self, series: Series, active: Alert | None) -> Finding | None:
        """Find NaN or infinity in the key weights."""
        if series.latest.absent != NOT_FINITE:
            return None
        last = [row.step for row in series.rows if "hdi" in row.values]
        before = f"; they were at step {last[-1]}" if last else ""
        return Finding(
            f"the key weights hold NaN or infinity{before}",
            "critical",
            certainty="certain, as read from the weights",
            remedy="a checkpoint from before, with gradient clipping or a lower learning rate",
        )
