"""The run's history on disk: one JSON object a line, only ever appended to, readable while training goes on.

The matrices are in a file beside it, see `matrices`, as they are large; ``docs/history.md`` describes both.

Four kinds of line: ``run`` (a training run starts or resumes at a step, with its layers and its id), ``reading`` (the
numbers of one step), ``alert`` and ``intervention``. A resumed run goes back to the last reading that its checkpoint
knows: what an interrupted run had written beyond that stays in the file, and the readers here pass it over.

A file has one writer. Each start of a run writes a session of its own into its ``run`` line; a writer that finds the
session of another one at the end of its file leaves the file to it, and goes on in a copy of what it wrote.
"""

from __future__ import annotations

import itertools
import math
import os
import stat
import time
import uuid
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from functools import cached_property
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from hdi_callback.arguments import path as check_path
from hdi_callback.attention.names import printable
from hdi_callback.errors import HDIError, MisconfigurationError, MonitoringWarning
from hdi_callback.monitoring.atomic import create_atomically
from hdi_callback.monitoring.lines import LineError, line_from_text, line_to_text, record_from_line, record_to_line
from hdi_callback.monitoring.matrices import Matrices, MatrixFile, matrix_path
from hdi_callback.monitoring.readings import Record

if TYPE_CHECKING:
    import pandas as pd

    from hdi_callback.monitoring.alerts import Alert

FORMAT = 1
DEFAULT_BUDGET = 200e6
_SHARE_WITH_HEADS = 0.25  # of the budget: as long as the numbers take less, those of single heads go with each reading
_LEAST_SHARE = 0.1  # of the budget, for matrices, however many numbers there are
_MOST_KEPT = 1000  # lines; a disk that stays full must not fill the memory instead
_LONGEST = 2**28  # bytes of a line; a hundred layers of a hundred heads with their matrices take a tenth of it


