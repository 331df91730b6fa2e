"""The testbed does what it says: forces make heads collapse, runs are never made twice, and reports count right."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from hdi_callback import find_attention
from hdi_callback.core import head_diversity
from hdi_callback.monitoring.alerts import Alert, Finding
from hdi_callback.monitoring.readings import LayerRecord, Record
from tests.experiments.collapse import interventions, report, run
from tests.experiments.collapse.forces import KINDS, Force
from tests.experiments.collapse.models import Data, Model, Shape
from tests.experiments.collapse.plan import HEALTHY, draw, plan


def test_the_plan_covers_all_settings_and_keeps_exploratory_and_confirming_seeds_apart():
    looked_at, confirming = plan("looked-at"), plan("confirming")
    assert not {spec.seed for spec in looked_at} & {spec.seed for spec in confirming}
    assert len({spec.name for spec in confirming}) == len(confirming)
    healthy = [spec for spec in confirming if spec.kind == HEALTHY]
    assert len(healthy) >= 60
    assert all(sum(spec.kind == kind for spec in confirming) >= 10 for kind in KINDS)
    for values in (
        {spec.shape.task for spec in healthy},
        {spec.shape.norm for spec in healthy},
        {spec.shape.positions for spec in healthy},
        {spec.warm_up > 0 for spec in healthy},
        {spec.weight_decay > 0 for spec in healthy},
    ):
        assert len(values) == 2
    assert len({spec.learning_rate for spec in healthy}) >= 4


@pytest.mark.parametrize("task", ["text", "digits"])
@pytest.mark.parametrize("norm", ["pre", "post"])
def test_the_models_learn(task, norm):
    shape = Shape(task=task, layers=1, width=48, norm=norm, positions="rotary")
    torch.manual_seed(0)
    model, data = Model(shape), Data(task, 0, 8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    before = data.validate(model)
    for _ in range(60):
        model.loss(*data.draw()).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert data.validate(model) < before - 0.7


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("rewarded alignment", "high learning rate")])
@pytest.mark.parametrize("key_heads", [8, 4])
def test_each_force_collapses_the_heads_in_its_own_way(kind, key_heads):
    torch.manual_seed(0)
    model = Model(Shape(heads=8, key_heads=key_heads, width=64))
    first, second = find_attention(model)
    before = head_diversity(first.weight("key"))
    untouched = second.weight("key").detach().clone()
    force = Force(kind, first, start=10, seed=0)
    force.before_training()
    if kind != "tied initialisation":
        for step in range(10):
            force.after_step(step)
        assert torch.equal(head_diversity(first.weight("key")).overlap, before.overlap), "it waits for its start"
    # Later the shared direction outgrows the others by more than the rank's tolerance.
    for step in range(10, 300 if kind == "shared direction" else 500):
        force.after_step(step)
    after = head_diversity(first.weight("key"))
    if kind == "falling rank":
        assert after.flatness.max() < 1e-3 * before.flatness.min()
    elif kind == "shared direction":
        assert after.energy_alignment > 0.95
        assert after.alignment < 0.3, "one direction of eight or sixteen"
    elif kind == "one pair":
        assert after.worst_alignment > 0.95
        assert sorted(after.worst_alignment_pair.tolist()) == sorted(force.pair)
        assert after.alignment < 0.3
    else:
        assert after.alignment > 0.95
    assert torch.equal(second.weight("key"), untouched)


def test_a_finished_run_is_not_repeated_and_an_interrupted_one_is(tmp_path, monkeypatch):
    spec = replace(draw("one pair", 3), steps=12, start=2, shape=Shape(width=32, layers=1))
    run.run(spec, tmp_path)
    result = json.loads((tmp_path / f"{spec.name}.json").read_text())
    assert result["steps"] == 12
    assert result["spec"]["seed"] == 3
    history = (tmp_path / f"{spec.name}.jsonl").read_text()
    assert [json.loads(line)["kind"] for line in history.splitlines()] == ["run", *["reading"] * 4]
    monkeypatch.setattr(run, "train", lambda *args: pytest.fail("made twice"))
    run.run(spec, tmp_path)
    monkeypatch.undo()
    (tmp_path / f"{spec.name}.json").unlink()
    run.run(spec, tmp_path)
    again = json.loads((tmp_path / f"{spec.name}.json").read_text())
    assert {**again, "cpu_seconds": 0} == {**result, "cpu_seconds": 0}, "a run is reproducible from its spec"


# --- the report


def fake(kind: str, curve: dict[int, float], alarms: list[tuple[int, str]], start: int = 100) -> report.Run:
    values = {
        step: {"hdi_alignment": a, "hdi_worst_alignment": a, "hdi_energy_alignment": a, "hdi_energy_worst_alignment": a}
        for step, a in curve.items()
    }
    records = [Record(step, {"a": LayerRecord(item), "b": LayerRecord(item)}) for step, item in values.items()]
    alerts = [Alert(step, "a", rule, "warning", "", Finding("", "warning")) for step, rule in alarms]
    return report.Run(kind, start, "a", 2, records, alerts, {"spec": {"shape": {"task": "text"}}})


def test_alarms_before_the_collapse_are_false_alarms_and_later_ones_are_timed():
    late = fake("keys only", {0: 0.1, 100: 0.2, 200: 0.95}, [(50, "worst pair"), (150, "mean alignment")])
    assert [alert.step for alert in late.false_alarms] == [50]
    assert (late.first(), late.arrival, late.first("worst pair")) == (150, 200, None)
    assert report.is_before(late)
    missed = fake("keys only", {0: 0.1, 200: 0.95}, [(200, "mean alignment")])
    assert not report.is_before(missed), "at the same reading is not before"
    tied = fake("tied initialisation", {0: 0.95}, [(0, "tied heads")])
    assert report.is_before(tied)
    healthy = fake(HEALTHY, {0: 0.1}, [(150, "forecast")])
    assert len(healthy.false_alarms) == 1


def test_the_tables_count_runs():
    runs = [fake(HEALTHY, {0: 0.1}, []) for _ in range(59)] + [fake(HEALTHY, {0: 0.1}, [(10, "forecast")])]
    runs += [fake("keys only", {0: 0.1, 200: 0.95}, [(150, "mean alignment")]) for _ in range(10)]
    false = report.false_alarm_table(runs)
    assert "| mean alignment | 0/60 (below 4.9 %) | 0/120 (below 2.5 %) |" in false  # 1 - .05^(1/60), 1 - .05^(1/120)
    assert any(line.startswith("| any of them | 1/60") for line in false)
    (row,) = [line for line in report.detection_table(runs) if "keys only" in line]
    assert row == "| keys only | 10 | 10 | 10/10 (69-100 %) | 10/10 (69-100 %) | 50 (50 to 50) | 50 (50 to 50) |"


def test_interventions_are_compared_with_paired_runs(tmp_path):
    for arm, loss in (("none", 1.0), ("ReviveHeads()", 0.9)):
        for kind in [*interventions.COLLAPSES, interventions.MISTAKE]:
            for seed in (1, 2, 3):
                final = {"a": {"hdi_alignment": 0.5, "hdi_worst_alignment": 0.5}}
                result = {"kind": kind, "arm": arm, "seed": seed, "validation_loss": loss + seed, "layer": "a"}
                (tmp_path / f"{kind}-{arm}-{seed}.json").write_text(json.dumps({**result, "final": final}))
    arms = {name: make for name, make in interventions.ARMS.items() if name in ("none", "ReviveHeads()")}
    original = dict(interventions.ARMS)
    try:
        interventions.ARMS.clear()
        interventions.ARMS.update(arms)
        text = "\n".join(interventions.report(tmp_path))
    finally:
        interventions.ARMS.clear()
        interventions.ARMS.update(original)
    assert "| ReviveHeads() | 0.50 | 0.50 | -0.100 (-0.100 to -0.100) | -0.100" in text


def test_runs_of_one_seed_share_model_and_training_settings():
    specs = [interventions.spec_of(kind, 20_001) for kind in [*interventions.COLLAPSES, interventions.MISTAKE]]
    assert len({(spec.shape, spec.learning_rate, spec.start, spec.layer) for spec in specs}) == 1
