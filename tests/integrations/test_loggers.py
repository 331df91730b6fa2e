"""Real loggers, read back from what they wrote."""

from __future__ import annotations

import csv
import json
import re
import zipfile
from collections import OrderedDict
from pathlib import Path

import lightning as L
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger, WandbLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar import layout_pb2
from torch import nn

from hdi_callback import HDICallback, read_alerts
from hdi_callback.dashboards.pictures import Pictures
from hdi_callback.monitoring.history import read_records
from tests.models import LIT_LAYERS, LitClassifier, batches
from tests.skips import NEEDS_AIM, NEEDS_COMET
from tests.wandb_files import read_wandb

DEFAULTS = [
    "hdi", "hdi_alignment", "hdi_energy_alignment", "hdi_worst_pair", "hdi_effective_heads", "head_correlation",
    "head_output_overlap", "head_covariance",
]  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """One training with both loggers."""
    folder = tmp_path_factory.mktemp("run")
    board = TensorBoardLogger(folder)
    wandb_logger = WandbLogger(save_dir=folder, offline=True, project="hdi")
    callback = HDICallback(every_n_steps=4, figures_every=2, thresholds={"*": {"pair": 0.01}})
    trainer = L.Trainer(
        accelerator="cpu", max_epochs=2, logger=[board, wandb_logger], callbacks=[callback], log_every_n_steps=3,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Pictures, "_is_affordable", lambda self, share: True)  # a run of a second draws none
        trainer.fit(LitClassifier(), batches(count=6), batches(count=2))
    wandb_logger.experiment.finish()
    board.experiment.flush()
    return board, folder, callback


def expected(callback) -> dict[str, list[tuple[int, float]]]:
    curves: dict[str, list[tuple[int, float]]] = {}
    for record in read_records(callback.history_path):
        for tag, value in record.scalars(DEFAULTS).items():
            curves.setdefault(tag, []).append((record.step, value))
    return curves


def test_the_event_file_holds_every_tag_at_every_due_step_with_the_values_of_the_history(run):
    board, _, callback = run
    events = EventAccumulator(board.log_dir).Reload()
    curves = expected(callback)
    assert [step for step, _ in curves["hdi/mean"]] == [0, 4, 8, 12]
    assert len(curves) == len(DEFAULTS) * len(LIT_LAYERS) + 5
    for tag, points in curves.items():
        written = [(event.step, event.value) for event in events.Scalars(tag)]
        assert [step for step, _ in written] == [step for step, _ in points], tag
        assert [value for _, value in written] == pytest.approx([value for _, value in points], rel=1e-6), tag


def test_the_run_file_of_wandb_holds_every_tag_at_every_due_step_with_the_values_of_the_history(run):
    _, folder, callback = run
    rows = read_wandb(folder).history
    for tag, points in expected(callback).items():
        written = [(row["trainer/global_step"], row[tag]) for row in rows if tag in row]
        assert [step for step, _ in written] == [step for step, _ in points], tag
        assert [value for _, value in written] == pytest.approx([value for _, value in points], rel=1e-6), tag


def test_the_summary_of_wandb_holds_the_extremes_of_every_layer(run):
    _, folder, callback = run
    summary = read_wandb(folder).summary
    curves = expected(callback)
    tags = [f"{metric}/{name}" for metric in ("hdi", "hdi_worst_pair", "head_correlation") for name in LIT_LAYERS]
    for tag in ["hdi/mean", "hdi/min", *tags]:
        values = [value for _, value in curves[tag]]
        extreme, truth = ("min", min(values)) if tag.startswith("hdi/") else ("max", max(values))
        assert summary[tag][extreme] == pytest.approx(truth, rel=1e-6), tag
        assert summary[tag]["last"] == pytest.approx(values[-1], rel=1e-6), tag


def layout(board) -> dict[str, dict[str, list[str]]]:
    proto = EventAccumulator(board.log_dir).Reload().Tensors("custom_scalars__config__")[0].tensor_proto
    reported = layout_pb2.Layout.FromString(proto.string_val[0])
    return {
        category.title: {chart.title: list(chart.multiline.tag) for chart in category.chart}
        for category in reported.category
    }


def test_tensorboard_gets_one_chart_per_metric_with_all_layers(run):
    board, _, _ = run
    charts = layout(board)["head diversity"]
    assert list(charts) == DEFAULTS
    scalars = EventAccumulator(board.log_dir).Reload().Tags()["scalars"]
    for metric, (pattern, marks) in charts.items():
        assert marks == f"^alert/{metric}/.*"
        matched = [tag for tag in scalars if re.search(pattern, tag)]
        assert {f"{metric}/{name}" for name in LIT_LAYERS} <= set(matched)
        assert all(tag.startswith(f"{metric}/") for tag in matched)


