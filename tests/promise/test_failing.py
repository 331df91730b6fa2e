"""A function of the package that raises costs a warning or a reason, never the training.

Every function that runs while a training is watched raises in turn, from its first call on or from the middle of its
calls. Here are a few of them; `python -m tests.promise.failing` tries all.
"""

from __future__ import annotations

import pytest

from tests.promise.failing import CARRYING, broken_by, failures, known

_QUICK = {"loop": 3, "by hand": 3, "lightning": 2}
"""How many failures the quick tests try."""


@pytest.mark.parametrize("way", _QUICK)
def test_a_few_functions_that_raise_leave_the_training_as_it_is(way):
    assert list(filter(None, (broken_by(way, one) for one in failures(way)[: _QUICK[way]]))) == []


def test_functions_that_carry_code_of_the_user_are_still_there():
    ran = {name.rpartition(":")[0] for way in ("loop", "lightning") for name in known(way)[1].calls}
    assert set(CARRYING) <= ran
