"""`Watch`: a `Session` with the name and the calls of version 0.1."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch.optim import Optimizer

from hdi_callback.errors import MisconfigurationError
from hdi_callback.monitoring.alerts import Alerts
from hdi_callback.monitoring.history import History
from hdi_callback.monitoring.interventions import Intervention, Training
from hdi_callback.monitoring.monitor import HeadDiversityMonitor
from hdi_callback.monitoring.session.host import PlainHost
from hdi_callback.monitoring.session.position import Position
from hdi_callback.monitoring.session.schedule import Schedule
from hdi_callback.monitoring.session.session import Session
from hdi_callback.monitoring.session.settings import Settings
from hdi_callback.monitoring.session.sink import Result
from hdi_callback.monitoring.warn_once import WarnOnce


class _Followed:
    """A sink that calls `follow` of an object of version 0.1."""

    def __init__(self, follower: Any) -> None:
        self._follower, self.name = follower, str(follower.name)

    def write(self, result: Result) -> None:
        self._follower.follow(result)


class _PositionedHost(PlainHost):
    """A trainer whose position comes with every call."""

    def __init__(
        self, training: Training | None, followers: Sequence[Any], share: Callable[[Any], Any], is_first: bool
    ) -> None:
        super().__init__(None)
        self._training, self._followers, self._share, self._is_first = training, followers, share, is_first
        self.position = Position(0)

    @property
    def is_first_rank(self) -> bool:
        return self._is_first

    @property
    def folder(self) -> Path:
        return Path()

    @property
    def optimizers(self) -> Sequence[Optimizer]:
        return () if self._training is None else self._training.optimizers

    def stop(self) -> None:
        if self._training is not None:
            self._training.stop()

    def save(self, name: str) -> str:
        return name if self._training is None else self._training.save_checkpoint(name)

    def sinks(self, monitor: HeadDiversityMonitor, history: History | None, state: Any) -> Sequence[Any]:
        return [follower if hasattr(follower, "write") else _Followed(follower) for follower in self._followers]


class _Watch:
    """A `Session` under the name and with the calls of version 0.1."""

    def __init__(
        self,
        monitor: HeadDiversityMonitor,
        schedule: Schedule,
        *,
        history: History | None = None,
        alerts: Alerts | None = None,
        interventions: Sequence[Intervention] = (),
        training: Training | None = None,
        followers: Sequence[Any] = (),
        share: Callable[[Any], Any] = lambda thing: thing,
        faults: WarnOnce | None = None,
    ) -> None:
        if interventions and (alerts is None or training is None):
            raise MisconfigurationError("Interventions answer alerts: give rules and a training as well.")
        self._host = _PositionedHost(training, followers, share, is_first=False)
        settings = Settings(every_n_steps=schedule.every, alerts=None, history=False)
        self._session = Session(monitor, self._host, settings, warn_once=faults, schedule=schedule)
        self._session.alerts, self._session.interventions = alerts, tuple(interventions)
        self._session.attach(training)
        self._history, self._is_open = history, False

    @property
    def history(self) -> History | None:
        return self._history

    def begin(self, step: int, state: Mapping[str, Any] | None = None) -> None:
        self._host.position, self._is_open = Position(step), True
        self._session.open(state, history=self._history)

    @property
    def is_reading_owed(self) -> bool:
        return self._session.is_capturing

    def before_forward(self, step: int) -> None:
        self._at(step).before_forward()

    def after_backward(
        self, step: int, *, epoch: int | None = None, axis: int | None = None, is_last: bool = True
    ) -> None:
        self._at(step, epoch, axis).after_backward(is_last=is_last)

    def after_step(self, step: int, *, epoch: int | None = None, axis: int | None = None) -> list[Result]:
        return self._at(step, epoch, axis).after_step()

    def read_ahead(self, step: int, *, epoch: int | None = None, axis: int | None = None) -> None:
        self._session.measure_final_early(Position(step, epoch, axis))

    def finish(self, step: int, *, epoch: int | None = None, axis: int | None = None) -> None:
        self._at(step, epoch, axis).finish()

    def _at(self, step: int, epoch: int | None = None, axis: int | None = None) -> Session:
        if not self._is_open:  # `begin` was not called: nothing is resumed
            self._is_open = True
            self._session.connect(self._history)
        self._host.position = Position(step, epoch, axis)
        return self._session

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._session, {"faults": "warn_once"}.get(name, name))
