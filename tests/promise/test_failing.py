"""A function of the package that raises costs a warning or a reason, never the training.

Every function that runs while a training is watched raises in turn, from its first call on or from the middle of its
calls. Here are a few of them; `python -m tests.promise.failing` tries all.
"""

from __future__ import annotations

import pytest

from tests.promise.failing import CARRYING, Profile, broken_by, failures, known, train

_QUICK = {"loop": 3, "by hand": 3, "lightning": 2}
"""How many failures the tests try."""


@pytest.mark.parametrize("way", ["loop", "by hand", pytest.param("lightning", marks=pytest.mark.slow)])
@pytest.mark.some_slow(quick=1)
def test_a_few_functions_that_raise_leave_the_training_as_it_is(way):
    assert list(filter(None, (broken_by(way, one) for one in failures(way)[: _QUICK[way]]))) == []


_PUT_ON = ("attention/hooks.py", "attention/observe/window.py", "attention/observe/mode_stack.py")


def _failures_in(way, *places):
    found = [one for one in failures(way) if one.function.startswith(places)]
    assert found, f"no function of {places} runs in {way}"
    return found


@pytest.mark.slow
def test_a_function_that_raises_while_hooks_are_put_on_leaves_none_behind():
    places = ("attention/hooks.py:__init__", "attention/hooks.py:put_on", "attention/observe/window.py:leave")
    firsts = [one for one in _failures_in("by hand", *places) if not one.after]
    assert list(filter(None, (broken_by("by hand", one) for one in firsts))) == []


def test_a_step_that_could_not_be_left_is_over_all_the_same():
    failed = [one for one in _failures_in("loop", "integrations/optimizers.py:end") if not one.after]
    assert list(filter(None, (broken_by("loop", one) for one in failed))) == []


@pytest.mark.slow
@pytest.mark.parametrize("way", ["loop", "by hand"])
def test_whatever_raises_where_hooks_and_modes_are_put_on_leaves_none_behind(way):
    assert list(filter(None, (broken_by(way, one) for one in _failures_in(way, *_PUT_ON)))) == []


def test_a_reading_whose_numbers_cannot_be_read_out_says_so_and_does_not_raise():
    failure = next(one for one in _failures_in("by hand", "monitoring/readings.py:_tabulate") if not one.after)
    assert broken_by("by hand", failure) == ""
    said = train("by hand", Profile(failure)).said
    assert len(said) == 1
    assert said[0].startswith("reading out head diversity failed")


def test_functions_that_carry_code_of_the_user_are_still_there():
    ran = {name.rpartition(":")[0] for way in ("loop", "lightning") for name in known(way)[1].calls}
    assert set(CARRYING) <= ran
