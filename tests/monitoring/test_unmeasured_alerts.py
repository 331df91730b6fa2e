"""Alerts whose metric is measured no more: they end with the reason, and what acts on them ends with them."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from hdi_callback import Finding, Rule, watch_heads
from hdi_callback.monitoring.alerts import Alert, Alerts
from hdi_callback.monitoring.alerts.alert import loss_of, resolution_of
from hdi_callback.monitoring.history import read_lines
from hdi_callback.monitoring.interventions import DiversityPenalty
from hdi_callback.monitoring.metrics import METRICS
from hdi_callback.monitoring.readings import NOT_FINITE, LayerRecord, Record
from hdi_callback.monitoring.rules import Thresholds, default_rules
from hdi_callback.monitoring.rules.replay import active_alerts, read_alerts, replay
from hdi_callback.monitoring.warn_once import WarnOnce
from tests.models import Classifier, step

ALL_RULES = default_rules(
    Thresholds(dead=0.01, sink=0.9, alike=0.98, contribution=0.001, energy_pair=0.99)
)  # those that are off by default too


def active(rule: str) -> Alert:
    return Alert(1, "attn", rule, "warning", "...", Finding("something"))


def unmeasured(step: int, reason: str = "", values: dict[str, float] | None = None) -> Record:
    absent = {"attn": reason, "hdi/attn": reason} if reason else {}
    return Record(step, {"attn": LayerRecord(values or {})}, absent)


def with_active(rule: Rule, state=()) -> Alerts:
    alerts = Alerts([rule], [{"name": "attn", "num_heads": 4}])
    alerts.load_state_dict({"active": [active(rule.name).to_dict()], "series": {}, **dict(state)})
    return alerts


@pytest.mark.parametrize("rule", ALL_RULES, ids=lambda rule: rule.name)
def test_an_alert_of_every_rule_ends_after_five_readings_without_its_metric(rule):
    alerts = with_active(rule)
    if not rule.needs:  # it has seen what it judges, which is lost then
        alerts.judge(Record(1, {"attn": LayerRecord()}, {"hdi/attn": NOT_FINITE}))
    reason = "it is no longer part of the model"
    absent = {f"{METRICS[name].source}/attn": reason for name in rule.needs}
    reported = [
        alert
        for number in range(2, 7)
        for alert in alerts.judge(Record(number, {"attn": LayerRecord()}, {"attn": reason, **absent}))
    ]
    ends = [alert for alert in reported if alert.rule == rule.name]
    assert [alert.ending for alert in ends] == ["not measured"], "never resolved: nothing showed that"
    assert alerts.active == []


def test_an_alert_of_a_layer_that_waits_its_turn_stays_active():
    rule = next(rule for rule in ALL_RULES if rule.name == "logit growth")
    alerts = with_active(rule)
    for number in range(2, 9):
        assert alerts.judge(unmeasured(number)) == []
    alerts.judge(unmeasured(9, values={"attention_logit": 90.0}))
    for number in range(10, 17):
        assert alerts.judge(unmeasured(number)) == []
    assert len(alerts.active) == 1


def test_a_metric_that_is_missing_without_a_reason_ends_its_alert_at_last():
    alerts = with_active(next(rule for rule in ALL_RULES if rule.name == "logit growth"))
    ends = [alert for number in range(2, 60) for alert in alerts.judge(unmeasured(number))]
    assert [(alert.step, alert.ending) for alert in ends] == [(41, "not measured")]


def test_the_count_of_unmeasured_readings_survives_a_checkpoint():
    rule = next(rule for rule in ALL_RULES if rule.name == "worst pair")
    first = with_active(rule)
    for number in range(2, 5):
        first.judge(unmeasured(number, "no forward ran"))
    second = Alerts([rule], [{"name": "attn", "num_heads": 4}])
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert second.judge(unmeasured(5, "no forward ran")) == []
    assert [alert.step for alert in second.judge(unmeasured(6, "no forward ran"))] == [6]


def test_a_rule_that_fails_at_every_reading_loses_its_alert():
    class Broken(Rule):
        name = "broken"

        def judge(self, series, active):
            raise ZeroDivisionError("no heads")

    alerts = Alerts([Broken()], warn_once=WarnOnce())
    alerts.load_state_dict({"active": [active("broken").to_dict()], "series": {}})
    with pytest.warns(match="no heads"):
        ends = [alert for number in range(2, 7) for alert in alerts.judge(unmeasured(number))]
    assert [(alert.step, alert.ending) for alert in ends] == [(6, "not judged")]


def no_more_weights(model: Classifier) -> None:
    with torch.no_grad():
        model.blocks[0].attn.k_proj.weight.fill_(torch.nan)


def no_more_layer(model: Classifier) -> None:
    model.blocks[0].attn = nn.Identity()


def no_more_live_heads(model: Classifier) -> None:
    with torch.no_grad():
        model.blocks[0].attn.k_proj.weight[8:] = 0
    model.blocks[0].attn.k_proj.weight.requires_grad_(False)


@pytest.mark.parametrize(
    ("lose", "why"),
    [
        (no_more_weights, NOT_FINITE),
        (no_more_layer, "its key weight cannot be read (it is no longer part of the model"),
        (no_more_live_heads, "fewer than two live heads"),
    ],
)
@pytest.mark.filterwarnings(
    "ignore:.*:hdi_callback.errors.MonitoringWarning", "ignore:.*:hdi_callback.errors.HeadCollapseWarning"
)
def test_alerts_of_a_layer_that_is_lost_end_in_the_history_and_end_interventions(tmp_path, lose, why):
    torch.manual_seed(0)
    model, path = Classifier(), tmp_path / "history.jsonl"
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    acts = [DiversityPenalty(1e-6)]
    with watch_heads(model, optimizer, every_n_steps=1, history=path, verbose=False, interventions=acts) as heads:
        for number in range(14):
            if number == 3:
                with torch.no_grad():
                    keys = model.blocks[0].attn.k_proj.weight
                    keys[8:16] = keys[:8] + 0.01 * torch.randn(8, 32)
            if number == 6:
                lose(model)
            with heads.step():
                step(model, optimizer, number)
            if number in (5, 13):
                assert acts[0].is_active == (number == 5)
    alerts = [alert for alert in read_alerts(path) if alert.layer == "blocks.0.attn" and alert.rule == "worst pair"]
    assert [(alert.step, alert.ending) for alert in alerts] == [(3, ""), (10, "not measured")]
    assert f"worst pair (warning of step 3) is no longer measured: {why}" in alerts[1].message
    assert "worst pair" not in {alert.rule for alert in active_alerts(read_alerts(path))}
    done = [line["message"] for line in read_lines(path) if line["kind"] == "intervention"]
    assert "step 10, blocks.0.attn: DiversityPenalty stopped pushing the heads apart" in " | ".join(done)
    ends = {(alert.step, alert.layer, alert.rule) for alert in replay(path) if alert.ending == "not measured"}
    assert (10, "blocks.0.attn", "worst pair") in ends


def test_broken_outputs_that_are_no_longer_measured_are_not_resolved():
    rule = next(rule for rule in ALL_RULES if rule.name == "weights not finite")
    alerts = Alerts([rule], [{"name": "attn", "num_heads": 4}])
    whole = {"hdi": 0.7, "outputs_not_finite": 1.0, "weights_not_finite": 0.0}
    assert [alert.level for alert in alerts.judge(unmeasured(1, values=whole))] == ["critical"]
    without = {"hdi": 0.7, "weights_not_finite": 0.0}
    assert alerts.judge(unmeasured(2, values=without)) == []
    assert [alert.ending for alert in alerts.judge(unmeasured(3, values=whole | {"outputs_not_finite": 0.0}))] == [
        "resolved"
    ]


@pytest.mark.parametrize("ending", ["resolved", "not measured", "not judged"])
def test_a_line_of_an_alert_that_ended_says_so_once(ending):
    alert = active("worst pair")
    ended = resolution_of(alert, step=9) if ending == "resolved" else loss_of(alert, step=9, ending=ending, why="")
    assert f"{ended.status}: {ended.message}".count(ending) == 1
    assert ended._repr_html_().count(ending) == 1
    assert Alert.from_dict(ended.to_dict()) == ended
