from __future__ import annotations

import pytest

from tests.studies.experiments.faults import __main__ as command
from tests.studies.experiments.faults.page import alarms, page, rate
from tests.studies.experiments.faults.plan import HEALTHY, Job, plan

TWO = [Job("two heads copied", "table", 7), Job(HEALTHY, "table", 8)]


def test_a_fault_is_reported_where_it_is_and_a_healthy_training_raises_no_alarm(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "plan", lambda: TWO)
    results, output = tmp_path / "faults.jsonl", tmp_path / "faults.md"
    command.main(["--results", str(results), "--output", str(output)])
    faulty, healthy = command.read(results)
    first, *_ = alarms(faulty)
    assert (first["rule"], first["step"], first["where"]) == ("copied heads", 45, {"blocks.0.attention": [0, 1]})
    assert alarms(healthy) == []
    assert faulty["readings"] == healthy["readings"] == 21
    assert "| two heads copied | 1/1 | 5 | 1/1 |" in output.read_text()
    assert "| healthy | 0 of 1 " in output.read_text()


def test_a_run_that_was_ended_goes_on(tmp_path):
    results = tmp_path / "faults.jsonl"
    results.write_text('{"kind": "healthy", "base": "table", "seed": 8}\n{"kind": "two heads copied", "base": "ta')
    assert command.missing(TWO, command.read(results)) == TWO[:1]


def test_the_plan_is_that_of_the_published_trainings_and_each_beginning_of_it_is_a_fair_sample():
    jobs = plan()
    faulty = [job for job in jobs if not job.is_healthy]
    assert (len(set(jobs)), len(faulty)) == (1738, 440)
    assert sum(job.is_healthy for job in jobs[:300]) == 100
    assert len({job.kind for job in faulty[:200]}) == 40
    assert {sum(job.kind == kind for job in faulty) for kind in {job.kind for job in faulty}} == {11}


@pytest.mark.parametrize(("kind", "step", "level", "is_alarm"), [
    ("two heads copied", 45, "warning", True),
    ("two heads copied", 45, "critical", True),
    ("two heads copied", 45, "notice", False),
    ("two heads copied", 35, "warning", False),  # the fault begins at step 40
    ("all heads begin as copies", 0, "warning", True),
    (HEALTHY, 35, "warning", True),
])  # fmt: skip
def test_what_counts_is_a_warning_or_a_critical_alert_from_the_fault_on(kind, step, level, is_alarm):
    run = {"kind": kind, "alerts": [{"step": step, "level": level}]}
    assert bool(alarms(run)) == is_alarm


def test_rates_have_the_interval_of_wilson_or_the_bound_of_three():
    silent = {"kind": HEALTHY, "alerts": []}
    loud = {"kind": HEALTHY, "alerts": [{"step": 0, "level": "warning"}]}
    assert rate([silent] * 300) == "0 of 300 (below 1 %)"
    assert rate([loud] * 5 + [silent] * 5) == "5 of 10 (24 to 76 %)"  # Wilson (1927): 0.2366, 0.7634


def test_an_alert_that_names_more_than_the_heads_of_a_fault_does_not_name_its_place():
    def run(**where: list[int]) -> dict:
        return {
            "kind": "two heads copied", "base": "text", "seed": 0, "layer": "a", "readings": 21, "loss": 1.0,
            "alerts": [{"step": 45, "level": "warning", "rule": "worst pair", "also": [], "where": where}],
        }  # fmt: skip

    wide = [run(a=[0, 1, 2]), run(a=[]), run(a=[0, 1], b=[0])]  # no heads: all of the layer
    assert "| two heads copied | 4/4 | 5 | 1/4 |" in page([run(a=[0, 1]), *wide])
