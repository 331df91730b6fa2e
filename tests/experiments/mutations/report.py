"""The page about what was broken, and what survived."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).with_name("results.jsonl")
VERDICTS = Path(__file__).with_name("verdicts.txt")
BY_HAND = "\n<!-- From here on kept by hand. -->\n"
INTRODUCTION = """# Broken on purpose

<!-- Down to the mark written by: python -m tests.experiments.mutations report -->

Do the tests notice when the code is wrong? One thing at a time is changed in a file: a comparison (`<` to `<=`), an
operation (`+` to `-`), a number by one, a condition that is never met, a value that is not returned. Then tests that
run the changed line are run, the quickest first, until one fails. Words of errors and warnings, annotations, decorators
and what runs on import are left as they are. The changes are a sample, spread over the lines of each file: this page
says how often tests notice, not that they notice everything.

    python -m tests.experiments.mutations record --reached build/reached.jsonl
    python -m tests.experiments.mutations run --reached build/reached.jsonl --results build/mutations.jsonl
    python -m tests.experiments.mutations report --results build/mutations.jsonl --output build/mutations.md

`record` notes which tests run which lines, `run` asks them within seconds of processor time that are given, and
`report` writes one run down; without `--results` it writes this page. `keep --results ... --state COMMIT` adds a run to
the results of this page, in place of earlier ones of the same files. With `--only` some files are broken, and the tests
of their subject recorded, as in `record --only hdi_callback/dashboards,hdi_callback/audits` and the same of `run`.
"""
NOTICED = ("killed", "ran out of time")
KINDS = ("noticed", "noticed since", "no difference", "open")
Result = Mapping[str, Any]
Verdicts = Mapping[tuple[str, str], str]


def page(results: Sequence[Result], verdicts: Verdicts) -> str:
    """Write the page, but for what is kept by hand behind it.

    Args:
        results: one record a change: its file, the change, its outcome, and the state of the code if that is known.
        verdicts: file and change -> what was found out about a survivor.

    Returns:
        The page, in Markdown.
    """
    tried = [result for result in results if result["outcome"] in (*NOTICED, "survived")]
    parts = [INTRODUCTION, "## What was broken\n"]
    states: dict[str, list[str]] = {}
    for result in sorted(results, key=lambda result: _folder(result["file"])):
        if "state" in result:
            states.setdefault(result["state"], []).append(_folder(result["file"]))
    numbered = [f"`{state}`, of {_listed(folders)}" for state, folders in states.items()]
    if len(states) == 1:
        numbered = [f"`{next(iter(states))}`"]
    if states:
        parts.append(f"Lines are numbered as in {'; '.join(numbered)}.\n")
    parts.append("| folder | files | changes | noticed at once | noticed since | no difference | open |")
    parts.append("|---|---:|---:|---:|---:|---:|---:|")
    folders = sorted({_folder(result["file"]) for result in tried})
    parts += [
        _row(f"`{name}`", [result for result in tried if _folder(result["file"]) == name], verdicts) for name in folders
    ]
    parts.append(_row("all", tried, verdicts))
    if left := sorted({result["file"] for result in results} - {result["file"] for result in tried}):
        parts.append(f"\nNot broken: {', '.join(f'`{name}`' for name in left)}.")
    parts.append(
        '\n"Noticed since" is noticed by a test that was not among those that were asked, or that was written since '
        'and seen to fail on the change. "No difference" is argued below, line by line.'
    )
    titles = {"open": "What is open", "no difference": "What makes no difference, and why"}
    titles["noticed since"] = "What other tests notice, or tests that were written since"
    for kind, title in titles.items():
        rows = list(_table([result for result in tried if kind_of(result, verdicts) == kind], verdicts))
        parts += [f"\n## {title}\n", *(rows or ["Nothing."])]
    return "\n".join(parts) + "\n"


def merged(kept: Sequence[Result], new: Sequence[Result], state: str) -> list[Result]:
    """Add results to those of the page; of a file that was broken anew the older ones go.

    Args:
        kept: those of the page.
        new: one record a change, of which those that were tried are added.
        state: the commit whose files were broken.

    Returns:
        The results of the page from now on, in the order of the files.
    """
    fields = ("file", "change", "outcome")
    tried = [result for result in new if result["outcome"] in (*NOTICED, "survived")]
    added = [{"state": state, **{name: result[name] for name in fields}} for result in tried]
    files = {result["file"] for result in added}
    return sorted(
        [*(result for result in kept if result["file"] not in files), *added], key=lambda result: result["file"]
    )


def kind_of(result: Result, verdicts: Verdicts) -> str:
    """Tell which column a change counts in.

    Args:
        result: its record.
        verdicts: file and change -> what was found out about a survivor.

    Returns:
        One of `KINDS`.
    """
    if result["outcome"] in NOTICED:
        return "noticed"
    verdict = verdicts.get((result["file"], result["change"]), "open")
    beginnings = {"noticed by": "noticed since", "no difference": "no difference", "differs": "no difference"}
    return next((kind for beginning, kind in beginnings.items() if verdict.startswith(beginning)), "open")


def read_verdicts(lines: Iterable[str]) -> dict[tuple[str, str], str]:
    """Read what was found out about survivors.

    Args:
        lines: of file, change and verdict, with tabs between.

    Returns:
        File and change -> verdict.
    """
    fields = [line.rstrip("\n").split("\t") for line in lines if line.count("\t") == 2]
    return {(file, change): verdict for file, change, verdict in fields}


def _table(survived: Sequence[Result], verdicts: Verdicts) -> Iterator[str]:
    if survived:
        yield "| file | line: change | what is known |\n|---|---|---|"
    for result in sorted(survived, key=lambda result: (result["file"], int(result["change"].partition(":")[0]))):
        change = result["change"].replace("|", "\\|").replace("`", "'")
        unknown = "not looked at" if result.get("of", 1) else "no test that was recorded runs it"
        verdict = verdicts.get((result["file"], result["change"]), unknown)
        yield f"| `{result['file']}` | `{change}` | {verdict.replace('|', chr(92) + '|')} |"


def _folder(file: str) -> str:
    return file.rpartition("/")[0]


def _listed(folders: Iterable[str]) -> str:
    rooms = list(dict.fromkeys(folder.partition("/")[0] for folder in folders))
    return ", ".join(f"`{room}`" for room in rooms)


def _row(name: str, tried: Sequence[Result], verdicts: Verdicts) -> str:
    kinds = Counter(kind_of(result, verdicts) for result in tried)
    counts = [len({result["file"] for result in tried}), len(tried), *(kinds[kind] for kind in KINDS)]
    return f"| {name} | {' | '.join(map(str, counts))} |"
