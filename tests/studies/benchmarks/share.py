"""The share of a training's time that the closing line names, against the same steps of a model that nobody watches.

    python -m tests.studies.benchmarks.share [--rounds 3]

Gradients are accumulated over two batches, the model is evaluated every 20 steps, and the first step, which finds the
heads and is left out, waits for a second. The clock of the watched training stands still while the other one runs.
"""

from __future__ import annotations

import re
import tempfile
import time
from contextlib import nullcontext, redirect_stdout
from io import StringIO
from pathlib import Path
from unittest.mock import patch

import torch

from hdi_callback import watch_heads
from hdi_callback.session import cost, session
from tests.studies.benchmarks.gpt import Training
from tests.studies.benchmarks.timing import arguments, table

STEPS, EVERY, BATCHES, EVALUATED = 120, 4, 2, 20


class Clock:
    """A clock that runs within its context alone."""

    def __init__(self) -> None:
        self.before, self.start = 0.0, None

    def __enter__(self) -> None:
        self.start = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        self.before, self.start = self(), None

    def __call__(self) -> float:
        return self.before + (0.0 if self.start is None else time.perf_counter() - self.start)


def step(training: Training, number: int) -> None:
    """Take one optimizer step of several batches, and evaluate after some."""
    for batch in range(BATCHES):
        with training.heads.step() if training.heads is not None else nullcontext():
            loss = training.model(training.batch)
            time.sleep(1.0 if number == batch == 0 else 0.0)
            loss.backward()
            if batch == BATCHES - 1:
                training.optimizer.step()
                training.optimizer.zero_grad()
    if number % EVALUATED == EVALUATED - 1:
        with torch.no_grad():
            for _ in range(EVALUATED):
                training.model.eval()(training.batch)
        training.model.train()


def shares() -> tuple[str, str]:
    """Return the share that is named, and the one by which the watched training takes longer."""
    alone, watched = (Training((2, 128, 4, 128), 4, "cpu", None) for _ in range(2))
    clocks, said = (Clock(), Clock()), StringIO()
    with (
        tempfile.TemporaryDirectory() as folder,
        redirect_stdout(said),
        patch.object(cost, "perf_counter", clocks[1]),
        patch.object(session, "perf_counter", clocks[1]),
    ):
        watched.heads = watch_heads(
            watched.model, watched.optimizer, every_n_steps=EVERY, log_dir=Path(folder), tensorboard=True
        )
        first = 0.0
        for number in range(STEPS):
            for training, clock in list(zip((alone, watched), clocks))[:: 1 - 2 * (number % 2)]:
                with clock:
                    step(training, number)
            first = clocks[1]() - clocks[0]() if number == 0 else first
        more = clocks[1]() - clocks[0]() - first
        with clocks[1]:
            watched.heads.finish()
    named = re.findall(r"Readings took ([\d.]+) ?%", said.getvalue())[-1]
    return f"{named} %", f"{100 * more / clocks[1]():.2f} %"


def main() -> None:
    options = arguments(__doc__, rounds=3).parse_args()
    table(("named", "by a run that nobody watches"), *(shares() for _ in range(options.rounds)))


if __name__ == "__main__":
    main()
