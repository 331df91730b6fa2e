"""Losses, weights and random states are bit-identical with and without the callback."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.runs import TRAINERS, Training

# trainer, precision, compiled, batches a step; one of each way in every run of the tests, all of them on request.
QUICK = [
    ("lightning", "bf16", False, 2),
    ("transformers", "32", False, 1),
    ("loop", "32", True, 1),
    ("ignite", "32", False, 2),
]
ALL = list(product(TRAINERS, ("32", "bf16"), (False, True), (1, 2)))
CASES = [pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow) for case in ALL]


@pytest.mark.parametrize(("kind", "precision", "compiled", "accumulate"), CASES)
def test_a_training_is_bit_identical_with_and_without_the_callback(
    kind: str, precision: str, compiled: bool, accumulate: int, tmp_path: Path
) -> None:
    if kind != "loop":
        pytest.importorskip(kind)  # first, as importing lightning draws random numbers
    how: dict[str, Any] = {"precision": precision, "compiled": compiled, "accumulate": accumulate, "dropout": 0.1}
    for folder in ("with", "without"):
        (tmp_path / folder).mkdir()
    watched = Training(tmp_path / "with", {"every_n_steps": 3}, **how).fit(kind)
    alone = Training(tmp_path / "without", None, **how).fit(kind)
    assert watched.outcome == alone.outcome
    records = watched.history.records
    assert [record.step for record in records] == [0, 3, 6, 9, 10]
    for record in records[:-1]:
        for layer in record.layers.values():
            assert "hdi" in layer.values
            assert "head_covariance" in layer.values, layer.absent
