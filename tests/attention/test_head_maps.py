"""Weights of heads that are products of two maps: what is multiplied, and which shapes do not go together."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from hdi_callback.attention.capture.inputs import layers_of_inputs
from hdi_callback.attention.layer.head_maps import HeadProduct
from hdi_callback.attention.layer.head_slice import HeadSlice
from hdi_callback.attention.layer.heads import AttentionLayer


def latent(inner: int = 6, rows: int = 8) -> HeadProduct:
    """Two heads of four features from a latent of six, which a map makes of sixteen."""
    torch.manual_seed(0)
    module = nn.ModuleDict({"down": nn.Linear(16, inner), "up": nn.Linear(6, rows), "norm": nn.LayerNorm(6)})
    nn.init.uniform_(module["norm"].weight, 0.5, 2)
    outer, below = HeadSlice(module["up"], "weight", 2, 4), HeadSlice(module["down"], "weight", 1, inner)
    return HeadProduct(module, outer, below, gain="norm.weight")


def test_the_weight_of_a_head_is_the_product_of_its_maps_with_the_gain_between():
    product = latent()
    down, up, gain = (product.module[name].weight.detach().double().numpy() for name in ("down", "up", "norm"))
    expected = np.stack([up[:4] @ np.diag(gain) @ down, up[4:] @ np.diag(gain) @ down])
    assert product.rows().detach().numpy() == pytest.approx(expected, abs=1e-6)
    assert product.contradiction(is_output=False) is None


@pytest.mark.parametrize(
    ("shapes", "why"),
    [
        ({"inner": 5}, "takes 6 features of 1 x 5"),
        ({"rows": 7}, "has 7 features, fewer than 2 heads of 4"),
        ({"inner": 5, "rows": 7}, "has 7 features, fewer than 2 heads of 4"),
    ],
)
def test_two_projections_that_do_not_fit_each_other_or_their_heads_are_contradicted(shapes, why):
    assert latent(**shapes).contradiction(is_output=False) == why


@pytest.mark.parametrize(("inner", "outer", "fits"), [(1, 1, True), (1, 4, True), (4, 1, True), (2, 2, False)])
def test_heads_may_be_split_in_only_one_of_the_two_projections(inner, outer, fits):
    module = nn.ModuleDict({"down": nn.Linear(16, 6 * inner), "up": nn.Linear(6, 2 * outer)})
    product = HeadProduct(
        module, HeadSlice(module["up"], "weight", outer, 2), HeadSlice(module["down"], "weight", inner, 6)
    )
    assert (product.contradiction(is_output=False) is None) == fits


@pytest.mark.parametrize(("gain", "is_linear"), [("", True), ("norm.weight", False)])
def test_inputs_of_latent_keys_are_captured_unless_a_norm_lies_between_the_two_projections(gain, is_linear):
    product = replace(latent(), gain=gain)
    module, query = product.module, HeadSlice(nn.Linear(16, 8), "weight", 2, 4)
    layer = AttentionLayer("attn", module, 2, 2, 4, 4, "two maps", {"query": query, "key": product, "value": query})
    tapped, why_not = layers_of_inputs([layer])
    assert [one.output_projection for one in tapped] == ([module["down"]] if is_linear else [])
    assert ("there is a norm between its two key projections" in why_not.get("attn", "")) is not is_linear


def test_key_inputs_are_absent_with_the_owner_named_if_the_key_projection_is_a_bare_parameter():
    module = nn.ModuleDict({"q": nn.Linear(16, 8)})
    module.keys_of = nn.Parameter(torch.zeros(8, 16))
    query, key = HeadSlice(module["q"], "weight", 2, 4), HeadSlice(module, "keys_of", 2, 4)
    layer = AttentionLayer("attn", module, 2, 2, 4, 4, "two maps", {"query": query, "key": key, "value": query})
    tapped, why_not = layers_of_inputs([layer])
    assert tapped == []
    assert "its key projection is a parameter of ModuleDict" in why_not["attn"]
