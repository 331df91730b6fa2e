"""A page that an experiment writes: shown, and kept where it is wanted."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path


def publish(lines: Iterable[str], output: Path | None) -> None:
    """Print a page, and write it to a file if one is named."""
    text = "\n".join(lines) + "\n"
    print(text)
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(text)
