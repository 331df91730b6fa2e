"""Pictures with matplotlib: layers x steps, heads x heads, the curves of a model, and the evidence of an alert.

Alignment has one colour scale everywhere, from 0, chance, to 1, the same head. Its colours (cividis) remain distinct
with colour blindness. The evidence is the number that an alert accuses, over the steps, beside those that it does not.
"""

from __future__ import annotations

import io
import math
import re
import statistics
import textwrap
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from hdi_callback.checks import joined_name
from hdi_callback.dashboards.layer_table import closest_pair, compared, number_in
from hdi_callback.dashboards.names import EVIDENCE, HEADS, MAP
from hdi_callback.dashboards.verdict import events, urgent_of
from hdi_callback.monitor.metrics import METRICS
from hdi_callback.record import Alert, LayerRecord, Record

if TYPE_CHECKING:
    import numpy.typing as npt
    from matplotlib.figure import Figure

READINGS = 64  # readings up to the alert that its evidence shows
ACCUSED, OTHERS, LIMIT = "#d1242f", "#8a8f96", "#c25100"
TRIANGLE = {"marker": "v", "s": 50, "color": ACCUSED, "edgecolors": "white", "linewidths": 0.8, "zorder": 3}
_MOST_PATTERNS = 3  # heads
_LETTERS = 10
_WIDTH = 4.4  # inches
WORST = "hdi_worst_alignment"
_INK = "#123456"  # of text and lines in an SVG, where it becomes the colour of the text around it
_COLUMNS_AN_INCH = 50  # of a map: a column is not narrower than a pixel
_MOST_NAMED = 24  # layers
_ALL_ALIKE = 0.8  # alignment of every two heads, where naming two of them would mislead
_DOTS_PER_INCH = 90
_SHARE = 0.002  # of the run's time, for drawing while it goes on


def draw_map(
    steps: Sequence[int],
    worst: Mapping[str, Sequence[float]],
    alerts: Sequence[Alert] = (),
    *,
    size: tuple[float, float] = (4.4, 4.0),
) -> Figure:
    """Draw the alignment of the two closest heads, a row for each layer and a column for each reading."""
    names = list(worst)
    # Neighbouring columns are merged until a screen can show them; the largest value of each counts.
    starts = range(0, len(steps), math.ceil(len(steps) / (_COLUMNS_AN_INCH * size[0])))
    table = np.fmax.reduceat(np.array([list(worst[name]) for name in names]), list(starts), axis=1)
    columns = [steps[start] for start in starts]
    last_width = columns[-1] - columns[-2] if len(columns) > 1 else 1
    edges = [*columns, columns[-1] + max(last_width, 1)]  # a column reaches from its step to the next
    figure, panel = _heat(size, edges, range(len(names) + 1), table)
    marks = [(alert.step, names.index(layer) + 0.5) for alert in alerts for layer in alert.where if layer in worst]
    labelled = range(0, len(names), math.ceil(len(names) / _MOST_NAMED))  # as many as fit beside the rows
    labels = [shortened(number_in(names[row], names)) for row in labelled]
    panel.set_yticks([row + 0.5 for row in labelled], labels)
    if labels[0] != shortened(names[0]):
        panel.set_ylabel(shortened(joined_name(names), 40), fontsize=9)
    if marks:
        panel.scatter(*zip(*marks), **TRIANGLE)
    panel.set_xlabel("optimizer step" + ("; triangles: alerts" if marks else ""), fontsize=9)
    panel.set_title("Alignment of the two closest heads", fontsize=10, loc="left")
    return figure


def draw_heads(
    layer: str, step: int, alignment: Tensor, pair: Sequence[int] = (), *, unit: str = "heads", size: float = 4.4
) -> Figure:
    """Draw the alignment of every two heads of a layer."""
    from matplotlib.ticker import MaxNLocator

    table = alignment.double().numpy().copy()
    np.fill_diagonal(table, np.nan)  # a head with itself says nothing
    heads = len(table)
    edges = np.arange(heads + 1) - 0.5
    figure, panel = _heat((1.15 * size, size), edges, edges, table)
    panel.set_aspect("equal")
    for axis in (panel.xaxis, panel.yaxis):
        axis.set_major_locator(MaxNLocator(12, integer=True))
    title = f"{shortened(layer, 40)}, step {step}"
    least = np.nanmin(table) if np.isfinite(table).any() else 0.0
    if heads > 2 and least >= _ALL_ALIKE:
        title += f"\nall {heads} {unit}: alignment of at least {least:.2f}"
    elif len(pair) == 2:
        i, j = pair
        for colour, width in (("white", 3.2), (ACCUSED, 1.7)):
            ring = {"s": max(60, (150 / heads) ** 2), "edgecolors": colour, "linewidths": width}
            panel.scatter([i, j], [j, i], facecolors="none", **ring)
        title += f"\n{unit} {i} and {j}: {table[i, j]:.2f}"
    panel.set_title(title, fontsize=10, loc="left")
    panel.set_xlabel(unit, fontsize=9)
    return figure


