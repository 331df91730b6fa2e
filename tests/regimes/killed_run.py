"""A training that can be ended at a chosen moment, in a process of its own, and resumed from its last checkpoint."""

from __future__ import annotations

import os
import signal
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger
from torch.nn import functional as F

from hdi_callback import HDICallback, interventions
from hdi_callback.monitoring.history import writer
from hdi_callback.monitoring.monitor import HeadDiversityMonitor
from tests.integrations.test_alerts_in_lightning import Collapse
from tests.models import CLASSES, LENGTH, batches
from tests.regimes.trainings import Module, trainer_for

STEPS = 24
LIMITS = {"*": {"mean": 0.3}}
Moment = tuple[str, int] | None
"""What is going on when the run ends, and at which optimizer step."""


class ByStep(Module):
    """Its data follow from the optimizer step, as Lightning does not resume in the middle of a plain loader."""

    def training_step(self, batch, batch_idx):
        tokens = torch.randint(16, (4, LENGTH), generator=torch.Generator().manual_seed(self.trainer.global_step))
        loss = F.cross_entropy(self.net(tokens), tokens.sum(1) % CLASSES)
        self.log("train_loss", loss)
        return loss


class EndBetween(L.Callback):
    """Ends the run at the start of a batch; keeps the logger's file up to date until then."""

    def __init__(self, moment: Moment) -> None:
        self.moment = moment

    def on_train_batch_start(self, trainer, *args):
        if self.moment == ("killed", trainer.global_step):
            kill()
        if self.moment == ("interrupted", trainer.global_step):
            raise KeyboardInterrupt
        if self.moment == ("terminated", trainer.global_step):
            os.kill(os.getpid(), signal.SIGTERM)

    def on_train_batch_end(self, trainer, *args):
        trainer.logger.experiment.flush()


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def end_in(moment: Moment) -> Any:
    """Patch what is to be interrupted in the middle."""
    what, step = moment or ("nothing", -1)
    if what == "measuring":
        measure = HeadDiversityMonitor.measure

        def measures(monitor, at, **options):
            reading = measure(monitor, at, **options)
            if at == step:
                kill()
            return reading

        return mock.patch.object(HeadDiversityMonitor, "measure", measures)
    kind = what.removeprefix("writing ")
    write = writer.write_all

    def writes(file, data):
        if f'"kind":"{kind}","step":{step},'.encode() in data:
            file.write(data[: len(data) // 2])
            kill()
        write(file, data)

    return mock.patch.object(writer, "write_all", writes)


def run(folder: Path, moment: Moment, accumulate: int) -> None:
    """Train from the last checkpoint in the folder, until the moment or to the end."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    kept = sorted((folder / "kept").glob("*.ckpt"), key=lambda path: path.stat().st_mtime_ns)
    callback = HDICallback(
        every_n_steps=2,
        thresholds=LIMITS,
        interventions=[
            interventions.ScaleLearningRate(0.5),
            interventions.ReviveHeads(max_output_error=1),
            interventions.Call(str),
        ],
        verbose=False,
    )
    trainer = trainer_for(
        folder, Collapse(start=3, stop=7, heads=[0, 1]), Collapse(start=14, stop=17), callback, EndBetween(moment),
        ModelCheckpoint(folder / "kept", filename="{step}", every_n_train_steps=3, save_top_k=-1),
        enable_checkpointing=True, logger=TensorBoardLogger(folder, name="board", version=0), log_every_n_steps=1,
        max_epochs=2, accumulate_grad_batches=accumulate,
    )  # fmt: skip
    lit = ByStep()
    with end_in(moment):
        trainer.fit(lit, batches(count=STEPS * accumulate // 2), ckpt_path=kept[-1] if kept else None)
    assert trainer.global_step == STEPS
    torch.save(
        {"weights": lit.state_dict(), "state": callback.state_dict(), "history": str(callback.history_path)},
        folder / "end.pt",
    )
