"""What user code can reach is put back as it was, whatever kind of container keeps it."""

from __future__ import annotations

import collections
import copy
import importlib
import io
import os
import sys
import types

import pytest
import torch
from torch import nn

from hdi_callback.attention.isolation.printing import muted
from hdi_callback.attention.isolation.settings import environment_kept
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
def test_every_kind_of_container_is_restored(one, is_emptied):
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


def test_a_counter_incremented_in_isolation_is_restored():
    calls = collections.Counter(forward=2)
    for _ in range(2):
        data = UserData()
        data.note([calls])
        calls["forward"] += 1
        calls["other"] += 1
        data.restore()
    assert calls == {"forward": 2}


class Lazy(collections.OrderedDict):
    """Loads what it lists, as the mappings of transformers' auto classes do."""

    def __init__(self):
        super().__init__()
        self.loaded = []

    def _load(self, *_):
        self.loaded.append("everything")
        return [("name", "model")]

    items = keys = values = __iter__ = _load

    def __len__(self):
        self._load()
        return 1


@pytest.mark.parametrize("is_empty", [True, False])
def test_restoring_a_lazy_mapping_loads_none_of_its_entries(is_empty):
    mapping = Lazy()
    if not is_empty:
        collections.OrderedDict.__setitem__(mapping, "first", 1)
    data = UserData()
    data.note([mapping])
    collections.OrderedDict.__setitem__(mapping, "second", 2)
    data.restore()
    assert mapping.loaded == []
    assert list(collections.OrderedDict.items(mapping)) == ([] if is_empty else [("first", 1)])


@pytest.mark.parametrize("before", [(), (int,)])
def test_registrations_by_an_import_during_isolation_stay(tmp_path, monkeypatch, before):
    """It does so once: what forgets it there fails at the next use, as outputs of transformers did."""
    (tmp_path / "registered_late.py").write_text(
        "import sys\n\nclass Output:\n    pass\n\nsys.modules['registry_of_late'].known.add(Output)\n"
    )
    registry = types.ModuleType("registry_of_late")
    registry.known = set(before)
    monkeypatch.setitem(sys.modules, "registry_of_late", registry)
    monkeypatch.syspath_prepend(str(tmp_path))
    data = UserData()
    data.note([registry.known])
    late = importlib.import_module("registered_late")
    registry.known.add("counted")
    data.restore()
    del sys.modules["registered_late"]
    assert registry.known == {*before, late.Output}


CALLS = collections.Counter()


class Counted(nn.Linear):
    def forward(self, x):
        CALLS["forward"] += 1
        return super().forward(x)


def test_class_counters_are_restored_under_a_subclass_that_torch_made():
    module = nn.utils.parametrizations.weight_norm(Counted(2, 2))
    assert type(module).__module__.partition(".")[0] == "torch"  # a subclass, which torch made
    CALLS["forward"] = 3
    data = UserData()
    data.note([module])
    module(torch.zeros(1, 2))
    assert CALLS["forward"] == 4
    data.restore()
    assert CALLS["forward"] == 3


def test_stdout_is_restored_after_muting_unless_user_code_replaced_it(monkeypatch):
    before, other = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stdout", before)
    with muted():
        sys.stdout.write("unheard")
    assert sys.stdout is before
    with muted():
        sys.stdout = other
    assert sys.stdout is other
    assert before.getvalue() == ""


def test_attributes_of_a_user_object_are_restored():
    held = types.SimpleNamespace(losses=[1.0], names={"a": [2]})
    data = UserData()
    data.note([held])
    held.losses.append(3.0)
    held.names["a"].append(4)
    data.restore()
    assert held == types.SimpleNamespace(losses=[1.0], names={"a": [2]})


def test_environment_variables_are_restored_and_unchanged_ones_are_not_written(monkeypatch):
    monkeypatch.setenv("HDI_TEST_KEPT", "1")
    before = dict(os.environ)
    with environment_kept():
        os.environ["HDI_TEST_KEPT"] = "2"
        os.environ["HDI_TEST_NEW"] = "3"
    assert dict(os.environ) == before
    monkeypatch.setattr(type(os.environ), "clear", lambda environment: pytest.fail("it was written"))
    with environment_kept():
        pass