def draw_curves(records: Sequence[Record], layer: str | None = None) -> Figure | None:
    """Draw the curves of a model, or of one of its layers, in panels, with alerts and interventions marked."""
    from matplotlib.figure import Figure

    def curve(metric: str, reduce: Callable[[list[float]], float]) -> list[float]:
        of_layers = [record.values(metric).items() for record in records]
        values = [[value for name, value in at if layer in {None, name} and math.isfinite(value)] for at in of_layers]
        return [reduce(finite) if finite else math.nan for finite in values]

    curves = {  # over the layers
        "alignment": {"closest pair, highest": curve(WORST, max), "mean, highest": curve("hdi_alignment", max)},
        "HDI": {"lowest": curve("hdi", min), "mean": curve("hdi", statistics.fmean)},
        "covariance": {"mean, highest": curve("head_covariance", max)},
        "loss": {"training loss": [math.nan if record.loss is None else record.loss for record in records]},
    }
    if curves["HDI"]["lowest"] == curves["HDI"]["mean"]:  # of a single layer
        del curves["HDI"]["mean"]
    panels = {title: drawn for title, drawn in curves.items() if np.isfinite([*drawn.values()]).any()}
    if not panels:
        return None
    steps = [record.step for record in records]
    figure = Figure(figsize=(10, 0.4 + 1.6 * len(panels)), layout="constrained")
    for panel, (title, drawn) in zip(figure.subplots(len(panels), sharex=True, squeeze=False)[:, 0], panels.items()):
        for colour, (name, values) in zip(("#c25100", "#3b82c4"), drawn.items()):
            x, y = zip(*((step, value) for step, value in zip(steps, values) if title != "loss" or value == value))
            panel.plot(x, y, color=colour, linewidth=1.6, label=name, marker="." if len(x) < 3 else None)
        if title == "alignment":
            _mark_events(panel, records, dict(zip(steps, next(iter(drawn.values())))), layer)
            panel.set_ylim(min(0.0, panel.get_ylim()[0]), 1.12)
        panel.set_ylabel(title, fontsize=9)
        finish_panel(panel, 8)
        panel.grid(alpha=0.3, linewidth=0.6)
        panel.legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
        panel.set_xlabel("optimizer step" if panel.get_subplotspec().is_last_row() else "", fontsize=9)
    return figure


def _mark_events(panel: Any, records: Sequence[Record], heights: Mapping[int, float], layer: str | None) -> None:
    """Mark alerts that began on a curve, and interventions at the foot of the panel."""
    began = {event.step for event in events(records) if event.level != "notice" and layer in {None, *event.where}}
    began &= heights.keys()
    done = [(at.step, action) for at in records for action in at.actions if layer in {None, *action.layers}]
    acted = sorted({step for step, action in done if not action.is_refusal})
    if began:
        y = [heights[step] if math.isfinite(heights[step]) else 0 for step in began]
        panel.scatter(list(began), y, label="alert", **TRIANGLE)
    if acted:
        diamond = {**TRIANGLE, "marker": "D", "color": "#8250df"}
        panel.scatter(acted, [0] * len(acted), label="intervention", **diamond)


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
        """Return step -> patterns ``(H, 32, 32)`` of the first accused layer: before the alert began, and at it."""
        layer = alert.layers[0] if alert.layers and alert.unit == "heads" else ""  # a pattern is of a head of queries
        until = [(step, of_layers) for step, of_layers in self._readings if step <= alert.step]
        read = {step: of_layers[layer] for step, of_layers in until if layer in of_layers}
        before = max((step for step in read if step < _onset(alert)), default=min(read, default=0))
        return {step: pattern for step, pattern in read.items() if step in {before, max(read)}}


def draw_evidence(
    alert: Alert, records: Sequence[Record], patterns: Mapping[int, Tensor] | None = None
) -> Figure | None:
    """Return the accused number of layers, and of heads, over the steps, with patterns; `None` if it was not read."""
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
    grey_label = "; grey: other layers" if len(layers) > 1 else ""
    title = f"{meaning}\nred: {shortened(joined_name(accused), 34)}{grey_label}"
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
    key = (alert.metric or "").replace("head_movement_min", "head_movement")
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


