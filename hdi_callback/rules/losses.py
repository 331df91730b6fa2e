"""`Losses`: what the training loss says beside the readings, one verdict for all rules."""

from __future__ import annotations

import math
import statistics
from collections import deque
from typing import Any

SMOOTHED = 5
"""Readings over which the median of the loss is taken."""


class Losses:
    """The training loss at the readings; one without a loss keeps the verdict."""

    def __init__(self) -> None:
        self.is_good = False  # smoothed over five readings, at its best so far but for noise, or falling
        self._latest: deque[float] = deque(maxlen=2 * SMOOTHED)
        self._best = (math.inf, math.inf)  # least median, and the largest loss among those it is of

    def note(self, loss: float | None) -> None:
        """Take the loss of a reading."""
        if loss is None:
            return
        if not math.isfinite(loss):
            self.is_good = False
            return
        self._latest.append(loss)
        earlier, latest = [*self._latest][:-SMOOTHED], [*self._latest][-SMOOTHED:]
        if len(latest) == SMOOTHED:
            median = statistics.median(latest)
            self._best = min(self._best, (median, max(latest)))
            is_falling = len(earlier) == SMOOTHED and median < min(earlier)
            self.is_good = is_falling or median <= self._best[1]

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a resumed run, as plain data."""
        best = None if math.isinf(self._best[0]) else [*self._best]
        return {"latest": [*self._latest], "best": best, "is_good": self.is_good}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the result of `state_dict`."""
        self._latest.extend(state["latest"])
        self._best, self.is_good = tuple(state["best"] or (math.inf, math.inf)), state["is_good"]
