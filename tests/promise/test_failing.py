"""A function of the package that raises costs a warning or a reason, never the training.

Every function that runs while a training is watched raises in turn, from its first call on or from the middle of its
calls. Quick tests have a sample of them, the slow ones the rest.
"""

from __future__ import annotations

from functools import cache
from hashlib import blake2b

import pytest

from tests.promise.failing import (
    CARRYING,
    WAYS,
    Failure,
    InjectedError,
    Outcome,
    Profile,
    differences,
    said_again,
    train,
)

_PARTS = 40
_QUICK = {"loop": 4, "by hand": 6, "lightning": 6}
"""How many failures the quick tests try; the slow ones try all, in so many parts."""


@cache
def known(way: str) -> tuple[Outcome, Profile]:
    """What a training is without the watch, and which functions run with it."""
    profile = Profile()
    train(way, profile)  # also what is imported at first use
    return train(way, is_watched=False), profile


def failures(way: str) -> list[Failure]:
    """Every function, with two calls from which on it raises."""
    profile = known(way)[1]
    names = [
        name
        for name in profile.calls
        if name.rpartition(":")[0] not in CARRYING and not name.startswith("guard.py:")  # the guard itself
    ]
    # Spread, and for most functions the same whatever else changes.
    names.sort(key=lambda name: blake2b(name.rpartition(":")[0].encode()).digest())
    return [
        Failure(name, after, is_once=name in profile.removing)
        for name in names
        for after in sorted({0, profile.calls[name] // 2})
    ]


def broken_by(way: str, failure: Failure) -> str:
    """Say how a failure reached the training; empty if it did not."""
    try:
        watched = train(way, Profile(failure))
    except InjectedError:
        return f"{failure} ended the training"
    changed, again = differences(known(way)[0], watched), said_again(watched.said)
    return f"{failure} changed {changed}, said again {again}" if changed or again else ""


@pytest.mark.parametrize("way", _QUICK)
def test_a_few_functions_that_raise_leave_the_training_as_it_is(way):
    assert list(filter(None, (broken_by(way, one) for one in failures(way)[: _QUICK[way]]))) == []


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("part", range(_PARTS))
def test_every_function_that_raises_leaves_the_training_as_it_is(way, part):
    assert list(filter(None, (broken_by(way, one) for one in failures(way)[part::_PARTS]))) == []


def test_functions_that_carry_code_of_the_user_are_still_there():
    ran = {name.rpartition(":")[0] for way in ("loop", "lightning") for name in known(way)[1].calls}
    assert set(CARRYING) <= ran
