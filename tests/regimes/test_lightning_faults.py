"""What goes wrong around a training under Lightning: one warning for each, a finished run, and all other data there."""

from __future__ import annotations

import errno
import json
import os
import resource
import warnings
from pathlib import Path

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import LearningRateFinder
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger, WandbLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

from hdi_callback import HDICallback, Rule
from hdi_callback.errors import MisconfigurationError
from hdi_callback.monitoring.alerts import Finding
from hdi_callback.monitoring.history import load_history, read_lines, read_records, writer
from hdi_callback.monitoring.interventions import Call, Intervention, SaveCheckpoint, ScaleLearningRate
from tests.models import CLASSES, LIT_LAYERS, WIDTH, Block, LitClassifier, batches
from tests.regimes.trainings import Module, in_a_process, reported, trainer_for
from tests.wandb_files import read_wandb

STEPS = [0, 2, 4, 6, 8]


class Always(Rule):
    """Finds something at every reading, in every layer."""

    name = "always"

    def judge(self, series, active):
        return Finding("as ever", level="warning")


def fit(folder: Path, callback: HDICallback, *others: L.Callback, module: Module | None = None, **options):
    """Train eight steps, and give what the package warned of."""
    trainer = trainer_for(folder, *others, callback, **options)
    with reported() as said:
        trainer.fit(Module() if module is None else module, batches(count=8))
    assert trainer.global_step == 8
    assert {f"hdi/{name}" for name in LIT_LAYERS} < set(trainer.callback_metrics)
    return said


def check_history(callback: HDICallback) -> None:
    lines = [line["step"] for line in read_lines(callback.history_path) if line["kind"] == "reading"]
    assert lines == STEPS, "no gap and no double point"


class At(L.Callback):
    """Does something once, at the end of a batch."""

    def __init__(self, step: int, action) -> None:
        self.step, self.action = step, action

    def on_train_batch_end(self, trainer, *args):
        if trainer.global_step == self.step:
            self.action(trainer)


# --- what comes in the middle of a run


class FindsRateAtEachEpoch(LearningRateFinder):
    """As Lightning's pages have it: `lr_find` restores a checkpoint of the run that goes on."""

    def on_fit_start(self, *args):
        """Not yet."""

    def on_train_epoch_start(self, trainer, module):
        if trainer.current_epoch == 1:
            self.lr_find(trainer, module)


def trained(folder: Path, *callbacks: L.Callback, epochs: int = 1) -> list[torch.Tensor]:
    torch.manual_seed(0)
    module = LitClassifier(dropout=0.1)
    trainer_for(folder, *callbacks, max_epochs=epochs).fit(module, batches(count=8))
    return [*module.parameters()]


def test_a_learning_rate_search_during_a_run_ends_neither_the_run_nor_its_history(tmp_path):
    finders = [
        FindsRateAtEachEpoch(num_training_steps=3, min_lr=1e-5, max_lr=1e-2, attr_name="learning_rate") for _ in "ab"
    ]
    callback = HDICallback(every_n_steps=4)
    with reported() as said:
        watched = trained(tmp_path, finders[0], callback, epochs=2)
    alone = trained(tmp_path / "alone", finders[1], epochs=2)
    assert said == []
    assert all(torch.equal(one, other) for one, other in zip(watched, alone, strict=True))
    assert [record.step for record in read_records(callback.history_path)] == [0, 4, 8, 12, 16]


@pytest.mark.parametrize(
    "hook", ["on_train_batch_start", "on_after_backward", "on_train_batch_end", "on_train_epoch_end"]
)
def test_a_callback_added_during_a_run_reads_from_then_on(tmp_path, hook):
    class Adds(L.Callback):
        """Adds the watch once two steps are made."""

    def add(self, trainer, *args):
        if callback not in trainer.callbacks and trainer.global_step >= 2:
            trainer.callbacks.append(callback)

    setattr(Adds, hook, add)
    callback = HDICallback(every_n_steps=4)
    watched, alone = trained(tmp_path, Adds()), trained(tmp_path / "alone")
    assert all(torch.equal(one, other) for one, other in zip(watched, alone, strict=True))
    steps = [record.step for record in read_records(callback.history_path)]  # the first as it comes
    assert steps[1 if steps[0] < 4 else 0 :] == ([8] if hook == "on_train_epoch_end" else [4, 8])


