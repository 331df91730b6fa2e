"""`Cost`: the share of a training's time that its readings take."""

from __future__ import annotations

from collections import deque
from statistics import median
from time import perf_counter

_FEWEST = 3  # steps with a reading


class Cost:
    """Times optimizer steps, from the first forward to the end, with a reading and without one.

    A reading costs what a step with one, and the next, beside which a thread makes its numbers, take longer than their
    neighbours, as steps become slower and faster in a training. Delivering readings in other steps is added.
    """

    def __init__(self) -> None:
        self._start: float | None = None  # of the training
        self._step_start: float | None = None
        self._step, self._has_reading = 0, False  # of the step that has begun
        self._last_without: float | None = None
        self._since: list[float] = []  # how long a step with a reading, and the next, took after it
        self._extra: deque[float] = deque(maxlen=200)
        self._number, self._delivering = 0, 0.0

    def begin(self, step: int) -> None:
        """Begin an optimizer step, if none has begun."""
        if self._step_start is None:
            self._step_start, self._step, self._has_reading = perf_counter(), step, False
            self._start = self._step_start if self._start is None else self._start

    def abandon(self) -> None:
        """Forget a step that did not finish."""
        self._step_start = None

    def end(self, step: int, delivering_from: float, *, has_reading: bool) -> None:
        """End a batch, whose last work was to deliver what had arrived, and the step if it was its last batch."""
        now = perf_counter()
        self._has_reading |= has_reading
        if self._step_start is None or step == self._step:
            return
        took, self._step_start = now - self._step_start, None
        if self._has_reading:
            if len(self._since) > 1:
                self._compare(self._since.pop())  # there is no other step without one
            self._number, self._since = self._number + 1, [took]
        elif len(self._since) == 1:
            self._since.append(took)
        else:
            self._compare(took)
            self._delivering += now - delivering_from

    def _compare(self, without: float) -> None:
        """Compare steps with the last step before them, and with the first one after, which had no reading."""
        if self._since and self._last_without is not None:
            self._extra.append(sum(self._since) - len(self._since) * (self._last_without + without) / 2)
        self._last_without, self._since = without, []

    def share(self) -> float | None:
        """Return the share so far; `None` where too few steps could be compared."""
        if self._start is None or len(self._extra) < _FEWEST:
            return None
        extra = max(0.0, median(self._extra))
        return (extra * self._number + self._delivering) / max(perf_counter() - self._start, 1e-9)
