"""Modules that count the heads of one rank, of several that hold their rows: all are counted while weights are read."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
from torch import nn

from hdi_callback.attention.layer.sharding import _count_all_heads


def counting(**numbers: int) -> nn.Module:
    module = nn.Module()
    vars(module).update(numbers)
    return module


@pytest.mark.parametrize(("held", "all_heads"), [(2, 4), (4, 4)])
def test_heads_of_all_ranks_are_counted_from_the_rows_and_the_count_of_the_module_is_restored(held, all_heads):
    module, uncounted = counting(num_heads=held, head_dim=8), set()
    with ExitStack() as stack:
        _count_all_heads(module, {(32, 2)}, stack, uncounted)
        assert module.num_heads == all_heads
    assert module.num_heads == held
    assert uncounted == set()


@pytest.mark.parametrize("widths", [{}, {"head_dim": 8, "d_k": 4}])
def test_a_module_without_a_single_head_width_keeps_its_count_and_is_reported_as_uncounted(widths):
    module, uncounted = counting(num_heads=2, **widths), set()
    with ExitStack() as stack:
        _count_all_heads(module, {(32, 2)}, stack, uncounted)
        assert module.num_heads == 2
    assert uncounted == {module}
