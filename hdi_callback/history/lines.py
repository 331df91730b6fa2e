"""A record as one line of JSON, and back."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hdi_callback.record import Action, Alert, LayerRecord, Record

_DIGITS = 9  # of a float32
_DIGITS_OF_HEADS = 5  # most of a line are the numbers of single heads


def record_to_line(record: Record) -> dict[str, Any]:
    """Return a record as plain data, without its matrices and its active alerts."""
    layers = {
        name: {
            "values": {metric: _rounded(value, _DIGITS) for metric, value in layer.values.items()},
            "heads": {key: _rounded(heads, _DIGITS_OF_HEADS) for key, heads in layer.heads.items()},
            **({"absent": layer.absent} if layer.absent else {}),
        }
        for name, layer in record.layers.items()
    }
    return {
        "step": record.step,
        "epoch": record.epoch,
        "time": round(record.time, 3),
        "loss": None if record.loss is None else _rounded(record.loss, _DIGITS),
        "layers": layers,
        "alerts": [alert.to_dict() for alert in record.alerts],
        "actions": [asdict(action) for action in record.actions],
        "absent": record.absent,
        "is_last": record.is_last,
        "cost": None if record.cost is None else _rounded(record.cost, _DIGITS_OF_HEADS),
    }


def record_from_line(line: Mapping[str, Any], active: tuple[Alert, ...]) -> Record:
    """Return the record of a line; `active` are the active alerts of the line before, where it has none of its own."""
    layers = {
        name: LayerRecord(
            values={metric: _number(value) for metric, value in layer["values"].items()},
            heads={key: [_number(head) for head in heads] for key, heads in layer["heads"].items()},
            absent=layer.get("absent", {}),
        )
        for name, layer in line["layers"].items()
    }
    return Record(
        step=line["step"],
        layers=layers,
        epoch=line["epoch"],
        time=line["time"],
        loss=line["loss"],
        alerts=tuple(map(Alert.from_dict, line["alerts"])),
        actions=tuple(Action(**{**action, "layers": tuple(action["layers"])}) for action in line["actions"]),
        active=tuple(map(Alert.from_dict, line["active"])) if "active" in line else active,
        absent=line["absent"],
        is_last=line["is_last"],
        cost=line["cost"],
    )


def to_text(line: Mapping[str, Any]) -> bytes:
    """Write a line; numbers that are not finite become null, as JSON has no others."""
    try:
        text = json.dumps(line, allow_nan=False, separators=(",", ":"))
    except ValueError:  # of an alert: the numbers of layers are finite by now
        text = json.dumps(_rounded(line, _DIGITS), separators=(",", ":"))
    return text.encode("ascii") + b"\n"


def from_text(text: bytes) -> dict[str, Any] | None:
    """Return the line of a text; `None` if it is none, as a process that was killed leaves behind."""
    try:
        line = json.loads(text)
    except ValueError:
        return None
    return line if isinstance(line, dict) and "layers" in line else None


def matrices_folder(history: Path) -> Path:
    """Return the folder of the matrices of a history, beside it."""
    return history.with_name(f"{history.stem}_matrices")


def _number(value: Any) -> Any:
    return math.nan if value is None else value


def _rounded(value: Any, digits: int) -> Any:
    """Round the floats in plain data; NaN and infinity become `None`."""
    if type(value) is float:
        return float(f"{value:.{digits}g}") if math.isfinite(value) else None
    if type(value) is int:
        return value
    if isinstance(value, list | tuple):
        return [_rounded(item, digits) for item in value]
    if isinstance(value, dict):
        return {key: _rounded(item, digits) for key, item in value.items()}
    return value
