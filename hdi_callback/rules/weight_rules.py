"""Rules on weights: *weights not finite*, *frozen weights*, *rounded away*, *vanishing weights*."""

from __future__ import annotations

import math
import statistics
from typing import ClassVar

from hdi_callback.arguments import listed, quoted
from hdi_callback.attention.layer import PLURAL
from hdi_callback.rules.rule import Finding, Rule, heads_in_words
from hdi_callback.rules.series import APART, STILL, Row, Series

NOT_FINITE = {"weights_not_finite": "weights", "outputs_not_finite": "outputs"}


class NotFinite(Rule):
    """Every later step computes with NaN; training must go back to a checkpoint."""

    name = "weights not finite"
    is_cause = True
    reads = ("weights_not_finite", "outputs_not_finite")
    level = "critical"
    condition = "a weight of a head, or what it puts out, is NaN or infinite. It ends when all are finite again"
    action = "lower the learning rate, lengthen its warm-up or clip gradients, and go on from a checkpoint from before"

    def is_measured(self, row: Row) -> bool:
        return any(metric in row.values for metric in NOT_FINITE)

    def judge(self, series: Series, active: Finding | None) -> Finding | None:
        row = series.latest
        broken = [metric for metric in NOT_FINITE if row.values.get(metric, 0.0) > 0]
        if not broken:
            # What was broken last may just not have been measured this time.
            return active if active and active.metric not in row.values else None
        heads = {head for metric in broken for head, count in enumerate(row.per_head(metric)) if count > 0}
        rows = (*series.rows[:-1], series.previous)
        before = [row.step for row in rows if not any(row.values.get(metric, 0.0) > 0 for metric in NOT_FINITE)]
        return Finding(
            f"the {listed([NOT_FINITE[metric] for metric in broken])} of {{heads}} hold NaN or infinity",
            f"they did not at step {before[-1]}" if before else "",
            tuple(sorted(heads)),
            threshold=0.0,
            metric=broken[0],
        )


class FrozenWeights(Rule):
    """The optimizer lacks these weights, no gradient reaches them, they are all zero, or their updates round away."""

    name = "frozen weights"
    is_cause = True
    needs = ("parameters_still",)
    reads = ("head_movement_min",)
    limits = ("frozen",)
    condition = (
        "queries, keys, values or outputs of a head, or an adapter, a gain or a bias of the layer, require a gradient "
        "and stand still to the last bit at three readings in a row and for 20 steps; a notice where they are gains or "
        "biases, or no operation of the first forward takes them. Not the bias of keys, which softmax ignores, nor "
        "heads of zeros in pretrained weights"
    )
    action = (
        "look at the parameters that the optimizer was given, at whether gradients arrive (adapters under reentrant "
        "checkpointing get none), and at the type of the weights"
    )
    steps = 20

    def judge(self, series: Series, active: Finding | None) -> Finding | None:
        row, readings = series.latest, series.limits["frozen"]
        still = {
            (kind, place): since
            for (kind, place), (since, count) in series.still.items()
            if count >= readings and row.step - since >= self.steps
        }
        heads = {place for kind, place in still if kind != "parameter"}
        circuits = [row.per_head(name) for name in ("circuit_qk_norm", "circuit_ov_norm")]
        zero = {head for head in heads if all(norms[head : head + 1] == [0.0] for norms in circuits)}
        heads -= zero if series.is_pretrained else set()
        parameters = dict(enumerate(series.facts.get("parameters", {}).items()))
        names = [parameters.get(place, ("a parameter", 2)) for kind, place in still if kind == "parameter"]
        if not heads and not names:
            return None
        trained = [role for role in PLURAL if any(move >= 0 for move in row.per_head(STILL[role]))]
        roles = [role for role in trained if any((role, head) in still for head in heads)]
        parameters_still = quoted([name for name, _ in names]) if names else ""
        unread = {*series.facts.get("unread", ())}
        verb = "does" if len(names) == 1 else "do"
        are_zero = bool(heads) and zero >= heads
        weights = "weights" if roles == trained else listed([PLURAL[role] for role in roles] or [""])
        clause = f"the {weights} of {{heads}} {'are zero and ' if are_zero else ''}do not move"
        since = max(since for (kind, place), since in still.items() if kind == "parameter" or place in heads)
        # The movement of whole heads does not show that of a role.
        metric = "parameters_still" if not heads else "head_movement_min" if roles == trained else ""
        return Finding(
            clause if heads else f"{parameters_still} of {{layer}} {verb} not move",
            f"not since step {since}{f'; nor {verb} {parameters_still}' if heads and names else ''}",
            tuple(sorted(heads)),
            value=0.0,
            threshold=0.0,
            metric=metric,
            level="warning" if heads or any(dims > 1 and name not in unread for name, dims in names) else "notice",
            since=since,
            action="look at their initialisation: no gradient arrives where all weights of a head are zero"
            if are_zero
            else None,
        )


