"""`Losses`: what the training loss says beside the readings, one verdict for all rules."""

from __future__ import annotations

import math
import statistics
from itertools import pairwise

from hdi_callback.arguments import quoted
from hdi_callback.record import Level, Record
from hdi_callback.rules.series import APART

SMOOTHED = 5
"""Readings over which the median of the loss is taken, and within which it may follow a write."""

FEWEST, FARTHER, CLEAR = 8, 2.0, 5.0
"""Readings from which it is known how far the loss usually changes; how many times as far a rise after a write is, and
one without."""


class Losses:
    """The training loss at the readings; one without a loss keeps the verdict."""

    def __init__(self) -> None:
        self.is_good = False  # smoothed over five readings, at its best so far but for noise, or falling
        self._latest: list[float] = []  # 32 at most
        self._best = (math.inf, math.inf)  # least median, and the largest loss among those it is of
        self._step = 0  # of the last reading
        # What wrote: steps of the readings around it, the parameters, the loss before, how high it is to be, readings.
        self._write: tuple[int, int, tuple[str, ...], float, float, int] | None = None

    def judge(self, record: Record) -> tuple[Level, str, tuple[str, ...]] | None:
        """Return what is to be said of a reading that is not noted yet: level, sentence, parameters that were written.

        Of a write a notice, and a warning where the loss rises after it, at two readings; a notice of a rise without.
        """
        losses, loss = self._latest, record.loss
        before, self._step = self._step, record.step
        usual = statistics.median(abs(second - first) for first, second in pairwise(losses)) if losses[1:] else 0.0
        if record.written:
            was = statistics.median(losses[-3:] or [0.0])
            is_known = len(losses) >= FEWEST
            self._write = (before, record.step, record.written, was, was + FARTHER * usual, 0) if is_known else None
            written = f"wrote {quoted(record.written)} between steps {before} and {record.step}"
            return "notice", f"something else than the optimizer {written}", record.written
        if loss is None or len(losses) <= FEWEST:
            return None
        if self._write is None:
            if record.step - before < APART:
                return None
            was = statistics.median(losses[-4:-1])
            is_clear = min(losses[-1], loss) > max(*losses[-6:-1], was + CLEAR * usual)
            text = f"the loss rose from {was:.3g} to {loss:.3g} up to step {record.step}, and no layer changed with it"
            return ("notice", text, ()) if is_clear else None
        begin, end, names, was, limit, count = self._write
        self._write = (*self._write[:-1], count + 1) if count < SMOOTHED else None
        if min(losses[-1], loss) <= limit:
            return None
        self._write = None
        written = f"had written {quoted(names)} between steps {begin} and {end}"
        text = f"the loss rose from {was:.3g} to {loss:.3g} once something else than the optimizer {written}"
        return "warning", text, names

    def note(self, loss: float | None) -> None:
        """Take the loss of a reading."""
        if loss is None:
            return
        if not math.isfinite(loss):
            self.is_good = False
            return
        self._latest = [*self._latest, loss][-32:]
        earlier, latest = self._latest[-2 * SMOOTHED : -SMOOTHED], self._latest[-SMOOTHED:]
        if len(latest) == SMOOTHED:
            median = statistics.median(latest)
            self._best = min(self._best, (median, max(latest)))
            is_falling = len(earlier) == SMOOTHED and median < min(earlier)
            self.is_good = is_falling or median <= self._best[1]
