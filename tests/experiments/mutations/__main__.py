"""Whether the tests notice when the code is broken: one change at a time, and the tests that run the changed line.

python -m tests.experiments.mutations record --reached build/reached.jsonl
python -m tests.experiments.mutations run --reached build/reached.jsonl --results build/mutations.jsonl
python -m tests.experiments.mutations report --results build/mutations.jsonl --output build/mutations.md
python -m tests.experiments.mutations keep --results build/mutations.jsonl --state a2056dc

With `--only hdi_callback/dashboards,hdi_callback/audits` these files alone are broken, and the tests of their subject
(`plan.SUBJECTS`) recorded.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from tests.experiments.mutations import plan, reach, report
from tests.experiments.mutations.run import read, run


def main() -> None:
    parser = argparse.ArgumentParser(description="Break the code on purpose, and see whether the tests notice.")
    parser.add_argument("what", choices=["record", "run", "report", "keep"])
    parser.add_argument("--reached", type=Path, default=Path("build/reached.jsonl"), help="which tests run which lines")
    parser.add_argument("--tests", nargs="*", help="which tests are recorded, or run: those of the files, or all")
    parser.add_argument("--results", type=Path, help="of changes: build/mutations.jsonl, or those of the page")
    parser.add_argument("--minutes", type=float, default=600)
    parser.add_argument("--budget", type=float, default=60, help="seconds of the processor for the tests of a change")
    parser.add_argument("--only", default="", help="parts of the paths of the files to break, with commas between")
    parser.add_argument("--changes", type=int, help="of each file, in place of those of the plan")
    parser.add_argument("--part", default="0/1", help='such as "1/2": the second of two that run side by side')
    parser.add_argument("--state", help="the commit whose files were broken, for results that are kept")
    parser.add_argument("--output", type=Path, default=Path("docs/mutations.md"))
    asked = parser.parse_args()
    tests = asked.tests or plan.tests(asked.only, reach.PACKAGE)
    if asked.what == "record":
        reach.record(asked.reached, tests)
    elif asked.what == "run":
        limits = {"minutes": asked.minutes, "budget": asked.budget}
        results = asked.results or Path("build/mutations.jsonl")
        run(results, asked.reached, **limits, tests=tests, only=asked.only, part=asked.part, changes=asked.changes)
    elif asked.what == "keep":
        if not asked.state or asked.results is None:
            parser.error("write --results and --state")
        kept = report.merged(read(report.RESULTS), read(asked.results), asked.state)
        report.RESULTS.write_text("".join(json.dumps(result) + "\n" for result in kept))
    else:
        verdicts = report.read_verdicts(report.VERDICTS.read_text().splitlines())
        written = report.page(read(asked.results or report.RESULTS), verdicts)
        _, mark, by_hand = asked.output.read_text().partition(report.BY_HAND) if asked.output.is_file() else ("",) * 3
        asked.output.write_text(written + mark + by_hand)


main()
