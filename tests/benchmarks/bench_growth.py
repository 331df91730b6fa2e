"""How a reading grows with heads, width, layers, tokens and ranks: CPU time and memory, with fitted exponents.

    python -m tests.benchmarks.bench_growth --output docs/benchmarks/growth.md --picture docs/images/growth.png

Beside it grows the plain product of the same numbers: `K @ K.T` of each layer's keys, `O.T @ O` of its head outputs.
"""

from __future__ import annotations

import argparse
import ctypes
import math
import statistics
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import scipy.stats
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hdi_callback import HeadDiversityMonitor
from tests.benchmarks.memory import peak
from tests.benchmarks.ratios import write
from tests.regimes.ranks import RankPool

LENGTH = 64  # of a sequence; more tokens are more sequences, so that the forward grows no faster than they do


@dataclass(frozen=True)
class Sizes:
    """A model and its batch.

    Attributes:
        heads: of a layer.
        head_dim: rows of a head.
        width: features that a layer is given.
        layers: of the model.
        tokens: of a batch.
    """

    heads: int = 8
    head_dim: int = 32
    width: int = 512
    layers: int = 2
    tokens: int = 1024


GROWTH: dict[str, list[Sizes]] = {
    "heads": [Sizes(heads=value) for value in (4, 8, 16, 32)],
    "width": [Sizes(width=value) for value in (512, 1024, 2048, 4096)],
    "layers": [Sizes(layers=value) for value in (2, 4, 8, 16)],
    "tokens": [Sizes(tokens=value) for value in (1024, 2048, 4096, 8192)],
}
RANKS = (1, 2, 4)
SMALL = {name: [replace(one, width=one.width // 8, head_dim=8) for one in sizes[:3]] for name, sizes in GROWTH.items()}
OF_RANKS = Sizes(layers=8)


class Attention(nn.Module):
    """Heads of any width, whatever the width of the model."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.num_heads = sizes.heads
        inner = sizes.heads * sizes.head_dim
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(sizes.width, inner) for _ in range(3))
        self.out_proj = nn.Linear(inner, sizes.width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            project(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        return x + self.out_proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Readings:
    """A model that is read again and again."""

    def __init__(self, sizes: Sizes) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*(Attention(sizes) for _ in range(sizes.layers)))
        self.x = torch.randn(sizes.tokens // LENGTH, LENGTH, sizes.width)
        self.monitor = HeadDiversityMonitor(self.model, max_tokens=sizes.tokens)
        self.step = 0
        self.read()  # its claims are checked in the first

    def forward(self) -> None:
        with torch.no_grad():
            self.model(self.x)

    def read(self) -> float:
        """Read once: CPU seconds of the forward that is captured and of the reading."""
        start = time.process_time()
        self.monitor.arm()
        self.forward()
        self.monitor.measure(self.step).record()
        self.step += 1
        return time.process_time() - start

    def added(self, rounds: int) -> float:
        """CPU seconds that a reading adds to a forward."""
        differences = []
        for _ in range(rounds):
            with_it, start = self.read(), time.process_time()
            self.forward()
            differences.append(with_it - (time.process_time() - start))
        return statistics.median(differences)


def product_seconds(sizes: Sizes, rounds: int) -> float:
    """CPU seconds of the plain products of the same numbers."""
    inner = sizes.heads * sizes.head_dim
    keys = [torch.randn(inner, sizes.width) for _ in range(sizes.layers)]
    outputs = [torch.randn(sizes.tokens, inner) for _ in range(sizes.layers)]
    seconds = []
    for _ in range(rounds + 1):
        start = time.process_time()
        for rows, columns in zip(keys, outputs):
            rows @ rows.mT
            columns.mT @ columns
        seconds.append(time.process_time() - start)
    return statistics.median(seconds[1:])


@dataclass(frozen=True)
class Point:
    """What was measured at one size.

    Attributes:
        size: heads, width, layers, tokens or ranks.
        seconds: CPU time of a reading; of the busiest rank.
        product: that of the plain product.
        memory: bytes at the peak of a reading, beyond what was there before.
    """

    size: int
    seconds: float
    product: float
    memory: float


def measure(name: str, sizes: Sizes, rounds: int) -> Point:
    readings = Readings(sizes)
    readings.read()
    seconds = readings.added(rounds)
    memory = peak_of(readings)
    readings.monitor.close()
    return Point(getattr(sizes, name), max(seconds, 1e-6), product_seconds(sizes, rounds), memory)


def peak_of(readings: Readings) -> float:
    """Bytes that a reading takes at its peak, beyond those that the process had; NaN where the system does not tell."""
    try:
        ctypes.CDLL("libc.so.6").malloc_trim(0)  # else a reading takes what earlier work has left
        Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten
        before = peak("cpu")
        readings.read()
        return max(peak("cpu") - before, 2**16)
    except (OSError, StopIteration):
        return math.nan


def read_on_rank(rank: int, sizes: Sizes, rounds: int) -> tuple[float, float]:
    """CPU seconds and bytes of a reading on one of several ranks that hold the same model."""
    readings = Readings(sizes)
    readings.read()
    found = readings.added(rounds), peak_of(readings)
    readings.monitor.close()
    return found


def over_ranks(ranks: int, sizes: Sizes, rounds: int) -> Point:
    pool = RankPool(ranks)
    try:
        answers = [told.answer for told in pool(read_on_rank, sizes, rounds)]
    finally:
        pool.stop()
    seconds, memory = (max(values) for values in zip(*answers))
    return Point(ranks, max(seconds, 1e-6), product_seconds(sizes, rounds), memory)


def exponent(sizes: Sequence[float], values: Sequence[float]) -> tuple[float, float, float]:
    """Fit ``values ~ sizes ** exponent`` by least squares of logarithms, with its 95 % interval."""
    fit = scipy.stats.linregress([math.log(size) for size in sizes], [math.log(value) for value in values])
    reach = scipy.stats.t.ppf(0.975, len(sizes) - 2) * fit.stderr if len(sizes) > 2 else math.inf
    return fit.slope, fit.slope - reach, fit.slope + reach


def report(points: dict[str, list[Point]], rounds: int, command: str) -> list[str]:
    lines = [
        f"Made by `{command}`",
        f"with {rounds} rounds, 1 CPU thread, torch {torch.__version__.split('+')[0]}, in CPU time; "
        f"{Sizes()} but for what grows.",
        "",
        "| grows | from - to | a reading, ms | memory, MiB | exponent of time | of memory | of the plain product |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, found in points.items():
        sizes = [point.size for point in found]
        exponents = [
            "{:.2f} ({:.2f} - {:.2f})".format(*exponent(sizes, values))
            for values in (
                [point.seconds for point in found],
                [point.memory for point in found],
                [point.product for point in found],
            )
        ]
        first, last = found[0], found[-1]
        lines.append(
            f"| {name} | {first.size} - {last.size} | {first.seconds * 1e3:.1f} - {last.seconds * 1e3:.1f} | "
            f"{first.memory / 2**20:.1f} - {last.memory / 2**20:.1f} | {' | '.join(exponents)} |"
        )
    return [*lines, ""]


def draw(points: dict[str, list[Point]], path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, places = plt.subplots(1, len(points), figsize=(3 * len(points), 3), constrained_layout=True)
    for place, (name, found) in zip(places, points.items()):
        sizes = [point.size for point in found]
        place.loglog(sizes, [point.seconds * 1e3 for point in found], "o-", label="reading, CPU ms")
        place.loglog(sizes, [point.product * 1e3 for point in found], "s--", label="plain product, CPU ms")
        place.loglog(sizes, [point.memory / 2**20 for point in found], "^:", label="reading, MiB")
        place.set_xlabel(name)
        place.set_xticks(sizes, [str(size) for size in sizes], minor=False)
        place.minorticks_off()
    places[0].legend(fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--small", action="store_true", help="sizes that take seconds, on one rank, to try the command")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--picture", type=Path)
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    growth = SMALL if options.small else GROWTH
    points: dict[str, list[Point]] = {}
    for name, every in growth.items():
        points[name] = [measure(name, sizes, options.rounds) for sizes in every]
        print(name, points[name], file=sys.stderr, flush=True)
    if not options.small:
        points["ranks"] = [over_ranks(ranks, OF_RANKS, options.rounds) for ranks in RANKS]
        print("ranks", points["ranks"], file=sys.stderr, flush=True)
    given = " ".join(sys.argv[1:] if argv is None else argv)
    write(report(points, options.rounds, f"python -m tests.benchmarks.bench_growth {given}".strip()), options.output)
    if options.picture is not None:
        draw(points, options.picture)


if __name__ == "__main__":
    main()
