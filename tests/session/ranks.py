"""Trainings on two ranks, one after the other in the same processes; run with `train`."""

from __future__ import annotations

import json
import time
import warnings
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from hdi_callback import HeadDiversityMonitor, MonitoringWarning, Reading, StopTraining, load_history, watch_heads
from hdi_callback.attention import first_forward
from hdi_callback.attention.capture.capture import Capture
from hdi_callback.errors import NothingToWatchError
from hdi_callback.monitor import monitor, weight_source
from hdi_callback.rules import Alerts
from tests.integrations.runs import BATCH, Training, dataset
from tests.processes import on_ranks

STEPS, TIMEOUT = 6, 45.0  # seconds, of the process group

FAILURES: dict[str, tuple[Any, str]] = {
    "arming": (HeadDiversityMonitor, "arm"),
    "finding heads": (first_forward, "survey_tape"),
    "installing hooks": (Capture, "__init__"),
    "capturing": (Capture, "take"),
    "reading attention": (monitor, "take_rows"),
    "weights": (weight_source, "circuit_sums"),
    "numbers": (Reading, "record"),
    "judging": (Alerts, "judge"),
    "binding an intervention": (StopTraining, "bind"),
}
"""What may fail on one rank alone, and where."""


@dataclass
class Case:
    """The arguments of each rank's monitor, `None` for none; what fails on the second rank; blocks of their models.

    `apart` says how ranks differ: "factor": a model each, the second with three times the weights; "data": a model
    each, alike at first; "join": the second has less data; "skip": the second leaves out an optimizer step.
    """

    ranks: tuple[dict[str, Any] | None, dict[str, Any] | None] = ({}, {})
    fails: str = ""
    blocks: tuple[int, int] = (2, 2)
    apart: str = ""


def train(cases: dict[str, Case], folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Return what each rank found in each case."""
    on_ranks(2, folder, _work, cases, folder, timeout=TIMEOUT)
    found = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(2)]
    return {name: [rank[name] for rank in found] for name in cases}


def _work(rank: int, cases: dict[str, Case], folder: Path) -> None:
    found = {}
    for place, (name, case) in enumerate(cases.items()):
        fails = FAILURES.get(case.fails) if rank == 1 else None
        with patch.object(*fails, _broken) if fails else nullcontext():
            found[name] = _train(rank, case, folder / str(place))
    (folder / f"rank-{rank}.json").write_text(json.dumps(found))


def _broken(*args: Any, **kwargs: Any) -> Any:
    raise ZeroDivisionError("on this rank alone")


def alone(rank: int, folder: Path, factor: float = 1.0) -> list[tuple[int, dict[str, Any]]]:
    """Return what one process reads that trains on the batches of a rank."""
    run = Training(folder)
    with torch.no_grad():
        for parameter in run.model.parameters():
            parameter *= factor
    optimizer = torch.optim.AdamW(run.model.parameters(), lr=3e-3)
    with watch_heads(run.model, optimizer, 2, log_dir=folder) as heads:
        _steps(rank, run.model, optimizer, heads, "")
    records = load_history(heads.history_path).records  # type: ignore[arg-type]
    return [(record.step, {name: layer.values for name, layer in record.layers.items()}) for record in records]


def _train(rank: int, case: Case, folder: Path) -> dict[str, Any]:
    run, options = Training(folder), case.ranks[rank]
    model: nn.Module = run.model
    run.model.blocks = run.model.blocks[: case.blocks[rank]]
    if case.apart == "factor" and rank == 1:
        with torch.no_grad():
            for parameter in run.model.parameters():
                parameter *= 3
    has_own_model = case.blocks[0] != case.blocks[1] or case.apart in ("factor", "data")
    if not has_own_model:
        model = nn.parallel.DistributedDataParallel(run.model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    begin = time.monotonic()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        heads: Any = None
        if options is not None:
            heads = watch_heads(model, optimizer, log_dir=folder, **{"every_n_steps": 2, **options})
        error = ""
        try:
            with model.join() if case.apart == "join" else nullcontext():  # type: ignore[operator]
                _steps(rank, model, optimizer, heads, case.apart if rank == 1 else "")
        except NothingToWatchError as nothing:
            error = str(nothing)
        if heads is not None:
            heads.finish()
    found: dict[str, Any] = {
        "error": error,
        "weights": run.weights,
        "seconds": time.monotonic() - begin,
        "latest": {} if heads is None else heads.latest,
        "steps": 0 if heads is None else heads.global_step,
        "messages": [str(one.message) for one in caught if issubclass(one.category, MonitoringWarning)],
    }
    if heads is not None and heads.history_path is not None:
        records = load_history(heads.history_path).records
        found["file"] = heads.history_path.name
        found["read"] = [record.step for record in records]
        found["values"] = [{name: layer.values for name, layer in record.layers.items()} for record in records]
        found["actions"] = [action.step for record in records for action in record.actions]
    return found


def _steps(rank: int, model: nn.Module, optimizer: torch.optim.Optimizer, heads: Any, apart: str) -> None:
    tokens, labels = dataset(STEPS * BATCH * 2).tensors
    mine = slice(rank, None, 2)
    for place, batch in enumerate(zip(tokens[mine].split(BATCH), labels[mine].split(BATCH))):
        if (heads is not None and heads.should_stop) or (apart == "join" and place == 3):
            break
        with suppress(ConnectionError), nullcontext() if heads is None else heads.step():
            model(*batch)["loss"].backward()
            if apart == "skip" and place == 1:
                raise ConnectionError("which the training survives")
            optimizer.step()
        optimizer.zero_grad()
