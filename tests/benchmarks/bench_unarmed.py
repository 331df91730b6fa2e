"""What a step costs between readings, where nothing is measured: in microseconds, and against a real step.

    python -m tests.benchmarks.bench_unarmed --output docs/benchmarks/unarmed.md

What the callback does there is the same whatever the sizes of the tensors. So the added time is measured on a model of
the same layers with tensors of almost no size, forwards alone, with and without it in turn, and is set against a step
of a model of ordinary size.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hdi_callback import watch_heads
from tests.benchmarks.differences import Added, added
from tests.benchmarks.ratios import write
from tests.models import Block


class Decoder(nn.Module):
    """Blocks of attention and of two linear maps."""

    def __init__(self, layers: int, width: int, heads: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.maps = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(layers)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block, wide in zip(self.blocks, self.maps):
            x = block(x)
            x = x + wide(x)
        return x


class Steps:
    """Training steps of a model, with the callback on it or not."""

    def __init__(self, *, layers: int, width: int, heads: int, tokens: int, is_watched: bool) -> None:
        torch.manual_seed(0)
        model = Decoder(layers, width, heads)
        self.model, self.x = model, torch.randn(1, tokens, width)
        self.optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
        self.session: Any = None
        if is_watched:
            # Checking the heads belongs to the first reading, and takes long for many layers.
            self.session = watch_heads(
                model, self.optimizer, every_n_steps=10**9, history=False, verbose=False, check_heads=False
            )
            for _ in range(3):  # the first step is read, and its numbers arrive
                with self.session.step():
                    self.step()

    def forward(self) -> None:
        if self.session is None:
            self.model(self.x)
        else:
            with self.session.step():
                self.model(self.x)

    def step(self) -> None:
        self.model(self.x).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def cost_of(layers: int, pairs: int) -> Added:
    tiny = {"layers": layers, "width": 8, "heads": 2, "tokens": 2}
    watched, plain = (Steps(**tiny, is_watched=is_watched) for is_watched in (True, False))
    return added(plain.forward, watched.forward, pairs=pairs)


def real_step(layers: int, sizes: dict[str, int]) -> float:
    step = Steps(layers=layers, **sizes, is_watched=False)
    seconds = []
    for _ in range(4):
        start = time.process_time()
        step.step()
        seconds.append(time.process_time() - start)
    return statistics.median(seconds[1:])


def report(depths: list[int], sizes: dict[str, int], pairs: int, command: str) -> list[str]:
    lines = [
        f"Made by `{command}`",
        f"with {pairs} pairs, {torch.get_num_threads()} CPU threads, torch "
        f"{torch.__version__.split('+')[0]}, in CPU time. The step that it is set against: "
        f"{', '.join(f'{name} {value}' for name, value in sizes.items())}, float32.",
        "",
        "| layers | added to a step, microseconds | 95 % interval | a step, milliseconds | share of it | at most |",
        "|---|---|---|---|---|---|",
    ]
    for layers in depths:
        cost, step = cost_of(layers, pairs), real_step(layers, sizes)
        lines.append(
            f"| {layers} | {cost.median * 1e6:.1f} | {cost.low * 1e6:.1f} - {cost.high * 1e6:.1f} | {step * 1e3:.0f} | "
            f"{cost.median / step:.3%} | {cost.high / step:.3%} |"
        )
    return [*lines, ""]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=200, help="pairs of a forward without and one with the callback")
    parser.add_argument("--layers", type=int, nargs="+", default=[4, 96])
    parser.add_argument("--small", action="store_true", help="models that take a second, to try the command")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    sizes = {"width": 192, "heads": 6, "tokens": 1024}
    depths = options.layers
    if options.small:
        sizes, depths = {"width": 16, "heads": 2, "tokens": 16}, [1, 2]
    arguments = " ".join(sys.argv[1:] if argv is None else argv)
    command = f"python -m tests.benchmarks.bench_unarmed {arguments}".strip()
    write(report(depths, sizes, options.rounds, command), options.output)


if __name__ == "__main__":
    main()