def test_the_tensorboard_page_begins_with_the_charts_over_all_layers(run):
    board, _, callback = run
    events = EventAccumulator(board.log_dir).Reload()
    title, charts = next(iter(layout(board).items()))
    assert title == "head diversity, all layers"
    tags = [
        tag for tag in events.Tags()["scalars"] for pattern in charts[next(iter(charts))] if re.search(pattern, tag)
    ]
    reported = {alert.layer for alert in read_alerts(callback.history_path) if alert.level != "notice"}
    assert reported
    marks = {f"alert/worst_alignment/{name}" for name in reported}
    tags = [tag.split("/step ")[0] for tag in tags]
    assert set(tags) == {"attention_heads/worst_alignment", "scale/chance", "scale/same head", *marks}
    worst = [
        (record.step, max(layer.values["hdi_worst_alignment"] for layer in record.layers.values()))
        for record in read_records(callback.history_path)
    ]
    written = [(event.step, event.value) for event in events.Scalars("attention_heads/worst_alignment")]
    assert written == [(step, pytest.approx(value, rel=1e-6)) for step, value in worst]
    assert {event.value for event in events.Scalars("scale/same head")} == {1.0}
    assert events.Scalars("attention_heads/alerts")[0].value == 0
    assert {event.value for event in events.Scalars("scale/one alert")} == {1.0}
    assert re.search(charts["active alerts"][1], "scale/one alert")


def test_every_alert_mark_is_one_point_on_its_curve(run):
    board, _, _ = run
    events = EventAccumulator(board.log_dir).Reload()
    marks = [tag for tag in events.Tags()["scalars"] if tag.startswith("alert/") and "worst_alignment/" not in tag]
    assert marks
    for tag in marks:
        (mark,) = events.Scalars(tag)
        curve = {event.step: event.value for event in events.Scalars(tag.removeprefix("alert/").split("/step ")[0])}
        assert curve[mark.step] == mark.value


def test_tensorboard_and_wandb_get_the_pictures_of_the_same_steps(run):
    board, folder, _ = run
    events = EventAccumulator(board.log_dir).Reload()
    for tag in ("attention_heads/layers", "attention_heads/heads"):
        images = events.Images(tag)
        assert [image.step for image in images] == [0, 4, 8, 12]
        assert all(image.encoded_image_string.startswith(b"\x89PNG") for image in images)
        rows = [row for row in read_wandb(folder).history if f"{tag}.filenames" in row]
        assert [row["trainer/global_step"] for row in rows] == [0, 4, 8, 12]
        for row in rows:
            (name,) = row[f"{tag}.filenames"]
            assert len(list(folder.rglob(name.split("/")[-1]))) == 1


def test_wandb_gets_a_table_of_the_alerts_and_one_of_the_layers(run):
    _, folder, callback = run
    rows = read_wandb(folder).history
    tables = {}
    for name in ("alert_table", "layer_table"):
        tag = f"attention_heads/{name}.path"
        last = [row[tag] for row in rows if tag in row][-1]
        (path,) = folder.rglob(last.split("/")[-1])
        tables[name] = json.loads(path.read_text())
    alerts = read_alerts(callback.history_path)
    reported = [dict(zip(tables["alert_table"]["columns"], row)) for row in tables["alert_table"]["data"]]
    assert [(row["step"], row["layer"], row["rule"], row["message"]) for row in reported] == [
        (alert.step, alert.layer, alert.rule, alert.message) for alert in alerts
    ]
    layers = [dict(zip(tables["layer_table"]["columns"], row)) for row in tables["layer_table"]["data"]]
    record = read_records(callback.history_path)[-1]
    assert [row["layer"] for row in layers] == LIT_LAYERS
    for row in layers:
        assert row["step"] == record.step
        assert row["hdi"] == pytest.approx(record.layers[row["layer"]].values["hdi"], rel=1e-6)


def test_the_summary_of_wandb_has_the_highest_alignment_of_all_layers(run):
    _, folder, callback = run
    worst = [
        max(layer.values["hdi_worst_alignment"] for layer in record.layers.values())
        for record in read_records(callback.history_path)
    ]
    assert read_wandb(folder).summary["attention_heads/worst_alignment"]["max"] == pytest.approx(max(worst), rel=1e-6)


