"""Train small models with faults and without, and count what the rules report.

    python -m tests.studies.experiments.faults [--every 10] [--workers 2] [--output docs/faults.md]

Results go to a file of JSON lines, so that a run that was ended goes on. All trainings take an hour on one core.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
from pathlib import Path

from examples.theory.models import NO_ENCODER, encoder
from tests.studies.experiments.faults.page import Result, page
from tests.studies.experiments.faults.plan import Job, plan
from tests.studies.experiments.faults.run import train

ENCODER = "trained encoder, fine-tuned"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--every", type=int, default=1, help="make every n-th training of the plan")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--results", type=Path, default=Path("runs/faults.jsonl"))
    parser.add_argument("--only-page", action="store_true", help="train nothing; write of what there is")
    parser.add_argument("--output", type=Path, help="where to write the page; printed by default")
    options = parser.parse_args(argv)
    results = read(options.results)
    if not options.only_page:
        make(missing(plan()[:: options.every], results), results, options.results, options.workers)
    text = page(results)
    if options.output is None:
        print(text)
    else:
        options.output.write_text(text, encoding="utf-8")


def make(jobs: list[Job], results: list[Result], path: Path, workers: int) -> None:
    """Train, and add each result to the others and to their file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with multiprocessing.Pool(workers) as pool, path.open("a", encoding="utf-8") as file:
        file.write("\n")  # the last line may have been cut short
        for number, result in enumerate(pool.imap_unordered(train, jobs), 1):
            results.append(result)
            file.write(json.dumps(result) + "\n")
            file.flush()
            print(f"{number}/{len(jobs)} {result['kind']}, {result['base']}, {result['seed']}", flush=True)


def read(path: Path) -> list[Result]:
    """The results so far, but for a line that was cut short when a run ended."""
    results = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else []:
        with contextlib.suppress(ValueError):
            results.append(json.loads(line))
    return results


def missing(jobs: list[Job], results: list[Result]) -> list[Job]:
    """The jobs that have no result yet, but for those of the trained encoder where it is not installed."""
    made = {Job(run["kind"], run["base"], run["seed"]) for run in results}
    jobs = [job for job in jobs if job not in made]
    if any(job.base == ENCODER for job in jobs) and encoder() is None:
        print(NO_ENCODER)
        jobs = [job for job in jobs if job.base != ENCODER]
    return jobs


if __name__ == "__main__":
    main()
