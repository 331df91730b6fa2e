"""Findings of several rules and layers -> events, of which each is one alert."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hdi_callback.record import LEVELS, Alert, Status
from hdi_callback.rules.rule import Finding
from hdi_callback.rules.words import listed

Key = tuple[str, str]
"""Layer, rule."""

WINDOW = 3
"""Readings within which what follows on the same heads joins an event."""

FOLLOWS = "weight jump"
"""The cause that is told as that of a copy or of numbers that are not finite, where there are some."""


@dataclass(frozen=True)
class Sighting:
    """A finding at one reading, with what an alert says of it."""

    layer: str  # name of the layer
    rule: str  # name of the rule
    rank: int  # place of the rule among the others, causes first
    finding: Finding  # the finding
    sentence: str  # it in words
    action: str  # what to do
    code: str  # lines to paste; empty if none help
    since: int  # first step at which it was so
    facts: Mapping[str, Any]  # `AttentionLayer.facts` of the layer
    is_cause: bool = False  # whether it is always an event of its own

    @property
    def key(self) -> Key:
        """Layer and rule."""
        return self.layer, self.rule

    @property
    def level(self) -> int:
        """How serious it is, as a place in `LEVELS`."""
        return LEVELS.index(self.finding.level or "warning")

    @property
    def query_heads(self) -> set[int]:
        """The query heads that it is about; empty for all."""
        heads = self.finding.heads
        return self.of_keys(heads) if self.finding.of_keys else set(heads)

    def of_keys(self, key_heads: Iterable[int]) -> set[int]:
        """Return the query heads of key heads of the layer."""
        H, G = self.facts.get("num_heads") or 1, self.facts.get("num_key_heads") or 1
        return {head for head in range(H) if head * G // H in set(key_heads)}


@dataclass
class Report:
    """What the rules found at one reading.

    Attributes:
        step: of the reading.
        begun: findings that were not there before.
        risen: those that got worse.
        ended: those that are over -> why they are not measured any more, or ``""``.
        written: those that are over -> which intervention wrote the weights, in words, or ``""``.
        judged: layers and rules that were judged.
    """

    step: int
    begun: list[Sighting] = field(default_factory=list)
    risen: list[Sighting] = field(default_factory=list)
    ended: dict[Key, str] = field(default_factory=dict)
    written: dict[Key, str] = field(default_factory=dict)
    judged: set[Key] = field(default_factory=set)


@dataclass
class Event:
    """One event: its alert as it stands, the reading at which it last grew, and its findings that last."""

    alert: Alert
    grew: int
    open: set[Key]
    is_cause: bool
    why: str = ""
    by: str = ""


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

    def update(self, report: Report) -> tuple[Alert, ...]:
        """Take the findings of a reading; return the alerts of events that begin, get worse or end."""
        self._readings += 1
        fresh = list[Sighting]()
        joined: list[tuple[Event, Sighting]] = []
        for sighting in report.begun:
            event = self._event_of(sighting)
            if event is None:
                fresh.append(sighting)
            else:
                event.open.add(sighting.key)
                event.grew = self._readings
                joined.append((event, sighting))
        worse = []
        for event in self._events:
            risen = [sighting for sighting in report.risen if sighting.key in event.open]
            worse += _worsen(event, [sighting for owner, sighting in joined if owner is event], risen, report.step)
        begun = []
        for cluster in _clusters(fresh):
            begun.append(_alert_of(cluster, report.step))
            self._events.append(
                Event(begun[-1], self._readings, {sighting.key for sighting in cluster}, cluster[0].is_cause)
            )
        return (*begun, *worse, *self._end(report))

    def state_dict(self) -> dict[str, Any]:
        """Return the events as plain data."""
        events = [
            [event.alert.to_dict(), event.grew, sorted(map(list, event.open)), event.is_cause, event.why, event.by]
            for event in self._events
        ]
        return {"events": events, "readings": self._readings}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `state_dict`."""
        self._events = [
            Event(Alert.from_dict(alert), grew, {(layer, rule) for layer, rule in keys}, *others)
            for alert, grew, keys, *others in state["events"]
        ]
        self._readings = state["readings"]

    def _event_of(self, sighting: Sighting) -> Event | None:
        """Return the event that a new finding follows from: on the same heads or of the same rule in another layer."""
        recent = [event for event in self._events if self._readings - event.grew <= WINDOW and not sighting.is_cause]
        for event in recent:
            if sighting.layer in event.alert.where:
                heads = event.alert.where[sighting.layer]
                own = sighting.of_keys(heads) if event.alert.unit == "key heads" else set(heads)
                if _overlap(sighting.query_heads, own):
                    return event
        return next((event for event in recent if event.alert.rule == sighting.rule), None)

    def _end(self, report: Report) -> list[Alert]:
        """End events of which no finding lasts."""
        alerts, going_on = [], []
        for event in self._events:
            for key, why in report.ended.items():
                if key in event.open:
                    event.open.discard(key)
                    event.why, event.by = why, report.written.get(key, "")
            # A jump is told as such for some readings, and holds no other event.
            if (event.alert.rule == FOLLOWS and event.open) or any(rule != FOLLOWS for _, rule in event.open):
                going_on.append(event)
                continue
            status: Status = "not measured" if event.why else "resolved"
            end = f"is not measured any more: {event.why}" if event.why else "is over"
            end += f", after {event.by}" if event.by else ""
            message = f"{event.alert.rule} of step {event.alert.step} in {_layers(event.alert.layers)} {end}"
            alerts.append(replace(event.alert, step=report.step, message=message, action="", code="", status=status))
        self._events = going_on
        return alerts


