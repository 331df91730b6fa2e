"""What `QKClip` does to runs whose scores grew: each beside its untouched twin and the healthy run of the same seed.

python -m tests.experiments.faults.qk_clip --output docs/benchmarks/qk-clip-of-faults.md
"""

from __future__ import annotations

import argparse
import gzip
import json
from pathlib import Path

from hdi_callback.monitoring.interventions import QKClip
from tests.experiments.faults import report
from tests.experiments.faults.plan import HEALTHY, PARTS, Job
from tests.experiments.faults.run import RESULTS, train
from tests.experiments.faults.trainings import BASES, PROVOKED

GROWN, LIMIT, MISTAKEN = 50.0, 30.0, 4.0


def largest(run: report.Result) -> float:
    """The largest score of any layer at any reading."""
    if "scores" in run:  # of a published run
        return max((score for _, score in run["scores"]["attention: largest score"] if score is not None), default=0.0)
    return max(
        (layer.get("attention_logit", 0.0) for reading in run["readings"] for layer in reading["values"].values()),
        default=0.0,
    )


def make(job: Job, limit: float | None, folder: Path) -> report.Result:
    """Make a run, if it is not made."""
    done = folder / f"{job.name}-{limit}.json.gz"
    if not done.is_file():
        result = train(job, interventions=[] if limit is None else [QKClip(limit)])
        partial = done.with_suffix(".partial")
        partial.write_bytes(gzip.compress(json.dumps(result).encode(), mtime=0))
        partial.rename(done)
    result = json.loads(gzip.decompress(done.read_bytes()))
    print(job.name, limit, result["validation"][-1], flush=True)
    return result


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--mistaken", type=int, default=20, help="healthy runs in which it is made to act")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(argv)
    folder = options.results / "qk-clip"
    folder.mkdir(parents=True, exist_ok=True)
    runs = [run for part in PARTS for run in report.read(options.results / part)]
    grown = [run for run in runs if run["kind"] != HEALTHY and largest(run) > GROWN]
    lines = [
        "Made by `python -m tests.experiments.faults.qk_clip --output docs/benchmarks/qk-clip-of-faults.md`, from the "
        f"runs of the benchmark of faults whose largest score came above {GROWN:.0f}. Final validation losses in nats; "
        "the healthy run has the same seed.",
        "",
        f"| fault | training | largest score | healthy | untouched | `QKClip({LIMIT:.0f})` | its largest score |",
        "|---|---|---|---|---|---|---|",
    ]
    diverged = saved = 0
    for run in grown:
        job = Job(run["kind"], run["base"], run["seed"])
        clipped, healthy = make(job, LIMIT, folder), make(Job(HEALTHY, job.base, job.seed), None, folder)
        losses = [one["validation"][-1] for one in (healthy, run, clipped)]
        shown = ["not finite" if loss is None else f"{loss:.2f}" for loss in losses]
        is_diverged = losses[1] is None or losses[1] > losses[0] + report.COST
        diverged += is_diverged
        saved += is_diverged and losses[2] is not None and losses[2] <= losses[0] + report.COST
        lines.append(f"| {job.kind} | {job.base} | {largest(run):.0f} | {' | '.join(shown)} | {largest(clipped):.0f} |")
    lines += [
        "",
        f"Of the {len(grown)} runs {diverged} ended more than {report.COST} nats above the healthy run of their "
        f"seed; with `QKClip` {saved} of these {diverged} ended within {report.COST} nats of it.",
    ]
    differences = []
    plain = [run for run in runs if run["kind"] == HEALTHY and not (BASES | PROVOKED)[run["base"]].adapter_rank]
    for run in [run for run in plain if largest(run) > MISTAKEN][: options.mistaken]:  # adapters cannot be clipped
        clipped = make(Job(HEALTHY, run["base"], run["seed"]), MISTAKEN, folder)
        differences.append(clipped["validation"][-1] - run["validation"][-1])
    if differences:
        lines += [
            "",
            f"`QKClip({MISTAKEN:.0f})` on {len(differences)} healthy runs whose scores are above that: the final loss "
            f"changed by {min(differences):+.3f} to {max(differences):+.3f} nats, by more than 0.01 in "
            f"{sum(abs(one) > 0.01 for one in differences)}.",
        ]
    text = "\n".join(lines) + "\n"
    print(text)
    if options.output is not None:
        options.output.write_text(text)


if __name__ == "__main__":
    main()
