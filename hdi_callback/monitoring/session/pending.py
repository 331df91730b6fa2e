"""`Pending`: the readings under way, from the forward that is captured to the numbers that arrive."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from hdi_callback.monitoring.readings import Reading, Readout


class Pending:
    """The readings of a session that are not published yet, in the order in which they were taken.

    Attributes:
        is_capturing: a forward is captured, or about to be, that has not been measured yet.
        incomplete: a reading that further forwards of the same step belong to.
        final: the last weights, measured before others may replace them; dropped if there are further steps.

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
        """Expect a forward that is captured."""
        self.is_capturing = True

    def end_capture(self) -> None:
        """Expect no captured forward any more: it was measured, or given up."""
        self.is_capturing = False

    def hold(self, reading: Reading) -> None:
        """Keep a reading until the further forwards of its step have run.

        Args:
            reading: what was measured so far.
        """
        self.incomplete = reading

    def take_incomplete(self) -> Reading | None:
        """Take the reading that is incomplete.

        Returns:
            It, or `None`.
        """
        reading, self.incomplete = self.incomplete, None
        return reading

    def keep_final(self, reading: Reading) -> None:
        """Keep the last weights for `add_final`; the copy of their numbers to the host begins.

        Args:
            reading: what was measured.
        """
        self.final = Readout(reading)

    def drop_final(self) -> None:
        """Forget weights that were measured early."""
        self.final = None

    def add(self, reading: Reading) -> None:
        """Queue a reading that is complete; the copy of its numbers to the host begins.

        Args:
            reading: what was measured.
        """
        self._queue.append(Readout(reading))

    def add_final(self, step: int) -> bool:
        """Queue the weights that were measured early as the last reading, if they are those of the last step.

        Args:
            step: optimizer steps taken in all.

        Returns:
            Whether they are.
        """
        readout, self.final = self.final, None
        if readout is None or readout.step != step:
            return False
        self._queue.append(readout)
        return True

    def arrived(self, *, waits: bool) -> Iterator[Readout]:
        """Take readings off the queue.

        Args:
            waits: take all of them, also those whose numbers have not arrived.

        Yields:
            Readings, the oldest first.
        """
        while self._queue and (waits or self._queue[0].is_ready()):
            yield self._queue.popleft()
