"""`Intervention`: which alerts it answers, how often, and how it reports; and those that act on the whole run."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from hdi_callback.arguments import one_of, strings, whole_number
from hdi_callback.attention.layer import AttentionLayer
from hdi_callback.errors import MisconfigurationError, UnsupportedAttentionError
from hdi_callback.record import LEVELS, Action, Alert, Level, Record

if TYPE_CHECKING:
    from hdi_callback.session import Trainer


class Training(NamedTuple):
    """What an intervention sees of a training, and may do to it, under any trainer."""

    trainer: Trainer  # has `step` and `optimizers`; stops the training and saves checkpoints
    layers: Mapping[str, AttentionLayer]  # by name
    # Tells the rules which heads of a layer are written at a step, and by whom, so that this raises no alert.
    expect_change: Callable[[str, Sequence[int], int, str], None]


class Intervention:
    """Acts on alerts. Every rank does so alike, after the step at which a reading was taken.

    A subclass overrides `on_alert` or `on_reading`, and others of the hooks that it needs.

    Args:
        on: the lowest level of alerts to act on; `None` for that of the class.
        rules: names of the rules to act on; `None` for those of the class.
        at_most: how often to act in a run; `None` for the default of the class.
    """

    name: ClassVar[str]  # in logs
    on: Level = "warning"
    rules: Sequence[str] | None = None
    at_most: int | None = None
    # What was so at step 0 already, unless `rules` are given: heads may be equal on purpose.
    ignores_start: bool = False
    training: Training  # that it acts on, from `bind` on

    def __init__(
        self, *, on: Level | None = None, rules: Sequence[str] | None = None, at_most: int | None = None
    ) -> None:
        self.on: Level = one_of(f"on of {self.name}", self.on if on is None else on, LEVELS)
        if rules is not None:
            self.rules = strings(f"rules of {self.name}", rules, "names of rules")
            self.ignores_start = False
        if at_most is not None:
            self.at_most = whole_number(f"at_most of {self.name}", at_most, least=1, example=1)
        self.count = 0
        self._answered: set[str] = set()  # alerts: when they began, their rules, and what they named

    def bind(self, training: Training) -> None:
        """Take the training to act on, when its layers are known and before its first step."""
        self.training, self.count, self._answered = training, 0, set()
        for name, layer in training.layers.items():
            if why := self.why_not(layer):
                remedy = f"Leave out the layer, with exclude=[{name!r}], or {self.name}."
                raise MisconfigurationError(f"{self.name} cannot act on `{name}`: {why}. {remedy}")

    def why_not(self, layer: AttentionLayer) -> str:
        """Return why it cannot work on a layer, before training; empty if it can."""
        return ""

    def handle(self, record: Record) -> tuple[Action, ...]:
        """Return what was done about a reading: about its alerts, and active ones that were not answered yet."""
        is_spent = self.at_most is not None and self.count >= self.at_most
        actions = [] if is_spent else list(self.on_reading(record))
        self.count += bool(actions)
        for alert in record.active:
            key = json.dumps([alert.step, alert.rule, sorted(alert.where.items())])
            if key in self._answered or not self.answers(alert):
                continue
            if self.at_most is not None and self.count >= self.at_most:
                break
            self._answered.add(key)
            self.count += 1  # before it acts, so that a checkpoint that it saves has the count
            action = self.on_alert(alert)
            self.count -= action is None or action.is_refusal
            actions.append(action)
        return tuple(action for action in actions if action is not None)

    def answers(self, alert: Alert) -> bool:
        """Return whether it answers an alert, by its level and the rules that report it."""
        if LEVELS.index(alert.level) < LEVELS.index(self.on) or (self.ignores_start and alert.since == 0):
            return False
        return self.rules is None or bool({alert.rule, *alert.also} & set(self.rules))

    def on_alert(self, alert: Alert) -> Action | None:
        """Act on an alert, once; return what was done, `None` for nothing."""
        return None

    def on_reading(self, record: Record) -> Sequence[Action | None]:
        """Act on a reading, whatever its alerts."""
        return ()

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a resumed run, as plain data."""
        return {"count": self.count, "answered": sorted(self._answered)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `state_dict`."""
        self.count, self._answered = state["count"], set(state["answered"])

    def __getstate__(self) -> dict[str, Any]:
        """Drop the training, so that callbacks can be copied and sent to other processes."""
        return {name: value for name, value in vars(self).items() if name != "training"}

    def action(self, layers: Iterable[str], done: str, *, is_refusal: bool = False) -> Action:
        """Return what was done to layers, a verb in the past, as an action; with `is_refusal` why nothing was."""
        return Action(self.training.trainer.step, self.name, tuple(layers), done, is_refusal)


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


def why_not_writable(layer: AttentionLayer, roles: Sequence[str]) -> str:
    """Return why the heads of a layer cannot be written in place; empty if they can."""
    for role in roles:
        if role not in layer.weights:
            return f"it has no {role} weight of its own"
        try:
            for head in range(layer.weights[role].heads):
                layer.weights[role].index(head)
        except UnsupportedAttentionError as error:
            return f"its {role} heads cannot be written in place ({error})"
    return ""
