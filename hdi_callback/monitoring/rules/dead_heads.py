"""Heads without a key weight."""

from __future__ import annotations

from hdi_callback.monitoring.alerts import Alert, Finding, Rule, Series
from hdi_callback.monitoring.rules.words import named_heads


class DeadHeads(Rule):
    """Heads whose key weight is all but zero, beside others that are not."""

    name = "dead heads"
    needs = ("hdi_dead_heads",)

    def judge(self, series: Series, active: Alert | None) -> Finding | None:
        """Find dead heads; a layer that starts at zero altogether is given the first reading to leave it."""
        count = int(series.value("hdi_dead_heads"))
        ranks = series.latest.arrays.get("rank", [])
        dead = tuple(head for head, rank in enumerate(ranks) if rank == 0)
        if count == 0 or (len(dead) == len(ranks) > 0 and len(series.rows) == 1):
            return None
        named = named_heads(dead) if dead else f"{count} heads"
        return Finding(
            f"{named} {'is' if count == 1 else 'are'} dead (the key weight is all but zero)",
            "warning",
            count,
            0,
            "hdi_dead_heads",
            dead,
            series.since(lambda row: row.values.get("hdi_dead_heads", 0) > 0),
            "certain, as read from the weight",
            "less weight decay on the attention, or a reading of its gradients",
        )
