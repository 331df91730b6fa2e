"""A training loop of your own: its arguments, `LoopSettings`, and its `Host`, `LoopHost`."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from torch import nn
from torch.optim import Optimizer

from hdi_callback.arguments import function, path, shown
from hdi_callback.errors import MisconfigurationError
from hdi_callback.integrations.optimizers import inner_optimizers
from hdi_callback.integrations.outlets import Dashboards
from hdi_callback.monitoring.history import History
from hdi_callback.monitoring.interventions import SaveCheckpoint
from hdi_callback.monitoring.monitor import HeadDiversityMonitor
from hdi_callback.monitoring.session.host import PlainHost
from hdi_callback.monitoring.session.position import Position
from hdi_callback.monitoring.session.settings import Settings
from hdi_callback.monitoring.session.sink import Latest, Sink
from hdi_callback.monitoring.session.state import contents_of, is_state, steps_counted_in
from hdi_callback.monitoring.warn_once import WarnOnce

_Path = str | os.PathLike[str]


@dataclass(frozen=True)
class LoopSettings(Settings):
    """The arguments of `watch_heads` and `HDIHandler`.

    Attributes:
        model: any module that contains attention layers.
        optimizer: the optimizer, or a list of optimizers that make a step together.
        log_dir: folder of the run; the history is ``hdi/history.jsonl`` in it.
        tensorboard: a `torch.utils.tensorboard.SummaryWriter` of yours, or True for one in ``hdi`` under `log_dir`.
        wandb: a `wandb` run. The curves have the axis ``hdi_step`` and come with what you log yourself.
        save_checkpoint: how to save a checkpoint, for the intervention `SaveCheckpoint`: a function of a name, called
            on every rank; what it returns, or else the name, is kept as the place.

    Raises:
        MisconfigurationError: if one of them cannot work.
    """

    model: nn.Module
    optimizer: Any
    every_n_steps: int = field(default=50, kw_only=True)
    log_dir: _Path = field(default="runs/heads", kw_only=True)
    tensorboard: Any = field(default=None, kw_only=True)
    wandb: Any = field(default=None, kw_only=True)
    save_checkpoint: Callable[[str], Any] | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.model, nn.Module):
            raise MisconfigurationError(f"`model` must be a torch.nn.Module, got {shown(self.model)}.")
        board, run = self.tensorboard, self.wandb
        if board is not None and not isinstance(board, bool) and not hasattr(board, "add_scalar"):
            raise MisconfigurationError(f"`tensorboard` must be a SummaryWriter or True, got {shown(board)}.")
        if run is not None and (not hasattr(run, "log") or isinstance(run, type(os))):
            raise MisconfigurationError(f"`wandb` must be a run, got {shown(run)}: write wandb=wandb.init(...).")
        function("save_checkpoint", self.save_checkpoint, "the name of a checkpoint")
        if self.save_checkpoint is None and any(isinstance(item, SaveCheckpoint) for item in self.acting):
            raise MisconfigurationError(
                "SaveCheckpoint needs a function that saves: write "
                "save_checkpoint=lambda name: torch.save(..., name + '.pt')."
            )
        self._set("optimizer", inner_optimizers(self.optimizer))
        self._set("log_dir", path("log_dir", self.log_dir, "runs/heads"))


class LoopHost(PlainHost):
    """A loop as a `Host`, which counts the steps itself.

    Args:
        settings: those of the loop.
        warn_once: warns once of each kind of failure.

    Attributes:
        step: optimizer steps so far.
        epoch: the epoch, if the loop passes it.
        is_stopped: whether an intervention has requested the end.
        latest: the curves of the last reading.
        dashboards: the sinks of results.
    """

    def __init__(self, settings: LoopSettings, warn_once: WarnOnce) -> None:
        super().__init__(settings.process_group)
        self._settings, self._warn_once = settings, warn_once
        self.dashboards = Dashboards(settings, warn_once)
        self.latest: dict[str, float] = {}
        self.step, self.epoch, self.is_stopped = 0, cast("int | None", None), False

    @property
    def folder(self) -> Path:
        """The folder of the run."""
        return Path(self._settings.log_dir)

    @property
    def position(self) -> Position:
        """Step and epoch of the loop."""
        return Position(self.step, self.epoch)

    @property
    def optimizers(self) -> Sequence[Optimizer]:
        """The optimizers of the run."""
        return cast("list[Optimizer]", self._settings.optimizer)

    def begin_step(self, epoch: int | None) -> None:
        """Set the epoch of the loop."""
        self.epoch = epoch

    def count_step(self) -> None:
        """Count a step that an optimizer made."""
        self.step += 1

    def step_in(self, state: Any) -> int | None:
        """Number of steps of a run when its state was saved.

        Args:
            state: the loaded state, valid or not.

        Returns:
            The count; `None`, with a warning, if it is no state of a loop.

        Raises:
            MisconfigurationError: if it is none and the settings are strict.
        """
        if is_state(state):
            return steps_counted_in(state, otherwise=self.step, warn_once=self._warn_once)
        message = (
            f"This is no state of `watch_heads`, it has {contents_of(state)}: load what `heads.state_dict()` gave."
        )
        if self._settings.strict:
            raise MisconfigurationError(message)
        self._warn_once.warn("no state", f"{message} Steps are counted from {self.step} on, alerts start anew.")
        return None

    def go_back_to(self, step: int) -> None:
        """Count from the step of a checkpoint on."""
        self.step, self.is_stopped = step, False

    def state_dict(self) -> dict[str, Any]:
        """State for a resumed run, besides that of the session."""
        return {"step": self.step, "tensorboard": self.dashboards.folder}

    def stop(self) -> None:
        """Request the end of the loop."""
        self.is_stopped = True

    def save(self, name: str) -> str:
        """Save a checkpoint with the user's function; return where."""
        if self._settings.save_checkpoint is None:
            raise MisconfigurationError("No checkpoint can be saved without watch_heads(..., save_checkpoint=...).")
        place = self._settings.save_checkpoint(name)
        return name if place is None else str(place)

    def sinks(
        self, monitor: HeadDiversityMonitor, history: History | None, state: Mapping[str, Any] | None
    ) -> list[Sink]:
        """The sinks that the user passed; on every rank also the latest curves."""
        latest = Latest(self._settings.curves, self._keep)
        if not self.is_first_rank:
            return [latest]
        self.dashboards.close()
        board, run = self._settings.tensorboard, self._settings.wandb
        layers = [layer.name for layer in monitor.layers]
        if board is not None and board is not False:
            self.dashboards.tensorboard(board, self.folder / "hdi", state, layers)
        if run is not None:
            self.dashboards.wandb(run, layers, "hdi_step", is_guest=True)
        return [latest, *self.dashboards.sinks(history, self.print, "the dashboards", is_resumed=state is not None)]

    def _keep(self, curves: dict[str, float]) -> None:
        self.latest = curves
