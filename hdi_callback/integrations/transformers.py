"""`HDITrainerCallback`: the watch inside a transformers `Trainer`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import transformers
from torch import nn
from torch.optim import Optimizer

from hdi_callback.attention import AttentionLayer
from hdi_callback.attention.padding import PaddingChoice
from hdi_callback.dashboards import console, tensorboard, wandb
from hdi_callback.errors import MisconfigurationError
from hdi_callback.integrations.optimizers import inner_optimizer
from hdi_callback.monitoring.alerts import Alert, Alerts, Rule
from hdi_callback.monitoring.atomic import write_atomically
from hdi_callback.monitoring.faults import Faults
from hdi_callback.monitoring.history import History
from hdi_callback.monitoring.interventions import Intervention
from hdi_callback.monitoring.monitor import HeadDiversityMonitor
from hdi_callback.monitoring.place import place_history
from hdi_callback.monitoring.ranks import refuse_apart, share_within
from hdi_callback.monitoring.schedule import Schedule
from hdi_callback.monitoring.settings import Method, Settings
from hdi_callback.monitoring.state import read_state
from hdi_callback.monitoring.watch import Follower, OnAlert, Watch, check_patterns, state_of_this_model

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
        history: write the history file, to its usual place or to the path given.
        alerts: ``"default"``, rules of your own, or `None` for no alerts.
        thresholds: limits of the default rules by pattern of layer names.
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
        history: bool | str = True,
        alerts: Literal["default"] | Sequence[Rule] | None = "default",
        thresholds: dict[str, dict[str, float | None]] | None = None,
        on_alert: Callable[[Alert], Any] | None = None,
        interventions: Sequence[Intervention] | None = None,
        strict: bool = False,
        check_heads: bool = True,
        process_group: Any = "auto",
        verbose: bool = True,
    ) -> None:
        self._settings = settings = Settings(
            every_n_steps=every_n_steps,
            metrics=metrics,
            include=include,
            exclude=exclude,
            max_tokens=max_tokens,
            padding=padding,
            rank_tol=rank_tol,
            method=method,
            history=history,
            alerts=alerts,
            thresholds=thresholds,
            on_alert=on_alert,
            interventions=interventions,
            strict=strict,
            check_heads=check_heads,
            process_group=process_group,
            verbose=verbose,
        )
        self._every = settings.every_n_steps
        self._metrics: Sequence[str] = settings.metrics or ()
        self._rules = settings.rules
        self._interventions = tuple(settings.interventions or ())
        self._history_choice, self._on_alert, self._verbose = settings.history, settings.on_alert, settings.verbose
        self._faults = Faults()
        self._watch: Watch | None = None
        self._optimizer: Optimizer | None = None
        self._board: tensorboard.Board | None = None

    @property
    def history_path(self) -> Path | None:
        """Where the history of the run is; `None` before training and when there is none."""
        return None if self._watch is None or self._watch.history is None else self._watch.history.path

    @property
    def active_alerts(self) -> list[Alert]:
        """The alerts that stand now."""
        return [] if self._watch is None or self._watch.alerts is None else self._watch.alerts.active

    def __getstate__(self) -> dict[str, Any]:
        """Leave the run behind: a copy is as new, and can be given to another trainer or process."""
        return {**self.__dict__, **dict.fromkeys(("_watch", "_optimizer", "_board")), "_faults": Faults()}

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
        """Make known what was read, and leave no hook behind, after a training that an exception ended.

        The trainer tells its callbacks of no exception. Until this is called, or the next training begins, hooks stay
        on the model if the step that failed was one that is watched. Calling it again does nothing.
        """
        if self._watch is not None:
            with self._faults.contained("closing the watch"):
                self._watch.flush(is_broken=True)
            self._watch.close()
        if self._board is not None:
            with self._faults.contained("closing TensorBoard"):
                self._board.writer.close()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Find the layers, install the hooks, open the history, and take up where a checkpoint left off."""
        self.close()
        self._board = None
        model: nn.Module = kwargs["model"]
        self._optimizer = inner_optimizer(kwargs["optimizer"])
        refuse_apart(self._settings.process_group, [item.name for item in self._interventions if not item.dry_run])
        monitor = HeadDiversityMonitor(model, **self._settings.measuring)
        names = [layer.name for layer in monitor.layers] + [refusal.name for refusal in monitor.refused]
        for what, patterns in self._settings.layer_patterns.items():
            check_patterns(what, patterns, names)
        is_first = bool(state.is_world_process_zero)
        is_strict = self._settings.strict
        restored = state_of_this_model(
            self._restored(args, state),
            monitor.layers,
            step=state.global_step,
            is_strict=is_strict,
            faults=self._faults,
        )
        history = None
        if is_first:
            with self._faults.contained("opening the history"):
                history = place_history(self._history_choice, args.output_dir, state=restored, say=self._faults.say)
        if self._verbose and is_first:
            with self._faults.contained("printing the layers"):
                console.print_layers(
                    monitor.layers, monitor.refused, every_n_steps=self._every, interventions=self._interventions
                )
        self._watch = Watch(
            monitor,
            Schedule(self._every),
            history=history,
            alerts=None if self._rules is None else Alerts(self._rules, monitor.facts, self._faults),
            interventions=self._interventions,
            training=_TrainerTraining(args, state, control, monitor, kwargs["optimizer"]),
            followers=self._followers(args, monitor, history, restored) if is_first else (),
            share=share_within(self._settings.process_group),
            faults=self._faults,
        )
        self._watch.begin(state.global_step, restored)
        monitor.suspend()

    # Nothing tells a callback that an evaluation begins, only that it has ended. So the hooks are on the model within
    # the forwards and backwards of a step alone; whatever else runs the model finds it as it is without a callback.

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Put the hooks on, and arm the capture when a reading is due."""
        if self._watch is not None:
            self._watch.monitor.resume()
            self._watch.before_forward(state.global_step)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Read while the weights are still those of the forward; let interventions act on the gradients."""
        if self._watch is not None and self._optimizer is not None:
            self._watch.after_backward(state.global_step, epoch=_epoch(state))
            self._watch.before_optimizer_step(self._optimizer)
            self._watch.monitor.suspend()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Make known the readings that have arrived."""
        if self._watch is not None:
            self._watch.after_step(state.global_step, epoch=_epoch(state))
            self._watch.monitor.suspend()
            # The trainer writes this into the checkpoint itself, wherever that is moved and before `on_save` is called.
            with self._faults.contained("keeping the identity of the run"):
                identity = {**self._watch.identity(), **self._placed()}
                state.stateful_callbacks[_KEY] = {"args": {}, "attributes": identity}

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Keep the state of rules and interventions in the checkpoint."""
        if self._watch is None:
            return
        kept = self._watch.state_dict()  # on every rank, as readings on the way are made known
        if state.is_world_process_zero:
            with self._faults.contained("saving the state of head diversity"):
                data = json.dumps({**kept, **self._placed()}).encode()
                write_atomically(_checkpoint(args, state) / _STATE, data)

    def _placed(self) -> dict[str, Any]:
        return {"tensorboard": None if self._board is None else str(self._board.writer.log_dir)}

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Read the final weights, make everything known, and leave no hook behind."""
        if self._watch is not None:
            self._watch.finish(state.global_step, epoch=_epoch(state))
        if self._board is not None:
            with self._faults.contained("closing TensorBoard"):
                self._board.writer.close()

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
            found = read_state(place, self._faults) if place.is_file() else None
            if found is None or (run is not None and found.get("run") != run):
                continue
            if place in places or (identity is not None and found.get("last_step") == identity.get("last_step")):
                return found
        if identity is None:
            self._faults.say(
                "no state", f"The checkpoint at step {state.global_step} holds no {_STATE}; alerts start anew."
            )
        return identity

    def _followers(
        self, args: Any, monitor: HeadDiversityMonitor, history: History | None, restored: Mapping[str, Any] | None
    ) -> list[Follower]:
        followers: list[Follower] = []
        wanted = args.report_to or []
        if "tensorboard" in wanted:
            with self._faults.contained("opening TensorBoard"):
                from torch.utils.tensorboard import SummaryWriter

                folder = tensorboard.place_board(Path(args.output_dir) / "runs" / "hdi", restored)
                last = None if restored is None else restored.get("last_step")
                # What an interrupted run has written beyond its checkpoint is to be hidden.
                writer = SummaryWriter(log_dir=str(folder), purge_step=None if last is None else last + 1)
                self._board = tensorboard.Board(writer, self._metrics)
                followers.append(self._board)
        if "wandb" in wanted:
            with self._faults.contained("joining the W&B run"):
                import wandb as weights_and_biases

                if weights_and_biases.run is not None:
                    names = [layer.name for layer in monitor.layers]
                    run = weights_and_biases.run
                    followers.append(wandb.RunLog(run, self._metrics, names, "train/global_step"))
        elsewhere = "TensorBoard and W&B" if history is None else history
        followers.append(console.AlertLines(print, elsewhere))
        if self._on_alert is not None:
            followers.append(OnAlert(self._on_alert))
        return followers


class _TrainerTraining:
    """What interventions may do to a transformers trainer."""

    def __init__(self, args: Any, state: Any, control: Any, monitor: HeadDiversityMonitor, optimizer: Any) -> None:
        self._args, self._state, self._control, self._monitor = args, state, control, monitor
        self.optimizers = [inner_optimizer(optimizer)]
        self._scaler = getattr(optimizer, "scaler", None)

    @property
    def layers(self) -> Mapping[str, AttentionLayer]:
        return {layer.name: layer for layer in self._monitor.layers}

    def loss_scale(self, optimizer: Optimizer) -> float:
        # The trainer has taken the scale off if it has clipped.
        is_scaled = self._scaler is not None and not self._args.max_grad_norm > 0
        return float(self._scaler.get_scale()) if is_scaled and self._scaler is not None else 1.0

    def stop(self) -> None:
        self._control.should_training_stop = True

    def save_checkpoint(self, name: str) -> str:
        self._control.should_save = True  # the trainer saves at the end of this step, under its own name
        return str(_checkpoint(self._args, self._state))


def _checkpoint(args: Any, state: Any) -> Path:
    """Where the trainer keeps its checkpoint of this step."""
    name = f"checkpoint-{state.global_step}"
    usual = Path(args.output_dir) / name
    if not getattr(state, "is_hyper_param_search", False):
        return usual
    # Each trial has a folder of its own, whose name no callback is told: that which was written last.
    places = [place for place in Path(args.output_dir).glob(f"*/{name}") if place.is_dir()]
    return max(places, key=lambda place: place.stat().st_mtime_ns, default=usual)


def _epoch(state: Any) -> int | None:
    return None if state.epoch is None else int(state.epoch)
