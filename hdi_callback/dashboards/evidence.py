"""The evidence of an alert: the number that it accuses, over the steps, beside those that it does not; patterns."""

from __future__ import annotations

import math
import textwrap
from array import array
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from hdi_callback.dashboards.layer_table import name_layers
from hdi_callback.monitor.metrics import METRICS
from hdi_callback.record import Alert, Record
from hdi_callback.rules import RULES

if TYPE_CHECKING:
    from matplotlib.figure import Figure

READINGS = 64
"""Readings up to the alert that its evidence shows."""

ALIKE = {
    "hdi_worst_alignment": "pair_alignment",
    "hdi_worst_pair": "pair_alignment",
    "hdi_alignment": "pair_alignment",
    "hdi_energy_alignment": "energy_pair_alignment",
    "circuit_ov_worst": "circuit_ov",
}
"""Metric of heads that are alike -> the matrix that shows which."""

ACCUSED, OTHERS, LIMIT = "#d1242f", "#8a8f96", "#c25100"
_JUDGED = frozenset(metric for rule in RULES for metric in (*rule.needs, *rule.reads))
_OF_HEADS = {metric: metric for metric in _JUDGED} | {"head_movement_min": "head_movement"}
_MOST_PANELS = 6
_MOST_PATTERNS = 3  # heads
_MOST_LINES = 16  # of what is not accused; more are drawn as the range between the least and the largest
_LETTERS = 10


@dataclass(frozen=True)
class Point:
    """The numbers of a reading that rules judge: metric -> layer -> value, and -> values of its heads."""

    step: int
    values: Mapping[str, Mapping[str, float]]
    heads: Mapping[str, Mapping[str, array[float]]]