class History:
    """Append lines to a history file; what could not be written is kept, and written with a later line.

    Args:
        path: the file; its folders are made at the first line.
        matrix_every: matrices are kept of the first and then of every so many readings, and of alerts, of step 0 and
            of the end besides; 0 for never.
        budget: bytes that the history may have on the disk with its matrices, which are thinned then. Numbers are never
            left out, except those of single heads once a quarter is used up; `None` for no limit.
        run: id of the run; a new one by default.
        is_new: begin a file of its own, under the next free name if there is something under this one by then.
        parent: the run that a new one goes on from: ``run`` and ``history``, whose lines are taken over.
        say: takes a kind of warning and its message.

    Attributes:
        path: the file that is written now.
        run: id of the run.
        final_step: step of the last reading of the run, once it is known.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        matrix_every: int = 10,
        budget: float | None = DEFAULT_BUDGET,
        run: str | None = None,
        is_new: bool = False,
        parent: Mapping[str, Any] | None = None,
        say: Callable[[str, str], None] | None = None,
    ) -> None:
        self.path = Path(path)
        self.run = uuid.uuid4().hex if run is None else run
        self._session = uuid.uuid4().hex
        self._matrix_every, self._budget = matrix_every, math.inf if budget is None else budget
        self.final_step: int | None = None
        self._is_over_budget = False
        self._is_new, self._parent, self._say = is_new, parent, say
        self._readings = 0
        self._unwritten: list[str] = []
        self._header: dict[str, Any] | None = None
        self._last = -1  # step of the last reading that was written
        self._left: tuple[int, int] | None = None  # inode and size of the file after the last line

    def __str__(self) -> str:
        return str(self.path)

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
        self._last = step if last_reading is None else last_reading
        is_first = self._header is None
        self._header = {
            "kind": "run",
            "format": FORMAT,
            "step": step,
            "last_reading": self._last,
            "run": self.run,
            "session": self._session,
            "layers": list(layers),
            **({} if self._parent is None else {"parent": {**self._parent, "last_reading": self._last}}),
            **facts,
        }
        if self._is_new and is_first:
            self._write()
        else:
            self._append(self._header)

    def write(self, record: Record, alerts: Sequence[Alert] = ()) -> None:
        """Append one reading.

        Args:
            record: the numbers.
            alerts: what is new at it; the matrices of these layers are kept for good.
        """
        is_turn = self._matrix_every > 0 and (self._readings % self._matrix_every == 0 or bool(alerts))
        is_end = self._matrix_every > 0 and record.step in (0, self.final_step)
        self._readings += 1
        self._last = record.step
        size = 0 if self._left is None else self._left[1]
        with_heads = is_turn or is_end or size < _SHARE_WITH_HEADS * self._budget
        self._append(record_to_line(record, with_heads=with_heads))
        if (is_turn or is_end) and not _is_stream(self.path):
            told = {alert.layer for alert in alerts if alert.level != "notice"}
            kept = set(record.layers) if is_end else told & set(record.layers)
            self._write_matrices(record, kept)

    def _write_matrices(self, record: Record, kept: Set[str]) -> None:
        size = self.path.stat().st_size
        limit = max(self._budget - size, _LEAST_SHARE * self._budget)
        file = MatrixFile(matrix_path(self.path))
        file.write(record, set(record.layers) - kept, is_kept=False, limit=limit)
        file.write(record, kept, is_kept=True, limit=limit)
        if size + file.size > self._budget and not self._is_over_budget:
            self._is_over_budget = True
            self._tell(
                "history budget",
                f"The history `{self.path}` has more than the {self._budget / 1e6:.0f} MB that it may have, with "
                "nothing left to thin. It goes on; read less often (every_n_steps), or allow it more (history_mb).",
            )

    def note(self, kind: str, **facts: Any) -> None:
        """Append a line of another kind.

        Args:
            kind: the kind of line.
            facts: plain data.
        """
        self._append({"kind": kind, **facts})

    def _append(self, line: dict[str, Any]) -> None:
        self._unwritten.append(line_to_text(line))
        del self._unwritten[:-_MOST_KEPT]
        self._write()

    def _write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self._is_new:
            self._create(self._first_lines())
        if not self._unwritten:
            return
        with self.path.open("a+b", buffering=0) as file, _locked(file):
            if self._is_still_ours(file):
                self._add_to(file)
                return
        self._step_aside()
        with self.path.open("a+b", buffering=0) as file, _locked(file):
            self._add_to(file)

    def _add_to(self, file: FileIO) -> None:
        text = ("\n".join(self._unwritten) + "\n").encode()
        end = file.seek(0, os.SEEK_END)
        if end > 0:
            # A process that was killed may have left half a line: close it, so that only that one is lost.
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                text = b"\n" + text
        elif self._left is not None and self._header is not None:  # the file was deleted or moved
            text = self._header_now() + text
        try:
            _write_all(file, text)
        except OSError:
            with suppress(OSError):
                file.truncate(end)  # else what has arrived of it would be there twice later
            raise
        self._unwritten.clear()
        self._left = _identity(file)

    def _create(self, data: bytes) -> None:
        """Begin a file of one's own."""
        while not _is_created(self.path, data):
            self.path = free_path(self.path)
        self._is_new = False
        if self._parent is not None and self._header is not None:
            with suppress(OSError):  # the numbers are there without them
                parent, bound = matrix_path(self._parent["history"]), self._header["last_reading"]
                MatrixFile(matrix_path(self.path)).take_over(parent, bound)
        with self.path.open("rb", buffering=0) as file:
            self._left = _identity(file)

    def _first_lines(self) -> bytes:
        header = b"" if self._header is None else _closed(line_to_text(self._header).encode())
        if self._parent is None or self._header is None:
            return header
        bound = self._header["last_reading"]
        try:
            lines = _counting_lines(self._parent["history"])
        except (OSError, HDIError):  # it went away since it was looked at; the header still names it
            return header
        kept = [data for line, data in lines if line["kind"] != "run" and line.get("step", 0) <= bound]
        return header + b"".join(map(_closed, kept))

    def _header_now(self) -> bytes:
        assert self._header is not None
        return _closed(line_to_text({**self._header, "last_reading": self._last}).encode())

    # Asked before every line, and answered by the size of the file alone as long as nobody else has written.
    def _is_still_ours(self, file: FileIO) -> bool:
        now = _identity(file)
        if self._left is None or now is None or now == self._left or now[1] == 0:
            return True
        is_same = now[0] == self._left[0] and now[1] >= self._left[1]
        file.seek(self._left[1] if is_same else 0)
        sessions = [line.get("session") for line in _run_lines(file)]
        if sessions:
            return sessions[-1] == self._session
        return is_same  # somebody's blank line, or another file in this one's place

    def _step_aside(self) -> None:
        """Go on in a file of one's own, with what this run has written so far."""
        taken, written = self.path, b""
        with suppress(OSError), taken.open("rb", buffering=0) as file:
            now = _identity(file)
            if self._left is not None and now is not None and now[0] == self._left[0]:
                written = file.read(self._left[1])
        former, self.run = self.run, uuid.uuid4().hex
        self._parent = {"run": former, "history": str(taken)}
        if self._header is not None:
            self._header = {**self._header, "run": self.run, "parent": {**self._parent, "last_reading": self._last}}
            written += self._header_now()
        self.path = free_path(self.path)
        self._create(written)
        self._tell(
            "another writer",
            f"Another run has begun to write the history `{taken}`; this run goes on in `{self.path}`, which holds its "
            "earlier readings as well. Give each run a folder of its own.",
        )

    def _tell(self, kind: str, message: str) -> None:
        if self._say is None:
            warnings.warn(message, MonitoringWarning, stacklevel=4)
        else:
            self._say(kind, message)


