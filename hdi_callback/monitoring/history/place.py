"""`place_history`: the history file of a run, never that of another run."""

from __future__ import annotations

import hashlib
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from hdi_callback.errors import HDIError
from hdi_callback.monitoring.history.files import free_path
from hdi_callback.monitoring.history.run_history import read_records
from hdi_callback.monitoring.history.scan import run_lines
from hdi_callback.monitoring.history.writer import History

_LONGEST_NAME = 100  # bytes; file systems take 255, and a number and a suffix come after it
_Say = Callable[[str, str], None]


def place_history(
    choice: bool | str | os.PathLike[str],
    folder: str | os.PathLike[str],
    *,
    state: Mapping[str, Any] | None = None,
    name: str | None = None,
    say: _Say | None = None,
    **options: Any,
) -> History | None:
    """Choose the history file of a run.

    A run that resumes in the folder of its history continues it. One that resumes elsewhere, a branch, begins a file of
    its own with the readings up to its checkpoint, and leaves its parent's alone. No other existing file is ever
    written to.

    Args:
        choice: True for ``hdi/history.jsonl`` in the folder; a path; or False for no history.
        folder: folder of the run.
        state: state from a checkpoint of the run, with the path under ``"history"`` and the id under ``"run"``.
        name: name of this history if the folder holds several.
        say: warns; takes a kind of warning and its message.
        options: arguments of `History`: how often matrices are kept, and how large they may get.

    Returns:
        The history; nothing is written yet.
    """
    if choice is False:
        return None
    history_at: Callable[..., History] = partial(History, say=say, **options)
    path = Path(folder) / "hdi" / f"{_stem(name)}.jsonl" if choice is True else Path(choice)
    state = {} if state is None else state
    recorded = None if state.get("history") is None else Path(state["history"])
    run = state.get("run")
    if recorded is not None or run is not None:
        candidates = list(_candidates(path, recorded))
        own = next((candidate for candidate in candidates if is_history_of(candidate, state)), None)
        if own is not None:
            return history_at(own, run=run)
        # A branch that ended before its first checkpoint resumes from its parent's again.
        for candidate in candidates:
            branch = _branch_from(candidate, run)
            if branch is not None:
                return history_at(candidate, run=branch)
    parent = None
    if recorded is not None and is_history_of(recorded, state):
        parent = {"run": run, "history": str(recorded)}
    elif recorded is not None and say is not None:
        say(
            "no history",
            f"The history that the checkpoint names, `{recorded}`, does not exist or belongs to another run; a new "
            "history begins.",
        )
    if _is_stream(path):
        return history_at(path)
    chosen = path if _is_empty(path) else free_path(path)
    if chosen != path and choice is not True and say is not None:
        say(
            "history is taken",
            f"`{path}` exists already and is not the history of this run; it is left unchanged, and this run writes "
            f"`{chosen}`. Pass a different path for each run.",
        )
    return history_at(chosen, is_new=not _is_empty(chosen), parent=parent)


def is_history_of(path: Path, state: Mapping[str, Any]) -> bool:
    """Return whether a file is the history of the run of a checkpoint.

    Compares the ids of the run; without one, as earlier versions wrote them, layers and readings.

    Args:
        path: any file.
        state: state from the checkpoint.

    Returns:
        True if it is.
    """
    try:
        if not path.is_file():
            return False
        headers = run_lines(path)
        ids = [line["run"] for line in headers if "run" in line]
        run = state.get("run")
        if run is not None and ids:
            return bool(run == ids[-1])
        return bool(headers) and _agrees(path, headers[-1], state)
    except (OSError, ValueError, HDIError):
        return False


def _branch_from(path: Path, run: str | None) -> str | None:
    """The id of the run whose history a file is, if that run is a branch of another one."""
    try:
        headers = [line for line in run_lines(path) if "run" in line] if path.is_file() else []
    except OSError:
        return None
    is_branch = run is not None and any(line.get("parent", {}).get("run") == run for line in headers)
    return headers[-1]["run"] if is_branch else None


def _agrees(path: Path, header: Mapping[str, Any], state: Mapping[str, Any]) -> bool:
    last, layers = state.get("last_step"), state.get("layers") or {}
    if not set(layers) <= {layer["name"] for layer in header["layers"]}:
        return False
    if last is None:
        return True
    record = next((record for record in read_records(path) if record.step == last), None)
    if record is None or not set(layers) <= set(record.layers):
        return False
    series = (state.get("alerts") or {}).get("series", {})
    rows = {name: rows[-1] for name, rows in series.items() if rows and rows[-1]["step"] == last}
    return all(
        name in record.layers
        and all(
            metric in record.layers[name].values
            and math.isclose(value, record.layers[name].values[metric], rel_tol=1e-6, abs_tol=1e-12)
            for metric, value in row["values"].items()
        )
        for name, row in rows.items()
    )


def _candidates(path: Path, recorded: Path | None) -> Iterator[Path]:
    """The candidate files, that of the checkpoint first."""
    pattern = re.compile(rf"{re.escape(path.stem)}(-\d+)?{re.escape(path.suffix)}")
    if recorded is not None and pattern.fullmatch(recorded.name) and _same(recorded.parent, path.parent):
        yield recorded
    yield path
    if path.parent.is_dir():
        yield from sorted(entry for entry in path.parent.iterdir() if entry != path and pattern.fullmatch(entry.name))


def _same(path: Path, other: Path) -> bool:
    return path.resolve() == other.resolve()


def _is_empty(path: Path) -> bool:
    return path.is_file() and not path.is_symlink() and path.stat().st_size == 0


def _is_stream(path: Path) -> bool:
    return path.exists() and not path.is_file() and not path.is_dir()


def _stem(name: str | None) -> str:
    """A file name from any name; changed ones get a digest, so that they stay distinct."""
    if name is None:
        return "history"
    plain = (
        re.sub(r"[^\w.=+ -]", "-", name).encode("utf-8", "backslashreplace")[:_LONGEST_NAME].decode("utf-8", "ignore")
    )
    is_changed = plain != name
    digest = hashlib.sha256(name.encode("utf-8", "backslashreplace")).hexdigest()[:8]
    return f"history-{plain}-{digest}" if is_changed else f"history-{plain}"
