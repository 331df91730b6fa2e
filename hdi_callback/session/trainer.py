"""`Trainer`: what a session asks of whatever trains."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist
from torch.optim import Optimizer

from hdi_callback.record import Record


class Trainer(Protocol):
    """What a session asks of whatever trains; each integration derives from it."""

    @property
    def is_first_rank(self) -> bool:
        """Whether this process writes."""
        return not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0

    @property
    def folder(self) -> Path:
        """The folder of the run."""

    @property
    def step(self) -> int:
        """Optimizer steps taken so far."""

    @property
    def optimizers(self) -> Sequence[Optimizer]:
        """The optimizers of the run, without wrappers."""

    def stop(self) -> None:
        """End the training after this step."""

    def save(self, name: str) -> str:
        """Save a checkpoint under a name without a suffix; return where."""

    def targets(self, past: Sequence[Record]) -> Sequence[Any]:
        """Return what takes the curves of this rank, see `sink_for`; `past` are the records of a resumed run so far."""
