"""`Position`: where a training is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Position:
    """Where a training is.

    Attributes:
        step: optimizer steps taken so far, that of a backward under way not included.
        epoch: the epoch, if there are epochs.
        axis: position on the trainer's own logging axis, if it differs from `step`.
    """

    step: int
    epoch: int | None = None
    axis: int | None = None
