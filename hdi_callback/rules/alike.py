"""Rules on heads that are alike: *worst pair*, *mean alignment*, *merged scores*."""

from __future__ import annotations

from typing import ClassVar

from hdi_callback.record import Level
from hdi_callback.rules.groups import (
    EQUAL,
    Groups,
    aligned_pairs,
    equal_heads,
    heads_in,
    joined,
    similar_pairs,
    without_first,
)
from hdi_callback.rules.initialisation import chance_of_overlap, have_come_together
from hdi_callback.rules.rule import Finding, Rule
from hdi_callback.rules.series import Series

HYSTERESIS = 0.1
TOGETHER = 0.5
"""Mean alignment from which on all heads move together, which *mean alignment* reports."""
NEARLY_ONE = 0.8
ALIKE_AT_FIRST = 0.5
"""Smallest alignment at step 0 that is judged against chance."""
SEPARATE = "Give all but one of them fresh weights"
REVIVE = "interventions=[ReviveHeads(max_output_error=1)]"


def _each(groups: Groups) -> str:
    return " each" if len(groups) > 1 else ""


class WorstPair(Rule):
    """Some key heads of a layer are nearly one, whatever the others do, or equal; all of them are named."""

    name = "worst pair"
    needs = ("hdi_worst_alignment", "hdi_worst_pair")  # of the closest pair; the largest overlap, 1 of equal heads
    reads = ("hdi_alignment", "hdi_energy_worst_alignment")
    limits = ("pair", "tied")
    condition = (
        "the alignment of two key heads reaches 0.8, while the mean over all pairs is below 0.5; or their weights are "
        "equal, to a thousandth and up to rotation and scale; or, at step 0 of fresh weights, two heads are more alike "
        "than independent initialisation makes them, with a probability below 1e-6. Of pretrained weights only what "
        "was not so at the first reading. It ends 0.1 below the limit"
    )
    meaning = (
        "The heads read the same subspace of the layer's input. Equal weights are no result of training: they share a "
        "parameter, were copied, or there is a bug. Heads that share a subspace and differ within it cost little."
    )
    action, code = SEPARATE, REVIVE

    def judge(self, series: Series, active: Finding | None) -> Finding | None:
        near = self._near(series, active)
        equal = without_first(equal_heads(series.latest), lambda: equal_heads(series.first), series)
        if equal and self.limit["tied"] is not None and not set(heads_in(equal)) < set(heads_in(near)):
            return self._equal(series, equal)
        if not near:
            at_first = series.latest.step == 0 and active is None and not series.is_pretrained
            return self._improbable(series) if at_first and self.limit["tied"] is not None else None
        limit = active.threshold if active and active.threshold else self.at("pair")
        return Finding(
            f"{{heads}} are nearly one head{_each(near)}",
            f"alignment {self._change(series)}",
            heads_in(near),
            near,
            series.value("hdi_worst_alignment"),
            min(limit, self.at("pair")),
            "hdi_worst_alignment",
            of_keys=True,
        )

    def _near(self, series: Series, active: Finding | None) -> Groups:
        """The groups at the limit; those that were named hold down to a lower one."""
        row, limit, kept = series.latest, self.at("pair"), () if active is None else active.groups
        if active is None and (row.step == 0 or row.values.get("hdi_alignment", 0.0) >= TOGETHER):
            return ()
        lower = limit if active is None else min(limit, active.threshold or limit) - HYSTERESIS
        if series.value("hdi_worst_alignment") < lower:
            return ()
        groups = joined(aligned_pairs(row, series.facts), limit, kept, lower)
        if active is None:
            equal = equal_heads(row)
            groups = tuple(group for group in groups if group not in equal)
        first = aligned_pairs(series.first, series.facts)
        return without_first(groups, lambda: joined(first, limit - HYSTERESIS), series)

    def _change(self, series: Series) -> str:
        pairs = [row.heads.get("worst_alignment_pair") for row in series.rows]
        return series.change("hdi_worst_alignment", before="" if pairs[0] == pairs[-1] else "at most ")

    def _equal(self, series: Series, groups: Groups) -> Finding:
        is_new = len(series.rows) > 1 and not equal_heads(series.first)
        return Finding(
            f"{{heads}} are nearly one head{_each(groups)}" if is_new else "{heads} have equal key weights",
            f"alignment {self._change(series)}; their key weights are equal, as of copies"
            if is_new
            else "they are tied, were copied, or this is a bug; equal gradients keep them equal",
            heads_in(groups),
            groups,
            series.value("hdi_worst_pair"),
            EQUAL,
            "hdi_worst_pair",
            of_keys=True,
            action=f"Look at what wrote these weights. {SEPARATE}"
            if is_new
            else "Look at which parameters they share, and at their initialisation.",
            code=REVIVE if is_new else "",
        )

    def _improbable(self, series: Series) -> Finding | None:
        """Judge heads that are alike at step 0 against chance."""
        row, width = series.latest, series.facts.get("width")
        pair, ranks = row.heads.get("worst_pair", ()), row.heads.get("rank", ())
        if series.value("hdi_worst_alignment") < ALIKE_AT_FIRST or not width or len(pair) != 2 or min(pair) < 0:
            return None
        live, overlap = sum(rank > 0 for rank in ranks), series.value("hdi_worst_pair")
        chance = chance_of_overlap(
            overlap, ranks=(ranks[pair[0]], ranks[pair[1]]), width=width, pairs=live * (live - 1) // 2
        )
        if chance > self.at("tied"):
            return None
        groups = joined(aligned_pairs(row, series.facts), ALIKE_AT_FIRST) or ((min(pair), max(pair)),)
        return Finding(
            "{heads} are alike before any training",
            f"overlap {overlap:.2f}, which independent heads reach with a probability below {max(chance, 1e-300):.0e}",
            heads_in(groups),
            groups,
            overlap,
            ALIKE_AT_FIRST,
            "hdi_worst_pair",
            of_keys=True,
            action="Initialise each head on its own. If the weights are pretrained, say so",
            code="pretrained=True",
        )


