"""What fails inside costs one warning and marks the reading; the training and everything else go on."""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from hdi_callback import HeadDiversityMonitor, MonitoringWarning, NothingToWatchError, Record, Rule, watch_heads
from hdi_callback.dashboards import Console
from hdi_callback.history import History, load_history
from hdi_callback.monitor import Reading, monitor
from hdi_callback.monitor.contract import Contract
from hdi_callback.record import Alert
from hdi_callback.rules import Alerts
from tests.integrations.runs import LAYERS, STEPS, TRAINERS, WIDTH, Classifier, Training, batches

ALL_STEPS = [0, 4, 8, STEPS]


class OddRule(Rule):
    """Judges by raising."""

    name, needs, level, meaning, action = "odd", ("hdi",), "warning", "", ""

    def judge(self, *args: Any) -> None:
        raise ZeroDivisionError("inside the rule")


def broken(*args: Any, **kwargs: Any) -> Any:
    raise ZeroDivisionError("inside")


# What is broken: its owner and name, what the warning says, whether there are numbers, whether there is a history.
STAGES: dict[str, tuple[Any, str, str, bool, bool]] = {
    "checking": (monitor, "examine", "checking attention", True, True),
    "arming": (HeadDiversityMonitor, "arm", "watching", True, True),
    "measuring": (HeadDiversityMonitor, "measure", "measuring head diversity", False, True),
    "numbers": (Reading, "record", "measuring head diversity", False, True),
    "rules": (Alerts, "judge", "judging head diversity", True, True),
    "opening the history": (History, "__init__", "opening the history", True, False),
    "writing the history": (History, "write", "writing the history", True, False),
    "opening a dashboard": (Console, "__init__", "printing", True, True),
    "writing to a dashboard": (Console, "write", "printing", True, True),
    "closing a dashboard": (Console, "close", "printing", True, True),
}