class RoundedAway(Rule):
    """Updates are too small for the type of the weights, as with bfloat16 and a small learning rate."""

    name = "rounded away"
    is_cause = True
    needs = ("head_unchanged",)
    limits = ("unchanged",)
    condition = (
        "0.9 of the weights of a head are bit-identical to those of five steps, or of the reading before, at three "
        "readings in a row, and those of every head at the last. What does not change at all is left to *frozen "
        "weights*"
    )
    action = (
        "keep the weights, or the optimizer's copy of them, in float32, or raise the learning rate; with such a copy "
        "already there, updates only come later"
    )
    readings = 3

    def judge(self, series: Series, active: Finding | None) -> Finding | None:
        rows = [row for row in series.rows if "head_unchanged" in row.values][-self.readings :]
        shares, limit = series.latest.per_head("head_unchanged"), series.limits["unchanged"]
        if len(rows) < self.readings or not shares or not series.trains or not min(shares) < 1:
            return None
        largest = [row.values["head_unchanged"] for row in rows[:-1]]
        if any(_within_five_steps(share, row) < limit for share, row in zip([*largest, min(shares)], rows)):
            return None
        return Finding(
            "the weights of {heads} hardly change",
            f"{100 * min(shares):.0f} % of them are bit-identical between steps {rows[-1].before} and {rows[-1].step}",
            value=min(shares),
        )


class VanishingWeights(Rule):
    """What the head scores or writes with is fading away."""

    name = "vanishing weights"
    needs = ("circuit_qk_norm",)
    reads = ("circuit_ov_norm",)
    limits = ("vanishing",)
    condition = (
        "the norm of a head's QK or OV circuit is at a tenth of that at the first reading. Not of heads that began "
        "near zero or that an intervention has written, nor of a circuit behind whose queries, keys or values a norm "
        "follows. It ends at twice the limit"
    )
    action = "lower the weight decay on the attention, and check that gradients arrive at these weights"
    circuits: ClassVar[dict[str, tuple[str, set[str]]]] = {
        "circuit_qk_norm": ("query and key weights", {"query", "key"}),
        "circuit_ov_norm": ("value and output weights", {"value"}),
    }
    begins = 0.1
    """Smallest first norm of a head that is judged, as a share of the layer's median head."""

    def judge(self, series: Series, active: Finding | None) -> Finding | None:
        limit, faded = series.limits["vanishing"], dict[str, dict[int, float]]()
        lasting, unread = {*active.heads} if active else set(), set[int]()
        for metric, (_, roles) in self.circuits.items():
            first = series.first.per_head(metric)
            if not first or roles & {*series.facts.get("normed", ())}:
                continue
            now = series.latest.per_head(metric) or [math.nan] * len(first)
            unread |= {head for head in lasting if math.isnan(now[head])}
            shares = {
                head: after / before
                for head, (after, before) in enumerate(zip(now, first))
                if before > self.begins * statistics.median(first)
                and after <= limit * (2 if head in lasting else 1) * before
                and head not in series.writes
            }
            faded |= {metric: shares} if shares else {}
        if not faded:
            return active if unread else None
        share, metric = min((min(shares.values()), metric) for metric, shares in faded.items())
        count = series.facts.get("num_heads")
        of_heads = [
            f"the {self.circuits[each][0]} of {heads_in_words([[*heads]], '{layer}', count=count)}"
            for each, heads in faded.items()
        ]
        return Finding(
            f"{' and '.join(of_heads).replace(' of {layer} and', ' and')} fade away",
            f"the {'smallest norm of a' if len(faded) > 1 else 'norm of the'} circuit is at "
            f"{100 * share:.2g} % of that at step {series.first.step}",
            tuple(sorted(unread.union(*faded.values()))),
            value=share,
            metric=metric,
        )


def _within_five_steps(share: float, row: Row) -> float:
    """Return at least which share of weights is what it was five steps ago, from that of readings closer together."""
    steps = APART if row.before is None else row.step - row.before
    return 1 - (1 - share) * APART / min(APART, steps)
