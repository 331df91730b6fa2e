"""The engine: one alert for each layer and rule until it is over, live, resumed or from a file."""

from __future__ import annotations

import json

import pytest

from hdi_callback import Alert, Finding, Rule, replay
from hdi_callback.errors import MisconfigurationError, MonitoringWarning
from hdi_callback.monitoring.alerts import Alerts, heads_written
from hdi_callback.monitoring.history import History
from hdi_callback.monitoring.readings import LayerRecord, Record
from hdi_callback.monitoring.rules import MeanAlignment, choose_rules
from hdi_callback.monitoring.rules.replay import read_alerts
from hdi_callback.monitoring.warn_once import WarnOnce


class FewEffectiveHeads(Rule):
    name = "few effective heads"
    needs = ("hdi_effective_heads",)

    def judge(self, series, active):
        heads = series.value("hdi_effective_heads")
        if heads < (2.5 if active else 2):
            return Finding(f"{heads:.1f} effective heads are left", value=heads, threshold=2)
        return None


def record(step: int, **layers: dict[str, float]) -> Record:
    return Record(step, {name: LayerRecord(values) for name, values in layers.items()})


def heads(step: int, number: float) -> Record:
    return record(step, attn={"hdi_effective_heads": number})


def reported(alerts: Alerts, records) -> list[tuple[int, bool]]:
    return [(alert.step, alert.is_resolved) for item in records for alert in alerts.judge(item)]


def test_a_custom_rule_is_reported_once_and_resolved_once():
    alerts = Alerts([FewEffectiveHeads()])
    assert reported(
        alerts, [heads(step, n) for step, n in ((0, 3), (1, 1.9), (2, 1.5), (3, 2.2), (4, 2.6), (5, 1))]
    ) == [
        (1, False),
        (4, True),
        (5, False),
    ]
    assert [alert.message for alert in alerts.active] == ["step 5, attn: 1.0 effective heads are left"]


def test_each_layer_is_judged_separately():
    alerts = Alerts([FewEffectiveHeads()])
    news = alerts.judge(record(7, a={"hdi_effective_heads": 1.0}, b={"hdi_effective_heads": 3.0}))
    assert [alert.layer for alert in news] == ["a"]
    news = alerts.judge(record(8, a={"hdi_effective_heads": 1.0}, b={"hdi_effective_heads": 1.0}))
    assert [alert.layer for alert in news] == ["b"]


def test_a_reading_without_the_metric_neither_starts_nor_ends_an_alert():
    alerts = Alerts([FewEffectiveHeads()])
    assert reported(
        alerts, [record(0, attn={}), heads(1, 1), record(2, attn={}), record(3), heads(4, 1), heads(5, 9)]
    ) == [
        (1, False),
        (5, True),
    ]


def test_a_rule_with_layer_patterns_judges_only_these_layers():
    rule = FewEffectiveHeads()
    rule.layers = ["decoder.*"]
    low = {"hdi_effective_heads": 1.0}
    news = Alerts([rule]).judge(record(1, **{"encoder.0": low, "decoder.0": low}))
    assert [alert.layer for alert in news] == ["decoder.0"]


def test_an_exception_in_a_rule_costs_one_warning_and_does_not_stop_other_rules():
    class Broken(Rule):
        name = "broken"

        def judge(self, series, active):
            raise ZeroDivisionError("no heads")

    alerts = Alerts([Broken(), FewEffectiveHeads()], warn_once=WarnOnce())
    with pytest.warns(MonitoringWarning, match="alert rule 'broken' failed .ZeroDivisionError: no heads") as caught:
        assert reported(alerts, [heads(1, 1), heads(2, 1), heads(3, 3)]) == [(1, False), (3, True)]
    assert len(caught) == 1
    with pytest.raises(ZeroDivisionError):
        Alerts([Broken()]).judge(heads(1, 1))


def odd_rule(name: str, answer=None, **attributes) -> Rule:
    return type("Odd", (Rule,), {"name": name, "judge": lambda self, series, active: answer, **attributes})()


@pytest.mark.parametrize(
    "odd",
    [
        odd_rule("odd", Finding("something", level="fatal")),
        odd_rule("odd", Finding("something", level=3)),
        odd_rule("odd", "a text in place of a finding"),
        odd_rule("odd", needs=5),
        odd_rule("odd", layers=5),
        odd_rule("odd", layers=[3]),
    ],
    ids=["unknown level", "level that is a number", "no finding", "needs", "layers", "pattern"],
)
def test_a_malformed_rule_costs_one_warning_and_does_not_stop_other_rules(odd):
    alerts = Alerts([odd, FewEffectiveHeads()], warn_once=WarnOnce())
    with pytest.warns(MonitoringWarning, match="the alert rule 'odd' failed") as caught:
        assert reported(alerts, [heads(0, 1.0), heads(1, 3.0)]) == [(0, False), (1, True)]
    assert len(caught) == 1


