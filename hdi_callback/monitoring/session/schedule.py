"""`Schedule`: when a reading is due."""

from __future__ import annotations

from hdi_callback.arguments import whole_number


class Schedule:
    """Due at step 0 and whenever a multiple of `every` has been reached since the last reading.

    Counting by crossings serves trainers whose step count advances by more than one (several optimizers), repeats
    (gradient accumulation) or starts in the middle (a resumed run).

    Args:
        every: optimizer steps between readings, at least 1.

    Raises:
        MisconfigurationError: if `every` is not a positive whole number.

    Example:
        >>> schedule = Schedule(every=4)
        >>> read = []
        >>> for step in (0, 0, 2, 4, 4, 6, 10, 12):
        ...     if schedule.is_due(step):
        ...         schedule.done(step)
        ...         read.append(step)
        >>> read
        [0, 4, 10, 12]
    """

    def __init__(self, every: int) -> None:
        self.every = whole_number("every_n_steps", every, least=1, example=50, of=" of optimizer steps")
        self.last: int | None = None

    def resume_after(self, last: int | None) -> None:
        """Go on from the last reading of an earlier run.

        Args:
            last: the step of that reading; `None` if there was none.
        """
        self.last = last

    def is_due(self, step: int) -> bool:
        """Return whether a reading is due.

        Args:
            step: optimizer steps taken so far.

        Returns:
            True if no reading has been made since `step` reached a multiple of `every`.
        """
        return self.last is None or step // self.every > self.last // self.every

    def done(self, step: int) -> None:
        """Remember that a reading was made.

        Args:
            step: the step of that reading.
        """
        self.last = step