def _is_created(path: Path, data: bytes) -> bool:
    try:
        create_atomically(path, data)
    except FileExistsError:  # another run was faster
        return False
    return True


def _write_all(file: FileIO, data: bytes) -> None:
    while data:
        data = data[file.write(data) :]


def _closed(line: bytes) -> bytes:
    return line.rstrip(b"\n") + b"\n"


def _identity(file: FileIO) -> tuple[int, int] | None:
    """Tell a regular file and its state by inode and size."""
    status = os.fstat(file.fileno())
    return (status.st_ino, status.st_size) if stat.S_ISREG(status.st_mode) else None


@contextmanager
def _locked(file: FileIO) -> Iterator[None]:
    """Keep other writers out for the time of one line, where the system knows locks; wait for none."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    for _ in range(5):
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        time.sleep(0.002)
    yield  # closing the file gives the lock back


def _is_stream(path: Path) -> bool:
    return path.exists() and not path.is_file()


def free_path(path: Path) -> Path:
    """Find a name under which there is nothing.

    Args:
        path: the name that one would like.

    Returns:
        That name if it is free, else the next of ``<name>-1``, ``<name>-2``, ...
    """
    return next(one for one in itertools.chain([path], _numbered_names(path)) if not os.path.lexists(one))


def _numbered_names(path: Path) -> Iterator[Path]:
    return (path.with_name(f"{path.stem}-{number}{path.suffix}") for number in itertools.count(1))


def run_lines(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Read the headers of a history file.

    Args:
        path: any file.

    Returns:
        Its lines of kind ``run``, in order; none if its first line is no line of a history.
    """
    with Path(path).open("rb") as file:
        first = next((data for _, data in _numbered(file) if data.strip()), b"")
        try:
            line_from_text(first)
        except LineError:
            return []
        file.seek(0)
        return list(_run_lines(file))


def _run_lines(file: Any) -> Iterator[dict[str, Any]]:
    for _, data in _numbered(file):
        if data.startswith(b'{"kind":"run"'):
            with suppress(LineError):
                yield line_from_text(data)


