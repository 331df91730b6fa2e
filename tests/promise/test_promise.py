"""Trainings drawn from a seed (`--promise-seed`), each with the monitor and without it."""

from __future__ import annotations

import pytest

from tests.promise.faults import FAULTS, PLAINEST, Fault, broken, leaving_hooks
from tests.promise.plan import FAMILIES, SHELLS, TRAITS, Training, draw
from tests.promise.run import compare, report, run, shrink

RUNS, MORE = 6, 42  # in every run of the tests, and with the slow ones
_MAY_BE_REFUSED = ("linear per head", "bare parameters")


_PLACES = [*range(RUNS), *(pytest.param(place, marks=pytest.mark.slow) for place in range(RUNS, RUNS + MORE))]


@pytest.mark.parametrize("place", _PLACES)
def test_a_training_with_the_monitor_is_bit_identical_to_the_same_without_it(place, pytestconfig):
    training = draw(pytestconfig.getoption("promise_seed"), RUNS + MORE)[place]
    result = compare(training)
    if result.differences:
        pytest.fail(f"as drawn: {report(result)}\nthe least that differs: {report(shrink(result))}", pytrace=False)
    may_be_refused = training.family in _MAY_BE_REFUSED and "tied blocks" in training
    assert result.measurements or may_be_refused, f"nothing was read: {result}"


_QUICK = 5  # the others take long for what they add
_SEEN = [
    pytest.param(fault, id=fault.name, marks=() if place < _QUICK else pytest.mark.slow)
    for place, fault in enumerate(FAULTS)
]


@pytest.mark.parametrize("fault", _SEEN)
def test_a_monitor_that_breaks_the_promise_is_caught(fault: Fault):
    with broken(fault.act):
        result = compare(Training.parse(fault.training))
    assert any(fault.difference in one for one in result.differences), report(result)


def test_a_hook_that_is_not_removed_is_detected():
    with leaving_hooks():
        result = compare(PLAINEST)
    assert any(one.startswith("hooks of modules: head None alone, 1 watched") for one in result.differences)


@pytest.mark.slow
def test_a_failing_training_is_reported_with_the_fewest_traits_that_still_fail():
    drawn = Training.parse("separate / loop / clipping, counter of a class / 7")
    fault = next(fault for fault in FAULTS if fault.name == "counts a class up")
    with broken(fault.act):
        found = shrink(compare(drawn))
    assert str(found.training) == "separate / by hand / counter of a class / 7"
    assert "Counted" in report(found)


def test_the_same_training_run_twice_without_the_monitor_is_the_same():
    for text in ("bert / transformers / dropout / 3", "torch encoder / lightning / dropout, evaluation / 3"):
        training = Training.parse(text)
        assert run(training, is_watched=False).differences(run(training, is_watched=False)) == []


@pytest.mark.parametrize("seed", range(3))
def test_a_draw_of_trainings_covers_every_model_and_shell_and_85_percent_of_the_traits(seed):
    drawn = draw(seed, RUNS + MORE)
    assert {one.family for one in drawn} == set(FAMILIES)
    assert {one.shell for one in drawn} == set(SHELLS)
    assert len(set().union(*(one.traits for one in drawn))) > 0.85 * len(TRAITS)
    assert [Training.parse(str(one)) for one in drawn] == drawn
    assert draw(seed, RUNS) == drawn[:RUNS]


def test_a_training_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match=r"unknown traits \['seldom'\]"):
        Training.parse("fused / loop / seldom / 1")


def test_a_training_that_fails_compiled_without_the_monitor_is_compared_uncompiled(monkeypatch):
    from tests.promise import run as runs

    kept = runs.run

    def fails_compiled(training, *, is_watched):
        if training.is_compiled:
            raise RuntimeError("view size is not compatible")
        return kept(training, is_watched=is_watched)

    monkeypatch.setattr(runs, "run", fails_compiled)
    result = compare(Training.parse("separate / loop / compiled eager / 3"))
    assert not result.training.is_compiled
    assert result.differences == ()
    assert result.measurements


def test_trainings_that_their_trainer_cannot_save_are_not_drawn_as_resumed():
    for seed in range(40):
        for training in draw(seed, 60):
            assert ("resumed" not in training) or (training.family, training.shell) != ("t5", "transformers")
    assert any("resumed" in training and training.family == "t5" for seed in range(40) for training in draw(seed, 60))