# --- the history file


def test_a_file_in_place_of_the_folder_of_the_history(tmp_path):
    """As with a folder that cannot be written; the readings are kept until it can."""
    (tmp_path / "hdi").write_text("in the way")
    callback = HDICallback(every_n_steps=2)
    said = fit(tmp_path, callback, At(5, lambda trainer: (tmp_path / "hdi").unlink()))
    assert len(said) == 1
    assert f"writing {callback.history_path} failed (" in said[0]
    check_history(callback)
    assert next(line["kind"] for line in read_lines(callback.history_path)) == "run"


def test_a_disk_that_stays_full_costs_one_warning_and_keeps_lines_in_memory(tmp_path):
    """The device at hand takes nothing."""
    callback = HDICallback(every_n_steps=2, history="/dev/full")
    unwritten: list[int] = []
    logger = CSVLogger(tmp_path)
    said = fit(
        tmp_path, callback, At(8, lambda trainer: unwritten.append(len(callback._history._unwritten))), logger=logger
    )
    assert len(said) == 1
    assert os.strerror(errno.ENOSPC) in said[0]
    assert unwritten == [5], "the start of the run and the readings before its end are kept"


def test_a_disk_that_stays_full_keeps_a_bounded_number_of_lines_in_memory(monkeypatch):
    monkeypatch.setattr(writer, "_MOST_KEPT", 3)
    history = writer.History("/dev/full")
    for step in range(10):
        with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
            history.note("reading", step=step)
    assert [json.loads(line)["step"] for line in history._unwritten] == [7, 8, 9]


def fill_disk_for_a_while(folder: Path) -> None:
    """Train with a limit on the size of files that is reached in the middle of a line, and lifted later."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    sizes: list[int] = []

    def fill(trainer):
        sizes.append(callback.history_path.stat().st_size)
        resource.setrlimit(resource.RLIMIT_FSIZE, (sizes[0] + 100, resource.RLIM_INFINITY))

    def drain(trainer):
        sizes.append(callback.history_path.stat().st_size)
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

    callback = HDICallback(every_n_steps=2, history=str(folder / "history.jsonl"), alerts=[Always()])
    said = fit(folder, callback, At(4, fill), At(7, drain))
    (folder / "told.json").write_text(json.dumps({"said": said, "sizes": sizes}))


@pytest.mark.slow
def test_a_disk_that_is_full_for_a_while_leaves_no_gap_duplicate_or_truncated_line(tmp_path):
    assert in_a_process(fill_disk_for_a_while, tmp_path) == 0
    left = json.loads((tmp_path / "told.json").read_text())
    assert len(left["said"]) == 1
    assert os.strerror(errno.EFBIG) in left["said"][0]
    assert left["sizes"][0] == left["sizes"][1], "the half that had arrived was taken back"
    lines = [json.loads(line) for line in (tmp_path / "history.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["kind"] == "reading"] == STEPS
    assert [(line["step"], line["layer"]) for line in lines if line["kind"] == "alert"] == [(0, n) for n in LIT_LAYERS]


def test_a_history_file_deleted_during_training_is_started_again(tmp_path):
    callback = HDICallback(every_n_steps=2)
    assert fit(tmp_path, callback, At(3, lambda trainer: callback.history_path.unlink())) == []
    assert [record.step for record in read_records(callback.history_path)] == [2, 4, 6, 8], "later readings"


# --- loggers


class Unreachable(Logger):
    """Its connection is lost, if only after Lightning's own setup, which would end the run itself."""

    name = version = "unreachable"
    is_lost = False

    def log_hyperparams(self, *args, **kwargs): ...

    @property
    def experiment(self):
        if self.is_lost:
            raise ConnectionError("no route to host")
        return None

    def log_metrics(self, metrics, step=None):
        if any(tag.startswith("hdi") for tag in metrics):
            raise ConnectionError("no route to host")


