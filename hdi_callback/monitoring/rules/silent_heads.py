"""Heads that contribute nothing, and weights that do not train."""

from __future__ import annotations

from typing import ClassVar

from hdi_callback.arguments import number, whole_number
from hdi_callback.monitoring.alerts import Alert, Finding, Row, Rule, Series
from hdi_callback.monitoring.rules.healthy_runs import how_often_raised
from hdi_callback.monitoring.rules.named import was_named
from hdi_callback.monitoring.rules.words import named_heads


class NoContribution(Rule):
    """Heads that contribute next to nothing to the layer's output, as with dead value or output weights.

    Heads that begin so, as with an output projection of zeros, are reported after twenty readings; in pretrained
    weights they are ignored.

    Args:
        share: share of the RMS of all heads together that is a warning; the alert is resolved at twice as much.
    """

    name = "no contribution"
    needs = ("head_contribution_min",)
    patience: ClassVar[int] = 20

    def __init__(self, share: float = 0.001) -> None:
        self.share = number("share of NoContribution", share, above=0, below=1, example=0.001)

    def judge(self, series: Series, active: Alert | None) -> Finding | None:
        """Find the heads that add nothing."""
        shares = series.latest.per_head("head_contribution")
        first = series.first.per_head("head_contribution") or (1.0,) * len(shares)
        has_had_time = len(series.rows) > self.patience and not series.is_pretrained
        silent = tuple(
            head
            for head, share in enumerate(shares)
            if share <= self.share * (2 if was_named(active, head) else 1)
            and (has_had_time or first[head] > self.share)
        )
        if not silent:
            return None
        return Finding(
            f"{named_heads(silent)} {'adds' if len(silent) == 1 else 'add'} next to nothing to the output (at most "
            f"{100 * max(shares[head] for head in silent):.1g} % of it)",
            "warning",
            min(shares[head] for head in silent),
            self.share,
            "head_contribution_min",
            silent,
            remedy="checking whether gradients arrive at its value and output weights",
        )


class FrozenHeads(Rule):
    """Heads whose weights do not change between readings, while others of the model do.

    They are frozen by mistake, left out of the optimizer, or change by less than the rounding of their type; or all of
    their weights are zero, so that no gradient arrives. Layers none of whose parameters requires a gradient are frozen
    on purpose, and ignored; so are heads of zeros in pretrained weights, as they were pruned.

    Args:
        readings: consecutive readings without a change.
    """

    name = "frozen heads"
    needs = ("head_movement_min",)

    def __init__(self, readings: int = 3) -> None:
        self.readings = whole_number("readings of FrozenHeads", readings, least=1, example=3)

    def judge(self, series: Series, active: Alert | None) -> Finding | None:
        """Find the heads that do not move while others do."""
        _, least = series.curve("head_movement_min")
        moves = series.latest.per_head("head_movement")
        if len(least) < self.readings or max(least[-self.readings :]) > 0 or not series.trains:
            return None
        still = tuple(head for head, move in enumerate(moves) if move == 0)
        zero = tuple(head for head in still if _is_zero(series.latest, head))
        if series.is_pretrained:
            still, zero = tuple(head for head in still if head not in zero), ()
        is_all = len(still) == len(moves)
        if not still or not (series.do_others_move if is_all else any(move > 0 for move in moves)):
            return None
        who = (
            "its heads do not move, and those of other layers do"
            if is_all
            else (f"{named_heads(still)} do not move, and those of the other heads do")
        )
        if still == zero and not is_all:
            who = f"{named_heads(still)} are zero and do not move, and those of the other heads do"
        return Finding(
            f"the weights of {who}",
            "warning",
            0.0,
            0.0,
            "head_movement_min",
            still,
            series.since(lambda row: row.values["head_movement_min"] == 0, "head_movement_min"),
            how_often_raised(self.name, readings=self.readings),
            remedy="checking their initialisation: no gradient arrives where all weights of a head are zero"
            if still == zero
            else "checking what is frozen, what the optimizer was given, and the type of the weights: updates may "
            "round away",
        )


def _is_zero(row: Row, head: int) -> bool:
    """Whether neither circuit of a head is known to have a size."""
    norms = [row.per_head(name)[head : head + 1] for name in ("circuit_qk_norm", "circuit_ov_norm")]
    return norms == [[0.0], [0.0]]


