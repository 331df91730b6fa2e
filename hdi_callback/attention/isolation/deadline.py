"""How long a search may take: processor time, so that other work on the machine does not change what is found."""

from __future__ import annotations

import time

_WAITING = 3.0  # times as long, for code that sleeps or waits instead of computing


class Deadline:
    """A limit on the processor time of this thread, and on three times as much time by the clock.

    Args:
        seconds: of processor time from now on.

    Example:
        >>> Deadline(60).has_passed
        False
        >>> Deadline(0).has_passed
        True
    """

    def __init__(self, seconds: float) -> None:
        self._processor = time.thread_time() + seconds
        self._clock = time.monotonic() + _WAITING * seconds

    @property
    def has_passed(self) -> bool:
        """Whether one of the two limits is exceeded."""
        return time.thread_time() > self._processor or time.monotonic() > self._clock
