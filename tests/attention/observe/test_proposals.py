"""Rows of heads that were observed, written down as a part of a parameter."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hdi_callback.attention import AttentionLayer
from hdi_callback.attention.observe import AttentionObserver
from hdi_callback.attention.observe.compare.found_rows import FoundRows
from hdi_callback.attention.observe.compare.proposals import slice_of
from tests.attention.wild.catalogue import cases
from tests.attention.wild.proof import make_inputs
from tests.attention.wild.verdict import Holder


@pytest.mark.parametrize("pairs", [[0, 1, 2, 3], [0, 2, 1, 3], [2, 0, 3, 1]])
@pytest.mark.parametrize("start", [0, 8])
def test_rows_of_rotary_heads_are_sorted_whatever_the_order_of_the_pairs(pairs, start):
    model = nn.ModuleDict({"qk": nn.Linear(6, 16)})
    rows = start + torch.tensor([pairs, [4 + place for place in pairs]])
    found = slice_of(model, "", FoundRows("qk.weight", rows, "rotated"))
    assert torch.equal(found.rows(), model["qk"].weight[start : start + 8].view(2, 4, 6))
    # No view reads heads backwards: a copy does, in their order.
    turned = slice_of(model, "", FoundRows("qk.weight", rows.flip(0), "rotated"))
    assert torch.equal(turned.rows(), found.rows().flip(0))


def test_a_slice_of_a_parameter_is_not_proposed_as_the_output_projection():
    case = cases()["FourQuartersOfOneMatrix"]
    model = Holder(case)
    observer = AttentionObserver(model)
    observer.arm()
    model(*make_inputs(case))
    observer.disarm()
    (layer,) = observer.proposals().values()
    assert isinstance(layer, AttentionLayer)
    assert layer.slices.keys() == {"query", "key", "value"}
    for role, first in (("query", 0), ("key", 24), ("value", 48)):
        assert torch.equal(layer.weight(role).flatten(0, 1), model.block.big.weight[first : first + 24])
