"""`Reader`: the calls of the monitor within a step, and the readings that result."""

from __future__ import annotations

import warnings
from typing import Any, cast

import pytest

from hdi_callback.errors import MonitoringWarning
from hdi_callback.monitoring.monitor import HeadDiversityMonitor
from hdi_callback.monitoring.readings import Reading
from hdi_callback.monitoring.session.position import Position
from hdi_callback.monitoring.session.reader import Reader
from hdi_callback.monitoring.session.schedule import Schedule
from hdi_callback.monitoring.warn_once import WarnOnce


class Monitor:
    """Notes what it is asked for; a reading measured before the last forward of its step awaits `complete`."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.awaits_forwards = False
        self.fails = False

    def arm(self, *, training_only: bool) -> None:
        assert training_only
        self.calls.append("arm")

    def skip_forward(self) -> None:
        self.calls.append("skip forward")

    def release(self) -> None:
        self.calls.append("release")

    def measure(
        self, step: int, *, epoch: int | None = None, axis: int | None = None, is_last_forward: bool = True
    ) -> Reading:
        if self.fails:
            raise RuntimeError("no memory is left")
        self.calls.append(f"measure {step}")
        self.awaits_forwards = not is_last_forward
        return Reading(step, (), (), {}, epoch, axis)

    def complete(self, reading: Reading, *, is_last_forward: bool) -> Reading:
        self.calls.append(f"complete {reading.step}")
        self.awaits_forwards = not is_last_forward
        return reading


@pytest.fixture
def monitor() -> Monitor:
    return Monitor()


@pytest.fixture
def reader(monitor) -> Reader:
    return Reader(cast("HeadDiversityMonitor", monitor), Schedule(2), WarnOnce())


def steps(reader: Reader, **options: Any) -> list[int]:
    return [readout.step for readout in reader.arrived(**{"waits": True, **options})]


def test_forwards_are_captured_only_if_a_reading_is_due(reader, monitor):
    for step in range(4):
        reader.before_forward(step)
        assert reader.is_capturing == (step % 2 == 0)
        reader.after_backward(Position(step), is_last=True)
        reader.after_step(Position(step + 1))
        assert not reader.is_capturing
    assert monitor.calls == ["arm", "measure 0", "skip forward", "arm", "measure 2", "skip forward"]
    assert steps(reader) == [0, 2]
    assert steps(reader) == []


def test_a_second_forward_of_the_same_step_joins_the_one_that_is_captured(reader, monitor):
    for _ in range(3):
        reader.before_forward(0)
    reader.after_backward(Position(0, epoch=1, axis=7), is_last=True)
    assert monitor.calls == ["arm", "measure 0"]
    (readout,) = reader.arrived(waits=True)
    record = readout.record()
    assert (record.step, record.epoch, record.axis) == (0, 1, 7)


def test_a_batch_without_a_backward_is_read_when_its_step_ends(reader, monitor):
    reader.before_forward(0)
    reader.after_step(Position(0))
    assert monitor.calls == ["arm", "measure 0"]
    assert steps(reader) == [0]


def test_an_abandoned_reading_is_due_again_at_once(reader, monitor):
    reader.before_forward(0)
    reader.abandon()
    assert not reader.is_capturing
    assert steps(reader) == []
    reader.before_forward(0)
    reader.after_backward(Position(0), is_last=True)
    assert monitor.calls == ["arm", "release", "arm", "measure 0"]
    assert steps(reader) == [0]


def test_abandoning_without_a_capture_releases_nothing(reader, monitor):
    reader.abandon()
    assert monitor.calls == []


def test_a_reading_is_held_until_the_last_forward_of_its_step(reader, monitor):
    reader.before_forward(0)
    reader.after_backward(Position(0), is_last=False)
    assert steps(reader) == []
    reader.after_backward(Position(0), is_last=False)
    assert steps(reader) == []
    reader.after_backward(Position(0), is_last=True)
    assert steps(reader) == [0]
    assert monitor.calls == ["arm", "measure 0", "complete 0", "complete 0"]


def test_the_end_of_a_step_completes_a_reading_that_still_waits_for_forwards(reader, monitor):
    reader.before_forward(0)
    reader.after_backward(Position(0), is_last=False)
    reader.after_step(Position(1))
    assert steps(reader) == [0]
    assert monitor.calls == ["arm", "measure 0", "complete 0"]


def test_a_backward_between_readings_measures_nothing(reader, monitor):
    reader.schedule.last = 0
    reader.before_forward(1)
    reader.after_backward(Position(1), is_last=True)
    assert monitor.calls == ["skip forward"]


def test_weights_measured_early_become_the_last_reading_if_no_step_follows(reader, monitor):
    reader.measure_final_early(Position(3))
    reader.measure_final_early(Position(3))
    assert steps(reader) == [], "it is not known yet that this is the end"
    reader.finish(Position(3))
    assert monitor.calls == ["measure 3"]
    assert steps(reader) == [3]
    assert reader.schedule.last == 3


def test_weights_measured_early_are_dropped_if_further_steps_follow(reader, monitor):
    reader.measure_final_early(Position(3))
    reader.finish(Position(5))
    assert monitor.calls == ["measure 3", "measure 5"]
    assert steps(reader) == [5]


def test_the_last_step_is_not_read_twice(reader, monitor):
    reader.before_forward(4)
    reader.after_backward(Position(4), is_last=True)
    reader.measure_final_early(Position(4))
    reader.finish(Position(4))
    assert monitor.calls == ["arm", "measure 4"]
    assert steps(reader) == [4]


def test_a_measurement_that_fails_costs_one_warning_and_its_reading(reader, monitor):
    monitor.fails = True
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in (0, 2):
            reader.before_forward(step)
            reader.after_backward(Position(step), is_last=True)
    assert [item.category for item in caught] == [MonitoringWarning]
    assert "no memory is left" in str(caught[0].message)
    assert steps(reader) == []
    assert reader.schedule.last == 2, "a reading that failed is not tried again at every step"
    monitor.fails = False
    reader.before_forward(4)
    reader.after_backward(Position(4), is_last=True)
    assert steps(reader) == [4]
