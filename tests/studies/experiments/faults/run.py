"""One training of the plan, watched by the package as a user would: `watch_heads`, and the alerts of its history."""

from __future__ import annotations

import contextlib
import io
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hdi_callback import load_history, watch_heads
from hdi_callback.errors import HDIWarning
from tests.studies.experiments.faults.kinds import FAULTS, Fault, Run
from tests.studies.experiments.faults.plan import Job
from tests.studies.experiments.faults.trainings import (
    BASES,
    PROVOKED,
    Base,
    Batch,
    Data,
    add_adapters,
    make_model,
    make_optimizers,
)

EVERY = 5
"""Optimizer steps between readings."""


def train(job: Job, steps: int | None = None) -> dict[str, Any]:
    """Train as a job says; give the alerts, but for those that end one, and the final validation loss."""
    torch.set_num_threads(1)
    torch.manual_seed(job.seed)
    began = time.process_time()
    base = (BASES | PROVOKED)[job.base]
    base = base if steps is None else replace(base, steps=steps)
    fault = FAULTS.get(job.kind, Fault())
    model, data = make_model(base), Data(base.task, job.seed, base.batch)
    optimizers = make_optimizers(model, base)
    for _ in range(base.trained_before):
        model(*data.draw()).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    if base.adapter_rank:
        add_adapters(model, base.adapter_rank)
        optimizers = make_optimizers(model, base)
    run = Run(model, optimizers, job.seed)
    if fault.begin is not None:
        with torch.no_grad():
            fault.begin(run, 0)
    with contextlib.ExitStack() as watched:
        folder = Path(watched.enter_context(tempfile.TemporaryDirectory()))
        said = watched.enter_context(warnings.catch_warnings(record=True))
        warnings.simplefilter("always")
        watched.enter_context(contextlib.redirect_stdout(io.StringIO()))
        # Not strict, as a fault may leave nothing to read, and that is a result.
        with watch_heads(model, optimizers, EVERY, history=folder / "history.jsonl", strict=False) as heads:
            for step in range(base.steps):
                with heads.step():
                    heads.loss = _step(run, base, fault, data.draw(), step, heads.before_optimizer_step)
        file = folder / "history.jsonl"
        records = load_history(file).records if file.is_file() else []
    alerts = [
        {"step": one.step, "rule": one.rule, "also": one.also, "level": one.level, "where": one.where}
        for record in records
        for one in record.alerts
        if not one.is_over
    ]
    return {
        "kind": job.kind,
        "base": job.base,
        "seed": job.seed,
        "layer": run.name,
        "readings": len(records),
        "alerts": alerts,
        "warnings": [str(one.message) for one in said if isinstance(one.message, HDIWarning)],
        "loss": data.validate(model),
        "seconds": round(time.process_time() - began, 1),
    }


def _step(run: Run, base: Base, fault: Fault, batch: Batch, step: int, read: Callable[[], None]) -> Tensor:
    """Make one step of the training, with its fault after the reading; give the loss."""
    is_on = step >= fault.start
    if is_on and fault.data is not None:
        batch = fault.data(run, batch, step)
    loss = run.model(*batch)
    loss.backward()
    read()
    torch.nn.utils.clip_grad_norm_(run.model.parameters(), 1.0)
    # Warm-up, then down to a tenth.
    begun = max(0, step + 1 - base.begin_at_rate_zero)
    factor = min(1.0, begun / (base.warm_up + 1)) * (1 - 0.9 * step / base.steps)
    for optimizer, rates in zip(run.optimizers, run.rates):
        for group, rate in zip(optimizer.param_groups, rates):
            group["lr"] = rate * factor
    with torch.no_grad():
        if is_on and fault.before is not None:
            fault.before(run, step)
    for optimizer in run.optimizers:
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        if is_on and fault.after is not None:
            fault.after(run, step)
    return loss.detach()
