"""Scores before the softmax, against what torch's own attention makes of them."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from hdi_callback.attention.trace.dot_product import dot_product_scores, repeated_for_queries

OPTIONS = {
    "plain": {},
    "a scale of its own": {"scale": 0.7},
    "causal": {"is_causal": True},
    "a mask of what is visible": {"attn_mask": torch.ones(6, 6, dtype=torch.bool).tril(2)},
    "numbers that are added": {"attn_mask": torch.linspace(-2, 2, 36).view(6, 6)},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_the_softmax_of_the_scores_agrees_with_scaled_dot_product_attention(name):
    query, key, value = torch.randn(3, 2, 4, 6, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    scores = dot_product_scores(query, key, **OPTIONS[name])
    expected = F.scaled_dot_product_attention(query, key, value, **OPTIONS[name])
    torch.testing.assert_close(scores.softmax(-1) @ value, expected)


@pytest.mark.parametrize("lead", [(3,), (2, 3, 2)])
def test_causal_scores_agree_with_torch_for_any_leading_dimensions(lead):
    query, key, value = torch.randn(3, *lead, 6, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    scores = dot_product_scores(query, key, is_causal=True)
    expected = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    torch.testing.assert_close(scores.softmax(-1) @ value, expected)


def test_hidden_keys_get_the_requested_score():
    query, key = torch.randn(2, 3, 5, 4)
    visible = torch.ones(5, 5, dtype=torch.bool).tril()
    scores = dot_product_scores(query, key, visible, hidden=-7.0)
    assert torch.equal(scores[:, ~visible], torch.full((3, 10), -7.0))
    assert torch.equal(scores[:, visible], dot_product_scores(query, key)[:, visible])


def test_shared_key_heads_are_repeated_side_by_side():
    query, key, value = torch.randn(1, 6, 5, 4), torch.randn(1, 2, 5, 4), torch.randn(1, 2, 5, 4)
    keys, values = repeated_for_queries(query, key, value)
    expected = F.scaled_dot_product_attention(query, key, value, enable_gqa=True)
    torch.testing.assert_close(F.scaled_dot_product_attention(query, keys, values), expected)
