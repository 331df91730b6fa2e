"""`Watch`: a monitor on a schedule, and what follows from each of its readings.

The one composition under Lightning, transformers and a plain loop: they tell it where the training is, and it reads,
writes the history, judges, intervenes and hands each `Outcome` to those who follow the run. Whatever goes wrong on the
way costs one warning.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, Protocol

from torch.optim import Optimizer

from hdi_callback.attention import AttentionLayer
from hdi_callback.errors import HDIError, MisconfigurationError
from hdi_callback.monitoring.alerts import Alert, Alerts
from hdi_callback.monitoring.faults import Faults, attempt_each
from hdi_callback.monitoring.history import History, read_records
from hdi_callback.monitoring.interventions import Action, Intervention, Training, plain_state
from hdi_callback.monitoring.interventions.intervention import WhileItStands
from hdi_callback.monitoring.monitor import HeadDiversityMonitor
from hdi_callback.monitoring.readings import AMBIGUOUS_MASK, Reading, Readout, Record
from hdi_callback.monitoring.schedule import Schedule
from hdi_callback.monitoring.state import FORMAT, sound_state

_MEASURING, _RESUMING = "measuring head diversity", "resuming head diversity"


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
        """Call it with what is new at one reading, with every alert even if it raises.

        Args:
            outcome: the reading and what came of it.
        """
        attempt_each(partial(self._function, alert) for alert in outcome.alerts)


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
        self._facts = monitor.facts
        self._is_reading_owed = False
        self._ahead: Readout | None = None
        self._unfinished: Reading | None = None
        self._on_the_way: deque[Readout] = deque()
        self.interventions = self._attach(training)

    def _attach(self, training: Training | None) -> tuple[Intervention, ...]:
        """Attach the interventions; one that fails in itself is left out, one that cannot work here is an error."""
        attached: list[Intervention] = []
        for intervention in self.interventions:
            assert training is not None
            try:
                intervention.attach(training)
            except HDIError:
                for one in attached:
                    with self.faults.contained(f"detaching the intervention {one.name}"):
                        one.detach()
                raise
            except Exception as error:
                self.faults.tell(f"attaching the intervention {intervention.name}, which is left out", error)
            else:
                attached.append(intervention)
        return tuple(attached)

    def begin(self, step: int, state: Mapping[str, Any] | None = None) -> None:
        """Take up where a checkpoint left off, if there is one, and mark the start in the history.

        Args:
            step: optimizer steps taken so far.
            state: what `state_of_this_model` gave.
        """
        if state is not None:
            with self.faults.contained(_RESUMING):
                self.load_state_dict(state)
        # Of a state that does not know its last reading all that the history holds so far counts.
        is_known = state is None or "last_step" in state
        last = (-1 if self.schedule.last is None else self.schedule.last) if is_known else step
        self._begin_history(step, state, last)
        if not is_known:
            with self.faults.contained(_RESUMING):
                self.schedule.last = self._share(self._last_in_history(step))  # every rank reads at the same steps
        if state is not None and self.alerts is not None and self.interventions:
            with self.faults.contained(_RESUMING):
                self._drop_what_no_longer_stands(self.alerts)

    def _last_in_history(self, step: int) -> int | None:
        if self.history is None or not self.history.path.is_file():
            return None
        return max((record.step for record in read_records(self.history.path) if record.step <= step), default=None)

    def _begin_history(self, step: int, state: Mapping[str, Any] | None, last: int) -> None:
        if self.history is None:
            return
        with self.faults.contained(f"writing {self.history.path}"):
            self.history.begin(step, self.monitor.facts, last_reading=last)
        if self.alerts is not None and state is not None and state.get("alerts") is None:
            with self.faults.contained(_RESUMING):
                self._judge_again(self.alerts, self.history, last)

    @property
    def is_reading_owed(self) -> bool:
        """Whether a forward is captured, or about to be, that has not been read yet."""
        return self._is_reading_owed

    def before_forward(self, step: int) -> None:
        """Capture the forward that follows if a reading is due.

        Args:
            step: optimizer steps taken so far.
        """
        if self._is_reading_owed:
            return
        if self.schedule.is_due(step):
            self._is_reading_owed = True
            self.monitor.arm(training_only=True)
        else:
            self.monitor.rest()

    def after_backward(
        self, step: int, *, epoch: int | None = None, axis: int | None = None, is_last: bool = True
    ) -> None:
        """Read if a reading is due, while the weights are still those of the forward and the activations are gone.

        Args:
            step: optimizer steps taken so far, that of the backward not included.
            epoch: the epoch, if there are epochs.
            axis: position on the trainer's own logging axis, if it differs from `step`.
            is_last: False if further networks may be trained before `after_step`, whose head outputs then join the
                reading.
        """
        if self._is_reading_owed:
            self._read(step, epoch, axis, is_last)
        elif self._unfinished is not None:
            self._complete(is_last)

    def abandon(self) -> None:
        """Give up a reading whose forward or backward did not come to its end; it is due again at once."""
        if self._is_reading_owed:
            self._is_reading_owed = False
            self.monitor.release()
        self._complete()

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
        self._complete()
        outcomes = []
        # Ranks that intervene do so after the same step, and wait for the numbers.
        while self._on_the_way and (self.interventions or self._on_the_way[0].is_ready()):
            outcomes += self._publish(self._on_the_way.popleft())
        return outcomes

    def read_ahead(self, step: int, *, epoch: int | None = None, axis: int | None = None) -> None:
        """Measure the weights for `finish`, which drops the reading if there are further steps.

        For trainers in which others put averaged weights into the model before `finish` is called.

        Args:
            step: optimizer steps taken so far.
            epoch: see `after_backward`.
            axis: see `after_backward`.
        """
        if step in (self.schedule.last, None if self._ahead is None else self._ahead.step):
            return
        with self.faults.contained(_MEASURING):
            self._ahead = Readout(self.monitor.measure(step, epoch=epoch, axis=axis))

    def finish(self, step: int, *, epoch: int | None = None, axis: int | None = None) -> None:
        """Read the final weights, make everything known, and leave nothing behind.

        Args:
            step: optimizer steps taken in all.
            epoch: see `after_backward`.
            axis: see `after_backward`.
        """
        if self.schedule.last != step and self._ahead is not None and self._ahead.step == step:
            self.schedule.done(step)
            self._on_the_way.append(self._ahead)
        elif self.schedule.last != step:
            self._read(step, epoch, axis)
        self._ahead = None
        self.flush()
        self.close()

    def flush(self, *, is_broken: bool = False) -> list[Outcome]:
        """Make known every reading that is on the way, waiting for its numbers.

        Args:
            is_broken: an exception ends the run, perhaps on this rank alone: nothing is done about alerts any more, as
                the other ranks may not come to agree on it.

        Returns:
            Their outcomes.
        """
        self._complete()
        outcomes = []
        while self._on_the_way:
            outcomes += self._publish(self._on_the_way.popleft(), may_intervene=not is_broken)
        return outcomes

    def close(self) -> None:
        """Leave no hook behind; calling it again does nothing."""
        self.monitor.close()
        for intervention in self.interventions:
            with self.faults.contained(f"detaching the intervention {intervention.name}"):
                intervention.detach()

    def state_dict(self) -> dict[str, Any]:
        """Give what a resumed run needs; readings on the way are made known first, so that none is lost.

        Returns:
            Plain data.
        """
        self.flush()
        return {
            **self.identity(),
            "alerts": None if self.alerts is None else self.alerts.state_dict(),
            "interventions": [(item.name, self._state_of(item)) for item in self.interventions],
        }

    def identity(self) -> dict[str, Any]:
        """Give what tells this run from others, and how far it has come.

        Returns:
            Plain data.
        """
        return {
            "format": FORMAT,
            "last_step": self.schedule.last,
            "history": None if self.history is None else str(self.history.path),
            "run": None if self.history is None else self.history.run,
            "layers": {
                layer.name: _sizes(layer) for layer in self.monitor.layers if layer.name not in self.monitor.found_late
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up where a checkpoint left off; a checkpoint of format 1 knows no alerts.

        Args:
            state: what `state_dict` gave, and `sound_state` has looked at.
        """
        self.schedule.last = state.get("last_step")
        alerts = state.get("alerts") or state.get("alerts_in_part")
        if self.alerts is not None and alerts is not None:
            self.alerts.load_state_dict(alerts)
        kept = list(state.get("interventions", ()))
        for intervention in self.interventions:
            place = next((place for place, (name, _) in enumerate(kept) if name == intervention.name), None)
            held = None if place is None else kept.pop(place)[1]  # several of one kind are told apart by their order
            if held is not None:
                self._restore(intervention, held)

    def _restore(self, intervention: Intervention, held: Any) -> None:
        """Give an intervention its state back, or leave it as it was if that fails half way."""
        with self.faults.contained(f"resuming the intervention {intervention.name}"):
            before = {name: copy.copy(value) for name, value in vars(intervention).items() if _is_plain(value)}
            try:
                intervention.load_state_dict(held)
            except Exception:
                vars(intervention).update(before)
                raise

    def _drop_what_no_longer_stands(self, alerts: Alerts) -> None:
        """Let nothing last for an alert that the state does not hold, as it would never end."""
        active = set(self._share([(alert.layer, alert.rule) for alert in alerts.active]))
        for intervention in self.interventions:
            if isinstance(intervention, WhileItStands):
                kept = {
                    layer: [rule for rule in rules if (layer, rule) in active]
                    for layer, rules in intervention.standing.items()
                }
                intervention.standing = {layer: rules for layer, rules in kept.items() if rules}

    def _judge_again(self, alerts: Alerts, history: History, last: int) -> None:
        """Find the alerts that stand from the history, where the checkpoint does not tell."""
        records = [one for one in read_records(history.path) if one.step <= last] if history.path.is_file() else []
        if records:
            alerts.load_state_dict({"active": [], "series": {}})
        for record in records:
            alerts.judge(record)

    def _state_of(self, intervention: Intervention) -> dict[str, Any]:
        """Give the state of an intervention as plain data, or no more than how often it has acted."""
        try:
            state: dict[str, Any] = plain_state(intervention.state_dict())
        except Exception as error:
            self.faults.tell(f"keeping the state of the intervention {intervention.name}", error)
            return {"count": intervention.count}
        return state

    def _read(self, step: int, epoch: int | None, axis: int | None, is_last_forward: bool = True) -> None:
        self._is_reading_owed = False
        self.schedule.done(step)
        with self.faults.contained(_MEASURING):
            self._unfinished = self.monitor.measure(step, epoch=epoch, axis=axis, is_last_forward=is_last_forward)
        if self.monitor.facts is not self._facts:
            self._learn(step)
        if not self.monitor.awaits_forwards:
            self._complete()

    def _learn(self, step: int) -> None:
        """Take in the layers that a real forward has shown."""
        self._facts = self.monitor.facts
        if self.alerts is not None:
            self.alerts.learn(self._facts)
        if self.history is not None:
            with self.faults.contained(f"writing {self.history.path}"):
                self.history.begin(step, self._facts)

    def _complete(self, is_last_forward: bool = True) -> None:
        """Add what was captured after the reading, and send it on its way once nothing more is awaited."""
        reading, self._unfinished = self._unfinished, None
        if reading is None:
            return
        with self.faults.contained(_MEASURING):
            if self.monitor.awaits_forwards:
                reading = self.monitor.complete(reading, is_last_forward=is_last_forward)
            if self.monitor.awaits_forwards:
                self._unfinished = reading
            else:
                self._on_the_way.append(Readout(reading))

    def _publish(self, readout: Readout, *, may_intervene: bool = True) -> list[Outcome]:
        """Turn one reading into numbers, judge it, intervene, and tell everybody."""
        try:
            record = readout.record()
        except Exception as error:
            self.faults.tell("reading out head diversity", error)
            return []
        if doubtful := [key.partition("/")[2] for key, why in record.absent.items() if why == AMBIGUOUS_MASK]:
            listed = ", ".join(f"`{name}`" for name in doubtful[:3]) + (" and others" if len(doubtful) > 3 else "")
            self.faults.say("padding", f"Head outputs of {listed} are absent: {AMBIGUOUS_MASK}.")
        alerts: list[Alert] = []
        if self.alerts is not None:
            with self.faults.contained("judging head diversity"):
                alerts = self.alerts.judge(record)
        # Written before anybody acts: what is done may be to end the run.
        self._keep(record, alerts, ())
        actions = self._intervene(alerts) if may_intervene else []
        self._keep(None, (), actions)
        outcome = Outcome(record, tuple(alerts), tuple(actions))
        for follower in self.followers:
            with self.faults.contained(follower.name):
                follower.follow(outcome)
        return [outcome]

    def _keep(self, record: Record | None, alerts: Sequence[Alert], actions: Sequence[Action]) -> None:
        """Write what is given to the history, each line even if one before it failed."""
        history = self.history
        if history is None:
            return
        lines: list[Callable[[], object]] = [] if record is None else [partial(history.write, record)]
        lines += [partial(_note, history, "alert", alert) for alert in alerts]
        lines += [partial(_note, history, "intervention", action) for action in actions]
        with self.faults.contained(f"writing {history.path}"):
            attempt_each(lines)

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


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | str | list | dict | set | tuple)


