"""`History`: writes the records of one run to its file."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import count
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np

import hdi_callback
from hdi_callback.dashboards.pictures import Patterns
from hdi_callback.history.lines import from_text, matrices_folder, plain, record_to_line, to_text
from hdi_callback.record import Alert, Record

_MATRICES_EVERY = 10  # readings; also the first, the last, and those with a new alert


class History:
    """Writes the records of one run to a file of JSON lines, and matrices to a folder beside it.

    A file has one writer. A new run whose path is taken writes to the next free name: ``history-1.jsonl``, ... A
    resumed run goes on in its own file, from which the readings after its checkpoint are cut; in another folder it
    begins with a copy of the readings up to there. What is not its own, linked or of another form stays as it is.

    `layers` are the facts of the layers, `run` the name of a new run, the same on all ranks. Of a resumed run
    `resume_step` is the step of the last reading that its checkpoint knows, -1 if none, after which it is cut;
    `resume_run` its name, `None` for whatever run the file at `path` has; `resume_path` where it was written.
    """

    name = "writing the history"
    is_thread_safe = True

    def __init__(
        self,
        path: str | os.PathLike[str],
        layers: Sequence[Mapping[str, Any]],
        *,
        run: str | None = None,
        resume_step: int | None = None,
        resume_run: str | None = None,
        resume_path: str | os.PathLike[str] | None = None,
    ) -> None:
        self.path = Path(path).expanduser().absolute()  # a later change of directory does not matter
        self.run = run or uuid4().hex  # of the system: no generator of the training is drawn from
        self._header: dict[str, Any] = {"layers": list(layers), "version": hdi_callback.__version__}
        self._active: tuple[Alert, ...] | None = None
        self._count = 0  # readings of this process
        self._is_torn = False
        self._patterns = Patterns()
        if resume_step is None:
            self._begin()
        else:
            self._resume(resume_step, resume_run, None if resume_path is None else Path(resume_path))

    def write(self, record: Record) -> None:
        """Append one record; later ones can still be written where this one could not."""
        if not (self.path.exists() and os.path.samestat(self.path.stat(), os.fstat(self._file))):
            raise OSError(f"`{self.path}` was moved, deleted or replaced")
        line = record_to_line(record)
        if record.active != self._active:
            line["active"] = plain([asdict(alert) for alert in record.active])
        # In one call, and on a line of its own also after one that was written in part.
        data = b"\n" * self._is_torn + to_text(line)
        self._is_torn = True
        written = os.write(self._file, data)
        if written < len(data):
            raise OSError(f"{written} of {len(data)} bytes were written to `{self.path}`: is the disk full?")
        self._is_torn = False
        self._active = record.active
        has_news = any(alert.status in {"new", "worse"} for alert in record.alerts)
        self._patterns.add(record)
        if self._count % _MATRICES_EVERY == 0 or has_news or record.is_last:
            self._write_matrices(record)
        self._count += 1

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)

    def _begin(self, past: Sequence[bytes] = ()) -> None:
        """Create a file that nobody has, with the readings of a run that it goes on with."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        wanted = self.path
        for number in count(1):
            try:
                self.path.open("x").close()
                break
            except FileExistsError:  # the next name: history-1.jsonl
                self.path = wanted.with_stem(f"{wanted.stem}-{number}")
        self._write_all(past)

    def _resume(self, last: int, run: str | None, before: Path | None) -> None:
        """Go on after the reading at step `last`: in the file of the run, or in a new one that begins as it did."""
        folder = self.path.parent
        for file in [self.path] if before is None else [folder / before.name, before]:
            read = self._read(file, last, run)
            if read is None:
                continue
            header, past = read
            if is_own := file.parent == folder:
                self.path, self.run = file, header.get("run", self.run)
                self._write_all(past)
            else:
                self._begin(past)
            for matrices in matrices_folder(file).glob("step_*.npz"):
                is_past = int(matrices.stem.removeprefix("step_")) <= last
                if is_own and not is_past:
                    matrices.unlink()
                elif is_past and not is_own:
                    matrices_folder(self.path).mkdir(exist_ok=True)
                    shutil.copyfile(matrices, matrices_folder(self.path) / matrices.name)
            return
        self._begin()

    def _read(self, file: Path, last: int, run: str | None) -> tuple[dict[str, Any], list[bytes]] | None:
        """Return the first line and the readings up to step `last`; `None` if another run or model has this file."""
        if file.is_symlink() or not file.is_file():
            return None
        try:
            first, *lines = file.read_bytes().splitlines(keepends=True) or [b""]
        except OSError:  # of another user, or of a disk that is not there
            return None
        header, layers = from_text(first), {facts["name"] for facts in self._header["layers"]}
        try:
            is_own = header is not None and "step" not in header and (run is None or header["run"] == run)
            if not is_own or header is None or not {facts["name"] for facts in header["layers"]} <= layers:
                return None
        except (KeyError, TypeError):  # JSON of another form
            return None
        steps = [(line or {}).get("step") for line in map(from_text, lines)]
        return header, [text for text, step in zip(lines, steps) if type(step) is int and step <= last]

    def _write_all(self, past: Sequence[bytes]) -> None:
        """Make the file of this run the first line and these readings, and open it."""
        part = self.path.with_name(f"{self.path.name}.part")
        with part.open("wb") as file:
            file.writelines([to_text({**self._header, "run": self.run}), *past])
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, self.path)  # a process killed before leaves the file as it was
        self._count = len(past)
        self._file = os.open(self.path, os.O_WRONLY | os.O_APPEND)

    def _write_matrices(self, record: Record) -> None:
        """Write all matrices of a record to one file; patterns of attention only of what new alerts accuse."""
        matrices = {
            f"{layer}/{name}": matrix.numpy().astype(np.float16)
            for layer, numbers in record.layers.items()
            for name, matrix in numbers.matrices.items()
            if name != "attention_pattern"
        }
        for alert in record.alerts:
            for step, pattern in self._patterns.around(alert).items():
                matrices[f"{alert.layers[0]}/attention_pattern_{step}"] = pattern.numpy()
        if not matrices:
            return
        folder = matrices_folder(self.path)
        folder.mkdir(exist_ok=True)
        part = folder / "part"
        with part.open("wb") as file:
            np.savez_compressed(file, **matrices)  # type: ignore[arg-type]
        os.replace(part, folder / f"step_{record.step:09d}.npz")
