"""Rules on heads that are alike: *copied heads*, *worst pair*, *mean alignment*, *merged values*."""

from __future__ import annotations

from dataclasses import replace

from hdi_callback.record import Level
from hdi_callback.rules import groups as alike
from hdi_callback.rules.losses import SMOOTHED
from hdi_callback.rules.rule import Finding, Rule
from hdi_callback.rules.series import Series

HYSTERESIS = 0.1
TOGETHER = 0.5  # mean alignment from which on all heads move together, which *mean alignment* reports
NEARLY_ONE = 0.8
LEAP = 0.5  # by how much the alignment of copies rises between two readings
NEW = "Of pretrained weights only what was not so at the first reading"  # in conditions
SEPARATE = (
    "look at the learning rate, and at what adds to the loss or writes to the weights since then; fresh weights for "
    "all but one of them changed no loss in trials"
)


def _each(groups: alike.Groups) -> str:
    return " each" if len(groups) > 1 else ""


def _change(series: Series) -> str:
    """Return how the closest pair came to its alignment; it may have been another pair."""
    pairs = [row.heads.get("worst_alignment_pair") for row in series.rows]
    return series.change("hdi_worst_alignment", before="" if pairs[0] == pairs[-1] else "at most ")


def _groups_at_limit(series: Series, active: Finding | None, limit: float, *, of_values: bool = False) -> alike.Groups:
    """Return the groups of heads at a limit, active ones to a lower one, but for those of pretrained weights."""
    lower, before = limit - HYSTERESIS, () if active is None else active.groups
    if series.value("circuit_ov_worst" if of_values else "hdi_worst_alignment") < lower:
        return ()
    matrix = "circuit_ov" if of_values else "pair_alignment"
    now, first = (alike.pairs_in(row, matrix) for row in (series.latest, series.first))
    return alike.without_initial(alike.groups_at(now, limit, before, lower), alike.groups_at(first, lower), series)


class CopiedHeads(Rule):
    """Equal weights are no result of training: they share a parameter, were copied, or there is a bug.

    They cost little by themselves; what wrote them may have written more.
    """

    name = "copied heads"
    needs = ("hdi_worst_alignment", "hdi_worst_pair")  # of the closest pair; the largest overlap, 1 of equal heads
    reads = ("hdi_energy_worst_alignment",)
    limits = ("copied",)
    is_cause = True
    condition = (
        "the weights of two key heads are equal, to a thousandth and up to rotation and scale; or their alignment has "
        f"jumped by 0.5 to 0.95 or more. {NEW}. It ends below 0.7"
    )
    action = (
        "look at which parameters they share, at what wrote these weights since then, such as a loop over heads or a "
        "checkpoint that was loaded, and at their initialisation"
    )

    def judge(self, series: Series, active: Finding | None) -> Finding | None:
        equal = alike.without_initial(alike.equal_heads(series.latest), alike.equal_heads(series.first), series)
        if active is not None:
            heads = {*active.heads, *alike.heads_in(equal)}
            groups = tuple(group for group in _groups_at_limit(series, active, NEARLY_ONE) if heads & {*group})
            return replace(active, heads=(), groups=groups) if groups else None
        now, curve = series.value("hdi_worst_alignment"), series.curve("hdi_worst_alignment")[1]
        limit = series.limits["copied"]
        is_jump = len(curve) > 1 and now >= limit and now - curve[-2] >= LEAP
        groups = equal or (alike.groups_at(alike.pairs_in(series.latest, "pair_alignment"), limit) if is_jump else ())
        if not groups:
            return None
        is_new = len(series.rows) > 1 and not alike.equal_heads(series.first)
        evidence = f"alignment {_change(series)}{'; their key weights are equal, as of copies' if equal else ''}"
        return Finding(
            f"{{heads}} are nearly one head{_each(groups)}" if is_new else "{heads} have equal key weights",
            evidence if is_new else "they are tied, were copied, or this is a bug; equal gradients keep them equal",
            groups=groups,
            threshold=alike.EQUAL,
            metric="hdi_worst_pair",
            of_keys=True,
        )


