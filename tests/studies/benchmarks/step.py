"""What a step costs with a reading, and the one after it, against a step that nobody watches.

    python -m tests.studies.benchmarks.step [--device cuda] [--sizes gpt2 gpt2-512 gpt2-16 small] [--backend aot_eager]

Watched as by default: all rules, history, TensorBoard. On a CPU times are of the training's own thread, and in the last
three columns of all threads: weights and outputs of heads are measured beside the step after the reading, by another
one. The share of a training is of all threads, at the default cadence of 50 steps. On a GPU all is of the clock.
"""

from __future__ import annotations

import tempfile
import time
from functools import partial
from pathlib import Path

import torch

from hdi_callback import watch_heads
from tests.studies.benchmarks.gpt import Training
from tests.studies.benchmarks.timing import Ratio, arguments, ratios, table

EVERY = 50
SIZES = {  # layers, width, heads, tokens; sequences
    "gpt2": ((12, 768, 12, 1024), 1),
    "gpt2-512": ((12, 768, 12, 512), 1),
    "gpt2-16": ((12, 768, 12, 1024), 16),
    "small": ((2, 128, 4, 128), 8),
}


def cost(name: str, device: str, rounds: int, backend: str | None) -> tuple[list[Ratio], Ratio]:
    """Take steps with a reading, those after them, and steps that nobody watches, in turn; then two at a time."""
    dtype = torch.bfloat16 if device == "cuda" else None
    alone, watched = (Training(*SIZES[name], device, dtype) for _ in range(2))
    for training in (alone, watched) if backend is not None else ():
        training.model = torch.compile(training.model, backend=backend)
    with tempfile.TemporaryDirectory() as folder:
        watched.heads = watch_heads(
            watched.model, watched.optimizer, every_n_steps=2, log_dir=Path(folder), tensorboard=True
        )
        with watched.heads:
            for _ in range(4):  # finds the heads, and keeps the weights that movement is measured from
                watched.step()
            clock = time.thread_time
            own = ratios(alone.step, watched.step, watched.step, rounds=rounds, device=device, cpu_clock=clock)
            (of_all,) = ratios(partial(_two, alone), partial(_two, watched), rounds=rounds, device=device)
    return own, of_all


def _two(training: Training) -> None:
    training.step()
    training.step()


def main() -> None:
    parser = arguments(__doc__, rounds=7)
    parser.add_argument("--sizes", nargs="+", default=["gpt2", "small"], choices=SIZES)
    parser.add_argument("--backend", help="compile the model with this backend")
    options = parser.parse_args()
    rows: list[tuple[object, ...]] = [
        ("model", "a step, ms", "with a reading", "the next", "both", "a reading, ms", f"of a training, one in {EVERY}")
    ]
    for name in options.sizes:
        (layers, width, heads, length), batch = SIZES[name]
        (armed, following), both = cost(name, options.device, options.rounds, options.backend)
        alone = (both.seconds - both.added) / 2
        rows.append(
            (
                f"{layers} layers, {width} wide, {heads} heads, {batch} x {length} tokens",
                f"{1e3 * alone:.3g}", armed, following, both, f"{1e3 * both.added:.3g}",
                f"{both.added / alone / EVERY:.2%}",
            )
        )  # fmt: skip
    table(*rows)


if __name__ == "__main__":
    main()
