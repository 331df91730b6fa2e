"""What a training step of the GPT example costs with the callback off, on and unarmed, and on and armed.

python -m tests.benchmarks.bench_step --output docs/benchmarks/step.md

With `--gpt2` it is a decoder of the shape of GPT-2 small, of bytes, on 1,024 tokens, armed against unarmed alone.
Without the large vocabulary a step takes less, so that the ratio is an upper bound. With `--pairs FILE` the seconds of
every pair of steps are kept there, and a run that was stopped goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

from examples.train_gpt import GPT, LitGPT
from hdi_callback import HeadDiversityMonitor
from hdi_callback.monitoring.session.settings import Settings
from tests.benchmarks.ratios import Ratio, measure, outside, table, write


class Steps:
    """Training steps of one model, with a monitor on it or not."""

    def __init__(
        self, *, device: str, width: int, layers: int, heads: int, batch: int, monitored: bool, length: int = 128
    ) -> None:
        torch.manual_seed(0)
        self.lit = LitGPT(GPT(layers=layers, heads=heads, width=width, length=length), steps=1000).to(device)
        self.optimizer = torch.optim.AdamW(self.lit.parameters(), lr=1e-4)
        self.window = torch.randint(256, (batch, length + 1), device=device)
        # As a callback does with its defaults: with what the default rules look at.
        self.monitor = HeadDiversityMonitor(self.lit, **Settings().measuring) if monitored else None
        self.taken = 0

    def __call__(self, *, armed: bool = False, read: bool = False) -> None:
        if armed:
            self.monitor.arm()
        loss = self.lit.loss(self.window)
        loss.backward()
        if read:
            self.monitor.measure(step=self.taken).record()  # a step of its own each, or none is compared with the last
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.taken += 1


def in_pairs(on: Steps, rounds: int, path: Path) -> list[Ratio]:
    """Take unarmed and armed steps in turn, each first every other time, and keep their CPU seconds in a file."""
    known = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    if len(known) < rounds:
        on()
        on(armed=True, read=True)  # finds what the heads are, once
    for turn in range(len(known), rounds):
        seconds = {}
        for armed in (False, True) if turn % 2 else (True, False):
            start = time.process_time()
            on(armed=armed, read=armed)
            seconds["armed" if armed else "unarmed"] = time.process_time() - start
        known.append(seconds)
        with path.open("a") as file:
            file.write(json.dumps(seconds) + "\n")
    ratios = []
    for name, key in (("on, unarmed", "unarmed"), ("on, armed: capture and reading", "armed")):
        each = sorted(one[key] / one["unarmed"] for one in known)
        skip = outside(len(each))
        seconds = statistics.median(one[key] for one in known)
        ratios.append(Ratio(name, statistics.median(each), each[skip], each[-1 - skip], seconds))
    return ratios


def report(
    sizes: dict[str, int], rounds: int, device: str, *, armed_alone: bool, command: str, pairs: Path | None = None
) -> list[str]:
    on = Steps(device=device, monitored=True, **sizes)
    armed_step = {"on, armed: capture and reading": lambda: on(armed=True, read=True)}
    if armed_alone:
        work: dict[str, Any] = {"on, unarmed": on, **armed_step}
    else:
        work = {"callback off": Steps(device=device, monitored=False, **sizes), "on, unarmed": on, **armed_step}
    ratios = in_pairs(on, rounds, pairs) if pairs else measure(work, rounds=rounds, device=device)
    armed, unarmed = ratios[-1], ratios[-2]
    least, most = (
        100 * ((one - 1) / 50 + (other - 1) * 49 / 50)
        for one, other in ((armed.low, unarmed.low), (armed.high, unarmed.high))
    )
    unknown = ", which is too wide to tell the cost from none" if least < 0 < most else ""
    described = ", ".join(f"{key} {value}" for key, value in sizes.items())
    return [
        f"Made by `{command}`",
        f"with {rounds} rounds, {torch.get_num_threads()} CPU threads, torch {torch.__version__.split('+')[0]}, "
        f"on {torch.cuda.get_device_name() if device == 'cuda' else 'a CPU'}. Model: {described}. "
        f"{'Time on the clock' if device == 'cuda' else 'CPU time'}, the default curves and rules.",
        "",
        *table("a training step of the GPT example", ratios, absolute=device == "cuda"),
        f"At one reading in 50 steps that is {least:+.1f} % to {most:+.1f} % of the time of a step{unknown}.",
        "",
    ]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--small", action="store_true", help="a model that takes a second, to try the command")
    parser.add_argument("--gpt2", action="store_true", help="a model of the shape of GPT-2 small, on 1,024 tokens")
    parser.add_argument("--pairs", type=Path, help="with --gpt2: where to keep the seconds of every pair of steps")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(argv)
    sizes = {"layers": 4, "heads": 6, "width": 192, "batch": 16}
    if options.small:
        sizes = {"layers": 1, "heads": 2, "width": 16, "batch": 2}
    if options.gpt2:
        sizes = {"layers": 12, "heads": 12, "width": 768, "batch": 1, "length": 1024}
    given = " ".join(sys.argv[1:] if argv is None else argv)
    command = f"python -m tests.benchmarks.bench_step {given}".strip()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    pairs = options.pairs if options.gpt2 else None
    lines = report(sizes, options.rounds, device, armed_alone=options.gpt2, command=command, pairs=pairs)
    write(lines, options.output)


if __name__ == "__main__":
    main()