def _note(history: History, kind: str, item: Alert | Action) -> None:
    history.note(kind, **item.to_dict())


def state_of_this_model(
    state: Any, layers: Sequence[AttentionLayer], *, step: int | None = None, is_strict: bool, faults: Faults
) -> dict[str, Any] | None:
    """Take from a saved state what is sound, and nothing if it is of another model.

    It is of another if one of its layers is not there, or has other heads. Layers that have come in addition are no
    difference: their readings begin with the resumption. States of earlier versions tell no layers, and are taken as
    they are.

    Args:
        state: what a checkpoint held, whatever it is.
        layers: those that are watched now.
        step: optimizer steps taken when it is resumed.
        is_strict: refuse a state of another model.
        faults: turns it into a warning otherwise.

    Returns:
        The state, or `None`.

    Raises:
        MisconfigurationError: if it is of another model and `is_strict` is set.
    """
    sound = sound_state(state, step=step, faults=faults)
    now = {layer.name: _sizes(layer) for layer in layers}
    kept: Mapping[str, list[int]] = {} if sound is None else sound.get("layers", {})
    gone = [name for name, sizes in kept.items() if list(sizes) != now.get(name)]
    if not gone:
        return sound
    listed = ", ".join(f"`{name}`" for name in gone[:3]) + (f" and {len(gone) - 3} more" if len(gone) > 3 else "")
    message = f"The checkpoint was written with attention layers that are not there, or have other heads: {listed}."
    if is_strict:
        raise MisconfigurationError(f"{message} Write strict=False to begin a new history.")
    faults.say("another model", f"{message} History, alerts and interventions start anew.")
    return None


def check_patterns(what: str, patterns: Iterable[str], names: Sequence[str]) -> None:
    """Refuse patterns that match no layer.

    Args:
        what: where they were written.
        patterns: patterns of layer names.
        names: names of layers.

    Raises:
        MisconfigurationError: if one matches none; says which layers there are.
    """
    for pattern in patterns:
        if names and not any(fnmatchcase(name, pattern) for name in names):
            raise MisconfigurationError(
                f"The pattern {pattern!r} in {what} matches no attention layer. There are: {', '.join(names)}."
            )


def _sizes(layer: AttentionLayer) -> list[int]:
    return [layer.num_heads, layer.num_key_heads, layer.head_dim, layer.value_dim]
