"""What each intervention does to a collapse, to the validation loss, and to a healthy run that it disturbs by mistake.

python -m tests.experiments.collapse.interventions --output docs/benchmarks/interventions.md
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from scipy.stats import t as student

from hdi_callback.monitoring.alerts import Finding, Rule
from hdi_callback.monitoring.interventions import DiversityPenalty, Intervention, ReviveHeads, ScaleLearningRate
from hdi_callback.monitoring.rules import default_rules
from tests.experiments.collapse.plan import HEALTHY, Spec, draw
from tests.experiments.collapse.run import RESULTS, train
from tests.experiments.pages import publish

SEEDS = tuple(range(20_000, 20_004))
ARMS: dict[str, Callable[[], list[Intervention]]] = {
    "none": list,
    "DiversityPenalty(1.0)": lambda: [DiversityPenalty(1.0)],
    "ReviveHeads()": lambda: [ReviveHeads(rules=["worst pair", "tied heads", "mean alignment"], max_output_error=1)],
    "ScaleLearningRate(0.1)": lambda: [ScaleLearningRate(0.1)],
}
# kind -> for how many steps the force acts; the loss term that rewards aligned heads stays to the end
COLLAPSES: dict[str, float] = {
    "all heads, fast": 60,
    "one pair": 100,
    "tied initialisation": 0,
    "rewarded alignment": math.inf,
}
MISTAKE = "healthy, by mistake"


class Mistake(Rule):
    """Raises an alert about two healthy heads of one layer for a while."""

    name = "worst pair"

    def __init__(self, layer: int, start: int, stop: int) -> None:
        self.layers, self.start, self.stop = [f"blocks.{layer}.*"], start, stop

    def judge(self, series, active):
        is_on = self.start <= series.latest.step < self.stop
        return Finding("a mistake", "warning", heads=(0, 1)) if is_on else None


def spec_of(kind: str, seed: int) -> Spec:
    """One shape and one schedule for each seed, whatever the kind, so that runs of one seed are twins."""
    return replace(draw(HEALTHY, seed), kind=HEALTHY if kind == MISTAKE else kind, batch=8)


def run(job: tuple[str, str, int, Path]) -> None:
    kind, arm, seed, folder = job
    done = folder / f"{kind}-{arm}-{seed}.json".replace(" ", "-")
    if done.is_file():
        return
    spec = spec_of(kind, seed)
    rules = [Mistake(spec.layer, spec.start, spec.start + 100)] if kind == MISTAKE else default_rules()
    until = spec.start + COLLAPSES.get(kind, 0)
    result = train(spec, None, ARMS[arm](), force_until=until, rules=rules)
    partial = done.with_suffix(".partial")
    partial.write_text(json.dumps({"kind": kind, "arm": arm, "seed": seed, **result}))
    partial.rename(done)


def jobs(seeds: Sequence[int], folder: Path) -> list[tuple[str, str, int, Path]]:
    arms = list(ARMS)
    planned = [(kind, arm, seed, folder) for seed in seeds for kind in COLLAPSES for arm in arms]
    planned += [(MISTAKE, arm, seed, folder) for seed in seeds for arm in arms]
    return planned


def interval(differences: Sequence[float]) -> str:
    """Write a mean with its 95 % interval (Student)."""
    mean = statistics.fmean(differences)
    if len(differences) < 2:
        return f"{mean:+.3f}"
    half = student.ppf(0.975, len(differences) - 1) * statistics.stdev(differences) / len(differences) ** 0.5
    return f"{mean:+.3f} ({mean - half:+.3f} to {mean + half:+.3f})"


def report(folder: Path) -> list[str]:
    results = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    seeds = sorted({item["seed"] for item in results})
    by: dict[tuple[str, str, int], dict[str, Any]] = {(r["kind"], r["arm"], r["seed"]): r for r in results}
    lines = [
        "Made by `python -m tests.experiments.collapse.interventions --output docs/benchmarks/interventions.md`: seeds "
        f"{seeds[0]} to {seeds[-1]}, one model and schedule each.",
        "Alignment: medians over the seeds at the end of training, in the layer made to collapse. Losses: mean "
        "difference of the validation loss from the twin of the same seed, with its 95 % interval.",
        "",
    ]
    heading = "| | mean alignment | worst pair | loss, against the untouched twin | loss, against a healthy twin |"
    for kind in [*COLLAPSES, MISTAKE]:
        lines += [f"### {kind[0].upper()}{kind[1:]}", "", heading, "|---|---|---|---|---|"]
        for arm in ARMS:
            chosen = [by[kind, arm, seed] for seed in seeds if (kind, arm, seed) in by]
            ends = [item["final"][item["layer"]] for item in chosen]
            alone = [
                item["validation_loss"] - by[kind, "none", item["seed"]]["validation_loss"]
                for item in chosen
                if (kind, "none", item["seed"]) in by
            ]
            healthy = [
                item["validation_loss"] - by[MISTAKE, "none", item["seed"]]["validation_loss"]
                for item in chosen
                if (MISTAKE, "none", item["seed"]) in by
            ]
            mean = statistics.median(end["hdi_alignment"] for end in ends)
            worst = statistics.median(end["hdi_worst_alignment"] for end in ends)
            lines.append(
                f"| {arm} | {mean:.2f} | {worst:.2f} | {interval(alone) if arm != 'none' else '-'} | "
                f"{interval(healthy) if (kind, arm) != (MISTAKE, 'none') else '-'} |"
            )
        lines.append("")
    return lines


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seeds", type=int, nargs="*", default=SEEDS)
    parser.add_argument("--results", type=Path, default=RESULTS / "interventions")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(argv)
    options.results.mkdir(parents=True, exist_ok=True)
    planned = jobs(options.seeds, options.results)
    with multiprocessing.get_context("spawn").Pool(options.workers) as pool:
        for number, _ in enumerate(pool.imap_unordered(run, planned), 1):
            if number % 10 == 0:
                print(f"{number}/{len(planned)}", flush=True)
    publish(report(options.results), options.output)


if __name__ == "__main__":
    main()
