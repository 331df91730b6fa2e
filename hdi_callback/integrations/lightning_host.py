"""`LightningHost`: a Lightning trainer as the `Host` of a session."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from torch.optim import Optimizer

from hdi_callback.errors import MisconfigurationError
from hdi_callback.integrations import LIGHTNING_WAS_LOADED
from hdi_callback.integrations.outlets import Dashboards
from hdi_callback.monitoring.history import History
from hdi_callback.monitoring.monitor import HeadDiversityMonitor
from hdi_callback.monitoring.session.position import Position
from hdi_callback.monitoring.session.settings import Settings
from hdi_callback.monitoring.session.sink import Latest, Sink
from hdi_callback.monitoring.warn_once import WarnOnce


class LightningHost:
    """A Lightning trainer as a `Host`.

    Args:
        trainer: the trainer.
        settings: the settings of the run.
        prefix: put before every tag.
        warn_once: warns once of each kind of failure.
    """

    def __init__(self, trainer: pl.Trainer, settings: Settings, prefix: str, warn_once: WarnOnce) -> None:
        self.trainer, self._curves, self._prefix = trainer, settings.curves, prefix
        self._dashboards = Dashboards(settings, warn_once)
        self._last_step: int | None = None

    @property
    def is_first_rank(self) -> bool:
        """Whether this process writes."""
        return self.trainer.is_global_zero

    @cached_property
    def folder(self) -> Path:
        """The directory of the trainer's first logger."""
        # `trainer.log_dir` is the same, broadcast: it waits without end for a rank that could not begin to watch.
        logger: Any = next(iter(self.trainer.loggers), None)
        has_own = isinstance(logger, TensorBoardLogger | CSVLogger)
        return Path((logger.log_dir if has_own else getattr(logger, "save_dir", None)) or self.trainer.default_root_dir)

    @property
    def position(self) -> Position:
        """Step, epoch and logging axis; no step counts after `end_training`."""
        # With several optimizers the trainer logs its own curves under another step than `global_step`.
        axis = getattr(self.trainer.fit_loop.epoch_loop, "_batches_that_stepped", None)
        step = self.trainer.global_step
        return Position(step, self.trainer.current_epoch, step if axis is None else int(axis))

    @property
    def end(self) -> Position:
        """The position at the end of the training, in which every step counts."""
        return self.position if self._last_step is None else replace(self.position, step=self._last_step)

    def end_training(self) -> None:
        """Count no further step."""
        if self._last_step is None:
            self._last_step = self.trainer.global_step

    @property
    def optimizers(self) -> Sequence[Optimizer]:
        """The optimizers of the run."""
        return self.trainer.optimizers

    def loss_scale(self, optimizer: Optimizer) -> float:
        """Factor of the gradients before a step, 1 where they have been unscaled."""
        scaler = getattr(self.trainer.precision_plugin, "scaler", None)
        # Such optimizers divide by the scale themselves, inside their step.
        takes_scaled = getattr(optimizer, "_step_supports_amp_scaling", False)
        return float(scaler.get_scale()) if scaler is not None and takes_scaled else 1.0

    def stop(self) -> None:
        """End the training after this step."""
        self.trainer.should_stop = True

    def save(self, name: str) -> str:
        """Save a checkpoint into the folder of the history; return its path."""
        path = self.folder / "hdi" / f"{name}.ckpt"
        self.trainer.save_checkpoint(path, weights_only=False)  # every rank takes part
        return str(path)

    def print(self, text: str) -> None:
        """Print a line to the user."""
        self.trainer.print(text)

    def sinks(
        self, monitor: HeadDiversityMonitor, history: History | None, state: Mapping[str, Any] | None
    ) -> list[Sink]:
        """The trainer's loggers, and on every rank `callback_metrics`: early stopping decides on every rank."""
        latest = Latest(self._curves, self._keep, self._prefix, "updating callback_metrics")
        if not self.is_first_rank:
            return [latest]
        self._dashboards.close()
        self._dashboards.loggers(self.trainer.loggers, self._prefix, [layer.name for layer in monitor.layers])
        is_resumed = state is not None
        return [latest, *self._dashboards.sinks(history, self.print, "the loggers", is_resumed=is_resumed)]

    def _keep(self, curves: Mapping[str, float]) -> None:
        # `log_dict` would recompute all of these at each refresh of the progress bar, and is forbidden after the last
        # batch.
        self.trainer.callback_metrics.update({tag: torch.tensor(value) for tag, value in curves.items()})


def other_callbacks_act_on_train_end(trainer: pl.Trainer, own: type[pl.Callback]) -> bool:
    """Return whether callbacks that may change the weights act at the end of training.

    Args:
        trainer: the trainer.
        own: the class of the callback that asks.

    Returns:
        True if one does.
    """
    onlookers = (own, pl.callbacks.Checkpoint, pl.callbacks.ProgressBar)
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    return any(
        # By name: two packages have a base class, and some callbacks take functions.
        getattr(callback.on_train_end, "__qualname__", "") != pl.Callback.on_train_end.__qualname__
        for callback in callbacks
        if not isinstance(callback, onlookers)
    )


def require_one_namespace() -> None:
    """Refuse if only `pytorch_lightning` before 2.6 is in use: its trainer takes only its own callbacks.

    Raises:
        MisconfigurationError: if so.
    """
    older = sys.modules.get("pytorch_lightning")
    if older is None or LIGHTNING_WAS_LOADED:
        return
    version = str(getattr(older, "__version__", "0"))
    if tuple(int(part) for part in re.findall(r"\d+", version)[:2]) < (2, 6):
        raise MisconfigurationError(
            f"pytorch_lightning {version} does not take callbacks of the package `lightning`. Write "
            "`import lightning as L` and `L.Trainer(...)` instead of `pytorch_lightning`, or upgrade it to 2.6."
        )