@pytest.fixture(params=["loop", "lightning"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def fit(kind: str, folder: Path, **arguments: Any) -> tuple[Training, list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", MonitoringWarning)
        run = Training(folder, arguments).fit(kind)
    return run, [str(one.message) for one in caught if issubclass(one.category, MonitoringWarning)]


@pytest.mark.parametrize("stage", list(STAGES))
def test_a_stage_that_fails_costs_one_warning(
    stage: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, name, work, has_numbers, has_history = STAGES[stage]
    alone = Training(tmp_path, None).fit(kind)
    monkeypatch.setattr(owner, name, broken)
    run, messages = fit(kind, tmp_path)
    assert run.outcome == alone.outcome
    assert len(messages) == 1, messages
    assert work in messages[0].lower()
    assert "ZeroDivisionError: inside" in messages[0]
    assert messages[0].endswith("Training goes on.")
    monkeypatch.undo()
    if not has_history:
        return
    records = run.history.records
    assert [record.step for record in records] == ALL_STEPS
    for record in records:
        assert bool(record.layers) == has_numbers
        assert ("ZeroDivisionError" in record.absent.get("reading", "")) == (not has_numbers)


def test_a_failure_that_passes_marks_one_reading(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measure: Callable[..., Any] = HeadDiversityMonitor.measure

    def fails_once(self: Any, step: int, *args: Any, **kwargs: Any) -> Any:
        return broken() if step == 4 else measure(self, step, *args, **kwargs)

    monkeypatch.setattr(HeadDiversityMonitor, "measure", fails_once)
    run, messages = fit(kind, tmp_path)
    assert len(messages) == 1
    assert [bool(record.layers) for record in run.history.records] == [True, False, True, True]


def test_a_rule_that_fails_costs_one_warning_and_not_the_reading(kind: str, tmp_path: Path) -> None:
    run, messages = fit(kind, tmp_path, alerts=[OddRule()])
    assert len(messages) == 1
    assert "odd" in messages[0]
    assert "inside the rule" in messages[0]
    assert [record.step for record in run.history.records] == ALL_STEPS


def test_where_warnings_are_errors_the_training_goes_on(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    alone = Training(tmp_path, None).fit(kind)
    monkeypatch.setattr(HeadDiversityMonitor, "measure", broken)
    with warnings.catch_warnings():
        warnings.simplefilter("error", MonitoringWarning)
        run = Training(tmp_path).fit(kind)
    assert run.outcome == alone.outcome
    assert capsys.readouterr().err.count("Measuring head diversity failed") == 1


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_interruptions_pass(error: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*args: Any, **kwargs: Any) -> Any:
        raise error

    monkeypatch.setattr(HeadDiversityMonitor, "measure", interrupted)
    with pytest.raises(error):
        Training(tmp_path).fit("loop")


@pytest.mark.parametrize("step", [0, 4, 8], ids=["first forward", "armed", "unarmed"])
def test_an_interrupted_forward_leaves_no_mode_behind(step: int, kind: str, tmp_path: Path) -> None:
    run = Training(tmp_path)
    blocks, calls = run.model.blocks, []

    def interrupted(*args: Any) -> None:
        calls.append(torch._C._len_torch_dispatch_stack())
        if len(calls) > step:
            raise KeyboardInterrupt

    blocks[-1].register_forward_pre_hook(interrupted)
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        run.fit(kind)
    assert torch._C._len_torch_dispatch_stack() == 0
    assert step == 8 or calls[0] == 1  # the first forward runs under a mode


def test_an_error_of_the_training_passes_and_removes_the_hooks(kind: str, tmp_path: Path) -> None:
    def stop(step: int, model: Any) -> None:
        if step == 6:
            raise RuntimeError("of the user")

    run = Training(tmp_path, {}, after_step=stop)
    with pytest.raises(RuntimeError, match="of the user"):
        run.fit(kind)
    assert [record.step for record in run.history.records] == [0, 4]
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in run.model.modules())


@pytest.mark.parametrize("trainer", list(TRAINERS))
def test_a_model_without_attention_is_an_error_before_the_first_step(trainer: str, tmp_path: Path) -> None:
    if trainer not in ("loop", "lightning"):
        pytest.importorskip(trainer)
    run = Training(tmp_path)
    run.model.blocks = torch.nn.ModuleList()
    before = run.weights
    with pytest.raises(NothingToWatchError, match="strict=False"):
        run.fit(trainer)
    assert run.weights == before


def test_a_model_without_attention_costs_one_warning_without_strict(kind: str, tmp_path: Path) -> None:
    import torch

    with pytest.warns(MonitoringWarning, match="No attention layer of `.*` was read") as caught:
        run = Training(tmp_path, {"strict": False})
        run.model.blocks = torch.nn.ModuleList()
        run.fit(kind)
    assert sum(issubclass(one.category, MonitoringWarning) for one in caught) == 1
    assert run.watcher.history_path is None


def test_attention_that_is_refused_beside_some_that_is_read_ends_no_training(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import torch

    class Sigmoids(torch.nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.q, self.k, self.v = (torch.nn.Linear(width, width) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = (one(x).unflatten(-1, (2, -1)).transpose(1, 2) for one in (self.q, self.k, self.v))
            return ((q @ k.mT).sigmoid() @ v).transpose(1, 2).flatten(2)

    run = Training(tmp_path)  # strict, as by default
    run.model.blocks.append(Sigmoids(WIDTH))
    run.fit(kind)
    assert len(run.losses) == STEPS
    assert len(run.history.records) == len(ALL_STEPS)
    captured = capsys.readouterr()
    said = " ".join(f"{captured.out} {captured.err}".split())
    assert "blocks.2: it multiplies three computed tensors without a softmax" in said


def test_a_session_that_cannot_start_is_said_once_and_watches_nothing(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HeadDiversityMonitor, "__init__", broken)
    run, messages = fit(kind, tmp_path)
    assert len(messages) == 1
    assert "Starting to watch heads failed" in messages[0]
    assert len(run.losses) == STEPS


def test_two_kinds_of_failure_are_two_warnings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Alerts, "judge", broken)
    monkeypatch.setattr(History, "write", broken)
    _, messages = fit("loop", tmp_path)
    assert len(messages) == 2


def test_an_intervention_that_fails_costs_one_warning(kind: str, tmp_path: Path) -> None:
    from hdi_callback import Intervention

    class Odd(Intervention):
        name = "Odd"

        def on_reading(self, record: Record) -> None:
            broken()

        def on_alert(self, alert: Alert) -> None:
            broken()

    run, messages = fit(kind, tmp_path, interventions=[Odd()])
    assert len(messages) == 1
    assert "intervention" in messages[0]
    assert [record.step for record in run.history.records] == ALL_STEPS


def test_closing_twice_does_nothing(tmp_path: Path) -> None:
    run = Training(tmp_path).fit("loop")
    run.watcher.close()
    run.watcher.close()
    assert [record.step for record in run.history.records] == ALL_STEPS


def test_a_loop_without_a_step_is_told(tmp_path: Path) -> None:
    import torch

    model = torch.nn.TransformerEncoderLayer(16, 2, batch_first=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.warns(MonitoringWarning, match="No optimizer that was passed to `watch_heads` has made a step"):  # noqa: SIM117
        with watch_heads(model, optimizer, log_dir=tmp_path) as heads:
            with heads.step():
                model(torch.randn(2, 5, 16)).sum().backward()


def test_a_thread_that_is_slow_keeps_the_loss_and_the_number_of_each_reading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loss is overwritten after the step, and a reading is compared once the next one has begun."""
    numbers: list[int] = []
    complete, compare = Reading.complete, Contract.compare

    def slowly(reading: Reading) -> None:
        time.sleep(0.1)
        complete(reading)

    def noted(contract: Contract, *args: Any, **kwargs: Any) -> Any:
        told = compare(contract, *args, **kwargs)
        numbers.append(contract._number)
        return told

    monkeypatch.setattr(Reading, "complete", slowly)
    monkeypatch.setattr(Contract, "compare", noted)
    model = Classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch_heads(model, optimizer, every_n_steps=2, log_dir=tmp_path) as heads:
        for _, (tokens, labels) in zip(range(8), batches()):
            with heads.step():
                heads.loss = model(tokens, labels)["loss"]
                heads.loss.backward()
                optimizer.step()
            with torch.no_grad():
                heads.loss.zero_()
    assert all(record.loss for record in load_history(tmp_path).records[:-1])
    assert numbers[:4] == [0, 1, 2, 3]


def calls_in_the_first_forward(folder: Path, stop_at: float = float("inf")) -> tuple[int, list[str]]:
    """Interrupt one of our calls in the first forward, and go on; return how many there were, and the layers found."""
    count = 0

    def profile(frame: Any, event: str, arg: Any) -> None:
        nonlocal count
        if event == "call" and frame.f_globals.get("__name__", "").startswith("hdi_callback."):
            count += 1
            if count == stop_at:
                raise KeyboardInterrupt

    model = Classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch_heads(model, optimizer, every_n_steps=1, log_dir=folder, history=False) as heads:
        for at, (tokens, labels) in zip(range(3), batches()):
            with suppress(KeyboardInterrupt), heads.step():
                sys.setprofile(profile if at == 0 else None)
                loss = model(tokens, labels)["loss"]
                sys.setprofile(None)
                loss.backward()
                optimizer.step()
            sys.setprofile(None)
        assert heads.monitor is not None
        layers = [layer.name for layer in heads.monitor.layers]
    assert "hdi/min" in heads.latest
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    return count, layers


@pytest.mark.parametrize("share", [0.02, 0.2, 0.4, 0.6, 0.8, 0.9, 0.95, 0.98, 0.99])
def test_an_interruption_while_heads_are_found_leaves_them_to_the_next_forward(share: float, tmp_path: Path) -> None:
    calls_in_the_first_forward(tmp_path)  # fills what a process keeps, which takes calls of its own
    count, layers = calls_in_the_first_forward(tmp_path)
    assert layers == LAYERS
    stopped_at = int(share * count)
    assert calls_in_the_first_forward(tmp_path, stopped_at) == (stopped_at, LAYERS)
