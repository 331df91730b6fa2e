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
"""Readings that a loss is above all of, at how many in a row, and by how many usual changes, with no known change."""

LEFT = 1 / 3  # of a rise, that is a warning five readings later: what was planned comes back sooner

NOISE = 2.5  # usual changes above its least that a median is at its best: the least of many is lucky

_APART = 3  # fewest steps between losses that are kept, so that a window of readings is one of steps as well


class Said(NamedTuple):
    """What is to be said of the loss, or of a write; `written` are parameters, `None` where nothing is known of why."""

    level: Level
    text: str
    written: tuple[str, ...] | None = None
    since: int | None = None  # step of the last reading before the loss rose


class Cause(NamedTuple):
    """What may explain a rise: in words, what was written, the loss before, how high it is to be, and since when."""

    text: str
    written: tuple[str, ...]
    was: float
    limit: float
    since: int  # its first step
    number: int  # of losses that were judged before it was told


class Rise(NamedTuple):
    """A loss that rose: where it was, how high it is to stay, the losses since, the step before, and why if known."""

    was: float
    limit: float
    losses: tuple[float, ...]
    since: int
    cause: Cause | None


class Losses:
    """The training loss at the readings, of those three steps apart; one without a loss keeps the verdict."""

    def __init__(self) -> None:
        self.is_good = False  # smoothed over five readings, at its best so far but for noise, or falling
        self.bad_in_a_row = SMOOTHED  # losses at which it was not, as if before the first it never was
        self._latest: dict[int, float] = {}  # step -> loss, 32 at most
        self._best = (math.inf, math.inf)  # least median, and the largest loss among those it is of
        self._step = 0  # of the last reading
        self._causes: list[Cause] = []  # of the last five losses
        self._count = 0  # of losses that were judged
        self._rise: Rise | None = None  # until it is judged

    def judge(self, record: Record) -> Said | None:
        """Return what is to be said of a reading that is not noted yet.

        Of a write, and of a rise that nothing explains, a notice. A warning where the loss rises at two readings after
        a write or a notice of the contract, or at three above all before, and is not back five readings later, or at
        the last reading.
        """
        before, self._step = self._step, record.step
        wrote = self._note_change(record, before)
        steps, loss, verdict = [*self._latest], record.loss, None
        if loss is not None and math.isfinite(loss) and len(steps) > FEWEST and record.step - steps[-1] >= _APART:
            verdict = self._begin(loss) if self._rise is None else self._follow(self._rise, loss)
        if self._rise is not None and record.is_last:
            verdict = self._verdict(self._rise)
        is_warning = verdict is not None and verdict.level == "warning"
        return Said("notice", wrote, record.written) if wrote and not is_warning else verdict

    def _note_change(self, record: Record, before: int) -> str:
        """Take what has changed by a record: what may explain a rise that is waited for, or one that follows."""
        told = next((alert for alert in record.alerts if alert.level == "notice" and alert.since is not None), None)
        if not record.written and told is None:
            return ""
        when = f"between steps {before} and {record.step}"
        wrote = f"something else than the optimizer wrote {quoted(record.written)} {when}" if record.written else ""
        since = record.step if told is None or told.since is None else told.since
        earlier = [each for step, each in self._latest.items() if step < since]
        was, text = statistics.median(earlier[-3:] or [0.0]), wrote if told is None else told.message
        limit = was + FARTHER * _usual([*self._latest.values()])
        if len(earlier) < FEWEST or earlier[-1] > limit:  # else it was high before
            return wrote
        is_recent = since >= [*self._latest][-LONG:][0]
        cause = Cause(text, record.written, was, limit, since, self._count)
        if self._rise is not None and self._rise.cause is None and is_recent and since <= self._rise.since + 1:
            self._rise = self._rise._replace(cause=cause)
        else:
            self._causes.append(cause)
        return wrote

    def _begin(self, loss: float) -> Said | None:
        """Return what is to be said of a loss that may have risen, after what has changed or for no known reason."""
        steps, losses = [*self._latest], [*self._latest.values(), loss]
        self._count += 1
        self._causes = [cause for cause in self._causes if self._count - cause.number <= SMOOTHED + 1]
        for cause in reversed(self._causes):
            if steps[-1] >= cause.since and min(losses[-2:]) > cause.limit:
                since = max((step for step in steps if step < cause.since), default=steps[0])
                self._rise, self._causes = Rise(cause.was, cause.limit, tuple(losses[-2:]), since, cause), []
                return None
        *past, first, second, third = losses[-LONG - LASTS :]
        was, far = statistics.median(past[-SMOOTHED:]), _usual(past)
        if len(past) == LONG and min(first, second, third) > max(*past, was + HIGH * far):
            self._rise = Rise(was, was, (first, second, third), steps[-LASTS], None)
            return None
        was = statistics.median(losses[-5:-2])
        is_clear = min(losses[-2:]) > max(*losses[-7:-2], was + CLEAR * _usual(losses[:-1]))
        return Said("notice", f"the loss rose from {was:.3g} to {loss:.3g}") if is_clear else None

    def _follow(self, rise: Rise, loss: float) -> Said | None:
        """Return what is to be said of a loss that rose some readings ago."""
        self._rise = rise = rise._replace(losses=(*rise.losses, loss))
        return self._verdict(rise) if len(rise.losses) == SMOOTHED + 2 else None

    def _verdict(self, rise: Rise) -> Said | None:
        """Return a warning of a loss of whose rise a third is left, unless it rose again after a further change."""
        self._rise = None
        was, high, now = rise.was, statistics.fmean(rise.losses[:2]), statistics.median(rise.losses[-3:])
        if now <= max(rise.limit, was + LEFT * (high - was)) or (self._causes and now > 2 * high - was):
            return None
        text = (
            f"the loss rose from {was:.3g} to {high:.3g} after step {rise.since}, and is {now:.3g} at step {self._step}"
        )
        return Said("warning", text, since=rise.since) if rise.cause is None else _after(rise.cause, text)

    def explain(self) -> Said | None:
        """Return a warning of the rise that is waited for, if what changed before it is known, as a layer shows it."""
        rise = self._rise
        if rise is None or rise.cause is None:
            return None
        self._rise = None
        high = statistics.fmean(rise.losses[:2])
        return _after(rise.cause, f"the loss rose from {rise.was:.3g} to {high:.3g} after step {rise.since}")

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


def _after(cause: Cause, text: str) -> Said:
    return Said("warning", f"{text}, after this: {cause.text}", cause.written)


def _usual(losses: Sequence[float]) -> float:
    """Return how far a loss usually changes from one reading to the next, and no less than it is rounded by."""
    changes = [abs(second - first) for first, second in pairwise(losses)]
    return max(statistics.median(changes), 1e-4 * abs(losses[-1])) if changes else 0.0
