"""What a training step of the GPT example costs with the callback off, on and unarmed, and on and armed.

python -m tests.benchmarks.bench_step --output docs/benchmarks/step.md
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from examples.train_gpt import GPT, LitGPT
from hdi_callback import HeadDiversityMonitor
from tests.benchmarks.ratios import measure, table, write


class Steps:
    """Training steps of one model, with a monitor on it or not."""

    def __init__(self, *, device: str, width: int, layers: int, heads: int, batch: int, monitored: bool) -> None:
        torch.manual_seed(0)
        self.lit = LitGPT(GPT(layers=layers, heads=heads, width=width), steps=1000).to(device)
        self.optimizer = torch.optim.AdamW(self.lit.parameters(), lr=1e-4)
        self.window = torch.randint(256, (batch, 129), device=device)
        self.monitor = HeadDiversityMonitor(self.lit) if monitored else None

    def __call__(self, *, armed: bool = False, read: bool = False) -> None:
        if armed:
            self.monitor.arm()
        loss = self.lit.loss(self.window)
        loss.backward()
        if read:
            self.monitor.measure(step=0).record()
        self.optimizer.step()
        self.optimizer.zero_grad()


def report(sizes: dict[str, int], rounds: int, device: str) -> list[str]:
    off = Steps(device=device, monitored=False, **sizes)
    on = Steps(device=device, monitored=True, **sizes)
    ratios = measure(
        {
            "callback off": off,
            "on, unarmed": on,
            "on, armed: capture and reading": lambda: on(armed=True, read=True),
        },
        rounds=rounds,
        device=device,
    )
    armed, unarmed = ratios[2].median, ratios[1].median
    share = 100 * ((armed - 1) / 50 + (unarmed - 1) * 49 / 50)
    described = ", ".join(f"{key} {value}" for key, value in sizes.items())
    return [
        "Made by `python -m tests.benchmarks.bench_step --output docs/benchmarks/step.md`",
        f"with {rounds} rounds, {torch.get_num_threads()} CPU threads, torch {torch.__version__.split('+')[0]}, "
        f"on {torch.cuda.get_device_name() if device == 'cuda' else 'a CPU'}. Model: {described}.",
        "",
        *table("a training step of the GPT example", ratios, absolute=device == "cuda"),
        f"At one reading in 50 steps that is {share:+.1f} % of the time of a step, as the medians stand.",
        "",
    ]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--small", action="store_true", help="a model that takes a second, to try the command")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(argv)
    sizes = {"layers": 4, "heads": 6, "width": 192, "batch": 16}
    if options.small:
        sizes = {"layers": 1, "heads": 2, "width": 16, "batch": 2}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    write(report(sizes, options.rounds, device), options.output)


if __name__ == "__main__":
    main()
