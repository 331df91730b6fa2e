"""Two models or checkpoints compared with each other."""

from __future__ import annotations

import copy

import pytest
import torch

from hdi_callback.audits import compare
from tests.audits.models import Encoder, copy_head

NAME = "encoder.layers.1.self_attn"
ROWS = {"query": slice(0, 32), "key": slice(32, 64), "value": slice(64, 96)}


@pytest.fixture
def two():
    """A model, and the same after head 5 of layer 1 became a copy of head 1 (of eight)."""
    torch.manual_seed(0)
    model = Encoder(2)
    model.encoder.layers[1].self_attn.num_heads, model.encoder.layers[1].self_attn.head_dim = 8, 4
    other = copy.deepcopy(model)
    copy_head(other.encoder.layers[1].self_attn.in_proj_weight[32:64], source=1, target=5, width=4)
    return model, other


def attention(model):
    return model.encoder.layers[1].self_attn


def test_nothing_differs_in_a_model_and_itself(two):
    comparison = compare(two[0], two[0])
    assert comparison.summary == (
        "The query, key, value and output weights that are in both are equal bit by bit, in 2 layers. Other parameters "
        "are not compared."
    )


@pytest.mark.parametrize("role", ["query", "key", "value", "output"])
@pytest.mark.parametrize(
    "change",
    [lambda w: w * 10, lambda w: -w, lambda w: w.flip(0), lambda w: w + 1e-4],
    ids=["scale", "sign", "order", "little"],
)
def test_a_change_of_one_head_is_named_whatever_its_role(two, role, change):
    model, other = two[0], copy.deepcopy(two[0])
    with torch.no_grad():
        rows = attention(other).out_proj.weight.T if role == "output" else attention(other).in_proj_weight[ROWS[role]]
        rows[12:16] = change(rows[12:16])  # head 3
        before = attention(model).out_proj.weight.T if role == "output" else attention(model).in_proj_weight[ROWS[role]]
        share = float((rows[12:16] - before[12:16]).norm() / before[12:16].norm())
    comparison = compare(model, other)
    assert max(comparison.changes[NAME][role]) == comparison.changes[NAME][role][3] == pytest.approx(share, rel=1e-4)
    assert [head for head, of_head in enumerate(comparison.changes[NAME][role]) if of_head] == [3]
    assert comparison.summary.startswith(f"{NAME} changed most: the {role} weights of head 3 by")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0])
@pytest.mark.parametrize("side", ["A", "B"])
def test_what_is_not_finite_or_zero_comes_first_whatever_else_has_changed(two, value, side):
    model, other = two[0], copy.deepcopy(two[1])
    with torch.no_grad():
        attention(model if side == "A" else other).in_proj_weight[64:][12:16] = value
    fault = "not finite" if value else "zero"
    comparison = compare(model, other)
    assert comparison.summary.startswith(f"The value weights of head 3 of {NAME} are {fault} in {side}.")
    assert str(comparison).splitlines()[4].startswith(NAME)


def test_the_head_that_became_a_copy_is_named(two):
    assert f"{NAME} changed most: the key weights of head 5 by" in compare(*two).summary


def test_layers_of_one_model_alone_are_named(two):
    comparison = compare(two[0], Encoder(3))
    assert comparison.not_compared["encoder.layers.2.self_attn"] == "it is only in B"


def test_heads_of_other_shapes_are_not_compared_one_by_one(two):
    comparison = compare(two[0], Encoder(2))
    assert comparison.not_compared[f"key of {NAME}"] == "its weights are (8, 4, 32) in A and (4, 8, 32) in B"


def test_a_comparison_is_a_table_of_100_columns(two):
    comparison = compare(*two)
    lines = str(comparison).splitlines()
    assert lines[0].startswith("A  ")
    assert lines[-1] == comparison.summary
    assert max(map(len, lines[:-1])) <= 100
