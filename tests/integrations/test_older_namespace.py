"""`import pytorch_lightning`, the older name of the same trainer: the callback works there as it is."""

from __future__ import annotations

import subprocess
import sys

import pytest
import pytorch_lightning
import torch
from pytorch_lightning.callbacks import EarlyStopping
from pytorch_lightning.loggers import TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.nn import functional as F

from hdi_callback import HDICallback
from hdi_callback.monitoring.history import read_records
from tests.models import Classifier, batches


class OlderClassifier(pytorch_lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = Classifier()

    def training_step(self, batch, batch_idx):
        tokens, label = batch
        return F.cross_entropy(self.net(tokens), label)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def script(version: str, first: str) -> str:
    return (
        f"{first}\n"
        "import pytorch_lightning\n"
        f"pytorch_lightning.__version__ = {version!r}\n"
        "from hdi_callback import HDICallback\n"
        "HDICallback()\n"
        "print('constructed')"
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("version", "first", "works"),
    [("2.5.6", "", False), ("2.6.0", "", True), ("2.10.1", "", True), ("2.5.6", "import lightning", True)],
)
def test_a_pytorch_lightning_trainer_that_cannot_use_the_callback_is_refused_with_the_line_to_write(
    version, first, works
):
    done = subprocess.run([sys.executable, "-c", script(version, first)], capture_output=True, text=True, check=False)
    assert ("constructed" in done.stdout) is works
    if not works:
        assert "MisconfigurationError: pytorch_lightning 2.5.6" in done.stderr
        assert "import lightning as L" in done.stderr


def test_the_callback_works_under_the_older_namespace(tmp_path):
    callback = HDICallback(every_n_steps=2, prog_bar=True)
    logger = TensorBoardLogger(tmp_path)
    trainer = pytorch_lightning.Trainer(
        default_root_dir=tmp_path, accelerator="cpu", logger=logger, max_epochs=1, enable_progress_bar=False,
        callbacks=[callback, EarlyStopping(monitor="hdi/min", mode="max", patience=9)],
    )  # fmt: skip
    trainer.fit(OlderClassifier(), batches(count=5))
    assert [record.step for record in read_records(callback.history_path)] == [0, 2, 4, 5]
    assert "hdi/min" in trainer.callback_metrics
    logger.experiment.flush()
    events = EventAccumulator(logger.log_dir).Reload()
    assert [event.step for event in events.Scalars("hdi/net.blocks.0.attn")] == [0, 2, 4, 5]

    path = tmp_path / "older.ckpt"
    trainer.save_checkpoint(path)
    resumed = HDICallback(every_n_steps=2)
    trainer = pytorch_lightning.Trainer(
        default_root_dir=tmp_path, accelerator="cpu", logger=False, max_epochs=2, enable_progress_bar=False,
        callbacks=[resumed],
    )  # fmt: skip
    trainer.fit(OlderClassifier(), batches(count=5), ckpt_path=path, weights_only=False)
    assert [record.step for record in read_records(resumed.history_path)] == [0, 2, 4, 5, 6, 8, 10]
