"""Modules that resemble attention, and are reported if nothing is read of them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hdi_callback.attention import find_attention, survey
from hdi_callback.attention.finding.conventions import looks_like_attention
from hdi_callback.attention.layer.registry import Place
from hdi_callback.errors import UnsupportedAttentionWarning
from tests.attention.models import D, H, attend


class Messages(nn.Module):
    """As a layer of a graph network: attention in a method beside the forward, and inputs that nobody can make up."""

    def __init__(self):
        super().__init__()
        self.lin_a, self.lin_b, self.lin_c = (nn.Linear(D, D) for _ in range(3))

    def message(self, a, b, edges):
        weights = torch.softmax((a[edges[0]] * b[edges[1]]).sum(-1), 0)
        return torch.matmul(weights, b[edges[1]])

    def forward(self, x, edges):
        return self.message(self.lin_a(x), self.lin_b(x), edges["all"])


class Helped(nn.Module):
    """Attention in a function of the module's file, maps under names of its own, a dictionary for an input."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(D, 3 * D), nn.Linear(D, D)

    def forward(self, batch):
        return self.two(attend(*(part.unflatten(-1, (H, -1)) for part in self.one(batch["x"] * 1.0).chunk(3, -1)), 0))


class Mixes(nn.Module):
    """No attention: two maps and an input that nobody can make up."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, batch):
        return self.two(torch.relu(self.one(batch["x"])))


@pytest.mark.parametrize("kind", [Messages, Helped])
def test_a_module_that_calls_a_softmax_and_cannot_run_is_reported(kind):
    model = nn.ModuleDict({"odd": kind()})
    with pytest.warns(UnsupportedAttentionWarning, match="`odd`.*could not be run with synthetic inputs"):
        assert find_attention(model) == []


def test_a_module_that_calls_no_softmax_is_not_reported():
    assert survey(nn.ModuleDict({"other": Mixes()})).refused == ()


class Int8Linear(nn.Module):
    """A map that keeps no parameters, as a quantised one."""

    def __init__(self):
        super().__init__()
        self.in_features = self.out_features = 8


class SomeAttention(nn.Module):
    def __init__(self, **parts):
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)


def test_a_module_named_attention_is_searched_if_it_holds_two_linear_maps_of_any_class():
    model = nn.Module()
    two = {"a": nn.Linear(8, 8), "b": nn.Linear(8, 8)}
    for parts, expected in (
        (two, True),
        ({"a": Int8Linear(), "b": Int8Linear()}, True),
        ({"a": nn.Linear(8, 8)}, False),
        ({"a": Int8Linear()}, False),
        ({"a": nn.LayerNorm(8), "b": nn.LayerNorm(8)}, False),
        ({}, False),
    ):
        assert looks_like_attention(Place("attn", SomeAttention(**parts), model)) is expected, parts
    assert not looks_like_attention(Place("", SomeAttention(**two), None)), "a whole model may be called anything"


class Weighs(nn.Module):
    """Attention by torch's operators, under names that say nothing."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return torch.softmax(self.one(x) @ self.two(x).transpose(1, 2), -1) @ x


class Gates(Weighs):
    """The same maps, and no softmax."""

    def forward(self, x):
        return self.two(torch.relu(self.one(x)))


@pytest.mark.parametrize(("kind", "expected"), [(Weighs, True), (Gates, False)])
def test_a_scripted_module_is_searched_if_its_graph_has_the_operators_of_attention(kind, expected):
    scripted = torch.jit.script(kind())
    assert looks_like_attention(Place("odd", scripted, nn.Module())) is expected
