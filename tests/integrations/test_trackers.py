"""Curves go where the trainer's go, and a run that gets none is named."""

from __future__ import annotations

import math
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from hdi_callback import MonitoringWarning, watch_heads
from tests.dashboards.wandb_files import read_wandb
from tests.integrations.runs import Classifier, dataset

transformers = pytest.importorskip("transformers")
STEPS_READ = [0, 4, 8, 10]


def train(folder: Path, report_to: list[str], *callbacks: Any, **watch: Any) -> None:
    from hdi_callback import HDITrainerCallback

    torch.manual_seed(0)
    tokens, labels = dataset().tensors
    arguments = transformers.TrainingArguments(
        output_dir=str(folder), max_steps=10, per_device_train_batch_size=4, use_cpu=True, report_to=report_to,
        logging_steps=5, save_strategy="no", disable_tqdm=True, remove_unused_columns=False,
    )  # fmt: skip
    rows = [{"tokens": token, "labels": label} for token, label in zip(tokens, labels)]
    watcher = HDITrainerCallback(every_n_steps=4, **watch)
    transformers.Trainer(Classifier(), arguments, train_dataset=rows, callbacks=[watcher, *callbacks]).train()
    assert watcher.latest["hdi/alerts"] == 0


def test_curves_are_in_the_tensorboard_run_of_the_trainer_up_to_the_last_reading(tmp_path: Path) -> None:
    train(tmp_path, ["tensorboard"])
    (folder,) = {file.parent for file in tmp_path.rglob("events.*")}
    events = EventAccumulator(str(folder)).Reload()
    assert [point.step for point in events.Scalars("train/loss")] == [5, 10]
    assert [point.step for point in events.Scalars("hdi/min")] == STEPS_READ


def test_a_writer_that_the_user_gave_the_trainer_is_taken(tmp_path: Path) -> None:
    from torch.utils.tensorboard import SummaryWriter
    from transformers.integrations import TensorBoardCallback

    train(tmp_path / "run", [], TensorBoardCallback(SummaryWriter(str(tmp_path / "own"))))
    events = EventAccumulator(str(tmp_path / "own")).Reload()
    assert [point.step for point in events.Scalars("hdi/min")] == STEPS_READ
    assert not list((tmp_path / "run").rglob("events.*"))


