"""`TiedHeads`: heads with equal key weights, or more alike at step 0 than independent heads."""

from __future__ import annotations

from typing import ClassVar

from hdi_callback.arguments import number
from hdi_callback.core import chance_of_overlap
from hdi_callback.monitoring.alerts import Alert, Finding, Row, Rule, Series
from hdi_callback.monitoring.rules.groups import (
    Groups,
    aligned_groups,
    heads_in,
    joined_by_both,
    new_since_loading,
)
from hdi_callback.monitoring.rules.lenses import HYSTERESIS, is_first_step
from hdi_callback.monitoring.rules.words import decimal, named_groups

EQUAL = 1 - 4e-7
"""Overlap in both lenses from which on heads are equal: their weights differ by less than a thousandth."""


class TiedHeads(Rule):
    """Heads whose key weights are equal; and at step 0, heads more alike than independent initialisation makes them.

    Equality is no collapse, which never goes so far: the heads share a parameter, were copied, or there is a bug. In
    pretrained weights only heads that became equal later are reported. Improbably similar heads are reported in fresh
    weights only, from an alignment of one half on.

    Args:
        probability: largest probability, under independent initialisation, that is a warning.
    """

    name = "tied heads"
    needs = ("hdi_worst_pair",)
    alignment: ClassVar[float] = 0.5

    def __init__(self, probability: float = 1e-6) -> None:
        self.probability = number("probability of TiedHeads", probability, above=0, below=1, example="1e-6")

    def judge(self, series: Series, active: Alert | None) -> Finding | None:
        """Find equal heads, and at step 0 improbably similar ones; afterwards, whether they have separated."""
        equal = new_since_loading(equal_heads(series.latest), equal_heads(series.first), series)
        if series.is_pretrained and len(series.rows) == 1:
            return None
        if equal:
            return self._equal(series, equal)
        alignment = series.latest.values.get("hdi_worst_alignment", 0.0)
        if active is not None:
            return active.finding if alignment >= self.alignment - HYSTERESIS else None
        return self._improbable(series, alignment)

    def _equal(self, series: Series, groups: Groups) -> Finding:
        return Finding(
            f"{named_groups(groups, 'equal in their key weights, up to rotation and scale')}, which training does not "
            "bring about: they are tied, were copied, or this is a bug",
            "warning",
            series.value("hdi_worst_pair"),
            EQUAL,
            "hdi_worst_pair",
            heads_in(groups),
            remedy="checking which parameters they share and how they were initialised; equal gradients keep equal "
            "heads equal",
            groups=groups,
        )

    def _improbable(self, series: Series, alignment: float) -> Finding | None:
        latest, width = series.latest, series.facts.get("width")
        pair = tuple(latest.arrays.get("worst_pair", ()))
        if not is_first_step(series) or alignment < self.alignment or width is None or len(pair) != 2 or min(pair) < 0:
            return None
        ranks = latest.arrays["rank"]
        live = sum(rank > 0 for rank in ranks)
        overlap = series.value("hdi_worst_pair")
        pairs = live * (live - 1) // 2
        chance = chance_of_overlap(overlap, ranks=(ranks[pair[0]], ranks[pair[1]]), width=width, pairs=pairs)
        if chance > self.probability:
            return None
        groups = aligned_groups(latest, series.facts, "subspace", self.alignment) or (pair,)
        bound = f"{chance:.0e}" if chance > 1e-300 else "1e-300"
        return Finding(
            f"{named_groups(groups)} where this run begins (overlap {decimal(overlap)})",
            "warning",
            overlap,
            None,
            "hdi_worst_pair",
            heads_in(groups),
            certainty=f"heads that are drawn independently come this close with a probability of at most {bound}",
            remedy="initialising each head on its own; if the weights are pretrained, write pretrained=True",
            groups=groups,
        )


def equal_heads(row: Row) -> Groups:
    """Find heads whose key weights are equal up to rotation and scale.

    Args:
        row: a reading of a layer.

    Returns:
        Groups of two heads or more.
    """
    worst = row.values.get("hdi_worst_pair", 0.0)
    energy = row.values.get("hdi_energy_worst_alignment", 0.0)
    if worst < EQUAL or energy < EQUAL - 1e-5:  # alignment is a little further from 1 than overlap
        return ()
    return joined_by_both(row, EQUAL)