@pytest.mark.slow
def test_a_tensorboard_logger_shows_each_reading_once_after_a_resumption_with_purge_step(tmp_path):
    options = {
        "accelerator": "cpu", "enable_progress_bar": False, "enable_model_summary": False, "log_every_n_steps": 1,
    }  # fmt: skip
    saving = ModelCheckpoint(tmp_path / "kept", every_n_train_steps=4, save_top_k=-1)
    first = TensorBoardLogger(tmp_path, version=0)
    before = [HDICallback(every_n_steps=3), saving]
    L.Trainer(max_epochs=2, logger=first, callbacks=before, **options).fit(LitClassifier(), batches(count=5))
    (path,) = (tmp_path / "kept").glob("*step=4*")
    board = TensorBoardLogger(tmp_path, version=0, purge_step=5)
    callback = HDICallback(every_n_steps=3)
    again = L.Trainer(max_epochs=4, logger=board, callbacks=[callback], enable_checkpointing=False, **options)
    again.fit(LitClassifier(), batches(count=5), ckpt_path=path)
    board.experiment.flush()
    events = EventAccumulator(board.log_dir).Reload()
    for tag, points in expected(callback).items():
        written = [(event.step, event.value) for event in events.Scalars(tag)]
        assert written == [(step, pytest.approx(value, rel=1e-5)) for step, value in points], tag


