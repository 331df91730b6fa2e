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
def test_training_is_unchanged_if_one_of_a_few_functions_raises(way):
    assert list(filter(None, (broken_by(way, one) for one in failures(way)[: _QUICK[way]]))) == []


_PUT_ON = ("attention/hooks.py", "attention/observe/window.py", "attention/observe/mode_stack.py")


def _failures_in(way, *places):
    found = [one for one in failures(way) if one.function.startswith(places)]
    assert found, f"no function of {places} runs in {way}"
    return found


@pytest.mark.slow
def test_training_is_unchanged_if_installing_hooks_raises_early():
    places = ("attention/hooks.py:__init__", "attention/hooks.py:put_on", "attention/observe/window.py:leave")
    firsts = [one for one in _failures_in("by hand", *places) if not one.after]
    assert list(filter(None, (broken_by("by hand", one) for one in firsts))) == []


def test_training_goes_on_if_the_end_of_a_step_raises():
    failed = [one for one in _failures_in("loop", "integrations/optimizers.py:end") if not one.after]
    assert list(filter(None, (broken_by("loop", one) for one in failed))) == []


@pytest.mark.slow
@pytest.mark.parametrize("way", ["loop", "by hand"])
def test_training_is_unchanged_if_any_function_that_installs_hooks_or_modes_raises(way):
    assert list(filter(None, (broken_by(way, one) for one in _failures_in(way, *_PUT_ON)))) == []


def test_a_failed_readout_warns_once_and_leaves_the_training_unchanged():
    failure = next(one for one in _failures_in("by hand", "monitoring/readings.py:_tabulate") if not one.after)
    assert broken_by("by hand", failure) == ""
    said = train("by hand", Profile(failure)).said
    assert len(said) == 1
    assert said[0].startswith("reading out head diversity failed")


def test_functions_listed_as_carrying_user_code_still_run():
    ran = {name.rpartition(":")[0] for way in ("loop", "lightning") for name in known(way)[1].calls}
    assert set(CARRYING) <= ran
