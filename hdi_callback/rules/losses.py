"""`Losses`: what the training loss says beside the readings, one verdict for all rules."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from hdi_callback.arguments import quoted
from hdi_callback.record import Level, Record

SMOOTHED = 5  # readings over which the median of the loss is taken, and within which it may follow a change

FEWEST, FARTHER, CLEAR = 8, 2.0, 5.0
"""Readings from which it is known how far the loss usually changes; how many times as far a rise after a change is, and
one without."""

LONG, LASTS, HIGH = 15, 3, 4.0
"""Readings that a loss is above all of, at how many in a row, and by how many usual changes, to be told as broken."""

NOISE = 2.5  # usual changes above its least that a median is at its best: the least of many is lucky

_APART = 3  # fewest steps between losses that are kept, so that a window of readings is one of steps as well


class Said(NamedTuple):
    """What is to be said of the loss, or of a write; `written` are parameters, `None` where nothing is known of why."""

    level: Level
    text: str
    written: tuple[str, ...] | None = None
    since: int | None = None  # step of the last reading before the loss rose


class Losses:
    """The training loss at the readings, of those three steps apart; one without a loss keeps the verdict."""

    def __init__(self) -> None:
        self.is_good = False  # smoothed over five readings, at its best so far but for noise, or falling
        self.bad_in_a_row = SMOOTHED  # losses at which it was not, as if before the first it never was
        self._latest: dict[int, float] = {}  # step -> loss, 32 at most
        self._best = (math.inf, math.inf)  # least median, and the largest loss among those it is of
        self._step = 0  # of the last reading
        # What has changed: in words, the parameters that were written, the loss before, how high it is to be, readings.
        self._change: tuple[str, tuple[str, ...], float, float, int] | None = None

    def judge(self, record: Record) -> Said | None:
        """Return what is to be said of a reading that is not noted yet.

        Of a write a notice, and where the loss rises at two readings after a write, or a notice of the contract, a
        warning; without parameters a notice of a rise that nothing explains, and a warning if the loss stays high.
        """
        losses, loss = [*self._latest.values()], record.loss
        before, self._step = self._step, record.step
        usual = _usual(losses)
        told = next((alert for alert in record.alerts if alert.level == "notice" and alert.since is not None), None)
        if record.written or told is not None:
            when = f"between steps {before} and {record.step}"
            wrote = f"something else than the optimizer wrote {quoted(record.written)} {when}" if record.written else ""
            since = record.step if told is None or told.since is None else told.since
            earlier = [each for step, each in self._latest.items() if step < since]
            was, text = statistics.median(earlier[-3:] or [0.0]), wrote if told is None else told.message
            is_known = len(earlier) >= FEWEST
            self._change = (text, record.written, was, was + FARTHER * usual, 0) if is_known else None
            if wrote:
                return Said("notice", wrote, record.written)
        if loss is None or len(losses) <= FEWEST or record.step - [*self._latest][-1] < _APART:
            return None
        if self._change is None:
            return self._rise([*losses, loss], usual)
        text, names, was, limit, count = self._change
        self._change = (text, names, was, limit, count + 1) if count < SMOOTHED else None
        if min(losses[-1], loss) <= limit:
            return None
        self._change = None
        return Said("warning", f"the loss rose from {was:.3g} to {loss:.3g} after this: {text}", names)

    def _rise(self, losses: list[float], usual: float) -> Said | None:
        """Return what is to be said of a loss that has risen though nothing was written or computed otherwise."""
        *past, _, _, loss = losses[-LONG - LASTS :]
        was, far = statistics.median(past[-SMOOTHED:]), _usual(past)
        text = f"the loss rose from {was:.3g} to {loss:.3g}"
        if len(past) == LONG and min(losses[-LASTS:]) > max(*past, was + HIGH * far):
            text = f"{text} and stays above all of the {LONG} readings before"
            return Said("warning", text, since=[*self._latest][-LASTS])
        was = statistics.median(losses[-5:-2])
        is_clear = min(losses[-2:]) > max(*losses[-7:-2], was + CLEAR * usual)
        return Said("notice", text) if is_clear else None

    def note(self, loss: float | None) -> None:
        """Take the loss of a reading."""
        if loss is None:
            return
        if not math.isfinite(loss):
            self.is_good, self.bad_in_a_row = False, SMOOTHED
            return
        if self._latest and self._step - [*self._latest][-1] < _APART:
            return
        self._latest = dict([*self._latest.items(), (self._step, loss)][-32:])
        losses = [*self._latest.values()]
        earlier, latest = losses[-2 * SMOOTHED : -SMOOTHED], losses[-SMOOTHED:]
        if len(latest) == SMOOTHED:
            median = statistics.median(latest)
            self._best = min(self._best, (median, max(latest)))
            is_falling = len(earlier) == SMOOTHED and median < min(earlier)
            self.is_good = is_falling or median <= max(self._best[1], self._best[0] + NOISE * _usual(losses))
        self.bad_in_a_row = 0 if self.is_good else self.bad_in_a_row + 1


def _usual(losses: Sequence[float]) -> float:
    """Return how far a loss usually changes from one reading to the next."""
    return statistics.median(abs(second - first) for first, second in pairwise(losses)) if losses[1:] else 0.0
