"""Figures of a run's history, with matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from hdi_callback.errors import MisconfigurationError
from hdi_callback.monitoring.metrics import METRICS

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


def plot_trajectories(
    history: pd.DataFrame, metrics: Sequence[str] = ("hdi", "hdi_worst_pair", "head_covariance", "head_correlation")
) -> Figure:
    """Draw the curves of every layer over the optimizer steps, one panel per metric.

    The dashed line in the panel of the index is chance: where independent random heads of the same size sit.

    Args:
        history: what `load_history` gives.
        metrics: names of metrics, one panel each.

    Returns:
        A matplotlib figure, not attached to any window.

    Raises:
        MisconfigurationError: if matplotlib is not installed, or the history lacks every one of the metrics.
    """
    try:
        from matplotlib import colormaps
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MisconfigurationError("Figures need matplotlib: pip install 'hdi-callback[reports]'.") from error
    present = [metric for metric in metrics if metric in history.columns]
    if not present:
        known = [name for name in history.columns if name in METRICS]
        raise MisconfigurationError(f"The history has none of {list(metrics)}; it has: {known}.")
    columns = min(2, len(present))
    rows = -(-len(present) // columns)
    figure = Figure(figsize=(5.2 * columns, 3.1 * rows), layout="constrained")
    panels = list(figure.subplots(rows, columns, squeeze=False).flat)
    layers = list(dict.fromkeys(history["layer"]))
    colours = [colormaps["viridis"](0.92 * place / max(1, len(layers) - 1)) for place in range(len(layers))]
    for panel, metric in zip(panels, present):
        for layer, colour in zip(layers, colours):
            curve = history[history["layer"] == layer].dropna(subset=[metric])
            panel.plot(curve["step"], curve[metric], color=colour, label=layer, linewidth=1.4)
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
    if len(layers) <= 16:
        handles, labels = figure.axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    return figure
