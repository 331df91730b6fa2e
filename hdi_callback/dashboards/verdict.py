"""The verdict on a run, in a sentence or two, and its events."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from hdi_callback.checks import joined_name
from hdi_callback.dashboards.layer_table import closest_pair, compared
from hdi_callback.monitor.contract import NAME as CONTRACT_CHANGE
from hdi_callback.monitor.forward_source import NOT_ARMED
from hdi_callback.monitor.metrics import OUTPUTS, ROWS
from hdi_callback.record import LEVELS, Alert, Record
from hdi_callback.rules.rule import heads_in_words

State = Literal["alert", "clear", "nothing to judge"]


@dataclass(frozen=True)
class Verdict:
    """What is so with a run."""

    state: State  # ``"alert"``, ``"clear"`` or ``"nothing to judge"``
    text: str  # a sentence or two
    alert: Alert | None = None  # the first of those that are active


def events(records: Sequence[Record]) -> list[Alert]:
    """Return the alerts of a run, notices included: each as it began, with the level and sentence that it came to."""
    raised: list[Alert] = []
    for alert in (alert for record in records for alert in record.alerts):
        active = [
            place for place, event in enumerate(raised)
            if event.ended is None and event.rule == alert.rule and event.where.keys() & alert.where.keys()
        ]  # fmt: skip
        if alert.status == "new" or not active:
            raised += [] if alert.is_over else [alert]
        elif alert.is_over:
            raised[active[-1]] = replace(raised[active[-1]], status="resolved", ended=alert.step)
        else:
            raised[active[-1]] = replace(alert, step=raised[active[-1]].step)
    return raised


def state(event: Alert) -> str:
    """Return the state of an event in words."""
    return "active" if event.ended is None else f"resolved at step {event.ended}"


def urgent_of(alerts: Sequence[Alert]) -> list[Alert]:
    """Return the alerts that began or got worse, and are no notices."""
    return [alert for alert in alerts if not alert.is_over and alert.level != "notice"]


def verdict(records: Sequence[Record], layers: Sequence[Mapping[str, Any]], *, is_audit: bool = False) -> Verdict:
    """Return what is so with a run by its last reading; of an audit steps say nothing."""
    if not layers:
        absence = "no attention layer could be read" if is_audit else "no attention layer is watched"
        return Verdict("nothing to judge", f"Nothing to judge: {absence}.")
    if not records:
        return Verdict("nothing to judge", "Nothing to judge: there is no reading yet.")
    last = records[-1]
    at = "" if is_audit else f" at step {last.step}"
    told = events(records)
    lasting = [event for event in told if event.ended is None and event.rule == CONTRACT_CHANGE]  # nothing ends it
    active = sorted(
        (alert for alert in [*last.active, *lasting] if alert.level != "notice"),
        key=lambda alert: -LEVELS.index(alert.level),
    )
    if active:
        first = active[0]
        of_them = "findings" if is_audit else "alerts are active"
        count = "" if len(active) == 1 else f"{len(active)} {of_them}. The first: "
        since = "" if is_audit else f"{'since' if count else 'Since'} step {first.step}: "
        return Verdict("alert", f"{count}{since}{first.message.removesuffix('.')}.{_unread(records)}", first)
    if not any(_is_measured(last, name) for name in last.layers):
        return Verdict("nothing to judge", f"Nothing to judge: no layer was measured{at}{_why(last)}.")
    over = [event for event in told if event.ended is not None and event.level != "notice"]
    earlier = f" {len(over)} earlier {'alert is' if len(over) == 1 else 'alerts are'} over." if over else ""
    of_layers = "1 layer" if len(last.layers) == 1 else f"{len(last.layers)} layers"
    readings = "1 reading" if len(records) == 1 else f"{len(records)} readings"
    sentence = f"{'No active alert' if over else 'No alert'} in {readings} of {of_layers}."
    if is_audit:
        sentence = f"Nothing unusual in {of_layers}."
    missing = [name for name in last.layers if not _is_measured(last, name)]
    verb = "was" if len(missing) == 1 else "were"
    absent = f" {joined_name(missing)} {verb} not measured{at}{_why(last, missing)}." if missing else ""
    return Verdict("clear", f"{sentence}{_closest(last, layers, at)}{absent}{_unread(records)}{earlier}")


def _unread(records: Sequence[Record]) -> str:
    """Return which layers' attention rows and head outputs were not read, and why; ``""`` if all were."""
    armed = (
        at for at in reversed(records) if any(NOT_ARMED not in layer.absent.values() for layer in at.layers.values())
    )
    record, sentences = next(armed, Record(0, {})), ""
    for source in (ROWS, OUTPUTS):
        reasons = [layer.absent[source] for layer in record.layers.values() if source in layer.absent]
        if reasons:
            of_layers = f"{len(reasons)} of {len(record.layers)} layers" if len(record.layers) > 1 else "its only layer"
            reason, count = Counter(reasons).most_common(1)[0]
            further = "" if count == len(reasons) else ", and other reasons"
            sentences += f" {source.capitalize()} were not read in {of_layers} ({reason}{further})."
    return sentences


def _is_measured(record: Record, layer: str) -> bool:
    """Whether any number of a layer could be judged; whether it trains is not one."""
    return any(math.isfinite(value) for metric, value in record.layers[layer].values.items() if metric != "trains")


def _why(record: Record, names: Sequence[str] | None = None) -> str:
    """The first reason for missing numbers, in brackets."""
    layers = [record.layers[name] for name in names or record.layers]
    reasons = [*record.absent.values(), *(reason for layer in layers for reason in layer.absent.values())]
    return f" ({reasons[0]})" if reasons else ""


def _closest(record: Record, layers: Sequence[Mapping[str, Any]], at: str) -> str:
    worst = {name: value for name, value in record.values("hdi_worst_alignment").items() if math.isfinite(value)}
    if not worst:
        return f" No two heads were compared{at}{_why(record)}."
    layer = max(worst, key=lambda name: worst[name])
    facts = next((facts for facts in layers if facts["name"] == layer), {})
    pair = heads_in_words([closest_pair(record, layer)], layer, compared(facts).removesuffix("s"))
    return f" The two closest are {pair}, with alignment {worst[layer]:.2f} (0 chance, 1 the same head)."
