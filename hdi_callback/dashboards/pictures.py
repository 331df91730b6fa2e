"""Pictures with matplotlib: layers x steps, heads x heads, and the curves of a model.

Alignment has one colour scale everywhere, from 0, chance, to 1, the same head. Its colours (cividis) remain distinct
with colour blindness.
"""

from __future__ import annotations

import io
import math
import re
import statistics
import time
from array import array
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from hdi_callback.dashboards.evidence import (
    ACCUSED,
    READINGS,
    TRIANGLE,
    Patterns,
    draw_evidence,
    finish_panel,
    shortened,
    slim,
)  # fmt: skip
from hdi_callback.dashboards.layer_table import closest_pair, compared, name_layers, number_in
from hdi_callback.dashboards.tags import EVIDENCE, HEADS, MAP
from hdi_callback.dashboards.verdict import becomes_warning, events
from hdi_callback.record import Alert, Record

if TYPE_CHECKING:
    import numpy.typing as npt
    from matplotlib.figure import Figure

WORST = "hdi_worst_alignment"
_NOT_MEASURED = "#b8b8b8"
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
    alerted = {names[int(row)] for _, row in marks}
    labelled = _rows_named(names, alerted)
    labels = [shortened(number_in(name, names)) for name in labelled]
    panel.set_yticks([names.index(name) + 0.5 for name in labelled], labels)
    if labelled and labels[0] != shortened(labelled[0]):
        panel.set_ylabel(shortened(name_layers(names), 40), fontsize=9)
    for label, name in zip(panel.get_yticklabels(), labelled):
        if name in alerted:
            label.set(fontweight="bold", color=ACCUSED)
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


def draw_curves(records: Sequence[Record]) -> Figure | None:
    """Draw the curves of a model, or of one of its layers, in panels, with alerts and interventions marked."""
    from matplotlib.figure import Figure

    def curve(metric: str, reduce: Callable[[list[float]], float]) -> list[float]:
        values = [list(filter(math.isfinite, record.values(metric).values())) for record in records]
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
            _mark_events(panel, records, dict(zip(steps, next(iter(drawn.values())))))
            panel.set_ylim(min(0.0, panel.get_ylim()[0]), 1.12)
        panel.set_ylabel(title, fontsize=9)
        finish_panel(panel, 8)
        panel.grid(alpha=0.3, linewidth=0.6)
        panel.legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
        panel.set_xlabel("optimizer step" if panel.get_subplotspec().is_last_row() else "", fontsize=9)
    return figure


def _mark_events(panel: Any, records: Sequence[Record], heights: Mapping[int, float]) -> None:
    """Mark alerts that began on a curve, and interventions at the foot of the panel."""
    began = {event.step for event in events(records) if event.level != "notice"} & heights.keys()
    acted = [record.step for record in records if any(not action.is_refusal for action in record.actions)]
    if began:
        y = [heights[step] if math.isfinite(heights[step]) else 0 for step in began]
        panel.scatter(list(began), y, label="alert", **TRIANGLE)
    if acted:
        diamond = {**TRIANGLE, "marker": "D", "color": "#8250df"}
        panel.scatter(acted, [0] * len(acted), label="intervention", **diamond)


