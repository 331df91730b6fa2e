"""The report of a run: one HTML file that loads nothing."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hdi_callback.arguments import file_path, shown
from hdi_callback.checks import joined_name
from hdi_callback.dashboards.layer_table import closest_pair, compared, layer_rows
from hdi_callback.dashboards.pictures import WORST, draw_curves, draw_evidence, draw_heads, draw_map, svg, svg_style
from hdi_callback.dashboards.verdict import events, state, verdict
from hdi_callback.errors import MisconfigurationError
from hdi_callback.record import LEVELS, Alert

if TYPE_CHECKING:
    from hdi_callback.history import RunHistory

_MOST_DRAWN = 12  # events with a picture


def write_report(run: RunHistory, path: str | os.PathLike[str] | None = None) -> Path:
    """Return the path of an HTML file about a run, which is written, and opens without a network.

    Args:
        run: its history, see `load_history`.
        path: the file to write; ``report.html`` beside the history by default.

    Raises:
        MisconfigurationError: if `run` is no history.
    """
    if not hasattr(run, "matrix_steps"):
        raise MisconfigurationError(f"`run` must be a history, got {shown(run)}: write load_history({run!r:.60}).")
    page = page_of(run)
    stem = run.path.stem.replace("history", "report") if "history" in run.path.stem else "report"
    target = run.path.with_name(f"{stem}.html") if path is None else file_path("path", path, "report.html")
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(page, encoding="utf-8")
    return target


def page_of(run: RunHistory) -> str:
    """Return the report as the text of a page."""
    from jinja2 import Environment, PackageLoader, select_autoescape

    raised = events(run.records)
    last = run.records[-1] if run.records else None
    active = () if last is None else last.active
    serious = [alert for alert in raised if alert.level != "notice"]
    folder = run.path.parent.parent if run.path.parent.name == "hdi" else run.path.parent
    contents = {
        "title": f"Attention heads of {'/'.join(folder.parts[-2:]).lstrip('/')}",
        "verdict": verdict(run.records, run.layers),
        "run": run,
        "pictures": _pictures(run, serious),
        "events": [{"alert": alert, "state": state(alert), "layers": joined_name(alert.layers)} for alert in raised],
        "evidence": _evidence(run, serious),
        "serious": serious,
        "actions": [action for record in run.records for action in record.actions],
        "shapes": layer_rows(run.layers),
        "rows": layer_rows(run.layers, last, active),
        "last": last,
    }
    environment = Environment(loader=PackageLoader(__package__, "."), autoescape=select_autoescape(default=True))
    return environment.get_template("report.html").render(contents)


def _pictures(run: RunHistory, serious: Sequence[Alert]) -> dict[str, str]:
    """The pictures that can be drawn, as elements of the page."""
    drawn: dict[str, str] = {}
    worst = {name: row for name, row in run.series(WORST).items() if any(map(math.isfinite, row))}
    with svg_style():
        if len(run.records) > 1 and worst:
            figure = draw_map([record.step for record in run.records], worst, serious, size=(7.2, 4.7))
            drawn["map"] = svg(figure, "Alignment of the two closest heads of each layer over the steps")
        curves = draw_curves(run.records) if len(run.records) > 1 else None
        if curves is not None:
            drawn["curves"] = svg(curves, "Curves of the model over the steps")
        at_worst = _worst_heads(run)
        if at_worst is not None:
            drawn["heads"] = svg(at_worst, "Alignment of every two heads of the worst layer at its worst step")
    return drawn


def _evidence(run: RunHistory, serious: Sequence[Alert]) -> list[dict[str, str]]:
    """The evidence of each alert, the most serious and latest of them if they are many."""
    chosen = sorted(serious, key=lambda alert: (LEVELS.index(alert.level), alert.step))[-_MOST_DRAWN:]
    figures = []
    with svg_style():
        for alert in sorted(chosen, key=lambda alert: alert.step):
            of_layer = run.matrices(alert.step).get(next(iter(alert.where), ""), {})
            split = [(*name.rpartition("_"), pattern) for name, pattern in of_layer.items()]
            patterns = {int(step): pattern for kind, _, step, pattern in split if kind == "attention_pattern"}
            figure = draw_evidence(alert, run.records, patterns)
            if figure is not None:
                text = f"step {alert.step}, {alert.level}: {alert.rule}"
                figures.append({"picture": svg(figure, f"Evidence of {text}"), "text": text})
    return figures


def _worst_heads(run: RunHistory) -> Any:
    """The heads of the worst layer at the worst step of which matrices are kept."""
    records = {record.step: record for record in run.records}
    measured = [
        (value, step, layer)
        for step in run.matrix_steps if step in records
        for layer, value in records[step].values(WORST).items() if math.isfinite(value)
    ]  # fmt: skip
    _, step, layer = max(measured, default=(0.0, 0, ""))
    matrix = run.matrices(step).get(layer, {}).get("pair_alignment")
    if matrix is None:
        return None
    facts = next((facts for facts in run.layers if facts["name"] == layer), {})
    return draw_heads(layer, step, matrix, closest_pair(records[step], layer), unit=compared(facts), size=4.7)
