"""`HDICallback`: the monitor inside a Lightning trainer."""

from __future__ import annotations

import re
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import rank_zero_info
from torch.optim import Optimizer

from hdi_callback.attention.names import printable
from hdi_callback.attention.padding import PaddingChoice
from hdi_callback.dashboards.loggers import LoggerSink
from hdi_callback.dashboards.pictures import Outlet
from hdi_callback.errors import MisconfigurationError
from hdi_callback.integrations import LIGHTNING_WAS_LOADED
from hdi_callback.integrations.outlets import alert_sinks, picture_sinks, print_layers
from hdi_callback.monitoring.alerts import Alert, Rule
from hdi_callback.monitoring.history import History
from hdi_callback.monitoring.interventions import Intervention
from hdi_callback.monitoring.monitor import HeadDiversityMonitor
from hdi_callback.monitoring.notebook import run_summary
from hdi_callback.monitoring.position import Position
from hdi_callback.monitoring.ranks import share_within
from hdi_callback.monitoring.session import Session
from hdi_callback.monitoring.settings import DEFAULT_MEMORY, Settings, check_arguments
from hdi_callback.monitoring.sink import Result, Sink
from hdi_callback.monitoring.warn_once import WarnOnce


class HDICallback(pl.Callback):
    """Watch the diversity of the attention heads during training.

    Reads at step 0, whenever a multiple of `every_n_steps` optimizer steps is reached, and at the end. A reading at
    step `s` has the weights after `s` optimizer steps and the head outputs of the forward that follows; at the end no
    forward follows, so that the last reading has the weights alone. Training is not touched: no random number is
    drawn, no gradient changed, and on CUDA the host does not wait for the device.

    Every reading goes to every logger of the trainer, at its own cadence, into `trainer.callback_metrics` (so that
    ``EarlyStopping(monitor="hdi/min")`` works), and into a history file, see `load_history`.

    Rules judge every reading. Their alerts are printed, written to TensorBoard as text and as marks on the curves, sent
    through `wandb.alert` and kept in the history; a critical one is a
    `HeadCollapseWarning` as well where warnings are recorded, logged or made errors. Nothing is done about them
    unless interventions are given; then the host waits for the numbers of each reading.

    Args:
        every_n_steps: optimizer steps between readings, as `trainer.global_step` counts them.
        metrics: names of the curves to log; ``"default"`` or `None`, also as one of the names, for ``hdi``,
            ``hdi_alignment``, ``hdi_energy_alignment``, ``hdi_worst_pair``, ``hdi_effective_heads``,
            ``head_correlation``, ``head_output_overlap`` and ``head_covariance``. The history keeps everything that was
            measured.
        include: patterns of layer names to watch (``"encoder.*"``); all by default.
        exclude: patterns of layer names to leave out.
        max_tokens: largest number of tokens kept per layer for one reading of the head outputs.
        padding: which tokens are padding, whose head outputs are left out: ``"auto"`` for what the masks tell that the
            attention and the modules around it receive; the number of the token that is padding; a function that takes
            the arguments of the model by their names and returns ``(batch, length)``, true where a token is padding;
            `None` to count every token.
        rank_tol: singular values below ``rank_tol`` times a head's largest do not count.
        method: how overlaps are computed, see `head_diversity`.
        memory_budget: bytes that reading weights may take at a time, beyond what the largest layer needs alone; less
            of it is slower.
        history: write the history file, to ``hdi/history.jsonl`` under the run's log directory, or to the path given.
        matrices_every: the history keeps the heads-by-heads matrices of every so many readings, and those of step 0, of
            the end and of alerts besides; 0 for none at all.
        history_mb: megabytes that the history may have on the disk; when it has more, the matrices of older readings
            are thinned. `None` for no limit.
        figures_every: draw the worst alignment of all layers and the heads of the worst ones at every so many readings,
            for the loggers that take pictures and into ``figures`` beside the history; 0 for none. Drawing takes at
            most 2% of the run's time while it goes on, and needs matplotlib.
        alerts: ``"default"``, rules of your own (see `Rule`), or `None` for no alerts.
        thresholds: limits of the default rules by pattern of layer names: ``{"decoder.*": {"mean": 0.7, "pair":
            None}}``; see `Thresholds`.
        loaded: whether the weights had been trained before this run, so that what they are at its start is no alarm;
            ``"auto"`` tells it from the weights of each layer.
        on_alert: a function that is called with each `Alert`, on the first rank.
        interventions: what to do about alerts; nothing by default.
        prog_bar: show ``hdi/mean`` and ``hdi/min`` in the progress bar.
        name: put before every tag as ``<name>/``; needed when one trainer has two of these callbacks.
        strict: make two warnings errors, before the first step: that the model has no readable attention layer, or that
            the checkpoint to resume from knows layers that are not there or have other heads. Without it the history,
            alerts and interventions start anew after such a checkpoint.
        check_heads: check once, on a few tokens of the first forward that is read, that every layer computes attention
            with the heads that were found; a layer that does not is left out, with a warning that shows why.
        process_group: the ranks that measure together: ``"auto"`` for all of them, or `None` for each rank alone, as is
            needed where ranks leave training at different steps; then the first rank writes what it measures of its own
            tokens, and interventions are refused. A `torch.distributed` process group as well.
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
        metrics: list[str] | Literal["default"] | None = None,
        include: list[str] | None = None,
        exclude: list[str] | None = None,
        max_tokens: int = 2048,
        padding: PaddingChoice = "auto",
        rank_tol: float = 1e-6,
        method: Literal["whiten", "svd", "exact"] = "whiten",
        memory_budget: int = DEFAULT_MEMORY,
        history: bool | str = True,
        matrices_every: int = 10,
        history_mb: float | None = 200,
        figures_every: int = 20,
        alerts: Literal["default"] | list[Rule] | None = "default",
        thresholds: dict[str, dict[str, float | None]] | None = None,
        loaded: bool | Literal["auto"] = "auto",
        on_alert: Callable[[Alert], Any] | None = None,
        interventions: list[Intervention] | None = None,
        prog_bar: bool = False,
        name: str | None = None,
        strict: bool = False,
        check_heads: bool = True,
        process_group: Any = "auto",
        verbose: bool = True,
    ) -> None:
        super().__init__()
        _require_one_namespace()
        self._settings = Settings.of(locals())
        own = check_arguments(prog_bar=prog_bar, name=name)
        self._prog_bar: bool = own["prog_bar"]
        self._name: str | None = own["name"]
        # As they were written, for the state's name in a checkpoint is made of them.
        self._layer_choice: dict[str, Sequence[str] | None] = {"include": include, "exclude": exclude}
        self._warn_once = WarnOnce()
        self._forget()

    def _forget(self) -> None:
        self._trainer: weakref.ref[Any] | None = None
        self._host: _LightningHost | None = None
        self._session: Session | None = None  # of the last fit
        self._opened: Session | None = None  # of the last training that has begun
        self._history: History | None = None
        self._restored: Any = None

    @property
    def history_path(self) -> Path | None:
        """Where the history of the run is; `None` before training and when there is none."""
        return None if self._history is None else self._history.path

    @property
    def monitor(self) -> HeadDiversityMonitor | None:
        """The monitor of the last fit, `None` before the first."""
        return None if self._session is None else self._session.monitor

    def _repr_html_(self) -> str:
        monitor = self.monitor
        layers, refused = ([], []) if monitor is None else (monitor.layers, monitor.refused)
        return run_summary("HDICallback", layers, refused, self.active_alerts, self.history_path)

    @property
    def active_alerts(self) -> list[Alert]:
        """The alerts that are active now."""
        return [] if self._opened is None else self._opened.active_alerts

    def __getstate__(self) -> dict[str, Any]:
        """Leave the run behind: a copy is as new, and can be given to another trainer or process."""
        return {
            **self.__dict__,
            "_restored": None if self._opened is not None else self._restored,
            **dict.fromkeys(("_trainer", "_host", "_session", "_opened", "_history")),
            "_warn_once": WarnOnce(),
        }

    @property
    def state_key(self) -> str:
        """The name of this callback's state in a checkpoint."""
        return self._generate_state_key(name=self._name, **self._layer_choice)

    def state_dict(self) -> dict[str, Any]:
        """Give what a resumed run needs.

        Returns:
            Plain data.
        """
        if self._opened is not None:
            return self._opened.state_dict()
        return dict(self._restored) if isinstance(self._restored, Mapping) else {"last_step": None}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take up where a checkpoint left off.

        Args:
            state_dict: what `state_dict` gave.
        """
        self._restored = state_dict  # looked at in `on_train_start`, which knows the layers and the step
        if self._opened is not None:
            self._opened.flush()
            self._opened = None
        run = state_dict.get("run") if isinstance(state_dict, Mapping) else None
        if self._history is not None and run != self._history.run:
            self._history = None

    def on_init_end(self, *args: Any, **kwargs: Any) -> None:
        """Refuse the trainer of transformers, which calls this first.

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

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Refuse a second callback of the same name; reset state for a new trainer."""
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
            self._forget()
            self._trainer = weakref.ref(trainer)

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Find the layers and install the hooks, before anything has been compiled or run."""
        settings = self._settings
        if getattr(trainer, "fast_dev_run", False):  # as Lightning does with checkpoints: nothing is left on the disk
            settings = replace(settings, history=False)
        self._host = _LightningHost(trainer, settings, self._prefix, self._warn_once)
        self._session = Session.start(pl_module, self._host, settings, name=self._name, warn_once=self._warn_once)
        if trainer.is_global_zero:  # before a progress bar is drawn
            print_layers(self._session, settings, rank_zero_info)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Open the history, lay out the charts and begin to watch."""
        assert self._session is not None, "the trainer calls on_fit_start first"
        before = self._restored if self._opened is None else self._opened.state_dict()
        state = self._session.accept(before, step=trainer.global_step)
        if state is None:
            self._restored, self._history = None, None
        self._session.open(state, history=self._history)
        self._opened, self._history = self._session, self._session.history

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Arm the capture when a reading is due."""
        session, host = self._watching
        if getattr(trainer.fit_loop, "_skip_backward", False):
            # For the sake of batch norm Lightning's weight averaging ends with an epoch in which nothing is trained.
            host.end_training()
            return
        session.before_forward()

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Read while the weights are still those of the forward, and the activations are gone."""
        self._watching[0].after_backward(is_last=pl_module.automatic_optimization)

    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        """Let interventions act on the gradients."""
        self._watching[0].before_optimizer_step(optimizer)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Publish the readings whose numbers have arrived."""
        for result in self._watching[0].after_step():
            if self._prog_bar:
                with self._warn_once.guard("writing to the progress bar"):
                    shown = {self._prefix + tag: value for tag, value in result.record.summary().items()}
                    pl_module.log_dict(shown, prog_bar=True, logger=False)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Leave evaluation alone."""
        if self.monitor is not None:
            self.monitor.suspend()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Watch again."""
        if self.monitor is not None:
            self.monitor.resume()

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Read the weights that were trained, if another callback may put averaged ones in their place."""
        if _other_callbacks_act_on_train_end(trainer):
            session, host = self._watching
            # The epoch is counted as it will be in `on_train_end`.
            session.measure_final_early(replace(host.end, epoch=trainer.current_epoch + 1))

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Read the final weights, and publish all that is pending."""
        session, host = self._watching
        session.finish(host.end)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Publish what has been measured, and leave no hook behind."""
        if self._opened is not None:
            self._opened.flush(is_broken=True)
        self.teardown(trainer, pl_module, "fit")

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Leave no hook behind."""
        if self._session is not None:
            self._session.close()

    @property
    def _watching(self) -> tuple[Session, _LightningHost]:
        assert self._opened is not None, "the trainer calls on_train_start first"
        assert self._host is not None
        return self._opened, self._host

    @property
    def _prefix(self) -> str:
        return "" if self._name is None else f"{printable(self._name)}/"


