"""Attention that becomes sharper or flatter faster than ever before in the run."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from typing import ClassVar

from hdi_callback.arguments import number
from hdi_callback.monitoring.alerts import Alert, Finding, Rule, Series
from hdi_callback.monitoring.rules.healthy_runs import healthy_peak
from hdi_callback.monitoring.rules.words import decimal

_ENTROPY = "attention_entropy"


class SuddenSharpening(Rule):
    """The attention of a layer has become sharp within a few readings.

    For instance if scores grow, or if a term is added to the scores of one token. Healthy training sharpens attention
    too, over many readings. Layers with heads that an intervention has written are left out.

    Args:
        fall: factor by which the mean entropy has fallen within eight readings, that is a warning, where it is four
            times as far (in logarithms) as it ever changed before; the alert is resolved half way back.
    """

    name = "sudden sharpening"
    needs = (_ENTROPY,)
    within: ClassVar[int] = 8
    past: ClassVar[int] = 6
    factor: ClassVar[float] = 4.0
    """Ratio of the fall to the largest change before it, both in logarithms."""

    def __init__(self, fall: float = 4.0) -> None:
        self.fall = number("fall of SuddenSharpening", fall, above=1, below=math.inf, example=4.0)

    def judge(self, series: Series, active: Alert | None) -> Finding | None:
        """Compare the latest entropy with that of eight readings before, and this change with those before it."""
        now = series.value(_ENTROPY)
        if active is not None:
            is_over = now >= math.sqrt(self.fall) * (active.finding.threshold or 0.0)
            return None if is_over else active.finding
        steps, curve = series.curve(_ENTROPY)
        start = len(curve) - 1 - self.within
        if series.rewritten or start < self.past - 1 or not min(curve[: start + 1]) > max(now, 0.0) * self.fall:
            return None
        before = curve[: start + 1]
        if math.log(before[-1] / max(now, 1e-12)) < self.factor * _largest_change(before, self.within):
            return None
        logit = series.latest.values.get("attention_logit")
        largest = "" if logit is None else f"; largest score {logit:.0f}"
        return Finding(
            f"the heads have come to attend to few tokens within {self.within} readings (mean entropy of attention "
            f"{decimal(now)}, {decimal(before[-1])} at step {steps[start]} and never below {decimal(min(before))} "
            f"until then{largest})",
            "warning",
            now,
            before[-1] / self.fall,
            _ENTROPY,
            since=steps[start],
            certainty=healthy_peak(self.name, self.fall),
            remedy="checking the learning rate, the scale of the scores and what is added to them; where scores grow, "
            "QKClip with the largest score of a healthy run as its limit",
        )


class SuddenFlattening(Rule):
    """Attention has suddenly become flatter, and stays so: it hardly distinguishes tokens any more.

    For instance if tokens become alike, a norm or a part of the input is lost, or the scale of the scores is changed.
    It compares how far the entropy lies below that of uniform attention. Data of another kind may cause it too. Layers
    with heads that an intervention has written are left out.

    Args:
        factor: by which the distance from uniform attention at each of the last four readings lies below the least of
            the twelve before, that is a warning; the alert is resolved half way back.
    """

    name = "sudden flattening"
    needs = (_ENTROPY,)
    past: ClassVar[int] = 6
    compared: ClassVar[int] = 12
    lasts: ClassVar[int] = 4
    at_once: ClassVar[float] = 0.6
    """Share of the fall, as a logarithm, that lies between two readings."""
    least: ClassVar[float] = 5e-4
    """Distance from uniform attention below which a layer is not judged: it cannot become flatter."""

    def __init__(self, factor: float = 3.0) -> None:
        self.factor = number("factor of SuddenFlattening", factor, above=1, below=math.inf, example=3.0)

    def judge(self, series: Series, active: Alert | None) -> Finding | None:
        """Compare the last four readings with those before."""
        if active is not None:
            is_over = 1 - series.value(_ENTROPY) >= math.sqrt(self.factor) * (active.finding.threshold or 0.0)
            return None if is_over else active.finding
        steps, curve = series.curve(_ENTROPY)
        distances = [max(1 - value, 1e-7) for value in curve]
        before, now = distances[: -self.lasts][-self.compared :], distances[-self.lasts :]
        if series.rewritten or len(before) < self.past or min(before) < max(self.least, self.factor * max(now)):
            return None
        fall = math.log(statistics.median(before) / statistics.median(now))
        if math.log(before[-1] / now[0]) < self.at_once * fall:
            return None
        fallen = len(curve) - self.lasts
        return Finding(
            f"attention has become flatter at once (mean entropy {curve[-1]:.4f}, {curve[fallen - 1]:.4f} at step "
            f"{steps[fallen - 1]} and never above {1 - min(before):.4f} until then): it hardly distinguishes tokens "
            "any more",
            "warning",
            max(now),
            min(before) / self.factor,
            _ENTROPY,
            since=steps[fallen],
            certainty=healthy_peak(self.name, self.factor),
            remedy="checking the inputs of the layer since then, the norm before it, and the scale of the scores",
        )


def _largest_change(curve: Sequence[float], within: int) -> float:
    """The largest change between two readings that are at most so many apart, as a logarithm."""
    return max(
        (
            abs(math.log(max(after, 1e-12) / max(before, 1e-12)))
            for place, before in enumerate(curve)
            for after in itertools.islice(curve, place + 1, place + 1 + within)
        ),
        default=0.0,
    )
