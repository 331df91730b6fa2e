"""`HDITrainerCallback`: the monitor inside a transformers `Trainer`."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import Unpack

from hdi_callback.arguments import function
from hdi_callback.attention.calls import running_frames
from hdi_callback.errors import MisconfigurationError
from hdi_callback.guard import guarded, warn
from hdi_callback.integrations.base import MISUSE, Log, Watcher, tells
from hdi_callback.record import Record
from hdi_callback.session import Session, Settings, Trainer
from hdi_callback.session.settings import Options, takes_settings

try:
    import transformers
except ImportError as error:
    raise ImportError("HDITrainerCallback needs transformers: pip install 'hdi-callback[transformers]'.") from error

_KEY = "hdi_callback"  # in the trainer's own state; under the name of a class the trainer would make an instance of it
_STATE_FILE = "trainer_state.json"


@takes_settings
class HDITrainerCallback(Watcher, transformers.TrainerCallback):
    """Watch the diversity of the attention heads of a model that a transformers `Trainer` trains.

    Reads, judges and intervenes as `HDICallback` does. The history is ``hdi/history.jsonl`` under the output
    directory. Curves go where the trainer's go, into the run of TensorBoard, W&B, MLflow, Comet, Trackio or SwanLab
    that ``report_to`` names; a warning names one that gets none. A checkpoint keeps what a resumed run needs in the
    trainer's state.

    The trainer does not notify its callbacks of exceptions: until `close` is called, or the next training begins,
    hooks may stay on the model.

    Args:
        every_n_steps: optimizer steps between readings.
        log: a function that takes each reading's curves, a dictionary, and its step, beside what ``report_to`` names.
        settings: see `Settings`.

    Example:
        >>> callback = HDITrainerCallback(every_n_steps=50)  # transformers.Trainer(..., callbacks=[callback])
    """

    def __init__(self, every_n_steps: int = 50, *, log: Log | None = None, **settings: Unpack[Options]) -> None:
        super().__init__(Settings(every_n_steps=every_n_steps, **settings))
        self._log = function("log", log, "log=mlflow.log_metrics")
        self._losses: Tensor | None = None  # their sum in the trainer

    @property
    def state_key(self) -> str:
        """Refuse the trainer of Lightning, which reads this first."""
        raise MisconfigurationError("A Lightning trainer takes HDICallback: write callbacks=[HDICallback(...)].")

    @guarded("starting to watch heads", passes=MISUSE)
    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Install the hooks, and resume from the checkpoint, if the trainer does."""
        self.close()
        self._start(kwargs["model"], _TransformersTrainer(args, state, control, kwargs["optimizer"], self._log))
        if state.global_step > 0:
            self._restored = (state.stateful_callbacks or {}).get(_KEY)
            self._resume()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Capture the forward that follows when a reading is due."""
        self._tell(lambda session: self._sum_losses())
        self._tell(Session.before_forward)

    on_substep_end = tells(Session.after_backward)  # of the first forward, where gradients are accumulated
    on_pre_optimizer_step = on_substep_end

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Deliver the readings whose numbers have arrived."""
        self._tell(lambda session: session.after_step(self._sum_losses()))

    def _sum_losses(self) -> Tensor | None:
        """Return the loss of the forwards since the last call, as the trainer scales them; `None` in other loops."""
        trainer, variables = _running_trainer()
        total, before = variables.get("tr_loss", getattr(trainer, "_tr_loss", None)), self._losses
        self._losses = total = None if total is None else total.detach().clone()
        if total is None or before is None:
            return None
        # The trainer leaves a loss that is not finite out of its sum.
        return cast("Tensor", total - before + 0 * variables.get("tr_loss_step", before).detach())

    @guarded("saving the state of head diversity")
    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Keep the state in the checkpoint that the trainer has written."""
        state.stateful_callbacks[_KEY] = self.state_dict()
        file = Path(args.output_dir) / f"checkpoint-{state.global_step}" / _STATE_FILE
        if args.should_save and file.is_file():
            state.save_to_json(str(file))

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Finish at the last log, while the runs that the trainer reports to are open."""
        if "train_runtime" in (logs or {}):
            self._tell(Session.finish)

    on_train_end = tells(Session.finish)


class _TransformersTrainer(Trainer):
    """A transformers trainer as the `Trainer` of a session."""

    def __init__(self, args: Any, state: Any, control: Any, optimizer: Any, log: Log | None) -> None:
        self._args, self._state, self._control, self._log = args, state, control, log
        handler = getattr(_running_trainer()[0], "callback_handler", None)
        self._optimizer, self._callbacks = optimizer, getattr(handler, "callbacks", ())

    @property
    def folder(self) -> Path:
        return Path(self._args.output_dir)

    @property
    def step(self) -> int:
        return int(self._state.global_step)

    @property
    def optimizers(self) -> list[Optimizer]:
        return [getattr(self._optimizer, "optimizer", self._optimizer)]

    def stop(self) -> None:
        self._control.should_training_stop = True

    def save(self, name: str) -> str:
        self._control.should_save = True  # the trainer saves at the end of this step, under its own name
        return str(self.folder / f"checkpoint-{self.step}")

    def targets(self, past: Sequence[Record]) -> list[Any]:
        if not self.is_first_rank:
            return []
        targets: list[Any] = [] if self._log is None else [self._log]
        for callback in self._callbacks:
            reporters = transformers.integrations.integration_utils.INTEGRATION_TO_CALLBACK.items()
            name = next((name for name, reporter in reporters if isinstance(callback, reporter)), None)
            run = None if name is None else _run_of(callback, name)
            if run is not None:
                targets.append(run)
            elif name is not None and type(callback).on_log is not transformers.TrainerCallback.on_log:
                warn(f"{name} gets no curves of heads: write HDITrainerCallback(log=...), as for `watch_heads`.")
        return targets


def _running_trainer() -> tuple[Any, Mapping[str, Any]]:
    """Return the trainer that calls, and the variables of its loop, from the call stack: no callback is given them."""
    frames = (frame.f_locals for frame in running_frames())
    variables = next((each for each in frames if isinstance(each.get("self"), transformers.Trainer)), {})
    return variables.get("self"), variables


def _run_of(callback: Any, name: str) -> Any:
    """Return the run that a callback of the trainer reports to; `None` if there is none that takes metrics."""
    if name == "wandb":
        return getattr(sys.modules.get("wandb"), "run", None)
    candidates = [value for value in vars(callback).values() if not isinstance(value, type)]
    run = next((run for run in candidates if hasattr(run, "add_image") or hasattr(run, "log_metrics")), None)
    package = next((value for value in candidates if isinstance(value, ModuleType) and hasattr(value, "log")), None)
    if run is not None or package is None:
        return run
    # Trackio and SwanLab: their steps are their own, and the trainer gives its step as a curve too.
    return lambda values, step: package.log({**values, "train/global_step": step})
