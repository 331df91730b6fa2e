from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch
from matplotlib.colors import to_rgb

from hdi_callback.dashboards.figures import plot_heads, plot_trajectories
from hdi_callback.dashboards.maps import HeadPanel, draw_heads
from hdi_callback.dashboards.pictures import can_draw
from hdi_callback.errors import MisconfigurationError
from hdi_callback.monitoring.history import read_records
from tests.dashboards.report.synthetic import write_run


def frame(layers: int = 3, steps: int = 5) -> pd.DataFrame:
    rows = [
        {"step": 10 * step, "layer": f"layer {place}", "hdi": 0.9 - 0.01 * step - 0.1 * place, "hdi_chance": 0.875,
         "head_correlation": 0.1 * step if step < steps - 1 else float("nan")}
        for step in range(steps) for place in range(layers)
    ]  # fmt: skip
    return pd.DataFrame(rows)


def test_every_layer_is_a_curve_with_the_values_of_the_history():
    history = frame()
    figure = plot_trajectories(history)
    panel = figure.axes[0]
    layers = list(history.groupby("layer", sort=False))
    assert len(layers) == 3
    for line, (name, rows) in zip(panel.lines[: len(layers)], layers, strict=True):
        assert line.get_label() == name
        assert np.array_equal(line.get_xdata(), rows["step"])
        assert np.array_equal(line.get_ydata(), rows["hdi"])


def test_chance_is_drawn_only_in_the_panel_of_the_index():
    figure = plot_trajectories(frame())
    dashed = [[line.get_ydata()[0] for line in panel.lines if line.get_linestyle() == "--"] for panel in figure.axes]
    assert dashed == [[0.875], []]


def test_a_reading_without_head_outputs_leaves_a_gap_and_not_a_zero():
    figure = plot_trajectories(frame(), metrics=["head_correlation"])
    assert list(figure.axes[0].lines[0].get_xdata()) == [0, 10, 20, 30]


def test_a_panel_that_is_not_needed_is_not_shown():
    figure = plot_trajectories(frame(), metrics=["hdi", "head_correlation", "hdi_chance"])
    assert [panel.get_visible() for panel in figure.axes] == [True, True, True, False]


def test_the_figure_can_be_saved_and_is_not_blank(tmp_path):
    from matplotlib.image import imread

    path = tmp_path / "trajectories.png"
    plot_trajectories(frame()).savefig(path, dpi=60)
    assert imread(path)[..., :3].std() > 0.02


def test_a_history_without_the_metric_is_refused_with_the_metrics_it_has():
    with pytest.raises(MisconfigurationError, match=r"none of \['hdi_query'\]; it has: \['hdi', "):
        plot_trajectories(frame(), metrics=["hdi_query"])


def test_figures_are_drawn_from_a_file_and_a_layer_that_it_lacks_is_refused(tmp_path):
    path = tmp_path / "history.jsonl"
    write_run(path)
    panel = plot_trajectories(path, ["hdi"]).axes[0]
    values = [record.layers["model.blocks.1.attn"].values["hdi"] for record in read_records(path)]
    drawn = next(line for line in panel.lines if line.get_label() == "model.blocks.1.attn")
    assert drawn.get_ydata().tolist() == values
    with pytest.raises(MisconfigurationError, match=r"no layer 'model\.block\.1\.attn'\. Did you mean"):
        plot_heads(path, layers=["model.block.1.attn"])


def test_with_many_layers_the_legend_names_the_outermost_ones():
    history = frame(layers=40)
    history["hdi_worst_pair"] = 1 - history["hdi"]
    figure = plot_trajectories(history, metrics=["hdi", "hdi_worst_pair"])
    (legend,) = figure.legends
    named = [text.get_text() for text in legend.get_texts()]
    assert named[:2] == ["layer 38", "layer 39"]
    assert legend.get_title().get_text() == "2 of 40 layers by name, the others in grey"
    colours = {line.get_label(): line.get_color() for line in figure.axes[0].lines}
    assert colours["layer 3"] == "0.75"
    assert colours["layer 39"] not in {colours["layer 38"], "0.75"}


def test_named_layers_among_many_have_colours_that_can_be_told_apart():
    history = frame(layers=40)
    lines = plot_trajectories(history, metrics=["hdi"]).axes[0].lines
    named = [to_rgb(line.get_color()) for line in lines if line.get_label() in ("layer 38", "layer 39")]
    assert np.abs(np.subtract(*named)).max() > 0.3


def test_pictures_are_drawn_where_matplotlib_is_installed(monkeypatch):
    assert can_draw()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert not can_draw()


def test_the_numbers_of_an_alerted_pair_are_bold_and_red():
    alignment = torch.eye(4, dtype=torch.float64)
    figure = draw_heads([HeadPanel("attn", alignment, (1, 3), 0.9, is_alerted=True)], 50)
    labels = [*figure.axes[0].get_xticklabels(), *figure.axes[0].get_yticklabels()]
    marked = [label.get_text() for label in labels if label.get_fontweight() == "bold" and label.get_color() != "black"]
    assert marked == ["1", "3", "1", "3"]


def test_the_map_of_up_to_eight_heads_prints_the_numbers_of_their_pairs():
    for heads, numbers in ((8, 56), (9, 0)):
        alignment = torch.full((heads, heads), 0.25, dtype=torch.float64).fill_diagonal_(float("nan"))
        figure = draw_heads([HeadPanel("attn", alignment, (1, 3), 0.25)], 50)
        assert [text.get_text() for text in figure.axes[0].texts] == ["0.25"] * numbers
