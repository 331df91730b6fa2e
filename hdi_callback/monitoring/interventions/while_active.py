"""`WhileActive`: an intervention that acts from an alert until it is resolved."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Mapping
from typing import Any

from hdi_callback.deprecation import renamed_attribute
from hdi_callback.monitoring.alerts import Alert, is_at_least
from hdi_callback.monitoring.interventions.action import Action
from hdi_callback.monitoring.interventions.intervention import Intervention
from hdi_callback.monitoring.interventions.training import Training


class WhileActive(Intervention):
    """An intervention that is active from an alert until it is resolved, layer by layer.

    It ends with the last alert of a layer that it answers. Where an alert is resolved and others of the layer hold it,
    it says which.
    """

    at_most = 100

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.standing: dict[str, list[str]] = {}  # layer -> the rules whose alerts are active

    def attach(self, training: Training) -> None:
        """Attach, without the alerts of another run."""
        self.standing = {}
        super().attach(training)

    def answer(self, alert: Alert) -> Action | None:
        """Answer an alert; one that holds this intervention ends with its level too, whatever was answered before."""
        rules = self.standing.get(alert.layer, [])
        if alert.rule in rules and (alert.is_resolved or not is_at_least(alert.level, self.on)):
            return self.undo(alert)
        action = super().answer(alert)
        if action is None and rules and alert.rule not in rules and not alert.is_resolved and self._is_for(alert):
            self.standing[alert.layer] = [*rules, alert.rule]  # beyond `at_most` too, as nothing begins
        return action

    def act(self, alert: Alert) -> Action | None:
        """Begin, with the first alert of the layer."""
        rules = self.standing.get(alert.layer, [])
        action = None if rules else self._action(alert, self.begin())
        if alert.rule not in rules:
            self.standing[alert.layer] = [*rules, alert.rule]
        return action

    def undo(self, alert: Alert) -> Action | None:
        """End, with the last alert of the layer; before that say which others are active."""
        rules = self.standing.get(alert.layer, [])
        if alert.rule not in rules:
            return None
        rules.remove(alert.rule)
        if rules:
            return self._refusal(alert, f"goes on, as other alerts of the layer are active: {', '.join(rules)}")
        del self.standing[alert.layer]
        return self._action(alert, self.end())

    def keep(self, active: Collection[tuple[str, str]]) -> None:
        """Drop the alerts that are not active.

        Args:
            active: layer and rule of every active alert.
        """
        kept = {layer: [rule for rule in rules if (layer, rule) in active] for layer, rules in self.standing.items()}
        self.standing = {layer: rules for layer, rules in kept.items() if rules}

    def end_all_but(self, active: Collection[tuple[str, str]], step: int) -> list[Action]:
        """End where no alert is active any more, though its end did not arrive here.

        Args:
            active: layer and rule of every active alert.
            step: of the reading.

        Returns:
            What was ended.
        """
        before = list(self.standing)
        self.keep(active)
        ended = [layer for layer in before if layer not in self.standing]
        why = f"{self.end()}, as its alert is not active any more"
        messages = {layer: f"step {step}, {layer}: {self.name} {why}" for layer in ended}
        return [Action(step, self.name, layer, message, self.dry_run) for layer, message in messages.items()]

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
