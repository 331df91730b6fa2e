"""The plan, one training of it, and what is told of it: by the rules and the contract, and by a rule of the loss."""

from __future__ import annotations

import contextlib
import io
import math
import random
import statistics
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from hdi_callback import watch_heads
from hdi_callback.errors import HDIWarning
from hdi_callback.interventions import Intervention, Training
from hdi_callback.monitor import contract
from hdi_callback.record import Alert, Record
from hdi_callback.rules import Alerts
from tests.studies.experiments.held_out import faults, tasks

HEALTHY = "healthy"
PAST, DEVIATIONS = 50, 4.0
"""The rule of the loss alone: above the mean of the last 50 steps by four of their standard deviations, or NaN."""


@dataclass(frozen=True)
class Job:
    """One training."""

    kind: str
    task: str
    seed: int


PARTS = {
    "first": (tasks.FIRST, faults.FIRST, 710_000, 1),
    "held back": (tasks.HELD_BACK, faults.HELD_BACK, 830_000, 2),
    "new kinds": (tasks.NEW, faults.NEW, 950_000, 4),
    "new kinds, new seeds": (tasks.NEW, faults.NEW, 950_004, 5),
    "newest kinds": (tasks.NEWEST, faults.NEWEST, 970_000, 6),
    "newest kinds, new seeds": (tasks.NEWEST | tasks.LAST, faults.NEWEST, 990_009, 7),
    "blind kinds": (tasks.BLIND, faults.BLIND, 1_010_000, 8),
    "blind kinds again": (tasks.BLIND_AGAIN, faults.BLIND_AGAIN, 1_030_000, 9),
    "third blind kinds": (tasks.THIRD_BLIND, faults.THIRD_BLIND, 1_050_000, 10),
    "fourth blind kinds": (tasks.FOURTH_BLIND, faults.FOURTH_BLIND, 1_070_000, 11),
    "fifth blind kinds": (tasks.FIFTH_BLIND, faults.FIFTH_BLIND, 1_090_000, 12),
    "sixth blind kinds": (tasks.SIXTH_BLIND, faults.SIXTH_BLIND, 1_110_000, 13),
}
"""Part -> its tasks, its faults, the first of its seeds, and what draws."""


def plan(part: str, healthy: int = 6, faulty: int = 5) -> list[Job]:
    """Return the trainings of a part, of `PARTS`: of each task `healthy`, of each fault `faulty`.

    Each fault is drawn a task and one of its seeds, so that the healthy training with this seed shows what it cost.
    """
    known, kinds, start, seed = PARTS[part]
    draw = random.Random(seed)
    seeds = {task: [start + 100 * place + number for number in range(healthy)] for place, task in enumerate(known)}
    jobs = [
        Job(HEALTHY, task, seed)
        for number in range(healthy)
        for task, own in seeds.items()
        for seed in own[number:][:1]
    ]
    for kind, fault in kinds.items():
        able = [task for task, make in known.items() if task in (fault.tasks or known) and _suits(fault, make)]
        pairs = [(task, seed) for task in able for seed in seeds[task]]
        jobs += [Job(kind, *pair) for pair in draw.sample(pairs, min(faulty, len(pairs)))]
    return draw.sample(jobs, len(jobs))


def _suits(fault: faults.Fault, make: type[tasks.Task]) -> bool:
    return not fault.is_causal or tasks.attention_layers(make(0).model())[0].is_causal


def train(job: Job, folder: Path | None = None) -> dict[str, Any]:
    """Train as a job says; return the alerts, the steps at which the loss alone would tell, and the last losses.

    Args:
        job: what to train.
        folder: where the readings are kept, so that other rules can judge them.
    """
    torch.set_num_threads(1)
    torch.manual_seed(job.seed)
    began = time.process_time()
    task, fault = tasks.TASKS[job.task](job.seed), faults.FAULTS.get(job.kind, faults.Fault())
    model = task.model()
    task.before_watch(model)
    optimizer = task.optimizer(model)
    run = faults.Run(model, optimizer, task, job.seed)
    run.kept["initial"] = {name: value.clone() for name, value in run.layer.state_dict().items()}
    if fault.begin is not None:
        fault.begin(run)
    onset = 0 if fault.begin is not None else task.steps // 2
    losses: list[float] = []
    keep = KeepReadings()
    with contextlib.ExitStack() as watched:
        shown = watched.enter_context(warnings.catch_warnings(record=True))
        warnings.simplefilter("always")
        watched.enter_context(contextlib.redirect_stdout(io.StringIO()))
        settings: dict[str, Any] = {"history": False, "strict": False, "interventions": [keep]}
        with watch_heads(model, optimizer, task.every, **settings) as heads:
            for step in range(task.steps):
                with heads.step():
                    task.before_step(model, optimizer, step)
                    loss = task.loss(model, step)
                    loss.backward()
                    heads.before_optimizer_step()
                    for group in optimizer.param_groups:
                        group["lr"] = group.setdefault("full", group["lr"]) * task.factor(step)
                    _act(fault.before, run, step - onset)
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    optimizer.zero_grad()
                    _act(fault.after, run, step - onset)
                    heads.loss = loss.detach()
                losses.append(float(loss))
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        torch.save((keep.records, keep.facts), folder / f"{job.kind}, {job.task}, {job.seed}.pt")
    return {
        "kind": job.kind,
        "task": job.task,
        "seed": job.seed,
        "onset": onset,
        "readings": len(keep.records),
        "alerts": judged(keep.records, keep.facts),
        "of_loss": [step for step in range(PAST, len(losses)) if _stands_out(losses[step - PAST : step], losses[step])],
        "loss": statistics.fmean(losses[-20:]),
        "warnings": [str(item.message) for item in shown if isinstance(item.message, HDIWarning)],
        "seconds": round(time.process_time() - began, 1),
    }


def judged(records: Sequence[Record], facts: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the alerts of the default rules and of the contract on a run, but for those that end one."""
    rules = Alerts(layers=facts)
    told: list[Alert] = []
    for record in records:
        of_contract = tuple(alert for alert in record.alerts if alert.rule == contract.NAME)
        told += [*of_contract, *rules.judge(replace(record, alerts=of_contract))]
    return [
        {name: getattr(alert, name) for name in ("step", "rule", "also", "level", "where", "message")}
        for alert in told
        if not alert.is_over
    ]


class KeepReadings(Intervention):
    """Keep the readings of a run, with their matrices."""

    name = "KeepReadings"

    def bind(self, training: Training) -> None:
        super().bind(training)
        self.records: list[Record] = []
        self.facts = [layer.description() for layer in training.layers.values()]

    def on_alert(self, alert: Alert) -> None:
        return None

    def on_reading(self, record: Record) -> tuple[()]:
        self.records.append(record)
        return ()


def _act(act: faults.Act | None, run: faults.Run, since: int) -> None:
    if act is not None and since >= 0:
        run.is_first = since == 0
        with torch.no_grad():
            act(run)


def _stands_out(past: Sequence[float], loss: float) -> bool:
    if not math.isfinite(loss):
        return all(map(math.isfinite, past))
    return loss > statistics.fmean(past) + DEVIATIONS * statistics.pstdev(past)
