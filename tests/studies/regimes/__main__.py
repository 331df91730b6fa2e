"""Draw regimes at random and compare each training with and without a monitor.

python -m tests.studies.regimes --seed 0 --count 20
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch

from tests.studies.regimes.states import STATES
from tests.studies.regimes.trainings import Regime, differences, train

CHOICES: dict[str, list[Any]] = {
    "trainer": ["lightning", "transformers", "loop"],
    "model": ["own", "torch", "encoder", "lora"],
    "precision": ["32", "bf16"],
    "accumulate": [1, 2, 3],
    "is_unequal": [False, True],
    "clips": [False, True],
    "checkpointing": ["", "", "reentrant", "other"],
    "compiler": ["", "", "", "aot_eager"],
    "dropout": [0.0, 0.1],
    "optimizers": [1, 1, 2],
    "validates": [False, True],
    "counts": [False, True],
    "has_mode": [False, True],
    "is_broken": [False, False, True],
    "every": [1, 2, 3, 5],
    "state": ["", "", *STATES],
}


def draw(generator: random.Random) -> Regime:
    while True:
        regime = Regime(**{name: generator.choice(choices) for name, choices in CHOICES.items()})
        if not regime.impossible:
            return regime


def shown(regime: Regime) -> str:
    plain = replace(Regime(), trainer=regime.trainer)
    set_apart = {one.name: getattr(regime, one.name) for one in fields(regime)}
    return ", ".join(f"{name}={value}" for name, value in set_apart.items() if value != getattr(plain, name))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=20)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    generator, failed = random.Random(arguments.seed), 0
    for trainer in CHOICES["trainer"]:  # what they import draws random numbers, and warns
        with tempfile.TemporaryDirectory() as folder:
            train(Regime(trainer), Path(folder), is_watched=False)
    for number in range(arguments.count):
        regime = draw(generator)
        with tempfile.TemporaryDirectory() as folder:
            found = differences(regime, Path(folder))
        failed += bool(found)
        print(f"{number}: {regime.trainer}: {shown(regime)}: {'differs' if found else 'bit-identical'}", flush=True)
        for line in found:
            print(f"    {line}")
    print(f"{arguments.count - failed} of {arguments.count} trainings are bit-identical.")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
