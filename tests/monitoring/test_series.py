"""`Series`: what a rule reads of the readings so far."""

from __future__ import annotations

import math

import pytest
import torch

from hdi_callback.monitoring.alerts.series import Row, Series


def series(*rows: Row, first: Row | None = None) -> Series:
    found = Series("layer", {}, 1, first or rows[0])
    for row in rows:
        found.append(row)
    return found


def test_per_head_numbers_are_nan_if_not_finite_and_empty_if_not_measured():
    row = Row(3, {}, {"rank": [2, None, 4.5]})
    numbers = row.per_head("rank")
    assert (numbers[0], numbers[2]) == (2.0, 4.5)
    assert math.isnan(numbers[1])
    assert row.per_head("alignment") == []


def test_earlier_readings_keep_their_pairs_and_drop_their_other_arrays():
    rows = [Row(step, {}, {"worst_pair": [step, 9], "rank": [step]}, matrices={"m": torch.ones(1)}) for step in (0, 5)]
    found = series(*rows)
    assert [dict(row.arrays) for row in found.rows] == [{"worst_pair": [0, 9]}, {"worst_pair": [5, 9], "rank": [5]}]
    assert [list(row.matrices) for row in found.rows] == [[], ["m"]]
    assert found.first.arrays == {"worst_pair": [0, 9], "rank": [0]}, "the first of a run keeps all but its matrices"
    assert not found.first.matrices


def test_the_first_reading_and_the_latest_64_are_kept():
    found = series(*(Row(step, {}) for step in range(100)))
    assert found.first.step == 0
    assert [row.step for row in found.rows] == list(range(36, 100))
    assert found.latest.step == 99


def test_a_new_series_is_not_pretrained_and_has_no_rewritten_heads():
    found = series(Row(0, {}))
    assert (found.is_pretrained, found.do_others_move, found.rewritten) == (False, False, set())
    assert Series("layer", {}, 1, Row(0, {}), is_pretrained=True).is_pretrained


def test_a_curve_has_only_the_readings_that_measured_it():
    found = series(Row(0, {"a": 1.0}), Row(5, {"b": 7.0}), Row(9, {"a": 3.0}))
    assert found.curve("a") == ([0, 9], [1.0, 3.0])
    assert found.value("a") == 3.0
    with pytest.raises(KeyError):
        found.value("b")


@pytest.mark.parametrize(
    ("first", "values", "holds"),
    [
        (0, [1.0, 2.0], True),
        (5, [1.0, 2.0], False),  # nothing is known of what was before
        (0, [1.0, -2.0], False),
        (0, [-1.0, 2.0], False),
    ],
)
def test_a_condition_holds_from_the_start_if_it_holds_at_step_0_and_at_every_later_reading(first, values, holds):
    rows = [Row(first + 10 * place, {"a": value}) for place, value in enumerate(values)]
    assert series(*rows).holds_from_start(lambda row: row.values["a"] > 0) == holds


def test_the_first_reading_still_counts_after_it_left_the_window_of_latest_readings():
    rows = [Row(step, {"a": -1.0 if step == 0 else 1.0}) for step in range(80)]
    assert not series(*rows).holds_from_start(lambda row: row.values["a"] > 0)


@pytest.mark.parametrize(
    ("values", "metric", "step"),
    [
        ([1.0, 1.0, 1.0], "a", 0),
        ([-1.0, 1.0, 1.0], "a", 10),
        ([1.0, 1.0, -1.0], "a", 20),  # that of the latest
        ([1.0, None, 1.0], "a", 0),  # what was not measured breaks nothing
        ([1.0, None, 1.0], None, 20),  # unless every reading counts
        ([None, 1.0, 1.0], "a", 10),  # nor does it begin anything
    ],
)
def test_a_streak_begins_at_its_first_reading(values, metric, step):
    rows = [Row(10 * place, {} if value is None else {"a": value}) for place, value in enumerate(values)]
    assert series(*rows).since(lambda row: row.values.get("a", -1.0) > 0, metric) == step


def test_rows_are_compared_without_their_matrices():
    assert Row(1, {"a": 1.0}, matrices={"m": torch.ones(2)}) == Row(1, {"a": 1.0}, matrices={})
    with pytest.raises(AttributeError):
        Row(1, {}).step = 2  # type: ignore[misc]
