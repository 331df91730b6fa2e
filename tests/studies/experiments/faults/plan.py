"""Which trainings run: kinds of faults x trainings x seeds, laid down before the first of them."""

from __future__ import annotations

import random
import zlib
from dataclasses import dataclass
from itertools import zip_longest

from tests.studies.experiments.faults.kinds import FAULTS
from tests.studies.experiments.faults.trainings import BASES, LONG, PROVOKED

HEALTHY = "healthy"
FAULTS_EVERY = 5
"""Rounds of healthy trainings from one round of faults to the next."""


@dataclass(frozen=True)
class Part:
    """Rounds of trainings, on seeds of their own."""

    first_seed: int
    rounds: int
    healthy: int


PARTS = (Part(0, 1, 2), Part(50_000, 2, 19), Part(170_000, 2, 19), Part(290_000, 3, 19), Part(410_000, 3, 19))
HELD_OUT = 410_000
"""First seed of the part that nothing had used when the rules were written and their limits chosen."""


@dataclass(frozen=True)
class Job:
    """One training."""

    kind: str
    base: str
    seed: int

    @property
    def is_healthy(self) -> bool:
        return self.kind == HEALTHY


def plan() -> list[Job]:
    """Two faulty trainings and a healthy one by turns, in a drawn order, so that the first are a fair sample of all."""
    jobs = [job for part in PARTS for job in _of(part)]
    draw = random.Random(0)
    faulty = draw.sample(chosen := [job for job in jobs if not job.is_healthy], len(chosen))
    healthy = draw.sample(chosen := [job for job in jobs if job.is_healthy], len(chosen))
    by_turns = zip_longest(faulty[::2], faulty[1::2], healthy)
    return [job for turn in by_turns for job in turn if job is not None]


def _of(part: Part) -> list[Job]:
    jobs = []
    for round_ in range(max(part.healthy, FAULTS_EVERY * (part.rounds - 1) + 1)):
        seed = part.first_seed + 100 * round_
        if round_ < part.healthy:
            jobs += [Job(HEALTHY, base, seed + place) for place, base in enumerate(BASES)]
            is_long_due = part.first_seed == 0 or round_ % 10 == 3
            jobs += [
                Job(HEALTHY, base, seed + 20 + place)
                for place, base in enumerate(PROVOKED)
                if is_long_due or base not in LONG
            ]
        if round_ % FAULTS_EVERY == 0 and round_ // FAULTS_EVERY < part.rounds:
            jobs += [Job(kind, _base_of(kind, seed), seed + 40 + place) for place, kind in enumerate(FAULTS)]
    return jobs


def _base_of(kind: str, seed: int) -> str:
    """Give a fault the trainings that it can be tried on by turns."""
    possible = [name for name in BASES if any(word in name for word in FAULTS[kind].bases)]
    return possible[(seed // 100 // FAULTS_EVERY + zlib.crc32(kind.encode())) % len(possible)]
