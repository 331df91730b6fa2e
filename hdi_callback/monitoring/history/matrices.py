"""The matrices over heads of a run, in a file beside its history: eight bits an entry, compressed, thinned with age.

One JSON object a line, append-only until the file exceeds its limit: then it is replaced by one with fewer of the older
readings. ``docs/history.md`` describes the format for readers without this package.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
import os
import re
import zlib
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hdi_callback.monitoring.history.schema import is_number, is_text_map, is_whole
from hdi_callback.monitoring.readings import Record

LEVELS = 255
"""Codes 0 to 254 are numbers, 255 is NaN; the error of an entry is at most 1/508 of its matrix' range."""

_NOT_FINITE = LEVELS
_MOST_HEADS = 2**14
_LONGEST = 2**30  # bytes of a line
_BEGINNING = re.compile(rb'\{"kind":"matrices","step":(\d+),"time":([-+.\deE]+),"is_kept":(true|false),')
_LEFT = 0.7  # of the limit, after thinning, so that thinning is rare


class MatrixError(ValueError):
    """A line of a matrix file cannot be read; the message says why."""


def matrix_path(history: str | os.PathLike[str]) -> Path:
    """Path of the matrix file of a history.

    Args:
        history: path of the history file.

    Returns:
        The path beside it.

    Example:
        >>> matrix_path("hdi/history.jsonl").name
        'history.matrices'
    """
    path = Path(history)
    return path.with_name(f"{path.stem}.matrices")


def encode_layer(matrices: Mapping[str, Tensor]) -> dict[str, Any]:
    """The matrices of a layer as plain data: the pairs of heads above the diagonal, then the diagonal.

    Args:
        matrices: name -> ``(H, H)``, symmetric, on the host; the number of heads may differ.

    Returns:
        The argument of `decode_layer`: ``matrices``, a list of names, sizes and ranges, and ``data``, their codes.

    Example:
        >>> layer = encode_layer({"overlap": torch.tensor([[1, 0.25], [0.25, 1]])})
        >>> layer["matrices"]
        [{'name': 'overlap', 'heads': 2, 'pairs': [0.25, 0.25], 'diagonal': [1.0, 1.0]}]
        >>> decode_layer(layer)["overlap"].tolist()
        [[1.0, 0.25], [0.25, 1.0]]
    """
    described, codes = [], []
    for name, matrix in matrices.items():
        heads = len(matrix)
        exact = matrix.double()
        above = torch.triu_indices(heads, heads, 1, device="cpu")
        pairs, pair_range = _quantise(exact[above[0], above[1]])
        diagonal, diagonal_range = _quantise(exact.diagonal())
        codes += [pairs, diagonal]
        described.append({"name": name, "heads": heads, "pairs": pair_range, "diagonal": diagonal_range})
    data = bytes(torch.cat(codes).tolist()) if codes else b""
    return {"matrices": described, "data": base64.b64encode(zlib.compress(data, 6)).decode("ascii")}


