"""`Watcher`: what the callbacks of all trainers share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from hdi_callback.dashboards.names import curves
from hdi_callback.errors import MisconfigurationError
from hdi_callback.guard import Guard, guarded, without_modes
from hdi_callback.monitor import HeadDiversityMonitor
from hdi_callback.session import Session, Settings, Trainer

Log = Callable[[dict[str, float], int], object]
"""Takes the curves of a reading, and its step: ``accelerator.log``, ``fabric.log_dict``, ``mlflow.log_metrics``."""

MISUSE = (MisconfigurationError,)  # errors that end a training before its first step


def tells(event: Callable[[Session], object]) -> Callable[..., None]:
    """Return a hook of a trainer that tells the session of an event of the training, and nothing else."""

    def hook(self: Watcher, *args: Any, **kwargs: Any) -> None:
        self._tell(event)

    hook.__doc__ = event.__doc__
    return hook


class Watcher:
    """The session of one callback, and the state that it resumes from.

    Everything that a trainer calls is `guarded`, so that nothing that goes wrong here reaches the training.
    """

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self._settings, self._guard = settings, Guard()
        self._session: Session | None = None
        self._restored: Any = None  # the state of a checkpoint, until a session takes it

    @guarded("starting to watch heads", passes=MISUSE)
    def _start(self, model: nn.Module, trainer: Trainer, settings: Settings | None = None) -> None:
        """Start a session; the hooks are on the model before anything has been compiled or run."""
        self._guard, self._session = Guard(), None
        self._session = Session(model, settings or self._settings, trainer, guard=self._guard)

    @guarded("watching heads", passes=MISUSE)
    def _tell(self, *events: Callable[[Session], object]) -> None:
        """Tell the session of events of the training; there is none where it could not be started."""
        if self._session is not None:
            for event in events:
                event(self._session)

    @guarded("resuming head diversity")
    def _resume(self) -> None:
        """Give the state of a checkpoint to the session, once the trainer knows its step."""
        if self._session is not None and self._restored is not None:
            self._session.load_state_dict(self._restored)
        self._restored = None

    def __getstate__(self) -> dict[str, Any]:
        """Drop the run: a copy is as new, and another trainer or process can use it."""
        return {**self.__dict__, "_session": None, "_guard": Guard()}

    @property
    def monitor(self) -> HeadDiversityMonitor | None:
        """The monitor that measures; `None` before training."""
        return None if self._session is None else self._session.monitor

    @property
    def latest(self) -> dict[str, float]:
        """The curves at the last reading whose numbers have arrived, on every rank: ``latest["hdi/min"]``."""
        if self._session is None or self._session.latest is None:
            return {}
        return curves(self._session.latest, self._settings.metrics or ())

    @property
    def history_path(self) -> Path | None:
        """Path of the history; `None` before the first forward and if there is none."""
        history = None if self._session is None else self._session.history
        return None if history is None else history.path

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a resumed run, as plain data."""
        state = dict(self._restored or {})
        with self._guard("keeping the state of head diversity"), without_modes():
            if self._restored is None and self._session is not None:
                state = self._session.state_dict()
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take the state of a checkpoint, before the first step."""
        self._restored = state_dict

    def close(self) -> None:
        """Deliver what was measured and remove all hooks, after a training that an exception ended."""
        self._tell(Session.close, lambda session: session.monitor.training_step.remove())
