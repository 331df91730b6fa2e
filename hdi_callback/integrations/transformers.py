"""`HDITrainerCallback`: the monitor inside a transformers `Trainer`."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import transformers
from torch.optim import Optimizer

from hdi_callback.errors import MisconfigurationError
from hdi_callback.guard import attempt_each, guarded
from hdi_callback.integrations.checkpoint_folder import KEY, STATE, checkpoint_of, restored_from
from hdi_callback.integrations.optimizers import inner_optimizer
from hdi_callback.integrations.outlets import Dashboards
from hdi_callback.integrations.shell import MISUSE, STARTING, WATCHING, Shell
from hdi_callback.integrations.signature import documented_by, method_of
from hdi_callback.monitoring.atomic import write_atomically
from hdi_callback.monitoring.history import History
from hdi_callback.monitoring.monitor import HeadDiversityMonitor
from hdi_callback.monitoring.session.host import PlainHost
from hdi_callback.monitoring.session.position import Position
from hdi_callback.monitoring.session.session import Session
from hdi_callback.monitoring.session.settings import Settings
from hdi_callback.monitoring.session.sink import Sink
from hdi_callback.monitoring.warn_once import WarnOnce


@documented_by(Settings)
class HDITrainerCallback(Shell, transformers.TrainerCallback):
    """Watch the diversity of the attention heads of a model that a transformers `Trainer` trains.

    Reads, judges and intervenes as `HDICallback` does. The history is ``hdi/history.jsonl`` under the output
    directory. Where ``report_to`` names them, TensorBoard gets a run ``runs/hdi`` beside the trainer's own, and the W&B
    run of the trainer gets the curves and alerts. A checkpoint keeps the state of rules and interventions in
    ``hdi_state.json``.

    The trainer clips gradients before it calls its callbacks, so that what `DiversityPenalty` adds is not clipped.

    Args:
        settings: the arguments of `Settings`, by their names.

    Raises:
        MisconfigurationError: if an argument cannot work.

    Example:
        >>> callback = HDITrainerCallback(every_n_steps=50)  # transformers.Trainer(..., callbacks=[callback])
    """

    @method_of(Settings)
    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)

    # The attributes that a Lightning trainer reads before it calls anything.

    state_key = "HDITrainerCallback"

    def setup(self, *args: Any, **kwargs: Any) -> None:
        """Refuse the trainer of Lightning.

        Args:
            args: of that trainer.
            kwargs: of that trainer.

        Raises:
            MisconfigurationError: always.
        """
        raise MisconfigurationError(
            "HDITrainerCallback is for a transformers Trainer, and a Lightning trainer takes HDICallback: write "
            "L.Trainer(callbacks=[HDICallback(...)])."
        )

    def on_exception(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: Lightning re-raises the error of `setup`."""

    @guarded("closing the session")
    def close(self) -> None:
        """Publish pending readings and remove all hooks, after a training that an exception ended.

        The trainer does not notify its callbacks of exceptions. Until this is called, or the next training begins,
        hooks may stay on the model. Calling it again does nothing.
        """
        super().close()
        if self._host is not None:
            self._host.dashboards.close()

    @guarded(STARTING, passes=MISUSE)
    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Find the layers, install the hooks, open the history, and restore the state of a checkpoint."""
        self.close()
        self._forget()
        host = _TrainerHost(args, state, control, kwargs["optimizer"], self._settings, self._warn_once)
        session = self._start(kwargs["model"], host, self._settings)
        # Every rank restores the same state, even if its own disk has none.
        self._restored = session.from_first_rank(restored_from(args, state, self._warn_once))
        self._open()
        session.monitor.suspend()

    # A callback is notified of the end of an evaluation, not of its beginning. So the hooks are on the model only
    # during the forwards and backwards of a step; any other call sees the model without hooks.

    @guarded(WATCHING)
    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Install the hooks, and arm the capture when a reading is due."""
        session = self._watching
        if session is not None:
            session.monitor.resume()
            session.before_forward()

    @guarded(WATCHING)
    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Read while the weights are still those of the forward; let interventions act on the gradients."""
        session = self._watching
        if session is not None:
            try:
                session.after_backward()
                session.before_optimizer_step(*self._host.optimizers)
            finally:
                session.monitor.suspend()

    @guarded(WATCHING)
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Publish the readings whose numbers have arrived."""
        session = self._watching
        if session is not None:
            try:
                session.after_step()
            finally:
                session.monitor.suspend()
            # The trainer writes this into the checkpoint itself, wherever that is moved and before `on_save` is called.
            with self._warn_once.guard("keeping the identity of the run"):
                identity = {**session.identity(), **self._placed()}
                state.stateful_callbacks[KEY] = {"args": {}, "attributes": identity}

    @guarded("saving the state of head diversity")
    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Keep the state of rules and interventions in the checkpoint."""
        session = self._watching
        if session is None:
            return
        kept = session.state_dict()  # on every rank, as pending readings are published
        if state.is_world_process_zero:
            with self._warn_once.guard("saving the state of head diversity"):
                data = json.dumps({**kept, **self._placed()}).encode()
                write_atomically(checkpoint_of(args, state) / STATE, data)

    @guarded("the last reading", otherwise=lambda self: self.close())
    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Read the final weights, publish everything, and remove all hooks."""
        session = self._watching
        if session is not None:
            attempt_each([session.finish, self._host.dashboards.close])

    @property
    def _watching(self) -> Session | None:
        return None if self._could_not_start else self._session

    def _placed(self) -> dict[str, Any]:
        return {"tensorboard": self._host.dashboards.folder}