def test_the_wandb_run_of_the_trainer_gets_every_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import wandb

    for name, value in {"WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path), "WANDB_SILENT": "true"}.items():
        monkeypatch.setenv(name, value)
    train(tmp_path / "run", ["wandb"])
    wandb.finish()
    rows = read_wandb(tmp_path).history
    assert [row["hdi/step"] for row in rows if "hdi/min" in row] == STEPS_READ


def test_a_run_that_gets_no_curves_is_named_with_what_to_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if "kubeflow" not in transformers.integrations.integration_utils.INTEGRATION_TO_CALLBACK:
        pytest.skip(f"transformers {transformers.__version__} does not report to kubeflow")
    monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_URL", "https://127.0.0.1:9")
    with pytest.warns(MonitoringWarning, match=r"kubeflow gets no curves of heads: write HDITrainerCallback\(log="):
        train(tmp_path, ["kubeflow"])


def test_what_has_log_metrics_takes_the_curves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As MLflow and Comet have it, whose packages are not installed here: their second arguments differ."""
    rows: list[tuple[int, float]] = []

    class Run:
        def log_metrics(self, values: dict[str, float], prefix: Any = None, step: int | None = None) -> None:
            assert prefix is None
            rows.append((step or 0, values["hdi/min"]))

    class Reports(transformers.TrainerCallback):
        def __init__(self) -> None:
            self._experiment = Run()

        def on_log(self, *args: Any, **kwargs: Any) -> None:
            pass

    reporters = transformers.integrations.integration_utils.INTEGRATION_TO_CALLBACK
    monkeypatch.setitem(reporters, "comet_ml", Reports)
    train(tmp_path, [], Reports())
    assert [step for step, _ in rows] == STEPS_READ


@pytest.mark.parametrize("name", ["trackio", "swanlab"])
def test_what_logs_by_a_package_takes_the_curves_with_the_step(name: str, tmp_path: Path, monkeypatch: Any) -> None:
    """Packages that are not installed here: their callbacks hold the package, whose `log` takes a dictionary."""
    rows: list[dict[str, float]] = []
    package = ModuleType(name)
    package.log = rows.append  # type: ignore[attr-defined]

    class Reports(transformers.TrainerCallback):
        def __init__(self) -> None:
            self._package = package

        def on_log(self, *args: Any, **kwargs: Any) -> None:
            pass

    reporters = transformers.integrations.integration_utils.INTEGRATION_TO_CALLBACK
    monkeypatch.setitem(reporters, name, Reports)
    train(tmp_path, [], Reports())
    assert [row["train/global_step"] for row in rows] == STEPS_READ
    assert all(0 <= row["hdi/min"] <= 1 for row in rows)


def test_a_function_takes_the_curves_of_a_trainer(tmp_path: Path) -> None:
    rows: list[tuple[int, float]] = []
    train(tmp_path, [], log=lambda values, step: rows.append((step, values["hdi/min"])))
    assert [step for step, _ in rows] == STEPS_READ


def loop(model: Any, optimizer: Any, backward: Any, folder: Path, **watch: Any) -> None:
    tokens, labels = dataset().tensors
    with watch_heads(model, optimizer, every_n_steps=4, log_dir=folder, **watch) as heads:
        for step in range(10):
            with heads.step():
                backward(model(tokens[step : step + 4], labels=labels[step : step + 4])["loss"])
                optimizer.step()
            optimizer.zero_grad()


def test_the_trackers_of_accelerate_take_the_curves_as_they_are(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True, log_with="tensorboard", project_dir=str(tmp_path))
    accelerator.init_trackers("run")
    model = Classifier()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    loop(model, optimizer, accelerator.backward, tmp_path, log=accelerator.log)
    accelerator.end_training()
    events = EventAccumulator(str(tmp_path / "run")).Reload()
    assert [point.step for point in events.Scalars("hdi/min")] == STEPS_READ


def test_the_loggers_of_fabric_take_the_curves_as_they_are(tmp_path: Path) -> None:
    from lightning.fabric import Fabric
    from lightning.fabric.loggers import TensorBoardLogger

    logger = TensorBoardLogger(tmp_path, name="run")
    fabric = Fabric(accelerator="cpu", devices=1, loggers=logger)
    model = Classifier()
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters()))
    loop(model, optimizer, fabric.backward, tmp_path, log=fabric.log_dict)
    logger.finalize("success")
    events = EventAccumulator(logger.log_dir).Reload()
    assert [point.step for point in events.Scalars("hdi/min")] == STEPS_READ


@pytest.mark.parametrize(("accumulation", "logging_steps"), [(1, 1), (2, 3), (3, 100)])
def test_readings_have_the_loss_of_all_forwards_of_their_step(tmp_path: Path, accumulation, logging_steps) -> None:
    from hdi_callback import HDITrainerCallback, load_history

    losses: list[float] = []

    class Trainer(transformers.Trainer):
        def training_step(self, *args, **kwargs):
            loss = super().training_step(*args, **kwargs) * (math.nan if len(losses) == 6 * accumulation else 1)
            losses.append(float(loss))
            return loss

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=20, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=4
    )
    rows = [{"input_ids": tokens, "labels": tokens} for tokens in torch.randint(20, (96, 8))]
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), max_steps=8, per_device_train_batch_size=4, use_cpu=True, report_to=[],
        logging_steps=logging_steps, save_strategy="no", disable_tqdm=True, gradient_accumulation_steps=accumulation,
    )  # fmt: skip
    watcher = HDITrainerCallback(every_n_steps=2)
    model = transformers.LlamaForCausalLM(config)
    Trainer(model, arguments, train_dataset=rows, callbacks=[watcher]).train()
    (history,) = tmp_path.rglob("history.jsonl")
    *records, last = load_history(history).records
    assert [record.step for record in records] == [0, 2, 4, 6]
    for record in records[:3]:
        parts = losses[record.step * accumulation : (record.step + 1) * accumulation]
        assert record.loss == pytest.approx(sum(parts), rel=1e-4)
    assert (records[3].loss is None) == (accumulation == 1), (
        "which was no number, and a last part that was one hides it"
    )
    assert last.loss is None
