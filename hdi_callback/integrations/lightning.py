"""`HDICallback`: the monitor inside a Lightning trainer."""

from __future__ import annotations

import itertools
import re
import sys
import weakref
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import rank_zero_info

from hdi_callback.dashboards import console, tensorboard, wandb
from hdi_callback.errors import MisconfigurationError
from hdi_callback.integrations import LIGHTNING_WAS_LOADED
from hdi_callback.monitoring.faults import Faults
from hdi_callback.monitoring.history import History
from hdi_callback.monitoring.metrics import choose_metrics
from hdi_callback.monitoring.monitor import HeadDiversityMonitor, Method, check_arguments
from hdi_callback.monitoring.readings import Readout, Record
from hdi_callback.monitoring.schedule import Schedule


class HDICallback(pl.Callback):
    """Watch the diversity of the attention heads during training.

    Reads at step 0, whenever a multiple of `every_n_steps` optimizer steps is reached, and at the end. A reading at
    step `s` has the weights after `s` optimizer steps and the head outputs of the forward that follows; at the end no
    forward follows, so that the last reading has the weights alone. Training is not touched: no random number is
    drawn, no gradient changed, and on CUDA the host does not wait for the device.

    Every reading goes to every logger of the trainer, at its own cadence, into `trainer.callback_metrics` (so that
    ``EarlyStopping(monitor="hdi/min")`` works), and into a history file, see `load_history`.

    Args:
        every_n_steps: optimizer steps between readings, as `trainer.global_step` counts them.
        metrics: names of the curves to log; by default ``hdi``, ``hdi_worst_pair``, ``hdi_effective_heads``,
            ``head_covariance`` and ``head_correlation``. The history keeps everything that was measured.
        include: patterns of layer names to watch (``"encoder.*"``); all by default.
        exclude: patterns of layer names to leave out.
        max_tokens: largest number of tokens kept per layer for one reading of the head outputs.
        rank_tol: singular values below ``rank_tol`` times a head's largest do not count.
        method: how overlaps are computed, see `head_diversity`.
        history: write the history file, to ``hdi/history.jsonl`` under the run's log directory, or to the path given.
        prog_bar: show ``hdi/mean`` and ``hdi/min`` in the progress bar.
        name: put before every tag as ``<name>/``; needed when one trainer has two of these callbacks.
        strict: make a model without any readable attention layer an error instead of a warning.
        verbose: print once at start which layers were found.

    Raises:
        MisconfigurationError: if an argument cannot work.

    Example:
        >>> import lightning as L
        >>> trainer = L.Trainer(callbacks=[HDICallback(every_n_steps=50)], logger=False, accelerator="cpu")
    """

    def __init__(
        self,
        every_n_steps: int = 50,
        *,
        metrics: list[str] | None = None,
        include: list[str] | None = None,
        exclude: list[str] | None = None,
        max_tokens: int = 2048,
        rank_tol: float = 1e-6,
        method: Literal["whiten", "svd", "exact"] = "whiten",
        history: bool | str = True,
        prog_bar: bool = False,
        name: str | None = None,
        strict: bool = False,
        verbose: bool = True,
    ) -> None:
        super().__init__()
        _require_one_namespace()
        self._schedule = Schedule(every_n_steps)
        check_arguments(max_tokens=max_tokens, rank_tol=rank_tol, method=method)
        self._metrics = choose_metrics(metrics)
        self._layer_choice: dict[str, Sequence[str] | None] = {"include": include, "exclude": exclude}
        self._max_tokens, self._rank_tol, self._strict = max_tokens, rank_tol, strict
        self._method: Method = method
        self._history_choice, self._prog_bar, self._verbose = history, prog_bar, verbose
        self._name = name
        self._trainer: weakref.ref[Any] | None = None
        self._monitor: HeadDiversityMonitor | None = None
        self._history: History | None = None
        self._restored_path: Path | None = None
        self._faults = Faults()
        self._is_reading_owed = False
        self._on_the_way: deque[Readout] = deque()

    @property
    def history_path(self) -> Path | None:
        """Where the history of the run is; `None` before training and when there is none."""
        return None if self._history is None else self._history.path

    @property
    def monitor(self) -> HeadDiversityMonitor | None:
        """The monitor of the last fit, `None` before the first."""
        return self._monitor

    @property
    def state_key(self) -> str:
        """The name of this callback's state in a checkpoint."""
        return self._generate_state_key(name=self._name, **self._layer_choice)

    def state_dict(self) -> dict[str, Any]:
        """Give what a resumed run needs.

        Returns:
            Plain data.
        """
        path = self.history_path
        return {"format": 1, "last_step": self._schedule.last, "history": None if path is None else str(path)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take up where a checkpoint left off.

        Args:
            state_dict: what `state_dict` gave.
        """
        self._schedule.last = state_dict["last_step"]
        self._restored_path = None if state_dict["history"] is None else Path(state_dict["history"])

    # The hooks, in the order in which the trainer calls them.

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Check the company of this callback, and forget another trainer's run."""
        if stage != "fit":
            return
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        names = [callback._name for callback in callbacks if isinstance(callback, HDICallback)]
        if names.count(self._name) > 1:
            raise MisconfigurationError(
                f"Two HDICallbacks of this trainer have the name {self._name!r}, so their curves would be mixed up: "
                'write HDICallback(name="encoder", ...) for one of them.'
            )
        if self._trainer is None or self._trainer() is not trainer:
            self._trainer = weakref.ref(trainer)
            self._schedule.last, self._history, self._restored_path = None, None, None

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Find the layers and install the hooks, before anything has been compiled or run."""
        self._monitor = HeadDiversityMonitor(
            pl_module,
            metrics=self._metrics,
            **self._layer_choice,
            max_tokens=self._max_tokens,
            rank_tol=self._rank_tol,
            method=self._method,
            strict=self._strict,
        )
        self._is_reading_owed = False
        self._on_the_way.clear()

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Say what was found, open the history and lay out the charts."""
        monitor = self._installed
        if self._verbose and trainer.is_global_zero:
            console.print_layers(
                monitor.layers, monitor.refused, every_n_steps=self._schedule.every, say=rank_zero_info
            )
        folder = trainer.log_dir or trainer.default_root_dir  # a collective call: every rank makes it
        if trainer.is_global_zero and self._keeps_history(trainer):
            with self._faults.contained("opening the history file"):
                if self._history is None:
                    self._history = History(self._choose_path(Path(folder)))
                self._history.begin(trainer.global_step, [layer.facts() for layer in monitor.layers])
        for logger in trainer.loggers if trainer.is_global_zero else ():
            with self._faults.contained(f"laying out the charts of {type(logger).__name__}"):
                experiment = getattr(logger, "experiment", None)
                if hasattr(experiment, "add_custom_scalars"):
                    tensorboard.lay_out_charts(experiment, self._metrics, self._prefix)
                elif hasattr(experiment, "define_metric"):
                    wandb.define_metrics(experiment, self._metrics, self._prefix)

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Arm the capture when a reading is due."""
        if not self._is_reading_owed and self._schedule.is_due(trainer.global_step):
            self._is_reading_owed = True
            self._installed.arm()

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Read while the weights are still those of the forward, and the activations are gone."""
        if self._is_reading_owed:
            self._read(trainer)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log the readings that have arrived."""
        if self._is_reading_owed:  # a batch without a backward
            self._read(trainer)
        while self._on_the_way and self._on_the_way[0].is_ready():
            record = self._publish(trainer, self._on_the_way.popleft())
            if self._prog_bar and record is not None:
                pl_module.log_dict(self._named(record.summary()), prog_bar=True, logger=False)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Leave evaluation alone."""
        if self._monitor is not None:
            self._monitor.suspend()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Watch again."""
        if self._monitor is not None:
            self._monitor.resume()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Read the final weights, and log all that is still on the way."""
        if self._schedule.last != trainer.global_step:
            self._read(trainer)
        self._finish(trainer)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Log what has been measured, and leave no hook behind."""
        self._finish(trainer)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Leave no hook behind."""
        if self._monitor is not None:
            self._monitor.close()

    @property
    def _installed(self) -> HeadDiversityMonitor:
        assert self._monitor is not None, "the trainer calls on_fit_start first"
        return self._monitor

    @property
    def _prefix(self) -> str:
        return "" if self._name is None else f"{self._name}/"

    def _named(self, tags: dict[str, float]) -> dict[str, float]:
        return {self._prefix + tag: value for tag, value in tags.items()}

    def _keeps_history(self, trainer: pl.Trainer) -> bool:
        # As Lightning does with checkpoints, a trial run leaves nothing on the disk.
        return self._history_choice is not False and not getattr(trainer, "fast_dev_run", False)

    def _choose_path(self, folder: Path) -> Path:
        if self._history_choice is not True:
            return Path(str(self._history_choice))
        if self._restored_path is not None and self._restored_path.is_file():
            return self._restored_path
        stem = "history" if self._name is None else f"history-{self._name.replace('/', '-')}"
        path = folder / "hdi" / f"{stem}.jsonl"
        # Loggers without versions share one folder between runs; each run keeps its own file.
        copies = itertools.count(1)
        while path.exists():
            path = path.with_name(f"{stem}-{next(copies)}.jsonl")
        return path

    def _read(self, trainer: pl.Trainer) -> None:
        step = trainer.global_step
        self._is_reading_owed = False
        self._schedule.done(step)
        with self._faults.contained("measuring head diversity"):
            reading = self._installed.measure(step, epoch=trainer.current_epoch, axis=_logging_step(trainer))
            self._on_the_way.append(Readout(reading))

    def _publish(self, trainer: pl.Trainer, readout: Readout) -> Record | None:
        """Turn one reading into numbers and hand them to all who wait for them."""
        try:
            record = readout.record()
        except Exception as error:
            self._faults.tell("reading out head diversity", error)
            return None
        if self._history is not None:
            with self._faults.contained(f"writing {self._history.path}"):
                self._history.write(record)
        tags = self._named(record.scalars(self._metrics))
        for logger in trainer.loggers if trainer.is_global_zero else ():
            with self._faults.contained(f"logging to {type(logger).__name__}"):
                logger.log_metrics(tags, step=record.axis)
        # On every rank, as early stopping decides on every rank. `log_dict` would recompute all of these at each
        # refresh of the progress bar, and is forbidden after the last batch.
        trainer.callback_metrics.update({tag: torch.tensor(value) for tag, value in tags.items()})
        return record

    def _finish(self, trainer: pl.Trainer) -> None:
        while self._on_the_way:
            self._publish(trainer, self._on_the_way.popleft())
        if self._monitor is not None:
            self._monitor.close()


def _require_one_namespace() -> None:
    """Refuse where only `pytorch_lightning` before 2.6 is in use: its trainer takes callbacks of its own alone."""
    older = sys.modules.get("pytorch_lightning")
    if older is None or LIGHTNING_WAS_LOADED:
        return
    version = str(getattr(older, "__version__", "0"))
    if tuple(int(part) for part in re.findall(r"\d+", version)[:2]) < (2, 6):
        raise MisconfigurationError(
            f"pytorch_lightning {version} does not take callbacks of the package `lightning`. Write "
            "`import lightning as L` and `L.Trainer(...)` instead of `pytorch_lightning`, or upgrade it to 2.6."
        )


def _logging_step(trainer: pl.Trainer) -> int:
    """Give the step under which the trainer logs its own curves: with several optimizers not `global_step`."""
    step = getattr(trainer.fit_loop.epoch_loop, "_batches_that_stepped", None)
    return trainer.global_step if step is None else int(step)
