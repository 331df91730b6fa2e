"""A real offline run of W&B, read back from its file."""

from __future__ import annotations

import pytest

from hdi_callback.dashboards import Wandb
from hdi_callback.dashboards.names import curves
from tests.dashboards.synthetic import collapsing, facts_of
from tests.dashboards.wandb_files import read_wandb

wandb = pytest.importorskip("wandb")
READINGS = 20


@pytest.fixture(scope="module")
def logged(tmp_path_factory):
    """A training that logs its loss with explicit steps at every step, and a reading at every fiftieth."""
    folder = tmp_path_factory.mktemp("wandb")
    run = wandb.init(mode="offline", dir=folder, project="test", settings=wandb.Settings(silent=True))
    sink = Wandb(run, facts_of(12, 12))
    for record in collapsing(12, 12, READINGS, layer=7, pair=(1, 3)):
        for step in range(record.step, record.step + 50):
            run.log({"loss": 1.0}, step=step)
            if step == record.step:
                sink.write(record)
    sink.close()
    run.finish()
    wandb.teardown()
    return read_wandb(folder)


def test_every_reading_is_in_the_file_at_its_step_and_no_row_of_the_training_is_lost(logged):
    records = list(collapsing(12, 12, READINGS, layer=7, pair=(1, 3)))
    rows = [row for row in logged.history if "hdi/step" in row]
    assert [row["hdi/step"] for row in rows] == [record.step for record in records]
    assert [row["hdi/closest_pair"] for row in rows] == pytest.approx(
        [curves(record)["hdi/closest_pair"] for record in records]
    )
    assert [row["_step"] for row in logged.history if "loss" in row] == list(range(50 * READINGS))


def test_readings_that_come_faster_than_the_rows_of_the_training_are_all_there(tmp_path):
    run = wandb.init(mode="offline", dir=tmp_path, project="test", settings=wandb.Settings(silent=True))
    sink = Wandb(run, facts_of(2, 4))
    records = list(collapsing(2, 4, 5, layer=1, pair=(1, 3), every=1))
    for record in records:
        sink.write(record)
    sink.close()
    run.finish()
    wandb.teardown()
    assert [row["hdi/step"] for row in read_wandb(tmp_path).history if "hdi/step" in row] == [0, 1, 2, 3, 4]


def test_the_summary_has_minimum_maximum_and_last_also_of_names_with_dots(logged):
    values = [curves(record) for record in collapsing(12, 12, READINGS, layer=7, pair=(1, 3))]
    for tag in ("hdi/min", "hdi/per_layer/worst_alignment/model.layers.7.self_attn"):
        of_tag = [point[tag] for point in values]
        assert logged.summary[tag] == pytest.approx({"min": min(of_tag), "max": max(of_tag), "last": of_tag[-1]})


def test_all_that_a_person_sees_is_one_panel_group(logged):
    shown = {key.split(".")[0] for row in logged.history for key in row if not key.startswith("_")} - {"loss"}
    assert {key.split("/")[0] for key in shown} == {"hdi"}
    step = next(metric for metric in logged.metrics if metric["name"] == "hdi/step")
    assert step["options"]["hidden"], "the axis is no chart"
    assert len({key for key in logged.summary if isinstance(logged.summary[key], dict)}) == 42


def test_one_event_is_one_alert_with_what_explains_it_and_what_to_do(logged):
    (alert,) = logged.alerts
    assert alert["title"] == "Attention heads: worst pair in model.layers.7.self_attn"
    assert alert["text"].startswith("step 700 (hdi explain worst pair): heads 1 and 3 of model.layers.7.self_attn are")
    assert "ReviveHeads()" in alert["text"]
    assert {"hdi/map._type", "hdi/heads._type"} <= set(logged.summary)
