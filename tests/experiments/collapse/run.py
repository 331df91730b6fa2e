"""Run the plan, one process per run, and never a run that is finished.

python -m tests.experiments.collapse.run --part looked-at --workers 2
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from hdi_callback import HeadDiversityMonitor
from hdi_callback.monitoring.alerts import Rule
from hdi_callback.monitoring.history import History
from hdi_callback.monitoring.interventions import Intervention
from hdi_callback.monitoring.session.host import PlainHost
from hdi_callback.monitoring.session.position import Position
from hdi_callback.monitoring.session.session import Session
from hdi_callback.monitoring.session.settings import Settings
from tests.experiments.collapse.forces import Force
from tests.experiments.collapse.models import Data, Model
from tests.experiments.collapse.plan import EVERY, HEALTHY, PARTS, Spec, plan

RESULTS = Path("runs/collapse")


class Loop(PlainHost):
    """What this loop offers to a session, and to interventions."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__()
        self.optimizers = [optimizer]
        self.position = Position(0)
        self.is_stopped = False

    def stop(self) -> None:
        self.is_stopped = True

    def save(self, name: str) -> str:
        return name

    def sinks(self, *args: Any) -> list[Any]:
        return []


def train(
    spec: Spec,
    history: Path | None = None,
    interventions: Sequence[Intervention] = (),
    *,
    force_until: float = math.inf,
    rules: Sequence[Rule] | None = None,
) -> dict[str, Any]:
    """Train one model as its spec says, and give its losses."""
    torch.set_num_threads(1)
    torch.manual_seed(spec.seed)
    model, data = Model(spec.shape), Data(spec.shape.task, spec.seed, spec.batch)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=spec.learning_rate, betas=(0.9, 0.95), weight_decay=spec.weight_decay
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1, (step + 1) / (spec.warm_up + 1)) * (1 - 0.9 * step / spec.steps)
    )
    curve = []
    with HeadDiversityMonitor(model, metrics=["hdi"]) as monitor:
        force = Force(spec.kind, monitor.layers[spec.layer], spec.start, spec.seed)
        force.before_training()
        loop = Loop(optimizer)
        settings = Settings(
            every_n_steps=EVERY, alerts="default" if rules is None else list(rules), interventions=list(interventions),
            history=False,
        )  # fmt: skip
        session = Session(monitor, loop, settings)
        session.open(history=None if history is None else History(history, matrix_every=0))
        for step in range(spec.steps):
            loop.position = Position(step)
            session.before_forward()
            loss = model.loss(*data.draw())
            curve.append(float(loss.detach()))
            if step < force_until:
                loss = force.on_loss(loss, step)
            loss.backward()
            session.after_backward()
            session.before_optimizer_step(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            if step < force_until:
                force.after_step(step)
            loop.position = Position(step + 1)
            session.after_step()
            if loop.is_stopped:
                break
        session.finish()
        final = session.monitor.measure(len(curve)).record().layers
    return {
        "train_loss": sum(curve[-20:]) / 20,
        "first_loss": curve[0],
        "validation_loss": data.validate(model),
        "steps": len(curve),
        "layer": monitor.layers[spec.layer].name,
        "final": {name: layer.values for name, layer in final.items()},
    }


def run(spec: Spec, folder: Path) -> None:
    """Make one run, if it is not made yet; its JSON appears when it is complete."""
    done = folder / f"{spec.name}.json"
    if done.is_file():
        return
    history = folder / f"{spec.name}.jsonl"
    history.unlink(missing_ok=True)
    began = time.process_time()
    result = train(spec, history)
    result = {"spec": spec.to_dict(), **result, "cpu_seconds": round(time.process_time() - began, 1)}
    partial = done.with_suffix(".partial")
    partial.write_text(json.dumps(result))
    partial.rename(done)


def _run(job: tuple[Spec, Path]) -> str:
    run(*job)
    return job[0].name


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", choices=PARTS, required=True)
    parser.add_argument("--kinds", nargs="*", help=f"only these kinds, such as {HEALTHY}")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args(argv)
    folder = options.results / options.part
    folder.mkdir(parents=True, exist_ok=True)
    specs = [spec for spec in plan(options.part) if not options.kinds or spec.kind in options.kinds]
    with multiprocessing.get_context("spawn").Pool(options.workers) as pool:
        for number, name in enumerate(pool.imap_unordered(_run, [(spec, folder) for spec in specs]), 1):
            print(f"{number}/{len(specs)} {name}", flush=True)


if __name__ == "__main__":
    main()
