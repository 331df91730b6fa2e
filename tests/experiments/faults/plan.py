"""Which trainings run: those that are looked at while limits are chosen, and those that confirm them. Fixed before."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Literal, get_args

from tests.experiments.faults.faults import FAULTS
from tests.experiments.faults.trainings import BASES, LONG, PROVOKED

HEALTHY = "healthy"
STEPS, EVERY = 100, 5
CONFIRMING, AGAIN, THIRD, FRESH = 50_000, 170_000, 290_000, 410_000
"""The first seeds of confirming runs: of those laid down first, and of those made again each time rules had changed."""
FAULTS_EVERY = 5
"""Rounds of healthy runs from one round of faults to the next."""
Part = Literal["looked-at", "confirming", "again", "third", "fresh"]
PARTS: tuple[Part, ...] = get_args(Part)
FIRST_SEEDS: dict[Part, int] = {
    "looked-at": 0,
    "confirming": CONFIRMING,
    "again": AGAIN,
    "third": THIRD,
    "fresh": FRESH,
}
HEALTHY_EACH: dict[Part, int] = {"looked-at": 2, "confirming": 19, "again": 19, "third": 19, "fresh": 19}
ROUNDS: dict[Part, int] = {"looked-at": 1, "confirming": 2, "again": 2, "third": 3, "fresh": 3}


@dataclass(frozen=True)
class Job:
    """One run."""

    kind: str
    base: str
    seed: int

    @property
    def name(self) -> str:
        return "".join(c if c.isalnum() else "-" for c in f"{self.kind} on {self.base} {self.seed}")


def plan(part: Part, *, rounds: int | None = None, healthy: int | None = None) -> list[Job]:
    """Lay down every run, in the order in which they are made: whole rounds, so that an early end leaves no kind out.

    Args:
        part: the seeds of the parts have nothing in common. Limits are chosen on healthy looked-at runs, and rules
            on looked-at runs of all kinds. Rules were changed after 180 of the confirming runs, and once more after all
            394; then came the part "again". After it rules were changed a third time; then came the part "third". After
            it attention that sharpens or flattens at once, heads that narrow and scores that are large from the start
            were added, and two rules left the default ones: all these parts are looked at since, and the part "fresh",
            on seeds that nothing had used, confirms the rules as they ship.
        rounds: how many confirming runs of each fault, 2 or 3 by default; one is looked at.
        healthy: how many confirming healthy runs of each kind of training, of the long ones a tenth as many; two are
            looked at. 19 by default.
    """
    first = FIRST_SEEDS[part]
    rounds = ROUNDS[part] if rounds is None or part == "looked-at" else rounds
    each = HEALTHY_EACH[part] if healthy is None or part == "looked-at" else healthy
    jobs = []
    for round_ in range(max(FAULTS_EVERY * (rounds - 1) + 1, each)):
        seed = first + 100 * round_
        if round_ < each:
            jobs += [Job(HEALTHY, base, seed + place) for place, base in enumerate(BASES)]
            is_long_due = part == "looked-at" or round_ % 10 == 3
            jobs += [
                Job(HEALTHY, base, seed + 20 + place)
                for place, base in enumerate(PROVOKED)
                if is_long_due or base not in LONG
            ]
        if round_ % FAULTS_EVERY == 0 and round_ // FAULTS_EVERY < rounds:
            jobs += [Job(kind, _base_of(kind, seed), seed + 40 + place) for place, kind in enumerate(FAULTS)]
    return jobs


def is_possible(kind: str, base: str) -> bool:
    """Whether a fault can be tried on a training; keys that merge, say, need two key heads."""
    return kind != HEALTHY and base in BASES and any(word in base for word in FAULTS[kind].bases)


def _base_of(kind: str, seed: int) -> str:
    """Give a fault the trainings that it can be tried on by turns."""
    possible = [name for name in BASES if is_possible(kind, name)]
    turn = seed // 100 // FAULTS_EVERY + zlib.crc32(kind.encode())
    return possible[turn % len(possible)]
