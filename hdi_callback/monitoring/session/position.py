"""`Position`: step, epoch and logging axis of a training."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Position:
    """Step, epoch and logging axis of a training.

    Attributes:
        step: optimizer steps taken so far, without the one whose backward is running.
        epoch: the epoch, if there are epochs.
        axis: position on the trainer's own logging axis, if it differs from `step`.
    """

    step: int
    epoch: int | None = None
    axis: int | None = None
