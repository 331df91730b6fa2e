"""One line of a history file: written, read and checked."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hdi_callback.attention.names import printable
from hdi_callback.monitoring.history.schema import is_alert, is_text_map, is_value, is_whole
from hdi_callback.monitoring.readings import LayerRecord, Record

_DIGITS = 9  # of a float32
_NAN = float("nan")


class LineError(ValueError):
    """A line of a history file cannot be read; the message says why.

    Attributes:
        is_torn: True if it is the beginning of a line, as a killed process leaves it.
    """

    def __init__(self, reason: str, *, is_torn: bool = False) -> None:
        super().__init__(reason)
        self.is_torn = is_torn


def line_to_text(line: Mapping[str, Any]) -> str:
    """Write a line.

    Args:
        line: plain data; floats are rounded to the digits of a float32, NaN and infinity become null, and types that
            JSON lacks become numbers or strings.

    Returns:
        JSON without a line break, in ASCII.
    """
    plain = _plain(line)
    time = plain.get("time")
    if isinstance(time, float):  # a float32 has fewer digits than those before its point
        plain["time"] = round(float(line["time"]), 3)
    return json.dumps(plain, allow_nan=False, separators=(",", ":"))


def line_from_text(data: bytes) -> dict[str, Any]:
    """Read a line.

    Args:
        data: the line as it is in the file.

    Returns:
        A dictionary with ``kind``, in which every known field has its type.

    Raises:
        LineError: if it is no line of a history.
    """
    try:
        line = json.loads(data.decode("utf-8"))
    except UnicodeDecodeError:
        raise LineError("it is not UTF-8") from None
    except RecursionError:
        raise LineError("it is nested too deeply") from None
    except json.JSONDecodeError as error:
        raise LineError("it is not JSON", is_torn=data.startswith(b'{"kind":') and b"\0" not in data) from error
    except (ValueError, MemoryError) as error:
        raise LineError(f"it cannot be decoded ({type(error).__name__})") from error
    if not is_text_map(line) or not isinstance(line.get("kind"), str):
        raise LineError("it is not an object with a `kind`")
    _check(line)
    return dict(line)


def record_to_line(record: Record, *, with_heads: bool = True) -> dict[str, Any]:
    """A reading as plain data, without its matrices.

    Args:
        record: the reading.
        with_heads: include the numbers of single heads; pairs always are.

    Returns:
        The argument of `record_from_line`.
    """
    layers = {
        name: {
            "values": layer.values,
            "arrays": {key: array for key, array in layer.arrays.items() if with_heads or key.endswith("_pair")},
        }
        for name, layer in record.layers.items()
    }
    return {
        "kind": "reading",
        "step": record.step,
        "epoch": record.epoch,
        "axis": record.axis,
        "time": round(record.time, 3),
        "layers": layers,
        "absent": record.absent,
    }


def record_from_line(line: Mapping[str, Any]) -> Record:
    """A reading from a line.

    Args:
        line: a line of kind ``reading``.

    Returns:
        The numbers; NaN where null was written.
    """
    layers = {
        printable(name): LayerRecord(
            values={printable(key): _number(value) for key, value in layer.get("values", {}).items()},
            arrays=dict(layer.get("arrays", {})),
            matrices={
                key: torch.tensor([[_number(value) for value in row] for row in matrix], device="cpu")
                for key, matrix in layer.get("matrices", {}).items()
            },
        )
        for name, layer in line["layers"].items()
    }
    return Record(
        step=line["step"],
        layers=layers,
        absent=dict(line.get("absent", {})),
        epoch=line.get("epoch"),
        axis=line.get("axis", line["step"]),
        time=float(line.get("time", 0.0)),
    )


def _number(value: float | None) -> float:
    return value if value is not None and math.isfinite(value) else _NAN


def _check(line: Mapping[str, Any]) -> None:
    """Refuse a line with a known field of the wrong type."""
    kind = line["kind"]
    if kind in ("run", "reading", "alert", "intervention") or "step" in line:
        _require(is_whole(line.get("step")), "its step is not a whole number")
    if kind == "run":
        layers, last = line.get("layers"), line.get("last_reading", line["step"])
        _require(is_whole(line.get("format")), "its format is not a whole number")
        _require(is_whole(last, least=-1), "its last reading is not a step")
        _require(isinstance(layers, list) and all(map(_is_layer, layers)), "its layers are not described")
        _require(isinstance(line.get("run", ""), str) and isinstance(line.get("session", ""), str), "its run has no id")
        _require(is_text_map(line.get("parent", {})), "its parent is not an object")
    elif kind == "reading":
        _check_reading(line)
    elif kind == "alert":
        _require(is_alert(line), "it is no alert")
    elif kind == "intervention":
        names = ("intervention", "layer", "message")
        _require(all(isinstance(line.get(name), str) for name in names), "it is no intervention")


def _check_reading(line: Mapping[str, Any]) -> None:
    epoch = line.get("epoch")
    _require(epoch is None or is_whole(epoch), "its epoch is not a whole number")
    _require(is_whole(line.get("axis", 0)), "its axis is not a whole number")
    time = line.get("time", 0.0)
    _require(time is not None and is_value(time), "its time is not a number")
    absent = line.get("absent", {})
    _require(is_text_map(absent) and all(isinstance(why, str) for why in absent.values()), "its reasons are not texts")
    _require(is_text_map(line.get("layers")), "it has no layers")
    for layer in line["layers"].values():
        _require(is_text_map(layer), "a layer is not an object")
        values, arrays, matrices = (layer.get(part, {}) for part in ("values", "arrays", "matrices"))
        _require(is_text_map(values) and all(map(is_value, values.values())), "a value is not a number")
        _require(is_text_map(arrays) and all(_is_array(*item) for item in arrays.items()), "an array is none")
        _require(is_text_map(matrices) and all(map(_is_matrix, matrices.values())), "a matrix is none")


def _is_layer(value: Any) -> bool:
    sizes = ("num_heads", "num_key_heads", "head_dim", "value_dim", "width")
    return (
        is_text_map(value)
        and isinstance(value.get("name"), str)
        and all(is_whole(value[name]) for name in sizes if name in value)
    )


def _is_array(name: str, value: Any) -> bool:
    if not isinstance(value, list):
        return False
    if name.endswith("_pair"):
        return len(value) == 2 and all(is_whole(head, least=-1) for head in value)
    return set(map(type, value)) <= {float, type(None)} or all(map(is_value, value))


def _is_matrix(value: Any) -> bool:
    return (
        isinstance(value, list)
        and all(isinstance(row, list) and len(row) == len(value[0]) for row in value)
        and all(is_value(entry) for row in value for entry in row)
    )


def _require(is_met: bool, reason: str) -> None:
    if not is_met:
        raise LineError(reason)


def _plain(value: Any) -> Any:
    # Most are floats in lists: `type(...) is` takes half of the time of `isinstance`.
    if type(value) is float:
        return float(f"{value:.{_DIGITS}g}") if math.isfinite(value) else None
    if type(value) is list:
        return [_plain(item) for item in value]
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return float(f"{value:.{_DIGITS}g}") if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, Sequence | set | frozenset) and not isinstance(value, bytes | bytearray):
        return [_plain(item) for item in value]
    try:
        return _plain(float(value))  # a tensor of one element, a number of numpy
    except Exception:
        return str(value)
