"""`Losses`: what the training loss says beside the readings, one verdict for all rules."""

from __future__ import annotations

import math
import statistics
from collections import deque
from itertools import pairwise
from typing import Any

from hdi_callback.record import Record
from hdi_callback.rules.words import listed

SMOOTHED = 5
"""Readings over which the median of the loss is taken, and within which it may follow a write."""

FEWEST, FARTHER = 8, 2.0
"""Readings from which it is known how far the loss usually changes, and how many times as far it then goes."""


class Losses:
    """The training loss at the readings; one without a loss keeps the verdict."""

    def __init__(self) -> None:
        self.is_good = False  # smoothed over five readings, at its best so far but for noise, or falling
        self._latest: deque[float] = deque(maxlen=32)
        self._best = (math.inf, math.inf)  # least median, and the largest loss among those it is of
        self._step = 0  # of the last reading
        # What wrote: steps of the readings around it, the parameters, the loss before, how high it is to be, readings.
        self._write: tuple[int, int, tuple[str, ...], float, float, int] | None = None

    def after_write(self, record: Record) -> tuple[str, tuple[str, ...]]:
        """Return in words how the loss rose, at two readings, after something else than a step wrote parameters."""
        losses, loss = [*self._latest], record.loss
        before, self._step = self._step, record.step
        if record.written and len(losses) >= FEWEST:
            usual = statistics.median(abs(second - first) for first, second in pairwise(losses))
            was = statistics.median(losses[-3:])
            self._write = before, record.step, record.written, was, was + FARTHER * usual, 0
            return "", ()
        if self._write is None or loss is None or not losses:
            return "", ()
        begin, end, names, was, limit, count = self._write
        self._write = (*self._write[:-1], count + 1) if count < SMOOTHED else None
        if min(losses[-1], loss) <= limit:
            return "", ()
        self._write = None
        more = [f"{len(names) - 3} more"] if len(names) > 4 else []
        written = listed([f"`{name}`" for name in names[: 3 if more else 4]] + more)
        text = (
            f"the loss rose from {was:.3g} to {loss:.3g} once something else than the optimizer had written {written} "
            f"between steps {begin} and {end}"
        )
        return text, names

    def note(self, loss: float | None) -> None:
        """Take the loss of a reading."""
        if loss is None:
            return
        if not math.isfinite(loss):
            self.is_good = False
            return
        self._latest.append(loss)
        earlier, latest = [*self._latest][-2 * SMOOTHED : -SMOOTHED], [*self._latest][-SMOOTHED:]
        if len(latest) == SMOOTHED:
            median = statistics.median(latest)
            self._best = min(self._best, (median, max(latest)))
            is_falling = len(earlier) == SMOOTHED and median < min(earlier)
            self.is_good = is_falling or median <= self._best[1]

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a resumed run, as plain data."""
        best = None if math.isinf(self._best[0]) else [*self._best]
        return {"latest": [*self._latest], "best": best, "is_good": self.is_good, "step": self._step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the result of `state_dict`."""
        self._latest.extend(state["latest"])
        self._best, self.is_good = tuple(state["best"] or (math.inf, math.inf)), state["is_good"]
        self._step = state["step"]
