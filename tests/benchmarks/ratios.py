"""Times of several pieces of work in turn, as ratios to the first: machines are shared, so only ratios are quoted."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True)
class Ratio:
    """How long a piece of work takes against the baseline of the same round."""

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
    for turn in range(rounds + 1):
        for name, run in work.items():
            if device == "cuda":
                torch.cuda.synchronize()
            start = time.perf_counter()
            run()
            if device == "cuda":
                torch.cuda.synchronize()
            elapsed = time.perf_counter() - start
            if turn > 0:
                times[name].append(elapsed)
    baseline = next(iter(times.values()))
    ratios = []
    for name, seconds in times.items():
        each = [ours / theirs for ours, theirs in zip(seconds, baseline)]
        ratios.append(Ratio(name, statistics.median(each), min(each), max(each), statistics.median(seconds)))
    return ratios


def table(title: str, ratios: list[Ratio], *, absolute: bool) -> list[str]:
    """A Markdown table."""
    heading = f"| {title} | median ratio | lowest - highest |" + (" milliseconds |" if absolute else "")
    rule = "|---|---|---|" + ("---|" if absolute else "")
    return [heading, rule, *(ratio.row(absolute=absolute) for ratio in ratios), ""]


def write(lines: list[str], path: Path | None) -> None:
    """Print the report, and keep it."""
    print("\n".join(lines))
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(lines))
