"""`Trainer`: what a session asks of whatever trains."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol
from uuid import uuid4

import torch.distributed as dist
from torch.optim import Optimizer

from hdi_callback.monitor.ranks import begun, store_of_ranks
from hdi_callback.record import Record, Sink


class Trainer(Protocol):
    """What a session asks of whatever trains; each integration implements it."""

    @property
    def door(self) -> str:
        """What a user writes to watch heads there, one of `rules.rule.DOORS`."""

    @property
    def is_first_rank(self) -> bool:
        """Whether this process writes."""

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

    def loss_scale(self, optimizer: Optimizer) -> float:
        """Return the factor on the gradients before a step, 1 where they have been unscaled."""

    def stop(self) -> None:
        """End the training after this step."""

    def save(self, name: str) -> str:
        """Save a checkpoint under a name without a suffix; return where."""

    def print(self, text: str) -> None:
        """Print text to the user."""

    def sinks(self, past: Sequence[Record]) -> Sequence[Sink]:
        """Return the dashboards of this rank; called once, when the layers are known.

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
    waits for the others. So this makes no collective call: each rank leaves its settings in the store of the process
    group, and waits for those of the others for a third of the group's timeout, and 60 seconds at most. The first rank
    that has seen enough leaves the verdict, which all ranks follow.
    """
    store = store_of_ranks()
    rank, size, key = dist.get_rank(), dist.get_world_size(), begun("sessions")
    names = [f"{key}/{one}" for one in range(size)]
    store.set(names[rank], json.dumps(settings))
    deadline = time.monotonic() + min(store.timeout.total_seconds() / 3, _LONGEST_WAIT)
    while not store.check(names) and time.monotonic() < deadline:
        time.sleep(0.02)
    missing = [one for one in range(size) if not store.check([names[one]])]
    if missing:
        listed = ", ".join(map(str, missing[:5])) + (", ..." if len(missing) > 5 else "")
        verdict = f"rank {listed} of {size} has no monitor, or began too late. Add the callback on every rank."
    else:
        found = [json.loads(store.get(name)) for name in names]
        verdict = next((_difference(found[0], other, one) for one, other in enumerate(found) if other != found[0]), "")
    decided = store.compare_set(f"{key}/verdict", "", verdict or "alike").decode()
    return "" if decided == "alike" else decided


def _difference(first: Mapping[str, Any], other: Mapping[str, Any], rank: int) -> str:
    name = next(name for name in first if first[name] != other.get(name))
    return f"`{name}` is {first[name]} on rank 0 and {other.get(name)} on rank {rank}. Give every rank the same."