class UntrainedWeights(Rule):
    """Some of a layer's weights never change, to the last bit, while the others do.

    For instance if keys were left out of the optimizer's parameters, the graph is cut behind queries and keys, or both
    begin at zero in some heads. It is detected by the share of a head's weights that do not change, which is then that
    of one, two or three of its four weights, at every reading. Layers with a parameter that requires no gradient
    (adapters, frozen parts) are ignored. Keys and values that heads share are not judged, and weights that decay alone
    move.

    Args:
        readings: consecutive readings at which it is so.
    """

    name = "untrained weights"
    needs = ("head_unchanged", "head_movement_min")
    margin: ClassVar[float] = 0.002

    def __init__(self, readings: int = 5) -> None:
        self.readings = whole_number("readings of UntrainedWeights", readings, least=3, example=5)

    def judge(self, series: Series, active: Alert | None) -> Finding | None:
        """Judge the heads that change least, if all weights of the others change."""
        facts, shares = series.facts, series.latest.per_head("head_unchanged")
        _, largest = series.curve("head_unchanged")
        rows = largest[-self.readings :]
        if not facts.get("all_train", False) or facts.get("head_dim") != facts.get("value_dim") or not shares:
            return None
        own = 4 if facts.get("num_heads") == facts.get("num_key_heads") else 2  # weights that heads do not share
        count = round(own * max(shares))
        if len(rows) < self.readings or not 0 < count < own:
            return None
        share = count / own
        heads = tuple(head for head, one in enumerate(shares) if share <= one <= share + self.margin)
        if any(not share <= row <= share + self.margin for row in rows) or not heads:
            return None
        if any(one > self.margin for head, one in enumerate(shares) if head not in heads):
            return None
        is_all = len(heads) == len(shares)
        whose = "its heads" if is_all else named_heads(heads)
        what = "query, key, value and output weights" if own == 4 else "query and output weights"
        which = {1: "one", 2: "two", 3: "three"}[count]
        return Finding(
            f"{which} of the {what} of {whose} never {'changes' if count == 1 else 'change'}, and the others do",
            "warning",
            max(shares),
            share,
            "head_unchanged",
            () if is_all else heads,
            since=series.since(lambda row: row.values["head_unchanged"] >= share, "head_unchanged"),
            certainty=how_often_raised(self.name, readings=self.readings),
            remedy="checking what the optimizer was given, and whether gradients reach all of them (detach, no_grad; "
            "none do where queries and keys, or values and outputs, begin at zero together)",
        )


class RoundedAway(Rule):
    """Hardly any weight of a layer's heads changes between readings, to the last bit: updates round away.

    For instance with weights in bfloat16 and a small learning rate, or one that has decayed to nothing. A layer that
    alone does not move at all is reported by `FrozenHeads`; layers none of whose parameters requires a gradient are
    ignored. Where float32 copies are trained, updates add up until a bfloat16 weight changes: readings less than 5
    steps apart are judged only if no weight at all has changed.

    Args:
        share: share of unchanged weights since the last reading, in each head of the layer, that is a warning.
        readings: in a row at which it is so.
    """

    name = "rounded away"
    needs = ("head_unchanged", "head_movement_min")
    apart: ClassVar[int] = 5

    def __init__(self, share: float = 0.9, readings: int = 3) -> None:
        self.share = number("share of RoundedAway", share, above=0, below=1, example=0.9)
        self.readings = whole_number("readings of RoundedAway", readings, least=1, example=3)

    def judge(self, series: Series, active: Alert | None) -> Finding | None:
        """Judge all heads of the layer."""
        shares = series.latest.per_head("head_unchanged")
        _, largest = series.curve("head_unchanged")
        rows = largest[-self.readings :]
        if len(rows) < self.readings or min(rows) < self.share or not series.trains:
            return None
        if not shares or not min(shares) >= self.share:
            return None
        before = series.rows[-2].step if len(series.rows) > 1 else series.first.step
        if active is None and min(shares) < 1 and series.latest.step - before < self.apart:
            return None
        has_moved = min(largest) < self.share
        if min(shares) == 1 and not has_moved:  # frozen from the start: on purpose, or reported by FrozenHeads
            return None
        if min(rows) == min(shares) == 1 and series.do_others_move:  # only this layer is still: see FrozenHeads
            return None
        return Finding(
            f"{100 * min(shares):.0f} % of the weights of every head are exactly what they were at the reading before",
            "warning",
            min(shares),
            self.share,
            "head_unchanged",
            since=series.since(lambda row: row.values["head_unchanged"] >= self.share, "head_unchanged"),
            certainty=how_often_raised(self.name, share=self.share, readings=self.readings),
            remedy="checking the learning rate and the type of the weights: small updates of bfloat16 weights "
            "round away, unless float32 copies are trained, where they only come later",
        )
