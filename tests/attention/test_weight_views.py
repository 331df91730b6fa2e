"""Maps whose matrix code multiplies with by itself: as it is, turned, or a part of it."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hdi_callback.attention import survey

WIDTH = 16
KEYS = {
    "called": lambda x, m: m.k(x),
    "linear, turned": lambda x, m: F.linear(x, m.k.weight.t()),
    "product": lambda x, m: x @ m.k.weight.t(),
    "product, turned": lambda x, m: x @ m.k.weight,
    "rows of a parameter": lambda x, m: F.linear(x, m.rows[WIDTH : 2 * WIDTH]),
    "columns of a parameter": lambda x, m: x @ m.columns[:, WIDTH : 2 * WIDTH],
    "columns of a parameter, turned": lambda x, m: F.linear(x, m.columns[:, WIDTH : 2 * WIDTH].t()),
    "contraction": lambda x, m: torch.einsum("bni,oi->bno", x, m.k.weight),
    "contraction, turned": lambda x, m: torch.einsum("bni,io->bno", x, m.k.weight),
    "contraction with rows of a parameter": lambda x, m: torch.einsum("bni,oi->bno", x, m.rows[WIDTH : 2 * WIDTH]),
    "tensordot with columns of a parameter": lambda x, m: torch.tensordot(x, m.columns[:, WIDTH : 2 * WIDTH], 1),
    "added to numbers": lambda x, m: torch.addmm(torch.zeros(WIDTH), x.flatten(0, 1), m.k.weight.t()).view_as(x),
    "added to numbers, by their method": lambda x, m: (
        torch.zeros(x.shape[:2].numel(), WIDTH).addmm(x.flatten(0, 1), m.columns[:, :WIDTH]).view_as(x)
    ),
}


class ByItsMatrix(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.rows, self.columns = (nn.Parameter(torch.randn(s)) for s in ((3 * WIDTH, WIDTH), (WIDTH, 3 * WIDTH)))

    def attend(self, query, key, value):
        query, key, value = (one.unflatten(-1, (4, -1)).transpose(1, 2) for one in (query, key, value))
        return self.o(((query @ key.mT).softmax(-1) @ value).transpose(1, 2).flatten(2))

    def forward(self, x):
        return self.attend(self.q(x), KEYS[self.way](x, self), self.v(x))


@pytest.mark.parametrize("has_forward", [False, True])
@pytest.mark.parametrize("way", KEYS)
def test_keys_are_read_from_a_matrix_that_is_used_directly_or_transposed(way, has_forward):
    torch.manual_seed(0)
    module, x = ByItsMatrix(way), torch.randn(2, 5, WIDTH)
    (layer,) = survey(module, forward=(lambda: module(x)) if has_forward else None).layers
    keys = KEYS[way](x, module)
    assert torch.allclose(x @ layer.weight("key").flatten(0, 1).mT, keys, atol=1e-5)


class BothWays(ByItsMatrix):
    def forward(self, x):
        return self.attend(self.k(x), F.linear(x, self.k.weight.t()), self.v(x))


@pytest.mark.parametrize("has_forward", [False, True])
def test_a_matrix_that_gives_queries_and_transposed_gives_keys_is_refused(has_forward):
    module, x = BothWays("called"), torch.randn(2, 5, WIDTH)
    found = survey(module, forward=(lambda: module(x)) if has_forward else None)
    assert found.layers == ()
    assert [one.reason for one in found.refused] == ["it multiplies with `k` and with its transpose"]


class PartOfTheInput(ByItsMatrix):
    def forward(self, x):
        return self.attend(self.q(x), F.linear(x[..., :8], self.k.weight[:, :8]), self.v(x))


class InAnotherShape(ByItsMatrix):
    def forward(self, x):
        return self.attend(self.q(x), x @ self.rows.view(WIDTH, -1)[:, :WIDTH], self.v(x))


@pytest.mark.parametrize("has_forward", [False, True])
@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (PartOfTheInput, "it multiplies with a part of the columns of `k`"),
        (InAnotherShape, "its keys (come from no linear map|are its inputs, .* without a projection that can be read)"),
    ],
)
def test_a_part_or_a_reshape_of_a_parameter_is_not_read_as_the_whole_parameter(kind, reason, has_forward):
    module, x = kind("called"), torch.randn(2, 5, WIDTH)
    found = survey(module, forward=(lambda: module(x)) if has_forward else None)
    assert found.layers == ()
    assert [bool(re.match(reason, one.reason)) for one in found.refused] == [True]


class ThreeOfFourHeads(ByItsMatrix):
    """The first rows of three matrices, and the first columns of that of the outputs."""

    def forward(self, x):
        q, k, v = (F.linear(x, m.weight[:12]).unflatten(-1, (3, -1)).transpose(1, 2) for m in (self.q, self.k, self.v))
        return F.linear(((q @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(2), self.o.weight[:, :12])


def test_with_fewer_heads_than_the_output_projection_takes_its_first_columns_are_read():
    module = ThreeOfFourHeads("called")
    (layer,) = survey(module).layers
    assert torch.equal(layer.weight("output").flatten(0, 1), module.o.weight[:, :12].T)
    assert torch.equal(layer.weight("value").flatten(0, 1), module.v.weight[:12])