class Lose(L.Callback):
    def on_fit_start(self, trainer, module):
        trainer.loggers[0].is_lost = True


def test_an_unreachable_logger_does_not_stop_the_others(tmp_path):
    callback, board = HDICallback(every_n_steps=2), TensorBoardLogger(tmp_path)
    said = fit(tmp_path, callback, Lose(), logger=[Unreachable(), board])
    assert sorted(message.split(" failed ")[0] for message in said) == [
        "laying out the charts of Unreachable",
        "logging to Unreachable",
    ]
    check_history(callback)
    board.experiment.flush()
    assert [event.step for event in EventAccumulator(board.log_dir).Reload().Scalars("hdi/mean")] == STEPS


def test_a_tensorboard_writer_that_was_closed_in_the_middle(tmp_path):
    """Torch opens a second file then, so that nothing is lost."""
    callback, board = HDICallback(every_n_steps=2), TensorBoardLogger(tmp_path)
    assert fit(tmp_path, callback, At(5, lambda trainer: board.experiment.close()), logger=board) == []
    check_history(callback)
    board.experiment.flush()
    files = sorted(Path(board.log_dir).glob("events.*"), key=lambda path: path.stat().st_ctime_ns)
    assert len(files) == 2
    assert [e.step for file in files for e in EventAccumulator(str(file)).Reload().Scalars("hdi/mean")] == STEPS


def test_a_wandb_run_that_was_finished_in_the_middle(tmp_path):
    callback, board = HDICallback(every_n_steps=2, alerts=[Always()]), TensorBoardLogger(tmp_path)
    run = WandbLogger(save_dir=tmp_path, offline=True, project="hdi")
    said = fit(tmp_path, callback, At(5, lambda trainer: run.experiment.finish()), logger=[run, board])
    assert len(said) == 1
    assert "logging to WandbLogger failed (" in said[0]
    check_history(callback)
    rows = [row["trainer/global_step"] for row in read_wandb(tmp_path).history if "hdi/mean" in row]
    assert rows == [0, 2], "what it had got"
    board.experiment.flush()
    assert [event.step for event in EventAccumulator(board.log_dir).Reload().Scalars("hdi/mean")] == STEPS


# --- rules, interventions, functions of the user's


class Breaks(Rule):
    name = "breaks"

    def judge(self, series, active):
        raise ZeroDivisionError("nothing to divide by")


def test_a_rule_that_raises_does_not_stop_the_others(tmp_path):
    callback = HDICallback(every_n_steps=2, alerts=[Breaks(), Always()])
    said = fit(tmp_path, callback)
    assert len(said) == 1
    assert "the alert rule 'breaks' failed (ZeroDivisionError: nothing to divide by)" in said[0]
    check_history(callback)
    assert [alert.layer for alert in callback.active_alerts] == LIT_LAYERS


class BreaksInGradients(Intervention):
    name = "BreaksInGradients"

    def act(self, alert):
        raise ZeroDivisionError("nothing to divide by")

    def before_optimizer_step(self, optimizer):
        raise ZeroDivisionError("nothing to divide by")


def test_interventions_that_raise_do_not_stop_the_others(tmp_path):
    called = []
    broken = [BreaksInGradients(), Call(lambda alert: 1 / 0), SaveCheckpoint()]
    callback = HDICallback(every_n_steps=2, alerts=[Always()], interventions=[*broken, Call(called.append)])

    class Full(L.Callback):
        def on_save_checkpoint(self, *args):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    said = fit(tmp_path, callback, Full())
    assert sorted(message.split(" failed ")[0] for message in said) == [
        f"the intervention {name}" for name in ("BreaksInGradients", "Call", "SaveCheckpoint")
    ]
    check_history(callback)
    assert [alert.layer for alert in called] == LIT_LAYERS
    done = [line["intervention"] for line in read_lines(callback.history_path) if line["kind"] == "intervention"]
    assert done == ["Call", "Call"]


