from __future__ import annotations

import json
import math

from tests.studies.experiments.held_out import __main__ as command
from tests.studies.experiments.held_out import tasks
from tests.studies.experiments.held_out.page import page
from tests.studies.experiments.held_out.run import HEALTHY, PARTS, Job, _stands_out, plan, train


def test_what_was_held_back_and_what_is_new_shares_no_task_fault_or_seed_with_what_was_looked_at():
    parts = {part: plan(part, 4) for part in PARTS}
    for name, *before in (
        ("held back", "first"),
        ("new kinds", "first", "held back"),
        ("newest kinds", "first", "held back", "new kinds", "new kinds, new seeds"),
        ("blind kinds", *(part for part in PARTS if part != "blind kinds")),
        ("blind kinds again", *(part for part in PARTS if part != "blind kinds again")),
        ("third blind kinds", *(part for part in PARTS if part != "third blind kinds")),
        ("fourth blind kinds", *(part for part in PARTS if part != "fourth blind kinds")),
        ("fifth blind kinds", *(part for part in PARTS if part != "fifth blind kinds")),
        ("sixth blind kinds", *(part for part in PARTS if part != "sixth blind kinds")),
    ):
        for earlier in before:
            for field in ("task", "seed"):
                assert not {getattr(job, field) for job in parts[earlier]} & {
                    getattr(job, field) for job in parts[name]
                }
            assert {job.kind for job in parts[earlier]} & {job.kind for job in parts[name]} == {HEALTHY}
        its_tasks, its_faults, *_ = PARTS[name]
        assert {job.task for job in parts[name]} == {*its_tasks}
        assert {job.kind for job in parts[name]} == {HEALTHY, *its_faults}
    for name in ("new kinds", "newest kinds"):
        assert not {job.seed for job in parts[name]} & {job.seed for job in parts[f"{name}, new seeds"]}


def test_each_fault_has_a_healthy_training_of_its_seed():
    jobs = plan("held back", 4, 3)
    healthy = {(job.task, job.seed) for job in jobs if job.kind == HEALTHY}
    assert {(job.task, job.seed) for job in jobs} == healthy
    assert len(jobs) == 77


def test_the_rule_of_the_loss_alone_is_four_deviations_above_the_last_fifty_or_not_a_number():
    past = [1.0, 2.0] * 25  # mean 1.5, deviation 0.5
    assert not _stands_out(past, 3.5)
    assert _stands_out(past, 3.51)
    assert _stands_out(past, math.nan)
    assert not _stands_out([*past[1:], math.nan], math.nan), "which was told when it began"


def test_a_fault_is_told_and_counted_from_its_onset_on_and_kept_readings_are_judged_again(tmp_path, monkeypatch):
    monkeypatch.setattr(tasks.Bandit, "steps", 60)
    jobs = [Job(HEALTHY, "bandit", 5), Job("NaN in a head", "bandit", 5)]
    monkeypatch.setattr(command, "plan", lambda *args: jobs)
    files = ["first", "--results", str(tmp_path / "a.jsonl"), "--keep", str(tmp_path / "kept")]
    command.main([*files, "--output", str(tmp_path / "a.md")])
    command.main([*files, "--again", "--output", str(tmp_path / "b.md")])
    assert (tmp_path / "a.md").read_text() == (tmp_path / "b.md").read_text()
    healthy, faulty = map(json.loads, (tmp_path / "a.jsonl").read_text().splitlines())
    assert healthy["alerts"] == []
    notice, alarm = faulty["alerts"][:2]
    assert (notice["rule"], notice["level"]) == ("change with the loss", "notice"), "of the write itself"
    assert (faulty["onset"], alarm["rule"]) == (30, "weights not finite")
    before = {**faulty, "alerts": [{**alarm, "step": 29}]}
    assert "| faults | 1 of 1 " in page([healthy, faulty])
    assert "| faults | 0 of 1 " in page([healthy, before])
    assert "| faults that cost loss | 1 of 1 " in page([healthy, faulty])


def test_training_is_the_same_at_each_run():
    job = Job(HEALTHY, "cosine scores", 3)
    tasks_steps = tasks.CosineScores.steps
    try:
        tasks.CosineScores.steps = 30
        assert train(job)["loss"] == train(job)["loss"]
    finally:
        tasks.CosineScores.steps = tasks_steps
