"""Ranks that are killed, stop or end early while they train, in groups of which the others go on."""

from __future__ import annotations

import datetime
import json
import multiprocessing
import os
import signal
import time
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn

from hdi_callback import MonitoringWarning, load_history, watch_heads
from hdi_callback.monitor.ranks import Ranks
from tests.integrations.runs import BATCH, Training, dataset

STEPS, EVERY, LEAVES_AT, TIMEOUT = 8, 2, 3, 15.0  # seconds, of the process group: the store has five minutes

LEAVES = {
    "killed": 1,
    "killed, of four": 1,
    "killed with the store": 0,
    "killed under DDP": 1,
    "killed within a reading": 1,
    "killed while the group is made": 1,
    "stopped within a reading": 1,
    "stopped between steps": 1,
    "ends early": 1,
    "ends early and destroys the group": 1,
    "leaves its loop with an error": 0,
}
"""Which rank leaves, and how."""


def train_until_one_leaves(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Return for each group what the ranks found that did not leave."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.session.leaving_ranks"])  # imports once
    ranks = [(name, rank, _folder(folder, name)) for name in LEAVES for rank in range(_size(name))]
    processes = [context.Process(target=_work, args=rank, daemon=True) for rank in ranks]
    for process in processes:
        process.start()
    for process, (name, rank, _) in zip(processes, ranks):
        if rank != LEAVES[name]:
            process.join(120)
    for process in processes:
        process.kill()
    return {
        name: [json.loads(file.read_text()) for file in sorted(_folder(folder, name).glob("rank-*"))] for name in LEAVES
    }


def _folder(folder: Path, name: str) -> Path:
    folder = folder / name.replace(" ", "-")
    folder.mkdir(exist_ok=True)
    return folder


def _size(name: str) -> int:
    return 4 if "of four" in name else 2


def _work(name: str, rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    limit = datetime.timedelta(seconds=TIMEOUT)
    store = _tcp_store(rank, folder) if "with the store" in name else dist.FileStore(f"{folder}/store", _size(name))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=_size(name), timeout=limit)
    outcome = train(name, rank, folder)
    if rank != LEAVES[name]:
        (folder / f"rank-{rank}.json").write_text(json.dumps(outcome))
    elif "destroys" in name:
        dist.destroy_process_group()
    os._exit(0)  # there is no group that could be left


def _tcp_store(rank: int, folder: Path) -> dist.TCPStore:
    """Return a store that the first rank serves."""
    note = folder / "port"
    if rank == 0:
        store = dist.TCPStore("localhost", 0, 2, is_master=True, wait_for_workers=False)
        (folder / "port.tmp").write_text(str(store.port))
        (folder / "port.tmp").rename(note)
        return store
    while not note.exists():
        time.sleep(0.05)
    return dist.TCPStore("localhost", int(note.read_text()), 2, is_master=False)


def _leave(name: str) -> None:
    os.kill(os.getpid(), signal.SIGSTOP if "stopped" in name else signal.SIGKILL)


def train(name: str, rank: int, folder: Path) -> dict[str, Any]:
    """Train on the same batches on all ranks, of which one leaves. Without a name: alone, and without a monitor."""
    run = Training(folder)
    model: nn.Module = nn.parallel.DistributedDataParallel(run.model) if "DDP" in name else run.model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    leaves, error = bool(name) and rank == LEAVES[name], ""
    seconds: list[float] = []
    place: Any = nullcontext()
    if leaves and "within a reading" in name:
        compare = Ranks.compare
        place = patch.object(
            Ranks, "compare", lambda *args: (len(seconds) > LEAVES_AT and _leave(name), compare(*args))
        )
    elif leaves and "group is made" in name:
        place = patch.object(dist, "new_group", lambda **options: _leave(name))
    with warnings.catch_warnings(record=True) as caught, place:
        warnings.simplefilter("always")
        heads: Any = watch_heads(model, optimizer, EVERY, log_dir=folder) if name else None
        try:
            with nullcontext() if heads is None else heads:
                for step, batch in enumerate(zip(*(part.split(BATCH) for part in dataset(BATCH * STEPS).tensors))):
                    if leaves and step == LEAVES_AT:
                        if "ends early" in name:
                            break
                        if "error" in name:
                            raise RuntimeError("of this rank alone")
                        if "reading" not in name:
                            _leave(name)
                    begin = time.monotonic()
                    with nullcontext() if heads is None else heads.step():
                        try:
                            model(*batch)["loss"].backward()
                            optimizer.step()
                            optimizer.zero_grad()
                        finally:
                            seconds.append(time.monotonic() - begin)
        except RuntimeError as lost:
            error = str(lost)
    outcome: dict[str, Any] = {"weights": run.weights, "error": error, "seconds": seconds}
    outcome["messages"] = [str(one.message) for one in caught if issubclass(one.category, MonitoringWarning)]
    if heads is not None and heads.history_path is not None:
        records = load_history(heads.history_path).records
        outcome["file"] = heads.history_path.name
        outcome["read"] = [record.step for record in records if "hdi" in record.layers["blocks.0.attn"].values]
    return outcome