def _numbered(file: Any) -> Iterator[tuple[int, bytes]]:
    """Read the lines of a file that is open; one that is far too long is given as its beginning."""
    for number in itertools.count(1):
        data = file.readline(_LONGEST)
        if not data:
            return
        yield number, data
        while len(data) == _LONGEST and not data.endswith(b"\n"):
            data = file.readline(_LONGEST)


def read_lines(path: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """Read the lines of a history file that count, in the order of writing.

    Lines that a later resumption made void (beyond the last reading that it knew of) are passed over, and so is a line
    that a killed process left half written. Any other line that cannot be read is skipped, with one warning that gives
    its number.

    Args:
        path: a history file.

    Yields:
        Each line as a dictionary with ``kind`` and ``step``.

    Raises:
        MisconfigurationError: if there is no such file, or it is of a newer format.
    """
    yield from (line for line, _ in _counting_lines(path))


def _counting_lines(path: str | os.PathLike[str]) -> list[tuple[dict[str, Any], bytes]]:
    file = Path(check_path("path", path, "lightning_logs/version_0/hdi/history.jsonl"))
    if not file.is_file():
        raise MisconfigurationError(f"There is no history file at `{file}`. Write the path of a `history.jsonl`.")
    lines: list[tuple[dict[str, Any], bytes]] = []
    skipped: list[str] = []
    torn: str | None = None  # what may turn out to be the end of a process that was killed
    with file.open("rb") as stream:
        for number, data in _numbered(stream):
            if not data.strip():
                continue
            try:
                line = line_from_text(data) if len(data) < _LONGEST else _refuse_length()
            except LineError as error:
                if torn is not None:
                    skipped.append(torn)
                reason = f"line {number} ({error})"
                torn = reason if error.is_torn else None
                if torn is None:
                    skipped.append(reason)
                continue
            if torn is not None and line["kind"] != "run":
                skipped.append(torn)
            torn = None
            if line["kind"] == "run":
                if line["format"] > FORMAT:
                    raise MisconfigurationError(
                        f"`{file}` has history format {line['format']}; this version reads up to {FORMAT}. "
                        "Upgrade hdi-callback."
                    )
                known = line.get("last_reading", line["step"])
                lines = [kept for kept in lines if kept[0]["kind"] == "run" or kept[0].get("step", 0) <= known]
            lines.append((line, data))
    if skipped:
        more = f" and {len(skipped) - 3} more" if len(skipped) > 3 else ""
        warnings.warn(
            f"`{file}` has lines that cannot be read, and that are skipped: {', '.join(skipped[:3])}{more}.",
            MonitoringWarning,
            stacklevel=2,
        )
    return lines


def _refuse_length() -> dict[str, Any]:
    raise LineError("it is far too long")


class RunHistory:
    """A history that was read: its lines, its readings, and the matrices that are kept beside it.

    Args:
        path: a history file.

    Attributes:
        path: that file.
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
        """Give the readings.

        Returns:
            One record per step, in the order of steps, without the matrices that are in the file beside the history.
        """
        return [record_from_line(self._readings[step]) for step in sorted(self._readings)]

    def matrix_steps(self, layer: str | None = None) -> list[int]:
        """Give the steps of which matrices are kept.

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
        """Find once of which layers earlier versions wrote matrices into lines, and at which steps."""
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
        Its lines and readings; matrices are read when they are asked for.

    Raises:
        MisconfigurationError: if there is no such file, or it is of a newer format.

    Example:
        >>> import tempfile, pathlib, torch
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
        >>> from hdi_callback.monitoring.readings import LayerRecord
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
            **dict.fromkeys(("step", "epoch", "time", "layer")),
            **layer.values,
            **({"worst_pair": tuple(layer.arrays["worst_pair"])} if "worst_pair" in layer.arrays else {}),
            "step": record.step,
            "epoch": record.epoch,
            "time": record.time,
            "layer": name,
        }
        for record in read_records(path)
        for name, layer in record.layers.items()
    ]
    frame: pd.DataFrame = pd.DataFrame(rows, columns=None if rows else ["step", "epoch", "time", "layer"])
    return frame
