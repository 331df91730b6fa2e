"""Rules on masks: keys that a query may attend to have changed, or are only one."""

from __future__ import annotations

from typing import ClassVar

from hdi_callback.arguments import number, whole_number
from hdi_callback.monitoring.alerts import Alert, Finding, Rule, Series
from hdi_callback.monitoring.rules.healthy_runs import healthy_peak, how_often_raised
from hdi_callback.monitoring.rules.words import decimal

_NOTHING = 1e-6
"""Largest attention to masked tokens, from rounding."""

MASK = "checking the attention mask, and whether True means visible or hidden in it"


class LaterTokens(Rule):
    """Attention that was causal until then reaches later tokens: a mask is missing, or leaks.

    A model whose mask was never there cannot be distinguished from an encoder.

    Args:
        share: share of attention to later tokens that is a warning.
    """

    name = "later tokens"
    needs = ("attention_ahead",)

    def __init__(self, share: float = 0.001) -> None:
        self.share = number("share of LaterTokens", share, above=0, below=1, example=0.001)

    def judge(self, series: Series, active: Alert | None) -> Finding | None:
        """Check whether later tokens were hidden before, and are not now."""
        value = series.value("attention_ahead")
        first = series.first.values.get("attention_ahead", 1.0)
        if value < self.share or first > _NOTHING:
            return None
        heads = tuple(
            head for head, share in enumerate(series.latest.per_head("attention_ahead")) if share >= self.share
        )
        since = series.since(lambda row: row.values["attention_ahead"] >= self.share, "attention_ahead")
        return Finding(
            f"attention reaches tokens after the query (share {decimal(value)}), which were hidden from it at step "
            f"{series.first.step}",
            "critical",
            value,
            self.share,
            "attention_ahead",
            () if len(heads) == series.facts.get("num_heads") else heads,
            since,
            healthy_peak(self.name, self.share),
            MASK,
        )


class FewerKeys(Rule):
    """Queries see far fewer keys at once than they always did: a mask is inverted, or hides too much.

    Judged if the number of keys was the same at all readings before, as with sequences of one length; not with varying
    lengths. Shorter sequences look the same.

    Args:
        share: share of the earlier number of keys that is a warning.
        readings: number of earlier readings at which it was the same.
    """

    name = "fewer keys"
    needs = ("attention_keys",)
    varies: ClassVar[float] = 0.01
    lasts: ClassVar[int] = 2

    def __init__(self, share: float = 0.5, readings: int = 6) -> None:
        self.share = number("share of FewerKeys", share, above=0, below=1, example=0.5)
        self.readings = whole_number("readings of FewerKeys", readings, least=2, example=6)

    def judge(self, series: Series, active: Alert | None) -> Finding | None:
        """Compare the number of keys with that of earlier readings."""
        steps, curve = series.curve("attention_keys")
        if active is not None:
            return active.finding if curve[-1] <= (active.finding.threshold or 0.0) else None
        before, now = curve[: -self.lasts], max(curve[-self.lasts :])
        if len(before) < self.readings or max(before) - min(before) > self.varies * min(before):
            return None
        if now > self.share * min(before):
            return None
        return Finding(
            f"a query sees {now:.0f} keys, and saw {min(before):.0f} at every reading until step "
            f"{steps[len(before) - 1]}",
            "warning",
            now,
            self.share * min(before),
            "attention_keys",
            since=steps[len(before)],
            certainty=healthy_peak(self.name, self.share),
            remedy=MASK + ", unless sequences have become shorter",
        )


class OneKey(Rule):
    """Each query sees a single key, so that attention mixes nothing: a mask hides too much."""

    name = "one key"
    needs = ("attention_keys",)

    def judge(self, series: Series, active: Alert | None) -> Finding | None:
        """Check how many keys a query sees."""
        value = series.value("attention_keys")
        if value > 1:
            return None
        return Finding(
            "each query sees a single key, though there are more: attention mixes nothing",
            "critical",
            value,
            1.0,
            "attention_keys",
            since=series.since(lambda row: row.values["attention_keys"] <= 1, "attention_keys"),
            certainty=how_often_raised(self.name),
            remedy=MASK,
        )
