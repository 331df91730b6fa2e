"""What a page shows of one run or audit, as plain data that fits into a file to send."""

from __future__ import annotations

import base64
import datetime
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from hdi_callback.attention.names import short_names
from hdi_callback.audits import Audit
from hdi_callback.audits.audit import dead_heads_of
from hdi_callback.dashboards.report.losses import find_losses
from hdi_callback.monitoring.alerts import Alert
from hdi_callback.monitoring.history import RunHistory, read_history
from hdi_callback.monitoring.history.run_folder import find_history
from hdi_callback.monitoring.readings import LayerRecord, Record
from hdi_callback.monitoring.rules.replay import active_alerts

WORST = "hdi_worst_alignment"
QUANTITIES = {
    WORST: "Closest two heads",
    "hdi_alignment": "All heads, on average",
    "hdi_energy_worst_alignment": "Closest two, by energy",
    "hdi_energy_alignment": "All heads, by energy",
}
_PAIRS = {WORST: "worst_alignment_pair", "hdi_energy_worst_alignment": "energy_worst_alignment_pair"}

_MOST_COLUMNS = 240
_MOST_BYTES = 12_000_000  # of matrices in a page
_MOST_MAPS, _MOST_MAPS_ELSEWHERE = 60, 8  # of a layer: of one that matters, of another
_FIVE = 5  # layers that are followed closely beside the alerted ones
_MOST_ALERTS = 400
_MOST_SPECTRA = 12  # of a layer
_NOTHING = 255  # of a pair without a number


@dataclass(frozen=True)
class RunPage:
    """A run, as a page shows it.

    Attributes:
        name: what to call it.
        verdict: what to know first, in a sentence or two.
        state: ``"good"``, ``"bad"``, or ``"unknown"`` where there is nothing to judge.
        facts: what was trained, and how it was watched: label and value.
        layers: names of the layers, in model order.
        data: everything that the page draws, as JSON has it.
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
    """Take an audit as a run of one reading.

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
    matrices = _AuditMatrices(audit.record)
    data = _data([audit.record], list(audit.facts), list(audit.findings), list(audit.unusual), [], [], matrices)
    return RunPage(
        os.path.basename(audit.name.rstrip("/\\")) or audit.name, audit.verdict, state, tuple(facts),
        tuple(layer.name for layer in audit.layers), {**data, "isAudit": True}, audit.record, audit.unusual,
    )  # fmt: skip


def page_of_run(run: str | os.PathLike[str], name: str | None = None) -> RunPage:
    """Read a run.

    Args:
        run: its history, or its folder.
        name: what to call it; by default the folder of the run.

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
        {"name": curve.name, "steps": _on_steps(curve.steps, records), "values": [_rounded(v, 5) for v in curve.values]}
        for curve in find_losses(path)
    ]
    data = _data(records, facts, alerts, active, actions, losses, _KeptMatrices(kept, records))
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
    return "bad" if active else "good" if records else "unknown"


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
        return f"{first.layer}: {first.finding.what}, since step {since}{later}.{more}"
    began = [alert for alert in alerts if not alert.is_resolved and alert.level != "notice"]
    before = ""
    if began:
        before = f" {len(began)} earlier {'alert is' if len(began) == 1 else 'alerts are'} resolved."
    worst = [(layer.values[WORST], name, layer) for name, layer in records[-1].layers.items() if WORST in layer.values]
    if not worst:
        return f"No active alert.{before}"
    value, name, layer = max(worst, key=lambda item: item[0])
    pair = " and ".join(map(str, _pair(layer, WORST)))
    return f"No active alert. The two closest heads are {pair} of {name} (alignment {value:.2f}).{before}"


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
        found.append(("readings", f"{len(records)}, from step {first.step} to step {last.step}"))
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
    """Say what the layers are, in groups of one shape."""
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
        shared = f" with {key_heads} key heads" if key_heads not in (None, heads) else ""
        parts.append(f"{count} x {kind}, {heads} heads{shared} of width {width}")
    return "; ".join(parts) or "none"


def _on_steps(axis: Sequence[int], records: Sequence[Record]) -> list[float]:
    """Bring a logger's steps to optimizer steps, where the trainer counts otherwise."""
    known = sorted({(record.axis, record.step) for record in records if record.axis > 0})
    if not known or all(a == s for a, s in known):
        return [float(step) for step in axis]
    a, s = known[-1]
    return [round(step * s / a, 1) for step in axis]


# --- what is drawn


