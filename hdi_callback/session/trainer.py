"""`Trainer`: what a session asks of whatever trains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol
from uuid import uuid4

import torch.distributed as dist
from torch.optim import Optimizer

from hdi_callback.monitor.ranks import begun, store_of_ranks, timeout_of_ranks, why_apart
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
    def epoch(self) -> int | None:
        """The epoch, if there are epochs."""

    @property
    def optimizers(self) -> Sequence[Optimizer]:
        """The optimizers of the run, without wrappers."""

    def stop(self) -> None:
        """End the training after this step."""

    def save(self, name: str) -> str:
        """Save a checkpoint under a name without a suffix; return where."""

    def print(self, text: str) -> None:
        """Print text to the user."""
        print(text)  # noqa: T201

    def targets(self, past: Sequence[Record]) -> Sequence[Any]:
        """Return what takes the curves of this rank, see `sink_for`; called once, when the layers are known.

        Args:
            past: the records of a resumed run so far.
        """


_LONGEST_WAIT = 60.0  # seconds


def shared_name() -> str:
    """Return a name that no other run has, the same on every rank; the store is asked, and no rank waits."""
    name = uuid4().hex
    if not (dist.is_available() and dist.is_initialized()):
        return name
    return str(store_of_ranks().compare_set(begun("run"), "", name).decode())


def why_ranks_differ(settings: Mapping[str, Any]) -> str:
    """Return why the ranks do not all watch alike, as sentences; empty if they do.

    A rank without a monitor never comes here, and goes on to the next collective call of the training, in which it
    waits for the others. So each waits for a third of the group's timeout, and 60 seconds at most.
    """
    limit = min(timeout_of_ranks() / 3, _LONGEST_WAIT)
    why = why_apart(f"{begun('sessions')}/the start of watching", settings, limit)
    return f"{why}. Every rank needs the callback, with the same arguments." if why else ""
