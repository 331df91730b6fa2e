"""Pictures: what they show, when they are drawn, and that they touch nothing."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from matplotlib.image import imread

from hdi_callback.dashboards.figures import heads_of, layers_that_matter, plot_heads, plot_layers
from hdi_callback.dashboards.maps import thinned_columns
from hdi_callback.dashboards.pictures import Pictures, save_in
from hdi_callback.errors import MisconfigurationError
from hdi_callback.monitoring.alerts import Alert, Finding
from hdi_callback.monitoring.history import History
from hdi_callback.monitoring.readings import LayerRecord, Record
from hdi_callback.monitoring.session.sink import Result


def layer(heads: int, pair: tuple[int, int], worst: float) -> LayerRecord:
    alignment = torch.full((heads, heads), 0.05, dtype=torch.float64).fill_diagonal_(1)
    alignment[pair[0], pair[1]] = alignment[pair[1], pair[0]] = worst
    arrays = {"worst_alignment_pair": list(pair)}
    return LayerRecord({"hdi_worst_alignment": worst}, arrays, {"pair_alignment": alignment})


def record(step: int, layers: int = 3, heads: int = 6, bad: int = 1, worst: float = 0.95) -> Record:
    made = {f"blocks.{i}.attn": layer(heads, (2, heads - 1), worst if i == bad else 0.1) for i in range(layers)}
    return Record(step, made, axis=step, time=float(step))


def alert(step: int, name: str = "blocks.1.attn", heads=(2, 5)) -> Alert:
    return Alert(step, name, "worst pair", "warning", "", Finding("", heads=heads))


class Clock:
    """A clock that the test moves, and that drawing moves by a second."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def taken_by(clock: Clock, drawn: list):
    def take(picture) -> None:
        drawn.append((picture.name, picture.step))
        clock.now += 0.5  # two pictures: a second

    return take


@pytest.fixture
def quick(monkeypatch):
    """Drawing that takes no time, where it is asked when and not what is drawn."""
    from hdi_callback.dashboards import pictures

    monkeypatch.setattr(pictures, "draw_layers", lambda *args, **options: "layers")
    monkeypatch.setattr(pictures, "draw_heads", lambda *args: "heads")
    monkeypatch.setattr(pictures, "pixels_of", lambda figure: figure)


@pytest.mark.usefixtures("quick")
def test_pictures_come_at_their_cadence_at_alerts_and_at_the_end():
    clock, drawn = Clock(), []
    pictures = Pictures([taken_by(clock, drawn)], every=4, clock=clock)
    for step in range(11):
        clock.now += 1000
        reported = (alert(step),) if step == 6 else ()
        pictures.write(Result(record(step), reported, active=reported, is_last=step == 10))
    assert [step for name, step in drawn if name == "layers"] == [0, 4, 6, 8, 10]
    assert [step for name, step in drawn if name == "heads"] == [0, 4, 6, 8, 10]


@pytest.mark.usefixtures("quick")
def test_drawing_stays_within_its_share_of_the_time():
    clock, drawn = Clock(), []
    pictures = Pictures([taken_by(clock, drawn)], every=1, clock=clock)
    for step in range(600):
        clock.now += 1
        pictures.write(Result(record(step, layers=1)))
    assert 0 < len(drawn) / 2 <= 0.02 * clock.now


def test_a_run_of_a_few_seconds_draws_nothing():
    clock, drawn = Clock(), []
    pictures = Pictures([taken_by(clock, drawn)], every=1, clock=clock)
    for step in range(5):
        clock.now += 1
        pictures.write(Result(record(step), is_last=step == 4))
    assert drawn == []


def test_no_random_number_is_drawn_and_no_figure_is_left_open():
    import matplotlib.pyplot as plt

    before = torch.get_rng_state(), random.getstate(), np.random.get_state()  # noqa: NPY002
    clock, drawn = Clock(), []
    pictures = Pictures([taken_by(clock, drawn)], every=1, clock=clock)
    clock.now = 1e6
    pictures.write(Result(record(0)))
    assert len(drawn) == 2
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == random.getstate()
    assert all(np.array_equal(a, b) for a, b in zip(before[2], np.random.get_state()))  # noqa: NPY002
    assert plt.get_fignums() == []


def test_a_failing_picture_outlet_does_not_stop_the_others(tmp_path):
    clock = Clock()

    def fails(picture):
        raise OSError("the disk is full")

    pictures = Pictures([fails, save_in(lambda: tmp_path / "figures")], every=1, clock=clock)
    clock.now = 1e6
    with pytest.raises(OSError, match="full"):
        pictures.write(Result(record(0)))
    for name in ("layers", "heads"):
        assert imread(tmp_path / "figures" / f"{name}.png")[..., :3].std() > 0.02


def test_a_resumed_run_draws_the_readings_before_it_as_well(tmp_path):
    history = History(tmp_path / "history.jsonl")
    for step in (0, 10, 20):
        history.write(record(step))
    clock = Clock()
    pictures = Pictures([lambda picture: None], every=1, before=history.path, clock=clock)
    clock.now = 1e6
    pictures.write(Result(record(20)))
    pictures.write(Result(record(30)))
    assert pictures._steps == [0, 10, 20, 30]
    assert {len(curve) for curve in pictures._curves.values()} == {4}


def test_a_long_run_keeps_a_bounded_number_of_points_and_its_highest_values():
    pictures = Pictures([], every=10**9, clock=Clock())
    for step in range(3000):
        pictures.write(Result(record(step, layers=1, bad=0, worst=0.9 if step == 500 else 0.1)))
    assert len(pictures._steps) <= 1201
    assert max(pictures._curves["blocks.0.attn"]) == 0.9