@pytest.mark.parametrize(
    ("finding", "said"),
    [
        (Finding("something", heads=(1, 4)), "from 0 to 3 in this layer"),
        (Finding("something", heads=(-1,)), "from 0 to 3 in this layer"),
        (Finding("something", heads=(True,)), "from 0 to 3 in this layer"),
        (Finding("something", value="high"), "must be a number or None"),
        (Finding("something", since=10**6), "at most that of the reading"),
    ],
)
def test_a_malformed_finding_costs_one_warning_and_does_not_stop_other_rules(finding, said):
    alerts = Alerts([odd_rule("odd", finding), FewEffectiveHeads()], [{"name": "attn", "num_heads": 4}], WarnOnce())
    with pytest.warns(MonitoringWarning, match=f"the alert rule 'odd' failed.*{said}") as caught:
        assert reported(alerts, [heads(0, 1.0), heads(1, 3.0)]) == [(0, False), (1, True)]
    assert len(caught) == 1


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
def test_a_number_that_is_not_finite_is_left_out_of_the_alert(number):
    alerts = Alerts([odd_rule("odd", Finding("something", value=number, threshold=number))], warn_once=WarnOnce())
    (alert,) = alerts.judge(heads(0, 1.0))
    assert (alert.finding.value, alert.finding.threshold) == (None, None)
    assert json.loads(json.dumps(alert.to_dict(), allow_nan=False))["rule"] == "odd"


@pytest.mark.parametrize("cut", range(1, 12))
def test_a_resumed_run_raises_the_alerts_of_an_uninterrupted_one(cut):
    values = [0.1, 0.2, 0.45, 0.55, 0.52, 0.45, 0.3, 0.6, 0.91, 0.95, 0.2, 0.1]
    records = [record(step, attn={"hdi_alignment": a, "hdi_energy_alignment": a}) for step, a in enumerate(values, 1)]
    rules = choose_rules("default")
    whole = Alerts(rules)
    expected = [alert for item in records for alert in whole.judge(item)]
    assert len(expected) > 2
    first, second = Alerts(rules), Alerts(rules)
    before = [alert for item in records[:cut] for alert in first.judge(item)]
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))  # plain data, whatever the checkpoint's format
    assert before + [alert for item in records[cut:] for alert in second.judge(item)] == expected


def test_a_state_of_another_model_is_dropped_layer_by_layer():
    first = Alerts([FewEffectiveHeads()], [{"name": "attn"}])
    first.judge(heads(1, 1))
    other = Alerts([FewEffectiveHeads()], [{"name": "mixer"}])
    first.rewrite("attn", [0])
    other.load_state_dict(first.state_dict())
    (ended,) = other.judge(record(2, mixer={"hdi_effective_heads": 3}))
    assert (ended.layer, ended.ending) == ("attn", "not measured")
    assert ended.message.endswith("(warning of step 1) is no longer measured: the layer is not watched any more")
    assert other.active == []
    assert set(other.state_dict()["series"]) == {"mixer"}
    assert other.state_dict()["rewritten"] == {}


FRESH, TRAINED = 1.0, 1e-6  # flatness of the heads: even as after an initialisation, and far from it


class Origins(Rule):
    name = "origins"

    def __init__(self):
        self.loaded = {}

    def judge(self, series, active):
        self.loaded[series.layer] = series.is_pretrained


def reading_of(step: int, **flatness: float) -> Record:
    arrays = {name: {"flatness": [value] * 4, "rank": [8] * 4} for name, value in flatness.items()}
    return Record(step, {name: LayerRecord({"hdi": 0.5}, array) for name, array in arrays.items()})


def origins(*records: Record, resumes: bool = False, **options) -> dict[str, bool]:
    rule, facts = Origins(), [{"name": name, "width": 64, "head_dim": 8} for name in "abcd"]
    alerts = Alerts([rule], facts, **options)
    for item in records:
        alerts.judge(item)
        if resumes:
            state = json.loads(json.dumps(alerts.state_dict()))
            alerts = Alerts([rule], facts, **options)
            alerts.load_state_dict(state)
    return rule.loaded


def test_a_layer_that_looks_fresh_counts_as_loaded_if_most_of_the_model_was_loaded():
    most = origins(reading_of(0, a=TRAINED, b=TRAINED, c=FRESH))
    half = origins(reading_of(0, a=TRAINED, b=TRAINED, c=FRESH, d=FRESH))
    assert most == {"a": True, "b": True, "c": True}
    assert half == {"a": True, "b": True, "c": False, "d": False}


