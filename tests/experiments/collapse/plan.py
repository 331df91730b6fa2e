"""The runs: which are looked at while rules are tuned, and which confirm them afterwards."""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, get_args

from tests.experiments.collapse.forces import KINDS
from tests.experiments.collapse.models import Shape

HEALTHY = "healthy"
EVERY = 5  # steps between two readings


@dataclass(frozen=True)
class Spec:
    """One run, reproducible from these fields."""

    kind: str
    seed: int
    shape: Shape
    learning_rate: float
    warm_up: int
    weight_decay: float
    steps: int = 420
    batch: int = 16
    start: int = 0
    layer: int = 0

    @property
    def name(self) -> str:
        return f"{self.kind.replace(', ', '-').replace(' ', '-')}-{self.seed}"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


Part = Literal["looked-at", "confirming", "again"]
PARTS: tuple[Part, ...] = get_args(Part)


def plan(part: Part) -> list[Spec]:
    """Lay down every run. The seeds of the parts have nothing in common.

    The part "again" was made after the one limit that was changed when the confirming runs had been read, that of the
    rule "shared direction": the same kinds, in smaller batches.
    """
    first, healthy, each = {"looked-at": (0, 24, 3), "confirming": (10_000, 60, 10), "again": (30_000, 60, 10)}[part]
    specs = [draw(HEALTHY, first + number) for number in range(healthy)]
    for place, kind in enumerate(KINDS, 1):
        specs += [draw(kind, first + 100 * place + number) for number in range(each)]
    if part == "again":
        specs = [replace(spec, batch=8) for spec in specs]
    return specs


def draw(kind: str, seed: int) -> Spec:
    """Draw the model and the schedule of one run from its seed."""
    dice = random.Random(seed)
    task: Literal["text", "digits"] = "text" if seed % 2 else "digits"
    heads = dice.choice([4, 4, 8])
    width = dice.choice([48, 64, 96] if heads == 4 else [64, 96])
    layers = dice.choice([2, 2, 3])
    shape = Shape(
        task,
        layers,
        heads,
        dice.choice([heads, heads, heads // 2]) if heads == 8 else heads,
        width,
        dice.choice(["pre", "pre", "post"]),
        dice.choice(["learned", "rotary"]),
    )
    # Up to the edge of stability: 1e-2 without warm-up diverges in some of these models, and 6e-3 learns in nearly all.
    rate = dice.choice([5e-4, 1e-3, 2e-3, 4e-3, 6e-3])
    warm_up, decay = dice.choice([0, 40]), dice.choice([0.0, 0.1, 0.5])
    if kind == "high learning rate":
        rate, warm_up = dice.choice([2e-2, 4e-2, 8e-2]), 0
    start = dice.randrange(100, 160)
    return Spec(kind, seed, shape, rate, warm_up, decay, start=start, layer=dice.randrange(layers))
