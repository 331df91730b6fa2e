"""Work against a baseline: both in turn in one process, as ratios, since machines differ and are shared."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Ratio:
    """How long a piece of work takes against the baseline of the same round: median, lowest, highest."""

    median: float
    low: float
    high: float
    seconds: float  # median, of the work
    added: float  # median, beyond the baseline

    def __str__(self) -> str:
        return f"{self.median:.3g} ({self.low:.3g} to {self.high:.3g})"


def arguments(description: str | None, *, rounds: int) -> argparse.ArgumentParser:
    """What all commands take."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=rounds)
    torch.set_num_threads(1)
    return parser


def seconds(work: Callable[[], object], device: str, cpu_clock: Callable[[], float] = time.process_time) -> float:
    """Time of the process, or another one, on a CPU, which others may share; of the clock on a GPU, waiting for it."""
    if device == "cpu":
        start = cpu_clock()
        work()
        return cpu_clock() - start
    torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def ratios(
    baseline: Callable[[], object],
    *works: Callable[[], object],
    rounds: int,
    device: str,
    cpu_clock: Callable[[], float] = time.process_time,
) -> list[Ratio]:
    """Run all in turn, in alternating order, after a warm-up round.

    Works run in the order in which they are given, before the baseline or after it.
    """
    found: list[list[tuple[float, float]]] = [[] for _ in works]
    for turn in range(rounds + 1):
        before = seconds(baseline, device, cpu_clock) if turn % 2 else None
        times = [seconds(work, device, cpu_clock) for work in works]
        own = seconds(baseline, device, cpu_clock) if before is None else before
        for pairs, one in zip(found, times) if turn else ():
            pairs.append((one, own))
    return [_ratio(pairs) for pairs in found]


def _ratio(pairs: Sequence[tuple[float, float]]) -> Ratio:
    each = [one / own for one, own in pairs]
    return Ratio(
        statistics.median(each),
        min(each),
        max(each),
        statistics.median(one for one, _ in pairs),
        statistics.median(one - own for one, own in pairs),
    )


def table(*rows: Sequence[object]) -> None:
    """Print a Markdown table; the first row is its heading."""
    for place, row in enumerate(rows):
        print(f"| {' | '.join(map(str, row))} |")
        if place == 0:
            print("|---" * len(row) + "|")
