from __future__ import annotations

import argparse
from pathlib import Path

from tests.experiments.mutations.report import page
from tests.experiments.mutations.run import read, run


def main() -> None:
    parser = argparse.ArgumentParser(description="Break the code on purpose, and see whether the tests notice.")
    parser.add_argument("what", choices=["run", "report"])
    parser.add_argument("--results", type=Path, default=Path("build/mutations.jsonl"))
    parser.add_argument("--per-file", type=int, default=6)
    parser.add_argument("--minutes", type=float, default=600)
    parser.add_argument("--only", default="", help="a part of the paths of the files to break")
    parser.add_argument("--output", type=Path, default=Path("docs/mutations.md"))
    asked = parser.parse_args()
    if asked.what == "run":
        run(asked.results, per_file=asked.per_file, minutes=asked.minutes, only=asked.only)
    else:
        asked.output.write_text(page(read(asked.results)))


main()
