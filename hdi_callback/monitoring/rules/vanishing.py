"""`VanishingWeights`: heads whose circuits shrink."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import ClassVar

from hdi_callback.arguments import number
from hdi_callback.monitoring.alerts import Alert, Finding, Rule, Series
from hdi_callback.monitoring.rules.healthy_runs import healthy_peak
from hdi_callback.monitoring.rules.named import was_named
from hdi_callback.monitoring.rules.words import named_heads


class VanishingWeights(Rule):
    """A head's circuit vanishes: its norm has fallen to a share of its norm at the first reading.

    A circuit is the product of query and key weights, or of value and output weights: it falls when either does. Heads
    that begin near zero, relative to others of their layer, are not judged, and heads that an intervention has written
    begin anew. If a norm follows queries or keys (or values), the size of those weights has no effect, and decay
    shrinks them in healthy runs: their circuit is not judged.

    Args:
        share: share of the norm at the first reading that is a warning; the alert is resolved at twice as much.
    """

    name = "vanishing weights"
    needs = ("circuit_qk_norm",)
    circuits: ClassVar[dict[str, str]] = {
        "circuit_qk_norm": "query and key weights", "circuit_ov_norm": "value and output weights",
    }  # fmt: skip
    roles: ClassVar[dict[str, frozenset[str]]] = {
        "circuit_qk_norm": frozenset({"query", "key"}), "circuit_ov_norm": frozenset({"value"}),
    }  # fmt: skip
    """Roles whose size does not matter for a circuit if a norm follows them."""
    begins: ClassVar[float] = 0.1
    """Smallest first norm of a head that is judged, as a share of the layer's median head."""

    def __init__(self, share: float = 0.1) -> None:
        self.share = number("share of VanishingWeights", share, above=0, below=1, example=0.1)

    def judge(self, series: Series, active: Alert | None) -> Finding | None:
        """Find the heads whose circuits have shrunk, by the circuit that shrank more."""
        found: dict[str, dict[int, float]] = {}
        for metric in self.circuits:
            if not self.roles[metric].isdisjoint(series.facts.get("normed", ())):
                continue
            now, first = series.latest.per_head(metric), series.first.per_head(metric)
            middle = _median(first)
            found[metric] = {
                head: after / before
                for head, (after, before) in enumerate(zip(now, first))
                if before > self.begins * middle
                and after <= self.share * (2 if was_named(active, head) else 1) * before
                and head not in series.rewritten
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
