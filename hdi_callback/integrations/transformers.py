"""`HDITrainerCallback`: the watch inside a transformers `Trainer`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import transformers
from torch.optim import Optimizer

from hdi_callback.attention.padding import PaddingChoice
from hdi_callback.errors import MisconfigurationError
from hdi_callback.integrations.optimizers import inner_optimizer
from hdi_callback.integrations.outlets import Dashboards, alert_sinks, picture_sinks, print_layers
from hdi_callback.monitoring.alerts import Alert, Rule
from hdi_callback.monitoring.atomic import write_atomically
from hdi_callback.monitoring.history import History
from hdi_callback.monitoring.host import PlainHost
from hdi_callback.monitoring.interventions import Intervention
from hdi_callback.monitoring.monitor import HeadDiversityMonitor
from hdi_callback.monitoring.notebook import run_summary
from hdi_callback.monitoring.position import Position
from hdi_callback.monitoring.session import Session
from hdi_callback.monitoring.settings import DEFAULT_MEMORY, Method, Settings
from hdi_callback.monitoring.sink import Sink
from hdi_callback.monitoring.state import read_state
from hdi_callback.monitoring.warn_once import WarnOnce

_STATE = "hdi_state.json"
_KEY = "hdi_callback"  # in the trainer's own state; no name of a class, or the trainer would make one anew


class HDITrainerCallback(transformers.TrainerCallback):
    """Watch the diversity of the attention heads of a model that a transformers `Trainer` trains.

    Reads, judges and intervenes as `HDICallback` does. The history is ``hdi/history.jsonl`` under the output
    directory. Where ``report_to`` names them, TensorBoard gets a run ``runs/hdi`` beside the trainer's own, and the W&B
    run of the trainer gets the curves and alerts. A checkpoint keeps the state of rules and interventions in
    ``hdi_state.json``.

    The trainer clips gradients before it calls its callbacks, so that what `DiversityPenalty` adds is not clipped.

    Args:
        every_n_steps: optimizer steps between readings, as `TrainerState.global_step` counts them.
        metrics: names of the curves to log, see `HDICallback`.
        include: patterns of layer names to watch; all by default.
        exclude: patterns of layer names to leave out.
        max_tokens: largest number of tokens kept per layer for one reading of the head outputs.
        padding: which tokens are padding, whose head outputs are left out: ``"auto"`` for what masks tell, the number
            of the token that is padding, a function of the model's arguments, or `None` to count every token, see
            `HDICallback`.
        rank_tol: singular values below ``rank_tol`` times a head's largest do not count.
        method: how overlaps are computed, see `head_diversity`.
        memory_budget: bytes that reading weights may take at a time, beyond what the largest layer needs alone; less
            of it is slower.
        history: write the history file, to its usual place or to the path given.
        matrices_every: the history keeps the heads-by-heads matrices of every so many readings, and those of step 0, of
            the end and of alerts besides; 0 for none at all.
        history_mb: megabytes that the history may have on the disk; when it has more, the matrices of older readings
            are thinned. `None` for no limit.
        figures_every: draw the worst alignment of all layers and the heads of the worst ones at every so many readings,
            for the loggers that take pictures and into ``figures`` beside the history; 0 for none. Drawing takes at
            most 2% of the run's time while it goes on, and needs matplotlib.
        alerts: ``"default"``, rules of your own, or `None` for no alerts.
        thresholds: limits of the default rules by pattern of layer names.
        loaded: whether the weights had been trained before this run, so that what they are at its start is no alarm;
            ``"auto"`` tells it from the weights of each layer.
        on_alert: a function that is called with each `Alert`, on the first rank.
        interventions: what to do about alerts; nothing by default.
        strict: make errors of two warnings: that the model has no readable attention layer, and that the checkpoint to
            resume from is of a model with other heads.
        check_heads: check once, on a few tokens of the first forward that is read, that every layer computes attention
            with the heads that were found; a layer that does not is left out, with a warning that shows why.
        process_group: the ranks that measure together: ``"auto"`` for all of them, a process group, or `None` for each
            rank alone, see `HDICallback`.
        verbose: print once at start which layers were found.

    Raises:
        MisconfigurationError: if an argument cannot work.

    Example:
        >>> callback = HDITrainerCallback(every_n_steps=50)  # transformers.Trainer(..., callbacks=[callback])
    """

    def __init__(
        self,
        every_n_steps: int = 50,
        *,
        metrics: Sequence[str] | None = None,
        include: Sequence[str] | None = None,
        exclude: Sequence[str] | None = None,
        max_tokens: int = 2048,
        padding: PaddingChoice = "auto",
        rank_tol: float = 1e-6,
        method: Method = "whiten",
        memory_budget: int = DEFAULT_MEMORY,
        history: bool | str = True,
        matrices_every: int = 10,
        history_mb: float | None = 200,
        figures_every: int = 20,
        alerts: Literal["default"] | Sequence[Rule] | None = "default",
        thresholds: dict[str, dict[str, float | None]] | None = None,
        loaded: bool | Literal["auto"] = "auto",
        on_alert: Callable[[Alert], Any] | None = None,
        interventions: Sequence[Intervention] | None = None,
        strict: bool = False,
        check_heads: bool = True,
        process_group: Any = "auto",
        verbose: bool = True,
    ) -> None:
        self._settings = Settings.of(locals())
        self._warn_once = WarnOnce()
        self._session: Session | None = None
        self._host: _TrainerHost | None = None
        self._optimizer: Optimizer | None = None

    @property
    def history_path(self) -> Path | None:
        """Where the history of the run is; `None` before training and when there is none."""
        return None if self._session is None else self._session.history_path

    def _repr_html_(self) -> str:
        monitor = None if self._session is None else self._session.monitor
        layers, refused = ([], []) if monitor is None else (monitor.layers, monitor.refused)
        return run_summary("HDITrainerCallback", layers, refused, self.active_alerts, self.history_path)

    @property
    def active_alerts(self) -> list[Alert]:
        """The alerts that are active now."""
        return [] if self._session is None else self._session.active_alerts

    def __getstate__(self) -> dict[str, Any]:
        """Leave the run behind: a copy is as new, and can be given to another trainer or process."""
        return {**self.__dict__, **dict.fromkeys(("_session", "_host", "_optimizer")), "_warn_once": WarnOnce()}

    # What a Lightning trainer asks of a callback before it runs anything.

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
        """Let that error through."""

    def close(self) -> None:
        """Publish what was read, and leave no hook behind, after a training that an exception ended.

        The trainer tells its callbacks of no exception. Until this is called, or the next training begins, hooks stay
        on the model if the step that failed was one that is watched. Calling it again does nothing.
        """
        if self._session is not None:
            with self._warn_once.guard("closing the session"):
                self._session.flush(is_broken=True)
            self._session.close()
        if self._host is not None:
            self._host.dashboards.close()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Find the layers, install the hooks, open the history, and take up where a checkpoint left off."""
        self.close()
        self._optimizer = inner_optimizer(kwargs["optimizer"])
        self._host = _TrainerHost(args, state, control, kwargs["optimizer"], self._settings, self._warn_once)
        self._session = Session.start(kwargs["model"], self._host, self._settings, warn_once=self._warn_once)
        # Every rank takes up the same state, though its own disk may not hold one.
        found = self._host.broadcast(self._restored(args, state))
        restored = self._session.accept(found, step=state.global_step)
        if self._host.is_first_rank:
            print_layers(self._session, self._settings)
        self._session.open(restored)
        self._session.monitor.suspend()

    # Nothing tells a callback that an evaluation begins, only that it has ended. So the hooks are on the model within
    # the forwards and backwards of a step alone; whatever else runs the model finds it as it is without a callback.

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Put the hooks on, and arm the capture when a reading is due."""
        if self._session is not None:
            self._session.monitor.resume()
            self._session.before_forward()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Read while the weights are still those of the forward; let interventions act on the gradients."""
        if self._session is not None and self._optimizer is not None:
            self._session.after_backward()
            self._session.before_optimizer_step(self._optimizer)
            self._session.monitor.suspend()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Publish the readings whose numbers have arrived."""
        if self._session is not None:
            self._session.after_step()
            self._session.monitor.suspend()
            # The trainer writes this into the checkpoint itself, wherever that is moved and before `on_save` is called.
            with self._warn_once.guard("keeping the identity of the run"):
                identity = {**self._session.identity(), **self._placed()}
                state.stateful_callbacks[_KEY] = {"args": {}, "attributes": identity}

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Keep the state of rules and interventions in the checkpoint."""
        if self._session is None:
            return
        kept = self._session.state_dict()  # on every rank, as pending readings are published
        if state.is_world_process_zero:
            with self._warn_once.guard("saving the state of head diversity"):
                data = json.dumps({**kept, **self._placed()}).encode()
                write_atomically(_checkpoint(args, state) / _STATE, data)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Read the final weights, publish everything, and leave no hook behind."""
        if self._session is not None and self._host is not None:
            self._session.finish()
            self._host.dashboards.close()

    def _placed(self) -> dict[str, Any]:
        return {"tensorboard": None if self._host is None else self._host.dashboards.folder}

    def _restored(self, args: Any, state: Any) -> Any:
        """Find the state of the run: of its identity the trainer's own file tells, of all else ours."""
        if state.global_step == 0:
            return None
        held = (state.stateful_callbacks or {}).get(_KEY)
        identity = held.get("attributes") if isinstance(held, Mapping) else None
        run = identity.get("run") if isinstance(identity, Mapping) else None
        named = getattr(args, "resume_from_checkpoint", None)
        places = [Path(named) / _STATE] if isinstance(named, str) else []
        places.append(_checkpoint(args, state) / _STATE)
        # A checkpoint may have been renamed, and another run may have left one of this step.
        renamed = sorted(Path(args.output_dir).glob(f"*/{_STATE}")) if run is not None else []
        for place in dict.fromkeys([*places, *renamed]):
            found = read_state(place, self._warn_once) if place.is_file() else None
            if found is None or (run is not None and found.get("run") != run):
                continue
            if place in places or (identity is not None and found.get("last_step") == identity.get("last_step")):
                return found
        if identity is None:
            self._warn_once.warn(
                "no state", f"The checkpoint at step {state.global_step} holds no {_STATE}; alerts start anew."
            )
        return identity