def _worsen(event: Event, joined: Sequence[Sighting], risen: Sequence[Sighting], step: int) -> list[Alert]:
    """Extend an event; return it if its rule got worse or spread, or a more serious one joined what is no cause."""
    told = {event.alert.rule, *event.alert.also}
    new = dict.fromkeys(sighting.rule for sighting in joined if sighting.rule not in told)
    event.alert = replace(event.alert, also=(*event.alert.also, *new))
    level = LEVELS.index(event.alert.level)
    worse = [sighting for sighting in risen if sighting.rule == event.alert.rule]
    spread = [sighting for sighting in joined if sighting.rule == event.alert.rule]
    # The level of a cause is set when it is told, unless that was a notice.
    is_set = event.is_cause and level > 0
    others = [sighting for sighting in (*joined, *risen) if sighting not in (*worse, *spread)]
    worse += spread + [sighting for sighting in others if sighting.level > level and not is_set]
    if not worse:
        return []
    first, layers = worse[0], list(dict.fromkeys(sighting.layer for sighting in worse))
    heads = {sighting.layer: sighting.finding.heads for sighting in worse if sighting.rule == event.alert.rule}
    event.alert = replace(
        event.alert,
        level=LEVELS[max(level, *(sighting.level for sighting in worse))],
        where=event.alert.where | heads,
        message=("spread: " if first in spread else "") + _with_others(first.sentence, layers, ()),
        action=first.action,
        code=first.code,
        value=first.finding.value,
        threshold=first.finding.threshold,
        metric=first.finding.metric,
    )
    return [replace(event.alert, step=step, status="worse")]


def _clusters(fresh: Sequence[Sighting]) -> list[list[Sighting]]:
    """Group new findings: those on the same heads of a layer, then those of layers with the same cause."""
    groups: list[list[Sighting]] = []
    for sighting in sorted(fresh, key=lambda sighting: sighting.rank):
        for group in groups:
            joins = not sighting.is_cause or sighting.rule == FOLLOWS
            if joins and group[0].layer == sighting.layer and _overlap(sighting.query_heads, group[0].query_heads):
                group.append(sighting)
                break
        else:
            groups.append([sighting])
    layers = list(dict.fromkeys(sighting.layer for sighting in fresh))
    by_cause: dict[tuple[str, int], list[Sighting]] = {}
    for group in sorted(groups, key=lambda group: layers.index(group[0].layer)):
        by_cause.setdefault((group[0].rule, group[0].level), []).extend(group)
    return list(by_cause.values())


def _alert_of(cluster: Sequence[Sighting], step: int) -> Alert:
    """The alert that reports findings of one event; the first states the cause."""
    first = cluster[0]
    causes = [sighting for sighting in cluster if sighting.rule == first.rule]
    others = sorted(
        (sighting for sighting in cluster if sighting.rule != first.rule), key=lambda sighting: sighting.rank
    )
    also = tuple(dict.fromkeys(sighting.rule for sighting in others))
    is_grouped = first.facts.get("num_key_heads") != first.facts.get("num_heads")
    return Alert(
        step,
        first.rule,
        LEVELS[max(sighting.level for sighting in cluster)],
        {sighting.layer: sighting.finding.heads for sighting in causes},
        _with_others(first.sentence, [sighting.layer for sighting in causes], also),
        first.action,
        first.finding.value,
        first.finding.threshold,
        first.finding.metric,
        min(sighting.since for sighting in causes),
        also,
        "key heads" if first.finding.of_keys and is_grouped else "heads",
        code=first.code,
    )


def _with_others(sentence: str, layers: Sequence[str], also: Sequence[str]) -> str:
    """Add the other layers and rules to a sentence on the first layer."""
    _, *others = layers
    likewise = f"; likewise in {_layers(others)}" if others else ""
    return f"{sentence}{likewise}" + (f" (also: {', '.join(also)})" if also else "")


def _layers(names: Sequence[str]) -> str:
    return listed(names) if len(names) <= 3 else f"{len(names)} layers, {names[0]} to {names[-1]}"


def _overlap(heads: set[int], more: set[int]) -> bool:
    """Whether two sets of heads meet; an empty one stands for all."""
    return not heads or not more or bool(heads & more)
