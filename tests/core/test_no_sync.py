"""Nothing makes the host wait for the device: on ``meta`` reading a value raises."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hdi_callback.core import (
    attention_rows,
    circuit_similarity,
    head_covariance,
    head_diversity,
    principal_cosines,
    row_metrics,
)
from hdi_callback.core.covariance import contribution_sums, covariance_term, outputs_not_finite
from hdi_callback.core.movement import movement_of, movement_sums, not_finite
from tests.core.no_sync import NoSync


def on_meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


KEYS, QUERIES = on_meta(3, 2, 8, 32), on_meta(3, 4, 8, 32)
OUTPUTS, VALID = on_meta(20, 4, 8), on_meta(20, dtype=torch.bool)
SILENT = {
    "diversity": lambda: head_diversity(QUERIES),
    "diversity, bfloat16": lambda: head_diversity(QUERIES.bfloat16()),
    "circuits": lambda: circuit_similarity(QUERIES, KEYS, (0, 1, 0, 1)),
    "covariance": lambda: head_covariance(OUTPUTS, on_meta(4, 8, 32), VALID),
    "contributions": lambda: covariance_term(contribution_sums(OUTPUTS, on_meta(4, 8, 32), VALID, about_mean=False), 4),
    "rows": lambda: row_metrics(
        attention_rows(on_meta(2, 4, 5, 9), logits=on_meta(2, 4, 5, 9), positions=on_meta(5, dtype=torch.int64))
    ),
    "movement": lambda: movement_of({"query": movement_sums(QUERIES, QUERIES.bfloat16())}, {"query": 256}),
    "finiteness": lambda: (not_finite(QUERIES), outputs_not_finite(OUTPUTS, VALID)),
}


@pytest.mark.parametrize("name", SILENT)
def test_no_function_waits_for_the_device(name):
    with NoSync():
        SILENT[name]()


def test_the_guard_notices_a_function_that_does():
    with pytest.raises(AssertionError, match="makes the host wait"), NoSync():
        principal_cosines(torch.randn(2, 3, 8))  # by a singular value decomposition
