"""What a step costs with a reading, and without one between readings, against a step that nobody watches.

    python -m tests.studies.benchmarks.step [--device cuda] [--sizes gpt2 gpt2-512 gpt2-16 small] [--backend aot_eager]

Watched as by default: all rules, history, TensorBoard. The share of a training is at the default cadence of 50 steps.
"""

from __future__ import annotations

import tempfile
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


def cost(name: str, device: str, rounds: int, backend: str | None) -> tuple[Ratio, Ratio]:
    """Take steps with a reading, steps without one, and steps that are not watched, in turn."""
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
            armed, unarmed = ratios(alone.step, watched.step, watched.step, rounds=rounds, device=device)
    return armed, unarmed


def main() -> None:
    parser = arguments(__doc__, rounds=7)
    parser.add_argument("--sizes", nargs="+", default=["gpt2", "small"], choices=SIZES)
    parser.add_argument("--backend", help="compile the model with this backend")
    options = parser.parse_args()
    rows: list[tuple[object, ...]] = [
        ("model", "a step, ms", "with a reading", "a reading, ms", "without one", f"of a training, one in {EVERY}")
    ]
    for name in options.sizes:
        (layers, width, heads, length), batch = SIZES[name]
        armed, unarmed = cost(name, options.device, options.rounds, options.backend)
        alone = armed.seconds - armed.added
        share = (armed.added / alone) / EVERY
        rows.append(
            (
                f"{layers} layers, {width} wide, {heads} heads, {batch} x {length} tokens",
                f"{1e3 * alone:.3g}", armed, f"{1e3 * armed.added:.3g}", unarmed, f"{share:.2%}",
            )
        )  # fmt: skip
    table(*rows)


if __name__ == "__main__":
    main()
