"""Lightning and transformers on two ranks read what they read in one process, and train as without a monitor."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.integrations.ranks import EVERY, STEPS, fit_lightning, fit_transformers, train
from tests.versions import Outcomes

pytestmark = pytest.mark.ranks

READ = ["ddp", "ddp_spawn", "fsdp2", "transformers"]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    return Outcomes(train(tmp_path_factory.mktemp("ranks")))


@pytest.fixture(scope="module")
def wanted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What one process reads."""
    folder = tmp_path_factory.mktemp("one")
    fit_lightning("auto", folder / "lightning", 1, is_watched=True)
    fit_transformers(0, folder / "transformers", 1, is_watched=True)
    names = ("lightning", "transformers")
    return {name: json.loads((folder / name / "rank-0.json").read_text()) for name in names}


@pytest.mark.parametrize("way", READ)
def test_two_ranks_read_what_one_process_reads(way: str, found: Any, wanted: Any) -> None:
    first, second = found[way]
    reference = wanted["transformers" if way == "transformers" else "lightning"]
    assert first["read"] == reference["read"] == [*range(0, STEPS, EVERY), STEPS]
    for record, other in zip(first["values"], reference["values"], strict=True):
        assert record.keys() == other.keys() != set()
        for name in other:
            assert record[name] == pytest.approx(other[name], rel=1e-5, abs=1e-5)
    assert "read" not in second, "the first rank writes"
    assert not first["messages"]
    assert not second["messages"]


@pytest.mark.parametrize("way", READ)
def test_losses_and_weights_are_those_without_a_monitor_bit_for_bit(way: str, found: Any) -> None:
    for rank in found[way]:
        assert len(rank["losses"]) == STEPS
        assert rank["losses"] == rank["unwatched"]["losses"]
        assert rank["weights"] == rank["unwatched"]["weights"]


def test_the_first_fsdp_is_refused_by_name_within_lightning(found: Any) -> None:
    for rank in found["fsdp"]:
        assert len(rank["unwatched"]["losses"]) == STEPS, "it trains without a monitor"
        assert "use `fully_shard` (FSDP2)" in rank["error"]
