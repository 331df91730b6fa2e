"""Findings of several rules and layers -> events, of which each is one alert."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hdi_callback.record import LEVELS, Alert, Status
from hdi_callback.rules.rule import Finding
from hdi_callback.rules.words import listed

Key = tuple[str, str]
"""Layer, rule."""
Found = tuple[int, Finding, str, str, Mapping[str, Any]]
"""Rank of the rule, finding, sentence, action, facts of the layer."""

WINDOW = 3
"""Readings within which findings on the same heads are one event, and for which an event lasts at least."""


@dataclass
class Report:
    """What the rules found at one reading.

    Attributes:
        step: of the reading.
        findings: all findings of the reading.
        begun: those that were not there before.
        risen: those that got worse.
        ended: those that are over -> why they are not measured any more, or ``""``.
        asked: layers and rules that were judged.
    """

    step: int
    findings: dict[Key, Found] = field(default_factory=dict)
    begun: list[Key] = field(default_factory=list)
    risen: list[Key] = field(default_factory=list)
    ended: dict[Key, str] = field(default_factory=dict)
    asked: set[Key] = field(default_factory=set)


@dataclass
class Event:
    """One event: its alert as it stands, the reading at which it last grew, and its findings that last."""

    alert: Alert
    grew: int
    open: set[Key]
    why: str = ""


class Events:
    """The events of a run that are active."""

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._readings = 0

    @property
    def active(self) -> tuple[Alert, ...]:
        """The alert of each event; of several layers those where something lasts."""
        alerts = []
        for event in self._events:
            lasting = {layer for layer, _ in event.open} or set(event.alert.where)
            where = {layer: heads for layer, heads in event.alert.where.items() if layer in lasting}
            alerts.append(replace(event.alert, where=where or event.alert.where))
        return tuple(alerts)

    def update(self, report: Report, since: Mapping[Key, int]) -> tuple[Alert, ...]:
        """Take the findings of a reading.

        Args:
            report: the findings.
            since: first step of each finding that lasts.

        Returns:
            Alerts of events that begin, get worse or end.
        """
        self._readings += 1
        fresh, joined = list[Key](), list[tuple[Event, Key]]()
        for key in report.begun:
            event = self._event_of(key, report)
            if event is None:
                fresh.append(key)
            else:
                event.open.add(key)
                event.grew = self._readings
                joined.append((event, key))
        risen = [(event, key) for key in report.risen for event in self._events if key in event.open]
        alerts = [self._begin(keys, report, since) for keys in _clusters(fresh, report)]
        alerts += self._worsen(joined, risen, report)
        return (*alerts, *self._end(report))

    def state_dict(self) -> dict[str, Any]:
        """Return the events as plain data."""
        events = [[one.alert.to_dict(), one.grew, sorted(map(list, one.open)), one.why] for one in self._events]
        return {"events": events, "readings": self._readings}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `state_dict`."""
        self._events = [
            Event(Alert.from_dict(alert), grew, {(layer, rule) for layer, rule in keys}, why)
            for alert, grew, keys, why in state["events"]
        ]
        self._readings = state["readings"]

    def _event_of(self, key: Key, report: Report) -> Event | None:
        """The event that a new finding belongs to: on the same heads, a few readings after it began or grew."""
        layer, _ = key
        heads = _query_heads(report.findings[key])
        for event in self._events:
            if layer in event.alert.where and self._readings - event.grew <= WINDOW:
                own = set(event.alert.where[layer])
                if event.alert.unit == "key heads":
                    own = set(_of_keys(event.alert.where[layer], report.findings[key][4]))
                if _overlap(heads, own):
                    return event
        return None

    def _begin(self, keys: Sequence[Key], report: Report, since: Mapping[Key, int]) -> Alert:
        alert = _alert_of(keys, report, since)
        self._events.append(Event(alert, self._readings, set(keys)))
        return alert

    def _worsen(self, joined: list[tuple[Event, Key]], risen: list[tuple[Event, Key]], report: Report) -> list[Alert]:
        """Extend events; report those that a more serious finding joins, or of which a finding got worse."""
        alerts = []
        for event in self._events:
            own = [key for one, key in joined if one is event]
            worse = [key for one, key in risen if one is event and key[1] == event.alert.rule]
            rules = [rule for _, rule in own if rule not in {event.alert.rule, *event.alert.also}]
            event.alert = replace(event.alert, also=(*event.alert.also, *dict.fromkeys(rules)))
            level = LEVELS.index(event.alert.level)
            own += [key for one, key in risen if one is event and key not in worse]
            worse += [key for key in own if LEVELS.index(report.findings[key][1].level or "warning") > level]
            if not worse:
                continue
            _, finding, sentence, action, _ = report.findings[worse[0]]
            new = max(level, *(LEVELS.index(report.findings[key][1].level or "warning") for key in worse))
            where = dict(event.alert.where)
            for layer, rule in worse:
                if rule == event.alert.rule:
                    where[layer] = report.findings[layer, rule][1].heads
            event.alert = replace(
                event.alert,
                level=LEVELS[new],
                where=where,
                message=_with_others(sentence, list(dict.fromkeys(layer for layer, _ in worse)), ()),
                action=action,
                value=finding.value,
                threshold=finding.threshold,
                metric=finding.metric,
            )
            alerts.append(replace(event.alert, step=report.step, status="worse"))
        return alerts

    def _end(self, report: Report) -> list[Alert]:
        """End events of which no finding lasts."""
        alerts, going_on = [], []
        for event in self._events:
            for key, why in report.ended.items():
                if key in event.open:
                    event.open.discard(key)
                    event.why = why
            if event.open or self._readings - event.grew < WINDOW:
                going_on.append(event)
                continue
            status: Status = "not measured" if event.why else "resolved"
            end = f"is not measured any more: {event.why}" if event.why else "is over"
            message = f"{event.alert.rule} of step {event.alert.step} in {_layers(event.alert.layers)} {end}"
            alerts.append(replace(event.alert, step=report.step, message=message, action="", status=status))
        self._events = going_on
        return alerts