class _CallbackMetrics:
    """Keeps the latest numbers where early stopping and checkpoints look for them."""

    name = "updating callback_metrics"

    def __init__(self, trainer: pl.Trainer, metrics: Sequence[str], prefix: str) -> None:
        self._trainer, self._metrics, self._prefix = trainer, list(metrics), prefix

    def write(self, result: Result) -> None:
        # `log_dict` would recompute all of these at each refresh of the progress bar, and is forbidden after the last
        # batch.
        tags = result.scalars(self._metrics)
        self._trainer.callback_metrics.update({self._prefix + tag: torch.tensor(value) for tag, value in tags.items()})


class _LightningHost:
    """What a Lightning trainer offers."""

    def __init__(self, trainer: pl.Trainer, settings: Settings, prefix: str, warn_once: WarnOnce) -> None:
        self._trainer, self._settings, self._prefix, self._warn_once = trainer, settings, prefix, warn_once
        self._last_step: int | None = None
        is_whole = settings.process_group == "auto"
        self.broadcast: Callable[[Any], Any] = (
            trainer.strategy.broadcast if is_whole else share_within(settings.process_group)
        )

    @property
    def is_first_rank(self) -> bool:
        return self._trainer.is_global_zero

    @cached_property
    def folder(self) -> Path:
        return Path(self._trainer.log_dir or self._trainer.default_root_dir)

    @property
    def position(self) -> Position:
        # With several optimizers the trainer logs its own curves under another step than `global_step`.
        axis = getattr(self._trainer.fit_loop.epoch_loop, "_batches_that_stepped", None)
        step = self._trainer.global_step
        return Position(step, self._trainer.current_epoch, step if axis is None else int(axis))

    @property
    def end(self) -> Position:
        """Where the training has ended, in which every step trained."""
        return self.position if self._last_step is None else replace(self.position, step=self._last_step)

    def end_training(self) -> None:
        """Count no further step."""
        if self._last_step is None:
            self._last_step = self._trainer.global_step

    @property
    def optimizers(self) -> Sequence[Optimizer]:
        return self._trainer.optimizers

    def loss_scale(self, optimizer: Optimizer) -> float:
        scaler = getattr(self._trainer.precision_plugin, "scaler", None)
        # Such optimizers take the scale off themselves, inside their step.
        takes_scaled = getattr(optimizer, "_step_supports_amp_scaling", False)
        return float(scaler.get_scale()) if scaler is not None and takes_scaled else 1.0

    def stop(self) -> None:
        self._trainer.should_stop = True

    def save(self, name: str) -> str:
        path = self.folder / "hdi" / f"{name}.ckpt"
        self._trainer.save_checkpoint(path, weights_only=False)  # every rank takes part
        return str(path)

    def say(self, text: str) -> None:
        self._trainer.print(text)

    def sinks(
        self, monitor: HeadDiversityMonitor, history: History | None, state: Mapping[str, Any] | None
    ) -> list[Sink]:
        metrics = self._settings.metrics or ()
        # On every rank, as early stopping decides on every rank.
        sinks: list[Sink] = [_CallbackMetrics(self._trainer, metrics, self._prefix)]
        if not self.is_first_rank:
            return sinks
        outlets: list[Outlet | None] = []
        for logger in self._trainer.loggers:
            sink = LoggerSink(logger, metrics, self._prefix)
            with self._warn_once.guard(f"laying out the charts of {sink.logger_type}"):
                sink.lay_out(layer.name for layer in monitor.layers)
                outlets.append(sink.pictures())
            sinks.append(sink)
        sinks += picture_sinks(self._settings, history, outlets, is_resumed=state is not None)
        return [*sinks, *alert_sinks(self._settings, history, self.say, "the loggers")]


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


def _other_callbacks_act_on_train_end(trainer: pl.Trainer) -> bool:
    """Tell whether callbacks that do not only look on do something at the end of training."""
    onlookers = (HDICallback, pl.callbacks.Checkpoint, pl.callbacks.ProgressBar)
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    return any(
        # By its name, as there are two packages with a base class, and callbacks that take functions.
        getattr(callback.on_train_end, "__qualname__", "") != pl.Callback.on_train_end.__qualname__
        for callback in callbacks
        if not isinstance(callback, onlookers)
    )
