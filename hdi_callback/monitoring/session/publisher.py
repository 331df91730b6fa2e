"""`Publisher`: turns a reading into a record, alerts and actions, and writes them to history and sinks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from hdi_callback.guard import attempt_each
from hdi_callback.monitoring.alerts import Alert, Alerts, heads_written
from hdi_callback.monitoring.history import History
from hdi_callback.monitoring.interventions import Action, Intervention, WhileActive
from hdi_callback.monitoring.ranks.rendezvous import FailedApartError, Rendezvous
from hdi_callback.monitoring.readings import AMBIGUOUS_MASK, READING_OUT, Readout, Record
from hdi_callback.monitoring.session.sink import Result, Sink
from hdi_callback.monitoring.warn_once import WarnOnce

_INTERVENING = "agreeing on interventions"


@dataclass(frozen=True)
class Publisher:
    """Records a reading, judges it, intervenes, and writes the result to every sink.

    Attributes:
        history: the history file; `None` for none.
        alerts: the rules; `None` for no alerts.
        interventions: the interventions.
        sinks: the sinks of results.
        ranks: how all ranks intervene alike.
        leave_out: takes the interventions that have failed on some of the ranks alone.
        warn_once: warns once of each kind of failure.
        failed_in_steps: those that have failed on this rank since the last reading, within a step.
    """

    history: History | None
    alerts: Alerts | None
    interventions: Sequence[Intervention]
    sinks: Sequence[Sink]
    ranks: Rendezvous
    leave_out: Callable[[Sequence[Intervention]], None]
    warn_once: WarnOnce
    failed_in_steps: list[Intervention] = field(default_factory=list)

    def publish(self, readout: Readout, *, may_intervene: bool = True, is_last: bool = False) -> list[Result]:
        """Turn one reading into numbers; record, judge, intervene, and write the result.

        Args:
            readout: the reading; waits for its numbers.
            may_intervene: False after an exception, as other ranks may not take part any more.
            is_last: this is the last reading of the run.

        Returns:
            The result; without numbers, but with the reason, if they cannot be read.
        """
        try:
            record = readout.record()
        except Exception as error:
            self.warn_once.error(READING_OUT, error)
            record = readout.without_numbers()
        if doubtful := [key.partition("/")[2] for key, why in record.absent.items() if why == AMBIGUOUS_MASK]:
            listed = ", ".join(f"`{name}`" for name in doubtful[:3]) + (" and others" if len(doubtful) > 3 else "")
            self.warn_once.warn("padding", f"Head outputs of {listed} are absent: {AMBIGUOUS_MASK}.")
        alerts: list[Alert] = []
        try:
            if self.alerts is not None:
                with self.warn_once.guard("judging head diversity"):
                    alerts = self.alerts.judge(record)
        finally:  # also if the user interrupts it; and before any intervention acts, which may end the run
            self._write(record, alerts, ())
        actions = self._intervene(record, alerts) if may_intervene else []
        self._write(None, (), actions)
        active = None if self.alerts is None else tuple(self.alerts.active)
        result = Result(record, tuple(alerts), tuple(actions), active, is_last)
        for sink in self.sinks:
            with self.warn_once.guard(sink.name):
                sink.write(result)
        return [result]

    def _write(self, record: Record | None, alerts: Sequence[Alert], actions: Sequence[Action]) -> None:
        """Write to the history, every line even if one before it failed."""
        history = self.history
        if history is None:
            return
        lines: list[Callable[[], object]] = [] if record is None else [partial(history.write, record, alerts)]
        lines += [partial(_note, history, "alert", alert) for alert in alerts]
        lines += [partial(_note, history, "intervention", action) for action in actions]
        with self.warn_once.guard(f"writing {history.path}"):
            attempt_each(lines)

    def _intervene(self, record: Record, alerts: Sequence[Alert]) -> list[Action]:
        actions: list[Action] = []
        if not self.interventions:
            return actions
        apart: Sequence[int] = ()
        with self.warn_once.guard(_INTERVENING):
            try:
                with self.ranks.acting():
                    decided = self.ranks.share(self._seen(record, alerts))
                    failed = self._act(record, decided, actions)
                    failed += [self.interventions.index(intervention) for intervention in self.failed_in_steps]
                    self.failed_in_steps.clear()
                    apart = self.ranks.failed_apart(failed, len(self.interventions))
            except FailedApartError:
                apart = range(len(self.interventions))
                raise
            finally:  # those that failed on some ranks alone would act differently from now on
                if apart:
                    self.leave_out([self.interventions[number] for number in apart])
        return actions

    def _act(self, record: Record, decided: Any, actions: list[Action]) -> list[int]:
        """Let interventions act on what the first rank has seen; return the numbers of those that failed."""
        *listed, reported = decided
        new, going_on = ([Alert.from_dict(one) for one in alerts] for alerts in listed)
        failed: list[int] = []  # numbers of those that have begun and not come to their end
        for alerts_of, is_new in ((new, True), (going_on, False)):
            for alert in alerts_of:
                for number, intervention in enumerate(self.interventions):
                    with self.warn_once.guard(f"the intervention {intervention.name}"):
                        failed.append(number)
                        action = intervention.answer(alert) if is_new else intervention.go_on(alert)
                        if action is not None:
                            actions.append(action)
                            if self.alerts is not None:
                                self.alerts.rewrite(action.layer, heads_written(action.to_dict()))
                        failed.pop()
        active = {(alert.layer, alert.rule) for alert in (*new, *going_on) if not alert.is_resolved}
        for number, intervention in enumerate(self.interventions):
            if isinstance(intervention, WhileActive):
                with self.warn_once.guard(f"the intervention {intervention.name}"):
                    failed.append(number)
                    actions += intervention.end_all_but(active, record.step)
                    failed.pop()
        for number, (intervention, report) in enumerate(zip(self.interventions, reported)):
            with self.warn_once.guard(f"the intervention {intervention.name}"):
                failed.append(number)
                action = intervention.follow(record, report)
                if action is not None:
                    actions.append(action)
                failed.pop()
        return failed

    def _seen(self, record: Record, alerts: Sequence[Alert]) -> Any:
        news = {(alert.layer, alert.rule) for alert in alerts}
        active = [] if self.alerts is None else self.alerts.active
        earlier = [alert for alert in active if (alert.layer, alert.rule) not in news]
        reports: list[Any] = [None] * len(self.interventions)
        for place, intervention in enumerate(self.interventions):
            with self.warn_once.guard(f"the intervention {intervention.name}"):
                reports[place] = intervention.report(record)
        return [alert.to_dict() for alert in alerts], [one.to_dict() for one in earlier], reports


def _note(history: History, kind: str, item: Alert | Action) -> None:
    history.note(kind, **item.to_dict())
