"""Which trainings run: those that are looked at while limits are chosen, and those that confirm them. Fixed before."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Literal, get_args

from tests.experiments.faults.faults import FAULTS
from tests.experiments.faults.trainings import BASES, PROVOKED

HEALTHY = "healthy"
STEPS, EVERY = 100, 5
Part = Literal["looked-at", "confirming"]
PARTS: tuple[Part, ...] = get_args(Part)


@dataclass(frozen=True)
class Job:
    """One run."""

    kind: str
    base: str
    seed: int

    @property
    def name(self) -> str:
        return "".join(c if c.isalnum() else "-" for c in f"{self.kind} on {self.base} {self.seed}")


def plan(part: Part, *, rounds: int = 3, healthy: int = 6) -> list[Job]:
    """Lay down every run, in the order in which they are made: whole rounds, so that an early end leaves no kind out.

    Args:
        part: the seeds of the two parts have nothing in common. Limits are chosen on healthy looked-at runs, and rules
            on looked-at runs of all kinds; nothing is changed once the first confirming run has been made.
        rounds: how many confirming runs of each fault; one is looked at.
        healthy: how many confirming healthy runs of each kind of training; three are looked at.
    """
    first = {"looked-at": 0, "confirming": 10_000}[part]
    rounds, each = {"looked-at": (1, 3), "confirming": (rounds, healthy)}[part]
    jobs = []
    for round_ in range(max(rounds, each)):
        seed = first + 100 * round_
        if round_ < each:
            jobs += [Job(HEALTHY, base, seed + place) for place, base in enumerate(BASES)]
        if round_ < each // 3:
            jobs += [Job(HEALTHY, base, seed + 20 + place) for place, base in enumerate(PROVOKED)]
        if round_ < rounds:
            jobs += [Job(kind, _base_of(kind, seed), seed + 40 + place) for place, kind in enumerate(FAULTS)]
    return jobs


def _base_of(kind: str, seed: int) -> str:
    """Give a fault the trainings that it can be tried on by turns."""
    possible = [name for name in BASES if any(word in name for word in FAULTS[kind].bases)]
    turn = seed // 100 + zlib.crc32(kind.encode())
    return possible[turn % len(possible)]
