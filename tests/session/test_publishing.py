"""Records are made, judged and written by a thread of their own, in order; and what readings cost is said."""

from __future__ import annotations

import threading
import time
import warnings
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

from hdi_callback import Record, load_history, watch_heads, write_report
from hdi_callback.dashboards.console import Console
from hdi_callback.history import History
from hdi_callback.rules import Alerts
from hdi_callback.session import cost
from tests.studies.benchmarks.gpt import Training


def training(folder: Path, **options: object) -> Training:
    run = Training((2, 16, 2, 4), 1, "cpu", None)
    run.heads = watch_heads(run.model, run.optimizer, log_dir=folder, **{"tensorboard": False, **options})
    return run


def path(folder: Path) -> Path:
    return folder / "hdi" / "history.jsonl"


def test_the_training_does_not_wait_for_rules_and_history_and_the_state_does(tmp_path, monkeypatch):
    judge, threads, may_go_on = Alerts.judge, [], threading.Event()

    def slow(self, record):
        threads.append(threading.current_thread())
        assert may_go_on.wait(60)
        return judge(self, record)

    monkeypatch.setattr(Alerts, "judge", slow)
    monkeypatch.setattr("hdi_callback.monitor.contract._FIRST", set())  # what is compared waits for what it confirms
    run = training(tmp_path, every_n_steps=2)
    with run.heads:
        for _ in range(5):
            run.step()
        assert not load_history(path(tmp_path)).records
        threading.Timer(0.1, may_go_on.set).start()
        state = run.heads.state_dict()
        assert state["last_step"] == 4
        assert [record.step for record in load_history(path(tmp_path)).records] == [0, 2, 4]
    assert threading.main_thread() not in threads
    assert [record.step for record in load_history(path(tmp_path)).records] == [0, 2, 4, 5]


def test_tensorboard_is_written_in_the_thread_with_its_pictures_and_the_end_of_the_run_waits_for_it(tmp_path):
    writer, threads = SummaryWriter(str(tmp_path)), []
    add_summary = writer._get_file_writer().add_summary

    def add(*args, **kwargs):
        threads.append(threading.current_thread())
        return add_summary(*args, **kwargs)

    writer._get_file_writer().add_summary = add
    run = training(tmp_path, every_n_steps=2, tensorboard=writer)
    with run.heads:
        for _ in range(5):
            run.step()
    assert threads
    assert threading.main_thread() not in threads
    events = EventAccumulator(str(tmp_path), {"scalars": 0, "images": 0})
    events.Reload()
    assert [event.step for event in events.Scalars("hdi/mean")] == [0, 2, 4, 5]
    assert events.Tags()["images"]


def test_a_reading_is_in_the_file_soon_after_its_step_though_nothing_more_happens(tmp_path):
    run = training(tmp_path, every_n_steps=10)
    with run.heads:
        run.step()
        deadline = time.monotonic() + 60
        while not load_history(path(tmp_path)).records:  # as after a kill: no event comes any more
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_what_fails_in_the_thread_is_one_warning_and_never_the_run(tmp_path, monkeypatch):
    told = []

    def full(self, record):
        raise OSError("disk full")

    monkeypatch.setattr(History, "write", full)
    run = training(tmp_path, every_n_steps=1)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        show = lambda message, *rest: told.append(str(message))  # noqa: E731
        monkeypatch.setattr(warnings, "showwarning", show)
        with run.heads:
            for _ in range(3):
                run.step()
    assert ["disk full" in message for message in told if "hist" in message] == [True]


def test_the_thread_draws_no_random_number_and_puts_none_back(tmp_path):
    import random

    draws = []
    for is_watched in (False, True):
        run = training(tmp_path / str(is_watched), every_n_steps=1, tensorboard=True)
        random.seed(0)
        torch.manual_seed(0)
        if is_watched:
            with run.heads:
                draws.append([(run.step(), random.random(), float(torch.rand(()))) for _ in range(20)])
        else:
            run.heads = None
            draws.append([(run.step(), random.random(), float(torch.rand(()))) for _ in range(20)])
    assert draws[0] == draws[1]


