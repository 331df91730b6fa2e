"""The comparison of monitors does what it says, on a few steps and on runs whose answer is known."""

from __future__ import annotations

import gzip
import json
import warnings
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
import torch

from hdi_callback import find_attention
from hdi_callback.errors import HDIWarning
from hdi_callback.monitoring.rules import FlatAttention, default_rules, healthy_runs
from tests.experiments.faults import again, examined, plan, report, run, small_start, tried_once
from tests.experiments.faults.extremes import MEASURES, extremes_of
from tests.experiments.faults.faults import FAULTS
from tests.experiments.faults.judging import NOW, judge_again
from tests.experiments.faults.monitors import MONITORS, alarm_of, alarm_of_rules
from tests.experiments.faults.plan import HEALTHY, Job
from tests.experiments.faults.trainings import BASES, DEEP, LONG, PROVOKED

PUBLISHED = Path(__file__).parents[2] / "docs" / "benchmarks" / "faults.json.gz"


def test_the_plan_covers_all_kinds_and_keeps_exploratory_and_confirming_seeds_apart():
    looked_at, confirming, again = plan.plan("looked-at"), plan.plan("confirming", rounds=3), plan.plan("again")
    third, fresh = plan.plan("third"), plan.plan("fresh")
    seeds = [{job.seed for job in part} for part in (looked_at, confirming, again, third, fresh)]
    assert len(set.union(*seeds)) == sum(map(len, seeds))
    assert min(seeds[4]) >= plan.FRESH > max(seeds[3])
    assert min(seeds[3]) >= plan.THIRD > max(seeds[2])
    assert min(seeds[2]) >= plan.AGAIN > max(seeds[1])
    for part, rounds in ((again, 2), (third, 3), (fresh, 3)):
        assert sum(job.kind == HEALTHY for job in part) >= 300
        assert all(sum(job.kind == kind for job in part) == rounds for kind in FAULTS)
    assert len({job.name for job in confirming}) == len(confirming)
    assert sum(job.kind == HEALTHY for job in confirming) >= 300
    assert len(FAULTS) >= 25
    assert sum(fault.is_cause for fault in FAULTS.values()) >= 10
    assert {base.task for base in BASES.values()} == {"text", "digits", "table", "reversal"}
    assert {base.optimizer for base in BASES.values()} == {"adamw", "sgd", "muon"}
    tried = [*BASES.values(), *PROVOKED.values()]
    assert len({base.width for base in tried}) >= 5
    assert {base.layers for base in [*tried, *DEEP.values()]} >= {1, 2, 4, 8}
    assert {base.heads // base.key_heads for base in BASES.values()} == {1, 4}
    assert {base.key_heads for base in BASES.values() if base.key_heads < base.heads} == {1, 2}, "one key, and several"
    for kind in FAULTS:
        assert sum(job.kind == kind for job in confirming) == 3


def test_the_first_round_of_the_plan_has_every_kind():
    first_round = plan.plan("confirming")[: len(BASES) + len(set(PROVOKED) - LONG) + len(FAULTS)]
    assert {job.kind for job in first_round} == {HEALTHY, *FAULTS}
    assert {job.base for job in first_round if job.kind == HEALTHY} == {*BASES, *PROVOKED} - LONG
    assert {job.base for job in plan.plan("confirming") if job.kind == HEALTHY} == {*BASES, *PROVOKED}


def test_a_run_is_made_once_and_has_every_field_of_the_report(tmp_path, monkeypatch):
    calls = []
    short = run.train
    monkeypatch.setattr(run, "train", lambda job: calls.append(job) or short(job, 12))
    job = Job("queries merge", "table", 3)
    assert run.run(job, tmp_path)
    assert not run.run(job, tmp_path)
    assert len(calls) == 1
    (result,) = report.read(tmp_path)
    assert (result["kind"], result["base"], len(result["losses"])) == ("queries merge", "table", 12)
    assert [reading["step"] for reading in result["readings"]] == [0, 5, 10]
    for name in MONITORS:
        assert all(len(pair) == 2 for pair in MONITORS[name](result)), name
    assert dict(MONITORS["attention: largest score"](result))[10] > 0


@pytest.mark.slow
def test_a_small_benchmark_runs_resumes_and_is_reported(tmp_path, monkeypatch):
    made, kind = [], "two heads copied"
    jobs = {
        "looked-at": [Job(HEALTHY, "table", seed) for seed in (1, 2)],
        "fresh": [Job(HEALTHY, "table", plan.FRESH), Job(kind, "table", plan.FRESH + 1)],
    }
    short = run.train

    def train(job):
        if len(made) == 2 and not any(tmp_path.glob("end/*")):
            (tmp_path / "end").mkdir()
            (tmp_path / "end" / "here").touch()
            raise KeyboardInterrupt  # in the middle of the second part
        made.append(job)
        return short(job, 50)

    monkeypatch.setattr(run, "plan", lambda part, **more: jobs[part])
    monkeypatch.setattr(run, "PUBLISHED", tmp_path / "none")
    monkeypatch.setattr(run, "train", train)
    results = tmp_path / "runs"

    def make():
        for part in jobs:
            run.main(["--part", part, "--results", str(results)])

    with pytest.raises(KeyboardInterrupt):
        make()
    make()
    assert made == [*jobs["looked-at"], *jobs["fresh"]], "each once"
    page, raw, rules = tmp_path / "faults.md", tmp_path / "faults.json.gz", tmp_path / "rules.md"
    paths = ["--results", str(results), "--published", str(tmp_path / "none"), "--output", str(page), "--raw", str(raw)]
    report.main([*paths, "--rules", str(rules)])
    text = page.read_text()
    assert "| rules as they ship | 1/1 | 1/1 | - | - |" in text
    assert f"| {kind} | table |" in text
    assert "| worst pair | 1 | 1 | " in rules.read_text()
    kept = json.loads(gzip.decompress(raw.read_bytes()))
    assert sorted((one["kind"], one["seed"]) for one in kept) == sorted((job.kind, job.seed) for job in made)


def test_at_least_ten_kinds_of_fault_raise_the_loss_by_0_05_nats():
    runs = [one for one in json.loads(gzip.decompress(PUBLISHED.read_bytes())) if one["kind"] in {HEALTHY, *FAULTS}]
    healthy = [one for one in runs if one["kind"] == HEALTHY]
    costly = {
        one["kind"]
        for one in runs
        if one["kind"] != HEALTHY
        and FAULTS[one["kind"]].is_cause
        and (twins := [other for other in healthy if other["base"] == one["base"]])
        and report.departure(one, twins, FAULTS[one["kind"]].start) is not None
    }
    assert len(costly) >= 10


@pytest.mark.slow
def test_a_published_run_is_what_its_seed_makes():
    runs = json.loads(gzip.decompress(PUBLISHED.read_bytes()))
    kept = next(one for one in runs if one["base"] == "table" and "losses" in one)
    made = run.train(Job(kept["kind"], kept["base"], kept["seed"]), 100)
    assert made["losses"][:30] == pytest.approx(kept["losses"][:30], rel=1e-2)
    assert [alert[:3] for alert in made["alerts"]] == [tuple(alert[:3]) for alert in kept["alerts"]]


@pytest.mark.slow
@pytest.mark.parametrize("kind", FAULTS)
def test_every_fault_acts_and_is_written(kind, monkeypatch, tmp_path):
    from tests.experiments.faults import faults

    monkeypatch.setattr(faults, "START", 2)
    base = next(name for name in BASES if any(word in name for word in FAULTS[kind].bases))
    healthy = run.train(Job(HEALTHY, base, 5), 6)
    fault = FAULTS[kind]
    monkeypatch.setitem(run.FAULTS, kind, faults.Fault(**{**vars(fault), "start": min(2, fault.start)}))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", HDIWarning)  # some faults leave no attention over tokens
        faulty = run.train(Job(kind, base, 5), 6)
    assert json.dumps(faulty)
    shown = ("losses", "gradients", "norms", "readings")
    assert [faulty[name] for name in shown] != [healthy[name] for name in shown]


def test_published_runs_are_judged_as_the_original_ones(tmp_path):
    losses = [1.0 + 0.01 * (step % 2) for step in range(30)]
    one = twin([3.0] * 6, losses=[*losses[:22], None, *losses[23:]])
    kept = tmp_path / "kept.json.gz"
    first, second = plan.FRESH, plan.FRESH + 7
    made = [report.condensed({**one, "seed": seed}) for seed in (first, second)]
    kept.write_bytes(gzip.compress(json.dumps(made).encode()))
    (again,) = report.published(kept, [{**one, "seed": second}])
    assert again["seed"] == first
    assert again["losses"] == one["losses"]
    assert "losses" not in report.condensed({**one, "seed": 0}), "of runs that were looked at the scores are enough"
    for name, of in MONITORS.items():
        expected = [(step, score) for step, score in of(one) if score > float("-inf")]
        assert of(again) == [(step, pytest.approx(score, rel=1e-2)) for step, score in expected], name
    assert float("inf") in dict(MONITORS["loss spike"](again)).values()
    assert report.condensed(again) == json.loads(gzip.decompress(kept.read_bytes()))[0]


def twin(validation, **more):
    return {"kind": HEALTHY, "base": "text", "seed": 0, "validation": validation, "losses": [1.0] * 30, "alerts": [],
            "gradients": [1.0] * 30, "warnings": [], "norms": [1.0] * 6, "readings": [], **more}  # fmt: skip


def test_the_loss_departs_if_it_is_above_all_twins_at_two_readings():
    twins = [twin([6.0, 5.0, 4.0, 3.0, 3.0, 3.0]), twin([6.0, 5.0, 4.2, 3.1, 3.0, 3.0])]
    assert report.departure(twin([9.0, 5.0, 4.24, 3.16, 3.0, 3.04]), twins, 0) is None
    assert report.departure(twin([6.0, 5.0, 4.5, 3.1, 3.2, None]), twins, 0) == 20
    assert report.departure(twin([6.0, 5.0, 9.0, 9.0, 9.0, 9.0]), twins, 20) == 20


def test_faults_reported_before_the_loss_spike_and_before_the_gradient_are_counted():
    def row(**alarms):
        named = {"ours": report.SHIPPED, "loss": report.LOSS, "gradient": report.GRADIENT}
        return {"alarms": dict.fromkeys(named.values()) | {named[name]: step for name, step in alarms.items()}}

    rows = [row(ours=45), row(ours=45, loss=45), row(ours=45, loss=50, gradient=50), row(loss=50), row()]
    assert report.order(rows, report.LOSS) == (2, 1)
    assert report.order(rows, report.GRADIENT) == (3, 0)
    assert report.before_both(rows) == [rows[0], rows[2]]


def test_for_each_rule_first_and_sole_reports_after_the_start_of_the_fault_are_counted():
    def one(kind, seed, *alerts):
        return {"kind": kind, "seed": seed, "alerts": [[step, "a", rule, level] for step, rule, level in alerts]}

    merge, shuffled = "queries merge", "labels shuffled"  # begins at step 40; what attention cannot show
    faulty = [
        one(merge, plan.FRESH, (45, "weight jump", "warning"), (60, "merged scores", "warning")),
        one(merge, 3, (45, "weight jump", "warning"), (45, "tokens alike", "warning"), (50, "weight jump", "warning")),
        one(merge, 4, (10, "worst pair", "warning"), (50, "merged scores", "warning"), (50, "trend", "notice")),
        one(shuffled, 5, (50, "worst pair", "warning")),
    ]
    rows = report.of_rules([one(HEALTHY, 6, (10, "worst pair", "warning"), (20, "worst pair", "warning"))], faulty)
    assert "| weight jump | 1 | 2 | 2 | 0 | 0 |" in rows
    assert "| merged scores | 1 | 2 | 1 | 1 | 0 |" in rows
    assert "| tokens alike | 0 | 1 | 1 | 0 | 0 |" in rows
    assert "| worst pair | 0 | 0 | 0 | 0 | 1 |" in rows
    assert not any(row.startswith("| trend") for row in rows)


def test_recorded_readings_are_judged_again_by_the_current_rules():
    names = {"name": "a", "num_heads": 2, "num_key_heads": 2, "head_dim": 4, "value_dim": 4, "width": 8}
    cosines = [0.1, 0.2, 0.1, 0.2, 0.1, 0.999, 0.999, 0.9991, 0.9991]
    readings = [
        {"step": 5 * place, "values": {"a": {"token_cosine": cosine}}, "arrays": {"a": {"head_norm": [1.0, None]}}}
        for place, cosine in enumerate(cosines)
    ]
    one = twin([3.0], readings=readings, facts=[names], alerts=[(0, "a", "inputs lose rank", "warning")])
    assert judge_again(one)["alerts"] == [(35, "a", "tokens alike", "warning")]
    assert judge_again(twin([3.0]))["alerts"] == [], "nothing was kept that could be asked again"
    extremes = extremes_of({**one, "readings": readings[:7]})
    assert extremes == {"tokens alike": 0.1}
    assert extremes_of(one)["tokens alike"] == 0.999


def test_a_limit_is_the_99th_percentile_of_healthy_runs():
    runs = [twin([3.0], scores={name: [[0, 0.1], [5, float(place)]] for name in MONITORS}) for place in range(200)]
    assert set(report.limits_of(runs).values()) == {197.0}
    assert set(report.limits_of(runs[:99]).values()) == {98.0}


def test_alarms_come_at_the_first_score_beyond_the_limit_and_after_the_fault():
    scores = [(0, 3.0), (5, 0.0), (10, 2.0), (15, 5.0)]
    assert alarm_of(scores, 2.0, 0) == 0
    assert alarm_of(scores, 2.0, 5) == 15
    assert alarm_of(scores, 9.0, 0) is None
    alerts = [(5, "a", "trend", "notice"), (10, "a", "logit growth", "warning"), (15, "a", "worst pair", "warning")]
    one = twin([], alerts=alerts)
    assert alarm_of_rules(one, 0, weights_alone=True) == 15
    assert alarm_of_rules(one, 0) == 10


def test_a_loss_spike_is_one_against_its_past():
    losses = [1.0 + 0.01 * (step % 2) for step in range(30)]
    losses[22] = 3.0
    scores = dict(MONITORS["loss spike"](twin([], losses=losses)))
    assert scores[20] < 5
    assert scores[25] > 50
    assert dict(MONITORS["loss spike"](twin([], losses=[*losses[:22], None, *losses[23:]])))[25] == float("inf")


def test_false_alarms_and_leads_are_counted():
    healthy = [twin([3.0] * 6), twin([3.0] * 6, alerts=[(5, "a", "worst pair", "warning")])]
    kind = "keys merge"
    fault = twin([3.0] * 5 + [9.0, 9.0, 9.0, 9.0, 9.0, 9.0], kind=kind, alerts=[(40, "a", "worst pair", "warning")])
    healthy = [{**one, "validation": [3.0] * 11} for one in healthy]
    found = report.judge(healthy, [fault], healthy[:1])
    assert found["false"]["rules as they ship"] == 1
    (row,) = found["rows"]
    assert (row["left"], row["cost"]) == (40, 6.0)
    text = "\n".join(report.report(found, 1))
    assert "| rules as they ship | - | 1/1 | - | - | 1/1 | 0/1 | +0 | - | 1/2 (below 97 %) |" in text


@cache
def published_healthy():
    """Read the file once, and keep of each run what is compared below: the file takes seconds, and much memory."""
    runs = [one for one in json.loads(gzip.decompress(PUBLISHED.read_bytes())) if one["kind"] == HEALTHY]
    kept = ("rules", "extremes", "alerts")
    return [{name: one[name] for name in kept if name in one} | summarised(one) for one in runs]


def summarised(run):
    return {"reached": reached_by(run), "flat": readings_of_new_flatness(run)}


def readings_of_new_flatness(run):
    """Count the readings in a row at which some layer was uniform, in a run none of whose layers began near that."""
    curve = [score for _, score in run["scores"].get("attention: mean entropy rises", ())]
    if not curve or curve[0] >= 0.995:
        return 0
    return max(len(part) for part in "".join("f" if score >= 0.9995 else " " for score in curve).split(" "))


def reached_by(run):
    """Give the least and the largest score of each monitor."""
    scores = {name: [score for _, score in of] for name, of in run["scores"].items()}
    return {name: (min(of), max(of)) for name, of in scores.items() if of}


@pytest.mark.parametrize(
    ("metric", "monitor"),
    [
        ("circuit_qk_worst", "QK circuits: worst pair"),
        ("attention_entropy", "attention: mean entropy falls"),
        ("attention_logit", "attention: largest score"),
        ("attention_sink", "attention: sink"),
    ],
)
def test_the_stated_peaks_of_healthy_runs_are_those_of_the_published_runs(metric, monitor):
    healthy = published_healthy()
    peak = healthy_runs._HEALTHY_PEAKS[metric]
    scores = [score for one in healthy for score in one["reached"].get(monitor, ())]
    assert peak.runs == healthy_runs.HEALTHY_RUNS_WITH_ROWS == len(healthy)
    assert (-max(scores) if peak.is_least else max(scores)) == pytest.approx(peak.value)


@pytest.mark.parametrize(
    ("metric", "monitor", "of_others"),  # what the 144 runs of the collapses by force came to
    [
        ("hdi_alignment", "HDI of keys: mean alignment", 0.39),
        ("hdi_energy_alignment", "HDI of keys: mean alignment by energy", 0.94),
        ("hdi_worst_alignment", "HDI of keys: worst pair", 0.44),
    ],
)
def test_the_stated_alignment_peaks_are_those_of_both_benchmarks(metric, monitor, of_others):
    healthy = published_healthy()
    scores = [score for one in healthy for score in one["reached"].get(monitor, ())]
    peak = healthy_runs._HEALTHY_PEAKS[metric]
    assert (peak.value, peak.runs) == (pytest.approx(max(of_others, *scores)), 144 + len(healthy))


def test_the_stated_readings_of_new_flatness_are_the_most_of_the_published_healthy_runs():
    healthy = published_healthy()
    peak = healthy_runs._HEALTHY_PEAKS["became flat"]
    assert (peak.value, peak.runs) == (max(one["flat"] for one in healthy), len(healthy))
    assert FlatAttention.lasts > peak.value
    assert sum(one["flat"] > 0 for one in healthy) >= 1


@pytest.mark.parametrize("rule", MEASURES)
def test_the_stated_distance_of_healthy_runs_from_each_rule_is_that_of_the_published_runs(rule):
    judged = [one for one in published_healthy() if one.get("rules") == NOW]
    if rule == "rounded away":  # reached by weights that have not begun to learn
        assert rule in healthy_runs._OF_SEVERAL
        return
    values = [one["extremes"][rule] for one in judged if rule in one["extremes"]]
    peak = healthy_runs._HEALTHY_PEAKS[rule]
    assert peak.runs == healthy_runs.HEALTHY_RUNS_JUDGED == len(judged)
    assert peak.value == pytest.approx((min if peak.is_least else max)(values))
    assert peak.is_least == MEASURES[rule][1]


def test_the_stated_number_of_healthy_runs_that_raised_a_rule_is_right():
    judged = [one for one in published_healthy() if one.get("rules") == NOW]
    raised = Counter(rule for one in judged for rule in {alert[2] for alert in one["alerts"]})
    assert len(judged) == healthy_runs.HEALTHY_RUNS_JUDGED
    assert {rule: raised[rule] for rule in healthy_runs._OF_SEVERAL if raised[rule]} == healthy_runs._RAISED
    assert "1 of 1095 healthy runs" in healthy_runs.how_often_raised("inputs lose rank", fall=1.4, factor=4.0)
    shipped = {rule.name: rule for rule in default_rules()}
    for rule, arguments in healthy_runs._OF_SEVERAL.items():
        assert {name: getattr(shipped[rule], name) for name in arguments} == arguments


@pytest.mark.slow
def test_a_fault_that_is_tried_once_is_a_row_with_its_losses_and_the_rules_it_raised():
    page = tried_once.page(["duplicated heads, fresh"])
    faulty, healthy = page.strip().splitlines()[-2:]
    assert faulty.split("|")[1:3] == [" duplicated heads, fresh ", " text "]
    assert "*tied heads* (warning, step 0)" in faulty
    assert healthy.split("|")[1:3] + healthy.split("|")[-2:-1] == [" none ", " text ", " - "]


def test_the_table_of_rounding_holds_what_the_limit_of_rounded_away_rests_on(root):
    rows = [line.split("|")[2:-1] for line in (root / "docs/benchmarks/rounding.md").read_text().splitlines()]
    shares = [[float(cell.split()[0]) for cell in row] for row in rows if len(row) == 5 and row[0].strip()[0].isdigit()]
    assert len(shares) == 15
    assert all(single == 0 and copies < alone for _, _, single, copies, alone in shares)
    assert max(copies for _, every, _, copies, _ in shares if every == 1) >= 0.9, "so such readings are not judged"


def test_runs_that_are_made_again_agree_only_with_the_same_losses_and_alerts():
    before = {"kind": HEALTHY, "base": "text", "seed": 1, "validation": [2.5, None], "alerts": []}
    same = {**before, "validation": [2.501, None]}
    other = {**before, "validation": [2.6, None], "alerts": [(5, "a", "worst pair", "warning")]}
    assert again.has_same_losses(before, same)
    assert not again.has_same_losses(before, other)
    assert again.alarms({"alerts": [(5, "a", "trend", "notice")]}) == set()
    assert "| healthy | 2 | 1 | 0 | 1 | 1 | 1 |" in again.page([(before, same), (before, other)], 1)
    known = [{"kind": kind, "base": "text", "seed": seed} for kind in (HEALTHY, "keys merge") for seed in range(40)]
    chosen = again.drawn(known, 30)
    assert chosen == again.drawn(known[::-1], 30), "a fixed seed, whatever the order"
    assert sum(one["kind"] == HEALTHY for one in chosen) == 30


def test_an_examined_run_is_judged_by_what_was_written_before():
    def found(*alerts):
        return {"alerts": [(step, "a", "worst pair", level) for step, level in alerts], "validation": [2.0]}

    assert examined.verdict(examined.SILENT, found((5, "notice")), 0) == "as it should"
    assert examined.verdict(examined.SILENT, found((5, "warning")), 0) == "false alarm"
    assert examined.verdict(examined.BROKEN, found((35, "warning"), (45, "warning")), 40) == "false alarm"
    assert examined.verdict(examined.BROKEN, found((45, "critical")), 40) == "as it should"
    assert examined.verdict(examined.BROKEN, found(), 40) == "**missed**"
    assert examined.verdict(examined.HIDDEN, found(), 40) == "silent, as expected"
    truths = Counter(kind.truth for kind in examined.KINDS.values())
    assert min(truths[examined.SILENT], truths[examined.BROKEN]) >= 12


@pytest.mark.slow
def test_a_small_start_is_trained_and_its_forced_heads_come_together():
    force = small_start.Force(("value", "output"), 4, start=0)
    training = small_start.TRAININGS["ViT"]
    torch.manual_seed(small_start.SEED)
    fresh = training.model()
    assert float(next(layer for layer in find_attention(fresh)).weight("key").std()) == pytest.approx(0.02, rel=0.1)
    result = small_start.train(training, force, steps=60)
    named = {rule for _, layer, rule, level, _ in result["alerts"] if layer == result["pulled"] and level != "notice"}
    assert "merged messages" in named
