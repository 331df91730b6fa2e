"""Make the runs, one after the other, and never one that is made.

python -m tests.experiments.faults.run --part looked-at
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import time
import warnings
from pathlib import Path
from typing import Any

import torch

from hdi_callback import HeadDiversityMonitor
from hdi_callback.monitoring.session.position import Position
from hdi_callback.monitoring.session.session import Session
from hdi_callback.monitoring.session.settings import Settings
from tests.experiments.collapse.run import Loop
from tests.experiments.faults.faults import FAULTS, Fault, Run
from tests.experiments.faults.plan import EVERY, HEALTHY, PARTS, STEPS, Job, plan
from tests.experiments.faults.trainings import BASES, PROVOKED, Data, Model, make_optimizers

RESULTS = Path("runs/faults")
METRICS = [
    "hdi", "head_correlation", "circuit_qk", "circuit_ov", "attention_entropy", "weights_not_finite",
    "outputs_not_finite", "head_contribution_min", "head_movement_min", "hdi_keys", "token_rank", "update_energy",
]  # fmt: skip


def train(job: Job, steps: int = STEPS, interventions=()) -> dict[str, Any]:
    """Train as a job says; give the losses, the readings and the alerts."""
    torch.set_num_threads(1)
    torch.manual_seed(job.seed)
    base = (BASES | PROVOKED)[job.base]
    fault = FAULTS.get(job.kind, Fault("", False, False))
    model, data = Model(base), Data(base.task, job.seed, base.batch)
    optimizers = make_optimizers(model, base)
    rates = [[group["lr"] for group in optimizer.param_groups] for optimizer in optimizers]
    for _ in range(base.trained_before):
        model.loss(*data.draw()).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    acted = Run(model, optimizers, job.seed)
    if fault.begin is not None:
        with torch.no_grad():
            fault.begin(acted, 0)
    losses, gradients, validation, norms = [], [], [], []
    readings: list[dict[str, Any]] = []
    alerts: list[tuple[int, str, str, str]] = []

    def write(results) -> None:
        for result in results:
            values = {name: layer.values for name, layer in result.record.layers.items()}
            readings.append({"step": result.record.step, "values": values})
            alerts.extend((a.step, a.layer, a.rule, a.level) for a in result.alerts if not a.is_resolved)

    began = time.process_time()
    with HeadDiversityMonitor(model, metrics=METRICS) as monitor:
        loop = Loop(optimizers[0])
        settings = Settings(every_n_steps=EVERY, metrics=METRICS, history=False, interventions=list(interventions))
        session = Session(monitor, loop, settings)
        session.open()
        for step in range(steps):
            loop.position = Position(step)
            if step % EVERY == 0:
                validation.append(data.validate(model))
                norms.append(
                    math.sqrt(sum(float(p.detach().square().sum()) for m in acted.layers for p in m.parameters()))
                )
            batch = data.draw()
            is_on = step >= fault.start
            if is_on and fault.data is not None:
                batch = fault.data(acted, batch, step)
            session.before_forward()
            loss = model.loss(*batch)
            losses.append(float(loss.detach()))
            loss.backward()
            session.after_backward()
            gradients.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
            begun = max(0, step + 1 - base.begin_at_rate_zero)
            factor = min(1.0, begun / (base.warm_up + 1)) * (1 - 0.9 * step / steps)
            for optimizer, own in zip(optimizers, rates):
                for group, rate in zip(optimizer.param_groups, own):
                    group["lr"] = rate * factor
            with torch.no_grad():
                if is_on and fault.before is not None:
                    fault.before(acted, step)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            with torch.no_grad():
                if is_on and fault.after is not None:
                    fault.after(acted, step)
            loop.position = Position(step + 1)
            write(session.after_step())
        write(session.flush())
        session.close()
    return {
        "kind": job.kind, "base": job.base, "seed": job.seed, "losses": _short(losses), "gradients": _short(gradients),
        "validation": _short([*validation, data.validate(model)]), "norms": _short(norms), "readings": readings,
        "alerts": alerts, "cpu_seconds": round(time.process_time() - began, 2),
    }  # fmt: skip


def _short(values: list[float]) -> list[float | None]:
    return [float(f"{value:.4g}") if math.isfinite(value) else None for value in values]


def run(job: Job, folder: Path) -> bool:
    """Make one run, if it is not made; its file appears when it is complete."""
    done = folder / f"{job.name}.json.gz"
    if done.is_file():
        return False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = train(job)
    for reading in result["readings"]:
        reading["values"] = {
            layer: {name: float(f"{value:.4g}") for name, value in values.items()}
            for layer, values in reading["values"].items()
        }
    partial = done.with_suffix(".partial")
    partial.write_bytes(gzip.compress(json.dumps(result, separators=(",", ":")).encode(), mtime=0))
    partial.rename(done)
    return True


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", choices=PARTS, required=True)
    parser.add_argument("--kinds", nargs="*", help=f"only these kinds, such as {HEALTHY}")
    parser.add_argument("--rounds", type=int, default=3, help="how many confirming runs of each fault")
    parser.add_argument("--healthy", type=int, default=6, help="how many confirming healthy runs of each training")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args(argv)
    folder = options.results / options.part
    folder.mkdir(parents=True, exist_ok=True)
    jobs = plan(options.part, rounds=options.rounds, healthy=options.healthy)
    jobs = [job for job in jobs if not options.kinds or job.kind in options.kinds]
    for number, job in enumerate(jobs, 1):
        if run(job, folder):
            print(f"{number}/{len(jobs)} {job.kind}, {job.base}, {job.seed}", flush=True)


if __name__ == "__main__":
    main()
