from __future__ import annotations

import warnings

import pytest

from hdi_callback.errors import MonitoringWarning
from hdi_callback.monitoring.warn_once import WarnOnce


def test_a_repeated_failure_warns_once_and_is_counted():
    warn_once = WarnOnce()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(5):
            with warn_once.guard("writing the history"):
                raise OSError("disk full")
    assert [str(warning.message) for warning in caught] == [
        "writing the history failed (OSError: disk full). Training goes on."
    ]
    assert caught[0].category is MonitoringWarning
    assert warn_once.count == {"writing the history": 5}


def test_each_kind_of_failure_warns_once():
    warn_once = WarnOnce()
    with pytest.warns(MonitoringWarning) as caught:
        for work in ("a", "b"):
            with warn_once.guard(work):
                raise ValueError(work)
    assert len(caught) == 2


def test_an_interrupt_is_not_contained():
    with pytest.raises(KeyboardInterrupt), WarnOnce().guard("anything"):
        raise KeyboardInterrupt


def test_warnings_that_are_errors_still_reach_the_user():
    with pytest.raises(MonitoringWarning), WarnOnce().guard("anything"):
        raise ValueError("x")
