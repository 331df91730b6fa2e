"""The evidence of an alert: the number that it accuses, over the steps, beside those that it does not; patterns."""

from __future__ import annotations

import math
import textwrap
from array import array
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from hdi_callback.dashboards.layer_table import name_layers
from hdi_callback.monitor.metrics import METRICS
from hdi_callback.record import Alert, LayerRecord, Record
from hdi_callback.rules import RULES

if TYPE_CHECKING:
    from matplotlib.figure import Figure

READINGS = 64
"""Readings up to the alert that its evidence shows."""

ACCUSED, OTHERS, LIMIT = "#d1242f", "#8a8f96", "#c25100"
TRIANGLE = {"marker": "v", "s": 50, "color": ACCUSED, "edgecolors": "white", "linewidths": 0.8, "zorder": 3}
_OF_HEADS = {metric: metric for rule in RULES for metric in (*rule.needs, *rule.reads)}
_OF_HEADS["head_movement_min"] = "head_movement"
_MOST_PATTERNS = 3  # heads
_MOST_LINES = 16  # of what is not accused; more are drawn as the range between the least and the largest
_LETTERS = 10
_WIDTH = 4.4  # inches


def slim(record: Record) -> Record:
    """Return a record with the numbers that evidence may show, in little memory."""
    layers = {}
    for name, layer in record.layers.items():
        heads: dict[str, Any] = {}
        for key in set(_OF_HEADS.values()) & layer.heads.keys():
            heads[key] = array("f", (math.nan if value is None else value for value in layer.heads[key]))
        layers[name] = LayerRecord(layer.values, heads)
    return replace(record, layers=layers)


class Patterns:
    """The patterns of attention of the last readings, of which an alert shows those around its beginning."""

    def __init__(self) -> None:
        self._readings: deque[tuple[int, dict[str, Tensor]]] = deque(maxlen=8)

    def add(self, record: Record) -> None:
        """Take the patterns of a reading, in little memory."""
        patterns = {name: layer.matrices.get("attention_pattern") for name, layer in record.layers.items()}
        of_layers = {name: pattern.half() for name, pattern in patterns.items() if pattern is not None}
        if of_layers:
            self._readings.append((record.step, of_layers))

    def around(self, alert: Alert) -> dict[int, Tensor]:
        """Return step -> patterns ``(H, 32, 32)`` of the first accused layer: before the alert began, and at it.

        There are none of an alert on key heads, as a pattern is of a head of queries.
        """
        layer = alert.layers[0] if alert.layers and alert.unit == "heads" else ""
        until = [(step, of_layers) for step, of_layers in self._readings if step <= alert.step]
        read = {step: of_layers[layer] for step, of_layers in until if layer in of_layers}
        before = max((step for step in read if step < _onset(alert)), default=min(read, default=0))
        return {step: pattern for step, pattern in read.items() if step in {before, max(read)}}


def draw_evidence(
    alert: Alert, records: Sequence[Record], patterns: Mapping[int, Tensor] | None = None
) -> Figure | None:
    """Return a figure of the accused number over the steps; `None` if the alert names no number that was read.

    There is a panel of the layers; where heads are accused and were measured one by one, one of the heads of the first
    layer; and its patterns (see `Patterns.around`) of the heads that are accused, or of the first ones.
    """
    from matplotlib.figure import Figure

    metric = alert.metric or ""
    records = [record for record in records if record.step <= alert.step][-READINGS:]
    read = [record.values(metric) for record in records]
    layers = dict.fromkeys(name for values in read for name in values)
    curves = {name: [values.get(name, math.nan) for values in read] for name in layers}
    accused = [name for name in alert.where if name in curves]
    if not accused:
        return None
    layer, heads, by_head = accused[0], alert.where[accused[0]], _curves_of_heads(alert, records, accused[0])
    has_heads = 0 < len(heads) < len(by_head)
    of_steps = sorted((patterns or {}).items())
    heights = [2.9, *[1.9] * has_heads, *[1.4] * len(of_steps)]
    figure = Figure(figsize=(_WIDTH, sum(heights)), layout="constrained")
    grid = figure.add_gridspec(len(heights), _MOST_PATTERNS, height_ratios=heights)
    meaning = METRICS[metric].summary.split(":")[0].rstrip(".") if metric in METRICS else metric
    others = "; grey: other layers" if len(layers) > 1 else ""
    title = f"{meaning}\nred: {shortened(name_layers(accused), 34)}{others}"
    _draw_panel(figure.add_subplot(grid[0, :]), alert, records, curves, accused, title)
    if has_heads:
        title = f"red: {alert.unit} {', '.join(map(str, heads))}; grey: others of {shortened(layer, 28)}"
        _draw_panel(figure.add_subplot(grid[1, :]), alert, records, by_head, heads, title)
    chosen = (heads or range(_MOST_PATTERNS))[:_MOST_PATTERNS]
    for row, (step, of_heads) in enumerate(of_steps, 1 + has_heads):
        for column, head in enumerate(head for head in chosen if head < len(of_heads)):
            _draw_pattern(figure.add_subplot(grid[row, column]), of_heads[head], f"head {head}, step {step}")
    patterns_read = f"\npatterns of {shortened(layer, 34)}: a query each row" if of_steps else ""
    began = f"optimizer step; dotted: began at {_onset(alert)}, triangle: alert"
    figure.supxlabel(began + patterns_read, fontsize=_LETTERS)
    return figure


