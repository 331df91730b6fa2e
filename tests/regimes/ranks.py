"""Processes of one gloo group, started once and given one function after the other."""

from __future__ import annotations

import multiprocessing
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PATIENCE = 90  # seconds, until a function on two ranks counts as hanging
START = 300  # seconds; a busy machine takes its time to import what two processes need


@dataclass
class Reported:
    """The result of a function on one rank.

    Attributes:
        answer: what it returned.
        warnings: the warnings that it gave.
    """

    answer: Any = None
    warnings: list[str] = field(default_factory=list)


class RankPool:
    """Ranks that wait for work; they are started anew after a function that failed or hung."""

    def __init__(self, size: int = 2) -> None:
        self._size = size
        self._processes: list[Any] = []
        self._pipes: list[Any] = []

    def __call__(self, function: Callable[..., Any], *args: Any) -> list[Reported]:
        """Run a function of a module on all ranks, as ``function(rank, *args)``."""
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send((function, args))
        reported: dict[int, Reported] = {}
        end = time.monotonic() + PATIENCE
        while len(reported) < self._size:  # a rank that failed is reported rather than those that wait for it
            waiting = [rank for rank in range(self._size) if rank not in reported]
            ready = [rank for rank in waiting if self._pipes[rank].poll(0.01)]
            for rank in ready:
                try:
                    answer = self._pipes[rank].recv()
                except EOFError:
                    self.stop()
                    raise AssertionError(f"the process of rank {rank} ended in {function.__name__}") from None
                if isinstance(answer, str):
                    self.stop()
                    raise AssertionError(f"rank {rank} failed in {function.__name__}:\n{answer}")
                reported[rank] = answer
            if not ready and time.monotonic() > end:
                self.stop()
                raise AssertionError(f"rank {waiting[0]} hangs in {function.__name__}")
        return [reported[rank] for rank in range(self._size)]

    def stop(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        self._processes, self._pipes = [], []

    def _start(self) -> None:
        spawn = multiprocessing.get_context("spawn")
        store = Path(tempfile.mkdtemp()) / "store"
        for rank in range(self._size):
            ours, theirs = spawn.Pipe()
            process = spawn.Process(target=_serve, args=(rank, self._size, store, theirs), daemon=True)
            process.start()
            self._processes.append(process)
            self._pipes.append(ours)
        for pipe in self._pipes:
            if not pipe.poll(START):
                self.stop()
                raise AssertionError(f"{self._size} ranks did not start within {START} seconds")
            pipe.recv()


def _serve(rank: int, size: int, store: Path, pipe: Any) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    import tests.regimes.test_sharding  # noqa: F401 - what most functions come from

    pipe.send("ready")
    while True:
        function, args = pipe.recv()
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                answer = function(rank, *args)
            pipe.send(Reported(answer, [str(item.message) for item in caught if "hdi" in item.category.__module__]))
        except BaseException:
            pipe.send(traceback.format_exc())
