"""Write what `hdi explain` prints from the tables of the pages: ``python docs/explanations.py``; `make docs` does it.

The pages are not installed with the package. So what they say of each rule and curve is kept in a file of the package,
and a test fails where the two differ.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

from hdi_callback.monitoring.metrics import METRICS
from hdi_callback.monitoring.rules.explanations import FILE

ROOT = Path(__file__).parents[1]
TO_DO = ROOT / "docs" / "what-number-is-bad.md"
ALERTS = ROOT / "docs" / "alerts.md"
CURVES = ROOT / "docs" / "reading-the-curves.md"
README = ROOT / "README.md"


def table(page: Path, *headings: str) -> Iterator[list[str]]:
    """Give the rows of the table with these headings, each cell as plain text but for quotes and rule names."""
    lines = page.read_text(encoding="utf-8").splitlines()
    first = lines.index(f"| {' | '.join(headings)} |") + 2
    for line in lines[first:]:
        if not line.startswith("|"):
            return
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        assert len(cells) == len(headings), f"{page.name}: {line}"
        yield cells


def plain(text: str) -> str:
    """Write Markdown as people read it in a terminal."""
    text = re.sub(r"\[([^\]]+)\]\([^)]+\)", r"\1", text)
    text = re.sub(r"\$([^$]+)\$", lambda found: re.sub(r"[\\{}]", "", found[1]), text)
    return re.sub(r"\*+([^*]+)\*+", r"\1", text)


def rules() -> dict[str, dict[str, object]]:
    """Collect what the pages say of each rule."""
    found: dict[str, dict[str, object]] = {}
    for alert, meaning, action in table(TO_DO, "alert (rule)", "what it means", "what to do"):
        name = re.fullmatch(r".*\*\(([^)]+)\)\*", alert)
        assert name is not None, f"{alert}: write the rule as *(its name)*"
        found[name[1]] = {
            "messages": re.findall(r'"([^"]+)"', alert),
            "meaning": plain(meaning),
            "action": plain(action),
            "raised": [],
        }
    last = ""
    for name, level, raised, resolved in table(ALERTS, "rule", "level", "raised when", "resolved when"):
        last = name or last
        found[last]["raised"].append({"level": level, "when": plain(raised)})
        if resolved:
            found[last]["resolved"] = plain(resolved)
    for name, _, when in table(ALERTS, "rule", "metric", "when"):
        level, colon, rest = when.partition(": ")
        is_level = bool(colon) and level in ("notice", "critical")
        found[name]["raised"].append(
            {"level": level if is_level else "warning", "when": plain(rest if is_level else when)}
        )
    return found


def curves() -> dict[str, dict[str, str]]:
    """Collect what the pages say of each curve, beside the summary that the catalogue has."""
    found: dict[str, dict[str, str]] = {}

    def add(cell: str, **said: str) -> None:
        for name in re.findall(r"`(\w+)(?:/<layer>)?`", cell):
            if name in METRICS:
                found.setdefault(name, {}).update({key: plain(text) for key, text in said.items() if text})

    for curve, reach, normal in table(README, "curve", "range", "normal"):
        add(curve, range=reach, normal=normal)
    for number, fine, watch, bad in table(TO_DO, "number", "fine", "keep an eye on", "bad"):
        add(number, fine=fine, keep_an_eye_on=watch, bad=bad)
    for curve, _, out_for in table(CURVES, "curve", "what it is", "to look out for"):
        add(curve, look_out_for=out_for)
    return found


def text() -> str:
    """Write the file."""
    return json.dumps({"rules": rules(), "curves": curves()}, indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    FILE.write_text(text(), encoding="utf-8")
