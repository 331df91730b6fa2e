"""The data of a run that a page draws, as JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from hdi_callback.attention.names import short_names
from hdi_callback.audits.audit import dead_heads_of
from hdi_callback.dashboards.report.pair_matrices import PairMatrices, packed, thinned
from hdi_callback.monitoring.alerts import Alert
from hdi_callback.monitoring.readings import LayerRecord, Record

WORST = "hdi_worst_alignment"
QUANTITIES = {
    WORST: "Closest two heads",
    "hdi_alignment": "All heads, on average",
    "hdi_energy_worst_alignment": "Closest two, by energy",
    "hdi_energy_alignment": "All heads, by energy",
}
_PAIRS = {WORST: "worst_alignment_pair", "hdi_energy_worst_alignment": "energy_worst_alignment_pair"}

_MOST_COLUMNS = 240
_FIVE = 5  # layers that are followed closely beside the alerted ones
_MOST_ALERTS = 400
_MOST_SPECTRA = 12  # of a layer


def page_data(
    records: Sequence[Record],
    facts: Sequence[Mapping[str, Any]],
    alerts: Sequence[Alert],
    active: Sequence[Alert],
    actions: Sequence[Mapping[str, Any]],
    losses: Sequence[Mapping[str, Any]],
    matrices: PairMatrices,
) -> dict[str, Any]:
    """The data of a run that a page draws.

    Args:
        records: its readings.
        facts: facts about each layer, from the history's header.
        alerts: all that were raised or resolved.
        active: those that are active.
        actions: lines of the history about interventions.
        losses: curves, by name, with their steps.
        matrices: alignments of pairs.

    Returns:
        Plain data.
    """
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
        "matrices": packed(matrices, layers, important, steps_of_alerts),
        "spectra": _spectra(records, layers),
        "start": important[0] if important else (layers[0] if layers else None),
        "table": [_row(name, last[name]) for name in layers if name in last],
    }


def _columns(records: Sequence[Record]) -> list[range]:
    """Readings merged into columns that fit side by side."""
    size = max(1, math.ceil(len(records) / _MOST_COLUMNS))
    return [range(start, min(start + size, len(records))) for start in range(0, len(records), size)]


def _grid(
    records: Sequence[Record], columns: Sequence[range], layers: Sequence[str], metric: str
) -> dict[str, list[list[Any]]]:
    """Map of a metric, layers x columns; a column has the largest of its readings, with its pair."""
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
            row.append(rounded(value, 3))
            heads.append(pair_in(records[place].layers[name], metric) or None)
        values.append(row)
        pairs.append(heads)
    return {"values": values, "pairs": pairs if metric in _PAIRS else []}


def pair_in(layer: LayerRecord, metric: str) -> list[int]:
    """The pair of heads of a worst-pair metric.

    Args:
        layer: its numbers.
        metric: name of the metric.

    Returns:
        Two heads; nothing if there is no such pair.
    """
    return [int(head) for head in layer.arrays.get(_PAIRS.get(metric, ""), ()) if head is not None and head >= 0]


def _heads(layer: LayerRecord | None, facts: Mapping[str, Any]) -> int:
    if layer is not None and "rank" in layer.arrays:
        return len(layer.arrays["rank"])
    return int(facts.get("num_key_heads") or facts.get("num_heads") or 0)


def _is_shared(facts: Mapping[str, Any]) -> bool:
    """Return whether heads share keys, so that key heads are compared."""
    return facts.get("num_key_heads") not in (None, facts.get("num_heads"))


def _alert(alert: Alert) -> dict[str, Any]:
    since = alert.step if alert.finding.since is None else alert.finding.since
    return {
        "step": alert.step, "layer": alert.layer, "rule": alert.rule, "level": alert.level,
        "what": alert.finding.what, "message": alert.message, "heads": list(alert.finding.heads),
        "groups": [list(group) for group in alert.finding.groups], "since": since,
        "remedy": alert.finding.remedy, "isResolved": alert.is_resolved, "status": alert.status,
    }  # fmt: skip


def _row(name: str, layer: LayerRecord) -> dict[str, Any]:
    values = layer.values
    dead = list(dead_heads_of(layer))
    return {
        "layer": name,
        "pair": pair_in(layer, WORST),
        **{ours: rounded(values.get(metric), 6) for ours, metric in (
            ("worst", WORST), ("mean", "hdi_alignment"), ("energyWorst", "hdi_energy_worst_alignment"),
            ("energy", "hdi_energy_alignment"), ("hdi", "hdi"), ("chance", "hdi_chance"),
            ("effective", "hdi_effective_heads"))},
        "dead": dead,
    }  # fmt: skip


def rounded(value: float | None, digits: int) -> float | None:
    """A rounded number.

    Args:
        value: any number, or `None`.
        digits: after the point.

    Returns:
        The number; `None` if it is missing or not finite, which JSON does not have.
    """
    return None if value is None or not math.isfinite(value) else float(f"{value:.{digits}f}")


def _spectra(records: Sequence[Record], layers: Sequence[str]) -> dict[str, Any]:
    """Effective rank of each head at a few steps."""
    chosen = [records[place] for place in sorted({*thinned(range(len(records)), _MOST_SPECTRA)})] if records else []
    found: dict[str, Any] = {}
    for name in layers:
        of = {
            str(record.step): [rounded(value, 1) for value in record.layers[name].arrays["effective_rank"]]
            for record in chosen
            if name in record.layers and "effective_rank" in record.layers[name].arrays
        }
        if of:
            found[name] = of
    return found
