"""Heads whose circuits fade away."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import ClassVar

from hdi_callback.arguments import number
from hdi_callback.monitoring.alerts import Alert, Finding, Rule, Series
from hdi_callback.monitoring.rules.thresholds import healthy_peak
from hdi_callback.monitoring.rules.words import named_heads


class VanishingWeights(Rule):
    """What heads score or write with fades away: the norm of a circuit has fallen to a share of what it was.

    A circuit is the product of query and key weights, or of value and output weights: it falls when either does. Heads
    that begin near zero, beside the others of their layer, have nothing to lose, and heads that an intervention has
    written begin anew. Where a norm follows queries or keys (or values), the size of those weights is taken away again,
    and decay shrinks them in healthy runs: the circuit that they are part of is not asked about.

    Args:
        share: of the norm at the first reading, that is a warning; the alert is resolved at twice as much.
    """

    name = "vanishing weights"
    needs = ("circuit_qk_norm",)
    circuits: ClassVar[dict[str, str]] = {
        "circuit_qk_norm": "query and key weights", "circuit_ov_norm": "value and output weights",
    }  # fmt: skip
    roles: ClassVar[dict[str, frozenset[str]]] = {
        "circuit_qk_norm": frozenset({"query", "key"}), "circuit_ov_norm": frozenset({"value"}),
    }  # fmt: skip
    """Those whose size says nothing of a circuit where a norm follows them."""
    begins: ClassVar[float] = 0.1
    """Share of the layer's median head that a head must begin with to be asked about."""

    def __init__(self, share: float = 0.1) -> None:
        self.share = number("share of VanishingWeights", share, above=0, below=1, example=0.1)

    def judge(self, series: Series, active: Alert | None) -> Finding | None:
        """Find the heads whose circuits have fallen, in whichever of the two measures is lower."""
        limit = 2 * self.share if active else self.share
        found: dict[str, dict[int, float]] = {}
        for metric in self.circuits:
            if not self.roles[metric].isdisjoint(series.facts.get("normed", ())):
                continue
            now, first = series.latest.per_head(metric), series.first.per_head(metric)
            middle = _median(first)
            found[metric] = {
                head: after / before
                for head, (after, before) in enumerate(zip(now, first))
                if before > self.begins * middle and after <= limit * before and head not in series.rewritten
            }
        if not any(found.values()):
            return None
        metric = min(found, key=lambda name: min(found[name].values(), default=1.0))
        heads = tuple(found[metric])
        share = min(found[metric].values())
        return Finding(
            f"the {self.circuits[metric]} of {named_heads(heads)} fade away (norm of the circuit at "
            f"{100 * share:.2g} % of what it was at step {series.first.step})",
            "warning",
            share,
            self.share,
            metric,
            heads,
            None if active is None else active.finding.since,
            healthy_peak(self.name, self.share),
            "less weight decay on the attention, or checking whether its gradients arrive",
        )


def _median(values: Sequence[float]) -> float:
    return statistics.median(values) if values else 0.0
