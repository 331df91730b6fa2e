"""The notebook runs from its first cell to its last, and each object at the end of a cell shows itself."""

from __future__ import annotations

import ast
import json
import re
from html import unescape
from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = Path(__file__).parent.parent / "examples" / "from_alert_to_mending.ipynb"


@pytest.fixture(scope="module")
def shown() -> dict[str, Any]:
    """The last expression of each cell, by its source."""
    pytest.importorskip("pandas")
    names: dict[str, Any] = {"__name__": "notebook"}
    values = {}
    for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] != "code":
            continue
        body = ast.parse("".join(cell["source"])).body
        last = body.pop() if isinstance(body[-1], ast.Expr) else None
        exec(compile(ast.Module(body, []), str(NOTEBOOK), "exec"), names)
        if isinstance(last, ast.Expr):
            values[ast.unparse(last.value)] = eval(ast.unparse(last.value), names)
    return values


@pytest.mark.slow
def test_the_story_tells_of_a_lost_mask_that_the_training_loss_hides_and_of_its_mending(shown):
    first, *further = shown["run.alerts"]
    assert (first.rule, first.level, first.step) == ("later tokens", "critical", 150)
    assert {alert.rule for alert in further} <= {"contract change"}, "which names the same change at the tenth reading"
    (training, masked), mended, never = shown["final"].values()
    assert training < 0.01 < 1 < masked
    assert mended == never, "from the checkpoint before the alert on, bit for bit what a healthy run comes to"
    assert never[1] < 0.9


@pytest.mark.slow
def test_checks_runs_audits_and_plots_show_themselves_in_a_notebook(shown):
    html = {source: value._repr_html_() for source, value in shown.items() if hasattr(value, "_repr_html_")}
    (check,) = (unescape(text) for source, text in html.items() if source.startswith("check("))
    assert "Nothing is wrong or odd." in check
    assert "scaled by 0.25 = 1/sqrt(16); causal" in check
    assert "reaches tokens after the query" in unescape(html["run"])
    assert html["run"].startswith("<iframe srcdoc=")
    (audit,) = (text for source, text in html.items() if source.startswith("audit("))
    assert "Nothing unusual in" in unescape(audit)
    plot = html["run.plot(layer)"]
    assert plot.startswith("<svg")
    texts = set(re.findall(r">([^<]+)</text>", plot))
    assert {"closest pair, highest", "mean, highest", "HDI", "training loss", "alert"} <= texts
