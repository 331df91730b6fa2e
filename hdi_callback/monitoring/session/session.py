"""`Session`: one watched run, from finding the layers to the last reading.

It is the same under every trainer. A trainer's shell calls it at each event (a forward, a backward, a step); through
its `Host` it reads what it needs from the trainer. A failure costs one warning.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from hdi_callback.attention.hooks import all_or_no_hooks
from hdi_callback.errors import HDIError
from hdi_callback.guard import attempt_each
from hdi_callback.monitoring.alerts import Alert, Alerts
from hdi_callback.monitoring.history import History
from hdi_callback.monitoring.history.place import place_history
from hdi_callback.monitoring.interventions import Intervention, Training
from hdi_callback.monitoring.monitor import HeadDiversityMonitor
from hdi_callback.monitoring.ranks import number_of_processes, refuse_apart
from hdi_callback.monitoring.session.host import Host, HostTraining
from hdi_callback.monitoring.session.patterns import check_patterns
from hdi_callback.monitoring.session.position import Position
from hdi_callback.monitoring.session.publisher import Publisher
from hdi_callback.monitoring.session.reader import Reader
from hdi_callback.monitoring.session.resume import (
    end_what_is_resolved,
    judge_again,
    last_step_in,
    restore_interventions,
    state_of,
    state_of_this_model,
)
from hdi_callback.monitoring.session.schedule import Schedule
from hdi_callback.monitoring.session.settings import Settings
from hdi_callback.monitoring.session.sink import Result, Sink
from hdi_callback.monitoring.session.state import FORMAT
from hdi_callback.monitoring.warn_once import WarnOnce

_RESUMING = "resuming head diversity"


class Session:
    """Take readings on schedule; record, judge, intervene, publish.

    `Session.start` finds the layers; `open`, once it is known whether a checkpoint is resumed, opens the history and
    the sinks; then come the forwards, backwards and steps; `finish` takes the last reading.

    Args:
        monitor: the monitor.
        host: the trainer.
        settings: the settings of the run.
        name: name of its history, if the folder holds several.
        warn_once: warns once of each kind of failure.
        schedule: when a reading is due; by default as the settings say.

    Attributes:
        monitor: the monitor.
        alerts: the rules; `None` for no alerts.
        interventions: the interventions.
        history: the history file; `None` before `open`, if there is none, and on all ranks but the first.
    """

    def __init__(
        self,
        monitor: HeadDiversityMonitor,
        host: Host,
        settings: Settings,
        *,
        name: str | None = None,
        warn_once: WarnOnce | None = None,
        schedule: Schedule | None = None,
    ) -> None:
        self.monitor, self.warn_once = monitor, WarnOnce() if warn_once is None else warn_once
        schedule = Schedule(settings.every_n_steps) if schedule is None else schedule
        self._reader = Reader(monitor, schedule, self.warn_once)
        self.alerts = None
        if settings.rules is not None:
            self.alerts = Alerts(settings.rules, monitor.facts, self.warn_once, pretrained=settings.pretrained)
        self.interventions: tuple[Intervention, ...] = tuple(settings.interventions or ())
        self.history: History | None = None
        self._host, self._settings, self._name = host, settings, name
        self._facts = monitor.facts
        self._failed_in_steps: list[Intervention] = []
        self._publisher = self._publisher_to(())
        self._is_attached = False
        self._final_step: int | None = None

    @classmethod
    def start(cls, model: nn.Module, host: Host, settings: Settings, **options: Any) -> Session:
        """Find the layers of a model and install the hooks, before anything has been compiled or run.

        Args:
            model: any module that contains attention layers.
            host: the trainer.
            settings: the settings of the run.
            options: further arguments of `Session`.

        Returns:
            The session.

        Raises:
            MisconfigurationError: if the settings cannot work on this model.
        """
        refuse_apart(settings.process_group, [item.name for item in settings.acting])
        with all_or_no_hooks(model):
            monitor = HeadDiversityMonitor(model, **settings.measuring)
        try:
            names = [layer.name for layer in monitor.layers] + [refusal.name for refusal in monitor.refused]
            for what, patterns in settings.layer_patterns.items():
                check_patterns(what, patterns, names)
            return cls(monitor, host, settings, **options)
        except Exception:
            monitor.close()
            raise

    def attach(self, training: Training | None = None) -> None:
        """Attach the interventions; one that fails is left out, one that cannot work on this model is an error.

        Args:
            training: the training that they act on; by default through the host.

        Raises:
            HDIError: if an intervention cannot work on this training; all are detached then.
        """
        if self._is_attached:
            return
        training = HostTraining(self._host, self.monitor) if training is None else training
        failed: list[int] = []
        for number, intervention in enumerate(self.interventions):
            try:
                intervention.attach(training)
            except HDIError:  # noqa: PERF203
                self.close()
                raise
            except Exception as error:
                self.warn_once.error(f"attaching the intervention {intervention.name}, which is left out", error)
                failed.append(number)
        every, self._is_attached = self.interventions, True
        if every:
            apart = list(range(len(every)))  # unless the ranks agree
            meeting = self.monitor.rendezvous
            with self.warn_once.guard("agreeing on interventions, which are left out,"), meeting.acting():
                apart = meeting.failed_apart(failed, len(every))
            self._leave_out([every[number] for number in apart if number not in failed])
        gone = [every[number] for number in failed]
        self.interventions = tuple(one for one in self.interventions if one not in gone)

    def _leave_out(self, interventions: Sequence[Intervention]) -> None:
        """End interventions that cannot act on every rank."""
        for intervention in interventions:
            self._detach(intervention)
            self.warn_once.warn(
                f"leaving out {intervention.name}",
                f"The intervention {intervention.name} is left out from now on, as it failed on some of the ranks and "
                "not on all of them: if it changes weights, they may differ between the ranks.",
            )
        self.interventions = tuple(one for one in self.interventions if one not in interventions)
        self._publisher = replace(self._publisher, interventions=self.interventions)

    def accept(self, state: Any, step: int | None = None) -> dict[str, Any] | None:
        """The valid part of a saved state; `None` if it is of another model.

        Args:
            state: the state in a checkpoint, valid or not.
            step: optimizer steps taken when it is resumed.

        Returns:
            The argument of `open`.

        Raises:
            MisconfigurationError: if it is of another model and the settings are strict.
        """
        strict = self._settings.strict
        layers, is_alone = self.monitor.layers, self.monitor.ranks.size == 1
        return state_of_this_model(
            state, layers, step=step, is_strict=strict, warn_once=self.warn_once, is_alone=is_alone
        )

    def open(self, state: Mapping[str, Any] | None = None, *, history: History | None = None) -> None:
        """Open the history and the sinks, restore the state of a checkpoint, and mark the start in the history.

        Args:
            state: the result of `accept`.
            history: the history that an earlier session of the same run has opened.
        """
        self.attach()
        folder = self._host.folder  # every rank asks for it
        if history is None and self._host.is_first_rank:
            with self.warn_once.guard("opening the history"):
                choice, say = self._settings.history, self.warn_once.warn
                history = place_history(choice, folder, state=state, name=self._name, say=say, **self._settings.keeping)
        self.connect(history, state)
        self._resume(self._host.position.step, state)
        if self.interventions:
            self.monitor.meet()  # they may act before the first reading, in a run that is resumed

    def connect(self, history: History | None, state: Mapping[str, Any] | None = None) -> None:
        """Publish to a history and to the sinks of the host.

        Args:
            history: the history file.
            state: the result of `accept`.
        """
        self.history = history
        sinks: Sequence[Sink] = ()
        with self.warn_once.guard("opening the dashboards"):
            sinks = self._host.sinks(self.monitor, history, state)
        self._publisher = self._publisher_to(sinks)

    def _publisher_to(self, sinks: Sequence[Sink]) -> Publisher:
        meeting, out = self.monitor.rendezvous, self._leave_out
        return Publisher(
            self.history, self.alerts, self.interventions, sinks, meeting, out, self.warn_once, self._failed_in_steps
        )

    def _resume(self, step: int, state: Mapping[str, Any] | None) -> None:
        if state is not None:
            with self.warn_once.guard(_RESUMING):
                self.load_state_dict(state)
        # For a state without its last reading, all readings of the history so far count.
        is_known = state is None or "last_step" in state
        last = (-1 if self.schedule.last is None else self.schedule.last) if is_known else step
        if self.history is not None:
            with self.warn_once.guard(f"writing {self.history.path}"):
                self.history.begin(step, self.monitor.facts, last_reading=last)
            if self.alerts is not None and state is not None and state.get("alerts") is None:
                with self.warn_once.guard(_RESUMING):
                    judge_again(self.alerts, self.history, last)
        if not is_known:
            with self.warn_once.guard(_RESUMING):
                self.schedule.resume_after(self._last_step_without_state(step))
        if self.alerts is not None and self.interventions:  # on every rank, even if only some have a state
            mine = None
            with self.warn_once.guard(_RESUMING):
                mine = None if state is None else [(alert.layer, alert.rule) for alert in self.alerts.active]
            active = self.from_first_rank(mine)
            if state is not None and active is not None:
                with self.warn_once.guard(_RESUMING):
                    end_what_is_resolved(self.interventions, {(layer, rule) for layer, rule in active})

    def from_first_rank(self, value: Any) -> Any:
        """Return the value of the first rank on every rank; all of them call this.

        Args:
            value: plain data, as JSON.

        Returns:
            That of the first rank; this rank's own if they could not agree.
        """
        known = [value]
        with self.warn_once.guard(_RESUMING), self.monitor.rendezvous.acting():
            known.append(self.monitor.rendezvous.share(value))
        return known[-1]

    def _last_step_without_state(self, step: int) -> int | None:
        if number_of_processes() == 1 or self._settings.process_group is None:
            return last_step_in(self.history, step)
        # Another rank may have a valid state, so no collective call is made here. Every rank knows by itself that all
        # readings before this step were taken, and one that is due at it was not.
        return step - 1 if step > 0 else None

    @property
    def schedule(self) -> Schedule:
        """The schedule: when a reading is due."""
        return self._reader.schedule

    @property
    def history_path(self) -> Path | None:
        """Path of the history; `None` before `open` and if there is none."""
        return None if self.history is None else self.history.path

    @property
    def active_alerts(self) -> list[Alert]:
        """The alerts that are active now."""
        return [] if self.alerts is None else self.alerts.active

    @property
    def is_capturing(self) -> bool:
        """Whether a forward is armed or captured, and not measured yet."""
        return self._reader.is_capturing

    def before_forward(self) -> None:
        """Capture the forward that follows if a reading is due."""
        for intervention in self.interventions:
            self._let(intervention, intervention.before_forward)
        self._reader.before_forward(self._host.position.step)

    def after_backward(self, *, is_last: bool = True) -> None:
        """Read if a reading is due, while the weights are still those of the forward and the activations are gone.

        Args:
            is_last: False if further networks may be trained before `after_step`, whose head outputs belong to the same
                reading.
        """
        self._reader.after_backward(self._host.position, is_last=is_last)
        self._learn_layers()

    def abandon(self) -> None:
        """Give up a reading whose forward or backward did not finish; it is due again at once."""
        self._reader.abandon()

    def before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Let interventions act on the gradients.

        Args:
            optimizer: the one that is about to step.
        """
        for intervention in self.interventions:
            self._let(intervention, intervention.before_optimizer_step, optimizer)

    def _let(self, intervention: Intervention, act: Callable[..., object], *args: Any) -> None:
        """Let an intervention act within a step; the ranks hear at the next reading if it fails."""
        with self.warn_once.guard(f"the intervention {intervention.name}"):
            try:
                act(*args)
            except Exception:
                if intervention not in self._failed_in_steps:
                    self._failed_in_steps.append(intervention)
                raise

    def after_step(self) -> list[Result]:
        """Publish the readings whose numbers have arrived.

        Returns:
            Their results.
        """
        self._reader.after_step(self._host.position)
        self._learn_layers()
        # Ranks must intervene after the same step, so they wait for the numbers.
        return self._publish(waits=bool(self.interventions))

    def measure_final_early(self, position: Position) -> None:
        """Measure the weights early for `finish`; the reading is dropped if there are further steps.

        For trainers in which other callbacks put averaged weights into the model before `finish`.

        Args:
            position: where the training is.
        """
        self._reader.measure_final_early(position)

    def finish(self, position: Position | None = None) -> None:
        """Read the final weights, publish everything, and remove all hooks.

        Args:
            position: position at the end of the training; by default that of the host.
        """
        position = self._host.position if position is None else position
        self._final_step = position.step
        lasts = [lambda: self._reader.finish(position), lambda: self._learn_layers(position)]
        if self.history is not None:
            lasts.append(partial(self.history.end_with, position.step))
        attempt_each([*lasts, self.flush, self.close])

    def flush(self, *, is_broken: bool = False) -> list[Result]:
        """Publish every pending reading, waiting for its numbers.

        Args:
            is_broken: an exception ends the run, perhaps on this rank alone: interventions do nothing any more, as the
                other ranks may not take part.

        Returns:
            Their results.
        """
        self._reader.complete()
        return self._publish(waits=True, may_intervene=not is_broken)

    def close(self) -> None:
        """Remove all hooks; calling it again does nothing."""
        detached = [partial(self._detach, intervention) for intervention in self.interventions]
        attempt_each([self.monitor.close, *detached])

    def _detach(self, intervention: Intervention) -> None:
        with self.warn_once.guard(f"detaching the intervention {intervention.name}"):
            intervention.detach()

    def state_dict(self) -> dict[str, Any]:
        """State for a resumed run; pending readings are published first, so that none is lost.

        Returns:
            Plain data.
        """
        with self.warn_once.guard("publishing readings"):
            self.flush()
        alerts = None
        with self.warn_once.guard("keeping the state of alerts"):  # without it they are judged again
            alerts = None if self.alerts is None else self.alerts.state_dict()
        return {
            **self.identity(),
            "alerts": alerts,
            "interventions": [(item.name, state_of(item, self.warn_once)) for item in self.interventions],
        }

    def identity(self) -> dict[str, Any]:
        """Identity of this run and its last step, for a checkpoint.

        Returns:
            Plain data.
        """
        return {
            "format": FORMAT,
            "last_step": self.schedule.last,
            "history": None if self.history is None else str(self.history.path),
            "run": None if self.history is None else self.history.run,
            "layers": self.monitor.sizes(),
            **({"spans_ranks": True} if self.monitor.spans_ranks else {}),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of a checkpoint; one of format 1 holds no alerts.

        Args:
            state: the result of `accept`.
        """
        self.schedule.resume_after(state.get("last_step"))
        alerts = state.get("alerts") or state.get("alerts_in_part")
        if self.alerts is not None and alerts is not None:
            self.alerts.load_state_dict(alerts)
        restore_interventions(self.interventions, state.get("interventions", ()), self.warn_once)

    def _learn_layers(self, position: Position | None = None) -> None:
        """Add the layers that a real forward has shown."""
        if self.monitor.facts is self._facts:
            return
        self._facts = self.monitor.facts
        if self.alerts is not None:
            self.alerts.learn(self._facts)
        if self.history is not None:
            step = (self._host.position if position is None else position).step
            with self.warn_once.guard(f"writing {self.history.path}"):
                self.history.begin(step, self._facts)

    def _publish(self, *, waits: bool, may_intervene: bool = True) -> list[Result]:
        results: list[Result] = []
        for readout in self._reader.arrived(waits=waits):
            is_last = readout.step == self._final_step
            results += self._publisher.publish(readout, may_intervene=may_intervene, is_last=is_last)
        return results
