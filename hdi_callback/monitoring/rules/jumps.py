"""What has changed at once: weights that were rewritten, inputs that lost directions, between two readings."""

from __future__ import annotations

import itertools
import math
from typing import ClassVar

from hdi_callback.arguments import number
from hdi_callback.monitoring.alerts import Alert, Finding, Rule, Series
from hdi_callback.monitoring.rules.thresholds import healthy_peak, never_raised

_PAST = 5


class WeightJump(Rule):
    """The weights of all heads of a layer have moved at once, and further than ever before in this run.

    As by a checkpoint whose rows are in another order, by steps that are far too large, or by code that writes weights.

    Args:
        change: relative change of the weights since the reading before, of the head that moved least, that is a
            warning.
        factor: how many times the largest change so far it is.
    """

    name = "weight jump"
    needs = ("head_movement_min",)

    def __init__(self, change: float = 0.1, factor: float = 4.0) -> None:
        self.change = number("change of WeightJump", change, above=0, below=float("inf"), example=0.1)
        self.factor = number("factor of WeightJump", factor, above=1, below=float("inf"), example=4.0)

    def judge(self, series: Series, active: Alert | None) -> Finding | None:
        """Hold the latest change against those before."""
        _, moves = series.curve("head_movement_min")
        *past, now = moves
        if len(past) < _PAST or now < self.change or not 0 < self.factor * max(past) <= now:
            return None
        return Finding(
            f"the weights of all its heads have changed by {100 * now:.0f} % since the reading before, and by "
            f"{100 * max(past):.2g} % at most between any two readings till then",
            "warning",
            now,
            self.change,
            "head_movement_min",
            certainty=healthy_peak(self.name, self.factor),
            remedy="checking what wrote to them: the learning rate, a checkpoint that was loaded, or rows in another "
            "order",
        )


class InputsLoseRank(Rule):
    """The input tokens of a layer have lost directions at once, and further than they ever changed in this run.

    As by a loader that gives one token again and again, or by code that cuts features off. What training does to them
    goes on from one reading to the next, so it is reported when the two readings after the fall are where the fall has
    ended; data of another kind may do so too.

    Args:
        fall: factor by which the effective rank has fallen since the reading before, that is a warning.
        factor: how many times the largest change before it is, both as logarithms.
    """

    name = "inputs lose rank"
    needs = ("token_rank",)
    past: ClassVar[int] = 6
    compared: ClassVar[int] = 12
    settled: ClassVar[float] = 0.25
    """Share of the fall by which the next readings may differ, as a logarithm."""
    after: ClassVar[int] = 2
    """How many readings after the fall are asked."""

    def __init__(self, fall: float = 1.4, factor: float = 4.0) -> None:
        self.fall = number("fall of InputsLoseRank", fall, above=1, below=float("inf"), example=1.4)
        self.factor = number("factor of InputsLoseRank", factor, above=1, below=float("inf"), example=4.0)

    def judge(self, series: Series, active: Alert | None) -> Finding | None:
        """Compare the latest fall with the changes before; the alert is active until half of it is made up for."""
        steps, curve = series.curve("token_rank")
        now = curve[-1]
        if active is not None:
            value, least = active.finding.value, active.finding.threshold
            is_over = value is None or least is None or now >= math.sqrt(max(value * least, 0.0))
            return None if is_over else active.finding
        fallen = len(curve) - 1 - self.after
        before, since_then = curve[:fallen], curve[fallen:]
        if len(before) < self.past or min(curve) <= 0:
            return None
        changes = [abs(math.log(b / a)) for a, b in itertools.pairwise(before[-self.compared - 1 :])]
        fall = math.log(before[-1] / since_then[0])
        if fall < math.log(self.fall) or max(since_then) >= min(before) or fall < self.factor * max(changes):
            return None
        if any(abs(math.log(value / since_then[0])) > self.settled * fall for value in since_then[1:]):
            return None
        return Finding(
            f"the tokens that the layer is given have lost directions at once (effective rank {now:.1f}, "
            f"{before[-1]:.1f} at step {steps[fallen - 1]}, and never below {min(before):.1f} before)",
            "warning",
            now,
            min(before),
            "token_rank",
            since=steps[fallen],
            certainty=never_raised(self.name, fall=self.fall, factor=self.factor),
            remedy="checking what the loader gives since then, and what runs before this layer",
        )
