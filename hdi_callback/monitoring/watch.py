"""`Watch`: a monitor on a schedule, and what follows from each of its readings.

The one composition under Lightning, transformers and a plain loop: they tell it where the training is, and it reads,
writes the history, judges, intervenes and hands each `Outcome` to those who follow the run. Whatever goes wrong on the
way costs one warning.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch.optim import Optimizer

from hdi_callback.errors import MisconfigurationError
from hdi_callback.monitoring.alerts import Alert, Alerts
from hdi_callback.monitoring.faults import Faults
from hdi_callback.monitoring.history import History
from hdi_callback.monitoring.interventions import Action, Intervention, Training
from hdi_callback.monitoring.monitor import HeadDiversityMonitor
from hdi_callback.monitoring.readings import Readout, Record
from hdi_callback.monitoring.schedule import Schedule


@dataclass(frozen=True)
class Outcome:
    """One reading and all that came of it.

    Attributes:
        record: its numbers.
        alerts: alerts that began, got worse or are over.
        actions: what interventions did about them.
    """

    record: Record
    alerts: tuple[Alert, ...] = ()
    actions: tuple[Action, ...] = ()


class Follower(Protocol):
    """Somebody who follows a run: a dashboard, a console, a trainer's own metrics."""

    name: str

    def follow(self, outcome: Outcome) -> None:
        """Take one outcome.

        Args:
            outcome: a reading and what came of it.
        """


class OnAlert:
    """Calls a function of the user's with every alert.

    Args:
        function: takes an `Alert`.
    """

    def __init__(self, function: Callable[[Alert], Any]) -> None:
        self._function = function
        self.name = f"on_alert ({getattr(function, '__name__', type(function).__name__)})"

    def follow(self, outcome: Outcome) -> None:
        """Call it with what is new at one reading.

        Args:
            outcome: the reading and what came of it.
        """
        for alert in outcome.alerts:
            self._function(alert)


