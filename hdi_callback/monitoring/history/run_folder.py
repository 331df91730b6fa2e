"""`find_history`: folder of a run -> its history file."""

from __future__ import annotations

import os
from pathlib import Path

from hdi_callback.arguments import path as check_path
from hdi_callback.errors import MisconfigurationError
from hdi_callback.monitoring.history.scan import run_lines

_MOST_NAMED = 3


def find_history(run: str | os.PathLike[str]) -> Path:
    """Find the history file of a run.

    Args:
        run: the file itself, or a folder that holds one, however deep.

    Returns:
        The file.

    Raises:
        MisconfigurationError: if there is none, or more than one; the message names some.

    Example:
        >>> import tempfile
        >>> from hdi_callback.monitoring.history import History
        >>> folder = Path(tempfile.mkdtemp())
        >>> History(folder / "version_0" / "hdi" / "history.jsonl").begin(0, [])
        >>> find_history(folder).relative_to(folder).as_posix()
        'version_0/hdi/history.jsonl'
    """
    path = Path(check_path("run", run, "lightning_logs/version_0/hdi/history.jsonl")).expanduser()
    if path.is_file():
        _refuse_empty(path)
        if not run_lines(path):
            raise MisconfigurationError(_not_of_a_run(path))
        return path
    if not path.is_dir():
        raise MisconfigurationError(
            f"There is no file or folder `{path}`: write a history, as lightning_logs/version_0/hdi/history.jsonl, or "
            "the folder of a run."
        )
    for near in (path / "history.jsonl", path / "hdi" / "history.jsonl"):
        if near.is_file() and run_lines(near):
            return near
    found = sorted(file for file in path.rglob("history*.jsonl") if file.is_file() and run_lines(file))
    if not found:
        for file in sorted(file for file in path.rglob("history*.jsonl") if file.is_file()):
            _refuse_empty(file)
            raise MisconfigurationError(_not_of_a_run(file))
        raise MisconfigurationError(f"There is no `history.jsonl` in `{path}`, nor in a folder below it.")
    if len(found) > 1:
        named = ", ".join(str(file) for file in found[:_MOST_NAMED])
        more = f" and {len(found) - _MOST_NAMED} more" if len(found) > _MOST_NAMED else ""
        raise MisconfigurationError(f"`{path}` holds {len(found)} histories: {named}{more}. Write one of them.")
    return found[0]


def _refuse_empty(file: Path) -> None:
    if not file.stat().st_size:
        raise MisconfigurationError(f"`{file}` is empty: its run has not written to it yet.")


def _not_of_a_run(file: Path) -> str:
    return (
        f"`{file}` is not the history of a run, or its first line is damaged: write the path of a `history.jsonl` "
        "that a callback wrote."
    )
