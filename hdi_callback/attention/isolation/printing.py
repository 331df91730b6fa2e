"""Suppress what isolated code prints; other threads print as before."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO


class _Muted:
    """A stream that discards the output of one thread."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._thread = stream, threading.get_ident()

    def write(self, text: str) -> int:
        """Write, unless it is the thread that is to be silent.

        Args:
            text: what to write.

        Returns:
            The number of characters.
        """
        return len(text) if threading.get_ident() == self._thread else self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def muted() -> Iterator[None]:
    """Discard the output of this thread.

    Yields:
        Nothing.
    """
    before: Any = sys.stdout
    if before is None:
        yield
        return
    muted: Any = _Muted(before)
    sys.stdout = muted
    try:
        yield
    finally:
        if sys.stdout is muted:  # else user code has put another one there, which another thread may use by now
            sys.stdout = before
