"""Labels say of each element from which row and token it comes; planes keep them small."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from hdi_callback.attention.discovery.find import survey_tape
from hdi_callback.attention.discovery.labels import NORMED, SEVERAL, Labels, Unreadable
from hdi_callback.attention.discovery.planes import (
    reshaped,
    seen_through,
    small,
    thin,
    unique_rows,
    written_out,
)
from hdi_callback.attention.tape import DATA, Cell, Tape, View
from tests.attention.by_hand import CASES, C, H

ROWS, TOKENS = 6, 5


def labels_of(function):
    """Give the labels of what a function makes of the output of a linear map, and the number of the map's first row."""
    model = nn.Linear(4, ROWS, bias=False)
    with torch.no_grad(), Tape(model) as tape:
        function(model(torch.randn(TOKENS, 4))).exp()
    return Labels(tape).read(tape.steps[-1].inputs[0]), tape.first[tape.places["weight"]]


def rows(label, first):
    return (label.features - first) // 4


def test_a_product_with_a_parameter_gives_rows_and_tokens():
    label, first = labels_of(lambda y: y)
    assert torch.equal(rows(label, first), torch.arange(ROWS).expand(TOKENS, ROWS))
    assert torch.equal(label.tokens, (torch.arange(TOKENS) + 1)[:, None].expand(TOKENS, ROWS))


@pytest.mark.parametrize(
    "function",
    [
        lambda y: y.T,
        lambda y: y.view(TOKENS, 2, 3).permute(1, 2, 0),
        lambda y: y.unfold(0, 3, 1),
        lambda y: torch.cat([y[:, 3:], y[:, :3]], 1),
        lambda y: y.roll(2, 0),
        lambda y: y[torch.tensor([2, 0, 4])],
        lambda y: y.repeat_interleave(2, 1),
        lambda y: torch.stack([y, y.flip(1)]),
        lambda y: y.reshape(3, 10),
    ],
)
def test_what_moves_data_moves_labels_alike(function):
    label, first = labels_of(function)
    at = torch.arange(ROWS).expand(TOKENS, ROWS).contiguous()
    token = (torch.arange(TOKENS) + 1)[:, None].expand(TOKENS, ROWS).contiguous()
    assert torch.equal(rows(label, first), function(at))
    assert torch.equal(label.tokens, function(token))


def test_slices_that_are_assigned_keep_what_is_beside():
    def assigned(y):
        z = torch.zeros(TOKENS, ROWS)
        z[:, 2:4] = y[:, :2]
        return z

    label, first = labels_of(assigned)
    assert label.features[:, [0, 1, 4, 5]].eq(0).all()
    assert torch.equal(rows(label, first)[:, 2:4], torch.arange(2).expand(TOKENS, 2))


def test_sums_of_rows_are_sets_and_norms_keep_their_rows():
    turned, first = labels_of(lambda y: y + y.flip(1))
    assert (turned.features < SEVERAL).all()
    normed, first = labels_of(lambda y: y * (y.square().mean(-1, keepdim=True) + 1e-6).rsqrt())
    assert torch.equal(rows(normed, first), torch.arange(ROWS).expand(TOKENS, ROWS))
    assert NORMED in normed.flags


def test_averages_over_tokens_have_no_token():
    label, first = labels_of(lambda y: y.mean(0, keepdim=True))
    assert label.tokens.eq(SEVERAL).all()
    assert torch.equal(rows(label, first), torch.arange(ROWS)[None])


def test_an_operation_without_a_rule_is_unreadable_by_its_name():
    with pytest.raises(Unreadable, match="cholesky"):
        labels_of(lambda y: torch.linalg.cholesky(y.T @ y + torch.eye(ROWS)))


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_a_plane_seen_through_another_geometry_is_that_of_memory(data):
    shape = data.draw(st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=1, max_size=4))
    memory = torch.arange(torch.Size(shape).numel()).reshape(shape)
    written = memory.permute(data.draw(st.permutations(range(len(shape)))))
    repeats = [data.draw(st.booleans()) for _ in shape]
    plane = torch.randint(0, 99, [1 if one else size for one, size in zip(repeats, written.shape)]).expand(
        written.shape
    )
    view = memory
    for _ in range(data.draw(st.integers(0, 4))):
        kind = data.draw(st.sampled_from(["permute", "narrow", "split", "select", "unfold"]))
        dim = data.draw(st.integers(0, max(0, view.dim() - 1)))
        if kind == "permute":
            view = view.permute(data.draw(st.permutations(range(view.dim()))))
        elif kind == "narrow" and view.dim():
            start = data.draw(st.integers(0, view.shape[dim] - 1))
            view = view.narrow(dim, start, data.draw(st.integers(1, view.shape[dim] - start)))
        elif kind == "split" and view.dim() and view.shape[dim] % 2 == 0:
            view = view.unflatten(dim, (-1, 2))
        elif kind == "select" and view.dim() > 1:
            view = view.select(dim, 0)
        elif kind == "unfold" and view.dim() and view.shape[dim] > 2:
            view = view.unfold(dim, 2, 1)
    cell = Cell(memory.numel(), 8, DATA)
    own, other = (View(cell, tuple(t.shape), t.stride(), t.storage_offset(), 8, True) for t in (written, view))
    seen = seen_through(plane, own, other)
    flat = written_out(plane, own, memory.numel())
    if seen is not None:
        assert torch.equal(seen, flat.as_strided(other.shape, other.stride, other.offset))


def test_a_reshaped_plane_is_written_out_only_where_dimensions_that_differ_are_merged():
    numbers = torch.arange(12).reshape(1, 3, 1, 4)
    plane = numbers.expand(5, 3, 1000, 4)  # batch, heads, tokens, width
    merged = reshaped(plane, (15, 1000, 4))
    assert merged.untyped_storage().nbytes() <= 15 * 4 * 8
    assert torch.equal(merged, plane.reshape(15, 1000, 4))
    for shape in ((5, 3, 4000), (15000, 4), (5, 3, 10, 100, 4), (15, 1000, 4, 1), (60000,)):
        assert torch.equal(reshaped(plane, shape), plane.reshape(shape))


def test_thin_planes_take_no_more_than_differs():
    plane = torch.arange(3)[:, None].repeat(1, 1000)
    assert thin(plane).stride(1) == 0
    assert small(thin(plane)).numel() == 3
    assert torch.equal(thin(plane), plane)


def test_unique_rows_are_found():
    matrix = torch.tensor([[1, 2], [3, 4], [1, 2]])
    unique, which = unique_rows(matrix)
    assert torch.equal(unique[which], matrix)
    assert len(unique) == 2


def test_labels_of_scores_take_no_memory_of_their_size():
    module, _, _ = CASES["written_out"]()
    x = torch.randn(1, 512, C)
    with torch.no_grad(), Tape(module) as tape:
        module(x)
    step = next(one for one in tape.steps if one.op == "_softmax")
    label = Labels(tape).read(step.inputs[0])
    assert label.features.shape == (1, H, 512, 512)
    assert small(label.features).numel() == H * 512
    assert small(label.tokens).numel() == 512
    assert len(survey_tape(tape).layers) == 1
