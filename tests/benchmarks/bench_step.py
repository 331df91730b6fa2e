"""What a training step of the GPT example costs with the callback off, on and unarmed, and on and armed.

python -m tests.benchmarks.bench_step --output docs/benchmarks/step.md

With `--gpt2` it is a decoder of the shape of GPT-2 small on 1,024 tokens, and every second step is armed, with the
default curves and rules, the history in a folder of its own, and a TensorBoard logger; with `--bare` with the default
curves alone. It has GPT-2's vocabulary of 50,257 tokens, whose embedding is its last layer too. With `--vocabulary 256`
it reads bytes, and its step takes less. Its layers are wide, so that what rules alone look at is measured of three of
the 12 at each reading, and each armed step costs nearly the same. With `--pairs FILE` the seconds of every pair of
steps are kept there, and a run that was stopped goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from examples.train_gpt import GPT, VOCABULARY, LitGPT
from hdi_callback import HeadDiversityMonitor, watch_heads
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


class WatchedSteps:
    """Training steps as a user has them, of which every second one is read, judged, kept and logged."""

    def __init__(
        self,
        folder: Path,
        *,
        device: str,
        width: int,
        layers: int,
        heads: int,
        batch: int,
        length: int,
        vocabulary: int,
        is_bare: bool = False,
    ) -> None:
        torch.manual_seed(0)
        model = GPT(layers=layers, heads=heads, width=width, length=length)
        if vocabulary != VOCABULARY:  # one weight for both, as in GPT-2
            model.bytes, model.head = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary, bias=False)
            model.head.weight = nn.Parameter(nn.init.normal_(model.bytes.weight, std=0.02))
            model.bytes.weight = model.head.weight
        self.lit = LitGPT(model, steps=1000).to(device)
        self.optimizer = torch.optim.AdamW(self.lit.parameters(), lr=1e-4)
        self.window = torch.randint(vocabulary, (batch, length + 1), device=device)
        options: dict[str, Any] = {"log_dir": folder, "tensorboard": True}
        if is_bare:
            options = {"alerts": None, "history": False, "tensorboard": False}
        self.heads = watch_heads(self.lit, self.optimizer, every_n_steps=2, verbose=False, **options)

    def __call__(self) -> float:
        """Make a step.

        Returns:
            Its CPU seconds.
        """
        start = time.process_time()
        with self.heads.step():
            self.lit.loss(self.window).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        return time.process_time() - start


def in_pairs(sizes: dict[str, int], rounds: int, device: str, path: Path | None, *, is_bare: bool) -> list[Ratio]:
    """Take armed and unarmed steps in turn, each armed one against its two neighbours, and keep their CPU seconds."""
    known = [json.loads(line) for line in path.read_text().splitlines()] if path and path.exists() else []
    if len(known) < rounds:
        with tempfile.TemporaryDirectory() as folder:
            steps = WatchedSteps(Path(folder), device=device, is_bare=is_bare, **sizes)
            for _ in range(2):  # finds what the heads are, once, and keeps the weights that movement is measured from
                steps()
                before = steps()
            for _ in range(len(known), rounds):
                armed, after = steps(), steps()
                known.append({"armed": armed, "unarmed": (before + after) / 2})
                before = after
                if path:
                    with path.open("a") as file:
                        file.write(json.dumps(known[-1]) + "\n")
            steps.heads.close()
    ratios = []
    what = "reading" if is_bare else "reading, rules, history and logger"
    for name, key in (("on, unarmed", "unarmed"), (f"on, armed: {what}", "armed")):
        each = sorted(one[key] / one["unarmed"] for one in known)
        skip = outside(len(each))
        seconds = statistics.median(one[key] for one in known)
        ratios.append(Ratio(name, statistics.median(each), each[skip], each[-1 - skip], seconds))
    return ratios


def report(
    sizes: dict[str, int],
    rounds: int,
    device: str,
    *,
    armed_alone: bool,
    command: str,
    pairs: Path | None = None,
    is_bare: bool = False,
) -> list[str]:
    if armed_alone:
        ratios = in_pairs(sizes, rounds, device, pairs, is_bare=is_bare)
    else:
        on = Steps(device=device, monitored=True, **sizes)
        work: dict[str, Any] = {
            "callback off": Steps(device=device, monitored=False, **sizes),
            "on, unarmed": on,
            "on, armed: capture and reading": lambda: on(armed=True, read=True),
        }
        ratios = measure(work, rounds=rounds, device=device)
    armed, unarmed = ratios[-1], ratios[-2]
    least, most = (
        100 * ((one - 1) / 50 + (other - 1) * 49 / 50)
        for one, other in ((armed.low, unarmed.low), (armed.high, unarmed.high))
    )
    unknown = ", which is too wide to tell the cost from none" if least < 0 < most else ""
    beside = "" if is_bare else " and rules, history and TensorBoard" if armed_alone else " and rules"
    described = ", ".join(f"{key} {value}" for key, value in sizes.items())
    return [
        f"Made by `{command}`",
        f"with {rounds} rounds, {torch.get_num_threads()} CPU threads, torch {torch.__version__.split('+')[0]}, "
        f"on {torch.cuda.get_device_name() if device == 'cuda' else 'a CPU'}. Model: {described}. "
        f"{'Time on the clock' if device == 'cuda' and not armed_alone else 'CPU time'}, the default curves{beside}.",
        "",
        *table("a training step of the GPT example", ratios, absolute=device == "cuda" or armed_alone),
        f"At one reading in 50 steps that is {least:+.1f} % to {most:+.1f} % of the time of a step{unknown}.",
        "",
    ]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--small", action="store_true", help="a model that takes a second, to try the command")
    parser.add_argument("--gpt2", action="store_true", help="a model of the shape of GPT-2 small, on 1,024 tokens")
    parser.add_argument("--layers", type=int, default=12, help="with --gpt2: how many of its layers; all cost the same")
    parser.add_argument("--vocabulary", type=int, default=50257, help="with --gpt2: how many tokens it knows")
    parser.add_argument("--bare", action="store_true", help="with --gpt2: without rules, history and logger")
    parser.add_argument("--pairs", type=Path, help="with --gpt2: where to keep the seconds of every pair of steps")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(argv)
    sizes = {"layers": 4, "heads": 6, "width": 192, "batch": 16}
    if options.small:
        sizes = {"layers": 1, "heads": 2, "width": 16, "batch": 2, "length": 128}
    if options.gpt2 and not options.small:
        sizes = {"layers": options.layers, "heads": 12, "width": 768, "batch": 1, "length": 1024}
    if options.gpt2:
        sizes["vocabulary"] = options.vocabulary
    arguments = " ".join(sys.argv[1:] if argv is None else argv)
    command = f"python -m tests.benchmarks.bench_step {arguments}".strip()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    pairs = options.pairs if options.gpt2 else None
    lines = report(
        sizes, options.rounds, device, armed_alone=options.gpt2, command=command, pairs=pairs, is_bare=options.bare
    )
    write(lines, options.output)


if __name__ == "__main__":
    main()
