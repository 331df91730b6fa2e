"""`Sink`: takes results: a dashboard, the console, a trainer's own metrics."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from hdi_callback.guard import attempt_each
from hdi_callback.monitoring.alerts import Alert
from hdi_callback.monitoring.interventions import Action
from hdi_callback.monitoring.readings import Record

WORST, ALERTS = "attention_heads/worst_alignment", "attention_heads/alerts"
"""Tags of curves over all layers."""


@dataclass(frozen=True)
class Result:
    """One reading as a record, with its alerts and actions.

    Attributes:
        record: its numbers.
        alerts: alerts that began, got worse or were resolved.
        actions: actions of interventions.
        active: alerts that are active after this reading; `None` without rules.
        is_last: True for the last reading of a run.
    """

    record: Record
    alerts: tuple[Alert, ...] = ()
    actions: tuple[Action, ...] = ()
    active: tuple[Alert, ...] | None = None
    is_last: bool = False

    def scalars(self, metrics: Sequence[str]) -> dict[str, float]:
        """The values that go to the loggers.

        Args:
            metrics: names of metrics.

        Returns:
            Tag -> number: those of `Record.scalars`, and over all layers ``attention_heads/worst_alignment``, of any
            two heads, and ``attention_heads/alerts``, how many alerts are active; notices are not counted.
        """
        tags = self.record.scalars(list(metrics))
        layers = self.record.layers.values()
        worst = [layer.values["hdi_worst_alignment"] for layer in layers if "hdi_worst_alignment" in layer.values]
        if worst:
            tags[WORST] = max(worst)
        if self.active is not None:
            tags[ALERTS] = float(sum(alert.level != "notice" for alert in self.active))
        return tags


class Sink(Protocol):
    """Takes every result of a session.

    Attributes:
        name: its work, for the warning if it fails: ``"writing to TensorBoard"``.
    """

    name: str

    def write(self, result: Result) -> None:
        """Take one result.

        Args:
            result: the result of a reading.
        """


class Latest:
    """Passes the curves of every reading to a function, such as one that updates `callback_metrics`.

    Args:
        metrics: names of metrics.
        take: takes tag -> number.
        prefix: put before every tag.
        name: its work, for the warning if it fails.
    """

    def __init__(
        self,
        metrics: Sequence[str],
        take: Callable[[dict[str, float]], Any],
        prefix: str = "",
        name: str = "keeping the latest reading",
    ) -> None:
        self._metrics, self._take, self._prefix, self.name = list(metrics), take, prefix, name

    def write(self, result: Result) -> None:
        """Pass on the curves of a result.

        Args:
            result: the result of a reading.
        """
        self._take({self._prefix + tag: value for tag, value in result.scalars(self._metrics).items()})


class OnAlert:
    """Calls a function of the user with every alert.

    Args:
        function: takes an `Alert`.
    """

    def __init__(self, function: Callable[[Alert], Any]) -> None:
        self._function = function
        self.name = f"on_alert ({getattr(function, '__name__', type(function).__name__)})"

    def write(self, result: Result) -> None:
        """Call the function with each alert of a result, even if it raises for one of them.

        Args:
            result: the result of a reading.
        """
        attempt_each(partial(self._function, alert) for alert in result.alerts)
