"""Ranks that watch alike measure together; ranks that do not are noticed at the start, and nobody waits."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from hdi_callback import StopTraining
from tests.session.ranks import STEPS, start

pytestmark = [pytest.mark.slow, pytest.mark.ranks]


def test_two_ranks_read_the_same_on_both(tmp_path: Path) -> None:
    first, second = start(tmp_path, {}, {})
    assert first["read"] == [0, 2, 4, STEPS]
    assert first["latest"] == second["latest"] != {}
    assert not first["messages"]
    assert not second["messages"]
    assert "read" not in second, "the first rank writes"
    assert "head_covariance" in next(iter(first["values"][0].values()))
    assert first["weights"] == second["weights"]


def test_a_monitor_on_one_rank_is_said_within_the_timeout_of_the_group(tmp_path: Path) -> None:
    alone = tmp_path / "alone"
    alone.mkdir()
    unwatched = start(alone, None, None)[0]
    begin = time.monotonic()
    first, second = start(tmp_path, {}, None, timeout=12)
    assert time.monotonic() - begin < 40, "far from the 60 seconds that it waits at most"
    assert len(first["messages"]) == 1
    assert "Heads are not watched: rank 1 of 2 has no monitor" in first["messages"][0]
    assert first["weights"] == second["weights"] == unwatched["weights"]
    assert "read" not in first


def test_another_cadence_on_one_rank_is_said(tmp_path: Path) -> None:
    first, second = start(tmp_path, {}, {"every_n_steps": 3})
    for one in (first, second):
        assert len(one["messages"]) == 1
        assert "`every_n_steps` is 2 on rank 0 and 3 on rank 1" in one["messages"][0]
        assert "read" not in one
    assert first["weights"] == second["weights"]


def test_a_rank_that_fails_by_itself_stops_nobody(tmp_path: Path) -> None:
    first, second = start(tmp_path, {}, {}, timeout=30, breaks="arm")
    assert first["read"] == [0, 2, 4, STEPS]
    assert len(second["messages"]) == 1
    assert first["weights"] == second["weights"]


def test_all_ranks_stop_after_the_same_step(tmp_path: Path) -> None:
    stops = {"interventions": [StopTraining(on="notice")], "thresholds": {"*": {"pair": 1e-3}}, "pretrained": False}
    first, second = start(tmp_path, stops, stops)
    assert first["steps"] == second["steps"] < STEPS
    assert first["actions"]
