"""Findings of several rules and layers -> events, of which each is one alert."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hdi_callback.arguments import listed
from hdi_callback.record import LEVELS, Alert
from hdi_callback.rules.rule import Finding, Rule

Key = tuple[str, str]  # layer, rule
WINDOW = 3  # readings within which what follows on the same heads joins an event
VAGUE = "change with the loss"  # which names no cause, so that nothing is folded into it


@dataclass(frozen=True)
class Sighting:
    """A finding at one reading, with its layer and rule, and what an alert says of it."""

    layer: str
    rule: Rule
    rank: int  # place of the rule among the rules of the run, causes first
    finding: Finding
    sentence: str
    since: int  # first step at which it was so
    facts: Mapping[str, Any]  # `AttentionLayer.description` of the layer

    @property
    def key(self) -> Key:
        """Layer and rule."""
        return self.layer, self.rule.name

    @property
    def level(self) -> int:
        """How serious it is, as a place in `LEVELS`."""
        return LEVELS.index(self.finding.level or "warning")

    def meets(self, heads: Iterable[int], *, of_keys: bool) -> bool:
        """Return whether it is about one of some heads of its layer, or of some key heads; no heads are all."""
        own = self._queries(self.finding.heads, of_keys=self.finding.of_keys)
        more = self._queries(heads, of_keys=of_keys)
        return not own or not more or bool(own & more)

    def _queries(self, heads: Iterable[int], *, of_keys: bool) -> set[int]:
        H, G = self.facts.get("num_heads") or 1, self.facts.get("num_key_heads") or 1
        return {head for head in range(H) if head * G // H in {*heads}} if of_keys else {*heads}

    def statement(self) -> dict[str, Any]:
        """Return what an alert that it states says beside its message."""
        return {name: getattr(self.finding, name) for name in ("action", "code", "value", "threshold", "metric")}


@dataclass
class Report:
    """What the rules found at the reading of a step: findings that are new, that got worse, and that are over."""

    step: int
    new: list[Sighting] = field(default_factory=list)
    worse: list[Sighting] = field(default_factory=list)
    over: dict[Key, str] = field(default_factory=dict)
    """Layer and rule -> which intervention had written the weights, in words, or ``""``."""


@dataclass
class Event:
    """One event: its alert as it stands, the reading at which it last grew, and its findings that last."""

    alert: Alert
    grew: int
    lasting: set[Key]
    is_cause: bool


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
            layers = {layer for layer, _ in event.lasting}
            where = {layer: heads for layer, heads in event.alert.where.items() if layer in layers}
            alerts.append(replace(event.alert, where=where or event.alert.where))
        return tuple(alerts)

    def update(self, report: Report) -> tuple[Alert, ...]:
        """Take the findings of a reading; return the alerts of events that begin, get worse or end."""
        self._readings += 1
        events = [(sighting, self._event_of(sighting)) for sighting in report.new]
        alerts = []
        for event in self._events:
            joining = [sighting for sighting, owner in events if owner is event]
            if joining:
                event.grew = self._readings
                event.lasting |= {sighting.key for sighting in joining}
            worse = [sighting for sighting in report.worse if sighting.key in event.lasting]
            alerts += _worsen(event, joining, worse, report.step)
        begun = []
        for cluster in _clusters([sighting for sighting, owner in events if owner is None]):
            keys = {sighting.key for sighting in cluster}
            begun.append(_alert_of(cluster, report.step))
            self._events.append(Event(begun[-1], self._readings, keys, cluster[0].rule.is_cause))
        return (*begun, *alerts, *self._end(report))

    def _event_of(self, sighting: Sighting) -> Event | None:
        """Return the event that a new finding follows from: on the same heads or of the same rule in another layer."""
        if sighting.rule.is_cause:
            return None
        recent = [
            event for event in self._events if self._readings - event.grew <= WINDOW and event.alert.rule != VAGUE
        ]
        for event in recent:
            alert = event.alert
            of_keys = alert.unit == "key heads"
            if sighting.layer in alert.where and sighting.meets(alert.where[sighting.layer], of_keys=of_keys):
                return event
        return next((event for event in recent if event.alert.rule == sighting.rule.name), None)

    def _end(self, report: Report) -> list[Alert]:
        """End events of which no finding lasts."""
        alerts, lasting = [], []
        for event in self._events:
            writers = [writer for key, writer in report.over.items() if writer and key in event.lasting]
            event.lasting -= report.over.keys()
            if event.lasting:
                lasting.append(event)
                continue
            alert, after = event.alert, f", after {writers[0]}" if writers else ""
            message = f"{alert.rule} of step {alert.step} in {_layers(alert.layers)} is over{after}"
            alerts.append(replace(alert, step=report.step, message=message, action="", code="", status="resolved"))
        self._events = lasting
        return alerts


def _worsen(event: Event, joining: Sequence[Sighting], worse: Sequence[Sighting], step: int) -> list[Alert]:
    """Extend an event; return it if its rule got worse or spread, or a more serious one joined what is no cause."""
    alert = event.alert
    rules = dict.fromkeys((alert.rule, *alert.also, *(sighting.rule.name for sighting in joining)))
    level = LEVELS.index(alert.level)
    # The level of a cause is set when it is told, unless that was a notice.
    least = len(LEVELS) if event.is_cause and level > 0 else level
    own = [sighting for sighting in (*worse, *joining) if sighting.rule.name == alert.rule]
    more = [sighting for sighting in (*joining, *worse) if sighting.rule.name != alert.rule and sighting.level > least]
    event.alert = replace(alert, also=tuple(rules)[1:])
    if not own and not more:
        return []
    first, layers = (*own, *more)[0], list(dict.fromkeys(sighting.layer for sighting in (*own, *more)))
    event.alert = replace(
        event.alert,
        level=LEVELS[max(level, *(sighting.level for sighting in (*own, *more)))],
        where=alert.where | {sighting.layer: sighting.finding.heads for sighting in own},
        message=("spread: " if own and first in joining else "") + _message(first.sentence, layers),
        **first.statement(),
    )
    return [replace(event.alert, step=step, status="worse")]


def _clusters(sightings: Sequence[Sighting]) -> list[list[Sighting]]:
    """Group new findings: those on the same heads of a layer, then those of layers with the same cause."""
    groups: list[list[Sighting]] = []
    for sighting in sorted(sightings, key=lambda sighting: sighting.rank):
        for group in () if sighting.rule.is_cause else groups:
            first, cause = group[0], group[0].finding
            is_told = first.layer == sighting.layer and first.rule.name != VAGUE
            if is_told and sighting.meets(cause.heads, of_keys=cause.of_keys):
                group.append(sighting)
                break
        else:
            groups.append([sighting])
    by_cause: dict[tuple[str, int], list[Sighting]] = {}
    for group in groups:
        by_cause.setdefault((group[0].rule.name, group[0].level), []).extend(group)
    return list(by_cause.values())


def _alert_of(cluster: Sequence[Sighting], step: int) -> Alert:
    """Return the alert that reports findings of one event; the first states the cause."""
    first = cluster[0]
    causes = [sighting for sighting in cluster if sighting.rule.name == first.rule.name]
    also = tuple(dict.fromkeys(each.rule.name for each in cluster if each.rule.name != first.rule.name))
    is_grouped = first.facts.get("num_key_heads") != first.facts.get("num_heads")
    return Alert(
        step,
        first.rule.name,
        LEVELS[max(sighting.level for sighting in cluster)],
        {sighting.layer: sighting.finding.heads for sighting in causes},
        _message(first.sentence, [sighting.layer for sighting in causes], also),
        since=min(sighting.since for sighting in causes),
        also=also,
        unit="key heads" if first.finding.of_keys and is_grouped else "heads",
        **first.statement(),
    )


def _message(sentence: str, layers: Sequence[str], also: Sequence[str] = ()) -> str:
    """Return a sentence on the first of some layers with the other layers, and other rules."""
    likewise = f"; likewise in {_layers(layers[1:])}" if layers[1:] else ""
    return f"{sentence}{likewise}" + (f" (also: {', '.join(also)})" if also else "")


def _layers(names: Sequence[str]) -> str:
    return listed(names) if len(names) <= 3 else f"{len(names)} layers, {names[0]} to {names[-1]}"
