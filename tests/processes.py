"""Ranks of one process group, each in a process of its own."""

from __future__ import annotations

import datetime
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def on_ranks(size: int, folder: Path, work: Callable[..., Any], *arguments: Any, timeout: float = 60.0) -> None:
    """Call `work(rank, *arguments)` on every rank of a gloo group that waits for at most `timeout` seconds.

    Raises what a rank raised. No rank leaves before all are done, and then without taking anything apart: threads of
    torch abort a process whose peers have gone, or whose interpreter ends while they wait for it.
    """
    mp.spawn(_rank, (size, str(folder), timeout, work, arguments), nprocs=size)  # type: ignore[no-untyped-call]


def _rank(
    rank: int, size: int, folder: str, timeout: float, work: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    limit = datetime.timedelta(seconds=timeout)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size, timeout=limit)
    work(rank, *arguments)
    Path(folder, f"done-{rank}").touch()
    while not all(Path(folder, f"done-{other}").exists() for other in range(size)):
        time.sleep(0.02)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
