"""Heads that are copies of one another when the run begins."""

from __future__ import annotations

from typing import ClassVar

from hdi_callback.arguments import number
from hdi_callback.core import chance_of_overlap
from hdi_callback.monitoring.alerts import Alert, Finding, Rule, Series
from hdi_callback.monitoring.rules.lenses import HYSTERESIS, is_first_step
from hdi_callback.monitoring.rules.words import decimal


class TiedHeads(Rule):
    """At step 0, heads that are more alike than independent initialisation makes them: copied, tied or trained so.

    The probability bound is that of an initialisation. Whether the weights are fresh or were loaded is not known here,
    so an alignment of one half is asked for as well, because heads of a pretrained model are far from random too, and
    no intervention answers this rule unless it names it.

    Args:
        probability: the largest one that is a warning.
    """

    name = "tied heads"
    needs = ("hdi_worst_pair", "hdi_worst_alignment")
    alignment: ClassVar[float] = 0.5

    def __init__(self, probability: float = 1e-6) -> None:
        self.probability = number("probability of TiedHeads", probability, above=0, below=1, example="1e-6")

    def judge(self, series: Series, active: Alert | None) -> Finding | None:
        """Find the closest pair at step 0; afterwards, tell when it has come apart."""
        alignment = series.value("hdi_worst_alignment")
        if active is not None:
            return active.finding if alignment >= self.alignment - HYSTERESIS else None
        width = series.facts.get("width")
        pair = tuple(series.latest.arrays.get("worst_pair", ()))
        if not is_first_step(series) or alignment < self.alignment or width is None or len(pair) != 2 or min(pair) < 0:
            return None
        ranks = series.latest.arrays["rank"]
        live = sum(rank > 0 for rank in ranks)
        overlap = series.value("hdi_worst_pair")
        pairs = live * (live - 1) // 2
        chance = chance_of_overlap(overlap, ranks=(ranks[pair[0]], ranks[pair[1]]), width=width, pairs=pairs)
        if chance > self.probability:
            return None
        is_all = series.latest.values.get("hdi_alignment", 0) >= 0.9
        who = "all heads are" if is_all else f"heads {pair[0]} and {pair[1]} are"
        bound = f"{chance:.0e}" if chance > 1e-300 else "1e-300"
        return Finding(
            f"{who} nearly one head where this run begins (overlap {decimal(overlap)})",
            "warning",
            overlap,
            None,
            "hdi_worst_pair",
            () if is_all else pair,
            certainty=f"heads that are drawn independently come this close with a probability of at most {bound}, so "
            "these were copied or tied, or trained until they were alike",
            remedy="initialising each head on its own if the model is new; weights that were loaded may be meant so",
        )