class _TrainerHost(PlainHost):
    """What a transformers trainer offers."""

    def __init__(
        self, args: Any, state: Any, control: Any, optimizer: Any, settings: Settings, warn_once: WarnOnce
    ) -> None:
        super().__init__(settings.process_group)
        self._args, self._state, self._control, self._settings = args, state, control, settings
        self._optimizers, self._scaler = [inner_optimizer(optimizer)], getattr(optimizer, "scaler", None)
        self.dashboards = Dashboards(settings.metrics, warn_once)

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
        # The trainer has taken the scale off if it has clipped.
        is_scaled = self._scaler is not None and not self._args.max_grad_norm > 0
        return float(self._scaler.get_scale()) if is_scaled and self._scaler is not None else 1.0

    def stop(self) -> None:
        self._control.should_training_stop = True

    def save(self, name: str) -> str:
        self._control.should_save = True  # the trainer saves at the end of this step, under its own name
        return str(_checkpoint(self._args, self._state))

    def sinks(
        self, monitor: HeadDiversityMonitor, history: History | None, state: Mapping[str, Any] | None
    ) -> list[Sink]:
        sinks: list[Sink] = []
        if not self.is_first_rank:
            return sinks
        wanted = self._args.report_to or []
        layers = [layer.name for layer in monitor.layers]
        if "tensorboard" in wanted:
            sinks += self.dashboards.tensorboard(True, self.folder / "runs" / "hdi", state, layers)
        # The trainer has begun its run by importing the package.
        run = getattr(sys.modules.get("wandb"), "run", None) if "wandb" in wanted else None
        if run is not None:
            sinks += self.dashboards.wandb(run, layers, "train/global_step")
        outlets = self.dashboards.outlets
        sinks += picture_sinks(self._settings, history, outlets, is_resumed=state is not None)
        return [*sinks, *alert_sinks(self._settings, history, self.say, "TensorBoard and W&B")]


def _checkpoint(args: Any, state: Any) -> Path:
    """Where the trainer keeps its checkpoint of this step."""
    name = f"checkpoint-{state.global_step}"
    usual = Path(args.output_dir) / name
    if not getattr(state, "is_hyper_param_search", False):
        return usual
    # Each trial has a folder of its own, whose name no callback is told: that which was written last.
    places = [place for place in Path(args.output_dir).glob(f"*/{name}") if place.is_dir()]
    return max(places, key=lambda place: place.stat().st_mtime_ns, default=usual)
