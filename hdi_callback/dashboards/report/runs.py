"""One run or audit as plain data for a page."""

from __future__ import annotations

import datetime
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hdi_callback.audits import Audit
from hdi_callback.dashboards.report.losses import find_losses
from hdi_callback.dashboards.report.page_data import WORST, page_data, pair_in, rounded
from hdi_callback.dashboards.report.pair_matrices import AuditMatrices, KeptMatrices
from hdi_callback.monitoring.alerts import Alert
from hdi_callback.monitoring.history import read_history
from hdi_callback.monitoring.history.run_folder import find_history
from hdi_callback.monitoring.plain_table import decimal
from hdi_callback.monitoring.readings import Record
from hdi_callback.monitoring.rules.replay import active_alerts


@dataclass(frozen=True)
class RunPage:
    """A run as plain data for a page.

    Attributes:
        name: its name.
        verdict: the result in a sentence or two.
        state: ``"good"``, ``"bad"``, or ``"unknown"`` where there is nothing to judge.
        facts: label and value: what was trained, and how it was watched.
        layers: names of the layers, in model order.
        data: everything that the page draws, as JSON.
        last: the last reading.
        active: the active alerts.
    """

    name: str
    verdict: str
    state: str
    facts: tuple[tuple[str, str], ...]
    layers: tuple[str, ...]
    data: dict[str, Any] = field(repr=False)
    last: Record | None = field(repr=False)
    active: tuple[Alert, ...] = ()


def page_of_audit(audit: Audit) -> RunPage:
    """An audit as a run of one reading.

    Args:
        audit: the audit.

    Returns:
        What a page shows of it.
    """
    dead = sum(len(layer.dead_heads) for layer in audit.layers)
    facts = [
        ("audited", audit.name),
        ("layers", _layers_fact([dict(known) for known in audit.facts])),
        ("dead heads", str(dead)),
    ]
    facts += [("not audited", f"{name}: {reason}") for name, reason in audit.not_audited.items()]
    state = "bad" if audit.unusual else "good" if any(not layer.absent for layer in audit.layers) else "unknown"
    matrices = AuditMatrices(audit.record)
    data = page_data([audit.record], list(audit.facts), list(audit.findings), list(audit.unusual), [], [], matrices)
    return RunPage(
        os.path.basename(audit.name.rstrip("/\\")) or audit.name, audit.verdict, state, tuple(facts),
        tuple(layer.name for layer in audit.layers), {**data, "isAudit": True}, audit.record, audit.unusual,
    )  # fmt: skip


def page_of_run(run: str | os.PathLike[str], name: str | None = None) -> RunPage:
    """The data of a run.

    Args:
        run: its history, or its folder.
        name: its name; by default the folder of the run.

    Returns:
        What a page shows of it.
    """
    path = find_history(run)
    kept = read_history(path)
    lines = kept.lines
    headers = [line for line in lines if line["kind"] == "run"]
    records = kept.records()
    alerts = [Alert.from_dict(line) for line in lines if line["kind"] == "alert"]
    actions = [line for line in lines if line["kind"] == "intervention"]
    facts = list(headers[-1]["layers"]) if headers else []
    active = active_alerts(alerts)
    losses = [
        {"name": curve.name, "steps": _on_steps(curve.steps, records), "values": [rounded(v, 5) for v in curve.values]}
        for curve in find_losses(path)
    ]
    data = page_data(records, facts, alerts, active, actions, losses, KeptMatrices(kept, records))
    return RunPage(
        name or _name_of(path), _verdict(records, alerts, active), _state(records, active),
        tuple(_facts_of(path, headers, facts, records, alerts, actions)),
        tuple(records[-1].layers) if records else tuple(layer["name"] for layer in facts),
        {**data, "isAudit": False}, records[-1] if records else None, tuple(active),
    )  # fmt: skip


def _name_of(path: Path) -> str:
    folder = path.parent.parent if path.parent.name == "hdi" else path.parent
    own = "" if path.stem == "history" else f" ({path.stem})"
    resolved = folder.resolve()
    return (resolved.name or str(path)) + own


def _state(records: Sequence[Record], active: Sequence[Alert]) -> str:
    has_numbers = bool(records) and any(layer.values for layer in records[-1].layers.values())
    return "bad" if active else "good" if has_numbers else "unknown"


