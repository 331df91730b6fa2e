"""What an intervention's state may hold, in every checkpoint that keeps it."""

from __future__ import annotations

import json

import pytest

from hdi_callback.errors import MisconfigurationError
from hdi_callback.monitoring.interventions.plain_state import plain_state


class Count(int):
    """A number of a type of its own."""


def test_a_state_is_returned_as_plain_types_that_survive_json():
    state = {
        "none": None,
        "flag": True,
        "count": Count(3),
        "share": 0.5,
        "name": "a",
        "layers": ("a", {"b": [1, None]}),
    }
    kept = plain_state(state)
    assert kept == {**state, "layers": ["a", {"b": [1, None]}]} == json.loads(json.dumps(kept))
    assert [type(kept[name]) for name in ("flag", "count")] == [bool, int]


ITSELF: dict[str, object] = {}
ITSELF["again"] = [ITSELF]


@pytest.mark.parametrize(
    ("state", "says"),
    [
        ([1], "must return a dictionary, got"),
        ({"a": {1: 2}}, "must have strings as keys, got 1"),
        ({"a": [object()]}, "must hold plain data"),
        (ITSELF, "must not hold itself"),
    ],
)
def test_a_state_that_cannot_be_saved_is_refused(state, says):
    with pytest.raises(MisconfigurationError, match=says):
        plain_state(state)