@pytest.fixture
def run(tmp_path):
    history = History(tmp_path / "history.jsonl", matrix_every=1)
    history.begin(0, [{"name": f"blocks.{i}.attn", "num_heads": 6} for i in range(3)])
    for step, worst in ((0, 0.1), (50, 0.6), (100, 0.95)):
        reported = [alert(step)] if step == 100 else []
        history.write(record(step, worst=worst), reported)
        for news in reported:
            history.note("alert", **news.to_dict())
    return history.path


def cells(figure) -> np.ndarray:
    return np.asarray(figure.axes[0].collections[0].get_array())


def test_the_map_of_layers_has_the_values_of_the_history_on_a_fixed_scale(run):
    figure = plot_layers(run)
    mesh = figure.axes[0].collections[0]
    assert np.allclose(cells(figure), [[0.1] * 3, [0.1, 0.6, 0.95], [0.1] * 3])
    assert mesh.get_clim() == (0, 1)
    ticks = [text.get_text() for text in figure.axes[-1].get_yticklabels()]
    assert ticks == ["0  chance", "0.5  limit, mean", "0.8  limit, pair", "1  same head"]


def test_the_map_of_layers_marks_the_alert_and_names_layer_and_heads(run):
    figure = plot_layers(run)
    panel = figure.axes[0]
    assert panel.collections[1].get_offsets().tolist() == [[100, pytest.approx(1.38)]]
    assert "blocks.1.attn, heads 2 and 5: 0.95" in figure.get_suptitle()
    bold = [text.get_text() for text in panel.get_yticklabels() if text.get_fontweight() == "bold"]
    assert bold == ["1"]
    assert panel.get_ylabel() == "blocks.*.attn"


def test_a_resolved_collapse_is_still_named_with_its_heads_and_the_intervention(run):
    history = History(run)
    history.note("alert", **replace(alert(110), is_resolved=True).to_dict())
    for step, is_dry in ((100, False), (50, True)):
        message = {"intervention": "ReviveHeads", "message": "", "is_dry_run": is_dry}
        history.note("intervention", step=step, layer="blocks.1.attn", **message)
    history.write(record(150, bad=0, worst=0.2))
    figure = plot_layers(run)
    panel = figure.axes[0]
    assert figure.get_suptitle().splitlines()[1:] == [
        "alert at step 100: blocks.1.attn, heads 2 and 5",
        "now highest: blocks.0.attn, heads 2 and 5: 0.20",
    ]
    alerts, actions = (marks.get_offsets().tolist() for marks in panel.collections[1:3])
    assert [step for step, _ in alerts] == [step for step, _ in actions] == [100]
    assert alerts != actions, "the two marks do not hide each other"
    assert "white ones: interventions" in panel.get_xlabel()


def test_the_map_of_heads_begins_with_the_alerted_layer_and_rings_its_pair(run):
    figure = plot_heads(run)
    panel = figure.axes[0]
    assert panel.get_title() == "blocks.1.attn\nheads 2 and 5: 0.95 (alert)"
    assert panel.collections[0].get_offsets().tolist() == [[2, 5], [5, 2]]
    shown = np.ma.filled(panel.images[0].get_array(), np.nan)
    assert np.isnan(shown.diagonal()).all()
    assert shown[2, 5] == pytest.approx(0.95, abs=0.002)
    assert panel.images[0].get_clim() == (0, 1)
    assert [text.get_text() for text in panel.get_xticklabels()] == list("012345")


def test_a_step_without_matrices_is_refused_with_the_steps_that_have_some(run):
    with pytest.raises(MisconfigurationError, match=r"step 7\. There are some of: 0, 50, 100"):
        plot_heads(run, step=7)


def test_with_96_layers_the_alerted_one_is_named_and_labels_do_not_overlap(tmp_path):
    history = History(tmp_path / "history.jsonl", matrix_every=1)
    big = record(0, layers=96, heads=128, bad=17)
    history.write(big, [alert(0, "blocks.17.attn", (2, 127))])
    history.note("alert", **alert(0, "blocks.17.attn", (2, 127)).to_dict())
    figure = plot_layers(history.path)
    figure.draw_without_rendering()
    boxes = [text.get_window_extent() for text in figure.axes[0].get_yticklabels() if text.get_text()]
    assert "17" in [text.get_text() for text in figure.axes[0].get_yticklabels()]
    assert 8 <= len(boxes) <= 30
    assert not any(box.overlaps(other) for i, box in enumerate(boxes) for other in boxes[:i])
    heads = plot_heads(history.path)
    heads.draw_without_rendering()
    panel = heads.axes[0]
    assert panel.get_title().startswith("blocks.17.attn\nheads 2 and 127: 0.95 (alert)")
    for labels in (panel.get_xticklabels(), panel.get_yticklabels()):
        boxes = [text.get_window_extent() for text in labels]
        assert not any(box.overlaps(other) for i, box in enumerate(boxes) for other in boxes[:i])


def test_the_layers_shown_are_the_alerted_ones_and_the_five_worst():
    layers = {f"l{i}": layer(4, (0, 1), 0.1 * i) for i in range(9)}
    assert layers_that_matter(Record(0, layers), ["l2"]) == ["l2", "l8", "l7", "l6", "l5", "l4"]
    notice = Alert(0, "l3", "trend", "notice", "", Finding("", level="notice"))
    assert heads_of([notice, alert(0, "l2")]) == {"l2": (2, 5)}


def test_merged_columns_keep_their_largest_value():
    steps, (row,) = thinned_columns(range(1000), [[0.1] * 999 + [0.9]])
    assert len(steps) == len(row) <= 400
    assert max(row) == 0.9
    assert math.isnan(thinned_columns(range(801), [[math.nan] * 801])[1][0][0])
