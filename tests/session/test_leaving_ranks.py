"""A rank that dies or ends early costs the others one wait and one warning, and they go on reading."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.session.leaving_ranks import EVERY, LEAVES, STEPS, TIMEOUT, train, train_until_one_leaves

pytestmark = pytest.mark.ranks

ENDS_WITH_IT = "killed under DDP"  # DDP itself needs all ranks
GO_ON = [name for name in LEAVES if name != ENDS_WITH_IT]
SURVIVORS = {"killed, of four": [0, 2, 3], "killed with the store": [1], "leaves its loop with an error": [1]}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    return train_until_one_leaves(tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", GO_ON)
def test_ranks_that_remain_say_once_that_they_measure_alone_and_go_on_into_histories(name: str, found: Any) -> None:
    ranks = SURVIVORS.get(name, [0])
    files = ["history.jsonl" if rank == 0 else f"history-rank{rank}.jsonl" for rank in ranks]
    assert [outcome["file"] for outcome in found[name]] == files
    for rank, outcome in zip(ranks, found[name], strict=True):
        (message,) = outcome["messages"]
        assert message.startswith("Ranks cannot measure together: ")
        assert message.endswith("Each rank measures alone, into a history of its own.")
        # The first rank has written from the start; no reading is lost.
        assert outcome["read"] == list(range(0 if rank == 0 else 4, STEPS + 1, EVERY))


@pytest.mark.parametrize("name", GO_ON)
def test_ranks_that_remain_wait_once_for_less_than_the_timeout_of_the_group(name: str, found: Any) -> None:
    for outcome in found[name]:
        waits = [seconds for seconds in outcome["seconds"] if seconds > TIMEOUT / 4]
        assert len(waits) <= 1
        assert sum(waits) < TIMEOUT


def test_ranks_that_remain_train_as_without_a_monitor(found: Any, tmp_path: Path) -> None:
    unwatched = train("", 0, tmp_path)["weights"]
    for name in GO_ON:
        assert {outcome["weights"] for outcome in found[name]} == {unwatched}, name


def test_where_the_training_ends_with_the_rank_its_history_is_there_and_its_error_too(found: Any) -> None:
    (outcome,) = found[ENDS_WITH_IT]
    assert "gloo" in outcome["error"]
    assert outcome["read"] == [0, 2]
    assert not outcome["messages"]
    assert max(outcome["seconds"]) < TIMEOUT
