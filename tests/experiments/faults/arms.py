"""What else could help: one intervention a run, each beside its untouched twin and the healthy run of its seed.

python -m tests.experiments.faults.arms --output docs/benchmarks/interventions-by-attention.md

Two heads that a force draws together for thirty steps, judged by whether they attend alike long after it has ended; and
scores that grow, judged by the final loss. Arms and kinds were looked at on two other seeds, and fixed before those
below were used.
"""

from __future__ import annotations

import argparse
import copy
import gzip
import json
import math
from collections import deque
from collections.abc import Callable, Sequence
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
from tests.experiments.faults.growth import LIMIT, interval, publish
from tests.experiments.faults.plan import HEALTHY, Job
from tests.experiments.faults.report import Result
from tests.experiments.faults.run import RESULTS, train

FORCE_ENDS = START + 30
METRICS = ["hdi", "circuit_qk", "attention_entropy", "attention_alike_worst"]
SEEDS = tuple(range(90_100, 90_108))
GROWN_ON = "text, grouped"
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

    def follow(self, record: Record, reported: Any) -> Action | None:
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
    "ReviveHeads, late (worst pair at 0.8)": (lambda: [ReviveHeads(max_output_error=1)], {}),
    "ReviveHeads, early (worst pair at 0.4)": (lambda: [ReviveHeads(max_output_error=1)], {"pair": 0.4, "scores": 0.5}),
    "DiversityPenalty(1.0)": (lambda: [DiversityPenalty(1.0)], {}),
    'DiversityPenalty(1.0, measure="circuit")': (lambda: [DiversityPenalty(1.0, measure="circuit")], {}),
}
ALIKE = 0.9
"""Cosine of what two heads attend to, from which on they are said to attend alike."""
OF_SCORES: dict[str, tuple[Callable[[], list[Intervention]], dict[str, Any]]] = {
    "none": (list, {}),
    f"QKClip({LIMIT:g})": (lambda: [QKClip(LIMIT)], {}),
    "ScaleLearningRate(0.1)": (lambda: [ScaleLearningRate(0.1, rules=SLOWER)], {}),
    "back by 20 steps, and a tenth of the rate": (lambda: [GoBack()], {}),
}


def pairs_needed(seed: int) -> list[tuple[Job, str]]:
    """Give the runs of a seed with heads that merge: each with the intervention that it has."""
    return [(Job(HEALTHY, "text", seed), "none"), *((Job(MERGED, "text", seed), arm) for arm in OF_PAIRS)]


def scores_needed(seed: int) -> list[tuple[Job, str]]:
    """Give the runs of a seed with scores that grow."""
    grown = [(Job(kind, GROWN_ON, seed), arm) for kind in GROWN for arm in OF_SCORES]
    return [(Job(HEALTHY, GROWN_ON, seed), "none"), *grown]


def place_of(job: Job, arm: str, folder: Path) -> Path:
    return folder / f"{job.name}-{[*OF_PAIRS, *OF_SCORES].index(arm)}.json.gz"


def make(job: Job, arm: str, folder: Path) -> Result:
    """Make a run, if it is not made."""
    done = place_of(job, arm, folder)
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


def loss_gap(run: Result, twin: Result) -> float:
    """The final loss above that of the healthy run of the same seed."""
    final = run["validation"][-1]
    return math.inf if final is None else final - twin["validation"][-1]


def of_pairs(folder: Path, seeds: Sequence[int]) -> list[str]:
    lines = [
        f"Two heads of one layer ({MERGED}, from step {START} on), {len(seeds)} seeds; at the end of training, "
        f"{100 - FORCE_ENDS} steps after the force, of the pair that is most alike in any layer. Means with 95 % "
        f"intervals. *Attend alike*: in how many runs the cosine is {ALIKE} or more. The loss is the difference from "
        "the healthy run of the same seed, in nats.",
        "",
        "| | attend alike | cosine of the attention of two heads | of their QK circuits | alignment of their keys | "
        "loss |",
        "|---|---|---|---|---|---|",
    ]
    metrics = ("attention_alike_worst", "circuit_qk_worst", "hdi_worst_alignment")
    for kind, arm in [(HEALTHY, "none"), *((MERGED, arm) for arm in OF_PAIRS)]:
        runs = [make(Job(kind, "text", seed), arm, folder) for seed in seeds]
        twins = [make(Job(HEALTHY, "text", seed), "none", folder) for seed in seeds]
        alike = sum(at_end(run, metrics[0]) >= ALIKE for run in runs)
        shown = " | ".join(interval([at_end(run, metric) for run in runs]) for metric in metrics)
        gaps = interval([loss_gap(*pair) for pair in zip(runs, twins)], 3, is_signed=True)
        name, gaps = ("healthy", "-") if kind == HEALTHY else (arm, gaps)
        lines.append(f"| {name} | {alike} of {len(runs)} | {shown} | {gaps} |")
    return lines


def of_scores(folder: Path, seeds: Sequence[int]) -> list[str]:
    lines = [
        f"Scores that grow, two kinds ({'; '.join(GROWN)}), {len(seeds)} seeds each. Losses are differences from the "
        "healthy run of the same seed, in nats: means with 95 % intervals.",
        "",
        "| | " + " | ".join(GROWN) + " |",
        "|---|---|---|",
    ]
    for arm in OF_SCORES:
        cells = []
        for kind in GROWN:
            gaps = [
                loss_gap(
                    make(Job(kind, GROWN_ON, seed), arm, folder), make(Job(HEALTHY, GROWN_ON, seed), "none", folder)
                )
                for seed in seeds
            ]
            cells.append(interval(gaps, is_signed=True))
        lines.append(f"| {arm} | {' | '.join(cells)} |")
    return lines


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=RESULTS / "arms")
    parser.add_argument("--only-made", action="store_true", help="write of the seeds whose runs are all there")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(argv)
    folder = options.results
    folder.mkdir(parents=True, exist_ok=True)
    if not options.only_made:
        for needed in (pairs_needed, scores_needed):
            for seed in SEEDS:
                for job, arm in needed(seed):
                    make(job, arm, folder)
    of_pairs_made, of_scores_made = (
        [seed for seed in SEEDS if all(place_of(*one, folder).is_file() for one in needed(seed))]
        for needed in (pairs_needed, scores_needed)
    )
    publish([
        "Made by `python -m tests.experiments.faults.arms --output docs/benchmarks/interventions-by-attention.md`.",
        "",
        *of_scores(folder, of_scores_made),
        "",
        *of_pairs(folder, of_pairs_made),
    ], options.output)  # fmt: skip


if __name__ == "__main__":
    main()
