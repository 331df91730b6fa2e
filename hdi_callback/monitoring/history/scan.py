"""The lines of a history file: which are readable, and which count after resumptions."""

from __future__ import annotations

import itertools
import os
import warnings
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from hdi_callback.arguments import path as check_path
from hdi_callback.errors import MisconfigurationError, MonitoringWarning
from hdi_callback.monitoring.history.lines import LineError, line_from_text

FORMAT = 1
_LONGEST = 2**28  # bytes of a line; a hundred layers of a hundred heads with their matrices take a tenth of it


def run_lines(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The headers of a history file.

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
        return list(run_lines_in(file))


def run_lines_in(file: Any) -> Iterator[dict[str, Any]]:
    """The headers of an open history file.

    Args:
        file: the file, in binary mode.

    Yields:
        Its lines of kind ``run`` from its current position.
    """
    for _, data in _numbered(file):
        if data.startswith(b'{"kind":"run"'):
            with suppress(LineError):
                yield line_from_text(data)


def _numbered(file: Any) -> Iterator[tuple[int, bytes]]:
    """The lines of an open file with their numbers; of far too long ones only the beginning."""
    for number in itertools.count(1):
        data = file.readline(_LONGEST)
        if not data:
            return
        yield number, data
        while len(data) == _LONGEST and not data.endswith(b"\n"):
            data = file.readline(_LONGEST)


def read_lines(path: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """Read the lines of a history file that count, in the order of writing.

    Lines that a later resumption made void (beyond the last reading that it knew of) are skipped, and so is a line that
    a killed process left half written. Any other unreadable line is skipped with a warning that gives its number.

    Args:
        path: a history file.

    Yields:
        Each line as a dictionary with ``kind`` and ``step``.

    Raises:
        MisconfigurationError: if there is no such file, or it is of a newer format.
    """
    yield from (line for line, _ in counting_lines(path))


def counting_lines(path: str | os.PathLike[str]) -> list[tuple[dict[str, Any], bytes]]:
    """The lines that count, each with its bytes.

    Args:
        path: see `read_lines`.

    Returns:
        See `read_lines`.

    Raises:
        MisconfigurationError: see `read_lines`.
    """
    file = Path(check_path("path", path, "lightning_logs/version_0/hdi/history.jsonl"))
    if not file.is_file():
        raise MisconfigurationError(f"There is no history file at `{file}`. Write the path of a `history.jsonl`.")
    lines: list[tuple[dict[str, Any], bytes]] = []
    skipped: list[str] = []
    torn: str | None = None  # perhaps the last line of a killed process
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
