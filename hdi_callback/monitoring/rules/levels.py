"""Rules on one curve: it has passed a limit, and moved away from its first readings."""

from __future__ import annotations

import math
import statistics
from typing import ClassVar

from hdi_callback.arguments import number, whole_number
from hdi_callback.monitoring.alerts import Alert, Finding, Rule, Series
from hdi_callback.monitoring.rules.healthy_runs import healthy_peak, how_often_raised
from hdi_callback.monitoring.rules.named import was_named
from hdi_callback.monitoring.rules.small_start import began_small
from hdi_callback.monitoring.rules.words import NO_REMEDY, decimal, named_heads

SCORES = (
    "checking the learning rate and the scale of the scores, or QKClip with the largest score of a healthy "
    "run as its limit, which in trials brought back runs where queries and keys alone were driven"
)
"""What helps against scores that grow (docs/evidence.md)."""


class _Level(Rule):
    """One curve has passed a limit, far from its first readings."""

    metric: ClassVar[str]
    """What is judged."""
    what: ClassVar[str]
    rises: ClassVar[bool]
    """Whether large values are the bad ones."""
    way: ClassVar[float]
    """Distance from the median of the first readings, as a share of the way from there to 0 or 1, or as a factor if the
    curve is not bounded."""
    hysteresis: ClassVar[float]
    """Share of the limit by which the curve must come back."""
    early: ClassVar[int] = 5
    judged: ClassVar[str] = ""
    """Key of the statistics of healthy runs, if it is not the metric."""
    lasts: ClassVar[int] = 1
    """Consecutive readings beyond the limit."""
    remedy: ClassVar[str] = NO_REMEDY

    limit: float

    def judge(self, series: Series, active: Alert | None) -> Finding | None:
        """Compare the curve with its limit and its first readings."""
        value = series.value(self.metric)
        limit = self.limit
        if active is not None:
            limit += -self.hysteresis if self.rises else self.hysteresis
        if not self._is_beyond(value, limit) or (active is None and not self._has_lasted(series)):
            return None
        before = self._before(series)
        if active is None and (before is None or not self._has_left(before, value)):
            return None
        was = "" if before is None else f", {self._shown(before)} at the start"
        heads = self.heads(series, active)
        return Finding(
            f"{self.what.format(heads=named_heads(heads) if heads else 'its heads')} ({self._shown(value)}{was})",
            "warning",
            value,
            self.limit,
            self.metric,
            heads,
            series.since(lambda row: self._is_beyond(row.values.get(self.metric), limit), self.metric),
            healthy_peak(self.judged or self.metric, self.limit) or f"the limit is {self._shown(self.limit)}",
            self.remedy,
        )

    def heads(self, series: Series, active: Alert | None) -> tuple[int, ...]:
        """The heads concerned; none for the whole layer."""
        return ()

    def _has_lasted(self, series: Series) -> bool:
        _, curve = series.curve(self.metric)
        return len(curve) >= self.lasts and all(self._is_beyond(value, self.limit) for value in curve[-self.lasts :])

    def _before(self, series: Series) -> float | None:
        """Median of the first readings that are kept."""
        _, curve = series.curve(self.metric)
        first = series.first.values.get(self.metric)
        early = ([first] if first is not None else []) + curve[1:-1][: self.early - 1]
        return statistics.median(early) if early else None

    def _has_left(self, before: float, value: float) -> bool:
        if self.rises:
            return value - before >= self.way * (1 - before)
        return value <= before * (1 - self.way)

    def _is_beyond(self, value: float | None, limit: float) -> bool:
        return value is not None and (value >= limit if self.rises else value <= limit)

    def _shown(self, value: float) -> str:
        return decimal(value)


class EntropyCollapse(_Level):
    """Entropy collapse: the mean entropy of a layer's attention has fallen to a limit.

    Args:
        limit: limit of the entropy over log n, mean over heads: 1 uniform, 0 one token.
    """

    name = "entropy collapse"
    metric = "attention_entropy"
    needs = ("attention_entropy",)
    what = "the heads attend to hardly more than one token: mean entropy of attention"
    rises = False
    way = 0.5
    hysteresis = 0.02
    remedy = SCORES

    def __init__(self, limit: float = 0.01) -> None:
        self.limit = number("limit of EntropyCollapse", limit, above=0, below=1, example=0.01)


