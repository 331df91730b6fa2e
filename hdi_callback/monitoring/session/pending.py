"""`Pending`: the queue of readings, from the captured forward until their numbers arrive on the host."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from hdi_callback.monitoring.readings import Reading, Readout


class Pending:
    """The readings of a session that are not published yet, in the order in which they were taken.

    Attributes:
        is_capturing: a forward is armed or captured, and not measured yet.
        incomplete: a reading that still lacks forwards of the same step.
        final: a reading of the last weights, taken before other callbacks may replace them; dropped if there are
            further steps.

    Example:
        >>> pending = Pending()
        >>> pending.is_capturing, list(pending.arrived(waits=True))
        (False, [])
    """

    def __init__(self) -> None:
        self.is_capturing = False
        self.incomplete: Reading | None = None
        self.final: Readout | None = None
        self._queue: deque[Readout] = deque()

    def begin(self) -> None:
        """Note that a forward is armed."""
        self.is_capturing = True

    def end_capture(self) -> None:
        """Note that the captured forward was measured, or given up."""
        self.is_capturing = False

    def hold(self, reading: Reading) -> None:
        """Keep a reading until the further forwards of its step have run.

        Args:
            reading: the reading so far.
        """
        self.incomplete = reading

    def take_incomplete(self) -> Reading | None:
        """Remove the incomplete reading.

        Returns:
            The reading, or `None`.
        """
        reading, self.incomplete = self.incomplete, None
        return reading

    def keep_final(self, reading: Reading) -> None:
        """Keep a reading of the last weights for `add_final`; its copy to the host begins.

        Args:
            reading: what was measured.
        """
        self.final = Readout(reading)

    def drop_final(self) -> None:
        """Drop the reading of `keep_final`."""
        self.final = None

    def add(self, reading: Reading) -> None:
        """Queue a complete reading; its copy to the host begins.

        Args:
            reading: what was measured.
        """
        self._queue.append(Readout(reading))

    def add_final(self, step: int) -> bool:
        """Queue the reading of `keep_final` as the last one, if it is of the last step.

        Args:
            step: optimizer steps taken in all.

        Returns:
            Whether it is.
        """
        readout, self.final = self.final, None
        if readout is None or readout.step != step:
            return False
        self._queue.append(readout)
        return True

    def arrived(self, *, waits: bool) -> Iterator[Readout]:
        """Remove readings from the queue.

        Args:
            waits: return all of them, waiting for numbers that have not arrived.

        Yields:
            Readings, the oldest first.
        """
        while self._queue and (waits or self._queue[0].is_ready()):
            yield self._queue.popleft()
