"""The record of one call of a torch function, and notes about tensors."""

from __future__ import annotations

import gc

import pytest
import torch

from hdi_callback.attention.observe.scores.call import Call, TensorNotes, from_the_end


@pytest.mark.parametrize(
    ("name", "base"),
    [
        ("add", "add"),
        ("add_", "add"),
        ("__add__", "add"),
        ("__iadd__", "add"),
        ("__imul__", "mul"),
        ("index_add", "index_add"),
    ],
)
def test_a_function_in_place_or_as_an_operator_is_the_same_operation(name, base):
    assert Call(name, (), {}, None).base == base


def test_arguments_are_found_by_position_or_name_and_tensors_in_lists_too():
    a, b, c, d = torch.zeros(4, 1)
    call = Call("cat", (1, [a, 2, b]), {"out": c, "others": (d,)}, (a, None, b))
    assert call.argument(0, "out") == 1
    assert call.argument(2, "out") is c
    assert call.argument(2, "dim") is None
    assert [id(one) for one in call.tensors()] == [id(a), id(b), id(c), id(d)]
    assert [id(one) for one in call.results] == [id(a), id(b)]
    assert [id(one) for one in Call("exp", (a,), {}, b).results] == [id(b)]


@pytest.mark.parametrize(("dim", "expected"), [(0, -3), (2, -1), (-1, -1), (-3, -3)])
def test_a_dimension_is_counted_from_the_last(dim, expected):
    assert from_the_end(dim, 3) == expected


def test_a_note_is_of_one_tensor_and_goes_with_it():
    notes: TensorNotes[str] = TensorNotes()
    one, other = torch.zeros(2), torch.zeros(2)
    assert not notes
    notes[one] = "first"
    notes[one] = "changed"
    assert notes
    assert (notes.get(one), notes.get(other), notes.get("no tensor")) == ("changed", None, None)
    del one
    gc.collect()
    assert not notes
    notes[other] = "second"
    notes.clear()
    assert notes.get(other) is None
