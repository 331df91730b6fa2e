"""What else could help: one intervention a run, each beside its untouched twin and the healthy run of its seed.

python -m tests.experiments.faults.arms --output docs/benchmarks/interventions-by-attention.md

Two heads that a force draws together for thirty steps, judged by whether they attend alike long after it has ended; and
scores that grow, judged by the final loss.
"""

from __future__ import annotations

import argparse
import copy
import gzip
import json
import statistics
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from hdi_callback.monitoring.alerts import Alert
from hdi_callback.monitoring.interventions import (
    Action,
    DiversityPenalty,
    Intervention,
    QKClip,
    ReviveHeads,
    ScaleLearningRate,
)
from hdi_callback.monitoring.readings import Record
from tests.experiments.faults.faults import START, Fault, Run
from tests.experiments.faults.growth import KINDS as GROWTH
from tests.experiments.faults.growth import LIMIT, publish
from tests.experiments.faults.plan import HEALTHY, Job
from tests.experiments.faults.report import Result
from tests.experiments.faults.run import RESULTS, train

FORCE_ENDS = START + 30
METRICS = ["hdi", "circuit_qk", "attention_entropy", "attention_alike_worst"]
SEEDS = (90_000, 90_001)
GROWN = ("queries and keys learn 100 times faster", "queries and keys learn 300 times faster, for 5 steps")


def _merge(run: Run, step: int) -> None:
    if step < FORCE_ENDS:
        for role in ("q", "k"):
            weight = run.heads(role)[:2]
            weight += 0.1 * (weight.mean(0, keepdim=True) - weight)


MERGED = "two heads are drawn together for 30 steps"
FAULTS = {MERGED: Fault("collapse", False, True, after=_merge)} | {kind: GROWTH[kind] for kind in GROWN}