@pytest.mark.slow
def test_loggers_hold_the_history_for_odd_names_of_layers_and_runs(tmp_path):
    model = LitClassifier()
    blocks = model.net.blocks
    model.net.blocks = nn.Sequential(OrderedDict(zip(["слой/1", "x*y[0] 🤖#b"], blocks)))
    board = TensorBoardLogger(tmp_path, name="größe/模型", version="v 🤖")
    table, run = CSVLogger(tmp_path, name="csv"), WandbLogger(save_dir=tmp_path, offline=True, name="ein/Lauf 🤖")
    callback = HDICallback(every_n_steps=3)
    trainer = L.Trainer(
        accelerator="cpu", max_epochs=2, logger=[board, run, table], callbacks=[callback], log_every_n_steps=7,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(model, batches(count=5))
    run.experiment.finish()
    board.experiment.flush()
    events = EventAccumulator(board.log_dir).Reload()
    rows = read_wandb(tmp_path).history
    cells = list(csv.DictReader((Path(table.log_dir) / "metrics.csv").open()))
    curves = expected(callback)
    assert "hdi/net.blocks.слой/1.attn" in curves
    for tag, points in curves.items():
        truth = [(step, pytest.approx(value, rel=1e-5, abs=1e-9)) for step, value in points]
        assert [(event.step, event.value) for event in events.Scalars(tag)] == truth, tag
        assert [(row["trainer/global_step"], row[tag]) for row in rows if tag in row] == truth, tag
        assert [(int(row["step"]), float(row[tag])) for row in cells if row[tag]] == truth, tag


@pytest.mark.slow
def test_csv_and_mlflow_get_the_curves_and_mlflow_the_alerts_and_pictures(tmp_path, monkeypatch):
    from lightning.pytorch.loggers import MLFlowLogger
    from mlflow.tracking import MlflowClient

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setattr(Pictures, "_is_affordable", lambda self, share: True)
    table = CSVLogger(tmp_path / "csv")
    mlflow = MLFlowLogger("heads", tracking_uri=f"file:{tmp_path / 'mlruns'}")
    callback = HDICallback(every_n_steps=4, thresholds={"*": {"pair": 0.01}}, history=str(tmp_path / "h.jsonl"))
    L.Trainer(
        accelerator="cpu", max_epochs=1, logger=[table, mlflow], callbacks=[callback], enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    ).fit(LitClassifier(), batches(count=6))  # fmt: skip
    client = MlflowClient(f"file:{tmp_path / 'mlruns'}")
    (found,) = client.search_runs([mlflow.experiment_id])
    for tag in ("hdi/min", f"hdi/{LIT_LAYERS[0]}", "attention_heads/worst_alignment"):
        curve = [(metric.step, metric.value) for metric in client.get_metric_history(found.info.run_id, tag)]
        assert [step for step, _ in curve] == [0, 4, 6], tag
        with (tmp_path / "csv" / "lightning_logs" / "version_0" / "metrics.csv").open() as file:
            rows = [(int(row["step"]), float(row[tag])) for row in csv.DictReader(file) if row[tag]]
        assert rows == [(step, pytest.approx(value, rel=1e-6)) for step, value in curve]
    names = {artifact.path for artifact in client.list_artifacts(found.info.run_id, "attention_heads")}
    assert {f"attention_heads/{name}_step_0.png" for name in ("layers", "heads")} <= names
    text = Path(client.download_artifacts(found.info.run_id, "attention_heads/alerts.txt")).read_text()
    assert [line.split(": ", 1)[1] for line in text.splitlines()] == [
        alert.message for alert in read_alerts(callback.history_path)
    ]


def train_with(logger, folder: Path, monkeypatch) -> HDICallback:
    monkeypatch.setattr(Pictures, "_is_affordable", lambda self, share: True)
    callback = HDICallback(every_n_steps=4, thresholds={"*": {"pair": 0.01}}, history=str(folder / "h.jsonl"))
    L.Trainer(
        accelerator="cpu", max_epochs=1, logger=logger, callbacks=[callback], enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    ).fit(LitClassifier(), batches(count=6))  # fmt: skip
    return callback


def test_comet_gets_the_curves_the_alerts_and_the_pictures(tmp_path, monkeypatch):
    # `CometLogger(online=False)` of Lightning 2.6 switches Comet off; this is an offline experiment.
    monkeypatch.setenv("COMET_START_ONLINE", "false")
    pytest.importorskip("comet_ml", reason=NEEDS_COMET)
    from lightning.pytorch.loggers import CometLogger

    logger = CometLogger(project="heads", offline_directory=str(tmp_path))
    callback = train_with(logger, tmp_path, monkeypatch)
    logger.experiment.end()
    (path,) = tmp_path.glob("*.zip")
    curves: dict[str, list[tuple[int, float]]] = {}
    texts: dict[int, str] = {}
    pictures: dict[str, list[int]] = {}
    with zipfile.ZipFile(path) as written:
        for line in written.read("messages.json").decode().splitlines():
            message = json.loads(line)
            payload = message["payload"]
            if message["type"] == "metric_msg":
                metric = payload["metric"]
                curves.setdefault(metric["metricName"], []).append((metric["step"], metric["metricValue"]))
            reported = payload.get("additional_params") or {}
            if reported.get("type") == "text-sample":
                texts[reported["step"]] = written.read(payload["file_path"]).decode()
            elif payload.get("upload_type") == "visualization":
                pictures.setdefault(reported["figName"], []).append(reported["step"])
                assert written.read(payload["file_path"]).startswith(b"\x89PNG")
    check_curves(curves, callback)
    check_alerts(texts, callback)
    assert pictures == {f"attention_heads/{name}": [0, 4, 6] for name in ("layers", "heads")}


def test_aim_gets_the_curves_the_alerts_and_the_pictures(tmp_path, monkeypatch):
    pytest.importorskip("aim", reason=NEEDS_AIM)
    from aim.pytorch_lightning import AimLogger

    options = {"system_tracking_interval": None, "log_system_params": False, "capture_terminal_logs": False}
    logger = AimLogger(repo=str(tmp_path), experiment="heads", **options)
    callback = train_with(logger, tmp_path, monkeypatch)
    logger.finalize("success")
    run = logger.experiment  # opened again, from the disk
    curves = {}
    for name, context, _ in run.iter_metrics_info():
        rows = run.get_metric(name, context).dataframe()
        curves[name] = [(int(step), value) for step, value in zip(rows["step"], rows["value"])]
    check_curves(curves, callback)
    kept = run.collect_sequence_info(("texts", "images"))
    assert {image["name"] for image in kept["images"]} == {"attention_heads/layers", "attention_heads/heads"}
    texts = run.get_text_sequence("attention_heads/alert_text", context).data
    check_alerts({step: text.data for step, (text,) in texts.view("val").items()}, callback)
    run.close()


def check_curves(curves: dict[str, list[tuple[int, float]]], callback: HDICallback) -> None:
    wanted = expected(callback)
    assert [step for step, _ in wanted["hdi/min"]] == [0, 4, 6]
    for tag, points in wanted.items():
        assert curves[tag] == [(step, pytest.approx(value, rel=1e-6)) for step, value in points], tag


def check_alerts(texts: dict[int, str], callback: HDICallback) -> None:
    reported: dict[int, list[str]] = {}
    for alert in read_alerts(callback.history_path):
        reported.setdefault(alert.step, []).append(alert.message)
    assert reported
    assert {step: [line.split(": ", 1)[1] for line in text.splitlines()] for step, text in texts.items()} == reported


def test_the_history_is_plain_json_lines(run):
    _, _, callback = run
    lines = [json.loads(line) for line in callback.history_path.read_text().splitlines()]
    kinds = [line["kind"] for line in lines if line["kind"] != "alert"]
    assert kinds == ["run", "reading", "reading", "reading", "reading"]
