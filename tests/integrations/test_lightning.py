"""What only Lightning has: loggers, callbacks that decide by our numbers, the command line."""

from __future__ import annotations

import csv
import sys
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger

from hdi_callback import HDICallback, HDITrainerCallback, MisconfigurationError, StopTraining
from tests.integrations.runs import STEPS, Training, batches


def fit(folder: Path, *callbacks: Any, logger: Any = False, **how: Any) -> Training:
    return Training(folder, None, callbacks=list(callbacks), logger=logger, **how).fit("lightning")


def test_early_stopping_decides_by_our_curve(tmp_path: Path) -> None:
    callback = HDICallback(every_n_steps=2)
    stopping = EarlyStopping(monitor="hdi/min", stopping_threshold=-1.0, mode="max", check_on_train_epoch_end=True)
    run = fit(tmp_path, callback, stopping, steps=40)
    assert len(run.losses) == 16, "an epoch"
    assert stopping.stopped_epoch == 0


def test_a_checkpoint_is_chosen_by_our_curve(tmp_path: Path) -> None:
    chosen = ModelCheckpoint(tmp_path, monitor="hdi/min", mode="max", every_n_train_steps=4)
    trainer_metrics: dict[str, Any] = {}

    class Look(L.Callback):
        def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
            trainer_metrics.update(trainer.callback_metrics)

    fit(tmp_path, HDICallback(every_n_steps=2), chosen, Look(), options={"enable_checkpointing": True})
    assert chosen.best_model_score is not None
    assert 0 < chosen.best_model_score <= 1
    assert {"hdi/mean", "hdi/min", "hdi/closest_pair", "hdi/alerts", "hdi/per_layer/hdi/net.blocks.0.attn"} <= set(
        trainer_metrics
    )


def test_every_reading_reaches_every_logger_at_its_own_step(tmp_path: Path) -> None:
    class Own(Logger):
        name, version = "own", 0  # type: ignore[assignment]

        def __init__(self) -> None:
            super().__init__()
            self.rows: list[tuple[int | None, dict[str, float]]] = []

        def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
            pass

        def log_metrics(self, metrics: Any, step: int | None = None) -> None:
            self.rows.append((step, dict(metrics)))

    own, files = Own(), CSVLogger(tmp_path)
    fit(tmp_path, HDICallback(every_n_steps=3), logger=[files, own])
    assert [step for step, row in own.rows if "hdi/min" in row] == [0, 3, 6, 9, STEPS]
    with open(Path(files.log_dir) / "metrics.csv") as file:
        assert [int(row["step"]) for row in csv.DictReader(file) if row["hdi/min"]] == [0, 3, 6, 9, STEPS]
    assert (Path(files.log_dir) / "hdi" / "history.jsonl").is_file()


def test_tensorboard_gets_the_curves(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logger = TensorBoardLogger(tmp_path)
    fit(tmp_path, HDICallback(every_n_steps=5, metrics=["circuit_qk_norm"]), logger=logger)
    events = EventAccumulator(logger.log_dir).Reload()
    tags = events.Tags()["scalars"]
    assert [one.step for one in events.Scalars("hdi/min")] == [0, 5, STEPS]
    assert "hdi/per_layer/circuit_qk_norm/net.blocks.0.attn" in tags
    assert all(tag.startswith("hdi/") for tag in tags if "hdi" in tag)
    assert (Path(logger.log_dir) / "hdi" / "history.jsonl").is_file()


def test_a_trainer_refuses_two_callbacks_whose_curves_would_be_mixed_up(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="more than one stateful callback of type `HDICallback`"):
        fit(tmp_path, HDICallback(), HDICallback(include=["*.1.*"]))


def test_a_fast_development_run_writes_no_file(tmp_path: Path) -> None:
    callback = HDICallback()
    fit(tmp_path, callback, options={"fast_dev_run": 3})
    assert callback.history_path is None
    assert not list(tmp_path.rglob("*.jsonl"))


def test_evaluation_is_not_counted(tmp_path: Path) -> None:
    """Neither the check before training nor the validation within it is read."""
    seen: list[int] = []

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Training(tmp_path).model

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.net(*batch)["loss"]

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            seen.append(self.trainer.global_step)
            self.net(*batch)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    callback = HDICallback(every_n_steps=4)
    trainer = L.Trainer(
        max_steps=8, val_check_interval=4, callbacks=[callback], accelerator="cpu", logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, default_root_dir=tmp_path,
    )  # fmt: skip
    trainer.fit(Module(), batches(), batches())
    assert {0, 4, 8} <= set(seen)
    from hdi_callback import load_history

    records = load_history(callback.history_path).records
    assert [record.step for record in records] == [0, 4, 8]
    assert all("head_covariance" in layer.values for record in records[:-1] for layer in record.layers.values())


def test_a_callback_serves_several_trainings(tmp_path: Path) -> None:
    callback = HDICallback(every_n_steps=5)
    for folder in ("one", "two"):
        fit(tmp_path / folder, callback)
        assert callback.history_path == tmp_path / folder / "hdi" / "history.jsonl"


def test_each_callback_refuses_the_trainer_of_the_other(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"takes HDICallback|Expected a parent"):  # Lightning before 2.6 refuses itself
        fit(tmp_path, HDITrainerCallback())
    transformers = pytest.importorskip("transformers")
    arguments = transformers.TrainingArguments(output_dir=str(tmp_path), report_to=[], use_cpu=True)
    with pytest.raises(MisconfigurationError, match="takes HDITrainerCallback"):
        transformers.Trainer(torch.nn.Linear(2, 2), arguments, callbacks=[HDICallback()])


CONFIG = """
trainer:
  accelerator: cpu
  max_steps: 4
  logger: false
  enable_checkpointing: false
  enable_progress_bar: false
  enable_model_summary: false
  callbacks:
    - class_path: hdi_callback.HDICallback
      init_args:
        every_n_steps: 2
        metrics: [circuit_qk_norm]
        include: ["*attn*"]
        padding: 0
        history: {history}
        thresholds: {{"*": {{mean: 0.9, pair: null}}}}
        pretrained: true
        strict: false
        interventions:
          - class_path: hdi_callback.StopTraining
"""


def test_every_argument_can_be_written_in_yaml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("jsonargparse")
    from lightning.pytorch.cli import LightningCLI

    from hdi_callback import load_history

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Training(tmp_path).model

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.net(*batch)["loss"]

        def train_dataloader(self) -> Any:
            return batches()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    config = tmp_path / "config.yaml"
    history = tmp_path / "history.jsonl"
    config.write_text(CONFIG.format(history=history))
    monkeypatch.setattr(sys, "argv", ["train"])
    cli = LightningCLI(Module, args=["fit", "--config", str(config)], save_config_callback=None)
    (callback,) = [one for one in cli.trainer.callbacks if isinstance(one, HDICallback)]
    assert callback._settings.every_n_steps == 2
    assert callback._settings.interventions[0].name == "StopTraining"
    assert callback._settings.thresholds == {"*": {"mean": 0.9, "pair": None}}
    assert [record.step for record in load_history(history).records] == [0, 2, 4]


def test_a_callback_can_be_copied_and_pickled(tmp_path: Path) -> None:
    import copy
    import pickle

    callback = HDICallback(every_n_steps=5, interventions=[StopTraining()])
    assert pickle.loads(pickle.dumps(callback))._settings.every_n_steps == 5
    fit(tmp_path, callback)
    other = copy.deepcopy(callback)
    assert other.monitor is None
    assert other._settings.every_n_steps == 5