class GoBack(Intervention):
    """Put weights and the optimizer's state back to what they were some readings ago, and learn at a tenth since."""

    name = "GoBack"
    rules = ("logit growth", "entropy collapse")
    at_most = 3
    readings = 4

    def attach(self, training: Any) -> None:
        super().attach(training)
        self._kept: deque[Any] = deque(maxlen=self.readings)
        self._factor = 1.0
        for optimizer in training.optimizers:
            optimizer.register_step_pre_hook(self._slow)

    def follow(self, record: Record, told: Any) -> Action | None:
        weights = [
            parameter.detach().clone()
            for optimizer in self.training.optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
        ]
        self._kept.append((weights, [copy.deepcopy(one.state_dict()["state"]) for one in self.training.optimizers]))
        return None

    @torch.no_grad()
    def act(self, alert: Alert) -> Action | None:
        if not self._kept:
            return None
        weights, states = self._kept[0]
        kept = iter(weights)
        for optimizer, state in zip(self.training.optimizers, states):
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.copy_(next(kept))
            optimizer.load_state_dict({**optimizer.state_dict(), "state": copy.deepcopy(state)})
        self._factor *= 0.1
        return self._action(alert, "went back, and learns at a tenth of the rate since")

    def _slow(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * self._factor  # set anew by the loop before each step


SLOWER = ["logit growth", "entropy collapse"]
OF_PAIRS: dict[str, tuple[Callable[[], list[Intervention]], dict[str, Any]]] = {
    "none": (list, {}),
    "ReviveHeads, late (worst pair at 0.8)": (lambda: [ReviveHeads(max_loss=1)], {}),
    "ReviveHeads, early (worst pair at 0.4)": (lambda: [ReviveHeads(max_loss=1)], {"pair": 0.4, "scores": 0.5}),
    "DiversityPenalty(1.0)": (lambda: [DiversityPenalty(1.0)], {}),
    'DiversityPenalty(1.0, measure="circuit")': (lambda: [DiversityPenalty(1.0, measure="circuit")], {}),
}
OF_SCORES: dict[str, tuple[Callable[[], list[Intervention]], dict[str, Any]]] = {
    "none": (list, {}),
    f"QKClip({LIMIT:g})": (lambda: [QKClip(LIMIT)], {}),
    "ScaleLearningRate(0.1)": (lambda: [ScaleLearningRate(0.1, rules=SLOWER)], {}),
    "back by 20 steps, and a tenth of the rate": (lambda: [GoBack()], {}),
}


def make(job: Job, arm: str, folder: Path) -> Result:
    """Make a run, if it is not made."""
    place = [*OF_PAIRS, *OF_SCORES].index(arm)
    done = folder / f"{job.name}-{place}.json.gz"
    if not done.is_file():
        made, thresholds = (OF_PAIRS | OF_SCORES)[arm]
        result = train(job, None, made(), FAULTS.get(job.kind), METRICS, {"*": thresholds} if thresholds else None)
        partial = done.with_suffix(".partial")
        partial.write_bytes(gzip.compress(json.dumps(result).encode(), mtime=0))
        partial.rename(done)
        print(job, arm, result["validation"][-1], result["alerts"][:2], flush=True)
    return json.loads(gzip.decompress(done.read_bytes()))


def at_end(run: Result, metric: str) -> float:
    """The largest of all layers at the last reading."""
    return max(values[metric] for values in run["readings"][-1]["values"].values())


def of_pairs(folder: Path) -> list[str]:
    lines = [
        f"Two heads of one layer ({MERGED}, from step {START} on), {len(SEEDS)} seeds; medians at the end of training, "
        f"{100 - FORCE_ENDS} steps after the force, of the pair that is most alike in any layer. Losses are "
        "differences from the healthy run of the same seed.",
        "",
        "| | cosine of the attention of two heads | of their QK circuits | alignment of their keys | loss |",
        "|---|---|---|---|---|",
    ]
    for kind, arm in [(HEALTHY, "none"), *((MERGED, arm) for arm in OF_PAIRS)]:
        runs = [(make(Job(kind, "text", seed), arm, folder), make(Job(HEALTHY, "text", seed), "none", folder))
                for seed in SEEDS]  # fmt: skip
        metrics = ("attention_alike_worst", "circuit_qk_worst", "hdi_worst_alignment")
        shown = " | ".join(f"{statistics.median(at_end(run, metric) for run, _ in runs):.2f}" for metric in metrics)
        differences = [run["validation"][-1] - twin["validation"][-1] for run, twin in runs]
        name = "healthy" if kind == HEALTHY else arm
        lines.append(f"| {name} | {shown} | {min(differences):+.3f} to {max(differences):+.3f} |")
    return lines


def of_scores(folder: Path) -> list[str]:
    lines = [
        f"Scores that grow, two kinds ({'; '.join(GROWN)}), {len(SEEDS)} seeds each. Losses are differences from the "
        "healthy run of the same seed, in nats.",
        "",
        "| | " + " | ".join(GROWN) + " |",
        "|---|---|---|",
    ]
    for arm in OF_SCORES:
        cells = []
        for kind in GROWN:
            base = "text, grouped"
            pairs = [(make(Job(kind, base, seed), arm, folder), make(Job(HEALTHY, base, seed), "none", folder))
                     for seed in SEEDS]  # fmt: skip
            finals = [(run["validation"][-1], twin["validation"][-1]) for run, twin in pairs]
            cells.append(", ".join("not finite" if one is None else f"{one - two:+.2f}" for one, two in finals))
        lines.append(f"| {arm} | {' | '.join(cells)} |")
    return lines


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=RESULTS / "arms")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(argv)
    options.results.mkdir(parents=True, exist_ok=True)
    publish([
        "Made by `python -m tests.experiments.faults.arms --output docs/benchmarks/interventions-by-attention.md`.",
        "",
        *of_scores(options.results),
        "",
        *of_pairs(options.results),
    ], options.output)  # fmt: skip


if __name__ == "__main__":
    main()
