"""What a reading asks of the store of the process group: calls of each rank, and how fast a store answers.

python -m tests.benchmarks.bench_store --output docs/benchmarks/store.md
"""

from __future__ import annotations

import argparse
import multiprocessing
import socket
import statistics
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.benchmarks.ratios import write

STEPS = 12
WARM = 3
CALLS = 2000


class Counted:
    """A store that counts its calls."""

    def __init__(self, store: Any) -> None:
        self.calls: Counter[str] = Counter()
        self._store = store

    def __getattr__(self, name: str) -> Any:
        self.calls[name] += 1
        return getattr(self._store, name)


def work(rank: int, size: int, port: int, layers: int, queue: Any) -> None:
    """Read in one of several processes that share a store over TCP."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, size, rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    from hdi_callback import HeadDiversityMonitor
    from hdi_callback.monitoring.session.settings import Settings
    from tests.models import Classifier
    from tests.regimes.test_ddp import batch

    torch.manual_seed(0)
    model = Classifier(blocks=layers)
    counts = []
    with HeadDiversityMonitor(model, **Settings().measuring) as monitor:
        for step in range(STEPS):
            monitor.arm()
            model(batch()).sum().backward()
            exchange: Any = monitor._rendezvous._exchange
            if exchange is not None and not isinstance(exchange._store, Counted):
                exchange._store = Counted(exchange._store)
            if exchange is not None:
                exchange._store.calls.clear()
            monitor.measure(step)
            if step >= WARM and exchange is not None:
                counts.append(dict(exchange._store.calls))
        dist.barrier()
        keys, times = store.num_keys(), []
        for _ in range(50):
            dist.barrier()
            start = time.perf_counter()
            monitor._rendezvous._exchange.agree()  # type: ignore[union-attr]
            times.append(time.perf_counter() - start)
        dist.barrier()
        start = time.perf_counter()
        for _ in range(CALLS):
            store.add("speed", 1)
        rate = CALLS / (time.perf_counter() - start)
        queue.put((rank, counts, statistics.median(times), rate, keys))
        dist.barrier()


def run(size: int, layers: int) -> list[tuple[Any, ...]]:
    """Start the processes; return what each of them found, by rank."""
    spawn = multiprocessing.get_context("spawn")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    queue = spawn.Queue()
    started = [spawn.Process(target=work, args=(rank, size, port, layers, queue)) for rank in range(size)]
    for process in started:
        process.start()
    found = [queue.get(timeout=300) for _ in started]
    for process in started:
        process.join()
    return sorted(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--layers", type=int, nargs="+", default=[3, 12])
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    lines = [
        "Made by `python -m tests.benchmarks.bench_store --output docs/benchmarks/store.md`, with torch "
        f"{torch.__version__}: readings of everything that is read by default, over a store of TCP on one machine.",
        "",
        "| ranks | layers | agreements a reading | calls of a rank | of the first rank, which also deletes | "
        "an agreement, ms | calls a second that the store answered |",
        "|---|---|---|---|---|---|---|",
    ]
    for layers in options.layers:
        for size in options.ranks:
            found = run(size, layers)
            waits = {one["wait"] for _, counts, *_ in found for one in counts}
            calls = [sum(one.values()) for _, counts, *_ in found[1:] for one in counts]
            first = [sum(one.values()) for one in found[0][1]]
            pace = 1000 * statistics.median(one[2] for one in found)
            rate = sum(one[3] for one in found)
            lines.append(
                f"| {size} | {layers} | {', '.join(map(str, sorted(waits)))} | {min(calls)} - {max(calls)} | "
                f"{min(first)} - {max(first)} | {pace:.2f} | {rate:,.0f} |"
            )
    write([*lines, ""], options.output)


if __name__ == "__main__":
    main()
