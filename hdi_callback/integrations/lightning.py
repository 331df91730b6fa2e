"""`HDICallback`: the monitor inside a Lightning trainer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities import rank_zero_info
from torch.optim import Optimizer

from hdi_callback.attention.names import printable
from hdi_callback.errors import MisconfigurationError
from hdi_callback.guard import guarded
from hdi_callback.integrations.lightning_host import (
    LightningHost,
    other_callbacks_act_on_train_end,
    require_one_namespace,
)
from hdi_callback.integrations.shell import MISUSE, STARTING, WATCHING, NotWatchingError, Shell
from hdi_callback.integrations.signature import documented_by, method_of
from hdi_callback.monitoring.session.session import Session
from hdi_callback.monitoring.session.settings import Settings


@dataclass(frozen=True)
class LightningSettings(Settings):
    """The arguments of `HDICallback`.

    Attributes:
        prog_bar: show ``hdi/mean`` and ``hdi/min`` in the progress bar.
        name: put before every tag as ``<name>/``; needed when one trainer has two of these callbacks.
        layer_choice: `include` and `exclude` as the user wrote them, parts of the state's name in a checkpoint.
    """

    prog_bar: bool = field(default=False, kw_only=True)
    name: str | None = field(default=None, kw_only=True)
    layer_choice: Mapping[str, Any] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._set("layer_choice", {"include": self.include, "exclude": self.exclude})
        super().__post_init__()


@documented_by(LightningSettings)
class HDICallback(Shell, pl.Callback):
    """Watch the diversity of the attention heads during training.

    Reads at step 0, whenever a multiple of `every_n_steps` optimizer steps is reached, and at the end. A reading at
    step `s` has the weights after `s` optimizer steps and the head outputs of the forward that follows; at the end no
    forward follows, so that the last reading has the weights alone. Training is not touched: no random number is
    drawn, no gradient changed, and on CUDA the host does not wait for the device.

    Every reading goes to every logger of the trainer, at its own cadence, into `trainer.callback_metrics` (so that
    ``EarlyStopping(monitor="hdi/min")`` works), and into a history file, see `load_history`.

    Rules judge every reading. Their alerts are printed, written to TensorBoard as text and as marks on the curves, sent
    through `wandb.alert` and kept in the history; a critical one is a
    `HeadCollapseWarning` as well where warnings are recorded, logged or made errors. They change nothing unless there
    are interventions; then the host waits for the numbers of each reading.

    Args:
        settings: the arguments of `Settings`, ``prog_bar`` and ``name``, by their names.

    Raises:
        MisconfigurationError: if an argument cannot work.

    Example:
        >>> import lightning as L
        >>> trainer = L.Trainer(callbacks=[HDICallback(every_n_steps=50)], logger=False, accelerator="cpu")
    """

    _settings: LightningSettings

    @method_of(LightningSettings)
    def __init__(self, settings: LightningSettings) -> None:
        require_one_namespace()
        super().__init__(settings)

    @property
    @guarded("naming the state of head diversity", otherwise=lambda self: type(self).__qualname__)
    def state_key(self) -> str:
        """The name of this callback's state in a checkpoint."""
        return self._generate_state_key(name=self._settings.name, **self._settings.layer_choice)

    def on_init_end(self, *args: Any, **kwargs: Any) -> None:
        """Refuse a transformers trainer, which calls this first.

        Args:
            args: of that trainer.
            kwargs: of that trainer.

        Raises:
            MisconfigurationError: always.
        """
        raise MisconfigurationError(
            "HDICallback is for a Lightning trainer, and a transformers Trainer takes HDITrainerCallback: write "
            "transformers.Trainer(..., callbacks=[HDITrainerCallback(...)])."
        )

    # The hooks, in the order in which the trainer calls them.

    @guarded(STARTING, passes=MISUSE)
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Refuse a second callback of the same name; reset state for a new trainer."""
        if stage != "fit":
            return
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        names = [callback._settings.name for callback in callbacks if isinstance(callback, HDICallback)]
        if names.count(self._settings.name) > 1:
            raise MisconfigurationError(
                f"Two HDICallbacks of this trainer have the name {self._settings.name!r}, so their curves would be "
                'mixed up: write HDICallback(name="encoder", ...) for one of them.'
            )
        if self._host is None or self._host.trainer is not trainer:
            self._forget()

    @guarded(STARTING, passes=MISUSE)
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Find the layers and install the hooks, before anything has been compiled or run."""
        if self._could_not_start:
            return
        settings = self._settings
        if getattr(trainer, "fast_dev_run", False):  # no files, as Lightning with checkpoints
            settings = replace(settings, history=False)
        host = LightningHost(trainer, settings, self._prefix, self._warn_once)
        # Printed before a progress bar is drawn.
        self._start(pl_module, host, settings, name=settings.name, print_line=rank_zero_info)

    @guarded(STARTING, passes=MISUSE)
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Open the history, define the charts and begin to watch."""
        if not self._could_not_start:
            self._open()

    @guarded(WATCHING)
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Arm the capture when a reading is due."""
        session, host = self._watching(trainer, pl_module)
        if getattr(trainer.fit_loop, "_skip_backward", False):
            # Lightning's weight averaging ends with an epoch for batch norm, in which nothing is trained.
            host.end_training()
            return
        session.before_forward()

    @guarded(WATCHING)
    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Read while the weights are still those of the forward, and the activations are gone."""
        self._watching(trainer, pl_module)[0].after_backward(is_last=pl_module.automatic_optimization)

    @guarded(WATCHING)
    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        """Let interventions act on the gradients."""
        self._watching(trainer, pl_module)[0].before_optimizer_step(optimizer)

    @guarded(WATCHING)
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Publish the readings whose numbers have arrived."""
        for result in self._watching(trainer, pl_module)[0].after_step():
            if self._settings.prog_bar:
                with self._warn_once.guard("writing to the progress bar"):
                    shown = {self._prefix + tag: value for tag, value in result.record.summary().items()}
                    pl_module.log_dict(shown, prog_bar=True, logger=False)

    @guarded(WATCHING)
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Remove the hooks for evaluation."""
        if self.monitor is not None:
            self.monitor.suspend()

    @guarded(WATCHING)
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Reinstall the hooks."""
        if self.monitor is not None:
            self.monitor.resume()

    @guarded(WATCHING)
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Read the trained weights, if another callback may replace them by averaged ones."""
        if other_callbacks_act_on_train_end(trainer, HDICallback):
            session, host = self._watching(trainer, pl_module)
            # The epoch is counted as it will be in `on_train_end`.
            session.measure_final_early(replace(host.end, epoch=trainer.current_epoch + 1))

    @guarded("the last reading")
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Read the final weights, and publish pending readings."""
        session, host = self._watching(trainer, pl_module)
        session.finish(host.end)

    @guarded("closing the session")
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Publish pending readings, and remove all hooks."""
        self.close()

    @guarded("closing the session")
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Remove all hooks."""
        if self._session is not None:
            self._session.close()

    def _watching(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> tuple[Session, LightningHost]:
        if self._could_not_start:
            raise NotWatchingError
        if self._opened is None:  # it came in the middle of a run, or a checkpoint was restored there, as by `lr_find`
            if self._session is None:
                self.on_fit_start(trainer, pl_module)
            self._open()
        assert self._opened is not None, "it was just opened"
        return self._opened, self._host

    @property
    def _prefix(self) -> str:
        name = self._settings.name
        return "" if name is None else f"{printable(name)}/"