def _data(
    records: Sequence[Record],
    facts: Sequence[Mapping[str, Any]],
    alerts: Sequence[Alert],
    active: Sequence[Alert],
    actions: Sequence[Mapping[str, Any]],
    losses: Sequence[Mapping[str, Any]],
    matrices: _PairMatrices,
) -> dict[str, Any]:
    layers = list(dict.fromkeys(name for record in records for name in record.layers))
    columns = _columns(records)
    maps = {name: _grid(records, columns, layers, name) for name in QUANTITIES}
    last = records[-1].layers if records else {}
    alerted = list(dict.fromkeys(alert.layer for alert in active))
    warned = [alert.layer for alert in alerts if alert.level != "notice"]
    ever = {
        name: max((v for v in row if v is not None), default=-1.0) for name, row in zip(layers, maps[WORST]["values"])
    }
    worst = sorted(layers, key=lambda name: -ever[name])[:_FIVE]
    important = [name for name in dict.fromkeys([*alerted, *warned, *worst]) if name in layers]
    steps_of_alerts = {(alert.layer, alert.step) for alert in alerts}
    counts = {known["name"]: known for known in facts}
    return {
        "layers": layers,
        "labels": short_names(layers),
        "heads": [_heads(last.get(name), counts.get(name, {})) for name in layers],
        "shared": [_is_shared(counts.get(name, {})) for name in layers],
        "widths": [counts.get(name, {}).get("head_dim") for name in layers],
        "steps": [records[column[-1]].step for column in columns],
        "readings": [record.step for record in records],
        "maps": maps,
        "quantities": QUANTITIES,
        "alerted": {alert.layer: _alert(alert) for alert in reversed(active)},
        "alerts": [_alert(alert) for alert in alerts[-_MOST_ALERTS:]],
        "numAlerts": len(alerts),
        "actions": [
            {name: line.get(name) for name in ("step", "intervention", "layer", "message")}
            for line in actions[-_MOST_ALERTS:]
        ],
        "losses": list(losses),
        "matrices": _packed(matrices, layers, important, steps_of_alerts),
        "spectra": _spectra(records, layers),
        "start": important[0] if important else (layers[0] if layers else None),
        "table": [_row(name, last[name]) for name in layers if name in last],
    }


def _columns(records: Sequence[Record]) -> list[range]:
    """Join neighbouring readings until they fit side by side."""
    size = max(1, math.ceil(len(records) / _MOST_COLUMNS))
    return [range(start, min(start + size, len(records))) for start in range(0, len(records), size)]


def _grid(
    records: Sequence[Record], columns: Sequence[range], layers: Sequence[str], metric: str
) -> dict[str, list[list[Any]]]:
    """Give a layers x columns map of a metric; of several readings in one column the largest is kept, with its pair."""
    values: list[list[Any]] = []
    pairs: list[list[Any]] = []
    for name in layers:
        row: list[Any] = []
        heads: list[Any] = []
        for column in columns:
            known = [
                (records[place].layers[name].values[metric], place)
                for place in column
                if name in records[place].layers and metric in records[place].layers[name].values
            ]
            if not known:
                row.append(None)
                heads.append(None)
                continue
            value, place = max(known)
            row.append(_rounded(value, 3))
            heads.append(_pair(records[place].layers[name], metric) or None)
        values.append(row)
        pairs.append(heads)
    return {"values": values, "pairs": pairs if metric in _PAIRS else []}


def _pair(layer: LayerRecord, metric: str) -> list[int]:
    return [int(head) for head in layer.arrays.get(_PAIRS.get(metric, ""), ()) if head is not None and head >= 0]


def _heads(layer: LayerRecord | None, facts: Mapping[str, Any]) -> int:
    if layer is not None and "rank" in layer.arrays:
        return len(layer.arrays["rank"])
    return int(facts.get("num_key_heads") or facts.get("num_heads") or 0)


def _is_shared(facts: Mapping[str, Any]) -> bool:
    """Tell whether several heads have one key, so that key heads are compared."""
    return facts.get("num_key_heads") not in (None, facts.get("num_heads"))


def _alert(alert: Alert) -> dict[str, Any]:
    since = alert.step if alert.finding.since is None else alert.finding.since
    return {
        "step": alert.step, "layer": alert.layer, "rule": alert.rule, "level": alert.level,
        "what": alert.finding.what, "message": alert.message, "heads": list(alert.finding.heads),
        "groups": [list(group) for group in alert.finding.groups], "since": since,
        "remedy": alert.finding.remedy, "isResolved": alert.is_resolved,
    }  # fmt: skip


def _row(name: str, layer: LayerRecord) -> dict[str, Any]:
    values = layer.values
    dead = list(dead_heads_of(layer))
    return {
        "layer": name,
        "pair": _pair(layer, WORST),
        **{ours: _rounded(values.get(metric), 6) for ours, metric in (
            ("worst", WORST), ("mean", "hdi_alignment"), ("energyWorst", "hdi_energy_worst_alignment"),
            ("energy", "hdi_energy_alignment"), ("hdi", "hdi"), ("chance", "hdi_chance"),
            ("effective", "hdi_effective_heads"))},
        "dead": dead,
    }  # fmt: skip


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None or not math.isfinite(value) else float(f"{value:.{digits}f}")


