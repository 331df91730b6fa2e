"""How a reading grows with heads, width, layers, tokens and ranks: CPU time and memory, with fitted exponents.

    python -m tests.benchmarks.bench_growth --output docs/benchmarks/growth.md --picture docs/images/growth.png

Beside it grows the plain product of the same numbers: `K @ K.T` of each layer's keys, `O.T @ O` of its head outputs.
Over ranks it is a reading of the same model in as many processes at once that read it alone, as processes that share
cores slow each other whatever they do.
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
from functools import partial
from pathlib import Path

import scipy.stats
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hdi_callback import HeadDiversityMonitor
from tests.benchmarks.differences import interval
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
        width: input features of a layer.
        layers: of the model.
        tokens: of a batch.
    """

    heads: int = 8
    head_dim: int = 32
    width: int = 512
    layers: int = 2
    tokens: int = 1024


GROWTH: dict[str, list[Sizes]] = {
    "heads": [Sizes(heads=value) for value in (8, 16, 32, 64)],
    "width": [Sizes(width=value, tokens=256) for value in (4096, 8192, 16384, 32768)],
    "layers": [Sizes(layers=value) for value in (4, 8, 16, 32)],
    "tokens": [Sizes(tokens=value) for value in (8192, 16384, 32768, 65536)],
}
RANKS = (1, 2, 4)
SMALL = {
    name: [replace(one, width=one.width // 16, head_dim=8, tokens=max(LENGTH, one.tokens // 8)) for one in sizes[:3]]
    for name, sizes in GROWTH.items()
}
OF_RANKS = {
    "ranks, small layers": Sizes(layers=8),
    "ranks, large layers": Sizes(heads=16, head_dim=64, width=1024, layers=4, tokens=512),
}


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

    def __init__(self, sizes: Sizes, process_group: str | None = "auto") -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*(Attention(sizes) for _ in range(sizes.layers)))
        self.x = torch.randn(sizes.tokens // LENGTH, LENGTH, sizes.width)
        self.monitor = HeadDiversityMonitor(self.model, max_tokens=sizes.tokens, process_group=process_group)
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


class Products:
    """The plain products of the same numbers: of keys with each other, and of head outputs with each other."""

    def __init__(self, sizes: Sizes) -> None:
        inner = sizes.heads * sizes.head_dim
        self.keys = [torch.randn(inner, sizes.width) for _ in range(sizes.layers)]
        self.outputs = [torch.randn(sizes.tokens, inner) for _ in range(sizes.layers)]

    def compute(self) -> float:
        """Compute them once: CPU seconds."""
        start = time.process_time()
        for rows, columns in zip(self.keys, self.outputs):
            rows @ rows.mT
            columns.mT @ columns
        return time.process_time() - start

    @property
    def memory(self) -> float:
        """Bytes of the numbers and their products."""
        inner = self.keys[0].shape[0]
        numbers = sum(one.nbytes for one in (*self.keys, *self.outputs))
        return float(numbers + len(self.keys) * 2 * inner**2 * self.keys[0].element_size())


@dataclass(frozen=True)
class Point:
    """What was measured at one size, round by round.

    Attributes:
        size: heads, width, layers, tokens or ranks.
        seconds: CPU time of a reading; of the busiest rank.
        products: that of the baseline: the plain products; of ranks, a reading alone.
        memory: bytes at the peak of a reading, beyond what was there before; NaN where the system does not tell.
        memory_of_products: bytes of the numbers of the plain products; of ranks, as of `memory`, reading alone.
    """

    size: int
    seconds: list[float]
    products: list[float]
    memory: list[float]
    memory_of_products: list[float]


def measure(name: str, every: Sequence[Sizes], rounds: int) -> list[Point]:
    """Measure sizes in turn: in each round a reading of every size, and the plain products right after it."""
    points = [Point(getattr(sizes, name), [], [], [], []) for sizes in every]
    held = [(Readings(sizes), Products(sizes)) for sizes in every]
    for readings, products in held:
        readings.read()
        products.compute()
    for turn in range(rounds):
        for (readings, products), point in zip(held, points):
            point.seconds.append(max(readings.added(1), 1e-6))
            point.products.append(max(products.compute(), 1e-6))
            if turn < ROUNDS_OF_MEMORY:
                point.memory.append(peak_of(readings))
                point.memory_of_products.append(products.memory)
    for readings, _ in held:
        readings.monitor.close()
    return points


ROUNDS_OF_MEMORY = 5


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


_held: dict[Sizes, tuple[Readings, Readings]] = {}
"""On each rank, what is read in every round: with the others, and alone."""


def read_on_rank(rank: int, sizes: Sizes, *, with_memory: bool) -> list[float]:
    """CPU seconds of a reading on one of several ranks that hold the same model; bytes; and both of one alone."""
    if sizes not in _held:
        _held[sizes] = Readings(sizes), Readings(sizes, None)
        for readings in _held[sizes]:
            readings.read()
    seconds = [readings.added(2) for readings in _held[sizes]]
    memory = [peak_of(readings) if with_memory else math.nan for readings in _held[sizes]]
    return [*seconds, *memory]


def over_ranks(sizes: Sizes, rounds: int) -> list[Point]:
    """Measure numbers of ranks in turn, a pool of processes for each."""
    pools = {ranks: RankPool(ranks) for ranks in RANKS}
    points = {ranks: Point(ranks, [], [], [], []) for ranks in RANKS}
    try:
        for turn in range(-1, rounds):  # the first warms up
            with_memory = 0 <= turn < ROUNDS_OF_MEMORY
            for ranks, pool in pools.items():
                reported = pool(partial(read_on_rank, sizes=sizes, with_memory=with_memory))
                seconds, alone, *memory = (max(values) for values in zip(*(one.answer for one in reported)))
                if turn >= 0:
                    points[ranks].seconds.append(max(seconds, 1e-6))
                    points[ranks].products.append(max(alone, 1e-6))
                if with_memory:
                    points[ranks].memory.append(memory[0])
                    points[ranks].memory_of_products.append(memory[1])
    finally:
        for pool in pools.values():
            pool.stop()
    return list(points.values())


def exponent(sizes: Sequence[float], values: Sequence[float]) -> float:
    """Fit ``values ~ sizes ** exponent`` by least squares of logarithms."""
    fit = scipy.stats.linregress([math.log(size) for size in sizes], [math.log(value) for value in values])
    return float(fit.slope)


@dataclass(frozen=True)
class Exponents:
    """Exponents of one round each: of a reading, of the plain products, and how much that of the reading is larger."""

    reading: list[float]
    products: list[float]

    @classmethod
    def of(
        cls, sizes: Sequence[float], readings: Sequence[Sequence[float]], products: Sequence[Sequence[float]]
    ) -> Exponents:
        """Fit each round by itself, as what slows the machine for a while slows all sizes of a round.

        Args:
            sizes: of the points.
            readings: of each point, what was measured round by round.
            products: the same of the plain products.

        Returns:
            The exponents.
        """
        return cls(*([exponent(sizes, values) for values in zip(*each)] for each in (readings, products)))

    def cells(self) -> str:
        """Write the medians over rounds, and the difference with the 95 % interval of its median."""
        differences = [one - other for one, other in zip(self.reading, self.products)]
        low, high = interval(differences)
        medians = (statistics.median(values) for values in (self.reading, self.products, differences))
        return "{:.2f} | {:.2f} | {:+.2f} ({:+.2f} to {:+.2f})".format(*medians, low, high)


def report(points: dict[str, list[Point]], rounds: int, command: str) -> list[str]:
    lines = [
        f"Made by `{command}`",
        f"with {rounds} rounds, 1 CPU thread, torch {torch.__version__.split('+')[0]}, in CPU time; "
        f"{Sizes()} but for what grows. Each round fits exponents of its own, of a reading and of the plain products "
        "that are computed right after it; given are medians, and the 95 % interval of the median difference. "
        "Ranks are compared with as many processes at once that read the same model alone.",
    ]
    tables = {
        "time": ("a reading, ms", 1e3, lambda point: point.seconds, lambda point: point.products),
        "memory": (
            "a reading, MiB",
            1 / 2**20,
            lambda point: point.memory,
            lambda point: point.memory_of_products,
        ),
    }
    for what, (unit, factor, readings, products) in tables.items():
        lines += [
            "",
            f"| grows | from - to | {unit} | exponent of {what} | of the baseline | difference |",
            "|---|---|---|---|---|---|",
        ]
        for name, found in points.items():
            sizes = [point.size for point in found]
            cells = Exponents.of(sizes, [readings(point) for point in found], [products(point) for point in found])
            ends = [statistics.median(readings(point)) * factor for point in (found[0], found[-1])]
            lines.append(f"| {name} | {sizes[0]} - {sizes[-1]} | {ends[0]:.1f} - {ends[1]:.1f} | {cells.cells()} |")
    over = [name for name in OF_RANKS if name in points]
    if over:
        lines += ["", "| a reading, CPU ms of the busiest rank | 1 rank | 2 ranks | 4 ranks |", "|---|---|---|---|"]
    for name in over:
        for how, seconds in (("together", readings_of), ("each alone", alone_of)):
            cells = []
            for point in points[name]:
                low, high = interval(seconds(point))
                cells.append(f"{statistics.median(seconds(point)) * 1e3:.0f} ({low * 1e3:.0f} - {high * 1e3:.0f})")
            lines.append(f"| {name}: {OF_RANKS[name]}, {how} | {' | '.join(cells)} |")
    return [*lines, ""]


def readings_of(point: Point) -> list[float]:
    return point.seconds


def alone_of(point: Point) -> list[float]:
    return point.products


def draw(points: dict[str, list[Point]], path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, places = plt.subplots(
        1, len(points), figsize=(2.6 * len(points), 3.2), constrained_layout=True, sharey=True
    )
    median = statistics.median
    for place, (name, found) in zip(places, points.items()):
        sizes = [point.size for point in found]
        place.loglog(sizes, [median(point.seconds) * 1e3 for point in found], "o-", label="reading, CPU ms")
        place.loglog(
            sizes, [median(point.products) * 1e3 for point in found], "s--", label="plain products, or alone, CPU ms"
        )
        place.loglog(sizes, [median(point.memory) / 2**20 for point in found], "^:", label="reading, MiB")
        place.set_xlabel(name)
        place.set_xticks(sizes, [str(size) for size in sizes], minor=False)
        place.minorticks_off()
    places[0].legend(fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--small", action="store_true", help="sizes that take seconds, on one rank, to try the command")
    parser.add_argument("--only", nargs="+", choices=[*GROWTH, *OF_RANKS], help="what grows, all of it by default")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--picture", type=Path)
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    wanted = options.only or ([*GROWTH] if options.small else [*GROWTH, *OF_RANKS])
    growth = {name: sizes for name, sizes in (SMALL if options.small else GROWTH).items() if name in wanted}
    points: dict[str, list[Point]] = {}
    for name, every in growth.items():
        points[name] = measure(name, every, options.rounds)
        print(name, points[name], file=sys.stderr, flush=True)
    for name, sizes in ((name, sizes) for name, sizes in OF_RANKS.items() if name in wanted):
        points[name] = over_ranks(sizes, options.rounds)
        print(name, points[name], file=sys.stderr, flush=True)
    arguments = " ".join(sys.argv[1:] if argv is None else argv)
    write(
        report(points, options.rounds, f"python -m tests.benchmarks.bench_growth {arguments}".strip()), options.output
    )
    if options.picture is not None:
        draw(points, options.picture)


if __name__ == "__main__":
    main()
