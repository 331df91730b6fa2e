"""The run's history on disk: one JSON object a line, only ever appended to, readable while training goes on.

Four kinds of line: ``run`` (a training run starts or resumes at a step, with its layers), ``reading`` (the numbers of
one step), ``alert`` and ``intervention``. A resumed run goes back to the last reading that its checkpoint knows: what
an interrupted run had written beyond that stays in the file, and the readers here pass it over.
"""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from hdi_callback.arguments import path as check_path
from hdi_callback.errors import MisconfigurationError
from hdi_callback.monitoring.readings import LayerRecord, Record

if TYPE_CHECKING:
    import pandas as pd

FORMAT = 1
_DIGITS = 9  # what a float32 carries
_MOST_KEPT = 1000  # lines; a disk that stays full must not fill the memory instead


class History:
    """Append lines to a history file; what could not be written is kept, and written with a later line.

    Args:
        path: the file; its folders are made at the first line.
        matrix_every: overlap matrices go into the first and then every so many readings, as they are large; 0 for
            never.
    """

    def __init__(self, path: str | os.PathLike[str], *, matrix_every: int = 10) -> None:
        self.path = Path(path)
        self._matrix_every = matrix_every
        self._readings = 0
        self._unwritten: list[str] = []

    def begin(
        self, step: int, layers: Iterable[dict[str, Any]], *, last_reading: int | None = None, **facts: Any
    ) -> None:
        """Mark the start of a run, or its resumption, at `step`.

        Args:
            step: optimizer steps taken before.
            layers: what is known of each layer: ``name``, ``num_heads``, ...
            last_reading: step of the last reading that the run knows of (-1: of none), `step` by default; what the file
                holds beyond it is void.
            facts: further plain data.
        """
        bound = step if last_reading is None else last_reading
        line = {"kind": "run", "format": FORMAT, "step": step, "last_reading": bound, "layers": list(layers), **facts}
        self._append(line)

    def write(self, record: Record) -> None:
        """Append one reading.

        Args:
            record: the numbers.
        """
        with_matrices = self._matrix_every > 0 and self._readings % self._matrix_every == 0
        self._readings += 1
        self._append({"kind": "reading", **_to_json(record, with_matrices)})

    def note(self, kind: str, **facts: Any) -> None:
        """Append a line of another kind.

        Args:
            kind: the kind of line.
            facts: plain data.
        """
        self._append({"kind": kind, **facts})

    def _append(self, line: dict[str, Any]) -> None:
        self._unwritten.append(json.dumps(_plain(line), allow_nan=False, separators=(",", ":")))
        del self._unwritten[:-_MOST_KEPT]
        text = ("\n".join(self._unwritten) + "\n").encode()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a+b", buffering=0) as file:
            end = file.seek(0, os.SEEK_END)
            if end > 0:
                # A process that was killed may have left half a line: close it, so that only that one is lost.
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":
                    text = b"\n" + text
            try:
                _write_all(file, text)
            except OSError:
                with suppress(OSError):
                    file.truncate(end)  # else what has arrived of it would be there twice later
                raise
        self._unwritten.clear()


def _write_all(file: FileIO, data: bytes) -> None:
    while data:
        data = data[file.write(data) :]


def place_history(
    choice: bool | str | os.PathLike[str],
    folder: str | os.PathLike[str],
    *,
    state: Mapping[str, Any] | None = None,
    name: str = "history",
) -> History | None:
    """Choose the file that a run writes: the one that it has begun, or one that no other run has.

    Args:
        choice: True for the usual place, ``hdi/<name>.jsonl`` in the folder; a path; or False for no history.
        folder: that of the run.
        state: what a checkpoint of the run keeps, with the path under ``"history"``.
        name: what the file is called.

    Returns:
        The history, of which nothing is written yet.
    """
    if choice is False:
        return None
    if choice is not True:
        return History(choice)
    begun = None if state is None else state.get("history")
    if begun is not None and Path(begun).is_file():
        return History(begun)
    path = Path(folder) / "hdi" / f"{name}.jsonl"
    copies = itertools.count(1)
    while path.exists():
        path = path.with_name(f"{name}-{next(copies)}.jsonl")
    return History(path)


