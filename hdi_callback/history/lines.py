"""A record as one line of JSON, and back."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import chain, compress, islice
from pathlib import Path
from typing import Any

import numpy as np

from hdi_callback.record import Action, Alert, LayerRecord, Record

_DIGITS = 9  # of a float32
_DIGITS_OF_HEADS = 5  # most of a line are the numbers of single heads
_LARGEST_EXACT = 1e22  # power of ten that is a float


def record_to_line(record: Record) -> dict[str, Any]:
    """Return a record as plain data, without its matrices and its active alerts."""
    layers = record.layers.values()
    values = _rounded([[*layer.values.values()] for layer in layers], _DIGITS)
    numbers = iter(_rounded([each for layer in layers for each in layer.heads.values()], _DIGITS_OF_HEADS))
    line = {
        **vars(record),
        "time": round(record.time, 3),
        "loss": plain(record.loss, _DIGITS),
        "layers": {
            name: {"values": dict(zip(layer.values, of_layer)), "heads": dict(zip(layer.heads, numbers))}
            | ({"absent": layer.absent} if layer.absent else {})
            for (name, layer), of_layer in zip(record.layers.items(), values)
        },
        "alerts": plain([asdict(alert) for alert in record.alerts]),
        "actions": [asdict(action) for action in record.actions],
        "cost": plain(record.cost, _DIGITS_OF_HEADS),
    }
    del line["active"]
    return line


def record_from_line(line: Mapping[str, Any], active: tuple[Alert, ...]) -> Record:
    """Return the record of a line; `active` are the active alerts of the line before, where it has none of its own."""
    layers = {
        name: LayerRecord(
            {metric: math.nan if value is None else value for metric, value in layer["values"].items()},
            {key: [math.nan if value is None else value for value in heads] for key, heads in layer["heads"].items()},
            absent=layer.get("absent", {}),
        )
        for name, layer in line["layers"].items()
    }
    own = {
        "layers": layers,
        "written": tuple(line.get("written", ())),
        "alerts": tuple(map(Alert.from_dict, line["alerts"])),
        "actions": tuple(Action(**{**action, "layers": tuple(action["layers"])}) for action in line["actions"]),
        "active": tuple(map(Alert.from_dict, line["active"])) if "active" in line else active,
    }
    return Record(**{**line, **own})


def to_text(line: Mapping[str, Any]) -> bytes:
    """Return a line as bytes."""
    return json.dumps(line, allow_nan=False, separators=(",", ":")).encode("ascii") + b"\n"


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


def plain(data: Any, digits: int = 17) -> Any:
    """Return plain data with its floats rounded, and `None` for NaN and infinity, as JSON has no others."""
    if type(data) is float:
        rounded = float(f"{data:.{digits}g}")
        return rounded if math.isfinite(rounded) else data if math.isfinite(data) else None  # the largest round to more
    if isinstance(data, list | tuple):
        return [plain(item, digits) for item in data]
    if isinstance(data, dict):
        return {key: plain(item, digits) for key, item in data.items()}
    return data


def _rounded(lists: Sequence[Sequence[Any]], digits: int) -> list[list[Any]]:
    """Return what `plain` makes of lists of numbers; their floats, thousands in all, are rounded in one call."""
    are_floats = [set(map(type, each)) == {float} for each in lists]
    floats = [*chain.from_iterable(compress(lists, are_floats))]
    with np.errstate(all="ignore"):
        array = np.array(floats)
        places = digits - 1 - np.floor(np.log10(np.abs(array) + (array == 0)))
        factor = 10.0 ** np.abs(places)
        done = np.where(places < 0, np.rint(array / factor) * factor, np.rint(array * factor) / factor)
    numbers = done.tolist()
    for place in np.flatnonzero(~(np.isfinite(done) & (factor <= _LARGEST_EXACT))):
        numbers[place] = plain(floats[place], digits)
    arrived = iter(numbers)
    return [
        [*islice(arrived, len(each))] if is_of_floats else plain(each, digits)
        for each, is_of_floats in zip(lists, are_floats)
    ]