def _verdict(records: Sequence[Record], alerts: Sequence[Alert], active: Sequence[Alert]) -> str:
    if not records:
        return "There is no reading yet."
    if active:
        layers = {alert.layer for alert in active}
        first = active[0]
        since = first.step if first.finding.since is None else first.finding.since
        others = sorted(layers - {first.layer})
        where = f"{len(others)} more {'layer' if len(others) == 1 else 'layers'}"
        more = f" There are active alerts in {where}." if others else ""
        last = records[-1]
        now = last.layers[first.layer].values.get(first.finding.metric or "") if first.layer in last.layers else None
        later = f"; now {now:.2f}, at step {last.step}" if now is not None and last.step > first.step else ""
        start = f"{'; ' if ';' in first.finding.what else ', '}since step {since}"
        return f"{first.layer}: {first.finding.what}{start}{later}.{more}"
    began = [alert for alert in alerts if not alert.is_resolved and alert.level != "notice"]
    before = ""
    if began:
        before = f" {len(began)} earlier {'alert is' if len(began) == 1 else 'alerts are'} over."
    last = records[-1]
    worst = [(layer.values[WORST], name, layer) for name, layer in last.layers.items() if WORST in layer.values]
    without = [name for name in last.layers if WORST not in last.layers[name].values]
    why = next((f": {reason}" for name in without if (reason := _why_not(last, name))), "")
    if not worst:
        return f"No active alert. No two heads were compared at step {last.step}{why}.{before}"
    value, name, layer = max(worst, key=lambda item: item[0])
    pair = " and ".join(map(str, pair_in(layer, WORST)))
    unread = ""
    if without:
        many = f" and {len(without) - 1} more" if len(without) > 1 else ""
        unread = f" No two heads of {without[0]}{many} were compared at step {last.step}{why}."
    closest = f"The two closest heads are {pair} of {name} (alignment {decimal(value)})."
    return f"No active alert. {closest}{unread}{before}"


def _why_not(record: Record, layer: str) -> str:
    """The reason why the heads of a layer were not compared."""
    return record.absent.get(f"hdi/{layer}", record.absent.get(layer, ""))


def _facts_of(
    path: Path,
    headers: Sequence[Mapping[str, Any]],
    facts: Sequence[Mapping[str, Any]],
    records: Sequence[Record],
    alerts: Sequence[Alert],
    actions: Sequence[Mapping[str, Any]],
) -> list[tuple[str, str]]:
    found = [("layers", _layers_fact(facts))]
    if records:
        first, last = records[0], records[-1]
        steps = f"from step {first.step} to step {last.step}" if len(records) > 1 else f"at step {first.step}"
        found.append(("readings", f"{len(records)}, {steps}"))
        if first.time > 0:
            begun = datetime.datetime.fromtimestamp(first.time, datetime.timezone.utc)
            length = datetime.timedelta(seconds=round(max(0, last.time - first.time)))
            found.append(("began", f"{begun:%Y-%m-%d %H:%M} UTC, watched for {length}"))
    starts = [str(header["step"]) for header in headers[1:]]
    if starts:
        found.append(("resumed at", f"step {', '.join(starts)}"))
    raised = [alert for alert in alerts if not alert.is_resolved]
    found.append(("alerts", f"{len(raised)} raised, {len(active_alerts(alerts))} active"))
    if actions:
        found.append(("interventions", str(len(actions))))
    found.append(("history", str(path)))
    return found


def _layers_fact(facts: Sequence[Mapping[str, Any]]) -> str:
    """A description of the layers, grouped by shape."""
    groups: dict[tuple[Any, ...], int] = {}
    for known in facts:
        shape = (
            known.get("type", "attention"),
            known.get("num_heads"),
            known.get("num_key_heads"),
            known.get("head_dim"),
        )
        groups[shape] = groups.get(shape, 0) + 1
    parts = []
    for (kind, heads, key_heads, width), count in groups.items():
        shared = "" if key_heads in (None, heads) else f" with {key_heads} key {_heads_word(key_heads)}"
        parts.append(f"{count} x {kind}, {heads} {_heads_word(heads)}{shared} of width {width}")
    return "; ".join(parts) or "none"


def _heads_word(count: Any) -> str:
    return "head" if count == 1 else "heads"


def _on_steps(axis: Sequence[int], records: Sequence[Record]) -> list[float]:
    """A logger's steps as optimizer steps, if the trainer counts otherwise."""
    known = sorted({(record.axis, record.step) for record in records if record.axis > 0})
    if not known or all(a == s for a, s in known):
        return [float(step) for step in axis]
    a, s = known[-1]
    return [round(step * s / a, 1) for step in axis]