class MeanAlignment(Rule):
    """The key heads of a layer have moved together: their mean alignment reaches a limit."""

    name = "mean alignment"
    needs = ("hdi_alignment", "hdi_energy_alignment")
    reads = ("hdi_effective_heads", "hdi_worst_pair", "hdi_energy_worst_alignment")
    limits = ("critical", "mean", "energy_mean")
    condition = (
        "the mean alignment over all pairs of key heads reaches 0.5 as subspaces, or 0.95 weighted by energy; critical "
        "from 0.9 as subspaces. Not at step 0, and not where pretrained weights were so at first. It ends 0.1 below "
        "the limit"
    )
    meaning = "The heads of the layer read nearly the same subspace, or all read one strong direction."
    action = "Give most of them fresh weights; if the loss itself rewards alignment, they align again"
    code = 'interventions=[ReviveHeads(rules=["mean alignment"], max_output_error=1)]'
    metrics: ClassVar[dict[str, str]] = {
        "critical": "hdi_alignment",
        "mean": "hdi_alignment",
        "energy_mean": "hdi_energy_alignment",
    }

    def judge(self, series: Series, active: Finding | None) -> Finding | None:
        above = {name: series.value(metric) - self.at(name) for name, metric in self.metrics.items()}
        slack = dict.fromkeys(above, 0.0 if active is None else HYSTERESIS)
        if active is not None and active.level != "critical":
            slack["critical"] = 0.0
        reached = [name for name in above if above[name] >= -slack[name]]
        if not reached or series.latest.step == 0:
            return None
        name = "critical" if "critical" in reached else max(reached, key=lambda name: above[name])
        level: Level = "critical" if name == "critical" else "warning"
        metric, limit = self.metrics[name], self.at(name)
        if active is None and series.is_pretrained and series.first.values.get(metric, 0.0) >= limit - HYSTERESIS:
            return None
        count = series.facts.get("num_key_heads")
        if active is None and len(heads_in(equal_heads(series.latest))) == count:
            return None  # reported as equal
        groups: Groups = ()
        what = "{heads} are converging"
        if name == "energy_mean":
            what = "{heads} read the same few directions"
        else:
            groups = joined(aligned_pairs(series.latest, series.facts), NEARLY_ONE)
            if len(groups) == 1 and len(groups[0]) == count:
                groups = ()
            if groups or level == "critical":
                what = f"{{heads}} are nearly one head{_each(groups)}"
        heads = heads_in(groups)
        held_from_start = min([series.first.values.get(metric, 0.0), *series.curve(metric)[1]]) >= limit
        left = series.latest.values.get("hdi_effective_heads")
        weighted = " weighted by energy" if name == "energy_mean" else ""
        rest = "" if left is None or weighted else f", and {left:.1f} effective heads are left"
        return Finding(
            what,
            f"mean alignment{weighted} {series.change(metric)}{rest}",
            () if len(heads) == count else heads,
            groups,
            series.value(metric),
            limit,
            metric,
            level,
            since=series.first.step if held_from_start else None,
            of_keys=True,
            action="Look at the layer's inputs: one direction outweighs the others there." if weighted else None,
        )


class MergedScores(Rule):
    """Query and key weights of some heads make the same scores: the cosine of their QK circuits reaches a limit."""

    name = "merged scores"
    needs = ("circuit_qk_worst",)
    reads = ("circuit_qk_norm",)
    limits = ("scores",)
    condition = (
        "the cosine of the QK circuits of two heads reaches 0.9, and what distinguishes them is no more than at the "
        "first reading; a notice where the training loss is at its best so far. It ends at 0.8"
    )
    meaning = (
        "The heads score tokens alike, so that they attend alike. Where one pattern of attention solves the task, that "
        "is what healthy heads do: then the loss is at its best, and this is a notice."
    )
    action, code = SEPARATE, REVIVE

    def judge(self, series: Series, active: Finding | None) -> Finding | None:
        limit = self.at("scores")
        lower = limit - (0 if active is None else HYSTERESIS)
        value = series.value("circuit_qk_worst")
        if value < lower:
            return None
        kept = () if active is None else active.groups
        loosened = HYSTERESIS / (1 - limit) + 1
        pairs = [
            (h, g, cosine)
            for h, g, cosine in similar_pairs(series.latest, "circuit_qk")
            if cosine >= lower
            and have_come_together(
                series, (h, g), cosine, loosened if any({h, g} <= set(group) for group in kept) else 1.0
            )
        ]
        first = similar_pairs(series.first, "circuit_qk")
        groups = without_first(joined(pairs, limit, kept, lower), lambda: joined(first, lower), series)
        if not groups:
            return None
        return Finding(
            f"{{heads}} score alike{', group by group' if len(groups) > 1 else ''}",
            f"largest cosine of their QK circuits {series.change('circuit_qk_worst')}",
            heads_in(groups),
            groups,
            value,
            limit,
            "circuit_qk_worst",
            "notice" if series.is_best_loss else "warning",
        )
