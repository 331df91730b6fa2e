"""Published runs made again, drawn by a fixed seed: do the rules of now raise the alerts that are published?

python -m tests.experiments.faults.again --output docs/benchmarks/faults-again.md
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from tests.experiments.faults.plan import FRESH, HEALTHY, Job
from tests.experiments.faults.run import PUBLISHED, RESULTS, run
from tests.experiments.faults.trainings import LONG

SEED = 20261124
NEAR = 2e-3
"""Losses are published with four digits; those that differ by less, as a share, agree."""

Run = dict[str, Any]


def drawn(published: Sequence[Run], each: int) -> list[Run]:
    """As many healthy runs as faulty ones, alternating, of the parts before the fresh one; long ones are left out."""
    known = sorted((run for run in published if run["seed"] < FRESH and run["base"] not in LONG), key=_key)
    generator = random.Random(SEED)
    healthy = generator.sample([run for run in known if run["kind"] == HEALTHY], each)
    faulty = generator.sample([run for run in known if run["kind"] != HEALTHY], each)
    return [run for pair in zip(healthy, faulty) for run in pair]


def _key(run: Run) -> tuple[str, str, int]:
    return run["kind"], run["base"], run["seed"]


def alarms(run: Run) -> set[tuple[int, str, str]]:
    """Step, layer and rule of what is no notice."""
    return {(step, layer, rule) for step, layer, rule, level in run["alerts"] if level != "notice"}


def has_same_losses(before: Run, now: Run) -> bool:
    pairs = list(zip(before["validation"], now["validation"], strict=True))
    return all(a == b or (a is not None and b is not None and abs(a - b) <= NEAR * abs(a)) for a, b in pairs)


def page(pairs: Sequence[tuple[Run, Run]], each: int) -> str:
    """Agreement, and every run in which alarms differ."""
    rows, other = [], []
    for name, is_healthy in (("healthy", True), ("with a fault", False)):
        chosen = [(before, now) for before, now in pairs if (before["kind"] == HEALTHY) == is_healthy]
        counts = [
            len(chosen),
            sum(has_same_losses(*pair) for pair in chosen),
            sum(bool(alarms(before)) for before, _ in chosen),
            sum(bool(alarms(now)) for _, now in chosen),
            sum(bool(alarms(before)) == bool(alarms(now)) for before, now in chosen),
            sum(alarms(before) == alarms(now) for before, now in chosen),
        ]
        rows.append(f"| {name} | {' | '.join(map(str, counts))} |")
        other += [
            f"| {before['kind']}, {before['base']}, {before['seed']} | {_told(alarms(before) - alarms(now))} | "
            f"{_told(alarms(now) - alarms(before))} |"
            for before, now in chosen
            if alarms(before) != alarms(now)
        ]
    made = (
        "Made by `python -m tests.experiments.faults.again --output docs/benchmarks/faults-again.md`: "
        f"{len(pairs)} of {2 * each} published runs drawn by `random.Random({SEED})`, trained again and judged by the "
        f"rules of now, torch {torch.__version__.partition('+')[0]}. Losses agree within {100 * NEAR:g} %."
    )
    head = "| runs | made again | same losses | alarmed as published | alarmed now | agree | same alerts |"
    lines = [made, "", head, "|---|---|---|---|---|---|---|", *rows]
    if other:
        lines += ["", "| alerts differ | only as published | only now |", "|---|---|---|", *other]
    return "\n".join([*lines, ""])


def _told(found: set[tuple[int, str, str]]) -> str:
    counts: dict[str, list[int]] = {}
    for step, _, rule in sorted(found):
        counts.setdefault(rule, []).append(step)
    return ", ".join(f"*{rule}* (step {', '.join(map(str, steps))})" for rule, steps in counts.items()) or "-"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--each", type=int, default=30, help="healthy runs, and as many faulty ones")
    parser.add_argument(
        "--results", type=Path, default=RESULTS / "drawn", help="runs that are there are not made again"
    )
    parser.add_argument("--made", action="store_true", help="write about the runs that are there, and make none")
    parser.add_argument("--output", type=Path, help="where to write the page; printed by default")
    options = parser.parse_args(argv)
    options.results.mkdir(parents=True, exist_ok=True)
    chosen = drawn(json.loads(gzip.decompress(PUBLISHED.read_bytes())), options.each)
    pairs = []
    for number, before in enumerate(chosen, 1):
        job = Job(before["kind"], before["base"], before["seed"])
        if not options.made and run(job, options.results):
            print(f"{number}/{len(chosen)} {job.kind}, {job.base}, {job.seed}", flush=True)
        made = options.results / f"{job.name}.json.gz"
        if made.is_file():
            pairs.append((before, json.loads(gzip.decompress(made.read_bytes()))))
    text = page(pairs, options.each)
    if options.output is None:
        print(text)
    else:
        options.output.write_text(text)


if __name__ == "__main__":
    main()
