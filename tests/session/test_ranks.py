"""Ranks that watch alike measure together; ranks that do not are noticed at the start, and nobody waits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hdi_callback import StopTraining
from tests.session.ranks import FAILURES, STEPS, TIMEOUT, Case, alone, train

pytestmark = pytest.mark.ranks

STOPS = {"interventions": [StopTraining(on="notice")], "thresholds": {"*": {"pair": 1e-3}}, "pretrained": False}
WAITS = {"interventions": [StopTraining()]}
CASES = {
    "unwatched": Case((None, None)),
    "alike": Case(),
    "stopping": Case((STOPS, STOPS)),
    **{name: Case(({}, {}), fails=name) for name in FAILURES},
    "binding an intervention": Case((WAITS, WAITS), fails="binding an intervention"),
    "no attention": Case(blocks=(0, 0)),
    "stages": Case(blocks=(2, 1)),
    "a stage without attention": Case(blocks=(2, 0)),
    "stages with an intervention": Case((WAITS, WAITS), blocks=(2, 1)),
    "another cadence": Case(({}, {"every_n_steps": 3})),
    "other metrics": Case(({}, {"alerts": None})),
    "unwatched, in Join": Case((None, None), apart="join"),
    "unwatched, a step left out": Case((None, None), apart="skip"),
    "other weights": Case(apart="factor"),
    "weights that part": Case(apart="data"),
    "in Join": Case(apart="join"),
    "in Join with an intervention": Case((WAITS, WAITS), apart="join"),
    "a step left out": Case(apart="skip"),
    "a monitor on one rank": Case(({}, None)),
}
ALL_STEPS = [0, 2, 4, STEPS]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    return train(CASES, tmp_path_factory.mktemp("ranks"))


def test_two_ranks_read_the_same_on_both(found: Any) -> None:
    first, second = found["alike"]
    assert first["read"] == ALL_STEPS
    assert first["latest"] == second["latest"] != {}
    assert not first["messages"]
    assert not second["messages"]
    assert "read" not in second, "the first rank writes"
    assert "head_covariance" in next(iter(first["values"][0].values()))
    assert first["weights"] == second["weights"]


def test_training_is_bit_identical_in_every_case_and_ends(found: Any) -> None:
    for name in ("alike", *FAILURES, "another cadence", "other metrics", "a monitor on one rank"):
        assert {one["weights"] for one in found[name]} == {found["unwatched"][0]["weights"]}, name


def test_a_monitor_on_one_rank_is_said_within_the_timeout_of_the_group(found: Any) -> None:
    first, second = found["a monitor on one rank"]
    assert len(first["messages"]) == 1
    assert "Heads are not watched: rank 1 of 2 did not come" in first["messages"][0]
    assert TIMEOUT / 3 < second["seconds"] < TIMEOUT
    assert "read" not in first


@pytest.mark.parametrize(
    ("name", "said"),
    [("another cadence", "`every_n_steps` is 2 on rank 0 and 3 on rank 1"), ("other metrics", "`metrics`")],
)
def test_other_settings_on_one_rank_are_said(name: str, said: str, found: Any) -> None:
    for one in found[name]:
        assert len(one["messages"]) == 1
        assert said in one["messages"][0]
        assert "read" not in one
        assert one["seconds"] < TIMEOUT / 3


@pytest.mark.parametrize("name", [name for name in FAILURES if name != "finding heads"])
def test_a_rank_that_fails_by_itself_stops_nobody(name: str, found: Any) -> None:
    first, second = found[name]
    assert first["read"] == ALL_STEPS
    assert not first["messages"]
    assert len(second["messages"]) <= 1, "a source that fails is absent, with the reason"


@pytest.mark.parametrize("name", ["capturing", "reading attention"])
def test_what_failed_on_one_rank_is_absent_and_the_rest_is_measured(name: str, found: Any) -> None:
    absent = {"capturing": "head_covariance", "reading attention": "attention_entropy"}
    for record in found[name][0]["values"][:-1]:
        for values in record.values():
            assert "hdi" in values
            assert absent[name] not in values, "the tokens of one rank would be another number"


@pytest.mark.parametrize("name", ["finding heads", "a stage without attention"])
def test_a_rank_that_has_found_no_heads_leaves_the_other_alone(name: str, found: Any) -> None:
    first, second = found[name]
    assert first["read"] == ALL_STEPS
    assert "rank 1 holds other attention layers than rank 0" in first["messages"][0]
    assert "No attention layer" in second["messages"][1]
    assert "read" not in second


def test_a_model_without_attention_is_an_error_on_every_rank(found: Any) -> None:
    for one in found["no attention"]:
        assert "No attention layer" in one["error"]
    assert not any(one["error"] for name, ranks in found.items() for one in ranks if name != "no attention")


def test_each_stage_of_a_pipeline_writes_its_own_history(found: Any) -> None:
    first, second = found["stages"]
    assert first["read"] == second["read"] == ALL_STEPS
    assert [one["file"] for one in (first, second)] == ["history.jsonl", "history-rank1.jsonl"]
    assert [len(one["values"][0]) for one in (first, second)] == [2, 1]


def test_interventions_are_refused_where_ranks_measure_alone(found: Any) -> None:
    for one in found["stages with an intervention"]:
        assert one["messages"][0].endswith("Heads are not watched.")
        assert one["steps"] == STEPS


def test_all_ranks_stop_after_the_same_step(found: Any) -> None:
    first, second = found["stopping"]
    assert first["steps"] == second["steps"] < STEPS
    assert first["actions"]


APART = ["other weights", "weights that part", "in Join", "a step left out"]


@pytest.mark.parametrize("name", APART)
def test_ranks_that_part_say_so_once_and_go_on_into_histories_of_their_own(name: str, found: Any) -> None:
    for one, file in zip(found[name], ["history.jsonl", "history-rank1.jsonl"], strict=True):
        (message,) = one["messages"]
        assert message.endswith("Each rank measures alone, into a history of its own.")
        assert one["file"] == file
        assert one["read"][-1] == one["steps"], "the final reading is there"


@pytest.mark.parametrize(("name", "factor"), [("other weights", 3.0), ("weights that part", 1.0)])
def test_layers_of_equal_names_that_are_different_layers_are_never_added_up(
    name: str, factor: float, found: Any, tmp_path: Path
) -> None:
    for rank, one in enumerate(found[name]):
        own = dict(alone(rank, tmp_path / str(rank), factor if rank == 1 else 1.0))
        # Where weights part with time, the reading of step 0 is of both ranks: they are alike there.
        steps = [step for step in one["read"] if step > 0 or name == "other weights"]
        assert steps[-1] == STEPS
        for step in steps:
            values = one["values"][one["read"].index(step)]
            for layer, wanted in own[step].items():
                assert values[layer] == pytest.approx(wanted, rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("name", ["in Join", "in Join with an intervention", "a step left out"])
def test_ranks_at_different_steps_end_as_without_a_monitor(name: str, found: Any) -> None:
    unwatched = "unwatched, a step left out" if name == "a step left out" else "unwatched, in Join"
    assert [one["weights"] for one in found[name]] == [one["weights"] for one in found[unwatched]]


def test_no_rank_waits_in_join_and_none_twice_for_one_that_is_at_another_step(found: Any) -> None:
    assert max(one["seconds"] for one in found["in Join"]) < TIMEOUT / 4
    for one in found["a step left out"]:
        assert TIMEOUT / 3 < one["seconds"] < TIMEOUT / 2


def test_interventions_are_refused_in_join(found: Any) -> None:
    for one in found["in Join with an intervention"]:
        (message,) = one["messages"]
        assert "`Join`" in message
        assert message.endswith("Heads are not watched.")
