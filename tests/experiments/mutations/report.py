"""The page about what was broken, and what survived."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.experiments.mutations.plan import files
from tests.experiments.mutations.run import PACKAGE

VERDICTS = Path(__file__).with_name("verdicts.txt")
INTRODUCTION = """# Broken on purpose

<!-- Written by: python -m tests.experiments.mutations report -->

Do the tests notice when the code is wrong? One thing at a time is changed in a file: a comparison (`<` to `<=`), an
operation (`+` to `-`), a number by one, a condition that is never met, a value that is not returned. Then the tests of
that file are run, without those that are marked slow. What no test notices has survived: either the change makes no
difference (the column says why), or a test is missing. The changes are a sample, spread over the lines of each file.

    python -m tests.experiments.mutations run --results build/mutations.jsonl --per-file 8
"""


def page(results: Sequence[Mapping[str, Any]]) -> str:
    """Write the page."""
    noticed = ("killed", "ran out of time")
    tried = [one for one in results if one["outcome"] in (*noticed, "survived")]
    folders = sorted({one["file"].rpartition("/")[0] for one in tried})
    parts = [INTRODUCTION, "| folder | files | changes | noticed | survived |\n|---|---:|---:|---:|---:|"]
    for folder in folders:
        own = [one for one in tried if one["file"].rpartition("/")[0] == folder]
        outcomes = Counter(one["outcome"] for one in own)
        count = len({one["file"] for one in own})
        seen = sum(outcomes[kind] for kind in noticed)
        parts.append(f"| `{folder}` | {count} | {len(own)} | {seen} | {outcomes['survived']} |")
    names = {path.relative_to(PACKAGE).as_posix() for path in files(PACKAGE)}
    left = Counter(name.rpartition("/")[0] for name in names - {one["file"] for one in tried})
    if left:
        listed = ", ".join(f"{count} of `{folder}`" for folder, count in sorted(left.items()))
        parts.append(f"\nFiles that have not been run yet: {listed}.")
    parts.append("\n## What survived\n\n| file | line: change | what follows |\n|---|---|---|")
    verdicts = _verdicts()
    for one in sorted(tried, key=lambda one: (one["file"], int(one["change"].partition(":")[0]))):
        if one["outcome"] == "survived":
            change = one["change"].replace("|", "\\|").replace("`", "'")
            parts.append(f"| `{one['file']}` | `{change}` | {verdicts.get((one['file'], one['change']), 'open')} |")
    return "\n".join(parts) + "\n"


def _verdicts() -> dict[tuple[str, str], str]:
    """Read what was found out about survivors: lines of file, change and verdict, with tabs between."""
    lines = VERDICTS.read_text().splitlines() if VERDICTS.is_file() else []
    fields = [line.split("\t") for line in lines if line.count("\t") == 2]
    return {(file, change): verdict for file, change, verdict in fields if (PACKAGE / file).is_file()}
