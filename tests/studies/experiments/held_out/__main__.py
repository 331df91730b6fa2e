"""Train tasks that no limit was set on, healthy and with faults in the middle, and count what is told.

    python -m tests.studies.experiments.held_out "held back" [--healthy 6] [--faulty 5] [--output docs/held-out.md]

Results go to a file of JSON lines, so that a run that was ended goes on.
"""

from __future__ import annotations

import argparse
import contextlib
import json
from pathlib import Path

import torch

from tests.studies.experiments.held_out.page import Result, page
from tests.studies.experiments.held_out.run import PARTS, Job, judged, plan, train


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=list(PARTS))
    parser.add_argument("--healthy", type=int, default=6, help="healthy trainings of each task")
    parser.add_argument("--faulty", type=int, default=5, help="trainings of each fault")
    parser.add_argument("--results", type=Path, help="runs/<part>.jsonl by default: each part has a table of its own")
    parser.add_argument("--keep", type=Path, help="a folder for the readings, so that other rules can judge them")
    parser.add_argument("--again", action="store_true", help="train nothing; judge the readings of --keep")
    parser.add_argument("--output", type=Path, help="where to write the table; printed by default")
    options = parser.parse_args(argv)
    options.results = options.results or Path("runs", f"{options.part.replace(', ', '-').replace(' ', '-')}.jsonl")
    results: list[Result] = []
    for line in options.results.read_text(encoding="utf-8").splitlines() if options.results.is_file() else []:
        with contextlib.suppress(ValueError):  # a line that was cut short
            results.append(json.loads(line))
    if options.again:
        for result in results:
            file = options.keep / f"{result['kind']}, {result['task']}, {result['seed']}.pt"
            result["alerts"] = judged(*torch.load(file, weights_only=False))
        jobs = []
    else:
        past = {Job(result["kind"], result["task"], result["seed"]) for result in results}
        jobs = [job for job in plan(options.part, options.healthy, options.faulty) if job not in past]
    options.results.parent.mkdir(parents=True, exist_ok=True)
    with options.results.open("a", encoding="utf-8") as lines:
        for job in jobs:
            results.append(train(job, options.keep))
            lines.write(json.dumps(results[-1]) + "\n")
            lines.flush()
    text = page(results)
    print(text) if options.output is None else options.output.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
