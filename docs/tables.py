"""Write the tables of pages from classes and the corpus of bugs: ``python docs/tables.py``; a test compares them."""

from __future__ import annotations

import functools
import inspect
import re
import sys
from pathlib import Path

from hdi_callback import check
from hdi_callback.dashboards.names import INTERVENTIONS, MODEL_CURVES
from hdi_callback.monitor import METRICS
from hdi_callback.rules import RULES, Rule

FOLDER = Path(__file__).parent
sys.path.insert(0, str(FOLDER.parent))  # for the corpus of bugs

from tests.checks.corpus import BUGS, SYMPTOMS, Bug  # noqa: E402

TABLE = re.compile(r"(?<=<!-- table -->\n).*?(?=<!-- end of table -->)", flags=re.S)


def table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """Make a Markdown table."""
    cells = [header, tuple("---" for _ in header), *rows]
    return "".join(
        "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in row) + " |\n" for row in cells
    )


@functools.cache
def tables() -> dict[str, list[str]]:
    """Make every table, by the name of its page."""
    rules = [(f"`{rule.name}`", rule.level, rule.condition, rule.meaning, remedy(rule)) for rule in RULES]
    metrics = [(f"`{name}`", metric.source, metric.summary) for name, metric in METRICS.items()]
    curves = [(f"`{tag}`", meaning) for tag, meaning in MODEL_CURVES.items()]
    return {
        "alerts.md": [
            table(("rule", "level", "raised when", "what it means", "what to do now"), rules),
            table(("intervention", "what it does", "acts on", "of the rules", "at most"), acts()),
        ],
        "check.md": [table(("bug and symptom", "code", "diagnosis", "reported in"), list(map(bug_row, BUGS)))],
        "curves.md": [
            table(("tag", "meaning"), curves),
            table(("metric", "read from", "meaning"), metrics),
        ],
    }


def remedy(rule: type[Rule]) -> str:
    """Return what to do about a rule, with the arguments that help."""
    return f"{rule.action}: `{rule.code}`" if rule.code else rule.action


def acts() -> list[tuple[str, ...]]:
    """Make a row for each intervention, with its defaults."""
    rows = []
    for name, kind in INTERVENTIONS.items():
        answers = kind.rules is None or len(kind.rules) > 0
        rows.append((
            f"`{name}`",
            inspect.getdoc(kind).splitlines()[0],
            f"{kind.on}{'' if kind.on == 'critical' else ' or worse'}" if answers else "every reading",
            "any" if kind.rules is None else ", ".join(f"*{rule}*" for rule in kind.rules) or "-",
            "any number of times" if kind.at_most is None else f"{kind.at_most} time{'s' if kind.at_most > 1 else ''}",
        ))  # fmt: skip
    return rows


def bug_row(bug: Bug) -> tuple[str, ...]:
    """Give the row of a bug: what one sees, its line, what `check` says, and where it was reported."""
    model, batch = bug.build(), bug.batch()
    found = check(model, lambda: model(*batch)).findings
    one = next(each for each in found if each.name == bug.finding)
    name, _, number = bug.source.partition(" ")
    source = f"[{bug.source}](https://github.com/{name}/issues/{number})" if number else "ours"
    said = f"**{one.verdict}**: {one.text}"
    return f"**{bug.name}**. {SYMPTOMS[bug.finding]}", f"`{bug.code}`", said, source


def page_with_tables(name: str) -> str:
    """Return a page with its tables as the classes say them now; each must have its place there."""
    text, current = (FOLDER / name).read_text(encoding="utf-8"), tables()[name]
    places = TABLE.findall(text)
    assert len(places) == len(current), f"{name} has {len(places)} places for {len(current)} tables"
    remaining = iter(current)
    return TABLE.sub(lambda _: next(remaining), text)


if __name__ == "__main__":
    for page in tables():
        (FOLDER / page).write_text(page_with_tables(page), encoding="utf-8")