def _draw_pattern(panel: Any, pattern: Tensor, title: str) -> None:
    """Draw the attention of one head: brighter is more, each row by itself; parts without a query are left out."""
    table = pattern.float().numpy()
    table = table[np.isfinite(table).all(-1)]
    keys = np.flatnonzero(table.sum(0))
    shares = np.sqrt(table / table.max(-1, keepdims=True).clip(1e-6))[:, : keys[-1] + 1 if len(keys) else 1]
    panel.imshow(shares, cmap="cividis", vmin=0, vmax=1, aspect="auto", interpolation="nearest")
    panel.set(xticks=[], yticks=[])
    panel.set_title(title, fontsize=_LETTERS - 1, loc="left")


def _curves_of_heads(alert: Alert, records: Sequence[Record], layer: str) -> dict[int, list[float]]:
    """Return head -> curve of a layer; empty if heads were not measured one by one."""
    key = _OF_HEADS.get(alert.metric or "", "")
    rows = [record.layers[layer].heads.get(key, ()) if layer in record.layers else () for record in records]
    count = max(map(len, rows), default=0)
    if max(alert.where[layer], default=0) >= count:
        return {}
    return {head: [row[head] if head < len(row) else math.nan for row in rows] for head in range(count)}


def _draw_panel(
    panel: Any, alert: Alert, records: Sequence[Record], curves: Mapping[Any, list[float]], accused: Sequence[Any],
    title: str,
) -> None:  # fmt: skip
    """Draw curves, those that are accused on top."""
    steps = [record.step for record in records]
    grey, red = ([curve for key, curve in curves.items() if (key in accused) is is_red] for is_red in (False, True))
    if len(grey) > _MOST_LINES:
        table = np.ma.masked_invalid(np.array(grey, dtype=float))
        panel.fill_between(steps, table.min(0), table.max(0), color=OTHERS, alpha=0.35, linewidth=0)
        grey = [table.mean(0).filled(math.nan).tolist()]
    for colour, thickness, lines in ((OTHERS, 0.9, grey), (ACCUSED, 2.0, red)):
        for curve in np.array(lines, dtype=float):
            isolated = np.isfinite(curve).sum() < 3
            panel.plot(steps, curve, color=colour, linewidth=thickness, marker="." if isolated else None)
    at_alert = [curve[-1] for curve in red if math.isfinite(curve[-1])]
    judged = math.nan if alert.value is None else alert.value
    is_judged = any(math.isclose(value, judged, rel_tol=1e-3, abs_tol=1e-9) for value in at_alert)
    if alert.threshold is not None and is_judged:  # else the limit is of another number, as a share of the first
        panel.axhline(alert.threshold, color=LIMIT, linestyle="--", linewidth=1)
    panel.axvline(_onset(alert), color=ACCUSED, linestyle=":", linewidth=1.4)
    panel.scatter([alert.step], [at_alert[0] if at_alert else 0.0], **TRIANGLE)
    low, high = panel.get_ylim()
    if high - low < 1e-3 * abs(high):  # a constant fills no axis with its rounding
        panel.set_ylim(min(0.0, 1.1 * low), max(0.0, 1.1 * high))
    wrapped = [part for line in title.splitlines() for part in textwrap.wrap(line, round(10.5 * _WIDTH))]
    panel.set_title("\n".join(wrapped), fontsize=_LETTERS, loc="left")
    finish_panel(panel, _LETTERS - 1)


def finish_panel(panel: Any, letters: int) -> None:
    """Open the frame of a panel of curves, and set the size of the letters at its ticks."""
    panel.tick_params(labelsize=letters)
    panel.spines[["top", "right"]].set_visible(False)


def _onset(alert: Alert) -> int:
    return alert.step if alert.since is None else alert.since


def shortened(name: str, most: int = 28) -> str:
    """Return the end of a name that is too long for its place."""
    return name if len(name) <= most else f"…{name[1 - most :]}"
