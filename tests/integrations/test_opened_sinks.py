"""The sinks that the callbacks of all trainers open for a run."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from hdi_callback.dashboards.console import AlertLines
from hdi_callback.dashboards.pictures import Picture, Pictures
from hdi_callback.dashboards.wandb import Extremes
from hdi_callback.errors import MonitoringWarning
from hdi_callback.integrations.outlets import Dashboards
from hdi_callback.monitoring.history import History
from hdi_callback.monitoring.readings import LayerRecord, Record
from hdi_callback.monitoring.session.settings import Settings
from hdi_callback.monitoring.session.sink import OnAlert, Result
from hdi_callback.monitoring.warn_once import WarnOnce


def dashboards(**settings) -> Dashboards:
    return Dashboards(Settings(**settings), WarnOnce())


def sinks(opened: Dashboards, history: Path | None = None, said: list[str] | None = None, **options) -> list:
    lines: list[str] = [] if said is None else said
    kept = None if history is None else History(history)
    return opened.sinks(kept, lines.append, "the loggers", **{"is_resumed": False, **options})


def reading(step: int, value: float = 0.5) -> Result:
    return Result(Record(step, {"a": LayerRecord({"hdi": value})}, axis=step))


def curve(folder: Path, tag: str) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in EventAccumulator(str(folder)).Reload().Scalars(tag)]


def test_a_logger_whose_charts_fail_still_gets_curves_and_pictures():
    def refuse(layout):
        raise ValueError("no charts")

    rows, images = [], []
    board = SimpleNamespace(
        add_custom_scalars=refuse, add_image=lambda tag, *rest, **options: images.append(tag),
        add_scalar=lambda *args: None, add_text=lambda *args: None,
    )  # fmt: skip
    logger = SimpleNamespace(experiment=board, log_metrics=lambda metrics, step: rows.append((step, metrics)))
    opened = dashboards()
    with pytest.warns(MonitoringWarning, match="laying out the charts of SimpleNamespace failed"):
        opened.loggers([logger], "run/", ["a"])
    first, drawing, *_ = sinks(opened)
    assert isinstance(drawing, Pictures)
    first.write(reading(4))
    assert [(step, metrics["run/hdi/a"]) for step, metrics in rows] == [(4, 0.5)]
    drawing._outlets[0](Picture("layers", np.zeros((2, 2, 3), np.uint8), 4, 4))
    assert images == ["run/attention_heads/layers"]


def test_extremes_are_defined_for_every_name_that_wandb_takes():
    defined = []
    Extremes(SimpleNamespace(define_metric=lambda name, **options: defined.append(name)), ["hdi"]).define(
        ["x*y", "b.0"]
    )
    assert r"hdi/b\.0" in defined
    assert not any("*" in name for name in defined)


def test_a_board_that_was_opened_is_closed_and_one_of_the_user_is_not(tmp_path):
    closed = []
    theirs = SimpleNamespace(close=lambda: closed.append("theirs"), add_custom_scalars=lambda layout: None)
    opened = dashboards()
    opened.tensorboard(theirs, tmp_path / "unused", None, ["a"])
    assert (opened.folder, len(sinks(opened))) == (None, 2), (
        "one for the writer, which takes no pictures, one for lines"
    )
    opened.close()
    assert closed == []
    opened.tensorboard(True, tmp_path / "board", None, ["a"])
    assert opened.folder == str(tmp_path / "board")
    sinks(opened)[0].write(reading(3, 0.25))
    opened.close()
    assert curve(tmp_path / "board", "hdi/a") == [(3, 0.25)]
    assert len(sinks(opened)) == 1, "nothing is written to after closing"
    opened.close()


def test_a_resumed_board_hides_what_was_written_after_the_checkpoint(tmp_path):
    state = None
    for steps, value in (((0, 2, 4), 0.5), ((4, 6), 0.25)):
        opened = dashboards()
        opened.tensorboard(True, tmp_path / "board", state, ["a"])
        for step in steps:
            sinks(opened)[0].write(reading(step, value))
        opened.close()
        state = {"tensorboard": opened.folder, "last_step": 2}
    assert curve(tmp_path / "board", "hdi/a") == [(0, 0.5), (2, 0.5), (4, 0.25), (6, 0.25)]


@pytest.mark.parametrize(
    ("options", "has_history", "can_draw", "draws"),
    [
        ({}, True, True, True),
        ({}, False, True, False),
        ({"figures_every": 0}, True, True, False),
        ({}, True, False, False),
    ],
)
def test_pictures_are_drawn_if_they_are_asked_for_and_have_a_place(
    tmp_path, monkeypatch, options, has_history, can_draw, draws
):
    monkeypatch.setattr("hdi_callback.integrations.outlets.can_draw", lambda: can_draw)
    found = sinks(dashboards(**options), tmp_path / "history.jsonl" if has_history else None)
    assert [isinstance(sink, Pictures) for sink in found] == [True, False][not draws :]


@pytest.mark.parametrize(("name", "folder"), [("history.jsonl", "figures"), ("history-2.jsonl", "figures-2")])
def test_each_history_has_its_own_folder_of_pictures(tmp_path, name, folder):
    drawing = sinks(dashboards(), tmp_path / name)[0]
    drawing._outlets[0](Picture("layers", np.zeros((2, 2, 3), np.uint8), 4, 4))
    assert [path.parent.name for path in tmp_path.rglob("*.png")] == [folder]


def test_only_a_resumed_run_draws_the_readings_of_its_history(tmp_path):
    path = tmp_path / "history.jsonl"
    assert sinks(dashboards(), path)[0]._before is None
    assert sinks(dashboards(), path, is_resumed=True)[0]._before == path


def test_lines_and_the_function_of_the_user_come_last():
    def called(alert): ...

    lines, function = sinks(dashboards(on_alert=called))
    assert isinstance(lines, AlertLines)
    assert isinstance(function, OnAlert)


def test_the_console_names_the_history_or_else_the_loggers(tmp_path):
    assert sinks(dashboards())[-1]._elsewhere == "the loggers"
    assert str(sinks(dashboards(), tmp_path / "history.jsonl")[-1]._elsewhere) == str(tmp_path / "history.jsonl")
