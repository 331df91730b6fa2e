"""`Sink`: where results go; a dashboard, a console, a trainer's own metrics."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from hdi_callback.monitoring.alerts import Alert
from hdi_callback.monitoring.interventions import Action
from hdi_callback.monitoring.readings import Record
from hdi_callback.monitoring.warn_once import attempt_each


@dataclass(frozen=True)
class Result:
    """One reading and all that came of it.

    Attributes:
        record: its numbers.
        alerts: alerts that began, got worse or were resolved.
        actions: what interventions did about them.
    """

    record: Record
    alerts: tuple[Alert, ...] = ()
    actions: tuple[Action, ...] = ()


class Sink(Protocol):
    """Takes every result of a session.

    Attributes:
        name: what it does, for the warning if it fails: ``"writing to TensorBoard"``.
    """

    name: str

    def write(self, result: Result) -> None:
        """Take one result.

        Args:
            result: a reading and what came of it.
        """


class OnAlert:
    """Calls a function of the user's with every alert.

    Args:
        function: takes an `Alert`.
    """

    def __init__(self, function: Callable[[Alert], Any]) -> None:
        self._function = function
        self.name = f"on_alert ({getattr(function, '__name__', type(function).__name__)})"

    def write(self, result: Result) -> None:
        """Call the function with each alert of a result, also after one at which it raises.

        Args:
            result: a reading and what came of it.
        """
        attempt_each(partial(self._function, alert) for alert in result.alerts)
