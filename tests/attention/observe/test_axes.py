"""Which dimensions are sequences and which are heads, told by the numbers of tokens that maps took."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from hdi_callback.attention.observe.module_stack import ModuleStack
from hdi_callback.attention.observe.row_reader import Request, RowReader
from hdi_callback.attention.observe.scores.axes import resolve


@pytest.mark.parametrize("tied", [1, 2])
def test_a_token_count_that_fits_queries_and_keys_is_preferred_to_a_later_one_that_fits_only_queries(tied):
    queries, keys = 3 * 5, 3 * 7  # of 3 sequences
    of_two = 2 * 5  # of something else, the latest that ran
    maps = SimpleNamespace(tokens=lambda: [of_two * tied, queries * tied, keys * tied])
    reader = RowReader(Request(), cast("Any", maps), ModuleStack())
    axes = reader.axes_of([12], 5, 7, tied=tied)
    assert axes is not None
    assert (axes.sequences, axes.heads) == (3, 4)


def test_the_latest_token_count_of_the_queries_decides_and_counts_of_keys_alone_do_not():
    # 4 or 6 sequences of queries of 5 tokens, 2 or 3 of keys of 7.
    axes = [resolve([12], 5, tokens, keys=7) for tokens in ([20, 30, 14], [30, 20, 14], [14, 20], [14, 21], [21])]
    assert [None if one is None else (one.sequences, one.heads) for one in axes] == [
        (4, 3), (6, 2), (4, 3), None, None,
    ]  # fmt: skip


def test_the_claimed_number_of_heads_decides_if_no_linear_map_shows_the_sequences():
    axes = resolve([12], 5, [], heads=4)
    assert axes is not None
    assert (axes.lead, axes.batch) == ((3, 4), (0,))
    assert resolve([12], 5, [], heads=5) is None
    assert resolve([12], 5, []) is None
