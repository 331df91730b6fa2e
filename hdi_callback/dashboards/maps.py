"""Heat maps of alignment: layers over steps, and heads against heads.

All share one colour scale over the whole run: 0 is chance, 1 means identical heads, with a line at the limits of the
default rules. The colours (cividis) remain distinct with colour blindness.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hdi_callback.attention.names import short_names
from hdi_callback.errors import MisconfigurationError
from hdi_callback.monitoring.rules import Thresholds

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch import Tensor

MAP = "cividis"
_NOT_MEASURED = "0.82"
_MARK = "#d62728"
_MOST_COLUMNS = 400
_MOST_ROWS_NAMED = 24
_MOST_PANELS = 6


def landmarks(thresholds: Thresholds | None = None) -> dict[float, str]:
    """Labelled values of the colour scale.

    Args:
        thresholds: limits of the default rules.

    Returns:
        Alignment -> label.

    Example:
        >>> landmarks()
        {0.0: 'chance', 0.5: 'limit, mean', 0.8: 'limit, pair', 1.0: 'same head'}
    """
    limits = Thresholds() if thresholds is None else thresholds
    named = {0.0: "chance", limits.mean: "limit, mean", limits.pair: "limit, pair", 1.0: "same head"}
    return {value: name for value, name in named.items() if value is not None}


@dataclass(frozen=True)
class HeadPanel:
    """One layer in a picture of heads against heads.

    Attributes:
        layer: its name.
        alignment: ``(H, H)``, NaN where there is none.
        pair: the two heads to mark; empty for none.
        value: their alignment.
        is_alerted: whether an alert of the layer is active.
    """

    layer: str
    alignment: Tensor
    pair: tuple[int, ...]
    value: float
    is_alerted: bool = False


def draw_layers(
    steps: Sequence[int],
    worst: Mapping[str, Sequence[float]],
    *,
    pairs: Mapping[str, tuple[int, ...]] | None = None,
    alerts: Sequence[tuple[int, str, tuple[int, ...]]] = (),
    interventions: Sequence[tuple[int, str]] = (),
) -> Figure:
    """Draw the worst alignment of two heads, a row for each layer and a column for each reading.

    Args:
        steps: optimizer steps of the readings.
        worst: layer -> worst alignment at each reading, NaN where it was not measured.
        pairs: layer -> the two heads, at the last reading.
        alerts: step, layer and heads of the alerts to mark.
        interventions: step and layer of actions, marked as well.

    Returns:
        A matplotlib figure, not attached to any window.

    Raises:
        MisconfigurationError: if matplotlib is not installed, or there is nothing to draw.
    """
    figure_of = _figure_class()
    if not worst or not len(steps):
        raise MisconfigurationError("There is no reading to draw: the history has no alignment of any layer.")
    names = list(worst)
    columns, table = thinned_columns(steps, [list(worst[name]) for name in names])
    rows = len(names)
    # Small, with large letters: TensorBoard shows a picture 350 pixels wide, and a tall one smaller still.
    figure = figure_of(figsize=(5.2, min(2.2 + 0.2 * max(rows, 6), 4.8)), layout="constrained")
    panel = figure.subplots()
    edges = _edges(columns)
    mesh = panel.pcolormesh(edges, range(rows + 1), table, cmap=_map(), vmin=0, vmax=1, rasterized=True)
    panel.set_ylim(rows, 0)
    panel.set_facecolor(_NOT_MEASURED)
    last = {name: _last(curve) for name, curve in worst.items()}
    order = sorted((name for name in names if math.isfinite(last[name])), key=lambda name: -last[name])
    reported = {name for _, name, _ in alerts}
    named = set(names if rows <= _MOST_ROWS_NAMED else _spread(names, 12))
    named = {name for name in named if not _is_near(names, name, reported | set(order[:1]))} if rows > 24 else named
    shown = [name for name in names if name in named | reported or name in order[:1]]
    labels, rest = _labels(names)
    panel.set_yticks([names.index(name) + 0.5 for name in shown], [labels[name] for name in shown], fontsize=9)
    panel.set_ylabel(rest, fontsize=9)
    for label, name in zip(panel.get_yticklabels(), shown):
        if name in reported:
            label.set_fontweight("bold")
            label.set_color(_MARK)
    is_tall = rows > _MOST_ROWS_NAMED  # then marks are as high as a row and overlap
    red = {"marker": "v", "color": _MARK, "edgecolors": "white", "s": 46, "zorder": 3}
    white = {"marker": "^", "color": "white", "edgecolors": "black", "s": 14 if is_tall else 46, "zorder": 4}
    has_alerts = _mark(panel, [(step, name) for step, name, _ in alerts], names, 0 if is_tall else -0.12, red)
    has_actions = _mark(panel, interventions, names, 0 if is_tall else 0.22, white)
    marks = ["alerts" if has_alerts else "", "white ones: interventions" if has_actions else ""]
    legend = ", ".join(filter(None, marks))
    panel.set_xlabel("optimizer step" + (f"; triangles: {legend}" if legend else ""), fontsize=9)
    panel.tick_params(axis="x", labelsize=9)
    figure.suptitle(_sentence(order, last, pairs or {}, alerts), fontsize=10, x=0.01, ha="left")
    _bar(figure, mesh, panel)
    return figure


def draw_heads(panels: Sequence[HeadPanel], step: int) -> Figure:
    """Draw the alignment of every two heads, a panel for each of some layers.

    Args:
        panels: at most six are drawn.
        step: optimizer step of the reading.

    Returns:
        A matplotlib figure, not attached to any window.

    Raises:
        MisconfigurationError: if matplotlib is not installed, or there is nothing to draw.
    """
    figure_of = _figure_class()
    shown = list(panels)[:_MOST_PANELS]
    if not shown:
        raise MisconfigurationError("There is no layer to draw: no matrix of alignments is kept of this step.")
    others = shown[1:]
    figure = figure_of(figsize=(5.2 if others else 4.2, 4.2), layout="constrained")
    grid = figure.add_gridspec(max(1, len(others)), 2 if others else 1, width_ratios=[3.6, 1] if others else [1])
    first = figure.add_subplot(grid[:, 0])
    mesh = _draw_panel(first, shown[0])
    beside = [figure.add_subplot(grid[row, 1]) for row in range(len(others))]
    for axis, panel in zip(beside, others):
        _draw_panel(axis, panel, is_small=True)
    figure.suptitle(f"Alignment of every two heads at step {step}", fontsize=9, x=0.01, ha="left")
    _bar(figure, mesh, [first, *beside], location="bottom")
    return figure


def _draw_panel(axis: Any, panel: HeadPanel, *, is_small: bool = False) -> Any:
    heads = len(panel.alignment)
    table = panel.alignment.double().clone()
    table.diagonal().fill_(math.nan)  # a head with itself has no information
    rows = table.tolist()
    axis.set_facecolor(_NOT_MEASURED)
    mesh = axis.imshow(_masked(rows), cmap=_map(), vmin=0, vmax=1, interpolation="nearest")
    every = next(size for size in (1, 2, 4, 8, 16, 32, 64, 10**9) if heads <= (16 if heads < 100 else 8) * size)
    around = [] if is_small else range(0, heads, every)
    ticks = [head for head in around if all(abs(head - named) >= 0.7 * every for named in panel.pair)]
    ticks = sorted({*ticks, *panel.pair})
    for setter in (axis.set_xticks, axis.set_yticks):
        setter(ticks, [str(head) for head in ticks], fontsize=7)
    for labels in (axis.get_xticklabels(), axis.get_yticklabels()):
        for label, head in zip(labels, ticks):
            if head in panel.pair:
                label.set_fontweight("bold")
                if panel.is_alerted:
                    label.set_color(_MARK)
    if heads <= 8 and not is_small:
        for i, row in enumerate(rows):
            for j, value in enumerate(row):
                if math.isfinite(value):
                    colour = "black" if value > 0.5 else "white"
                    axis.text(j, i, f"{value:.2f}", ha="center", va="center", fontsize=7, color=colour)
    if len(panel.pair) == 2:
        i, j = panel.pair
        size = max(90.0, (150 / heads) ** 2 * 1.7) / (8 if is_small else 1)
        rings = [("white", 3.2), (_MARK, 1.7)] if panel.is_alerted else [("white", 1.0)]
        for colour, width in rings:
            axis.scatter([i, j], [j, i], s=size, facecolors="none", edgecolors=colour, linewidths=width)
        what = f"heads {i} and {j}: {panel.value:.2f}" + (" (alert)" if panel.is_alerted else "")
    else:
        what = "no two live heads"
    if is_small:
        what = f"{panel.pair[0]}, {panel.pair[1]}: {panel.value:.2f}" if len(panel.pair) == 2 else what
        title = axis.set_title(f"{_short(panel.layer, 20)}\n{what}", fontsize=6, pad=2)
        axis.set_xticks([])
        axis.set_yticks([])
    else:
        title = axis.set_title(f"{_short(panel.layer, 40)}\n{what}", fontsize=11)
    if panel.is_alerted:
        title.set_color(_MARK)
    return mesh


def thinned_columns(steps: Sequence[int], rows: list[list[float]]) -> tuple[list[int], list[list[float]]]:
    """Merge neighbouring columns until they are wide enough for a screen; the largest value of each is kept.

    Args:
        steps: one step for each column.
        rows: the numbers.

    Returns:
        Steps and rows with at most 400 columns.

    Example:
        >>> thinned_columns([0, 10, 20], [[0.1, 0.9, 0.2]])
        ([0, 10, 20], [[0.1, 0.9, 0.2]])
    """
    size = -(-len(steps) // _MOST_COLUMNS)
    if size <= 1:
        return list(steps), rows
    starts = range(0, len(steps), size)
    merged = [[_largest(row[start : start + size]) for start in starts] for row in rows]
    return [steps[start] for start in starts], merged


def _largest(values: Sequence[float]) -> float:
    finite = [value for value in values if math.isfinite(value)]
    return max(finite) if finite else math.nan


def _last(curve: Sequence[float]) -> float:
    return next((value for value in reversed(curve) if math.isfinite(value)), math.nan)


def _mark(
    panel: Any, places: Sequence[tuple[int, str]], names: Sequence[str], shift: float, style: Mapping[str, Any]
) -> bool:
    """Mark steps in the rows of layers; returns whether there are any."""
    marks = [(step, names.index(name) + 0.5 + shift) for step, name in places if name in names]
    if marks:
        x, y = zip(*marks)
        panel.scatter(x, y, linewidths=0.8, **style)
    return bool(marks)


def _sentence(
    order: Sequence[str],
    last: Mapping[str, float],
    pairs: Mapping[str, tuple[int, ...]],
    alerts: Sequence[tuple[int, str, tuple[int, ...]]],
) -> str:
    title = "Worst alignment of two heads, by layer"
    if not order:
        return title
    name = order[0]
    if alerts and alerts[-1][1] != name:  # the layer of the mark, if it is not the worst one now
        step, layer, heads = alerts[-1]
        title += f"\nalert at step {step}: {_short(layer)}{_of_heads(heads)}"
    return f"{title}\nnow highest: {_short(name)}{_of_heads(pairs.get(name, ()))}: {last[name]:.2f}"


def _labels(names: Sequence[str]) -> tuple[dict[str, str], str]:
    """Labels of rows from the distinct parts of names, and of the axis from their common part."""
    short = short_names(names)
    if short == list(names):
        return {name: _short(name) for name in names}, ""
    start = names[0].index(short[0]) if names[0].count(short[0]) == 1 else names[0].rindex(short[0])
    rest = f"{names[0][:start]}*{names[0][start + len(short[0]) :]}"
    is_complete = all(name == rest.replace("*", label) for name, label in zip(names, short))
    return {name: _short(label) for name, label in zip(names, short)}, _short(rest) if is_complete else "layer"


def _of_heads(heads: Sequence[int]) -> str:
    if len(heads) < 2:
        return f", head {heads[0]}" if heads else ""
    return f", heads {', '.join(map(str, heads[:-1]))} and {heads[-1]}" if len(heads) < 7 else f", {len(heads)} heads"


def _edges(steps: Sequence[int]) -> list[float]:
    """Borders of columns; each extends from its step to the next."""
    width = steps[-1] - steps[-2] if len(steps) > 1 else 1
    return [*map(float, steps), float(steps[-1] + max(width, 1))]


def _spread(names: Sequence[str], count: int) -> list[str]:
    return [names[round(place * (len(names) - 1) / (count - 1))] for place in range(count)]


def _is_near(names: Sequence[str], name: str, others: set[str]) -> bool:
    """Return whether a label would overlap one of another row."""
    place, least = names.index(name), len(names) / 30
    return any(other != name and other in names and abs(names.index(other) - place) < least for other in others)


def _short(name: str, most: int = 30) -> str:
    return name if len(name) <= most else f"…{name[1 - most :]}"


def _bar(figure: Any, mesh: Any, axes: Any, *, location: str = "right") -> None:
    is_flat = location == "bottom"
    shape = {"fraction": 0.05, "pad": 0.015, "aspect": 40 if is_flat else 20}
    bar = figure.colorbar(mesh, ax=axes, extend="min", location=location, **shape)
    named = landmarks()
    between = "\n" if is_flat else "  "
    bar.set_ticks(list(named), labels=[f"{value:g}{between}{name}" for value, name in named.items()])
    bar.ax.tick_params(labelsize=8)
    for value in named:
        if 0 < value < 1:
            for colour, width in (("white", 2.4), (_MARK, 1.2)):
                (bar.ax.axvline if is_flat else bar.ax.axhline)(value, color=colour, linewidth=width)


def _map() -> Any:
    from matplotlib import colormaps

    return colormaps[MAP].with_extremes(bad=_NOT_MEASURED)


def _masked(rows: list[list[float]]) -> Any:
    import numpy as np

    return np.ma.masked_invalid(np.array(rows, dtype=float))


def _figure_class() -> type[Figure]:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MisconfigurationError("Figures need matplotlib: pip install 'hdi-callback[reports]'.") from error
    return Figure