def decode_layer(layer: Mapping[str, Any]) -> dict[str, Tensor]:
    """The matrices of a layer from plain data.

    Args:
        layer: the result of `encode_layer`.

    Returns:
        Name -> ``(H, H)``; NaN where there was no finite number.

    Raises:
        MatrixError: if it is something else.
    """
    described = layer.get("matrices")
    if not isinstance(described, list) or not all(map(_is_described, described)):
        raise MatrixError("its matrices are not described")
    sizes = [entry["heads"] * (entry["heads"] + 1) // 2 for entry in described]
    data = _inflate(layer.get("data"), sum(sizes))
    codes = torch.tensor(list(data), dtype=torch.float64, device="cpu")
    matrices: dict[str, Tensor] = {}
    start = 0
    for entry, size in zip(described, sizes):
        heads, part = entry["heads"], codes[start : start + size]
        start += size
        matrix = codes.new_zeros(heads, heads)
        above = torch.triu_indices(heads, heads, 1, device="cpu")
        matrix[above[0], above[1]] = _dequantise(part[: size - heads], entry["pairs"])
        matrix = matrix + matrix.T
        matrix.diagonal().copy_(_dequantise(part[size - heads :], entry["diagonal"]))
        matrices[entry["name"]] = matrix
    return matrices


def _quantise(values: Tensor) -> tuple[Tensor, list[float]]:
    is_finite = values.isfinite()
    finite = values[is_finite]
    if not len(finite):
        return torch.full_like(values, _NOT_FINITE).long(), [0.0, 0.0]
    low, high = (float(f"{bound:.9g}") for bound in torch.aminmax(finite))
    shares = (values - low) / (high - low) if high > low else torch.zeros_like(values)
    codes = (shares * (LEVELS - 1)).round().clamp(0, LEVELS - 1)
    return codes.where(is_finite, torch.full_like(codes, _NOT_FINITE)).long(), [low, high]


def _dequantise(codes: Tensor, bounds: list[float]) -> Tensor:
    low, high = bounds
    values = low + codes * ((high - low) / (LEVELS - 1))
    return values.masked_fill(codes == _NOT_FINITE, math.nan)


def _inflate(data: Any, size: int) -> bytes:
    if not isinstance(data, str):
        raise MatrixError("its data are not text")
    try:
        inflater = zlib.decompressobj()
        codes = inflater.decompress(base64.b64decode(data, validate=True), size + 1)
    except (binascii.Error, ValueError, zlib.error) as error:
        raise MatrixError("its data cannot be decoded") from error
    if len(codes) != size:
        raise MatrixError(f"it has {len(codes)} entries or more, which is not the {size} of its matrices")
    return codes


def _is_described(value: Any) -> bool:
    return (
        is_text_map(value)
        and isinstance(value.get("name"), str)
        and is_whole(value.get("heads"))
        and value["heads"] <= _MOST_HEADS
        and all(_is_range(value.get(part)) for part in ("pairs", "diagonal"))
    )


def _is_range(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(map(is_number, value))


class MatrixFile:
    """Appends the matrices of readings to a file, and thins it if it becomes too large.

    Args:
        path: the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def size(self) -> int:
        """Bytes on the disk."""
        try:
            return self.path.stat().st_size
        except OSError:
            return 0

    def write(self, record: Record, layers: Collection[str], *, is_kept: bool, limit: float = math.inf) -> None:
        """Append the matrices of some layers at one reading.

        Args:
            record: the reading.
            layers: names of layers; those without matrices are skipped.
            is_kept: never drop them when the file is thinned.
            limit: bytes that the file may have.
        """
        chosen = {name: record.layers[name] for name in record.layers if name in layers}
        held = {name: encode_layer(layer.matrices) for name, layer in chosen.items() if layer.matrices}
        if not held:
            return
        line = {
            "kind": "matrices",
            "step": record.step,
            "time": round(record.time, 3),
            "is_kept": is_kept,
            "layers": held,
        }
        data = json.dumps(line, allow_nan=False, separators=(",", ":")).encode() + b"\n"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a+b", buffering=0) as file:
            _append(file, data)
        if self.size > limit:
            self.thin(limit)

    def thin(self, limit: float) -> None:
        """Drop readings, more of the older ones, until the file is well below its limit.

        Readings marked as kept stay, whatever their size.

        Args:
            limit: bytes that the file may have.
        """
        with self.path.open("rb") as file:
            places = list(_places(file))
            sizes: dict[int, int] = {}
            for place in places:
                if not place.is_kept:
                    sizes[place.step] = sizes.get(place.step, 0) + place.length
            surplus = sum(place.length for place in places) - _LEFT * limit
            without = steps_to_leave_out(sizes, surplus)
            draft = self.path.with_name(f".hdi-{os.getpid()}-{os.urandom(4).hex()}.tmp")
            try:
                with draft.open("xb") as thinned:
                    for place in places:
                        if place.is_kept or place.step not in without:
                            file.seek(place.start)
                            thinned.write(file.read(place.length))
                os.replace(draft, self.path)
            finally:
                draft.unlink(missing_ok=True)

    def take_over(self, other: Path, last: int) -> None:
        """Copy the matrices that another run has written up to a step.

        Args:
            other: a matrix file; nothing is copied if there is none.
            last: the last step that counts.
        """
        with suppress(FileNotFoundError), other.open("rb") as source, self.path.open("ab") as copy:
            for place in list(_places(source)):
                if place.step <= last:
                    source.seek(place.start)
                    copy.write(source.read(place.length))


class _Place:
    """Position and header of a line in a matrix file."""

    __slots__ = ("is_kept", "length", "start", "step", "time")

    def __init__(self, start: int, length: int, step: int, time: float, is_kept: bool) -> None:
        self.start, self.length, self.step, self.time, self.is_kept = start, length, step, time, is_kept


def _places(file: Any) -> Iterator[_Place]:
    """The complete lines of an open file."""
    start = 0
    while data := file.readline(_LONGEST):
        match = _BEGINNING.match(data)
        if match is not None and data.endswith(b"}\n"):
            with suppress(ValueError):
                yield _Place(start, len(data), int(match[1]), float(match[2]), match[3] == b"true")
        start += len(data)


def _append(file: FileIO, data: bytes) -> None:
    end = file.seek(0, os.SEEK_END)
    if end > 0:
        # A killed process may have left half a line: end it, so that only that one is lost.
        file.seek(-1, os.SEEK_END)
        if file.read(1) != b"\n":
            data = b"\n" + data
    try:
        while data:
            data = data[file.write(data) :]
    except OSError:
        with suppress(OSError):
            file.truncate(end)
        raise


def steps_to_leave_out(sizes: Mapping[int, int], surplus: float) -> set[int]:
    """Choose readings to drop, so that older ones become sparser.

    Those go first whose gap would be smallest relative to their age; of two neighbours at most one in each round.

    Args:
        sizes: step -> bytes.
        surplus: bytes to free.

    Returns:
        Steps.

    Example:
        >>> left = set(range(0, 80, 10)) - steps_to_leave_out(dict.fromkeys(range(0, 80, 10), 1), 4)
        >>> sorted(left)
        [0, 40, 60, 70]
    """
    left = sorted(sizes)
    without: set[int] = set()
    while surplus > 0 and left:
        now = left[-1] + 1
        inner = range(1, len(left) - 1)
        order = sorted(inner, key=lambda i: ((left[i + 1] - left[i - 1]) / (now - left[i]), left[i]))
        dropped: set[int] = set()
        for i in order or range(len(left)):
            if surplus <= 0 or len(dropped) > len(left) // 3:
                break
            if not {i - 1, i + 1} & dropped:
                dropped.add(i)
                surplus -= sizes[left[i]]
        without |= {left[i] for i in dropped}
        left = [step for i, step in enumerate(left) if i not in dropped]
    return without


class Matrices:
    """The matrices of a file, by step and layer; read on demand.

    Args:
        path: a matrix file; there may be none.
        times: step -> time of the readings that count; lines of others are skipped.
    """

    def __init__(self, path: Path, times: Mapping[int, float]) -> None:
        self._path = path
        self._places: dict[str, dict[int, int]] = {}  # layer -> step -> where its line begins
        self._line: tuple[tuple[int, int, int], dict[str, Any]] | None = None  # the last line: it holds many layers
        with suppress(FileNotFoundError), path.open("rb") as file:
            for place in list(_places(file)):
                if times.get(place.step) != place.time:
                    continue
                with suppress(MatrixError):
                    for name in _layers_at(file, place.start, place.step):
                        self._places.setdefault(name, {})[place.step] = place.start

    def steps(self, layer: str | None = None) -> list[int]:
        """The steps at which there are matrices.

        Args:
            layer: name of a layer; by default any.

        Returns:
            Steps in order.
        """
        if layer is not None:
            return sorted(self._places.get(layer, ()))
        return sorted(set().union(*self._places.values()))

    def at(self, step: int, layer: str) -> dict[str, Tensor]:
        """Read the matrices of a layer at a step.

        Args:
            step: the step.
            layer: name of the layer.

        Returns:
            Name -> ``(H, H)``; empty if none are kept, or they cannot be read.
        """
        start = self._places.get(layer, {}).get(step)
        if start is None:
            return {}
        try:
            with self._path.open("rb") as file:
                place = (start, step, os.fstat(file.fileno()).st_mtime_ns)
                if self._line is None or self._line[0] != place:
                    self._line = place, _layers_at(file, start, step)
            return decode_layer(self._line[1][layer])
        except (OSError, MatrixError, KeyError):  # the file has been thinned since
            return {}


def _layers_at(file: Any, start: int, step: int) -> dict[str, Any]:
    file.seek(start)
    try:
        line: Any = json.loads(file.readline(_LONGEST))
        layers: Any = line["layers"] if line["step"] == step else None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise MatrixError("it is not JSON with layers") from error
    if not is_text_map(layers) or not all(map(is_text_map, layers.values())):
        raise MatrixError("its layers are not objects")
    return dict(layers)
