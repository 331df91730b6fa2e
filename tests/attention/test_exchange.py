"""What ranks swap in a traced run: each rank is given what all of them sent to it."""

from __future__ import annotations

import torch

from hdi_callback.attention.trace import exchange
from hdi_callback.attention.trace.exchange import Exchange


def parts_of(rank: int) -> list[torch.Tensor]:
    return [torch.tensor([10 * rank + to]) for to in range(3)]


def test_an_emulated_exchange_receives_the_parts_that_all_ranks_sent_to_this_rank(monkeypatch):
    monkeypatch.setattr(exchange, "rank_in", lambda group: 1)
    sent = [Exchange(rank) for rank in range(3)]
    for rank, one in enumerate(sent):
        one.received(parts_of(rank), None)
        one.received([10 * part for part in parts_of(rank)], None)
    own = Exchange(ranks=sent)
    assert torch.cat(own.received(parts_of(1), None)).tolist() == [1, 11, 21]
    assert torch.cat(own.received(parts_of(1), None)).tolist() == [10, 110, 210], "the second call"
    assert own.size == 3


def test_an_emulated_exchange_assumes_equal_parts_before_the_other_ranks_ran(monkeypatch):
    monkeypatch.setattr(exchange, "rank_in", lambda group: 2)
    assert torch.cat(Exchange().received(parts_of(0), None)).tolist() == [2, 2, 2]
    assert torch.cat(Exchange(1).received(parts_of(0), None)).tolist() == [1, 1, 1], "as the rank that it plays"
    assert Exchange(1).swapped(torch.arange(6), None, (3, 2, 1)).tolist() == [3, 4] * 3


def test_exchanges_over_groups_of_different_sizes_are_not_a_swap_of_heads():
    one = Exchange(0)
    one.received(parts_of(0), None)
    one.received(parts_of(0)[:2], None)
    assert one.size == 1
    assert Exchange().size == 1
