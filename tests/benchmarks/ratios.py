"""Times of several pieces of work in turn, as ratios to the first: machines are shared, so only ratios are quoted.

On a CPU it is the time of the process that counts, not that of the clock, which others share.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True)
class Ratio:
    """How long a piece of work takes against the baseline of the same round.

    `low` and `high` enclose the median ratio of further rounds like these with 95 % confidence, by order statistics;
    with fewer than six rounds they are the lowest and the highest, and the confidence is less.
    """

    name: str
    median: float
    low: float
    high: float
    seconds: float

    def row(self, *, absolute: bool) -> str:
        cells = f"| {self.name} | {self.median:.2f} | {self.low:.2f} - {self.high:.2f} |"
        return f"{cells} {self.seconds * 1e3:.3f} |" if absolute else cells


def measure(work: dict[str, Callable[[], object]], *, rounds: int, device: str = "cpu") -> list[Ratio]:
    """Run all pieces of work in turn, `rounds` times after one warm-up; the first is the baseline."""
    times: dict[str, list[float]] = {name: [] for name in work}
    clock = time.perf_counter if device == "cuda" else time.process_time
    for turn in range(rounds + 1):
        for name, run in work.items():
            if device == "cuda":
                torch.cuda.synchronize()
            start = clock()
            run()
            if device == "cuda":
                torch.cuda.synchronize()
            elapsed = clock() - start
            if turn > 0:
                times[name].append(elapsed)
    baseline = next(iter(times.values()))
    ratios = []
    for name, seconds in times.items():
        each = sorted(ours / theirs for ours, theirs in zip(seconds, baseline))
        skip = outside(len(each))
        low, high = each[skip], each[-1 - skip]
        ratios.append(Ratio(name, statistics.median(each), low, high, statistics.median(seconds)))
    return ratios


def outside(rounds: int) -> int:
    """How many values on each side may be left out of an interval that holds the median with 95 % confidence."""
    tail, skip = 0.5**rounds, 0
    while tail + math.comb(rounds, skip + 1) * 0.5**rounds <= 0.025:
        skip += 1
        tail += math.comb(rounds, skip) * 0.5**rounds
    return skip


def table(title: str, ratios: list[Ratio], *, absolute: bool) -> list[str]:
    """A Markdown table."""
    heading = f"| {title} | median ratio | 95 % interval |" + (" milliseconds |" if absolute else "")
    rule = "|---|---|---|" + ("---|" if absolute else "")
    return [heading, rule, *(ratio.row(absolute=absolute) for ratio in ratios), ""]


def write(lines: list[str], path: Path | None) -> None:
    """Print the report, and keep it."""
    print("\n".join(lines))
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(lines))