class SharpFromStart(Rule):
    """Attention is sharp before anything was learned: a wrong scale of the scores, or inputs that are far too large.

    Judged at step 0 of fresh weights; pretrained ones may be sharp.

    With similar tokens attention stays flat even under a wrong scale, so the largest score is judged as well, where it
    is measured: with independent weights of the usual size scores have a standard deviation of one or less.

    Args:
        limit: of the entropy over log n, mean over heads: 1 uniform, 0 one token.
        score: limit of the largest score.
    """

    name = "sharp from the start"
    needs = ("attention_entropy",)
    margin: ClassVar[float] = 0.1
    down: ClassVar[float] = 0.8
    """Share of the largest score below which the alert is resolved."""

    def __init__(self, limit: float = 0.5, score: float = 12.0) -> None:
        self.limit = number("limit of SharpFromStart", limit, above=0, below=1, example=0.5)
        self.score = number("score of SharpFromStart", score, above=0, below=float("inf"), example=12.0)

    def judge(self, series: Series, active: Alert | None) -> Finding | None:
        """Judge at step 0, and later while the alert is active."""
        value = series.value("attention_entropy")
        if active is None and (series.latest.step > 0 or series.is_pretrained):
            return None
        logit = series.latest.values.get("attention_logit")
        is_sharp = value <= self.limit + (self.margin if active else 0)
        is_large = logit is not None and logit >= self.score * (self.down if active else 1)
        if not is_sharp and not is_large:
            return None
        largest = "" if logit is None else f", largest score {logit:.0f}"
        what = "attention is sharp" if is_sharp else "scores are large"
        return Finding(
            f"{what} before anything was learned (mean entropy {decimal(value)}{largest})",
            "warning",
            value if is_sharp else logit,
            self.limit if is_sharp else self.score,
            "attention_entropy" if is_sharp else "attention_logit",
            since=None if active is None else active.finding.since,
            certainty=f"independent weights of the usual size leave it above {decimal(self.limit)}"
            if is_sharp
            else healthy_peak(self.name, self.score),
            remedy="checking the scale of the scores, usually one over the root of the head width, and the size of "
            "the inputs of the layer; for pretrained weights, write pretrained=True",
        )


class FlatAttention(Rule):
    r"""Attention has stayed uniform since the first step, or has become so: scores are too small to distinguish tokens.

    For instance if the scale of the scores is far too small, or queries and keys do not train. If the largest score is
    measured, it must have stayed small too: a layer that has begun to prefer a few tokens is still learning.

    Where fresh key weights are small, and scores are as small as queries and keys themselves, learning is only slow to
    begin: that is a notice. It is a warning where the largest score is below a tenth of
    :math:`\lVert q \rVert \lVert k \rVert / \sqrt{d_k}`, or weights were of the usual size.

    It is a warning as well where :math:`1 -` entropy was ten times :math:`1 -` limit or more at the first reading, and
    the entropy is at the limit or above at five readings in a row, however slowly it rose. Layers with heads that an
    intervention has written are left out of that.

    Args:
        limit: of the entropy over log n, mean over heads, at every reading so far.
        readings: number of readings after which it is a warning.
    """

    name = "flat attention"
    needs = ("attention_entropy",)
    largest: ClassVar[float] = 0.25
    """A score above which attention prefers some tokens to others."""
    lasts: ClassVar[int] = 5
    """Readings in a row at which attention that was not uniform at first has become so."""
    scale: ClassVar[float] = 0.1
    """Largest score over that of a mean query and a mean key of one direction, at which the scale is at fault."""

    def __init__(self, limit: float = 0.9995, readings: int = 15) -> None:
        self.limit = number("limit of FlatAttention", limit, above=0, below=1, example=0.9995)
        self.readings = whole_number("readings of FlatAttention", readings, least=2, example=15)

    def judge(self, series: Series, active: Alert | None) -> Finding | None:
        """Judge all readings that are kept, and the first."""
        _, curve = series.curve("attention_entropy")
        first = series.first.values.get("attention_entropy", 0.0)
        if 1 - first >= 10 * (1 - self.limit):
            return self._become(series, active)
        if len(curve) < self.readings or min(*curve, first) < self.limit or not series.trains:
            return None
        _, logits = series.curve("attention_logit")
        if max(logits, default=0.0) > self.largest:
            return None
        largest = f", largest score {max(logits):.2g}" if logits else ""
        usual = self._usual_score(series)
        are_small = usual > 0 and bool(logits) and logits[-1] > self.scale * usual
        is_slow = are_small and began_small(series)
        small = f", as queries and keys are small (mean ones of one direction score {usual:.2g} at the usual scale)"
        remedy = (
            "checking whether the loss falls, the size of the initial weights, and the learning rate"
            if is_slow
            else "checking the size of the inputs of the layer, and the norm before it"
            if are_small
            else "checking the scale of the scores, usually one over the root of the head width, and whether gradients "
            "arrive at queries and keys"
        )
        return Finding(
            f"attention has stayed uniform since step {series.first.step} (mean entropy {curve[-1]:.4f}{largest}): its "
            f"heads average all tokens{small if are_small else ''}",
            "notice" if is_slow else "warning",
            curve[-1],
            self.limit,
            "attention_entropy",
            since=series.first.step,
            certainty=how_often_raised(self.name, limit=self.limit, readings=self.readings),
            remedy=remedy,
        )

    def _become(self, series: Series, active: Alert | None) -> Finding | None:
        """Judge the last readings of a layer whose attention was not uniform at first."""
        steps, curve = series.curve("attention_entropy")
        if active is not None:
            return active.finding if 1 - curve[-1] <= 2 * (1 - self.limit) else None
        _, logits = series.curve("attention_logit")
        are_small = max(logits[-self.lasts :], default=0.0) <= self.largest
        if len(curve) < self.lasts or min(curve[-self.lasts :]) < self.limit or not are_small or series.rewritten:
            return None
        return Finding(
            f"attention has become uniform (mean entropy {curve[-1]:.4f}, "
            f"{series.first.values['attention_entropy']:.2f} at step {series.first.step}): its heads average all "
            "tokens",
            "warning",
            curve[-1],
            self.limit,
            "attention_entropy",
            since=steps[-self.lasts],
            certainty=healthy_peak("became flat", self.lasts),
            remedy="checking the scale of the scores, the size of the inputs of the layer, and whether its query and "
            "key weights fade",
        )

    def _usual_score(self, series: Series) -> float:
        """Score of a mean query and a mean key of one direction at the usual scale; 0 if it is not known."""
        norms = [series.latest.values.get(name, 0.0) for name in ("query_norm", "key_norm")]
        width = series.facts.get("head_dim")
        return math.prod(norms) / math.sqrt(width) if width else 0.0