def read_lines(path: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """Read the lines of a history file that count, in the order of writing.

    A torn line is passed over, and so are lines that a later resumption made void (beyond the last reading that it
    knew of).

    Args:
        path: a history file.

    Yields:
        Each line as a dictionary with ``kind`` and ``step``.

    Raises:
        MisconfigurationError: if there is no such file, or it is of a newer format.
    """
    file = Path(check_path("path", path, "lightning_logs/version_0/hdi/history.jsonl"))
    if not file.is_file():
        raise MisconfigurationError(f"There is no history file at `{file}`. Write the path of a `history.jsonl`.")
    lines: list[dict[str, Any]] = []
    for text in file.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            line = json.loads(text)
        except json.JSONDecodeError:
            continue
        if not isinstance(line, dict) or "kind" not in line:
            continue
        if line["kind"] == "run":
            if line["format"] > FORMAT:
                raise MisconfigurationError(
                    f"`{file}` has history format {line['format']}; this version reads up to {FORMAT}. "
                    "Upgrade hdi-callback."
                )
            known = line.get("last_reading", line["step"])
            lines = [kept for kept in lines if kept["kind"] == "run" or kept.get("step", 0) <= known]
        lines.append(line)
    yield from lines


def read_records(path: str | os.PathLike[str]) -> list[Record]:
    """Read the readings of a history file.

    Args:
        path: a history file.

    Returns:
        One record per step, in the order of steps; of two readings of one step the later counts.

    Raises:
        MisconfigurationError: if there is no such file, or it is of a newer format.
    """
    records = {line["step"]: _from_json(line) for line in read_lines(path) if line["kind"] == "reading"}
    return [records[step] for step in sorted(records)]


def load_history(path: str | os.PathLike[str]) -> pd.DataFrame:
    """Load a history file as a table, also while training goes on.

    Args:
        path: a history file, ``<log directory>/hdi/history.jsonl``.

    Returns:
        A frame with one row for each step and layer: ``step``, ``epoch``, ``time`` (seconds since the Unix epoch),
        ``layer``, one column per metric (NaN where it could not be measured), and the heads of the worst pair.

    Raises:
        MisconfigurationError: if there is no such file, or pandas is not installed.

    Example:
        >>> import tempfile, pathlib
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "history.jsonl"
        >>> History(path).write(Record(step=50, layers={"attn": LayerRecord(values={"hdi": 0.75})}))
        >>> load_history(path)[["step", "layer", "hdi"]].values.tolist()
        [[50, 'attn', 0.75]]
    """
    try:
        import pandas as pd
    except ImportError as error:
        raise MisconfigurationError("A history frame needs pandas: pip install 'hdi-callback[reports]'.") from error
    rows = [
        {
            "step": record.step,
            "epoch": record.epoch,
            "time": record.time,
            "layer": name,
            **layer.values,
            **({"worst_pair": tuple(layer.arrays["worst_pair"])} if "worst_pair" in layer.arrays else {}),
        }
        for record in read_records(path)
        for name, layer in record.layers.items()
    ]
    frame: pd.DataFrame = pd.DataFrame(rows, columns=None if rows else ["step", "epoch", "time", "layer"])
    return frame


def _to_json(record: Record, with_matrices: bool) -> dict[str, Any]:
    layers: dict[str, dict[str, Any]] = {}
    for name, layer in record.layers.items():
        layers[name] = {"values": layer.values, "arrays": layer.arrays}
        if with_matrices:
            layers[name]["matrices"] = {
                key: [[round(value, 4) for value in row] for row in matrix.double().tolist()]
                for key, matrix in layer.matrices.items()
            }
    return {
        "step": record.step,
        "epoch": record.epoch,
        "axis": record.axis,
        "time": round(record.time, 3),
        "layers": layers,
        "absent": record.absent,
    }


def _from_json(line: dict[str, Any]) -> Record:
    nan = float("nan")
    layers = {
        name: LayerRecord(
            values={key: nan if value is None else value for key, value in layer.get("values", {}).items()},
            arrays=layer.get("arrays", {}),
            matrices={
                key: torch.tensor([[nan if value is None else value for value in row] for row in matrix])
                for key, matrix in layer.get("matrices", {}).items()
            },
        )
        for name, layer in line["layers"].items()
    }
    return Record(
        step=line["step"],
        layers=layers,
        absent=line.get("absent", {}),
        epoch=line.get("epoch"),
        axis=line.get("axis", line["step"]),
        time=line.get("time", 0.0),
    )


def _plain(value: Any) -> Any:
    """Round floats to what was measured, and write what JSON has no word for (NaN, infinity) as null."""
    if isinstance(value, float):
        return float(f"{value:.{_DIGITS}g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(item) for item in value]
    return value
