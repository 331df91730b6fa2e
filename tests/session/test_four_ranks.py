"""Four ranks read what one process reads, however the model is spread over them, and train as without a monitor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.session.four_ranks import BLOCKS, PARTS, RANKS, SPREAD, STEPS, TIMEOUT, train, train_on_four, train_part
from tests.versions import HAS_FSDP2_ON_CPU, Outcomes

pytestmark = pytest.mark.ranks

WAYS = [name for name in SPREAD if name != "one process"]
SHARED_OUT = ["DDP", "FSDP2", "FSDP2 over two dimensions"]
HEADS_SPREAD = ["tensor parallel", "FSDP2 x tensor parallel", "sequence parallel"]
STAGES = ["pipeline", "pipeline, names of each stage"]
OF_ROWS = ("attention_",)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    ways = WAYS if HAS_FSDP2_ON_CPU else [how for how in WAYS if "FSDP2" not in how]
    return Outcomes(train_on_four(tmp_path_factory.mktemp("ranks"), ways))


@pytest.fixture(scope="module")
def wanted(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[int, dict[str, dict[str, float]]]]:
    """What one process reads that trains on whole batches."""
    records: list[Any] = train("one process", 0, tmp_path_factory.mktemp("one"), is_watched=True)["records"]
    return records


def assert_equal(layer: dict[str, float], reference: dict[str, float], without: tuple[str, ...] = ()) -> None:
    names = {name for name in reference if not name.startswith(without or ("-",))}
    assert names == {name for name in layer if not name.startswith(without or ("-",))}
    for name in names:
        assert layer[name] == pytest.approx(reference[name], rel=1e-5, abs=1e-5), name


@pytest.mark.parametrize("how", SHARED_OUT)
def test_ranks_that_share_out_a_batch_read_what_one_process_reads(how: str, found: Any, wanted: Any) -> None:
    first, *others = found[how]
    assert not any("records" in other for other in others), "the first rank writes"
    assert [step for step, _ in first["records"]] == [0, 2, 4, STEPS]
    for (_, record), (_, reference) in zip(first["records"], wanted, strict=True):
        assert list(record) == list(reference)
        for name in reference:
            assert_equal(record[name], reference[name])


@pytest.mark.parametrize("how", HEADS_SPREAD)
def test_heads_that_are_spread_over_ranks_are_put_together(how: str, found: Any, wanted: Any) -> None:
    first = found[how][0]
    for (_, record), (_, reference), absent in zip(first["records"], wanted, first["absent"], strict=True):
        assert list(record) == list(reference)
        for name in reference:
            assert_equal(record[name], reference[name], without=OF_ROWS)
            assert "attention rows" in absent[name], "each rank has the rows of its own heads alone"


@pytest.mark.parametrize("how", STAGES)
def test_stages_of_a_pipeline_read_their_own_layers_from_the_first_step_on(how: str, found: Any, wanted: Any) -> None:
    for rank, stage in enumerate(found[how]):
        own = f"blocks.{rank if how == 'pipeline' else 0}.attn"
        assert stage["file"] == ("history.jsonl" if rank == 0 else f"history-rank{rank}.jsonl")
        for (_, record), (_, reference) in zip(stage["records"], wanted, strict=True):
            assert list(record) == [own]
            assert_equal(record[own], reference[f"blocks.{rank}.attn"])


@pytest.mark.parametrize("how", [how for how in WAYS if how != "FSDP1"])
def test_losses_and_weights_are_those_without_a_monitor_bit_for_bit(how: str, found: Any) -> None:
    for rank in found[how]:
        assert rank["losses"] == rank["unwatched"]["losses"]
        assert rank["weights"] == rank["unwatched"]["weights"]


def test_ranks_say_once_why_they_measure_alone_and_otherwise_nothing(found: Any) -> None:
    for how in SHARED_OUT + HEADS_SPREAD:
        assert not any(rank["messages"] for rank in found[how]), how
    for how, why in zip(STAGES, ["rank 1 holds other attention layers", "does not have the same weights"], strict=True):
        for rank in found[how]:
            (message,) = rank["messages"]
            assert why in message


def test_sharded_models_of_equal_names_are_not_watched_and_it_is_said(found: Any) -> None:
    for rank in found["FSDP2 of two models"]:
        (message,) = rank["messages"]
        assert "`blocks.0.attn` does not have the same weights on all ranks" in message
        assert message.endswith("Heads are not watched.")


def test_the_first_fsdp_is_refused_by_name_on_every_rank(found: Any) -> None:
    for rank in found["FSDP1"]:
        assert "use `fully_shard` (FSDP2)" in rank["error"]


def test_no_rank_waits_for_another(found: Any) -> None:
    assert len(found["DDP"]) == RANKS <= BLOCKS
    assert max(rank.get("seconds", 0) for ranks in found.values() for rank in ranks) < TIMEOUT / 3


def test_a_checkpoint_is_resumed_on_other_numbers_of_ranks_as_on_one(found: Any, tmp_path: Path) -> None:
    references = [train_part(0, tmp_path, "one process", *steps) for _, _, *steps in PARTS]
    resumed = found["resumed"]
    assert [len(rank["parts"]) for rank in resumed] == [3, 2, 1, 1]
    for part, reference in zip(resumed[0]["parts"], references, strict=True):
        assert [step for step, _ in part["records"]] == [step for step, _ in reference["records"]]
        for (_, record), (_, other) in zip(part["records"], reference["records"], strict=True):
            assert list(record) == list(other)
            for name in other:
                assert_equal(record[name], other[name])
    assert [step for step, _ in part["records"]] == [0, 2, 4, STEPS]
    assert not any(part["messages"] for rank in resumed for part in rank["parts"])