class LogitGrowth(_Level):
    """Scores have grown so large that the softmax saturates and its gradients vanish.

    Args:
        limit: limit of the largest score of a sampled query.
    """

    name = "logit growth"
    metric = "attention_logit"
    needs = ("attention_logit",)
    what = "the scores of {heads} have grown out of range: largest"
    rises = True
    way = 3.0
    hysteresis = 20.0
    remedy = SCORES

    def __init__(self, limit: float = 50.0) -> None:
        self.limit = number("limit of LogitGrowth", limit, above=0, below=float("inf"), example=50.0)

    def heads(self, series: Series, active: Alert | None) -> tuple[int, ...]:
        """The heads with scores beyond the limit."""
        logits = series.latest.per_head("attention_logit")
        return tuple(
            head
            for head, logit in enumerate(logits)
            if logit >= self.limit - (self.hysteresis if was_named(active, head) else 0)
        )

    def _has_left(self, before: float, value: float) -> bool:
        return value >= self.way * max(before, 1.0)

    def _shown(self, value: float) -> str:
        return f"{value:.0f}"


class AttentionSink(_Level):
    """All heads of a layer put their attention on one position: the least of them reaches a limit.

    Args:
        limit: limit of the mean attention to that position.
    """

    name = "attention sink"
    metric = "attention_sink"
    needs = ("attention_sink",)
    what = "all heads attend to one position: share of attention"
    rises = True
    way = 0.5
    hysteresis = 0.1

    def __init__(self, limit: float = 0.9) -> None:
        self.limit = number("limit of AttentionSink", limit, above=0, below=1, example=0.9)

    def judge(self, series: Series, active: Alert | None) -> Finding | None:
        """Judge the head with the least: single heads are sinks in healthy models."""
        sinks = series.latest.per_head("attention_sink")
        if any(not sink >= self.limit - (self.hysteresis if active else 0) for sink in sinks):
            return None
        return super().judge(series, active)


class TokensAlike(_Level):
    """The input tokens of a layer have become nearly equal: their mean cosine reaches a limit at three readings.

    Under a high learning rate a model may first learn how often each output occurs, which gives all tokens of a later
    layer nearly one direction for a few readings.

    Args:
        limit: limit of the mean cosine of two tokens.
    """

    name = "tokens alike"
    metric = "token_cosine"
    needs = ("token_cosine",)
    what = "the input tokens of the layer are nearly identical: mean cosine"
    rises = True
    way = 0.5
    hysteresis = 0.02
    lasts = 3
    judged = name
    remedy = "checking the residual connections and norms before this layer"

    def __init__(self, limit: float = 0.998) -> None:
        self.limit = number("limit of TokensAlike", limit, above=0, below=1, example=0.998)

    def _shown(self, value: float) -> str:
        return f"{value:.3f}"