class Pictures:
    """Draws the map and the heads of a run in a share of its time, and the evidence of each alert when it begins."""

    def __init__(self, layers: Sequence[Mapping[str, Any]] = (), past: Sequence[Record] = ()) -> None:
        self.alerts: list[Alert] = []  # of all records
        self._next = 0.0  # when the map and the heads are due
        self._steps = array("q")
        self._worst: dict[str, array[float]] = {}
        self._units = {facts["name"]: compared(facts) for facts in layers}
        self._records: deque[Record] = deque(maxlen=READINGS)
        self._patterns = Patterns()
        for record in past:
            self._add(record)

    def add(self, record: Record) -> dict[str, npt.NDArray[np.uint8]]:
        """Take a record; return the pictures if they are due: tag -> ``(height, width, 3)``."""
        self._add(record)
        began = time.monotonic()
        drawn = {
            f"{EVIDENCE}/{alert.rule.replace(' ', '_')}": pixels(figure)
            for alert in reversed(urgent_of(record.alerts))  # the first of a rule, where there are several
            if (figure := draw_evidence(alert, [*self._records], self._patterns.around(alert))) is not None
        }
        is_due = record.is_last or (len(self._steps) > 1 and began >= self._next)
        if not is_due or not self._worst:
            return drawn
        drawn[MAP] = pixels(draw_map(self._steps, self._worst, urgent_of(self.alerts)))
        worst = record.values(WORST)
        layer = max(worst, key=lambda name: worst[name], default="")
        matrix = record.layers[layer].matrices.get("pair_alignment") if layer else None
        if matrix is not None:
            unit = self._units.get(layer, "heads")
            drawn[HEADS] = pixels(draw_heads(layer, record.step, matrix, closest_pair(record, layer), unit=unit))
        now = time.monotonic()
        self._next = now + (now - began) / _SHARE
        return drawn

    def _add(self, record: Record) -> None:
        # Without matrices, so that they take little memory.
        layers = {name: LayerRecord(layer.values, layer.heads) for name, layer in record.layers.items()}
        self._records.append(replace(record, layers=layers))
        self._patterns.add(record)
        values = record.values(WORST)
        for name in values:
            self._worst.setdefault(name, array("f", [math.nan] * len(self._steps)))
        for name, row in self._worst.items():
            row.append(values.get(name, math.nan))
        self._steps.append(record.step)
        self.alerts += record.alerts


def pixels(figure: Figure) -> npt.NDArray[np.uint8]:
    """Return a figure as pixels, ``(height, width, 3)``."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    figure.set_dpi(_DOTS_PER_INCH)
    canvas: Any = FigureCanvasAgg(figure)
    canvas.draw()
    picture: npt.NDArray[np.uint8] = np.array(canvas.buffer_rgba())[..., :3]
    return picture


@contextmanager
def svg_style() -> Iterator[None]:
    """Draw figures, within this context, that `svg` can make fit a light and a dark page."""
    from matplotlib import rc_context

    inks = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")
    clear = dict.fromkeys(("figure.facecolor", "axes.facecolor", "savefig.facecolor"), "none")
    style: dict[Any, Any] = {"svg.fonttype": "none", "svg.hashsalt": "hdi", **dict.fromkeys(inks, _INK), **clear}
    with rc_context(style):
        yield


def svg(figure: Figure, label: str) -> str:
    """Return a figure as an element of a page, in the colours of the text around it."""
    text = io.StringIO()
    with svg_style():
        figure.savefig(text, format="svg", dpi=120, metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    drawn = text.getvalue()
    drawn = drawn[drawn.index("<svg") :].replace(_INK, "currentColor")
    drawn = re.sub(r'font: (\d[\d.]*)px[^;"]*', r"font-size: \1px", drawn)  # the family is the page's
    return re.sub(r'<svg ([^>]*?)width="[\d.]+pt"', rf'<svg role="img" aria-label="{label}" \1', drawn, count=1)


def _heat(size: tuple[float, float], x: Sequence[float] | Any, y: Any, table: npt.NDArray[Any]) -> tuple[Figure, Any]:
    """Return a figure, and its panel, of alignments in cells with these edges."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    panel = figure.subplots()
    mesh = panel.pcolormesh(x, y, np.ma.masked_invalid(table), cmap="cividis", vmin=0, vmax=1, rasterized=True)
    # Not measured is hatched: cividis is grey itself halfway between chance and the same head.
    panel.patch.set(facecolor="none", edgecolor=OTHERS, hatch="////")
    panel.set_ylim(y[-1], y[0])
    panel.tick_params(labelsize=9)
    bar = figure.colorbar(mesh, ax=panel, fraction=0.05, pad=0.02)
    bar.set_ticks([0, 0.5, 1], labels=["0 chance", "0.5", "1 same"])
    bar.ax.tick_params(labelsize=9)
    return figure, panel
