"""What is counted of `QKClip` on growing scores, and of a further family of faults, on runs whose answer is known."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from tests.experiments.faults import further, growth
from tests.experiments.faults.plan import HEALTHY, Job
from tests.experiments.faults.run import train


def result(final, largest=9.0, acted=3):
    return {"validation": [5.0, final], "acted": acted, "readings": [{"values": {"a": {"attention_logit": largest}}}]}


def test_runs_are_made_until_enough_have_diverged_and_those_that_are_saved_are_counted(monkeypatch, tmp_path):
    made = []

    def make(job, limit, folder):
        made.append((job.kind, job.seed, limit))
        if job.kind == HEALTHY:
            return result(2.0, 5.0 + job.seed % 10)
        if limit is None:
            return result(None if job.seed % 2 else 2.04, 900.0)
        return result(2.049 if job.seed % 3 else 2.051, 7.0)

    monkeypatch.setattr(growth, "make", make)
    said, _, _, _, *rows = growth.of_growth(tmp_path, 3)
    diverged = {seed: limit for _, seed, limit in made if limit is not None}
    assert list(diverged) == [growth.FIRST + 1, growth.FIRST + 3, growth.FIRST + 5]
    assert diverged == {seed: 5.0 + seed % 10 for seed in diverged}, "what the healthy run of the seed came to"
    saved = sum(seed % 3 > 0 for seed in diverged)
    assert f"With `QKClip` {saved} of these 3 ended within 0.05 nats" in said
    assert said.startswith("6 runs")
    assert len(rows) == 3
    assert sum("not saved" in row for row in rows) == 3 - saved


def test_each_kind_of_growth_is_paired_with_each_training_under_distinct_seeds():
    rounds = list(itertools.islice(growth.candidates(), 16))
    assert {(job.kind, job.base) for job in rounds} == set(itertools.product(growth.KINDS, growth.BASES))
    assert len({job.seed for job in rounds}) == 16


def test_healthy_runs_are_made_until_qk_clip_acted_in_enough_of_them_beside_nudged_twins(monkeypatch, tmp_path):
    limits, twins = [], []

    def make(job, limit, folder, *, nudge=0.0):
        if nudge:
            twins.append((job.seed - growth.FIRST_HEALTHY, limit, nudge))
            return result(2.005)
        if limit is None:
            return result(2.0, 10.0)
        limits.append(limit)
        return result(2.02 if len(limits) == 3 else 1.995, 8.0, 2 * (len(limits) - 1))

    monkeypatch.setattr(growth, "make", make)
    said = growth.of_healthy(tmp_path, 3)
    assert limits == [10.0] * 4
    assert twins == [(place, None, nudge) for place in (1, 2, 3) for nudge in (growth.ROUNDING, growth.SLIGHT)]
    assert said[0].startswith("4 healthy runs")
    assert "at 2 to 6 steps of 100" in said[0]
    assert "by 0.020 nats at most, by more than 0.01 in 1 of 3" in said[0]
    (row,) = [line for line in said if line.startswith("| all ")]
    assert row.startswith(
        "| all | 3 | +0.0033 (-0.0325 to +0.0392), from -0.005 to +0.020, 1 and 0 | +0.0050 (+0.0050 "
    )
    assert row.endswith(", from +0.005 to +0.005, 0 and 0 |")


def test_every_fourth_healthy_run_uses_muon_and_all_seeds_are_new():
    jobs = list(itertools.islice(growth.healthy_candidates(), 20))
    assert sum("Muon" in job.base for job in jobs) == 5
    seeds = {job.seed for job in jobs} | {job.seed for job in itertools.islice(growth.candidates(), 30)}
    assert len(seeds) == 50
    assert min(seeds) >= 100_000


def test_a_nudged_twin_starts_slightly_apart_and_trains_on_the_same_batches():
    job = Job(HEALTHY, "table", 3)
    plain, same, nudged = (train(job, 3, metrics=["hdi"], nudge=nudge) for nudge in (0.0, 0.0, 1e-3))
    assert plain["losses"] == same["losses"]
    assert nudged["losses"] != plain["losses"]
    assert nudged["losses"] == pytest.approx(plain["losses"], rel=0.02)


def test_queries_and_keys_get_their_own_learning_rate_and_other_weights_keep_theirs():
    kind = "queries and keys learn 100 times faster"
    job = Job(HEALTHY, "text", 3)
    plain, fast = (train(job, 2, fault=fault, metrics=growth.METRICS) for fault in (None, growth.KINDS[kind]))
    moved = [
        {name: values["attention_logit"] for name, values in run["readings"][0]["values"].items()}
        for run in (plain, fast)
    ]
    assert moved[0] == moved[1], "nothing has stepped at the first reading"
    assert plain["losses"][0] == fast["losses"][0]
    assert plain["losses"][1] != fast["losses"][1]


def test_runs_of_one_round_on_one_training_share_their_healthy_twin():
    jobs = further.plan("confirming")
    assert {job.kind for job in jobs} == set(further.EVERY_KIND)
    assert len({(job.base, job.seed) for job in jobs}) < len(jobs) / 2
    assert not {job.seed for job in jobs} & {job.seed for job in further.plan("looked-at")}


def test_a_further_fault_is_dated_by_its_first_alarm_after_the_fault():
    def one(kind, alerts, warnings=()):
        return {"kind": kind, "alerts": alerts, "warnings": list(warnings)}

    kind = "weights of an early step are loaded"
    early, late = (15, "a", "weight jump", "warning"), (45, "a", "worst pair", "warning")
    assert further.reported(one(kind, [early])) is None
    assert further.reported(one(kind, [early, late])) == (45, "worst pair")
    assert further.reported(one("softmax over the queries", [], ["Its heads are not read."])) == (
        -1,
        "Its heads are not read.",
    )
    assert further.reported(one("cosine restarts", [(50, "a", "trend", "notice")], ["w"])) is None
    assert further.reported(one("cosine restarts", [(50, "a", "weight jump", "warning")])) == (50, "weight jump")


LATE = {"weights of an early step are loaded", "averaged weights are loaded"}
"""They keep what they load some tens of steps later."""


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(set(further.EVERY_KIND) - LATE))
def test_every_further_kind_acts(kind, monkeypatch):
    monkeypatch.setattr(further, "START", 2)
    fault = further.EVERY_KIND[kind]
    job = Job(HEALTHY, "text" if fault.bases == ("",) else fault.bases[0], 5)
    plain, other = (train(job, 5, fault=one) for one in (None, replace(fault, start=min(fault.start, 2))))
    shown = ("losses", "gradients", "readings")
    assert [plain[name] for name in shown] != [other[name] for name in shown]