def test_an_exception_that_ends_the_run_is_not_followed_by_interventions(tmp_path):
    """They would wait for the other ranks, which know of no exception."""
    called = []
    callback = HDICallback(every_n_steps=2, alerts=[Always()], interventions=[Call(called.append)])

    class Fails(Module):
        def on_before_optimizer_step(self, optimizer):
            raise RuntimeError("the user's own mistake")

    with pytest.raises(RuntimeError, match="the user's own mistake"):
        trainer_for(tmp_path, callback).fit(Fails(), batches(count=8))
    assert [record.step for record in read_records(callback.history_path)] == [0]
    assert [alert.layer for alert in callback.active_alerts] == LIT_LAYERS
    assert called == []


def test_callback_metrics_survive_failures_of_history_logger_rule_and_function_together(tmp_path):
    """Without a disk, a logger or a working rule the numbers are still where early stopping looks for them."""
    (tmp_path / "hdi").write_text("in the way")
    callback = HDICallback(every_n_steps=2, alerts=[Breaks(), Always()], on_alert=lambda alert: 1 / 0)
    said = fit(tmp_path, callback, Lose(), logger=Unreachable())
    assert len(said) == 5, "the history, the charts, the curves, the rule, the function"


class RefusesProgressBar(Module):
    def log_dict(self, *args, **kwargs):
        raise TypeError("this module logs nothing")


def test_a_progress_bar_that_cannot_be_written_costs_one_warning(tmp_path):
    callback = HDICallback(every_n_steps=2, prog_bar=True)
    said = fit(tmp_path, callback, module=RefusesProgressBar())
    assert len(said) == 1
    assert "writing to the progress bar failed (TypeError: this module logs nothing)" in said[0]
    check_history(callback)


class OddlyNamed(nn.Module):
    """One of its blocks has a name that no text file can hold."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(16, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.parts = nn.ModuleDict({"a\ud800": Block(), "b": Block()})

    def forward(self, tokens):
        x = self.embed(tokens)
        for part in self.parts.values():
            x = part(x)
        return self.head(x.mean(1))


def test_a_lone_surrogate_in_a_name_reaches_every_outlet_as_its_escape(tmp_path, capsys):
    layers = [r"net.parts.a\ud800.attn", "net.parts.b.attn"]
    callback, board = HDICallback(every_n_steps=2, alerts=[Always()]), TensorBoardLogger(tmp_path)
    run = WandbLogger(save_dir=tmp_path, offline=True, project="hdi")
    trainer = trainer_for(tmp_path, callback, logger=[board, run])
    with reported() as said:
        trainer.fit(Module(OddlyNamed()), batches(count=8))
    run.experiment.finish()
    assert said == []
    check_history(callback)
    assert set(load_history(callback.history_path)["layer"]) == set(layers)
    board.experiment.flush()
    events = EventAccumulator(board.log_dir).Reload()
    rows = read_wandb(tmp_path).history
    for name in layers:
        assert [event.step for event in events.Scalars(f"hdi/{name}")] == STEPS
        assert [row["trainer/global_step"] for row in rows if f"hdi/{name}" in row] == STEPS
    assert f"step 0, {layers[0]}: as ever" in capsys.readouterr().out


# --- misuse, reported before the first step


class ForDecoders(Always):
    layers = ("decoder.*",)


@pytest.mark.parametrize(
    ("arguments", "where"),
    [
        ({"thresholds": {"*": {"mean": 0.7}, "decoder.*": {"mean": 0.5}}}, "`thresholds`"),
        ({"alerts": [ForDecoders()]}, "the rule 'always'"),
        ({"interventions": [ScaleLearningRate(0.5, layers=["decoder.*"])]}, "ScaleLearningRate"),
        ({"exclude": ["decoder.*"]}, "exclude"),
    ],
)
def test_a_pattern_of_layers_that_matches_none_is_refused_before_the_first_step(tmp_path, arguments, where):
    trainer = trainer_for(tmp_path, HDICallback(**arguments))
    with pytest.raises(MisconfigurationError, match=rf"(?s)decoder\.\*.*{LIT_LAYERS[0]}") as raised:
        trainer.fit(Module(), batches(count=2))
    assert where in str(raised.value)
    assert trainer.global_step == 0