@pytest.mark.parametrize(("every", "extra", "share"), [(10, 1.0, 0.1 / 1.1), (4, 0.02, 0.005 / 1.005)])
def test_the_share_is_that_of_a_clock_which_knows_what_readings_take(every, extra, share, monkeypatch):
    now = 0.0
    monkeypatch.setattr(cost, "perf_counter", lambda: now)
    measured = cost.Cost()
    for step in range(400):
        measured.begin(step)
        now += 1.0 + (extra if step % every == 0 else 0.0)
        measured.end(step + 1, now, has_reading=step % every == 0)
    assert measured.share() == pytest.approx(share)


@pytest.mark.parametrize("every", [3, 10])
def test_the_share_counts_what_a_thread_makes_beside_the_step_after_a_reading(every, monkeypatch):
    now = beyond = 0.0
    monkeypatch.setattr(cost, "perf_counter", lambda: now)
    measured = cost.Cost()
    for step in range(400):
        extra = {0: 0.02, 1: 0.06}.get(step % every, 0.0)
        measured.begin(step)
        now, beyond = now + 1.0 + extra, beyond + extra
        measured.end(step + 1, now, has_reading=step % every == 0)
    assert measured.share() == pytest.approx(beyond / now, rel=0.01)


def test_the_share_holds_where_gradients_are_accumulated_and_the_first_step_and_evaluations_are_long(monkeypatch):
    now = readings = 0.0
    monkeypatch.setattr(cost, "perf_counter", lambda: now)
    measured = cost.Cost()
    for step in range(200):
        for part in range(4):
            has_reading = part == 0 and step % 10 == 0
            measured.begin(step)
            now += 1.0 + 0.5 * (part == 3) + 0.1 * has_reading + 30 * (step == part == 0)  # the optimizer's own step
            readings += 0.1 * has_reading
            measured.end(step + (part == 3), now, has_reading=has_reading)
        now += 25 * (step % 50 == 49)
    assert measured.share() == pytest.approx(readings / now, rel=0.01)


def test_the_share_holds_where_steps_become_faster_in_the_course_of_a_training(monkeypatch):
    now = readings = 0.0
    monkeypatch.setattr(cost, "perf_counter", lambda: now)
    measured = cost.Cost()
    for step in range(400):
        extra = 0.1 if step % 4 == 0 else 0.0
        measured.begin(step)
        now += 2.0 - step / 250 + extra
        readings += extra
        measured.end(step + 1, now, has_reading=step % 4 == 0)
    assert measured.share() == pytest.approx(readings / now, rel=0.1)


def test_a_share_is_not_known_where_every_step_has_a_reading():
    measured = cost.Cost()
    for step in range(20):
        measured.begin(step)
        measured.end(step + 1, time.perf_counter(), has_reading=True)
    assert measured.share() is None


def test_dear_readings_are_said_once_with_the_cadence_that_would_be_cheap_enough():
    texts: list[str] = []
    console = Console(texts.append, [], every_n_steps=50)
    for place in range(30):
        console.write(Record(step=50 * place, layers={}, cost=0.023))
    console.close()
    notices = [text for text in texts if "notice" in text]
    assert len(notices) == 1
    assert "step 450: readings take 2.3% of the training's time. every_n_steps=230 would make it 0.5%" in notices[0]
    assert "Readings took 2.30% of the training's time." in texts[-1]


def test_the_history_and_the_report_say_what_readings_cost(tmp_path):
    run = training(tmp_path, every_n_steps=4)
    with run.heads:
        for _ in range(16):
            run.step()
    history = load_history(path(tmp_path))
    share = history.records[-1].cost
    assert share is not None
    assert 0 <= share < 1
    assert f"they took {share:.2%} of the training" in write_report(history).read_text()
