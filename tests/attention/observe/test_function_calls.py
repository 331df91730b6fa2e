"""The record of one call of a torch function, and notes about tensors."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hdi_callback.attention.observe.recorder import Recorder
from hdi_callback.attention.observe.scores.call import Call, TensorNotes, from_the_end
from hdi_callback.attention.observe.scores.masks import MaskTerm
from hdi_callback.attention.observe.scores.products import product_of


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
def test_an_in_place_function_or_an_operator_has_the_name_of_its_base_operation(name, base):
    assert Call(name, (), {}, None).base == base


def test_arguments_are_found_by_position_or_name_and_tensors_inside_lists():
    a, b, c, d = torch.zeros(4, 1)
    call = Call("cat", (1, [a, 2, b]), {"out": c, "others": (d,)}, (a, None, b))
    assert call.argument(0, "out") == 1
    assert call.argument(2, "out") is c
    assert call.argument(2, "dim") is None
    assert [id(one) for one in call.tensors()] == [id(a), id(b), id(c), id(d)]
    assert [id(one) for one in call.results] == [id(a), id(b)]
    assert [id(one) for one in Call("exp", (a,), {}, b).results] == [id(b)]


@pytest.mark.parametrize(("dim", "expected"), [(0, -3), (2, -1), (-1, -1), (-3, -3)])
def test_dimensions_are_counted_from_the_last(dim, expected):
    assert from_the_end(dim, 3) == expected


def test_a_note_belongs_to_one_tensor_and_is_deleted_with_it():
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


def test_an_einsum_over_two_dimensions_is_one_matrix_product_over_both_flattened():
    left, right = torch.randn(3, 5, 2, 4), torch.randn(3, 6, 2, 4)
    equation = "rihd,rjhd->hij"
    product = product_of(Call("einsum", (equation, left, right), {}, None), left, right)
    assert product is not None
    assert product.tied == 3
    torch.testing.assert_close(product.left @ product.right.mT, torch.einsum(equation, left, right))


def test_a_bias_of_the_scores_moves_their_bound_and_a_mask_that_only_hides_does_not():
    query, key = torch.randn(2, 5, 4), torch.randn(2, 6, 4)
    mask, bias = torch.ones(5, 6, dtype=torch.bool), torch.randn(5, 6)
    taken: list[Any] = []
    recorder: Any = SimpleNamespace(is_repeated=True, core_ran=lambda via, scores, *rest: taken.append(scores))
    terms = [MaskTerm(mask, "visible"), MaskTerm(None, "causal"), MaskTerm(bias, "added"), MaskTerm(mask, "hidden")]
    Recorder.fused_ran(recorder, "kernel", query, key, key, query, terms=terms)
    ((added, factor),) = taken[0].biases
    assert added is bias
    assert factor == 1
