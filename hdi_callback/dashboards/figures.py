"""Figures of a run's history, with matplotlib."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hdi_callback.arguments import did_you_mean, shown
from hdi_callback.dashboards.maps import HeadPanel, draw_heads, draw_layers
from hdi_callback.errors import MisconfigurationError
from hdi_callback.monitoring.alerts import Alert
from hdi_callback.monitoring.history import RunHistory, load_history, read_history
from hdi_callback.monitoring.metrics import METRICS
from hdi_callback.monitoring.readings import LayerRecord, Record

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

_LABELS = {
    "hdi": "HDI (key weights)",
    "hdi_worst_pair": "overlap of the worst pair",
    "hdi_effective_heads": "effective heads",
    "head_correlation": "correlation of head outputs",
    "head_covariance": "covariance term",
}

WORST_ALIGNMENT = "hdi_worst_alignment"
_MOST_IN_LEGEND = 16
_NAMED_A_PANEL = 2
_MOST_LAYERS = 6
# Okabe and Ito's colours, which remain distinct with colour blindness.
_APART = ("#D55E00", "#0072B2", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")


def plot_trajectories(
    history: pd.DataFrame | str | os.PathLike[str],
    metrics: Sequence[str] = ("hdi", "hdi_worst_pair", "head_covariance", "head_correlation"),
) -> Figure:
    """Draw the curves of every layer over the optimizer steps, one panel per metric.

    The dashed line in the panel of the index is chance, the index of independent random heads of the same size.

    Args:
        history: the result of `load_history`, or a history file.
        metrics: names of metrics, one panel each.

    Returns:
        A matplotlib figure, not attached to any window.

    Raises:
        MisconfigurationError: if matplotlib is not installed, if there is no such file, or if the history lacks every
            one of the metrics.
    """
    try:
        from matplotlib import colormaps
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MisconfigurationError("Figures need matplotlib: pip install 'hdi-callback[reports]'.") from error
    if isinstance(history, str | os.PathLike):
        history = load_history(history)
    present = [metric for metric in metrics if metric in history.columns]
    if not present:
        known = [name for name in history.columns if name in METRICS]
        raise MisconfigurationError(f"The history has none of {list(metrics)}; it has: {known}.")
    columns = min(2, len(present))
    rows = -(-len(present) // columns)
    figure = Figure(figsize=(5.2 * columns, 3.1 * rows), layout="constrained")
    panels = list(figure.subplots(rows, columns, squeeze=False).flat)
    layers = list(dict.fromkeys(history["layer"]))
    is_crowded = len(layers) > _MOST_IN_LEGEND
    colours = [colormaps["viridis"](0.92 * place / max(1, len(layers) - 1)) for place in range(len(layers))]
    named = _outermost(history, present) if is_crowded else layers
    strong = dict(zip(named, _APART if is_crowded else colours))
    for panel, metric in zip(panels, present):
        for layer in layers:
            curve = history[history["layer"] == layer].dropna(subset=[metric])
            shade, width = (strong[layer], 1.6) if layer in strong else ("0.75", 0.8)
            above = 3 if is_crowded and layer in strong else 2
            panel.plot(curve["step"], curve[metric], color=shade, label=layer, linewidth=width, zorder=above)
        if metric == "hdi" and "hdi_chance" in history.columns:
            for chance in sorted(set(history["hdi_chance"].dropna().round(3))):
                panel.axhline(chance, color="0.45", linestyle="--", linewidth=1, label=f"chance {chance:.3f}")
        panel.set_title(_LABELS.get(metric, metric), loc="left", fontsize=10)
        panel.set_xlabel("optimizer step", fontsize=9)
        panel.tick_params(labelsize=8)
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(alpha=0.25, linewidth=0.6)
    for panel in panels[len(present) :]:
        panel.set_visible(False)
    entries = zip(*figure.axes[0].get_legend_handles_labels())
    shown = [(handle, name) for handle, name in entries if name in strong or name not in layers]
    title = f"{len(named)} of {len(layers)} layers by name, the others in grey" if is_crowded else None
    handles, labels = [handle for handle, _ in shown], [name for _, name in shown]
    figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=8, frameon=False, title=title)
    return figure


def _outermost(history: pd.DataFrame, metrics: Sequence[str]) -> list[str]:
    """The layers with the worst last values: lowest for the index, highest for other metrics."""
    named: list[str] = []
    for metric in metrics:
        last = history.dropna(subset=[metric]).groupby("layer", sort=False)[metric].last()
        order = last.sort_values(ascending=metric.endswith(("hdi", "energy", "effective_heads", "normalised")))
        named += [str(name) for name in order.index[:_NAMED_A_PANEL]]
    return list(dict.fromkeys(named))[: len(_APART)]


def plot_layers(history: str | os.PathLike[str] | RunHistory) -> Figure:
    """Draw the worst alignment of two heads, a row for each layer and a column for each reading; alerts are marked.

    Args:
        history: a history file, or the result of `read_history`.

    Returns:
        A matplotlib figure, not attached to any window.

    Raises:
        MisconfigurationError: if matplotlib is not installed, or the history has no reading.
    """
    run = _read(history)
    records = run.records()
    names = list(dict.fromkeys(name for record in records for name in record.layers))
    curves = {name: [_worst(record, name) for record in records] for name in names}
    measured = {name: curve for name, curve in curves.items() if any(map(math.isfinite, curve))}
    pairs = {name: _pair(record.layers[name]) for record in records for name in record.layers}
    reported = [alert for alert in _alerts(run) if alert.level != "notice" and not alert.is_resolved]
    return draw_layers(
        [record.step for record in records],
        measured,
        pairs=pairs,
        alerts=[(alert.step, alert.layer, alert.finding.heads) for alert in reported],
        interventions=[
            (line["step"], line["layer"])
            for line in run.lines
            if line["kind"] == "intervention" and not line.get("is_dry_run") and not line.get("is_refusal")
        ],
    )


def plot_heads(
    history: str | os.PathLike[str] | RunHistory, *, step: int | None = None, layers: Sequence[str] | None = None
) -> Figure:
    """Draw the alignment of every two heads in the layers that matter: those with an alert, then the worst.

    Args:
        history: a history file, or what `read_history` gave.
        step: the reading; by default the last of which matrices are kept.
        layers: names of layers; by default those with an alert that is active then, and the five worst after them, six
            in all.

    Returns:
        A matplotlib figure, not attached to any window.

    Raises:
        MisconfigurationError: if matplotlib is not installed, if no matrix is kept of this step and these layers, or if
            the run does not have one of them.
    """
    run = _read(history)
    kept = run.matrix_steps()
    if step is None and kept:
        step = kept[-1]
    record = next((record for record in run.records() if record.step == step), None)
    if record is None or step not in kept:
        few = ", ".join(map(str, kept[:8])) + (", ..." if len(kept) > 8 else "")
        raise MisconfigurationError(f"No matrix is kept of step {step}. There are some of: {few or 'no step'}.")
    alerted = _active_heads(_alerts(run), record.step)
    chosen = layers_that_matter(record, alerted) if layers is None else list(layers)
    if unknown := [name for name in chosen if name not in record.layers]:
        raise MisconfigurationError(
            f"The run has no layer {shown(unknown[0])}.{did_you_mean(unknown[0], record.layers)} "
            f"It has: {', '.join(record.layers)}."
        )
    panels = []
    for name in chosen:
        matrix = _alignment(run, record, name)
        if matrix is not None:
            panels.append(panel_of(name, record.layers[name], matrix, alerted.get(name)))
    return draw_heads(panels, record.step)


def layers_that_matter(record: Record, alerted: Iterable[str]) -> list[str]:
    """Layers to show: those with an alert, worst first, then the five worst others.

    Args:
        record: a reading.
        alerted: layers with an active alert.

    Returns:
        At most six names.
    """
    reported = set(alerted)
    worst = {name: _worst(record, name) for name in record.layers}
    order = sorted((name for name in worst if math.isfinite(worst[name])), key=lambda name: -worst[name])
    first = [name for name in order if name in reported]
    return [*first, *(name for name in order if name not in reported)][:_MOST_LAYERS]


def panel_of(name: str, layer: LayerRecord, alignment: Tensor, heads: tuple[int, ...] | None) -> HeadPanel:
    """The panel of a layer.

    Args:
        name: the layer.
        layer: its numbers.
        alignment: ``(H, H)``.
        heads: the heads of the active alert; `None` if there is none.

    Returns:
        The panel, with the pair of the alert marked, else the worst one.
    """
    pair = heads if heads is not None and len(heads) == 2 else _pair(layer)
    value = float(alignment[pair[0], pair[1]]) if len(pair) == 2 else math.nan
    return HeadPanel(name, alignment, pair, value, heads is not None)


def _read(history: str | os.PathLike[str] | RunHistory) -> RunHistory:
    return history if isinstance(history, RunHistory) else read_history(history)


def _alerts(run: RunHistory) -> list[Alert]:
    return [Alert.from_dict(line) for line in run.lines if line["kind"] == "alert"]


def _active_heads(alerts: Iterable[Alert], step: int) -> dict[str, tuple[int, ...]]:
    """Layer -> heads named by its active alerts at a step."""
    active = {}
    for alert in alerts:
        if alert.step <= step and alert.level != "notice":
            active[alert.layer, alert.rule] = None if alert.is_resolved else alert
    return heads_of(alert for alert in active.values() if alert is not None)


def heads_of(alerts: Iterable[Alert]) -> dict[str, tuple[int, ...]]:
    """Layer -> heads that its alerts name.

    Args:
        alerts: the active ones; notices are skipped.

    Returns:
        Layer -> heads; those of a pair count before others.
    """
    heads: dict[str, tuple[int, ...]] = {}
    for alert in alerts:
        if alert.level != "notice" and len(heads.get(alert.layer, ())) != 2:
            heads[alert.layer] = alert.finding.heads
    return heads


def _worst(record: Record, name: str) -> float:
    layer = record.layers.get(name)
    return math.nan if layer is None else layer.values.get(WORST_ALIGNMENT, math.nan)


def _pair(layer: LayerRecord) -> tuple[int, ...]:
    pair = tuple(int(head) for head in layer.arrays.get("worst_alignment_pair", ()))
    return pair if len(pair) == 2 and min(pair) >= 0 else ()


def _alignment(run: RunHistory, record: Record, name: str) -> Tensor | None:
    matrices = run.matrices(record.step, name)
    if "pair_alignment" in matrices:
        return matrices["pair_alignment"]
    layers: list[Mapping[str, Any]] = [layer for line in run.lines if line["kind"] == "run" for layer in line["layers"]]
    facts = next((layer for layer in layers if layer["name"] == name), {})
    overlap, rank, width = matrices.get("overlap"), record.layers[name].arrays.get("rank"), facts.get("width")
    if overlap is None or not rank or not width:
        return None
    ranks: Tensor = torch.tensor(rank, dtype=torch.float64)  # version 0.1 kept overlaps alone
    chance = (ranks[:, None] * ranks).sqrt() / width
    alignment: Tensor = (overlap.double() - chance) / (1 - chance)
    return alignment
