"""Ranks that leave training at different steps, with `process_group=None`."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from hdi_callback import HDICallback, HDITrainerCallback, watch_heads
from hdi_callback.errors import MisconfigurationError
from hdi_callback.monitoring.history import read_records
from hdi_callback.monitoring.interventions import StopTraining
from tests.models import Classifier


def leaves_early(rank: int, folder: str) -> list[int]:
    torch.manual_seed(0)
    model = Classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    history = f"{folder}/rank{rank}.jsonl" if rank == 0 else False
    with watch_heads(
        model, optimizer, every_n_steps=1, history=history, verbose=False, process_group=None, log_dir=folder
    ) as heads:
        for _ in range(2 + 3 * rank):
            with heads.step():
                model(torch.randint(16, (4, 12))).square().mean().backward()
                optimizer.step()
    return [heads.global_step, len(heads.latest)]


def refused(rank: int) -> str:
    model = Classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(MisconfigurationError) as error:
        watch_heads(model, optimizer, history=False, verbose=False, process_group=None, interventions=[StopTraining()])
    watch_heads(
        model, optimizer, history=False, verbose=False, process_group=None, interventions=[StopTraining(dry_run=True)]
    ).close()
    return str(error.value)


@pytest.mark.slow
def test_ranks_that_leave_at_different_steps_do_not_wait_for_each_other(two_ranks, tmp_path):
    reported = two_ranks(leaves_early, str(tmp_path))
    assert [one.answer[0] for one in reported] == [2, 5]
    assert all(one.answer[1] > 0 for one in reported)
    assert [record.step for record in read_records(tmp_path / "rank0.jsonl")] == [0, 1, 2]
    assert [one.warnings for one in reported] == [[], []]


@pytest.mark.slow
def test_interventions_are_refused_if_ranks_cannot_agree_on_them(two_ranks):
    for one in two_ranks(refused):
        assert "cannot agree on interventions (StopTraining)" in one.answer


@pytest.mark.parametrize("kind", [HDICallback, HDITrainerCallback])
def test_every_callback_hands_its_process_group_to_the_monitor(kind):
    assert kind(process_group=None)._settings.measuring["process_group"] is None
    assert kind()._settings.measuring["process_group"] == "auto"


ODD_STATES = [
    {"step": 3, "last_step": 10**9},
    {"step": 3, "last_step": "x", "alerts": 5},
    {"step": "three"},
    {"step": 3, "last_step": 2, "alerts": {"rows": [1]}, "interventions": [None]},
    "nothing of the kind",
]


def resumes(rank: int, folder: str, place: int) -> list:
    """Resume from an odd state."""
    torch.manual_seed(0)
    model = Classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"every_n_steps": 2, "verbose": False, "log_dir": f"{folder}/{place}"}
    with watch_heads(model, optimizer, interventions=[StopTraining()], **options) as heads:
        heads.load_state_dict(ODD_STATES[place])
        for _ in range(4):
            with heads.step():
                model(torch.randint(16, (4, 12))).square().mean().backward()
                optimizer.step()
        steps = heads.global_step
    return [steps, len(heads.latest), heads.should_stop]


@pytest.mark.some_slow(quick=1)
@pytest.mark.parametrize("place", range(len(ODD_STATES)))
def test_ranks_that_resume_from_a_malformed_state_end_at_the_same_step(two_ranks, tmp_path, place):
    first, second = (one.answer for one in two_ranks(resumes, str(tmp_path), place))
    assert first == second
    assert first[1] > 0


SOUND = {"step": 4, "last_step": 2}


def resumes_beside_a_sound_rank(rank: int, folder: str, odd_rank: int) -> list:
    """Resume on one rank from a state whose last reading is lost, on the other from a valid one."""
    torch.manual_seed(0)
    model = Classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch_heads(model, optimizer, every_n_steps=2, verbose=False, log_dir=f"{folder}/{odd_rank}") as heads:
        heads.load_state_dict({**SOUND, "last_step": "x"} if rank == odd_rank else SOUND)
        for _ in range(4):
            with heads.step():
                model(torch.randint(16, (4, 12))).square().mean().backward()
                dist.all_reduce(next(model.parameters()).grad)  # the training's own call must meet its like
                optimizer.step()
    return [heads.global_step, heads.latest]


@pytest.mark.some_slow(quick=1)
@pytest.mark.parametrize("odd_rank", [0, 1])
def test_one_rank_with_a_malformed_state_reads_with_the_others(two_ranks, tmp_path, odd_rank):
    first, second = (one.answer for one in two_ranks(resumes_beside_a_sound_rank, str(tmp_path), odd_rank))
    assert first == second
    assert first[0] == 8
    assert "hdi/mean" in first[1]
