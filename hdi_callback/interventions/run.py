"""Interventions on the whole run: stop, save a checkpoint, lower the learning rate, call a function."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.optim import Optimizer

from hdi_callback.arguments import number, shown
from hdi_callback.errors import MisconfigurationError
from hdi_callback.guard import Guard, guarded
from hdi_callback.interventions.intervention import Intervention
from hdi_callback.interventions.training import Training
from hdi_callback.record import Action, Alert, Level, Record


class StopTraining(Intervention):
    """End the training; by default on the first critical alert.

    Args:
        on: the lowest level of alerts to act on.
        options: see `Intervention`.
    """

    name = "StopTraining"
    at_most = 1

    def __init__(self, *, on: Level = "critical", **options: Any) -> None:
        super().__init__(on=on, **options)

    def on_alert(self, alert: Alert) -> Action:
        """End the training after this step."""
        if not self.dry_run:
            self.training.stop()
        return self.action(alert.layers, f"stopped the training ({alert.rule})")


class SaveCheckpoint(Intervention):
    """Save a checkpoint at a warning, before the collapse deepens; at most three."""

    name = "SaveCheckpoint"
    at_most = 3

    def on_alert(self, alert: Alert) -> Action:
        """Save a checkpoint named for rule and step."""
        name = f"heads-{alert.rule.replace(' ', '-')}-step={self.training.step}"
        path = name if self.dry_run else self.training.save(name)
        return self.action(alert.layers, f"saved {path}")


class Call(Intervention):
    """Call a function of your own with each alert.

    Args:
        function: takes the `Alert`; on every rank.
        options: see `Intervention`.

    Raises:
        MisconfigurationError: if `function` cannot be called.
    """

    name = "Call"

    def __init__(self, function: Callable[[Alert], Any], **options: Any) -> None:
        super().__init__(**options)
        if not callable(function):
            raise MisconfigurationError(f"`function` of Call must take an Alert, got {shown(function)}.")
        self.function = function

    def on_alert(self, alert: Alert) -> Action:
        """Call the function."""
        if not self.dry_run:
            self.function(alert)
        called = getattr(self.function, "__name__", type(self.function).__name__)
        return self.action(alert.layers, f"called {called} ({alert.rule})")


class ScaleLearningRate(Intervention):
    """Lower the learning rate of the run while an alert is active.

    The factor is applied before each optimizer step and undone after it, so that schedulers and checkpoints see the
    learning rate that they set.

    Args:
        factor: factor of the learning rate, in (0, 1].
        options: see `Intervention`.

    Raises:
        MisconfigurationError: if an argument cannot work.
    """

    name = "ScaleLearningRate"

    def __init__(self, factor: float = 0.1, **options: Any) -> None:
        super().__init__(**options)
        self.active: tuple[str, ...] = ()  # layers of the alerts that are active
        self.factor = number("factor of ScaleLearningRate", factor, most=1, example=0.1)
        self._handles: list[Any] = []
        self._rates: dict[int, list[Any]] = {}  # optimizer -> learning rates of its groups to give back
        self._guard = Guard()

    def bind(self, training: Training) -> None:
        """Watch the steps of every optimizer, without the alerts of another run."""
        self.active = ()
        super().bind(training)
        self.unbind()
        for optimizer in training.optimizers:
            self._handles.append(optimizer.register_step_pre_hook(self._before_step))
            self._handles.append(optimizer.register_step_post_hook(self._after_step))

    def unbind(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def on_alert(self, alert: Alert) -> Action | None:
        """Nothing: `on_reading` looks at all active alerts."""
        return None

    def on_reading(self, record: Record) -> Sequence[Action | None]:
        """Begin in layers with an alert, and end where there is none any more."""
        alerts = [alert for alert in record.active if self.answers(alert)]
        before, self.active = self.active, tuple(dict.fromkeys(layer for alert in alerts for layer in alert.where))
        begun = [layer for layer in self.active if layer not in before]
        ended = [layer for layer in before if layer not in self.active]
        begins = f"multiplied the learning rate of the run by {self.factor:g}, for an alert"
        return [
            self.action(layers, f"{done} in {', '.join(layers)}")
            for layers, done in ((begun, begins), (ended, "restored the learning rate, as to an alert"))
            if layers
        ]

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a resumed run."""
        return {**super().state_dict(), "active": list(self.active)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `state_dict`."""
        super().load_state_dict(state)
        self.active = tuple(state["active"])

    def __getstate__(self) -> dict[str, Any]:
        """Drop the hooks as well."""
        return {**super().__getstate__(), "_handles": [], "_rates": {}, "_guard": Guard()}

    @guarded("scaling the learning rate")
    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._give_back(optimizer)  # left by a step that failed
        if not self.active or self.dry_run:
            return
        rates = [group["lr"] for group in optimizer.param_groups]
        smaller = [rate * self.factor for rate in rates]
        self._rates[id(optimizer)] = rates
        for group, rate in zip(optimizer.param_groups, smaller):
            group["lr"] = rate

    @guarded("restoring the learning rate")
    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._give_back(optimizer)

    def _give_back(self, optimizer: Optimizer) -> None:
        for group, rate in zip(optimizer.param_groups, self._rates.pop(id(optimizer), ())):
            group["lr"] = rate
