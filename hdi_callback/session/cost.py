"""`Cost`: the share of a training's time that its readings take."""

from __future__ import annotations

from collections import deque
from statistics import median
from time import perf_counter

_FEWEST = 3  # steps with a reading: the first one has found the heads


class Cost:
    """Times steps, from the forward to the end, with a reading and without one.

    A reading costs what a median step with one takes longer; delivering readings in other steps is added.
    """

    def __init__(self) -> None:
        self._start: float | None = None  # of the training
        self._step_start: float | None = None
        self._with_reading: deque[float] = deque(maxlen=200)
        self._without: deque[float] = deque(maxlen=200)
        self._number, self._delivering = 0, 0.0

    def begin(self) -> None:
        """Begin a step, if none has begun."""
        if self._step_start is None:
            self._step_start = perf_counter()
            self._start = self._step_start if self._start is None else self._start

    def abandon(self) -> None:
        """Forget a step that did not finish."""
        self._step_start = None

    def end(self, delivering_from: float, *, has_reading: bool) -> None:
        """End a step, whose last work was to deliver what had arrived."""
        now = perf_counter()
        if self._step_start is None:
            return
        (self._with_reading if has_reading else self._without).append(now - self._step_start)
        self._number += has_reading
        self._delivering += 0.0 if has_reading else now - delivering_from
        self._step_start = None

    def share(self) -> float | None:
        """Return the share so far; `None` where there are too few steps of either kind to compare."""
        if self._start is None or len(self._with_reading) < _FEWEST or not self._without:
            return None
        extra = max(0.0, median(self._with_reading) - median(self._without))
        return (extra * self._number + self._delivering) / max(perf_counter() - self._start, 1e-9)
