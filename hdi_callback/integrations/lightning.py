"""`HDICallback`: the monitor inside a Lightning trainer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from torch.optim import Optimizer
from typing_extensions import Unpack

from hdi_callback.errors import MisconfigurationError
from hdi_callback.guard import guarded
from hdi_callback.integrations.base import MISUSE, Watcher, tells
from hdi_callback.record import Record
from hdi_callback.session import Session, Settings, Trainer
from hdi_callback.session.settings import Options, takes_settings


@takes_settings
class HDICallback(Watcher, pl.Callback):
    """Watch the diversity of the attention heads during training.

    Reads at step 0, whenever a multiple of `every_n_steps` optimizer steps is reached, and at the end. A reading at
    step `s` has the weights after `s` optimizer steps and the head outputs of the forward that follows; at the end no
    forward follows, so that the last reading has the weights alone. Training is not touched: no random number is
    drawn, no gradient changed, and on CUDA the host does not wait for the device.

    Every reading goes to every logger of the trainer, into `trainer.callback_metrics`, and into a history, see
    `load_history`. Rules judge every reading, and change nothing unless there are interventions; then the host waits
    for the numbers of each reading.

    Args:
        every_n_steps: optimizer steps between readings, as the trainer counts them.
        settings: see `Settings`.

    Example:
        >>> import lightning as L
        >>> trainer = L.Trainer(callbacks=[HDICallback(every_n_steps=50)], logger=False, accelerator="cpu")
    """

    def __init__(self, every_n_steps: int = 50, **settings: Unpack[Options]) -> None:
        super().__init__(Settings(every_n_steps=every_n_steps, **settings))

    # The hooks, in the order in which the trainer calls them. It refuses two of these callbacks, by their state.

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Install the hooks, before anything has been compiled or run."""
        is_dry = getattr(trainer, "fast_dev_run", False)  # no files, as Lightning with checkpoints
        settings = replace(self._settings, history=False) if is_dry else self._settings
        self._start(pl_module, _LightningTrainer(trainer), settings)

    def on_train_start(self, *args: Any) -> None:
        """Resume from the checkpoint, if the trainer does."""
        self._resume()

    on_train_batch_start = tells(Session.before_forward)
    on_after_backward = tells(Session.after_backward)

    @guarded("watching heads", passes=MISUSE)
    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Deliver the readings whose numbers have arrived; after an epoch all, as callbacks may decide by them."""
        if self._session is not None:
            loss = outputs.get("loss") if isinstance(outputs, dict) else None
            # Lightning has divided it.
            self._session.after_step(None if loss is None else loss * trainer.accumulate_grad_batches)
            if trainer.is_last_batch:
                self._session.flush()

    on_validation_start = tells(Session.flush)  # as callbacks may decide by the readings
    on_train_end = tells(Session.finish)

    def teardown(self, *args: Any, **kwargs: Any) -> None:
        """Deliver what was measured, and remove all hooks; also after an exception."""
        self.close()

    on_exception = teardown

    def on_init_end(self, *args: Any, **kwargs: Any) -> None:
        """Refuse a transformers trainer, which calls this first."""
        text = "A transformers Trainer takes HDITrainerCallback: write callbacks=[HDITrainerCallback(...)]."
        raise MisconfigurationError(text)


class _LightningTrainer(Trainer):
    """A Lightning trainer as the `Trainer` of a session."""

    def __init__(self, trainer: pl.Trainer) -> None:
        self._trainer = trainer

    @property
    def folder(self) -> Path:
        # `trainer.log_dir` is the same, broadcast: it waits without end for a rank that could not begin to watch.
        logger: Any = next(iter(self._trainer.loggers), None)
        attribute = "log_dir" if isinstance(logger, TensorBoardLogger | CSVLogger) else "save_dir"
        return Path(getattr(logger, attribute, None) or self._trainer.default_root_dir)

    @property
    def step(self) -> int:
        return self._trainer.global_step

    @property
    def optimizers(self) -> Sequence[Optimizer]:
        return self._trainer.optimizers

    def stop(self) -> None:
        self._trainer.should_stop = True

    def save(self, name: str) -> str:
        path = self.folder / "hdi" / f"{name}.ckpt"
        self._trainer.save_checkpoint(path, weights_only=False)  # every rank takes part
        return str(path)

    def targets(self, past: Sequence[Record]) -> list[Any]:
        # Early stopping decides on every rank.
        return [self._keep, *(self._trainer.loggers if self.is_first_rank else ())]

    def _keep(self, values: dict[str, float], step: int) -> None:
        # `log_dict` would recompute these at each refresh of the progress bar, and is forbidden after the last batch.
        self._trainer.callback_metrics.update({tag: torch.tensor(value) for tag, value in values.items()})
