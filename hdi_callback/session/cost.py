"""`Cost`: the share of a training's time that its readings take."""

from __future__ import annotations

from collections import deque
from statistics import median
from time import perf_counter

_FEWEST = 3  # steps with a reading: the first one has found the heads


class Cost:
    """Times steps, from the forward to the end, with a reading and without one.

    A reading costs what a median step with one takes longer; the publishing of readings in other steps is added.
    """

    def __init__(self) -> None:
        self._start: float | None = None  # of the training
        self._begun: float | None = None  # a step
        self._with: deque[float] = deque(maxlen=200)
        self._without: deque[float] = deque(maxlen=200)
        self._number, self._publishing = 0, 0.0

    def begin(self) -> None:
        """Begin a step, if none has begun."""
        if self._begun is None:
            self._begun = perf_counter()
            self._start = self._begun if self._start is None else self._start

    def abandon(self) -> None:
        """Forget a step that did not finish."""
        self._begun = None

    def end(self, publishing_from: float, *, has_reading: bool) -> None:
        """End a step, whose last work was to publish what had arrived."""
        now = perf_counter()
        if self._begun is None:
            return
        (self._with if has_reading else self._without).append(now - self._begun)
        self._number += has_reading
        self._publishing += 0.0 if has_reading else now - publishing_from
        self._begun = None

    def share(self) -> float | None:
        """Return the share so far; `None` where there are too few steps of either kind to compare."""
        if self._start is None or len(self._with) < _FEWEST or not self._without:
            return None
        extra = max(0.0, median(self._with) - median(self._without))
        return (extra * self._number + self._publishing) / max(perf_counter() - self._start, 1e-9)
