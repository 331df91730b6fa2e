"""`Finding` and `Alert`: the result of a rule on a layer at one reading, and the sentence that reports it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, get_args

from hdi_callback.attention.names import printable
from hdi_callback.monitoring.notebook import alert_line

Level = Literal["notice", "warning", "critical"]
LEVELS: tuple[Level, ...] = get_args(Level)


def is_at_least(level: Level, least: Level) -> bool:
    """Return whether a level is as serious as another, or more.

    Args:
        level: the level in question.
        least: the level to compare with.

    Returns:
        True if it is.

    Example:
        >>> is_at_least("critical", "warning"), is_at_least("notice", "warning")
        (True, False)
    """
    return LEVELS.index(level) >= LEVELS.index(least)


@dataclass(frozen=True)
class Finding:
    """The result of a rule on a layer at one reading.

    Attributes:
        what: what happened, as the middle of a sentence: ``heads 2 and 5 are nearly one head (alignment 0.93)``.
        level: ``"notice"``, ``"warning"`` or ``"critical"``.
        value: the number that was judged.
        threshold: the limit.
        metric: the metric of the number, if it is one.
        heads: the heads concerned; empty for the whole layer.
        groups: groups of these heads, such as heads that are nearly one; empty if there are none.
        since: first step of an unbroken series of readings with this finding, if that was before this reading.
        certainty: how rare this is in healthy runs, as a part of a sentence.
        remedy: what to try, as a part of a sentence; one that begins with "no " says that there is none.
        is_from_start: True if the limit was reached at step 0 and at every reading since, as with pretrained weights.
    """

    what: str
    level: Level = "warning"
    value: float | None = None
    threshold: float | None = None
    metric: str | None = None
    heads: tuple[int, ...] = ()
    since: int | None = None
    certainty: str = ""
    remedy: str = ""
    is_from_start: bool = False
    groups: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True)
class Alert:
    """A finding that is new, more serious, or resolved, as a sentence and as data.

    Attributes:
        step: optimizer steps taken before the reading that showed it.
        layer: name of the layer.
        rule: name of the rule.
        level: ``"notice"``, ``"warning"`` or ``"critical"``.
        message: one sentence: when, where, what, since when, how sure, and what to try.
        finding: the same as data.
        is_resolved: True if this is the end of an earlier alert.
        ending: how it ended: ``"resolved"`` (nothing is found any more), ``"not measured"`` or ``"not judged"``;
            empty while it is active.
    """

    step: int
    layer: str
    rule: str
    level: Level
    message: str
    finding: Finding
    is_resolved: bool = False
    ending: str = ""

    @property
    def status(self) -> str:
        """Its level, or how it ended, in one or two words."""
        return (self.ending or "resolved") if self.is_resolved else self.level

    def _repr_html_(self) -> str:
        return alert_line(self)

    def to_dict(self) -> dict[str, Any]:
        """The alert as plain data, as the history keeps it.

        Returns:
            The argument of `from_dict`.
        """
        return asdict(self)

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Alert:
        """Make an alert from plain data.

        Args:
            data: the result of `to_dict`.

        Returns:
            The alert.
        """
        names = Alert.__dataclass_fields__
        known = {name: value for name, value in data.items() if name in names}
        finding = {name: value for name, value in data["finding"].items() if name in Finding.__dataclass_fields__}
        finding["heads"] = tuple(finding.get("heads", ()))
        finding["groups"] = tuple(tuple(group) for group in finding.get("groups", ()))
        return Alert(**{**known, "finding": Finding(**finding)})


def alert_of(finding: Finding, *, step: int, layer: str, rule: str) -> Alert:
    """The alert that reports a finding.

    Args:
        finding: the result of a rule.
        step: optimizer steps taken before the reading that showed it.
        layer: name of the layer.
        rule: name of the rule.

    Returns:
        An alert whose message says step, layer, finding, since when, how sure, and what to try.
    """
    parts = [finding.what]
    if finding.since is not None and finding.since < step:
        parts.append(f"since step {finding.since}")
    if finding.certainty:
        parts.append(finding.certainty)
    if finding.remedy:
        parts.append(finding.remedy if finding.remedy.startswith("no ") else f"try {finding.remedy}")
    message = printable(f"step {step}, {layer}: {'; '.join(parts)}")
    return Alert(step, layer, rule, finding.level, message, finding)


def resolution_of(alert: Alert, *, step: int) -> Alert:
    """The alert that reports that a rule finds nothing any more.

    Args:
        alert: the alert that was active.
        step: step of the reading.

    Returns:
        An alert with `is_resolved`.
    """
    return _end_of(alert, step, "resolved", "is over")


def loss_of(alert: Alert, *, step: int, ending: str, why: str) -> Alert:
    """The alert that reports that an alert is dropped, as nothing shows any more whether its finding lasts.

    Args:
        alert: the alert that was active.
        step: step of the reading.
        ending: ``"not measured"`` or ``"not judged"``.
        why: the reason; may be empty.

    Returns:
        An alert with `is_resolved`.
    """
    return _end_of(alert, step, ending, f"is {ending.replace('not', 'no longer')}{why and f': {why}'}")


def _end_of(alert: Alert, step: int, ending: str, verb: str) -> Alert:
    message = printable(f"step {step}, {alert.layer}: {alert.rule} ({alert.level} of step {alert.step}) {verb}")
    return replace(alert, step=step, message=message, is_resolved=True, ending=ending)
