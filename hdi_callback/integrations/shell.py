"""`Shell`: the common base of the callbacks of all trainers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from hdi_callback.dashboards.console import print_layers
from hdi_callback.errors import HDIError
from hdi_callback.guard import attempt_each, guarded
from hdi_callback.monitoring.alerts import Alert
from hdi_callback.monitoring.history import History
from hdi_callback.monitoring.monitor import HeadDiversityMonitor
from hdi_callback.monitoring.notebook import run_summary
from hdi_callback.monitoring.ranks.rendezvous import Rendezvous
from hdi_callback.monitoring.session.session import Session
from hdi_callback.monitoring.session.settings import Settings
from hdi_callback.monitoring.warn_once import WarnOnce

STARTING, WATCHING = "starting to watch heads, which are not watched now,", "watching heads"
MISUSE = (HDIError,)
"""Errors that end a training before its first step."""


class NotWatchingError(Exception):
    """The watch could not be started, of which the user has been warned."""


class Shell:
    """The sessions of one callback, one after another.

    What a trainer or a loop calls is `guarded`, so that nothing that goes wrong here reaches the training.

    Args:
        settings: the settings of the runs.
    """

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self._settings, self._warn_once = settings, WarnOnce()
        self._forget()

    def _forget(self) -> None:
        """Reset to the state before any run."""
        self._host: Any = None
        self._session: Session | None = None  # monitor of the last training whose layers were found
        self._opened: Session | None = None  # history of the last training that has begun
        self._history: History | None = None
        self._restored: Any = None  # the state of a checkpoint, until the session is opened
        self._could_not_start = False

    def _failed(self, work: str, error: Exception) -> None:
        if isinstance(error, NotWatchingError):
            return
        self._warn_once.error(work, error)
        if work == STARTING:
            self._could_not_start = True
            session = self._session
            meeting = Rendezvous(self._settings.process_group) if session is None else session.monitor.rendezvous
            attempt_each([meeting.decline, *([] if session is None else [session.close])])

    def __getstate__(self) -> dict[str, Any]:
        """Drop the run: a copy is as new, and another trainer or process can use it."""
        kept = {
            "_restored": None if self._opened is not None else self._restored,
            **dict.fromkeys(("_host", "_session", "_opened", "_history")),
            "_warn_once": WarnOnce(),
        }
        return {**self.__dict__, **kept}

    @property
    def history_path(self) -> Path | None:
        """Path of the history; `None` before training and if there is none."""
        return None if self._history is None else self._history.path

    @property
    def monitor(self) -> HeadDiversityMonitor | None:
        """The monitor of the last training, `None` before the first."""
        return None if self._session is None else self._session.monitor

    @property
    def active_alerts(self) -> list[Alert]:
        """The alerts that are active now."""
        return [] if self._opened is None else self._opened.active_alerts

    def __str__(self) -> str:
        """The active alerts, the history and the layers of the last training."""
        monitor, name = self.monitor, type(self).__name__
        if monitor is None:
            return f"{name}: no run has begun"
        alerts = [f"  {alert.message}" for alert in self.active_alerts]
        place = [] if self.history_path is None else [f"  history: {self.history_path}"]
        return "\n".join(
            [f"{name}: {len(alerts) or 'no'} active alert{'s'[: len(alerts) > 1]}", *alerts, *place, str(monitor)]
        )

    def _repr_html_(self) -> str:
        monitor = self.monitor
        layers, refused = ([], []) if monitor is None else (monitor.layers, monitor.refused)
        return run_summary(type(self).__name__, layers, refused, self.active_alerts, self.history_path)

    @guarded("keeping the state of head diversity", otherwise=lambda _: {})
    def state_dict(self) -> dict[str, Any]:
        """State for a resumed run.

        Returns:
            Plain data.
        """
        if self._opened is not None:
            return self._opened.state_dict()
        return dict(self._restored) if isinstance(self._restored, Mapping) else {"last_step": None}

    @guarded("restoring the state of head diversity", passes=MISUSE)
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the state of a checkpoint.

        Args:
            state_dict: the result of `state_dict`.
        """
        self._restored = state_dict  # examined in `_open`, when layers and step are known
        if self._opened is not None:
            self._opened.flush()
            self._opened = None
        run = state_dict.get("run") if isinstance(state_dict, Mapping) else None
        if self._history is not None and run != self._history.run:
            self._history = None

    def _start(
        self,
        model: nn.Module,
        host: Any,
        settings: Settings,
        *,
        name: str | None = None,
        print_line: Callable[[str], Any] = print,
        attaches: bool = False,
    ) -> Session:
        """Find the layers, install the hooks, and print once which layers there are."""
        self._host = host
        session = self._session = Session.start(model, host, settings, name=name, warn_once=self._warn_once)
        if attaches:  # the optimizers exist already
            session.attach()
        if host.is_first_rank and settings.verbose:
            with self._warn_once.guard("printing the layers"):
                monitor, doing, every = session.monitor, session.interventions, settings.every_n_steps
                print_layers(monitor.layers, monitor.refused, every_n_steps=every, interventions=doing, say=print_line)
        return session

    def _open(self) -> None:
        """Open the history and the sinks of a started session, and restore the state of a checkpoint."""
        assert self._session is not None, "a session is started first"
        state = None
        with self._warn_once.guard("resuming head diversity", passes=MISUSE):
            before = self._restored if self._opened is None else self._opened.state_dict()
            state = self._session.accept(before, step=self._host.position.step)
        if state is None:
            self._restored = self._history = None
        self._opened = self._session
        self._session.open(state, history=self._history)
        self._history = self._session.history

    @guarded("closing the session")
    def close(self) -> None:
        """Publish pending readings and remove all hooks, after a training that an exception ended.

        Calling it again does nothing.
        """
        opened, session = self._opened, self._session
        flushing = [] if opened is None else [partial(opened.flush, is_broken=True)]
        attempt_each([*flushing, *([] if session is None else [session.close])])
