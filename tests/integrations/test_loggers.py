"""Real loggers, read back from what they wrote."""

from __future__ import annotations

import json

import lightning as L
import pytest
from lightning.pytorch.loggers import TensorBoardLogger, WandbLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar import layout_pb2

from hdi_callback import HDICallback
from hdi_callback.monitoring.history import read_records
from tests.models import LIT_LAYERS, LitClassifier, batches
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
    callback = HDICallback(every_n_steps=4)
    trainer = L.Trainer(
        accelerator="cpu", max_epochs=2, logger=[board, wandb_logger], callbacks=[callback], log_every_n_steps=3,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
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


def test_tensorboard_gets_one_chart_per_metric_with_all_layers(run):
    board, _, _ = run
    events = EventAccumulator(board.log_dir).Reload()
    proto = events.Tensors("custom_scalars__config__")[0].tensor_proto
    layout = layout_pb2.Layout.FromString(proto.string_val[0])
    (category,) = layout.category
    assert [chart.title for chart in category.chart] == DEFAULTS
    import re

    for chart in category.chart:
        pattern, marks = chart.multiline.tag
        assert marks == f"^alert/{chart.title}/.*"
        matched = [tag for tag in events.Tags()["scalars"] if re.search(pattern, tag)]
        assert {f"{chart.title}/{name}" for name in LIT_LAYERS} <= set(matched)
        assert all(tag.startswith(f"{chart.title}/") for tag in matched)


def test_the_history_is_plain_json_lines(run):
    _, _, callback = run
    lines = [json.loads(line) for line in callback.history_path.read_text().splitlines()]
    assert [line["kind"] for line in lines] == ["run", "reading", "reading", "reading", "reading"]
