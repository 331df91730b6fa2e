"""A training on two ranks; run with `start`."""

from __future__ import annotations

import datetime
import json
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from hdi_callback import HeadDiversityMonitor, MonitoringWarning, load_history, watch_heads
from tests.integrations.runs import BATCH, Training, dataset

STEPS = 6


def start(folder: Path, *options: dict[str, Any] | None, timeout: float = 60, breaks: str = "") -> list[dict[str, Any]]:
    """Train on as many ranks as there are options, each of which is the arguments of a monitor, or `None` for none."""
    mp.spawn(_train, args=(str(folder), options, timeout, breaks), nprocs=len(options))  # type: ignore[no-untyped-call]
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(len(options))]


def _train(rank: int, folder: str, options: Any, timeout: float, breaks: str) -> None:
    torch.set_num_threads(1)
    limit = datetime.timedelta(seconds=timeout)
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=len(options), timeout=limit)
    run = Training(Path(folder))
    model = nn.parallel.DistributedDataParallel(run.model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    if breaks and rank == 1:
        _break(breaks)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        heads = None
        if options[rank] is not None:
            heads = watch_heads(model, optimizer, log_dir=folder, **{"every_n_steps": 2, **options[rank]})
        tokens, labels = dataset(STEPS * BATCH * 2).tensors
        mine = slice(rank, None, len(options))
        for batch in zip(tokens[mine].split(BATCH), labels[mine].split(BATCH)):
            if heads is not None and heads.should_stop:
                break
            with heads.step() if heads is not None else warnings.catch_warnings():
                model(*batch)["loss"].backward()
                optimizer.step()
                optimizer.zero_grad()
        if heads is not None:
            heads.finish()
    found: dict[str, Any] = {
        "weights": run.weights,
        "latest": {} if heads is None else heads.latest,
        "steps": 0 if heads is None else heads.global_step,
        "messages": [str(one.message) for one in caught if issubclass(one.category, MonitoringWarning)],
    }
    if heads is not None and heads.history_path is not None:
        records = load_history(heads.history_path).records
        found["read"] = [record.step for record in records]
        found["values"] = [{name: layer.values for name, layer in record.layers.items()} for record in records]
        found["actions"] = [action.step for record in records for action in record.actions]
    (Path(folder) / f"rank-{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def _break(what: str) -> None:
    def broken(*args: Any, **kwargs: Any) -> Any:
        raise ZeroDivisionError("on this rank alone")

    setattr(HeadDiversityMonitor, what, broken)
