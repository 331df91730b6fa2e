"""`WhileActive`: an intervention that acts from an alert until it is resolved."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Mapping
from typing import Any

from hdi_callback.deprecation import renamed_attribute
from hdi_callback.monitoring.alerts import Alert
from hdi_callback.monitoring.interventions.action import Action
from hdi_callback.monitoring.interventions.intervention import Intervention
from hdi_callback.monitoring.interventions.training import Training


class WhileActive(Intervention):
    """An intervention that is active from an alert until it is resolved, layer by layer."""

    at_most = 100

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.standing: dict[str, list[str]] = {}  # layer -> the rules whose alerts are active

    def attach(self, training: Training) -> None:
        """Attach, without the alerts of another run."""
        self.standing = {}
        super().attach(training)

    def act(self, alert: Alert) -> Action | None:
        """Begin, with the first alert of the layer."""
        rules = self.standing.get(alert.layer, [])
        action = None if rules else self._action(alert, self.begin())
        if alert.rule not in rules:
            self.standing[alert.layer] = [*rules, alert.rule]
        return action

    def undo(self, alert: Alert) -> Action | None:
        """End, with the last alert of the layer."""
        rules = self.standing.get(alert.layer, [])
        if alert.rule not in rules:
            return None
        rules.remove(alert.rule)
        if rules:
            return None
        del self.standing[alert.layer]
        return self._action(alert, self.end())

    def keep(self, active: Collection[tuple[str, str]]) -> None:
        """Drop the alerts that are not active.

        Args:
            active: layer and rule of every active alert.
        """
        kept = {layer: [rule for rule in rules if (layer, rule) in active] for layer, rules in self.standing.items()}
        self.standing = {layer: rules for layer, rules in kept.items() if rules}

    @property
    def is_active(self) -> bool:
        """Whether there is something to do at the next step."""
        return bool(self.standing) and not self.dry_run

    lasts = renamed_attribute("lasts", "is_active")

    @abstractmethod
    def begin(self) -> str:
        """The action at the beginning, as a part of a sentence."""

    @abstractmethod
    def end(self) -> str:
        """The action at the end, as a part of a sentence."""

    def state_dict(self) -> dict[str, Any]:
        """State for a resumed run."""
        return {**super().state_dict(), "standing": {layer: list(rules) for layer, rules in self.standing.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of a checkpoint, but for alerts that it no longer answers: nothing would end them."""
        super().load_state_dict(state)
        answered = {
            layer: [rule for rule in rules if self.is_for_rule(rule)]
            for layer, rules in state["standing"].items()
            if self.is_for_layer(layer)
        }
        self.standing = {layer: rules for layer, rules in answered.items() if rules}
