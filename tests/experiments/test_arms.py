"""What is counted of interventions that are tried one at a time, on runs whose answer is known."""

from __future__ import annotations

import math

import pytest
import torch

from hdi_callback.monitoring.alerts import Alert, Finding
from tests.experiments.faults import arms
from tests.experiments.faults.plan import HEALTHY, Job


def result(final, alike=0.5):
    values = {"attention_alike_worst": alike, "circuit_qk_worst": 0.2, "hdi_worst_alignment": 0.1}
    quiet = dict.fromkeys(values, -1.0)
    return {"validation": [5.0, final], "readings": [{"values": {"a": values, "b": quiet}}]}


def test_an_interval_is_that_of_student():
    assert arms.interval([1.0, 2.0, 3.0]) == "2.00 (-0.48 to 4.48)"  # 4.303 / sqrt(3)
    assert arms.interval([0.25], is_signed=True) == "+0.25"
    assert arms.interval([1.0, math.inf]) == "not finite in some"


def test_every_run_of_a_seed_has_a_separate_file(tmp_path):
    needed = [*arms.pairs_needed(3), *arms.scores_needed(3)]
    places = [arms.place_of(job, arm, tmp_path) for job, arm in needed]
    assert len(set(places)) == len(places) == 2 + len(arms.OF_PAIRS) + len(arms.GROWN) * len(arms.OF_SCORES)


def test_arms_are_judged_by_alike_heads_and_by_the_loss_against_the_healthy_run(monkeypatch, tmp_path):
    def make(job, arm, folder):
        if job.kind == HEALTHY:
            return result(2.0)
        if job.kind in arms.GROWN:
            return result(None if arm == "none" else 2.5)
        return result(2.0 + 0.01 * job.seed, 0.95 if arm == "none" or job.seed == 1 else 0.6)

    monkeypatch.setattr(arms, "make", make)
    rows = dict(line.strip("| ").split(" | ", 1) for line in arms.of_pairs(tmp_path, [1, 2]) if "of 2" in line)
    assert rows["healthy"].startswith("0 of 2 | 0.50 (0.50 to 0.50)")
    assert rows["none"].startswith("2 of 2 | 0.95")
    assert rows["DiversityPenalty(1.0)"].startswith("1 of 2 | 0.77 (-1.45 to 3.00)")
    assert "| +0.015 (-0.049 to +0.079)" in "|" + rows["none"].rpartition("|")[2]
    scores = arms.of_scores(tmp_path, [1, 2])
    assert scores[4:6] == [
        "| none | not finite in some | not finite in some |",
        "| QKClip(6) | +0.50 (+0.50 to +0.50) | +0.50 (+0.50 to +0.50) |",
    ]


def test_going_back_restores_weights_and_reduces_the_learning_rate():
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    back = arms.GoBack()
    back.attach(type("Training", (), {"optimizers": [optimizer], "layers": {}})())
    back.follow(None, ())
    weight.grad = torch.full((2,), 0.5)
    optimizer.step()
    assert torch.equal(weight, torch.full((2,), 0.5))
    alert = Alert(5, "a", "logit growth", "warning", "scores grow", Finding("scores grow"))
    assert "went back" in back.act(alert).message
    assert torch.equal(weight, torch.ones(2))
    optimizer.param_groups[0]["lr"] = 1.0  # as the schedule sets it
    optimizer.step()
    assert torch.allclose(weight, torch.full((2,), 0.95))


@pytest.mark.slow
def test_an_arm_acts_on_heads_that_merge(tmp_path):
    untouched, kept = (
        arms.make(Job(arms.MERGED, "text", 5), arm, tmp_path)
        for arm in ("none", 'DiversityPenalty(1.0, measure="circuit")')
    )
    assert arms.at_end(kept, "circuit_qk_worst") < arms.at_end(untouched, "circuit_qk_worst") - 0.1
