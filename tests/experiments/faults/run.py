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
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from hdi_callback import HeadDiversityMonitor
from hdi_callback.errors import HDIWarning
from hdi_callback.monitoring.session.position import Position
from hdi_callback.monitoring.session.session import Session
from hdi_callback.monitoring.session.settings import Settings
from tests.experiments.collapse.run import Loop
from tests.experiments.faults.faults import FAULTS, Fault, Run
from tests.experiments.faults.plan import EVERY, HEALTHY, PARTS, Job, plan
from tests.experiments.faults.trainings import BASES, DEEP, PROVOKED, Data, add_adapters, make_model, make_optimizers

RESULTS = Path("runs/faults")
PUBLISHED = Path("docs/benchmarks/faults.json.gz")
METRICS = [
    "hdi", "hdi_query", "head_correlation", "circuit_qk", "circuit_ov", "attention_entropy", "weights_not_finite",
    "outputs_not_finite", "head_contribution_min", "head_movement_min", "hdi_keys", "token_rank", "update_energy",
]  # fmt: skip


def train(
    job: Job,
    steps: int | None = None,
    interventions=(),
    fault: Fault | None = None,
    metrics=METRICS,
    thresholds=None,
    nudge: float = 0.0,
) -> dict[str, Any]:
    """Train as a job says, or with a fault that no plan knows; give the losses, the readings and the alerts.

    `nudge` is the share by which each weight is moved at random before the first step, as by rounding.
    """
    torch.set_num_threads(1)
    torch.manual_seed(job.seed)
    base = (BASES | PROVOKED | DEEP)[job.base]
    fault = fault or FAULTS.get(job.kind, Fault("", False, False))
    steps = base.steps if steps is None else steps
    model, data = make_model(base), Data(base.task, job.seed, base.batch)
    optimizers = make_optimizers(model, base)
    for _ in range(base.trained_before):
        model.loss(*data.draw()).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    if base.adapter_rank:
        add_adapters(model, base.adapter_rank)
        optimizers = make_optimizers(model, base)
    acted = Run(model, optimizers, job.seed)
    if nudge:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter *= 1 + nudge * torch.randn(parameter.shape, generator=acted.generator)
    if fault.begin is not None:
        with torch.no_grad():
            fault.begin(acted, 0)
    rates = [[group["lr"] for group in optimizer.param_groups] for optimizer in optimizers]
    losses, gradients, validation, norms = [], [], [], []
    readings: list[dict[str, Any]] = []
    alerts: list[tuple[int, str, str, str]] = []

    def write(results) -> None:
        for result in results:
            layers = result.record.layers
            values = {name: layer.values for name, layer in layers.items()}
            arrays = {name: {k: v for k, v in layer.arrays.items() if k in ARRAYS} for name, layer in layers.items()}
            readings.append({"step": result.record.step, "values": values, "arrays": arrays})
            alerts.extend((a.step, a.layer, a.rule, a.level) for a in result.alerts if not a.is_resolved)

    began = time.process_time()
    said = ExitStack()
    warned = said.enter_context(warnings.catch_warnings(record=True))
    warnings.simplefilter("always")
    with said, HeadDiversityMonitor(model, metrics=metrics) as monitor:
        facts = [dict(layer) for layer in monitor.facts]
        attention = acted.layers or [layer.module for layer in monitor.layers]
        loop = Loop(optimizers[0])
        settings = Settings(
            every_n_steps=EVERY,
            metrics=metrics,
            history=False,
            interventions=list(interventions),
            thresholds=thresholds,
        )
        session = Session(monitor, loop, settings)
        session.open()
        for step in range(steps):
            loop.position = Position(step)
            if step % EVERY == 0:
                validation.append(data.validate(model))
                norms.append(
                    math.sqrt(sum(float(p.detach().square().sum()) for m in attention for p in m.parameters()))
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
            for optimizer in optimizers:
                session.before_optimizer_step(optimizer)
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
        "alerts": alerts, "warnings": [str(one.message) for one in warned if isinstance(one.message, HDIWarning)],
        "facts": facts, "cpu_seconds": round(time.process_time() - began, 2),
    }  # fmt: skip


ARRAYS = (
    "rank", "effective_rank", "flatness", "head_norm", "nearest", "nearest_overlap", "worst_pair",
    "worst_alignment_pair", "energy_worst_alignment_pair", "attention_entropy", "attention_sink", "attention_logit",
    "attention_ahead", "attention_alike_worst_pair", "circuit_qk_norm", "circuit_ov_norm", "circuit_qk_worst_pair",
    "circuit_ov_worst_pair", "head_movement", "head_unchanged", "head_contribution", "outputs_not_finite",
    "weights_not_finite", "update_entropy",
)  # fmt: skip
"""What rules read of single heads."""


def _short(values: list[float]) -> list[float | None]:
    return [float(f"{value:.4g}") if math.isfinite(value) else None for value in values]


def _rounded(value: Any) -> Any:
    if not isinstance(value, float):
        return value
    return float(f"{value:.4g}") if math.isfinite(value) else None


def run(job: Job, folder: Path) -> bool:
    """Make one run, if it is not made; its file appears when it is complete."""
    done = folder / f"{job.name}.json.gz"
    if done.is_file():
        return False
    result = train(job)
    for reading in result["readings"]:
        reading["values"] = {
            layer: {name: float(f"{value:.4g}") for name, value in values.items()}
            for layer, values in reading["values"].items()
        }
        reading["arrays"] = {
            layer: {name: [_rounded(value) for value in array] for name, array in arrays.items()}
            for layer, arrays in reading["arrays"].items()
        }
    partial = done.with_suffix(".partial")
    partial.write_bytes(gzip.compress(json.dumps(result, separators=(",", ":")).encode(), mtime=0))
    partial.rename(done)
    return True


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", choices=PARTS, required=True)
    parser.add_argument("--kinds", nargs="*", help=f"only these kinds, such as {HEALTHY}")
    parser.add_argument("--rounds", type=int, help="how many confirming runs of each fault")
    parser.add_argument("--healthy", type=int, help="how many confirming healthy runs of each training")
    parser.add_argument("--share", nargs=2, type=int, default=(0, 1), help="of the runs, as 0 2 for every second one")
    parser.add_argument("--anew", action="store_true", help="make those that are published as well")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args(argv)
    folder = options.results / options.part
    folder.mkdir(parents=True, exist_ok=True)
    jobs = plan(options.part, rounds=options.rounds, healthy=options.healthy)
    jobs = [job for job in jobs if not options.kinds or job.kind in options.kinds]
    if PUBLISHED.is_file() and not options.anew:
        runs = json.loads(gzip.decompress(PUBLISHED.read_bytes()))
        known = {Job(run["kind"], run["base"], run["seed"]) for run in runs}
        jobs = [job for job in jobs if job not in known]
    part, parts = options.share
    jobs = jobs[part::parts]
    for number, job in enumerate(jobs, 1):
        if run(job, folder):
            print(f"{number}/{len(jobs)} {job.kind}, {job.base}, {job.seed}", flush=True)


if __name__ == "__main__":
    main()
