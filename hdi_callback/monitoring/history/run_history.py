"""`RunHistory`: a history file as lines and readings, with the matrices beside it."""

from __future__ import annotations

import os
from functools import cached_property
from pathlib import Path

from torch import Tensor

from hdi_callback.attention.names import printable
from hdi_callback.monitoring.history.lines import record_from_line
from hdi_callback.monitoring.history.matrices import Matrices, matrix_path
from hdi_callback.monitoring.history.scan import read_lines
from hdi_callback.monitoring.readings import Record


class RunHistory:
    """A history file: its lines, its readings, and the matrices in the file beside it.

    Args:
        path: a history file.

    Attributes:
        path: the file.
        lines: the lines that count, see `read_lines`.

    Raises:
        MisconfigurationError: if there is no such file, or it is of a newer format.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.lines = list(read_lines(path))
        self.path = Path(path)
        self._readings = {line["step"]: line for line in self.lines if line["kind"] == "reading"}
        times = {step: float(line.get("time", 0.0)) for step, line in self._readings.items()}
        self._matrices = Matrices(matrix_path(self.path), times)

    def records(self) -> list[Record]:
        """The readings.

        Returns:
            One record per step, in the order of steps, without the matrices that are in the file beside the history.
        """
        return [record_from_line(self._readings[step]) for step in sorted(self._readings)]

    def matrix_steps(self, layer: str | None = None) -> list[int]:
        """The steps of which matrices are kept.

        Args:
            layer: name of a layer; by default any.

        Returns:
            Steps in order.
        """
        if layer is None:
            return sorted(set().union(*self._steps_in_lines.values()).union(self._matrices.steps()))
        return sorted(self._steps_in_lines.get(layer, set()).union(self._matrices.steps(layer)))

    @cached_property
    def _steps_in_lines(self) -> dict[str, set[int]]:
        """Layer -> steps of the matrices that earlier versions wrote into lines; cached."""
        found: dict[str, set[int]] = {}
        for step, line in self._readings.items():
            for name, layer in line["layers"].items():
                if layer.get("matrices"):
                    found.setdefault(printable(name), set()).add(step)
        return found

    def matrices(self, step: int, layer: str) -> dict[str, Tensor]:
        """Read the matrices of a layer at a step.

        Args:
            step: the step.
            layer: name of the layer.

        Returns:
            Name -> ``(H, H)``, as `LayerRecord.matrices` has them, to 1/508 of their range; empty if none are kept.
        """
        found = self._matrices.at(step, layer)
        if not found and step in self._readings:  # earlier versions wrote them into the line
            record = record_from_line(self._readings[step])
            return record.layers[layer].matrices if layer in record.layers else {}
        return found


def read_history(path: str | os.PathLike[str]) -> RunHistory:
    """Read a history file and the matrices beside it, also while training goes on.

    Args:
        path: a history file, ``<log directory>/hdi/history.jsonl``.

    Returns:
        Its lines and readings; matrices are read on demand.

    Raises:
        MisconfigurationError: if there is no such file, or it is of a newer format.

    Example:
        >>> import tempfile, pathlib, torch
        >>> from hdi_callback.monitoring.history import History
        >>> from hdi_callback.monitoring.readings import LayerRecord
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "history.jsonl"
        >>> layer = LayerRecord(values={"hdi": 0.75}, matrices={"overlap": torch.tensor([[1, 0.25], [0.25, 1]])})
        >>> History(path).write(Record(step=0, layers={"attn": layer}))
        >>> run = read_history(path)
        >>> run.matrix_steps("attn"), run.matrices(0, "attn")["overlap"].tolist()
        ([0], [[1.0, 0.25], [0.25, 1.0]])
    """
    return RunHistory(path)


def read_records(path: str | os.PathLike[str]) -> list[Record]:
    """Read the readings of a history file.

    Matrices are in a file beside it since version 0.2; `read_history` finds them.

    Args:
        path: a history file.

    Returns:
        One record per step, in the order of steps; of two readings of one step the later counts.

    Raises:
        MisconfigurationError: if there is no such file, or it is of a newer format.
    """
    records = {line["step"]: record_from_line(line) for line in read_lines(path) if line["kind"] == "reading"}
    return [records[step] for step in sorted(records)]
