"""Write the tables of pages from classes and the corpus of bugs: ``python docs/tables.py``; a test compares them."""

from __future__ import annotations

import functools
import re
import sys
from pathlib import Path

from hdi_callback import check
from hdi_callback.monitor import METRICS
from hdi_callback.rules import RULES, explain_rule

FOLDER = Path(__file__).parent
sys.path.insert(0, str(FOLDER.parent))  # for the corpus of bugs

from tests.checks.corpus import BUGS, SYMPTOMS, Bug  # noqa: E402


def table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """Make a Markdown table."""
    cells = [header, tuple("---" for _ in header), *rows]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in row) + " |" for row in cells
    )


@functools.cache
def tables() -> dict[str, str]:
    """Make every table, by the name of its page."""
    rules = [(f"`{one.name}`", one.level, one.condition, one.meaning) for one in map(explain_rule, RULES)]
    metrics = [(f"`{metric.name}`", metric.source, metric.summary) for metric in METRICS.values()]
    return {
        "alerts.md": table(("rule", "level", "raised when", "what it means"), rules),
        "curves.md": table(("metric", "read from", "meaning"), metrics),
        "check.md": table(("bug and symptom", "code", "diagnosis", "reported in"), list(map(bug_row, BUGS))),
    }


def bug_row(bug: Bug) -> tuple[str, ...]:
    """Give the row of a bug: what one sees, its line, what `check` says, and where it was reported."""
    model, batch = bug.build(), bug.batch()
    found = check(model, lambda: model(*batch)).findings
    one = next(each for each in found if each.name == bug.finding)
    name, _, number = bug.source.partition(" ")
    source = f"[{bug.source}](https://github.com/{name}/issues/{number})" if number else "ours"
    said = f"**{one.verdict}**: {one.text}"
    return f"**{bug.name}**. {SYMPTOMS[bug.finding]}", f"`{bug.code}`", said, source


def page_with_table(name: str) -> str:
    """Give a page with its table as the classes say it now."""
    text = (FOLDER / name).read_text(encoding="utf-8")
    return re.sub(
        r"(<!-- table -->\n).*?(\n<!-- end of table -->)",
        lambda found: found[1] + tables()[name] + found[2],
        text,
        flags=re.S,
    )


if __name__ == "__main__":
    for page in tables():
        (FOLDER / page).write_text(page_with_table(page), encoding="utf-8")