def point_of(record: Record) -> Point:
    """Return the numbers of a record that evidence may show, in little memory."""
    values: dict[str, dict[str, float]] = {}
    heads: dict[str, dict[str, array[float]]] = {}
    for name, layer in record.layers.items():
        for metric in _JUDGED & layer.values.keys():
            values.setdefault(metric, {})[name] = layer.values[metric]
        for key in set(_OF_HEADS.values()) & layer.heads.keys():
            numbers = (math.nan if number is None else float(number) for number in layer.heads[key])
            heads.setdefault(key, {})[name] = array("f", numbers)
    return Point(record.step, values, heads)


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
    alert: Alert, points: Sequence[Point], patterns: Mapping[int, Tensor] | None = None, width: float = 4.4
) -> Figure | None:
    """Draw the accused number over the steps with the others in grey, its limit, and where it began.

    Args:
        alert: the alert.
        points: the readings up to it.
        patterns: step -> patterns of attention of the first accused layer, see `Patterns.around`.
        width: in inches.

    Returns:
        A figure with a panel of the layers; where heads are accused and were measured one by one, a panel for each of
        them; and patterns of the heads that are accused, or stand out most. `None` if the alert names no number that
        was read.
    """
    from matplotlib.figure import Figure

    metric = alert.metric or ""
    points = [point for point in points if point.step <= alert.step][-READINGS:]
    steps = [point.step for point in points]
    layers = dict.fromkeys(name for point in points for name in point.values.get(metric, {}))
    curves = {name: [point.values.get(metric, {}).get(name, math.nan) for point in points] for name in layers}
    accused = [name for name in alert.where if name in curves]
    if not accused:
        return None
    layer, heads, by_head = accused[0], alert.where[accused[0]], _curves_of_heads(alert, points, accused[0])
    panels = heads[:_MOST_PANELS] if by_head and len(heads) < len(by_head) else ()
    rows = math.ceil(len(panels) / 3)
    of_steps = sorted((patterns or {}).items())
    figure = Figure(figsize=(width, 2.9 + 1.25 * rows + 1.4 * len(of_steps)), layout="constrained")
    grid = figure.add_gridspec(1 + rows + len(of_steps), 3, height_ratios=[2.3, *[1] * rows, *[1.1] * len(of_steps)])
    panel = figure.add_subplot(grid[0, :])
    _draw_panel(
        panel, alert, steps, [curves[name] for name in accused], [curves[n] for n in curves if n not in accused]
    )
    meaning = METRICS[metric].summary.split(":")[0].rstrip(".") if metric in METRICS else metric
    title = f"{meaning}\nred: {_shortened(name_layers(accused))}" + ("; grey: other layers" if len(layers) > 1 else "")
    panel.set_title(
        "\n".join(part for line in title.splitlines() for part in textwrap.wrap(line, round(10.5 * width))),
        fontsize=_LETTERS, loc="left",
    )  # fmt: skip
    panel.set_xlabel(f"optimizer step; dotted: began at {_onset(alert)}, triangle: alert", fontsize=_LETTERS)
    for place, head in enumerate(panels):
        small = figure.add_subplot(grid[1 + place // 3, place % 3])
        other_curves = [by_head[other_head] for other_head in range(len(by_head)) if other_head not in heads]
        _draw_panel(small, alert, steps, [by_head[head]], other_curves)
        more = f" (+{len(heads) - len(panels)})" if place == len(panels) - 1 and len(heads) > len(panels) else ""
        small.set_title(f"{alert.unit.removesuffix('s')} {head}{more}", fontsize=_LETTERS, loc="left")
        small.locator_params(nbins=2)
    if of_steps:
        drawn_heads = heads[:_MOST_PATTERNS] or _most_accused(by_head, len(of_steps[-1][1]))
        for row, (step, of_heads) in enumerate(of_steps, 1 + rows):
            for column, head in enumerate(head for head in drawn_heads if head < len(of_heads)):
                _draw_pattern(figure.add_subplot(grid[row, column]), of_heads[head], f"head {head}, step {step}")
    lines = "\n".join(["grey: its other heads"] * bool(panels) + ["patterns: a query each row"] * bool(of_steps))
    if lines:
        figure.supxlabel(f"heads of {_shortened(layer)};\n{lines}", fontsize=_LETTERS)
    return figure


def _most_accused(by_head: list[list[float]], count: int) -> list[int]:
    """Return the heads of which the accused number is largest at the alert; the first where it is not of heads."""
    last = [curve[-1] if math.isfinite(curve[-1]) else 0.0 for curve in by_head] or [0.0] * count
    return sorted(sorted(range(len(last)), key=lambda head: -last[head])[:_MOST_PATTERNS])


def _draw_pattern(panel: Any, pattern: Tensor, title: str) -> None:
    """Draw the attention of one head: brighter is more, each row by itself; parts without a query are left out."""
    table = pattern.float().numpy()
    table = table[np.isfinite(table).all(-1)]
    keys = np.flatnonzero(table.sum(0))
    shares = np.sqrt(table / table.max(-1, keepdims=True).clip(1e-6))[:, : keys[-1] + 1 if len(keys) else 1]
    panel.imshow(shares, cmap="cividis", vmin=0, vmax=1, aspect="auto", interpolation="nearest")
    panel.set(xticks=[], yticks=[])
    panel.set_title(title, fontsize=_LETTERS - 1, loc="left")


def _curves_of_heads(alert: Alert, points: Sequence[Point], layer: str) -> list[list[float]]:
    """The curve of each head of a layer; empty if heads were not measured one by one."""
    key = _OF_HEADS.get(alert.metric or "", "")
    rows = [point.heads.get(key, {}).get(layer) for point in points]
    count = max((len(row) for row in rows if row is not None), default=0)
    if not count or max(alert.where[layer], default=0) >= count:
        return []
    return [[row[head] if row is not None and head < len(row) else math.nan for row in rows] for head in range(count)]


def _draw_panel(
    panel: Any, alert: Alert, steps: Sequence[int], accused: list[list[float]], others: list[list[float]]
) -> None:
    """Draw curves, those that are accused on top."""
    if len(others) > _MOST_LINES:
        table = np.ma.masked_invalid(np.array(others))
        panel.fill_between(steps, table.min(0), table.max(0), color=OTHERS, alpha=0.35, linewidth=0)
        others = [table.mean(0).filled(math.nan).tolist()]
    for colour, width, curves in ((OTHERS, 0.9, others), (ACCUSED, 2.0, accused)):
        for curve in curves:
            isolated = np.isfinite(curve).sum() < 3
            panel.plot(steps, curve, color=colour, linewidth=width, marker="." if isolated else None)
    at_alert = [curve[-1] for curve in accused if math.isfinite(curve[-1])]
    judged = math.nan if alert.value is None else alert.value
    is_judged = any(math.isclose(value, judged, rel_tol=1e-3, abs_tol=1e-9) for value in at_alert)
    if alert.threshold is not None and is_judged:  # else the limit is of another number, as a share of the first
        panel.axhline(alert.threshold, color=LIMIT, linestyle="--", linewidth=1)
    panel.axvline(_onset(alert), color=ACCUSED, linestyle=":", linewidth=1.4)
    height = at_alert[0] if at_alert else 0.0
    panel.scatter([alert.step], [height], marker="v", s=46, color=ACCUSED, edgecolors="white", linewidths=0.8, zorder=3)
    low, high = panel.get_ylim()
    if high - low < 1e-3 * abs(high):  # a constant fills no axis with its rounding
        panel.set_ylim(min(0.0, 1.1 * low), max(0.0, 1.1 * high))
    if len(steps) == 1:
        panel.set_xticks(steps)
    panel.tick_params(labelsize=_LETTERS - 1)
    panel.spines[["top", "right"]].set_visible(False)


def _onset(alert: Alert) -> int:
    return alert.step if alert.since is None else alert.since


def _shortened(name: str, most: int = 34) -> str:
    return name if len(name) <= most else f"…{name[1 - most :]}"
