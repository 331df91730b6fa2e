"""`Session`: one watched run, from the first forward to the last reading.

It is the same under every trainer. An integration calls it at each event of the training; through its `Trainer` it
reads what it needs from the training.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from time import perf_counter, time
from typing import Any
from uuid import uuid4

import torch
from torch import nn

from hdi_callback.dashboards import Console, Curves, sink_for
from hdi_callback.errors import HDIError, NothingToWatchError
from hdi_callback.guard import Guard, describe, guarded, pythons_generator_kept
from hdi_callback.history import History, load_history
from hdi_callback.interventions import Intervention, Training
from hdi_callback.monitor import HeadDiversityMonitor, Reading
from hdi_callback.monitor.ranks import begun, number_of_ranks, store_of_ranks, timeout_of_ranks, why_apart
from hdi_callback.record import Action, Alert, Record
from hdi_callback.rules import Alerts
from hdi_callback.session.cost import Cost
from hdi_callback.session.settings import Settings
from hdi_callback.session.trainer import Trainer

_LONGEST_WAIT = 60.0  # seconds, for ranks that may have no monitor
_PATIENCE = 8  # readings that find nothing, until that is said
_SIZES = ("num_heads", "num_key_heads", "head_dim", "value_dim")
Dashboard = Console | Curves
Sink = History | Dashboard
_STATE = {"step", "last_step", "history", "run", "layers", "alerts", "interventions", "contract"}


class Session:
    """Takes readings on schedule; judges, intervenes, records, shows.

    A reading is due at step 0 and whenever a multiple of ``every_n_steps`` has been reached since the last one, as the
    count of steps may advance by more than one, repeat, or start in the middle. It is taken after the backward of the
    forward that was captured, while the weights are still those of the forward: they and samples are copied. It is
    handed on once the optimizer has stepped: a thread measures the copies, makes the record, judges it and writes it to
    history and TensorBoard, in order, and the training's own thread gives it to the other dashboards later. With
    interventions all is done at once.
    """

    def __init__(self, model: nn.Module, settings: Settings, trainer: Trainer, *, guard: Guard) -> None:
        options = {name: getattr(settings, name) for name in ("include", "exclude", "max_tokens", "padding")}
        self.monitor = HeadDiversityMonitor(model, metrics=settings.measured, **options)
        self.alerts: Alerts | None = None  # before the first forward, and for no alerts
        self.history: History | None = None  # before the first forward, if there is none, and on further ranks
        self.last_step: int | None = None  # of the last reading that was taken
        self.latest: Record | None = None  # the last one that was delivered
        self._settings, self._trainer, self._guard = settings, trainer, guard
        self._folder = trainer.folder.absolute()  # the training may change its directory
        self._state: Mapping[str, Any] | None = None  # of a checkpoint, until the layers are known
        self._interventions: tuple[Intervention, ...] = ()
        self._sinks: list[Dashboard] = []
        self._facts: list[dict[str, Any]] = []  # of the layers
        self._armed_at: int | None = None  # step whose forward is captured
        self._pending: deque[Reading | Record] = deque()
        self._worker = ThreadPoolExecutor(1, "hdi_callback")
        self._judging: deque[Future[Record]] = deque()  # of the readings that the worker has, in order
        self._cost = Cost()
        self._last_delivered_step: int | None = None
        self._run = ""  # name of the run, if it is a new one
        self._number_of_given_up = 0  # readings, as nothing was there to be read
        self._number_of_layers = 0  # that rules, history and dashboards know
        self._has_checked_ranks = self._is_open = self._is_closed = self._is_alone = False
        self.monitor.pause()  # an evaluation may come first

    # The events of a training, in the order in which they come.

    def before_forward(self) -> None:
        """Capture the forward that follows if a reading is due."""
        if self._is_closed:
            return
        self.monitor.go_on()
        if self._armed_at is not None:
            return
        if not self._has_checked_ranks:
            self._check_ranks()
        elif self._is_open and not self.monitor.layers:
            return
        step, every = self._trainer.step, self._settings.every_n_steps
        self._cost.begin(step)
        is_due = self.last_step is None or step // every > self.last_step // every
        if is_due and not self._is_closed:  # `_check_ranks` may have closed it
            self._armed_at = step
            if self.monitor.contract.is_comparing:
                self._deliver(waits=True, intervenes=False)  # this reading confirms what the last one has seen
            self.monitor.arm()
            step_of_training, contract = self.monitor.training_step, self.monitor.contract
            step_of_training.arm(self._trainer.optimizers, self.monitor.layers, compares=contract.is_comparing)
        else:
            self.monitor.disarm()

    def after_backward(self) -> None:
        """Measure if a reading is due, while the weights are still those of the forward."""
        if self._armed_at is None:
            return
        if not self.monitor.layers and self.monitor.is_looking:
            self.abandon()  # no forward has shown heads so far: an empty batch, a dropped layer, an error
            self._number_of_given_up += 1
            if self._number_of_given_up == _PATIENCE:
                self._guard.warn_once("layers", f"{self.monitor.why_nothing()} Heads are not watched so far.")
            return
        self._measure(self._armed_at)

    def before_closure(self) -> None:
        """Measure once the forward that an optimizer's closure runs has been captured, before its weights change."""
        if self._armed_at is not None:
            self.monitor.when_called(self._measure_within)

    _measure_within = guarded("measuring head diversity", passes=(HDIError,))(after_backward)

    def after_step(self, loss: Any = None) -> None:
        """Deliver the readings whose numbers have arrived, and keep the loss; forwards are left alone from now on."""
        self.monitor.pause()
        self.after_backward()  # of a batch without a backward
        last = self._pending[-1] if self._pending else None
        if isinstance(last, Reading) and loss is not None:
            last.keep_loss(loss)
        if isinstance(last, Reading) and self.monitor.training_step.written:
            last.written, self.monitor.training_step.written = self.monitor.training_step.written, ()
        start = perf_counter()
        # All ranks intervene after the same step, so they wait for the numbers.
        self._judge_and_deliver(waits=bool(self._settings.interventions), before=self._trainer.step)
        has_reading = last is not None and last.step == self.last_step
        self._cost.end(self._trainer.step, start, has_reading=has_reading)

    def abandon(self) -> None:
        """Give up a reading whose forward or backward did not finish; it is due again at once."""
        self._cost.abandon()
        self.monitor.pause()
        if self._armed_at is not None:
            self._armed_at = None
            self.monitor.disarm()
            self.monitor.training_step.drop()

    def flush(self) -> None:
        """Deliver every reading that is complete, waiting for its numbers."""
        self._judge_and_deliver(waits=True, before=self._trainer.step)

    def finish(self) -> None:
        """Read the final weights, deliver everything, and close."""
        if self._is_closed:
            return
        self.abandon()
        step = self._trainer.step
        if self._is_open and self.monitor.layers and self.last_step != step:
            self._measure(step)
        self._judge_and_deliver(waits=True, final=step)
        self.close()
        self.monitor.training_step.remove()

    def close(self) -> None:
        """Deliver what was measured, without waiting for other ranks, and remove all hooks; again it does nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            self._judge_and_deliver(waits=True, may_intervene=False)
        finally:
            self._worker.shutdown()
            self.monitor.close()
            self._close_sinks()

    def _close_sinks(self) -> None:
        """Close dashboards and history."""
        for sink in self._sinks_of(worker=True) + self._sinks_of(worker=False):
            with self._showing(sink.name):
                sink.close()

    @contextmanager
    def _showing(self, name: str) -> Iterator[None]:
        """Guard a sink by itself, as the others go on without it."""
        with self._guard(name), pythons_generator_kept():
            yield

    # What a resumed run needs.

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a resumed run, as plain data; complete readings are delivered first."""
        if not self._is_open:
            return dict(self._state or {})
        if not self._interventions:  # their readings have been delivered on every rank
            self.flush()
        return {
            "step": self._trainer.step,
            "last_step": self._last_delivered_step,
            "history": None if self.history is None else str(self.history.path),
            "run": None if self.history is None else self.history.run,
            "layers": self._sizes(),
            "alerts": None if self.alerts is None else self.alerts.state_dict(),
            "interventions": [(item.name, item.state_dict()) for item in self._interventions],
            "contract": self.monitor.contract.state_dict(),
        }

    def load_state_dict(self, state: Any) -> None:
        """Take the state of a checkpoint, before the first step; one that is none costs a warning and a new start."""
        if not state:
            return
        last = state["last_step"] if isinstance(state, Mapping) and set(state) >= _STATE else ""
        if last is None or (type(last) is int and 0 <= last <= self._trainer.step):
            self._state, self.last_step = state, last
        else:
            self._start_anew("it is not what `state_dict` gave at this step or before")

    def _start_anew(self, why: str) -> None:
        self._state = None
        self._guard.warn_once(
            "resuming", f"The state in the checkpoint is not used: {why}. History, alerts and interventions start anew."
        )

    def _sizes(self) -> dict[str, list[int]]:
        return {layer.name: [getattr(layer, size) for size in _SIZES] for layer in self.monitor.layers}

    # One reading.

    def _measure(self, step: int) -> None:
        """Measure; a failure marks the reading."""
        self._armed_at, self.last_step = None, step
        if not self._is_open or len(self.monitor.layers) not in {0, self._number_of_layers}:
            # Other ranks wait for the readings of this one, which goes on without what has failed.
            try:
                with self._guard("starting to watch heads", passes=(HDIError,)):
                    self._open()
            except HDIError:  # misuse, before the first step
                self.close()
                raise
        if self._is_closed or not self.monitor.layers:
            return
        try:
            reading: Reading | Record = self.monitor.measure(step)
        except Exception as error:
            if self._follow_ranks() or not self.monitor.layers:  # that all have left their places was told
                return
            reading = self._marked(step, error)
        self._pending.append(reading)
        self._follow_ranks()

    def _marked(self, step: int, error: Exception) -> Record:
        """Return a record without numbers, and with the reason; warns once."""
        self._guard.failed("measuring head diversity", error)
        return Record(step, {}, time=time(), absent={"reading": describe(error)})

    def _judge_and_deliver(
        self, *, waits: bool, before: int | None = None, final: int | None = None, may_intervene: bool = True
    ) -> None:
        """Have readings of steps before `before` judged in order, all or those on the host, and deliver them."""
        if self._pending:
            self._follow_ranks()
        intervenes = bool(self._settings.interventions) and may_intervene
        # That of the present step is not complete: under gradient accumulation the optimizer has yet to step.
        while self._pending and (before is None or self._pending[0].step < before):
            reading = self._pending.popleft()
            notes = {"is_last": reading.step == final, "cost": self._cost.share()}
            sinks = () if intervenes else self._sinks_of(worker=True)
            self._judging.append(self._worker.submit(self._judge, reading, notes, sinks))
            if intervenes:  # the next one is judged after it
                self._deliver(waits=True, intervenes=True)
        self._deliver(waits=waits, intervenes=intervenes)

    def _judge(self, reading: Reading | Record, notes: Mapping[str, Any], sinks: Sequence[Sink]) -> Record:
        """Make a record and judge it, and write it to some sinks; in the worker."""
        try:
            record = replace(reading if isinstance(reading, Record) else reading.record(), **notes)
        except Exception as error:
            record = replace(self._marked(reading.step, error), **notes)
        if self.alerts is not None:
            with self._guard("judging head diversity"):
                alerts = (*record.alerts, *self.alerts.judge(record))
                record = replace(record, alerts=alerts, active=self.alerts.active)
        for sink in sinks:
            with self._guard(sink.name):  # the training draws from Python's generator meanwhile
                sink.write(record)
        return record

    def _sinks_of(self, *, worker: bool) -> list[Sink]:
        """Return the sinks that the worker may write to, or those of the training's own thread."""
        sinks = self._sinks if self.history is None else [self.history, *self._sinks]
        return [sink for sink in sinks if sink.is_thread_safe is worker]

    def _deliver(self, *, waits: bool, intervenes: bool) -> None:
        """Intervene, and write records that were judged to every dashboard; those that are done, or all."""
        while self._judging and (waits or self._judging[0].done()):
            record = self._judging.popleft().result()
            self.monitor.contract.heed(record.alerts)
            try:
                if intervenes:
                    record = self._intervene(record)
            finally:  # also if the user's function ends the run
                self.latest = record
                for sink in (self._sinks_of(worker=True) if intervenes else []) + self._sinks_of(worker=False):
                    with self._showing(sink.name):
                        sink.write(record)
            self._last_delivered_step = record.step

    def _intervene(self, record: Record) -> Record:
        """Return the record with the alerts of the first rank, by which all ranks act alike, and with the actions."""
        ranks = self.monitor.join_ranks()
        if ranks.size > 1:
            own = [[asdict(alert) for alert in alerts] for alerts in (record.alerts, record.active)]
            decided = ranks.from_first(f"the decision at step {record.step}", own)
            alerts, active = (tuple(map(Alert.from_dict, listed)) for listed in decided)
            record = replace(record, alerts=alerts, active=active)
        actions: list[Action] = []
        for intervention in () if ranks.difference else self._interventions:
            with self._guard(f"the intervention {intervention.name}"):
                actions += intervention.handle(record)
        if actions:
            self.monitor.training_step.accept()
        return replace(record, actions=tuple(actions))

    # The beginning.

    def _check_ranks(self) -> None:
        """Make sure that all ranks watch alike; nothing is watched otherwise, as they would wait for each other."""
        self._has_checked_ranks = True
        settings, self._run = self._settings, uuid4().hex
        if number_of_ranks() == 1:
            return
        self._run = str(store_of_ranks().compare_set(begun("run"), "", self._run).decode())  # no rank waits
        shared = {name: getattr(settings, name) for name in ("every_n_steps", "include", "exclude", "max_tokens")}
        shared |= {"metrics": settings.measured, "last reading": self.last_step}
        shared["interventions"] = [intervention.name for intervention in settings.interventions or ()]
        # A rank without a monitor never comes here, and goes on to the next collective call of the training, in which
        # it waits for the others. So each waits for a third of the group's timeout at most.
        limit = min(timeout_of_ranks() / 3, _LONGEST_WAIT)
        why = why_apart(f"{begun('sessions')}/the start of watching", shared, limit)
        if why:
            needs = "Every rank needs the callback, with the same arguments."
            self._guard.warn_once("ranks", f"Heads are not watched: {why}. {needs} Training goes on.")
            self.close()

    def _open(self) -> None:
        """Begin once a forward has shown the layers: rules, interventions, history, dashboards."""
        if self._number_of_layers:  # a part that is called late: the history goes on in a further file
            self._state = self.state_dict()
            self._close_sinks()
        self._is_open, self._number_of_layers, self._facts = True, len(self.monitor.layers), []
        if self._follow_ranks():
            return
        if not self.monitor.layers:
            self._refuse()
            return
        self._facts = [layer.description() for layer in self.monitor.layers]
        self._begin()
        if self._state is not None:
            try:
                self._restore(self._state)
            except Exception as error:  # it may have taken a part of it
                self._start_anew(describe(error))
                self._begin()
        self._open_history()
        self._open_sinks()
        self._state = None

    def _begin(self) -> None:
        """Begin with rules and interventions that know nothing yet."""
        settings, trainer = self._settings, self._trainer
        self._interventions = ()
        if settings.alerts is None:
            return
        self.alerts = Alerts(settings.alerts, settings.thresholds, self._facts, settings.pretrained)
        training = Training(trainer, {layer.name: layer for layer in self.monitor.layers}, self.alerts.expect_change)
        for intervention in settings.interventions or ():
            intervention.bind(training)
            self._interventions += (intervention,)

    def _refuse(self) -> None:
        """Say that there is nothing to watch, perhaps as this rank holds a part of the model without attention."""
        message = self.monitor.why_nothing()
        if self._settings.strict and not self.monitor.join_ranks().difference:
            raise NothingToWatchError(f"{message}\nWrite strict=False to train unwatched.")
        self._guard.warn_once("layers", f"{message}\nHeads are not watched. Training goes on.")

    def _restore(self, state: Mapping[str, Any]) -> None:
        """Restore rules and interventions from the checkpoint."""
        now = self._sizes()
        for name, sizes in state["layers"].items():
            if now.get(name) != list(sizes):
                raise ValueError(f"this model has no layer `{name}` with the same heads")
        if self.alerts is not None and state["alerts"] is not None:
            self.alerts.load_state_dict(state["alerts"])
        for intervention, (name, saved) in zip(self._interventions, state["interventions"]):
            if name == intervention.name:
                intervention.load_state_dict(saved)
        self.monitor.contract.load_state_dict(state["contract"])  # last: what fails before it starts anew

    def _follow_ranks(self) -> bool:
        """Go on alone, with a history of its own, if ranks measure alone now; return whether the session is closed."""
        ranks = self.monitor.join_ranks()
        ranks.settle()
        if ranks.difference and not self._is_alone:
            self._is_alone = True
            needs_all = ranks.is_sharded or bool(self._settings.interventions)
            alone = "Heads are not watched." if needs_all else "Each rank measures alone, into a history of its own."
            self._guard.warn_once("ranks", f"Ranks cannot measure together: {ranks.difference}. {alone}")
            if needs_all:
                self.close()
            elif self._facts and self.history is None:
                self._open_history()
        return self._is_closed

    def _open_history(self) -> None:
        """Open the history of the first rank, and one of each rank that measures layers of its own."""
        choice, state, ranks = self._settings.history, self._state, self.monitor.join_ranks()
        is_first = self._trainer.is_first_rank
        if choice is False or not (is_first or (ranks.difference and ranks.is_first)):
            return
        suffix = "" if is_first else f"-rank{torch.distributed.get_rank()}"

        def of_rank(path: Path) -> Path:
            return path.with_stem(path.stem.removesuffix(suffix) + suffix)

        path = of_rank(self._folder / "hdi" / "history.jsonl" if choice is True else Path(choice))
        resumed: dict[str, Any] = {}
        if state is not None:
            resumed["resume_step"] = -1 if state["last_step"] is None else state["last_step"]
            resumed["resume_run"] = state["run"] or ""
            resumed["resume_path"] = None if state["history"] is None else of_rank(Path(state["history"]))
        with self._guard("opening the history"):
            self.history = History(path, self._facts, run=self._run, **resumed)

    def _open_sinks(self) -> None:
        past: Sequence[Record] = ()
        self._sinks = []
        with self._showing("opening dashboards"):
            if self.history is not None and self._state is not None:
                past = load_history(self.history.path).records
            for target in self._trainer.targets(past):
                self._sinks.append(sink_for(target, self._facts, self._settings.metrics or (), past))
        if self._trainer.is_first_rank:
            refused = {refusal.name: refusal.reason for refusal in self.monitor.refused}
            where = "" if self.history is None else str(self.history.path)
            with self._showing(Console.name):
                console = Console(print, self._facts, self._settings.every_n_steps, refused, where, past)
                self._sinks.append(console)