# --- matrices of pairs


class _PairMatrices(Protocol):
    """Alignments of all pairs of a layer, at the steps of which they are kept."""

    def steps(self, layer: str) -> list[int]: ...

    def at(self, step: int, layer: str) -> Tensor | None: ...


class _KeptMatrices:
    """Those that a history keeps, in its lines or beside it."""

    def __init__(self, history: RunHistory, records: Sequence[Record]) -> None:
        self._history = history
        self._by_step = {record.step: record for record in records}

    def steps(self, layer: str) -> list[int]:
        return [step for step in self._history.matrix_steps(layer) if step in self._by_step]

    def at(self, step: int, layer: str) -> Tensor | None:
        return pair_alignment(self._history.matrices(step, layer), self._by_step[step].layers.get(layer))


class _AuditMatrices:
    """Those of an audit."""

    def __init__(self, record: Record) -> None:
        self._record = record

    def steps(self, layer: str) -> list[int]:
        return [self._record.step] if self._record.layers[layer].matrices else []

    def at(self, step: int, layer: str) -> Tensor | None:
        return pair_alignment(self._record.layers[layer].matrices, self._record.layers[layer])


def pair_alignment(matrices: Mapping[str, Tensor], layer: LayerRecord | None) -> Tensor | None:
    """Give the alignment of every pair: as it was kept, or from the overlaps and what they are by chance.

    Args:
        matrices: what is kept of the layer.
        layer: its numbers at that step.

    Returns:
        ``(H, H)``; `None` if neither is known.
    """
    if "pair_alignment" in matrices:
        return matrices["pair_alignment"].float()
    overlap = matrices.get("overlap")
    if overlap is None or layer is None or "hdi_chance" not in layer.values:
        return None
    chance = 1 - layer.values["hdi_chance"]
    return (overlap.float() - chance) / max(1 - chance, 1e-6)


def _packed(
    matrices: _PairMatrices, layers: Sequence[str], important: Sequence[str], alerted: set[tuple[str, int]]
) -> dict[str, Any]:
    """Write the upper triangles in a byte each, the ones that matter most first, as far as they fit into a page."""
    steps = {name: matrices.steps(name) for name in layers}
    chosen: list[tuple[str, int]] = [(name, of[-1]) for name, of in steps.items() if of]
    chosen += [(name, step) for name, step in alerted if step in steps.get(name, ())]
    for names, most in ((important, _MOST_MAPS), (layers, _MOST_MAPS_ELSEWHERE)):
        chosen += [(name, step) for name in names for step in _thinned(steps.get(name, []), most)]
    texts = {}
    for name, step in sorted(dict.fromkeys(chosen), key=lambda one: one[1]):  # a file has them step by step
        matrix = matrices.at(step, name)
        if matrix is not None:
            texts[name, step] = _bytes_of(matrix)
    packed: dict[str, dict[str, Any]] = {}
    size = 0
    for name, step in dict.fromkeys(chosen):
        text = texts.get((name, step), "")
        size += len(text)
        if size > _MOST_BYTES:
            break
        if text:
            packed.setdefault(name, {})[str(step)] = text
    return packed


def _thinned(steps: Sequence[int], most: int) -> list[int]:
    if len(steps) <= most:
        return list(steps)
    return [steps[round(place * (len(steps) - 1) / (most - 1))] for place in range(most)]


def _bytes_of(matrix: Tensor) -> str:
    """Write the pairs above the diagonal, row by row: 0 to 250 for an alignment of 0 to 1, 255 for none."""
    H = matrix.shape[-1]
    rows, columns = torch.triu_indices(H, H, 1)
    values = matrix[rows, columns]
    scaled = (values.nan_to_num(0).clamp(0, 1) * 250).round().to(torch.uint8)
    scaled[~values.isfinite()] = _NOTHING
    return base64.b64encode(bytes(scaled.tolist())).decode("ascii")


def _spectra(records: Sequence[Record], layers: Sequence[str]) -> dict[str, Any]:
    """Give over how many directions each head spreads its energy, at a few steps."""
    chosen = [records[place] for place in sorted({*_thinned(range(len(records)), _MOST_SPECTRA)})] if records else []
    found: dict[str, Any] = {}
    for name in layers:
        of = {
            str(record.step): [_rounded(value, 1) for value in record.layers[name].arrays["effective_rank"]]
            for record in chosen
            if name in record.layers and "effective_rank" in record.layers[name].arrays
        }
        if of:
            found[name] = of
    return found
