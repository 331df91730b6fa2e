"""Which tokens of a map are kept to be compared."""

from __future__ import annotations

import pytest
import torch

from hdi_callback.attention.observe.compare.samples import TOKENS, places


@pytest.mark.parametrize("tokens", [TOKENS + 1, TOKENS + 2, 1000, 2**20 + 7])
def test_of_many_tokens_the_first_three_the_last_and_others_far_apart_are_kept(tokens):
    kept = places(tokens, torch.device("cpu")).tolist()
    assert len(set(kept[:3])) == 3
    assert kept[:3] == [0, 1, 2]
    assert kept[-1] == tokens - 1
    assert len(kept) == TOKENS
    assert all(0 <= one < tokens for one in kept)


@pytest.mark.parametrize("tokens", [0, 1, TOKENS])
def test_few_tokens_are_all_kept(tokens):
    assert places(tokens, torch.device("cpu")).tolist() == list(range(tokens))
