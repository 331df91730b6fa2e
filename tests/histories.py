"""What a history holds, read line by line."""

from __future__ import annotations

from pathlib import Path

from hdi_callback.monitoring.history import read_lines


def readings(path: Path) -> list[int]:
    """Give the steps of the readings, in the order of the lines."""
    return [line["step"] for line in read_lines(path) if line["kind"] == "reading"]
