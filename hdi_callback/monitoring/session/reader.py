"""`Reader`: takes readings when they are due, and queues them until their numbers arrive."""

from __future__ import annotations

from collections.abc import Iterator

from hdi_callback.monitoring.monitor import HeadDiversityMonitor
from hdi_callback.monitoring.readings import Readout
from hdi_callback.monitoring.session.pending import Pending
from hdi_callback.monitoring.session.position import Position
from hdi_callback.monitoring.session.schedule import Schedule
from hdi_callback.monitoring.warn_once import WarnOnce

_MEASURING = "measuring head diversity"


class Reader:
    """Arm, measure and queue: each reading from its forward until its numbers arrive on the host.

    Args:
        monitor: the monitor.
        schedule: when a reading is due.
        warn_once: warns once of each kind of failure.

    Attributes:
        schedule: when a reading is due.
    """

    def __init__(self, monitor: HeadDiversityMonitor, schedule: Schedule, warn_once: WarnOnce) -> None:
        self.schedule = schedule
        self._monitor, self._warn_once = monitor, warn_once
        self._pending = Pending()

    @property
    def is_capturing(self) -> bool:
        """Whether a forward is armed or captured, and not measured yet."""
        return self._pending.is_capturing

    def before_forward(self, step: int) -> None:
        """Capture the forward that follows if a reading is due.

        Args:
            step: optimizer steps taken so far.
        """
        if self._pending.is_capturing:
            return
        if self.schedule.is_due(step):
            self._pending.begin()
            self._monitor.arm(training_only=True)
        else:
            self._monitor.skip_forward()

    def after_backward(self, position: Position, *, is_last: bool) -> None:
        """Measure the captured forward, or add it to an incomplete reading.

        Args:
            position: where the training is.
            is_last: False if further networks may be trained, whose head outputs belong to the same reading.
        """
        if self._pending.is_capturing:
            self._measure(position, is_last)
        elif self._pending.incomplete is not None:
            self.complete(is_last)

    def abandon(self) -> None:
        """Give up a reading whose forward or backward did not finish; it is due again at once."""
        if self._pending.is_capturing:
            self._pending.end_capture()
            self._monitor.release()
        self.complete()

    def after_step(self, position: Position) -> None:
        """Finish the reading of the step that was made.

        Args:
            position: where the training is.
        """
        if self._pending.is_capturing:  # a batch without a backward
            self._measure(position)
        self.complete()

    def measure_final_early(self, position: Position) -> None:
        """Measure the last weights before other callbacks may replace them.

        Args:
            position: where the training is.
        """
        final = self._pending.final
        if position.step in (self.schedule.last, None if final is None else final.step):
            return
        with self._warn_once.guard(_MEASURING):
            reading = self._monitor.measure(position.step, epoch=position.epoch, axis=position.axis)
            self._pending.keep_final(reading)

    def finish(self, position: Position) -> None:
        """Take the last reading, unless it has been taken.

        Args:
            position: where the training has ended.
        """
        if self._pending.is_capturing and not self._monitor.has_run:  # a batch that was skipped before its forward
            self._pending.end_capture()
            self._monitor.release()
        if self.schedule.last != position.step:
            if self._pending.add_final(position.step):
                self.schedule.done(position.step)
            else:
                self._measure(position)
        self._pending.drop_final()

    def complete(self, is_last_forward: bool = True) -> None:
        """Add later captures to the incomplete reading, and queue it once no further forward belongs to it.

        Args:
            is_last_forward: False if further forwards of the same step may follow.
        """
        reading = self._pending.take_incomplete()
        if reading is None:
            return
        with self._warn_once.guard(_MEASURING):
            if self._monitor.awaits_forwards:
                reading = self._monitor.complete(reading, is_last_forward=is_last_forward)
            if self._monitor.awaits_forwards:
                self._pending.hold(reading)
            else:
                self._pending.add(reading)

    def arrived(self, *, waits: bool) -> Iterator[Readout]:
        """Remove readings from the queue.

        Args:
            waits: return all of them, waiting for numbers that have not arrived.

        Returns:
            Readings, the oldest first.
        """
        return self._pending.arrived(waits=waits)

    def _measure(self, position: Position, is_last: bool = True) -> None:
        self._pending.end_capture()
        last = self.schedule.last
        self.schedule.done(position.step)
        try:
            with self._warn_once.guard(_MEASURING):
                reading = self._monitor.measure(
                    position.step, epoch=position.epoch, axis=position.axis, is_last_forward=is_last
                )
                self._pending.hold(reading)
        except BaseException:  # the user interrupts it, and may go on: it is due again
            self.schedule.resume_after(last)
            raise
        if not self._monitor.awaits_forwards:
            self.complete()
