"""The page about what was broken, and what survived."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.experiments.mutations.plan import files
from tests.experiments.mutations.reach import PACKAGE
from tests.experiments.mutations.run import digest

VERDICTS = Path(__file__).with_name("verdicts.txt")
INTRODUCTION = """# Broken on purpose: one run

<!-- Written by: python -m tests.experiments.mutations report -->

Do the tests notice when the code is wrong? One thing at a time is changed in a file: a comparison (`<` to `<=`), an
operation (`+` to `-`), a number by one, a condition that is never met, a value that is not returned. Then the tests
that run the changed line are run, those first that are quick and run little else, until one fails or a budget of
processor time is spent. Which tests run which lines is recorded first. What none of them notices has survived: either
the change makes no difference (the column says why), or a test is missing. The changes are a sample, spread over the
lines of each file; words of errors and warnings, annotations and decorators are left as they are. Tests that are marked
slow are left out, but for those of `attention/observe`, and so are those of the integrations and of several processes.

    python -m tests.experiments.mutations record --reached build/reached.jsonl
    python -m tests.experiments.mutations run --reached build/reached.jsonl --results build/mutations.jsonl
    python -m tests.experiments.mutations report --results build/mutations.jsonl

What none of these tests runs at all stands apart: it is run by tests that start further processes, by slow ones, or by
none. So does what is not settled: tests whose time was within the budget did not notice, and others that run the line
were not asked. "Noticed by now" names a test that was written since, and that was seen to fail on the change.
"""
NOTICED = ("killed", "ran out of time")
Result = Mapping[str, Any]


def page(results: Sequence[Result]) -> str:
    """Write the page."""
    tried = [one for one in results if one["outcome"] in (*NOTICED, "survived")]
    parts = [INTRODUCTION]
    if budgets := sorted({one["budget"] for one in tried if "budget" in one}):
        seconds = " or ".join(f"{budget:g}" for budget in budgets)
        parts.append(f"In this run the tests of a change had {seconds} seconds of the processor.\n")
    parts.append("| folder | files | changes | noticed | survived | not settled | not run |")
    parts.append("|---|---:|---:|---:|---:|---:|---:|")
    folders = sorted({_folder(one["file"]) for one in tried})
    parts += [_row(f"`{folder}`", [one for one in tried if _folder(one["file"]) == folder]) for folder in folders]
    parts.append(_row("all", tried))
    present = {path.relative_to(PACKAGE).as_posix(): path for path in files(PACKAGE)}
    if left := sorted(name for name in present if name not in {one["file"] for one in tried}):
        counts = Counter(_folder(name) for name in left)
        listed = ", ".join(f"{count} of `{folder}`" for folder, count in sorted(counts.items()))
        parts.append(
            f"\nFiles with nothing to change, newer ones, and those that were not broken in this run: {listed}."
        )
    if later := sorted({one["file"] for one in tried if _is_older(one, present)}):
        listed = ", ".join(f"`{name}`" for name in later)
        parts.append(f"\nWritten again or moved since, with lines numbered as they were: {listed}.")
    titles = {"survived": "What survived", "not settled": "What is not settled", "not run": "What none of them runs"}
    for kind, title in titles.items():
        parts += [f"\n## {title}\n", *_table([one for one in tried if _kind(one) == kind])]
    return "\n".join(parts) + "\n"


def _kind(one: Result) -> str:
    if one["outcome"] in NOTICED:
        return "noticed"
    if not one.get("of", 1):
        return "not run"
    return "survived" if one.get("tests", 0) >= one.get("of", 0) else "not settled"


def _table(survived: Sequence[Result]) -> Iterator[str]:
    yield "| file | line: change | tests, of those that run it | what follows |\n|---|---|---:|---|"
    verdicts = _verdicts()
    for one in sorted(survived, key=lambda one: (one["file"], int(one["change"].partition(":")[0]))):
        change = one["change"].replace("|", "\\|").replace("`", "'")
        verdict = verdicts.get((one["file"], one["change"]), "open")
        yield f"| `{one['file']}` | `{change}` | {one.get('tests', '')} of {one.get('of', '')} | {verdict} |"


def _folder(file: str) -> str:
    return file.rpartition("/")[0]


def _row(name: str, tried: Sequence[Result]) -> str:
    kinds = Counter(_kind(one) for one in tried)
    counts = [kinds[kind] for kind in ("noticed", "survived", "not settled", "not run")]
    return f"| {name} | {' | '.join(map(str, [len({one['file'] for one in tried}), len(tried), *counts]))} |"


def _is_older(one: Result, present: Mapping[str, Path]) -> bool:
    return "digest" in one and (one["file"] not in present or one["digest"] != digest(present[one["file"]]))


def _verdicts() -> dict[tuple[str, str], str]:
    """Read what was found out about survivors: lines of file, change and verdict, with tabs between."""
    lines = VERDICTS.read_text().splitlines() if VERDICTS.is_file() else []
    fields = [line.split("\t") for line in lines if line.count("\t") == 2]
    return {(file, change): verdict for file, change, verdict in fields}