class Watch:
    """Read on schedule, and let follow what follows.

    Args:
        monitor: what measures.
        schedule: when.
        history: where readings, alerts and actions are kept; `None` for nowhere, as on all ranks but the first.
        alerts: the rules; `None` for no alerts.
        interventions: what may be done about alerts.
        training: what interventions may act on; needed if there are any.
        followers: who is told.
        share: gives every rank what the first rank has, so that all intervene alike; nothing by default.
        faults: turns what goes wrong into one warning.

    Raises:
        MisconfigurationError: if an intervention cannot work on this training.
    """

    def __init__(
        self,
        monitor: HeadDiversityMonitor,
        schedule: Schedule,
        *,
        history: History | None = None,
        alerts: Alerts | None = None,
        interventions: Sequence[Intervention] = (),
        training: Training | None = None,
        followers: Sequence[Follower] = (),
        share: Callable[[Any], Any] = lambda thing: thing,
        faults: Faults | None = None,
    ) -> None:
        if interventions and (alerts is None or training is None):
            raise MisconfigurationError("Interventions answer alerts: give rules and a training as well.")
        self.monitor, self.schedule, self.history, self.alerts = monitor, schedule, history, alerts
        self.interventions, self.followers = tuple(interventions), tuple(followers)
        self.faults = Faults() if faults is None else faults
        self._share = share
        self._is_reading_owed = False
        self._on_the_way: deque[Readout] = deque()
        for intervention in self.interventions:
            assert training is not None
            intervention.attach(training)

    def before_forward(self, step: int) -> None:
        """Capture the forward that follows if a reading is due.

        Args:
            step: optimizer steps taken so far.
        """
        if not self._is_reading_owed and self.schedule.is_due(step):
            self._is_reading_owed = True
            self.monitor.arm()

    def after_backward(self, step: int, *, epoch: int | None = None, axis: int | None = None) -> None:
        """Read if a reading is due, while the weights are still those of the forward and the activations are gone.

        Args:
            step: optimizer steps taken so far, that of the backward not included.
            epoch: the epoch, if there are epochs.
            axis: position on the trainer's own logging axis, if it differs from `step`.
        """
        if self._is_reading_owed:
            self._read(step, epoch, axis)

    def before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Let interventions act on the gradients.

        Args:
            optimizer: the one that is about to step.
        """
        for intervention in self.interventions:
            with self.faults.contained(f"the intervention {intervention.name}"):
                intervention.before_optimizer_step(optimizer)

    def after_step(self, step: int, *, epoch: int | None = None, axis: int | None = None) -> list[Outcome]:
        """Make known the readings whose numbers have arrived.

        Args:
            step: optimizer steps taken so far.
            epoch: see `after_backward`.
            axis: see `after_backward`.

        Returns:
            Their outcomes.
        """
        if self._is_reading_owed:  # a batch without a backward
            self._read(step, epoch, axis)
        outcomes = []
        # Ranks that intervene do so after the same step, and wait for the numbers.
        while self._on_the_way and (self.interventions or self._on_the_way[0].is_ready()):
            outcomes += self._publish(self._on_the_way.popleft())
        return outcomes

    def finish(self, step: int, *, epoch: int | None = None, axis: int | None = None) -> None:
        """Read the final weights, make everything known, and leave nothing behind.

        Args:
            step: optimizer steps taken in all.
            epoch: see `after_backward`.
            axis: see `after_backward`.
        """
        if self.schedule.last != step:
            self._read(step, epoch, axis)
        self.flush()
        self.close()

    def flush(self) -> list[Outcome]:
        """Make known every reading that is on the way, waiting for its numbers.

        Returns:
            Their outcomes.
        """
        outcomes = []
        while self._on_the_way:
            outcomes += self._publish(self._on_the_way.popleft())
        return outcomes

    def close(self) -> None:
        """Leave no hook behind; calling it again does nothing."""
        self.monitor.close()
        for intervention in self.interventions:
            intervention.detach()

    def state_dict(self) -> dict[str, Any]:
        """Give what a resumed run needs; readings on the way are made known first, so that none is lost.

        Returns:
            Plain data.
        """
        self.flush()
        return {
            "format": 2,
            "last_step": self.schedule.last,
            "history": None if self.history is None else str(self.history.path),
            "alerts": None if self.alerts is None else self.alerts.state_dict(),
            "interventions": [(item.name, item.state_dict()) for item in self.interventions],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up where a checkpoint left off; a checkpoint of format 1 knows no alerts.

        Args:
            state: what `state_dict` gave.
        """
        self.schedule.last = state["last_step"]
        if self.alerts is not None and state.get("alerts") is not None:
            self.alerts.load_state_dict(state["alerts"])
        kept = list(state.get("interventions", ()))
        for intervention in self.interventions:
            place = next((place for place, (name, _) in enumerate(kept) if name == intervention.name), None)
            if place is not None:  # several of one kind are told apart by their order
                intervention.load_state_dict(kept.pop(place)[1])

    def _read(self, step: int, epoch: int | None, axis: int | None) -> None:
        self._is_reading_owed = False
        self.schedule.done(step)
        with self.faults.contained("measuring head diversity"):
            self._on_the_way.append(Readout(self.monitor.measure(step, epoch=epoch, axis=axis)))

    def _publish(self, readout: Readout) -> list[Outcome]:
        """Turn one reading into numbers, judge it, intervene, and tell everybody."""
        try:
            record = readout.record()
        except Exception as error:
            self.faults.tell("reading out head diversity", error)
            return []
        alerts: list[Alert] = []
        if self.alerts is not None:
            with self.faults.contained("judging head diversity"):
                alerts = self.alerts.judge(record)
        # Written before anybody acts: what is done may be to end the run.
        if self.history is not None:
            with self.faults.contained(f"writing {self.history.path}"):
                self.history.write(record)
                for alert in alerts:
                    self.history.note("alert", **alert.to_dict())
        actions = self._intervene(alerts)
        if self.history is not None and actions:
            with self.faults.contained(f"writing {self.history.path}"):
                for action in actions:
                    self.history.note("intervention", **action.to_dict())
        outcome = Outcome(record, tuple(alerts), tuple(actions))
        for follower in self.followers:
            with self.faults.contained(follower.name):
                follower.follow(outcome)
        return [outcome]

    def _intervene(self, alerts: Sequence[Alert]) -> list[Action]:
        actions: list[Action] = []
        if not self.interventions:
            return actions
        for alert in self._share(alerts):
            for intervention in self.interventions:
                with self.faults.contained(f"the intervention {intervention.name}"):
                    action = intervention.answer(alert)
                    if action is not None:
                        actions.append(action)
        return actions
