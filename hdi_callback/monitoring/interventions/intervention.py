"""`Intervention`: the base class: when it acts, how often, and how it reports.

It changes a training only through `Training`, which each integration provides, so that the same interventions work in
Lightning, transformers and a plain loop.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from torch.optim import Optimizer

from hdi_callback.arguments import flag, one_of, shown, whole_number, words
from hdi_callback.attention.names import matches
from hdi_callback.errors import MisconfigurationError
from hdi_callback.monitoring.alerts import LEVELS, Alert, Level, is_at_least
from hdi_callback.monitoring.interventions.action import Action
from hdi_callback.monitoring.interventions.training import Training
from hdi_callback.monitoring.readings import Record
from hdi_callback.monitoring.rules import TiedHeads


class Intervention(ABC):
    """Acts on alerts, and returns an `Action`.

    Args:
        on: the least serious level that it answers.
        rules: names of the rules whose alerts it answers; `None` for those of the class. Alerts of "tied heads" are
            answered only if named here: heads may be tied on purpose.
        layers: patterns of layer names whose alerts it answers; all by default.
        at_most: how often it acts in a run; `None` for the default of the class.
        dry_run: only report what would have been done.

    Attributes:
        name: its name in logs.
        waits_for_change: True if it ignores findings that were there at step 0 already, unless `rules` names the rule.
        rules: names of rules that it answers by default; `None` for all but "tied heads".
        at_most: how often it acts by default.
        answers_alerts: False if it acts on observations of its own, and needs no rules.

    Raises:
        MisconfigurationError: if an argument cannot work.
    """

    name: ClassVar[str]
    waits_for_change: ClassVar[bool] = False
    answers_alerts: ClassVar[bool] = True
    rules: Sequence[str] | None = None
    at_most: int = 1

    def __init__(
        self,
        *,
        on: Level = "warning",
        rules: Sequence[str] | None = None,
        layers: Sequence[str] | None = None,
        at_most: int | None = None,
        dry_run: bool = False,
    ) -> None:
        name = getattr(self, "name", None)
        if not isinstance(name, str) or not name or not name.isprintable():
            raise MisconfigurationError(
                f"The intervention {type(self).__name__} must have a name, a string of one line, got {shown(name)}: "
                f'write name = "{type(self).__name__}" in its class.'
            )
        one_of(f"on of {name}", on, LEVELS)
        self.on: Level = on
        self.layers = words(f"layers of {name}", layers, what="patterns of layer names", may_be_empty=False)
        self.dry_run = flag(f"dry_run of {name}", dry_run)
        if rules is not None:
            self.rules = words(f"rules of {name}", rules, what="names of rules", may_be_empty=False)
        if at_most is not None:
            self.at_most = whole_number(f"at_most of {name}", at_most, least=1, example=self.at_most)
        self.count = 0
        self._training: Training | None = None

    @property
    def training(self) -> Training:
        """The training that it acts on."""
        assert self._training is not None, "the watch attaches interventions before it asks them"
        return self._training

    def describe(self) -> str:
        """Describe when it acts and how often.

        Returns:
            A part of a sentence.
        """
        rules = f"all rules but {TiedHeads.name}" if self.rules is None else f"the rules {', '.join(self.rules)}"
        often = "once" if self.at_most == 1 else f"{self.at_most} times"
        dry = ", dry run" if self.dry_run else ""
        return f"{self.name} on alerts of {rules}, from the level {self.on} on, at most {often}{dry}"

    def attach(self, training: Training) -> None:
        """Attach to a training, before its first step.

        Args:
            training: what it may act on.

        Raises:
            MisconfigurationError: if it cannot work on this model; the message says why.
        """
        self._training = training
        self.count = 0  # actions of another run do not count; a checkpoint's state is loaded later
        if not self.dry_run:
            self.check()

    def detach(self) -> None:  # noqa: B027
        """Detach from the training, and remove all hooks."""

    def check(self) -> None:  # noqa: B027
        """Refuse a model that it cannot work on; called before training starts."""

    def answer(self, alert: Alert) -> Action | None:
        """Answer an alert.

        Args:
            alert: an alert that begins, gets worse or is resolved.

        Returns:
            What was done, or `None`.
        """
        if not self._is_for(alert):
            return None
        if alert.is_resolved:
            return self.undo(alert)
        if self.count >= self.at_most:
            return None
        self.count += 1  # before it acts, so that a checkpoint that it saves includes the count
        action = None
        try:
            action = self.act(alert)
        finally:
            if action is None or action.is_refusal:
                self.count -= 1
        return action

    def before_forward(self) -> None:  # noqa: B027
        """Prepare for a forward of the model that is about to run."""

    def report(self, record: Record) -> Any:
        """Return information from the first rank's reading, for `follow` on every rank.

        Args:
            record: the reading.

        Returns:
            Plain data, as JSON; over several ranks lists come for tuples.
        """
        return None

    def follow(self, record: Record, reported: Any) -> Action | None:
        """React to a reading, on every rank alike.

        Args:
            record: the reading of this rank.
            reported: the result of `report` on the first rank.

        Returns:
            What was done, or `None`.
        """
        return None

    def go_on(self, alert: Alert) -> Action | None:
        """Answer an alert that has been active since an earlier reading.

        Args:
            alert: the alert as it was reported.

        Returns:
            What was done; `None`, by default, for nothing.
        """
        return None

    def before_optimizer_step(self, optimizer: Optimizer) -> None:  # noqa: B027
        """Act on the gradients, after the backward and any unscaling, before clipping and the optimizer's step.

        Args:
            optimizer: the one that is about to step.
        """

    @abstractmethod
    def act(self, alert: Alert) -> Action | None:
        """Act on an alert that begins or gets worse; in a dry run only report it.

        Args:
            alert: the alert.

        Returns:
            What was done; `None` if there was nothing to do. That is not counted, and neither are refusals and
            exceptions.
        """

    def undo(self, alert: Alert) -> Action | None:
        """Undo lasting effects when an alert is resolved.

        Args:
            alert: the alert that is resolved.

        Returns:
            What was done, or `None`.
        """
        return None

    def state_dict(self) -> dict[str, Any]:
        """State for a resumed run.

        Returns:
            Plain data.
        """
        return {"count": self.count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of a checkpoint.

        Args:
            state: the result of `state_dict`.
        """
        self.count = state["count"]

    def _is_for(self, alert: Alert) -> bool:
        return (
            is_at_least(alert.level, self.on)
            and self.is_for_rule(alert.rule)
            and not self._is_left_alone(alert)
            and self.is_for_layer(alert.layer)
        )

    def _is_left_alone(self, alert: Alert) -> bool:
        """Whether the finding was there from the start: pretrained heads may be equal on purpose."""
        has_named = "rules" in vars(self)  # named by the user, not by the class
        return self.waits_for_change and not has_named and alert.finding.is_from_start and not alert.is_resolved

    def is_for_rule(self, name: str) -> bool:
        """Return whether it answers alerts of a rule.

        Args:
            name: name of the rule.

        Returns:
            True if `rules` holds it, or is not given and it is not "tied heads".
        """
        return name != TiedHeads.name if self.rules is None else name in self.rules

    def is_for_layer(self, name: str) -> bool:
        """Return whether it answers alerts of a layer.

        Args:
            name: name of the layer.

        Returns:
            True if `layers` is not given or has a pattern that matches.
        """
        return matches(name, self.layers)

    def __getstate__(self) -> dict[str, Any]:
        """Drop the training, so that callbacks can be copied and sent to other processes."""
        return {**self.__dict__, "_training": None}

    def _action(self, alert: Alert, done: str, **facts: Any) -> Action:
        """Report what was done, and on which alert."""
        verb = "would have " if self.dry_run else ""
        because = _because(alert)
        message = f"step {alert.step}, {alert.layer}: {self.name} {verb}{done} ({alert.rule}: {because})"
        return Action(alert.step, self.name, alert.layer, message, self.dry_run, facts)

    def _refusal(self, alert: Alert, why: str, **facts: Any) -> Action:
        """Report that nothing was done, and why."""
        because = _because(alert)
        message = f"step {alert.step}, {alert.layer}: {self.name} {why} ({alert.rule}: {because})"
        return Action(alert.step, self.name, alert.layer, message, self.dry_run, facts, is_refusal=True)


def _because(alert: Alert) -> str:
    """The state of an alert, as the reason for an action."""
    return {"resolved": "is over", "not measured": "is no longer measured", "not judged": "is no longer judged"}.get(
        alert.status, alert.status
    )
