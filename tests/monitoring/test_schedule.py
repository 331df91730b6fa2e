from __future__ import annotations

import pytest

from hdi_callback.errors import MisconfigurationError
from hdi_callback.monitoring.session.schedule import Schedule


def steps_read(schedule: Schedule, steps) -> list[int]:
    read = []
    for step in steps:
        if schedule.is_due(step):
            schedule.done(step)
            read.append(step)
    return read


def test_a_step_that_repeats_is_read_once():
    assert steps_read(Schedule(2), [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]) == [0, 2, 4]


def test_a_step_count_that_jumps_over_a_multiple_is_read_after_the_jump():
    assert steps_read(Schedule(4), range(0, 20, 3)) == [0, 6, 9, 12, 18]


def test_a_run_that_starts_at_a_later_step_is_read_at_once():
    assert steps_read(Schedule(50), range(73, 160)) == [73, 100, 150]


def test_a_resumed_schedule_does_not_repeat_its_last_step():
    schedule = Schedule(50)
    schedule.done(100)
    assert steps_read(schedule, range(100, 160)) == [150]


@pytest.mark.parametrize("every", [0, -1, 2.5, True, "10"])
def test_an_invalid_interval_is_refused_with_the_remedy(every):
    with pytest.raises(MisconfigurationError, match=r"at least 1, got .*: write 50"):
        Schedule(every)