@pytest.mark.parametrize("loaded", [True, False])
def test_the_pretrained_argument_overrides_what_the_weights_look_like(loaded):
    assert origins(reading_of(0, a=TRAINED, b=FRESH), pretrained=loaded) == {"a": loaded, "b": loaded}


@pytest.mark.parametrize("resumes", [False, True])
@pytest.mark.parametrize(("at_first", "loaded"), [(FRESH, False), (TRAINED, True)])
def test_a_layer_found_late_counts_as_pretrained_if_the_model_did_at_its_first_reading(at_first, loaded, resumes):
    later = reading_of(50, a=TRAINED, b=TRAINED, c=FRESH)
    found = origins(reading_of(0, a=at_first, b=at_first), later, resumes=resumes)
    assert found == {"a": loaded, "b": loaded, "c": loaded}


@pytest.mark.parametrize(
    ("line", "heads"),
    [
        ({"facts": {"heads": [1, 3]}}, [1, 3]),
        ({"facts": {"heads": (2,)}, "is_dry_run": False, "is_refusal": False}, [2]),
        ({"facts": {"heads": [1]}, "is_dry_run": True}, []),
        ({"facts": {"heads": [1]}, "is_refusal": True}, []),
        ({"facts": {"heads": "13"}}, []),
        ({"facts": {"heads": [True, 1.0, "2", 3]}}, [3]),
        ({"facts": {}}, []),
        ({"facts": None}, []),
        ({}, []),
    ],
)
def test_heads_count_as_rewritten_if_a_completed_action_names_them(line, heads):
    assert heads_written(line) == heads


def test_a_series_keeps_sixty_four_readings_and_the_first():
    judged = []

    class Judging(Rule):
        name = "judging"

        def judge(self, series, active):
            judged.append((series.first.step, len(series.rows), series.latest.step, series.rows[0].arrays))

    arrays = {"rank": [1, 1], "worst_pair": [0, 1]}
    alerts = Alerts([Judging()])
    for step in range(100):
        alerts.judge(Record(step, {"attn": LayerRecord({"hdi": 0.5}, arrays)}))
    assert judged[0] == (0, 1, 0, arrays)
    assert judged[-1] == (0, 64, 99, {"worst_pair": [0, 1]})


def test_an_alert_is_the_same_after_a_trip_through_plain_data():
    (alert,) = Alerts([FewEffectiveHeads()]).judge(heads(1, 1))
    assert Alert.from_dict(json.loads(json.dumps(alert.to_dict()))) == alert


# --- from the file


@pytest.fixture
def collapse(tmp_path):
    history = History(tmp_path / "history.jsonl")
    history.begin(0, [{"name": "attn", "width": 32}], last_reading=-1)
    for step, alignment in ((10, 0.1), (20, 0.55), (30, 0.8), (40, 0.95), (50, 0.2)):
        history.write(record(step, attn={"hdi_alignment": alignment, "hdi_energy_alignment": 0.0}))
    return history.path


def test_replay_judges_a_history_file(collapse):
    assert [(alert.step, alert.level, alert.is_resolved) for alert in replay(collapse)] == [
        (20, "warning", False),
        (40, "critical", False),
        (50, "critical", True),
    ]


def test_replay_with_other_limits_raises_other_alerts(collapse):
    assert [alert.step for alert in replay(collapse, thresholds={"attn": {"mean": 0.7}})] == [30, 40, 50]
    assert [alert.step for alert in replay(collapse, thresholds={"at*": {"mean": None, "critical": None}})] == []
    assert [alert.step for alert in replay(collapse, [MeanAlignment(0.9, critical=None)])] == [40, 50]
    with pytest.raises(MisconfigurationError, match="either rules or thresholds"):
        replay(collapse, [MeanAlignment()], thresholds={"*": {"mean": 0.2}})


def test_alerts_of_a_history_are_read_back_without_those_that_a_resumption_voided(tmp_path):
    history, alerts = History(tmp_path / "history.jsonl"), Alerts([FewEffectiveHeads()])
    history.begin(0, [], last_reading=-1)
    (first,) = alerts.judge(heads(10, 1))
    history.note("alert", **first.to_dict())
    (second,) = alerts.judge(heads(20, 3))
    history.note("alert", **second.to_dict())
    assert read_alerts(history.path) == [first, second]
    history.begin(20, [], last_reading=10)  # the checkpoint was made at step 20, before its reading
    assert read_alerts(history.path) == [first]
