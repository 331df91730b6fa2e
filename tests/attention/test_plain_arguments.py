"""Arguments with other tensors in their places, and functions that are others for a while and in one thread."""

from __future__ import annotations

import threading
from collections import OrderedDict, namedtuple
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from hdi_callback.attention.trace.arguments import with_tensors
from hdi_callback.attention.trace.replaced import in_this_thread, replaced

Pair = namedtuple("Pair", ["left", "right"])


class KeyCache:
    def __init__(self):
        self.keys = torch.ones(2)


def test_tensors_are_replaced_in_copies_of_nested_containers_and_the_originals_are_unchanged():
    x, module, cache = torch.ones(2), nn.Linear(2, 2), KeyCache()
    held = SimpleNamespace(mask=x, inner=SimpleNamespace(x=x), width=3)
    given = {
        "pair": Pair(x, 1),
        "list": [x, (x, None)],
        "named": OrderedDict(x=x),
        "held": held,
        "cache": cache,
        "of": module,
    }
    changed = with_tensors(given, lambda one: one + 1)
    assert type(changed["pair"]) is Pair
    assert changed["pair"].left.tolist() == [2, 2]
    assert changed["pair"].right == 1
    assert changed["list"][0].tolist() == changed["list"][1][0].tolist() == [2, 2]
    assert changed["list"][1][1] is None
    assert type(changed["named"]) is OrderedDict
    assert changed["named"]["x"].tolist() == [2, 2]
    assert (changed["held"].mask.tolist(), changed["held"].inner.x.tolist(), changed["held"].width) == (
        [2, 2],
        [2, 2],
        3,
    )
    assert changed["cache"] is None, "it would be written to"
    assert changed["of"] is module
    assert held.mask is held.inner.x is x
    assert given["named"]["x"] is x
    assert cache.keys.tolist() == [1, 1]


class Owner:
    @staticmethod
    def kind():
        return "own"


def test_a_replaced_attribute_is_restored_after_the_block_and_after_an_error():
    before = vars(Owner)["kind"]
    with pytest.raises(KeyError), replaced((Owner, "kind", lambda: "other")):
        assert Owner.kind() == "other"
        raise KeyError
    assert vars(Owner)["kind"] is before
    assert Owner().kind() == "own"


def test_a_replacement_function_runs_only_in_this_thread_and_falls_back_on_the_original():
    chosen = in_this_thread(lambda x: x + 1, lambda own, x: NotImplemented if x < 0 else own(x) * 10)
    assert (chosen(1), chosen(-1)) == (20, 0)
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(chosen(1)))
    thread.start()
    thread.join()
    assert found == [2]