class _TrainerHost(PlainHost):
    """A transformers trainer as a `Host`."""

    def __init__(
        self, args: Any, state: Any, control: Any, optimizer: Any, settings: Settings, warn_once: WarnOnce
    ) -> None:
        super().__init__(settings.process_group)
        self._args, self._state, self._control = args, state, control
        self._optimizers, self._scaler = [inner_optimizer(optimizer)], getattr(optimizer, "scaler", None)
        self.dashboards = Dashboards(settings, warn_once)

    @property
    def is_first_rank(self) -> bool:
        return bool(self._state.is_world_process_zero)

    @property
    def folder(self) -> Path:
        return Path(self._args.output_dir)

    @property
    def position(self) -> Position:
        epoch = self._state.epoch
        return Position(self._state.global_step, None if epoch is None else int(epoch))

    @property
    def optimizers(self) -> Sequence[Optimizer]:
        return self._optimizers

    def loss_scale(self, optimizer: Optimizer) -> float:
        # The trainer has unscaled the gradients if it has clipped.
        is_scaled = self._scaler is not None and not self._args.max_grad_norm > 0
        return float(self._scaler.get_scale()) if is_scaled and self._scaler is not None else 1.0

    def stop(self) -> None:
        self._control.should_training_stop = True

    def save(self, name: str) -> str:
        self._control.should_save = True  # the trainer saves at the end of this step, under its own name
        return str(checkpoint_of(self._args, self._state))

    def sinks(
        self, monitor: HeadDiversityMonitor, history: History | None, state: Mapping[str, Any] | None
    ) -> list[Sink]:
        if not self.is_first_rank:
            return []
        self.dashboards.close()
        wanted, layers = self._args.report_to or [], [layer.name for layer in monitor.layers]
        if "tensorboard" in wanted:
            self.dashboards.tensorboard(True, self.folder / "runs" / "hdi", state, layers)
        # The trainer starts its W&B run, and has imported the package then.
        run = getattr(sys.modules.get("wandb"), "run", None) if "wandb" in wanted else None
        if run is not None:
            self.dashboards.wandb(run, layers, "train/global_step")
        return self.dashboards.sinks(history, self.print, "TensorBoard and W&B", is_resumed=state is not None)
