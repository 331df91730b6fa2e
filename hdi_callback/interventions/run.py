"""Interventions on the whole run: stop, save a checkpoint, call a function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hdi_callback.arguments import shown
from hdi_callback.errors import MisconfigurationError
from hdi_callback.interventions.intervention import Intervention
from hdi_callback.record import Action, Alert, Level


class StopTraining(Intervention):
    """End the training; by default on the first critical alert."""

    name = "StopTraining"
    on: Level = "critical"
    at_most = 1

    def on_alert(self, alert: Alert) -> Action:
        """End the training after this step."""
        self.training.trainer.stop()
        return self.action(alert.layers, f"stopped the training ({alert.rule})")


class SaveCheckpoint(Intervention):
    """Save a checkpoint at a warning, before the collapse deepens; at most three."""

    name = "SaveCheckpoint"
    at_most = 3

    def on_alert(self, alert: Alert) -> Action:
        """Save a checkpoint named for rule and step."""
        name = f"heads-{alert.rule.replace(' ', '-')}-step={self.training.trainer.step}"
        return self.action(alert.layers, f"saved {self.training.trainer.save(name)}")


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
        self.function(alert)
        called = getattr(self.function, "__name__", type(self.function).__name__)
        return self.action(alert.layers, f"called {called} ({alert.rule})")
