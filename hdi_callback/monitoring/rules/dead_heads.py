"""`DeadHeads`: heads whose key weight is zero, or so small that their attention is uniform."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import ClassVar

from hdi_callback.arguments import number
from hdi_callback.monitoring.alerts import Alert, Finding, Rule, Series
from hdi_callback.monitoring.rules.healthy_runs import healthy_peak
from hdi_callback.monitoring.rules.named import was_named
from hdi_callback.monitoring.rules.words import named_heads


class DeadHeads(Rule):
    """Key weights of heads are so small that they weigh all tokens alike.

    A head is dead if its norm has fallen to a small share of its norm at the first reading, or of that of the median
    head beside it. Heads that begin so are not reported until the key weights of the layer have changed at five
    readings, or, if nothing changes, for twenty. In pretrained weights they are ignored. If a norm follows the keys,
    only a weight of zeros is dead, as the norm removes its size.

    Args:
        share: share of the norm that is a warning; the alert is resolved at twice as much.
    """

    name = "dead heads"
    needs = ("hdi_dead_heads",)
    moved: ClassVar[int] = 5
    patience: ClassVar[int] = 20

    def __init__(self, share: float = 0.01) -> None:
        self.share = number("share of DeadHeads", share, above=0, below=1, example=0.01)

    def judge(self, series: Series, active: Alert | None) -> Finding | None:
        """Find dead heads among those that have been alive, or have had time to become so."""
        first, ranks = series.first, series.latest.per_head("rank")
        # A history of an earlier version holds no norms; then ranks decide.
        before = first.per_head("head_norm") or [float(rank > 0) for rank in first.per_head("rank") or ranks]
        norms = series.latest.per_head("head_norm") or [float(rank > 0) for rank in ranks]
        share = 0.0 if "key" in series.facts.get("normed", ()) else self.share
        dead, sizes = [], []
        for head, norm in enumerate(norms):
            beside, limit = _median_beside(norms, head), share * (2 if was_named(active, head) else 1)
            if before[head] <= share * _median_beside(before, head) or not before[head]:  # it began so
                is_dead = not series.is_pretrained and self._has_had_time(series) and norm <= limit * beside
                reference = beside
            else:
                reference = max(before[head], beside)
                is_dead = norm <= limit * reference
            if is_dead:
                dead.append(head)
                sizes.append(norm / reference if reference else 0.0)
        if not dead:
            return None
        largest = max(sizes)
        size = "zero" if largest == 0 else f"at most {100 * largest:.1g} % of what it was, or of the heads beside"
        is_one = len(dead) == 1
        return Finding(
            f"{named_heads(dead)} {'is' if is_one else 'are'} dead for practical purposes (the norm of the key weight "
            f"is {size})",
            "warning",
            len(dead),
            0,
            "hdi_dead_heads",
            tuple(dead),
            None if active is None else active.finding.since,
            healthy_peak(self.name, share) if share else "",
            "less weight decay on the attention, or checking whether its gradients arrive",
        )

    def _has_had_time(self, series: Series) -> bool:
        _, norms = series.curve("hdi_head_norm")
        changed = sum(norm != norms[0] for norm in norms)
        return changed >= self.moved or len(series.rows) > self.patience


def _median_beside(norms: Sequence[float], head: int) -> float:
    others = [norm for other, norm in enumerate(norms) if other != head]
    return statistics.median(others) if others else 0.0
