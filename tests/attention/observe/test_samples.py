"""Which tokens of a map are kept to be compared."""

from __future__ import annotations

import pytest
import torch

from hdi_callback.attention.observe.compare.samples import TOKENS, arrangements, places


@pytest.mark.parametrize("tokens", [TOKENS + 1, TOKENS + 2, 1000, 2**20 + 7])
def test_the_sampled_places_include_the_first_three_tokens_and_the_last(tokens):
    kept = places(tokens, torch.device("cpu")).tolist()
    assert len(set(kept[:3])) == 3
    assert kept[:3] == [0, 1, 2]
    assert kept[-1] == tokens - 1
    assert len(kept) == TOKENS
    assert all(0 <= one < tokens for one in kept)


@pytest.mark.parametrize("tokens", [0, 1, TOKENS])
def test_few_tokens_are_all_kept(tokens):
    assert places(tokens, torch.device("cpu")).tolist() == list(range(tokens))


@pytest.mark.parametrize("sequences_first", [True, False])
def test_a_joint_dimension_of_heads_and_sequences_is_split_in_both_orders(sequences_first):
    B, H, T, D = 2, 3, 4, 5
    tensor = torch.randn(B, H, T, D)  # of B * T tokens, fewer than are kept
    flat = (tensor if sequences_first else tensor.transpose(0, 1)).reshape(B * H, T, D)
    found = list(arrangements(flat, [B * T]))
    assert {(one.tokens, one.start) for one in found} == {(B * T, 0)}
    expected = tensor.transpose(1, 2).reshape(B * T, H, D)
    assert sum(torch.equal(one.features, expected) for one in found) == 1
    assert any(torch.equal(one.features, tensor.permute(2, 0, 1, 3).reshape(T * B, H, D)) for one in found)


def test_a_part_of_each_sequence_is_tried_from_its_start_and_from_its_end():
    tensor = torch.randn(2, 3, 7, 5)
    found = {one.start: one.features for one in arrangements(tensor, [2 * 4])}
    assert found.keys() == {0, 3}
    for start, features in found.items():
        assert torch.equal(features, tensor[:, :, start : start + 4].transpose(1, 2).reshape(8, 3, 5))