class Pictures:
    """Draws the map and the heads of a run in a share of its time, and the evidence of each alert when it begins."""

    def __init__(self, past: Sequence[Record] = (), clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._next = clock, 0.0
        self._steps = array("q")
        self._worst: dict[str, array[float]] = {}
        self._alerts: list[Alert] = []
        self._marked: list[Alert] = []
        self._units: dict[str, str] = {}
        self._records: deque[Record] = deque(maxlen=READINGS)
        self._patterns = Patterns()
        for record in past:
            self._add(record)

    def open(self, layers: Sequence[Mapping[str, Any]]) -> None:
        """Take the facts of the layers."""
        self._units = {facts["name"]: compared(facts) for facts in layers}

    def add(self, record: Record) -> dict[str, npt.NDArray[np.uint8]]:
        """Take a record; return the pictures if they are due: tag -> ``(height, width, 3)``."""
        self._add(record)
        began = self._clock()
        urgent = [alert for alert in record.alerts if not alert.is_over and alert.level != "notice"]
        drawn = {
            f"{EVIDENCE}/{alert.rule.replace(' ', '_')}": pixels(figure)
            for alert in reversed(urgent)  # the first of a rule, where there are several
            if (figure := draw_evidence(alert, [*self._records], self._patterns.around(alert))) is not None
        }
        is_due = record.is_last or (len(self._steps) > 1 and began >= self._next)
        if not is_due or not self._worst:
            return drawn
        drawn[MAP] = pixels(draw_map(self._steps, self._worst, self._marked))
        worst = record.values(WORST)
        layer = max(worst, key=lambda name: worst[name], default="")
        matrix = record.layers[layer].matrices.get("pair_alignment") if layer else None
        if matrix is not None:
            unit = self._units.get(layer, "heads")
            drawn[HEADS] = pixels(draw_heads(layer, record.step, matrix, closest_pair(record, layer), unit=unit))
        now = self._clock()
        self._next = now + (now - began) / _SHARE
        return drawn

    def _add(self, record: Record) -> None:
        self._records.append(slim(record))
        self._patterns.add(record)
        values = record.values(WORST)
        for name in values:
            self._worst.setdefault(name, array("f", [math.nan] * len(self._steps)))
        for name, row in self._worst.items():
            row.append(values.get(name, math.nan))
        self._steps.append(record.step)
        self._marked += [alert for alert in record.alerts if becomes_warning(alert, self._alerts)]
        self._alerts += record.alerts


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
    style: dict[Any, Any] = {"svg.fonttype": "none", "svg.hashsalt": "hdi", **dict.fromkeys(inks, _INK)}
    with rc_context(style):
        yield


def svg(figure: Figure, label: str) -> str:
    """Return a figure as an element of a page, in the colours of the text around it."""
    text = io.StringIO()
    figure.patch.set_alpha(0)
    for panel in figure.axes:
        if panel.get_facecolor() == (1.0, 1.0, 1.0, 1.0):
            panel.patch.set_alpha(0)
    with svg_style():
        figure.savefig(text, format="svg", dpi=120, metadata={"Date": None, "Creator": None})
    drawn = text.getvalue()
    drawn = drawn[drawn.index("<svg") :].replace(_INK, "currentColor")
    drawn = re.sub(r"<metadata>.*?</metadata>", "", drawn, flags=re.DOTALL)
    drawn = re.sub(r'font: (\d[\d.]*)px[^;"]*', r"font-size: \1px", drawn)  # the family is the page's
    return re.sub(r'<svg ([^>]*?)width="[\d.]+pt"', rf'<svg role="img" aria-label="{label}" \1', drawn, count=1)


def _heat(size: tuple[float, float], x: Sequence[float] | Any, y: Any, table: npt.NDArray[Any]) -> tuple[Figure, Any]:
    """Return a figure, and its panel, of alignments in cells with these edges."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    panel = figure.subplots()
    mesh = panel.pcolormesh(x, y, np.ma.masked_invalid(table), cmap="cividis", vmin=0, vmax=1, rasterized=True)
    panel.set_facecolor(_NOT_MEASURED)
    panel.set_ylim(y[-1], y[0])
    panel.tick_params(labelsize=9)
    bar = figure.colorbar(mesh, ax=panel, fraction=0.05, pad=0.02)
    bar.set_ticks([0, 0.5, 1], labels=["0 chance", "0.5", "1 same"])
    bar.ax.tick_params(labelsize=9)
    return figure, panel


def _rows_named(names: Sequence[str], alerted: Collection[str]) -> list[str]:
    """Return the layers whose names fit beside the rows: those with an alert, and every few others far from them."""
    every = math.ceil(len(names) / _MOST_NAMED)
    marked = {place for place, name in enumerate(names) if name in alerted and len(alerted) <= _MOST_NAMED}
    regular = {place for place in range(0, len(names), every) if all(abs(place - at) >= every for at in marked)}
    return [names[place] for place in sorted(marked | regular)]
