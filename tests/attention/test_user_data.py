"""What user code can reach is put back as it was, whatever kind of container keeps it."""

from __future__ import annotations

import collections
import copy

import pytest

from hdi_callback.attention.isolation.user_data import UserData


class Guarded(dict):
    """Counts how often it is written to."""

    writes = 0

    def __setitem__(self, name, value):
        Guarded.writes += 1
        super().__setitem__(name, value)

    def clear(self):
        raise TypeError("not to be emptied")

    update = None


CONTAINERS = [
    [1, 2],
    {"a": 1},
    {1, 2},
    collections.deque([1, 2, 3], maxlen=3),
    bytearray(b"ab"),
    collections.Counter({"forward": 2}),
    collections.OrderedDict([("b", 1), ("a", 2)]),
    collections.defaultdict(list, {"a": [1]}),
    Guarded({"a": 1}),
]


@pytest.mark.parametrize("one", CONTAINERS, ids=lambda one: type(one).__name__)
@pytest.mark.parametrize("is_emptied", [False, True])
def test_a_container_is_put_back_whatever_its_kind(one, is_emptied):
    one, before, writes = copy.deepcopy(one), copy.deepcopy(one), Guarded.writes
    data = UserData()
    data.note([one])
    change(one, is_emptied)
    assert one != before
    data.restore()
    assert one == before
    assert list(one) == list(before)
    assert type(one) is type(before)
    assert Guarded.writes == writes, "none of its own code is run"


def change(one, is_emptied):
    for kind in (collections.OrderedDict, dict, list, set, collections.deque, bytearray):
        if isinstance(one, kind) and is_emptied:
            kind.clear(one)
            return
    if isinstance(one, dict):
        dict.update(one, {"a": 7, "c": 3})
    elif isinstance(one, set):
        one.add(9)
    else:
        one.append(9)


def test_a_counter_that_a_forward_counts_up_goes_on_from_where_it_was():
    calls = collections.Counter(forward=2)
    for _ in range(2):
        data = UserData()
        data.note([calls])
        calls["forward"] += 1
        calls["other"] += 1
        data.restore()
    assert calls == {"forward": 2}