def _clusters(keys: Sequence[Key], report: Report) -> list[list[Key]]:
    """Group new findings: those on the same heads of a layer, then those of layers with the same cause."""
    groups: list[list[Key]] = []
    for key in sorted(keys, key=lambda key: report.findings[key][0]):
        heads = _query_heads(report.findings[key])
        for group in groups:
            if group[0][0] == key[0] and _overlap(heads, _query_heads(report.findings[group[0]])):
                group.append(key)
                break
        else:
            groups.append([key])
    by_cause: dict[tuple[str, str | None], list[Key]] = {}
    order = list(dict.fromkeys(layer for layer, _ in keys))
    for group in sorted(groups, key=lambda group: order.index(group[0][0])):
        level = report.findings[group[0]][1].level
        by_cause.setdefault((group[0][1], level), []).extend(group)
    return list(by_cause.values())


def _alert_of(keys: Sequence[Key], report: Report, since: Mapping[Key, int]) -> Alert:
    """The alert that reports findings of one event; the first states the cause."""
    _, finding, sentence, action, facts = report.findings[keys[0]]
    rule = keys[0][1]
    causes = [key for key in keys if key[1] == rule]
    ranked = sorted(keys, key=lambda key: report.findings[key][0])
    also = tuple(dict.fromkeys(name for _, name in ranked if name != rule))
    is_grouped = facts.get("num_key_heads") != facts.get("num_heads")
    levels = [LEVELS.index(report.findings[key][1].level or "warning") for key in keys]
    return Alert(
        report.step,
        rule,
        LEVELS[max(levels)],
        {key[0]: report.findings[key][1].heads for key in causes},
        _with_others(sentence, [layer for layer, _ in causes], also),
        action,
        finding.value,
        finding.threshold,
        finding.metric,
        min(since[key] for key in causes),
        also,
        "key heads" if finding.of_keys and is_grouped else "heads",
    )


def _with_others(sentence: str, layers: Sequence[str], also: Sequence[str]) -> str:
    """Add the other layers and rules to a sentence on the first layer."""
    _, *others = layers
    likewise = f"; likewise in {_layers(others)}" if others else ""
    return f"{sentence}{likewise}" + (f" (also: {', '.join(also)})" if also else "")


def _layers(names: Sequence[str]) -> str:
    return listed(names) if len(names) <= 3 else f"{len(names)} layers, {names[0]} to {names[-1]}"


def _query_heads(found: Found) -> set[int]:
    """The query heads that a finding is about; empty for all."""
    _, finding, _, _, facts = found
    return set(_of_keys(finding.heads, facts)) if finding.of_keys else set(finding.heads)


def _of_keys(heads: Sequence[int], facts: Mapping[str, Any]) -> list[int]:
    """The query heads of key heads."""
    H, G = facts.get("num_heads") or 1, facts.get("num_key_heads") or 1
    return [head for head in range(H) if head * G // H in set(heads)]


def _overlap(one: set[int], other: set[int]) -> bool:
    return not one or not other or bool(one & other)
