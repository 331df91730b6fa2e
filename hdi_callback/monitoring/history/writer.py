"""`History`: appends the lines of one run to its file.

A file has one writer. Each start of a run writes a session of its own into its ``run`` line; a writer that finds
another one's session at the end of its file leaves the file to it, and goes on in a copy of its own lines.
"""

from __future__ import annotations

import math
import os
import uuid
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import Any

from hdi_callback.errors import HDIError, MonitoringWarning
from hdi_callback.monitoring.alerts import Alert
from hdi_callback.monitoring.history.files import closed, free_path, identity, is_created, is_stream, locked, write_all
from hdi_callback.monitoring.history.lines import line_to_text, record_to_line
from hdi_callback.monitoring.history.matrices import MatrixFile, matrix_path
from hdi_callback.monitoring.history.scan import FORMAT, counting_lines, run_lines_in
from hdi_callback.monitoring.readings import Record

DEFAULT_BUDGET = 200e6
_SHARE_WITH_HEADS = 0.25  # of the budget: until the numbers take so much, each reading includes those of single heads
_LEAST_SHARE = 0.1  # of the budget, for matrices, however many numbers there are
_MOST_KEPT = 1000  # lines; a disk that stays full must not fill the memory instead


class History:
    """Appends lines to a history file; lines that could not be written are kept, and written with a later one.

    Args:
        path: the file; its folders are created with the first line.
        matrix_every: matrices are kept of every so many readings, and of step 0, alerts and the last reading; 0 for
            never.
        budget: bytes that the history with its matrices may take on disk; beyond it matrices are thinned. Numbers are
            never left out, except those of single heads once a quarter is used; `None` for no limit.
        run: id of the run; a new one by default.
        is_new: begin a new file, under the next free name if this one is taken by then.
        parent: the run that a new one goes on from: ``run`` and ``history``, whose lines are taken over.
        say: warns; takes a kind of warning and its message.

    Attributes:
        path: the file that is written now.
        run: id of the run.
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
        self._home = Path() if self.path.is_absolute() else Path.cwd()  # the working directory may change in a run
        self.run = uuid.uuid4().hex if run is None else run
        self._session, self._process = uuid.uuid4().hex, os.getpid()
        self._matrix_every, self._budget = matrix_every, math.inf if budget is None else budget
        self._final_step: int | None = None  # of the last reading of the run, once it is known
        self._is_over_budget = False
        self._is_new, self._parent, self._say = is_new, parent, say
        self._readings = 0
        self._unwritten: list[str] = []
        self._header: dict[str, Any] | None = None
        self._last = -1  # step of the last reading that was written
        self._left: tuple[int, int] | None = None  # inode and size of the file after the last line

    def __str__(self) -> str:
        return str(self.path)

    @property
    def _file(self) -> Path:
        return self._home / self.path

    def begin(
        self, step: int, layers: Iterable[dict[str, Any]], *, last_reading: int | None = None, **facts: Any
    ) -> None:
        """Mark the start of a run, or its resumption, at `step`.

        Args:
            step: optimizer steps taken so far.
            layers: facts about each layer: ``name``, ``num_heads``, ...
            last_reading: step of the last reading that the run knows of (-1: of none), `step` by default; later lines
                of the file become void.
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

    def end_with(self, step: int) -> None:
        """Announce the last reading of the run, whose matrices are kept.

        Args:
            step: its step.
        """
        self._final_step = step

    def write(self, record: Record, alerts: Sequence[Alert] = ()) -> None:
        """Append one reading.

        Args:
            record: the reading.
            alerts: new alerts; the matrices of their layers are never thinned.
        """
        is_turn = self._matrix_every > 0 and (self._readings % self._matrix_every == 0 or bool(alerts))
        is_end = self._matrix_every > 0 and record.step in (0, self._final_step)
        self._readings += 1
        self._last = record.step
        size = 0 if self._left is None else self._left[1]
        with_heads = is_turn or is_end or size < _SHARE_WITH_HEADS * self._budget
        self._append(record_to_line(record, with_heads=with_heads))
        if (is_turn or is_end) and not is_stream(self._file):
            alerted = {alert.layer for alert in alerts if alert.level != "notice"}
            kept = set(record.layers) if is_end else alerted & set(record.layers)
            self._write_matrices(record, kept)

    def _write_matrices(self, record: Record, kept: Set[str]) -> None:
        size = self._file.stat().st_size
        limit = max(self._budget - size, _LEAST_SHARE * self._budget)
        file = MatrixFile(matrix_path(self._file))
        file.write(record, set(record.layers) - kept, is_kept=False, limit=limit)
        file.write(record, kept, is_kept=True, limit=limit)
        if size + file.size > self._budget and not self._is_over_budget:
            self._is_over_budget = True
            self._warn(
                "history budget",
                f"The history `{self.path}` is larger than its limit of {self._budget / 1e6:.0f} MB, and has no "
                "matrices left to thin. It is still written; raise every_n_steps or history_mb.",
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
        self._file.parent.mkdir(parents=True, exist_ok=True)
        if self._is_new:
            self._create(self._first_lines())
        if not self._unwritten:
            return
        with self._file.open("a+b", buffering=0) as file, locked(file):
            if self._is_still_ours(file):
                self._add_to(file)
                return
        self._step_aside()
        with self._file.open("a+b", buffering=0) as file, locked(file):
            self._add_to(file)

    def _add_to(self, file: FileIO) -> None:
        text = ("\n".join(self._unwritten) + "\n").encode()
        end = file.seek(0, os.SEEK_END)
        if end > 0:
            # A killed process may have left half a line: end it, so that only that one is lost.
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                text = b"\n" + text
        elif self._left is not None and self._header is not None:  # the file was deleted or moved
            text = self._header_now() + text
        try:
            write_all(file, text)
        except OSError:
            with suppress(OSError):
                file.truncate(end)  # else the part that was written would be there twice later
            raise
        self._unwritten.clear()
        self._left = identity(file)

    def _create(self, data: bytes) -> None:
        """Begin a new file."""
        while not is_created(self._file, data):
            self.path = self.path.with_name(free_path(self._file).name)
        self._is_new = False
        if self._parent is not None and self._header is not None:
            with suppress(OSError):  # the numbers are there without them
                parent, bound = matrix_path(self._home / self._parent["history"]), self._header["last_reading"]
                MatrixFile(matrix_path(self._file)).take_over(parent, bound)
        with self._file.open("rb", buffering=0) as file:
            self._left = identity(file)

    def _first_lines(self) -> bytes:
        header = b"" if self._header is None else closed(line_to_text(self._header).encode())
        if self._parent is None or self._header is None:
            return header
        bound = self._header["last_reading"]
        try:
            lines = counting_lines(self._parent["history"])
        except (OSError, HDIError):  # deleted since the path was checked; the header still names it
            return header
        kept = [data for line, data in lines if line["kind"] != "run" and line.get("step", 0) <= bound]
        return header + b"".join(map(closed, kept))

    def _header_now(self) -> bytes:
        assert self._header is not None
        return closed(line_to_text({**self._header, "last_reading": self._last}).encode())

    # Checked before every line; as long as nobody else has written, by the size of the file alone.
    def _is_still_ours(self, file: FileIO) -> bool:
        now = identity(file)
        if self._is_fork and now is not None:
            return False
        if self._left is None or now is None or now == self._left or now[1] == 0:
            return True
        is_same = now[0] == self._left[0] and now[1] >= self._left[1]
        file.seek(self._left[1] if is_same else 0)
        sessions = [line.get("session") for line in run_lines_in(file)]
        if sessions:
            return sessions[-1] == self._session
        return is_same  # a foreign blank line, or another file in place of this one

    @property
    def _is_fork(self) -> bool:
        """Whether this process is a fork of the one that began the history, which goes on writing."""
        return os.getpid() != self._process

    def _step_aside(self) -> None:
        """Go on in a new file, with the lines of this run so far."""
        taken, written = self.path, b""
        other = "The parent of this forked process writes" if self._is_fork else "Another run has begun to write"
        if self._is_fork:
            self._session, self._process = uuid.uuid4().hex, os.getpid()
        with suppress(OSError), (self._home / taken).open("rb", buffering=0) as file:
            now = identity(file)
            if self._left is not None and now is not None and now[0] == self._left[0]:
                written = file.read(self._left[1])
        former, self.run = self.run, uuid.uuid4().hex
        self._parent = {"run": former, "history": str(taken)}
        if self._header is not None:
            parent = {**self._parent, "last_reading": self._last}
            self._header = {**self._header, "run": self.run, "session": self._session, "parent": parent}
            written += self._header_now()
        self.path = self.path.with_name(free_path(self._file).name)
        self._create(written)
        self._warn(
            "another writer",
            f"{other} the history `{taken}`; this run goes on in `{self.path}`, which holds its "
            "earlier readings as well. Use a separate folder for each run.",
        )

    def _warn(self, kind: str, message: str) -> None:
        if self._say is None:
            warnings.warn(message, MonitoringWarning, stacklevel=4)
        else:
            self._say(kind, message)
