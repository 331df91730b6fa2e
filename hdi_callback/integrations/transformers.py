"""`HDITrainerCallback`: the monitor inside a transformers `Trainer`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch.optim import Optimizer
from typing_extensions import Unpack

from hdi_callback.arguments import function
from hdi_callback.dashboards import Curves
from hdi_callback.errors import MisconfigurationError
from hdi_callback.guard import guarded
from hdi_callback.integrations.base import MISUSE, Watcher
from hdi_callback.integrations.trackers import Log, tracker_sinks, trainers_callbacks
from hdi_callback.record import Record, Sink
from hdi_callback.session import Session, Settings
from hdi_callback.session.settings import Options, takes_settings

try:
    import transformers
except ImportError as error:
    raise ImportError(
        "HDITrainerCallback needs transformers 4.46 or newer: pip install 'hdi-callback[transformers]'."
    ) from error

_KEY = "hdi_callback"  # in the trainer's own state; under the name of a class the trainer would make an instance of it
_STATE_FILE = "trainer_state.json"


@takes_settings
class HDITrainerCallback(Watcher, transformers.TrainerCallback):
    """Watch the diversity of the attention heads of a model that a transformers `Trainer` trains.

    Reads, judges and intervenes as `HDICallback` does. The history is ``hdi/history.jsonl`` under the output
    directory. Curves go where the trainer's go, into the run of TensorBoard, W&B, MLflow, Trackio, Comet, SwanLab,
    DVCLive or ClearML that ``report_to`` names; a warning names one that gets none. A checkpoint keeps what a resumed
    run needs in the trainer's state.

    The trainer does not notify its callbacks of exceptions: until `close` is called, or the next training begins,
    hooks may stay on the model.

    Args:
        every_n_steps: optimizer steps between readings.
        log: a function that takes each reading's curves, a dictionary, and its step, beside what ``report_to`` names.
        settings: see `Settings`.

    Raises:
        MisconfigurationError: if an argument cannot work.

    Example:
        >>> callback = HDITrainerCallback(every_n_steps=50)  # transformers.Trainer(..., callbacks=[callback])
    """

    state_key = "HDITrainerCallback"  # read by a Lightning trainer before it calls `setup`

    def __init__(self, every_n_steps: int = 50, *, log: Log | None = None, **settings: Unpack[Options]) -> None:
        super().__init__(Settings(every_n_steps=every_n_steps, **settings))
        self._log = function("log", log, "log=mlflow.log_metrics")
        self._logged_loss: float | None = None

    def setup(self, *args: Any, **kwargs: Any) -> None:
        """Refuse the trainer of Lightning, which calls this first."""
        raise MisconfigurationError(
            "HDITrainerCallback is for a transformers Trainer, and a Lightning trainer takes HDICallback: write "
            "L.Trainer(callbacks=[HDICallback(...)])."
        )

    def on_exception(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: Lightning re-raises the error of `setup`."""

    # A callback is notified of the end of an evaluation, not of its beginning: the session rests between the steps.

    @guarded("starting to watch heads", passes=MISUSE)
    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Install the hooks, and resume from the checkpoint, if the trainer does."""
        self.close()
        trainer = _TransformersTrainer(args, state, control, kwargs["optimizer"], self._settings, self._log)
        self._start(kwargs["model"], trainer, self._settings)
        assert self._session is not None
        self._session.pause()
        if state.global_step > 0:
            self._restored = (state.stateful_callbacks or {}).get(_KEY)
            self._resume()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Capture the forward that follows when a reading is due."""
        self._tell(Session.go_on, Session.before_forward)

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Read after the first backward, where gradients are accumulated."""
        self._tell(Session.after_backward)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Read while the weights are still those of the forward."""
        self._tell(Session.after_backward)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Publish the readings whose numbers have arrived."""
        # Of several forwards or processes the output has a share of the loss, and the trainer logs the whole.
        is_whole = args.gradient_accumulation_steps * args.world_size == 1

        def after_step(session: Session) -> None:
            loss = session.monitor.output_loss if is_whole else None
            session.after_step(self._logged_loss if loss is None else loss)

        self._tell(Session.pause, after_step)
        self._keep_state(state, control)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Keep the state, if the trainer saves a checkpoint now."""
        self._keep_state(state, control)

    @guarded("saving the state of head diversity")
    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Keep the state in a checkpoint that another callback has asked for after this one was called."""
        heads_state = (state.stateful_callbacks or {}).get(_KEY)
        file = Path(args.output_dir) / f"checkpoint-{state.global_step}" / _STATE_FILE
        if (
            heads_state is not None
            and heads_state["step"] != state.global_step
            and state.is_world_process_zero
            and file.is_file()
        ):
            state.stateful_callbacks[_KEY] = self.state_dict()
            state.save_to_json(str(file))

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Take the loss that is logged; finish at the last log, while the runs that the trainer reports to are open."""
        loss = (logs or {}).get("loss")
        self._logged_loss = float(loss) if isinstance(loss, int | float) else self._logged_loss
        if "train_runtime" in (logs or {}):
            self._tell(Session.finish)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Read the final weights, publish everything, and remove all hooks."""
        self._tell(Session.finish)

    @guarded("keeping the state of head diversity")
    def _keep_state(self, state: Any, control: Any) -> None:
        if self._session is not None and (control.should_save or _KEY not in state.stateful_callbacks):
            state.stateful_callbacks[_KEY] = self.state_dict()


class _TransformersTrainer:
    """A transformers trainer as the `Trainer` of a session."""

    def __init__(
        self, args: Any, state: Any, control: Any, optimizer: Any, settings: Settings, log: Log | None
    ) -> None:
        self._log, self._callbacks = log, trainers_callbacks()
        self._args, self._state, self._control, self._metrics = args, state, control, settings.metrics or ()
        self.optimizers: list[Optimizer] = [getattr(optimizer, "optimizer", optimizer)]

    @property
    def is_first_rank(self) -> bool:
        return bool(self._state.is_world_process_zero)

    @property
    def folder(self) -> Path:
        return Path(self._args.output_dir)

    @property
    def step(self) -> int:
        return int(self._state.global_step)

    @property
    def epoch(self) -> int | None:
        return None if self._state.epoch is None else int(self._state.epoch)

    def stop(self) -> None:
        self._control.should_training_stop = True

    def save(self, name: str) -> str:
        self._control.should_save = True  # the trainer saves at the end of this step, under its own name
        return str(self.folder / f"checkpoint-{self.step}")

    def print(self, text: str) -> None:
        print(text)  # noqa: T201

    def sinks(self, past: Sequence[Record]) -> list[Sink]:
        if not self.is_first_rank:
            return []
        sinks: list[Sink] = [] if self._log is None else [Curves(self._log, self._metrics)]
        wanted = self._args.report_to or []
        return sinks + tracker_sinks(self._callbacks, wanted, self._metrics, past)