class WorstPair(Rule):
    """The heads read the same subspace of the layer's input; while they differ within it, that costs little."""

    name = "worst pair"
    needs = ("hdi_worst_alignment",)
    reads = ("hdi_alignment", "hdi_worst_pair")
    limits = ("pair",)
    condition = f"the alignment of two key heads reaches 0.8, the mean is below 0.5. {NEW}. It ends 0.1 below the limit"
    action = SEPARATE

    def judge(self, series: Series, active: Finding | None) -> Finding | None:
        row = series.latest
        if active is None and (row.step == 0 or row.values.get("hdi_alignment", 0.0) >= TOGETHER):
            return None
        groups = _groups_at_limit(series, active, series.limits["pair"])
        if active is None:  # equal heads are told as copies
            groups = tuple(group for group in groups if group not in alike.equal_heads(row))
        if not groups:
            return None
        return Finding(
            f"{{heads}} are nearly one head{_each(groups)}",
            f"alignment {_change(series)}",
            groups=groups,
            of_keys=True,
        )


class MeanAlignment(Rule):
    """The heads of the layer read nearly the same subspace, or all read one strong direction."""

    name = "mean alignment"
    needs = ("hdi_alignment", "hdi_energy_alignment")
    reads = ("hdi_effective_heads", "hdi_worst_pair", "hdi_energy_worst_alignment")
    limits = ("critical", "mean", "energy_mean")
    condition = (
        "the mean alignment over all pairs of key heads reaches 0.5 as subspaces, or 0.95 weighted by energy; critical "
        "from 0.9 as subspaces. Not at step 0, and not where pretrained weights were so at first. It ends 0.1 below "
        "the limit"
    )
    action = SEPARATE

    def judge(self, series: Series, active: Finding | None) -> Finding | None:
        slack = 0.0 if active is None else HYSTERESIS
        mean, by_energy = series.value("hdi_alignment"), series.value("hdi_energy_alignment")
        was_critical = active is not None and active.level == "critical"
        level: Level = "critical" if mean >= series.limits["critical"] - HYSTERESIS * was_critical else "warning"
        is_near = mean >= series.limits["mean"] - slack or level == "critical"
        name, metric = ("mean", "hdi_alignment") if is_near else ("energy_mean", "hdi_energy_alignment")
        limit, count = series.limits["critical" if level == "critical" else name], series.facts.get("num_key_heads")
        if series.latest.step == 0 or not (is_near or by_energy >= limit - slack):
            return None
        if active is None and (
            (series.is_pretrained and series.first.values.get(metric, 0.0) >= limit - HYSTERESIS)
            or len(alike.heads_in(alike.equal_heads(series.latest))) == count  # which is told as copies
        ):
            return None
        groups = alike.groups_at(alike.pairs_in(series.latest, "pair_alignment"), NEARLY_ONE) if is_near else ()
        groups = () if [*map(len, groups)] == [count] else groups
        clause = "{heads} are converging" if is_near else "{heads} read the same few directions"
        if groups or level == "critical":
            clause = f"{{heads}} are nearly one head{_each(groups)}"
        effective = series.latest.values.get("hdi_effective_heads")
        held_from_start = min([series.first.values.get(metric, 0.0), *series.curve(metric)[1]]) >= limit
        further = f", and {effective:.1f} effective heads are left" if is_near and effective is not None else ""
        return Finding(
            clause,
            f"mean alignment{'' if is_near else ' weighted by energy'} {series.change(metric)}{further}",
            groups=groups,
            threshold=limit,
            metric=metric,
            level=level,
            since=series.first.step if held_from_start else None,
            of_keys=True,
            action=None if is_near else "look at the layer's inputs: one direction outweighs the others there",
        )


class MergedValues(Rule):
    """The heads write the same message into the residual stream, wherever they attend."""

    name = "merged values"
    needs = ("circuit_ov_worst",)
    limits = ("values",)
    condition = f"the cosine of two OV circuits reaches 0.9; a notice while the loss is good. {NEW}. It ends at 0.8"
    action = SEPARATE

    def judge(self, series: Series, active: Finding | None) -> Finding | None:
        groups = _groups_at_limit(series, active, series.limits["values"], of_values=True)
        if not groups:
            return None
        was_notice = active is None or active.level == "notice"  # a warning stays one as long as it lasts
        return Finding(
            f"{{heads}} write alike{', group by group' if len(groups) > 1 else ''}",
            f"largest cosine of their OV circuits {series.change('circuit_ov_worst')}",
            groups=groups,
            level="notice" if series.bad_losses < SMOOTHED and was_notice else "warning",
        )
