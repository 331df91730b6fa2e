"""Sudden changes between readings: weights that jump, inputs that lose rank, queries that shrink."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from typing import ClassVar

from hdi_callback.arguments import number
from hdi_callback.monitoring.alerts import Alert, Finding, Rule, Series
from hdi_callback.monitoring.rules.healthy_runs import healthy_peak, how_often_raised
from hdi_callback.monitoring.rules.words import named_heads

_PAST = 5


class WeightJump(Rule):
    """The weights of some heads have moved further between two readings than any of their layer before.

    As by a checkpoint whose rows are in another order, by steps that are far too large, by a force that begins to pull,
    or by code that writes weights. Heads that an intervention has written are left out.

    Args:
        change: relative change of a head's weights since the last reading that is a warning.
        factor: how many times the largest change so far it must be, of the head that moved least at each reading.
    """

    name = "weight jump"
    needs = ("head_movement_min",)

    def __init__(self, change: float = 0.05, factor: float = 4.0) -> None:
        self.change = number("change of WeightJump", change, above=0, below=float("inf"), example=0.05)
        self.factor = number("factor of WeightJump", factor, above=1, below=float("inf"), example=4.0)

    def judge(self, series: Series, active: Alert | None) -> Finding | None:
        """Compare the latest change of each head with those before."""
        _, moves = series.curve("head_movement_min")
        *past, least = moves
        if len(past) < _PAST or not max(past) > 0:
            return None
        now = series.latest.per_head("head_movement") or [least]
        limit = max(self.change, self.factor * max(past))
        jumped = tuple(head for head, move in enumerate(now) if move >= limit and head not in series.rewritten)
        if not jumped:
            return None
        is_all = len(jumped) == len(now)
        largest = max(now[head] for head in jumped)
        return Finding(
            f"the weights of {'all its heads' if is_all else named_heads(jumped)} have changed by "
            f"{100 * largest:.0f} % since the reading before, and those of its slowest head by "
            f"{100 * max(past):.2g} % at most between any two readings till then",
            "warning",
            largest,
            self.change,
            "head_movement_min",
            () if is_all else jumped,
            certainty=healthy_peak(self.name, self.factor),
            remedy="checking what wrote to them: the learning rate, a checkpoint that was loaded, or rows in another "
            "order",
        )


class InputsLoseRank(Rule):
    """The effective rank of a layer's input tokens has fallen further between two readings than it ever changed before.

    For instance by a loader that repeats one token, or by code that cuts features off. Training changes inputs
    gradually, so a fall is reported once the two readings after it stay at its end; data of another kind may cause it
    too. The inputs of the first layer are data, which training moves slowly but which differ from batch to batch: there
    the medians of several readings are compared as well.

    Args:
        fall: factor by which the effective rank has fallen since the reading before, that is a warning.
        factor: how many times the largest change before it is, both as logarithms.
    """

    name = "inputs lose rank"
    needs = ("token_rank",)
    past: ClassVar[int] = 6
    compared: ClassVar[int] = 12
    settled: ClassVar[float] = 0.25
    """Share of the fall, in logarithms, by which the next readings may differ."""
    after: ClassVar[int] = 2
    """Number of readings after the fall that are compared."""
    of_data: ClassVar[int] = 4
    """Number of readings of the first layer that are compared, from the fall on."""
    apart: ClassVar[float] = 1.2
    """Factor by which all of them must lie below all readings before."""
    drift: ClassVar[float] = 0.1
    """Share of the fall, in logarithms, by which the readings before may have drifted."""
    at_once: ClassVar[float] = 0.6
    """Share of the fall, as a logarithm, that lies between two readings."""

    def __init__(self, fall: float = 1.4, factor: float = 4.0) -> None:
        self.fall = number("fall of InputsLoseRank", fall, above=1, below=float("inf"), example=1.4)
        self.factor = number("factor of InputsLoseRank", factor, above=1, below=float("inf"), example=4.0)

    def judge(self, series: Series, active: Alert | None) -> Finding | None:
        """Compare the latest fall with the changes before; the alert is active until half of the fall is undone."""
        steps, curve = series.curve("token_rank")
        now = curve[-1]
        if active is not None:
            value, least = active.finding.value, active.finding.threshold
            is_over = value is None or least is None or now >= math.sqrt(max(value * least, 0.0))
            return None if is_over else active.finding
        if min(curve) <= 0:
            return None
        fallen = self._fall(curve, is_first=series.is_first)
        if fallen is None:
            return None
        before = curve[:fallen]
        return Finding(
            f"the input tokens of the layer have lost directions at once (effective rank {now:.1f}, "
            f"{before[-1]:.1f} at step {steps[fallen - 1]}, and never below {min(before):.1f} before)",
            "warning",
            now,
            min(before),
            "token_rank",
            since=steps[fallen],
            certainty=how_often_raised(self.name, fall=self.fall, factor=self.factor),
            remedy="checking what the loader gives since then, and what runs before this layer",
        )

    def _fall(self, curve: Sequence[float], *, is_first: bool) -> int | None:
        """The first reading after a fall; `None` if there was no fall just now."""
        fallen = len(curve) - 1 - self.after
        if self._is_sharp_fall(curve[:fallen], curve[fallen:]):
            return fallen
        fallen = len(curve) - self.of_data
        if is_first and self._is_fall_of_data(curve[:fallen][-self.compared :], curve[fallen:]):
            return fallen
        return None

    def _is_sharp_fall(self, before: Sequence[float], since_then: Sequence[float]) -> bool:
        if len(before) < self.past:
            return False
        changes = [abs(math.log(b / a)) for a, b in itertools.pairwise(before[-self.compared - 1 :])]
        fall = math.log(before[-1] / since_then[0])
        if fall < math.log(self.fall) or max(since_then) >= min(before) or fall < self.factor * max(changes):
            return False
        return all(abs(math.log(value / since_then[0])) <= self.settled * fall for value in since_then[1:])

    def _is_fall_of_data(self, before: Sequence[float], since_then: Sequence[float]) -> bool:
        """Whether two levels differ, each of them steady but for noise."""
        if len(before) < self.past or min(before) < self.apart * max(since_then):
            return False
        fall = math.log(statistics.median(before) / statistics.median(since_then))
        half = len(before) // 2
        drift = abs(math.log(statistics.median(before[:half]) / statistics.median(before[-half:])))
        later = len(since_then) // 2
        goes_on = abs(math.log(statistics.median(since_then[:later]) / statistics.median(since_then[-later:])))
        is_steady = drift <= self.drift * fall and goes_on <= self.settled * fall
        is_at_once = math.log(before[-1] / since_then[0]) >= self.at_once * fall
        return fall >= math.log(self.fall) and is_steady and is_at_once


class SuddenShrink(Rule):
    """The queries or the keys of a layer have shrunk at once, and stay so: scores fall with them.

    For instance if input features were cut off, a norm before the layer was lost, or code scales queries twice. Layers
    with heads that an intervention has written are left out, as `QKClip` makes queries and keys smaller.

    Args:
        share: share of the least mean norm at any reading before that is a warning at two readings in a row; the alert
            is resolved half way back.
    """

    name = "sudden shrink"
    needs = ("query_norm",)
    metrics: ClassVar[dict[str, str]] = {"query_norm": "queries", "key_norm": "keys"}
    lasts: ClassVar[int] = 2

    def __init__(self, share: float = 0.5) -> None:
        self.share = number("share of SuddenShrink", share, above=0, below=1, example=0.5)

    def judge(self, series: Series, active: Alert | None) -> Finding | None:
        """Compare the last two readings with all before."""
        if active is not None:
            metric, limit = active.finding.metric or "query_norm", active.finding.threshold or 0.0
            is_over = series.latest.values.get(metric, 0.0) >= math.sqrt(self.share) / self.share * limit
            return None if is_over else active.finding
        if series.rewritten:
            return None
        for metric, what in self.metrics.items():
            steps, curve = series.curve(metric)
            before, now = curve[: -self.lasts], curve[-self.lasts :]
            if len(before) < _PAST or series.latest.step != steps[-1]:
                continue
            if not max(now) <= self.share * min(before) or not min(before) > 0:
                continue
            return Finding(
                f"the {what} of the layer have shrunk at once (mean norm {now[-1]:.2g}, never below {min(before):.2g} "
                f"until step {steps[len(before) - 1]})",
                "warning",
                now[-1],
                self.share * min(before),
                metric,
                since=steps[len(before)],
                certainty=healthy_peak(self.name, self.share),
                remedy="checking the inputs of the layer since then, the norm before it, and the scale of queries and "
                "keys",
            )
        return None
