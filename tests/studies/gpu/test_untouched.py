"""On a GPU, too, losses, weights and random states are bit-identical with and without the monitor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.studies.gpu.training import train

pytestmark = pytest.mark.gpu

CASES: dict[str, dict[str, Any]] = {
    "float32": {},
    "float32, math": {"kernel_name": "math"},
    "bf16, flash": {"precision": "bf16", "kernel_name": "flash"},
    "bf16, flash, heads of 20": {"precision": "bf16", "kernel_name": "flash", "head_dim": 20},
    "bf16, flash, grouped keys": {"precision": "bf16", "kernel_name": "flash", "key_heads": 2},
    "bf16, efficient": {"precision": "bf16", "kernel_name": "efficient"},
    "fp16 with a scaler": {"precision": "fp16"},
    "checkpointed": {"precision": "bf16", "checkpointed": True},
    "traced": {"precision": "bf16", "compiled": "aot_eager"},
    "compiled": {"precision": "bf16", "compiled": "inductor"},
}
COMPILED = {"traced", "compiled"}


@pytest.mark.parametrize("case", CASES)
def test_a_training_is_bit_identical_with_and_without_the_monitor(case: str, tmp_path: Path) -> None:
    alone = train(tmp_path / "alone", is_watched=False, **CASES[case])
    if case not in COMPILED:  # which take long, and are no less deterministic
        assert train(tmp_path / "again", is_watched=False, **CASES[case]) == alone, "the training itself differs"
    watched = train(tmp_path / "watched", is_watched=True, **CASES[case])
    assert watched == alone
    assert watched.history is not None
    assert [record.step for record in watched.history.records] == [0, 2, 4, 6]
    for record in watched.history.records[:-1]:
        assert len(record.layers) == 2
        for layer in record.layers.values():
            names = {"hdi", "circuit_qk_norm", "circuit_ov_worst", "head_covariance"}
            assert names <= layer.values.keys(), layer.absent
            if case not in COMPILED:
                assert "attention_entropy" in layer.values, layer.absent
