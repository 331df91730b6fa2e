"""The engine: rules of the user, limits, interventions that write weights, states, failures."""

from __future__ import annotations

import itertools
import json
from dataclasses import asdict

import pytest
import torch

from hdi_callback.dashboards.names import look_up
from hdi_callback.errors import MisconfigurationError, MonitoringWarning
from hdi_callback.record import LayerRecord, Record
from hdi_callback.rules import LIMITS, RULES, Alerts, Finding, Rule, check_thresholds, default_rules
from hdi_callback.rules.series import Row, _law_of_flatness, has_been_trained
from hdi_callback.rules.similarity_rules import WorstPair
from tests.rules.readings import LAYER, curve, facts, layer, quiet, raised, run
from tests.rules.test_rules import CALM, WAVERING, circuits, norms, pair


class FewEffectiveHeads(Rule):
    name = "few effective heads"
    needs = ("hdi_effective_heads",)

    def judge(self, series, active):
        heads = series.value("hdi_effective_heads")
        if heads < (2.5 if active else 2):
            return Finding("{layer} has few effective heads", f"{heads:.1f} are left", value=heads, threshold=2)
        return None


class Misnamed(FewEffectiveHeads):
    needs = ("hdi_effective_head",)


def effective(*values: float) -> list[LayerRecord]:
    return curve("hdi_effective_heads", values)


def test_a_rule_of_ones_own_is_ten_lines():
    given = run(effective(3, 1.9, 2.4, 2.6, 2.6), rules=[FewEffectiveHeads()])
    assert [(place, one.status, one.rule) for place, found in enumerate(given) for one in found] == [
        (1, "new", "few effective heads"), (3, "resolved", "few effective heads"),
    ]  # fmt: skip
    assert given[1][0].message == f"{LAYER} has few effective heads: 1.9 are left"
    assert (given[1][0].level, given[1][0].value) == ("warning", 1.9)


def test_rules_of_ones_own_stand_beside_the_default_ones():
    rules = [*default_rules(), FewEffectiveHeads()]
    readings = [pair(0.1), layer(pair(0.85).values | {"hdi_effective_heads": 1.5}, pair(0.85).heads)]
    limits = {"*": {"pair": 0.9}}
    assert [alert[1] for alert in raised(run(readings, rules=rules, thresholds=limits))] == ["few effective heads"]
    assert run(effective(3, 1.9), rules=None) == [(), ()]


def test_what_ones_own_rule_finds_as_the_layer_changes_with_the_loss_is_told_apart():
    readings = [
        layer({"attention_entropy": entropy, "hdi_effective_heads": heads})
        for entropy, heads in zip([*WAVERING, 0.6, 0.6], [3.0] * 15 + [1.5])
    ]
    (*_, last) = run(readings, rules=[*default_rules(), FewEffectiveHeads()], losses=[*CALM, 1.4, 1.4])
    assert [(alert.rule, alert.also) for alert in last] == [("change with the loss", ()), ("few effective heads", ())]


class Broken(FewEffectiveHeads):
    def __init__(self, result):
        super().__init__()
        self.result = result

    def judge(self, series, active):
        return self.result() if callable(self.result) else self.result


@pytest.mark.parametrize(
    "result", [lambda: 1 / 0, "a string", Finding("x", level="loud")], ids=["raises", "text", "level"]
)
def test_a_rule_that_fails_is_switched_off_with_one_warning_and_others_go_on(result):
    readings = [
        layer(one.values | {"hdi_effective_heads": 1.0}, one.heads, one.matrices)
        for one in (pair(0.1), pair(0.9), pair(0.9))
    ]
    with pytest.warns(MonitoringWarning, match="few effective heads.*is off. Training goes on") as caught:
        given = run(readings, rules=[Broken(result), WorstPair()])
    assert len(caught) == 1
    assert [alert[1] for alert in raised(given)] == ["worst pair"]


class FailsBelowOne(FewEffectiveHeads):
    def judge(self, series, active):
        return super().judge(series, active) if series.value("hdi_effective_heads") >= 1 else 1 / 0


def test_what_a_rule_has_found_ends_at_the_reading_at_which_it_fails():
    low, broken = effective(1.5, 0.5)
    for begin in ({"a": low, "b": low}, {"a": low}):
        alerts = Alerts(rules=[FailsBelowOne()], layers=[facts("a"), facts("b")], pretrained=False)
        ((alert,),) = run([begin], alerts)
        with pytest.warns(MonitoringWarning, match="is off"):
            ((over,), *later) = run([{"a": low, "b": broken}, {"a": low, "b": low}], alerts, begin=50)
        assert (alert.is_over, over.is_over, later, alerts.active) == (False, True, [()], ())
        assert over.message.endswith("is over, after the rule 'few effective heads' failed")
        assert alerts._findings == {}
    alerts = Alerts(rules=[FailsBelowOne()], layers=[facts("a"), facts("b")], pretrained=False)
    with pytest.warns(MonitoringWarning, match="is off"):
        assert run([{"a": low, "b": broken}], alerts) == [()]


def test_numbers_of_a_finding_may_be_tensors():
    found = Finding("x", heads=tuple(torch.tensor([1, 2])), value=torch.tensor(0.5), threshold=float("nan"))
    (alert,) = run(effective(1), rules=[Broken(found)])[0]
    assert (alert.where, alert.value, alert.threshold) == ({LAYER: (1, 2)}, 0.5, None)
    json.dumps(asdict(alert))


# --- limits


def test_limits_are_set_by_pattern_and_the_last_that_matches_counts():
    limits = {"*": {"pair": 0.95}, "decoder.*": {"pair": 0.7}, "decoder.9": {"pair": None}}
    names = ["encoder.0", "decoder.0", "decoder.9"]
    readings = [dict.fromkeys(names, pair(value)) for value in (0.1, 0.75)]
    (alert,) = run(readings, layers=[facts(name) for name in names], thresholds=limits)[1]
    assert alert.layers == ("decoder.0",)
    assert alert.threshold == 0.7


MISUSE = {
    "no dictionary": ({"thresholds": [0.9]}, "must be a dictionary"),
    "a limit without pattern": ({"thresholds": {"pair": 0.9}}, r'write {"\*": {"pair": 0.9}}'),
    "an unknown limit": ({"thresholds": {"*": {"pairs": 0.9}}}, "Did you mean 'pair'"),
    "out of reach": ({"thresholds": {"*": {"pair": 1.0}}}, "above 0 and below 1"),
    "no number": ({"thresholds": {"*": {"frozen": "high"}}}, "above 0, or None"),
    "a class": ({"rules": [WorstPair]}, r"write WorstPair\(\)"),
    "a word": ({"rules": "defaults"}, "Did you mean 'default'"),
    "a metric that is none": ({"rules": [Misnamed()]}, "Did you mean 'hdi_effective_heads'"),
    "no list": ({"rules": 3}, "list of rules"),
    "twice": ({"rules": [WorstPair(), WorstPair()]}, "Two rules have the name 'worst pair'"),
}  # fmt: skip


@pytest.mark.parametrize("case", MISUSE)
def test_misuse_is_an_error_that_says_what_to_write(case):
    options, message = MISUSE[case]
    with pytest.raises(MisconfigurationError, match=message):
        Alerts(**options)


def test_every_limit_belongs_to_one_rule():
    assert sorted(name for rule in RULES for name in rule.limits) == sorted(LIMITS)
    assert check_thresholds(None) == {}


# --- explanations


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_each_rule_is_explained_by_its_class(rule):
    for name in (rule.name, rule.name.replace(" ", "-"), rule.__name__, *rule.limits):
        assert look_up(name).text == rule.name
    assert all(text and not text.endswith(".") for text in (rule.condition, rule.action))
    assert rule.meaning.endswith(".")
    assert all(LIMITS[limit].meaning for limit in rule.limits)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_what_to_do_has_no_code_in_its_prose_and_no_line_of_code_is_wider_than_a_terminal(rule):
    assert "HDI" not in rule.action
    assert "import" not in rule.action
    assert len(rule.code) < 80


# --- interventions that write weights


def test_heads_that_an_intervention_has_written_do_not_vanish_nor_change_their_layer():
    faded = norms([1, 1, 0.01, 1])
    alerts = Alerts(layers=[facts()], pretrained=False)
    run([norms([1] * 4)], alerts)
    alerts.expect_change(LAYER, [2], 1)
    assert raised(run([faded], alerts, begin=50)) == []
    alerts = Alerts(layers=[facts()], pretrained=False)
    run(curve("attention_entropy", [0.9, 0.88] * 7), alerts, losses=[1.0, 1.1] * 7)
    alerts.expect_change(LAYER, [2], 651)
    assert raised(run(curve("attention_entropy", [0.2] * 4), alerts, begin=700, losses=[2.0] * 4)) == []


def test_a_layer_that_an_intervention_wrote_long_ago_is_judged_as_before():
    alerts = Alerts(layers=[facts()], pretrained=False)
    run(curve("attention_entropy", [0.9] * 8), alerts)
    alerts.expect_change(LAYER, [2], 351)
    later = run(curve("attention_entropy", [0.9] * 70 + [0.9999] * 5), alerts, begin=400)
    assert raised(later) == [(74, "flat attention", "warning", ())]


# --- states


READINGS = [pair(0.1), pair(0.85), pair(0.9), circuits(0.95), pair(0.9), pair(0.3), pair(0.3), pair(0.3), pair(0.3)]


@pytest.mark.parametrize("cut", range(1, len(READINGS)))
def test_a_state_goes_through_json_at_any_reading(cut):
    whole = run(READINGS)
    first = Alerts(layers=[facts()], pretrained=False)
    begun = run(READINGS[:cut], first)
    second = Alerts(layers=[facts()], pretrained=False)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert begun + run(READINGS[cut:], second, begin=50 * cut) == whole


@pytest.mark.parametrize("reading", [pair(0.9), circuits(0.95)])
def test_a_resumed_run_knows_which_heads_of_pretrained_weights_were_alike_at_first(reading):
    first, second = (Alerts(layers=[facts()], pretrained=True) for _ in range(2))
    assert run([reading] * 3, first) == [()] * 3
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert run([reading], second, begin=150) == [()]


def test_what_a_rule_found_that_a_resumed_run_does_not_have_stays_active():
    first = Alerts(layers=[facts()], pretrained=False)
    run([pair(0.1), pair(0.9)], first)
    second = Alerts(rules=[FewEffectiveHeads()], layers=[facts()], pretrained=False)
    second.load_state_dict(first.state_dict())
    assert run(effective(*[3] * 6), second, begin=100) == [()] * 6
    assert [alert.rule for alert in second.active] == ["worst pair"]


def test_only_the_latest_readings_are_kept():
    first, second = (Alerts(layers=[facts()], pretrained=False) for _ in range(2))
    run([layer(quiet())] * 200, first)
    second.load_state_dict(first.state_dict())
    assert len(first._series[LAYER].rows) == len(second._series[LAYER].rows) == 64


# --- fresh or pretrained


def spectrum(weight: torch.Tensor) -> Row:
    squares = torch.linalg.svdvals(weight.double()).square()
    flatness = squares.log().mean(-1).exp() / squares.mean(-1)
    return Row(0, {}, {"flatness": flatness.nan_to_num().tolist(), "rank": [weight.shape[1]] * len(weight)})


INITIALISATIONS = {
    "normal": lambda k, d: torch.randn(4, k, d) * 0.02,
    "uniform": lambda k, d: torch.rand(4, k, d) - 0.5,
    "truncated": lambda k, d: torch.nn.init.trunc_normal_(torch.empty(4, k, d)),
    "orthogonal": lambda k, d: torch.stack([torch.nn.init.orthogonal_(torch.empty(k, d)) for _ in range(4)]),
    "one head": lambda k, d: torch.randn(1, k, d),
    "zeros": lambda k, d: torch.zeros(4, k, d),
}


@pytest.mark.parametrize(("k", "d"), [(4, 16), (8, 8), (8, 32), (16, 64), (64, 768)])
@pytest.mark.parametrize("draw", INITIALISATIONS)
def test_no_fresh_layer_counts_as_trained(k, d, draw):
    torch.manual_seed(0)
    for _ in range(50 if d < 100 else 5):
        assert not has_been_trained(spectrum(INITIALISATIONS[draw](k, d)), {"width": d, "head_dim": k})


def test_the_law_of_flatness_is_that_of_gaussian_rows():
    torch.manual_seed(0)
    drawn = torch.tensor(spectrum(torch.randn(20_000, 8, 32)).heads["flatness"]).log()
    mean, deviation = _law_of_flatness(8, 32)
    assert float(drawn.mean()) == pytest.approx(mean, abs=4 * deviation / 20_000**0.5)
    assert float(drawn.std()) == pytest.approx(deviation, rel=0.02)


def test_a_layer_with_a_few_strong_directions_counts_as_trained():
    torch.manual_seed(0)
    weight = torch.randn(4, 8, 32) + 2 * torch.randn(4, 8, 1) @ torch.randn(1, 32)
    assert has_been_trained(spectrum(weight), {"width": 32, "head_dim": 8})


@pytest.mark.parametrize(
    ("spectra", "expected"),
    [((0.9, 0.9), ()), ((0.2, 0.2), ("a", "b")), ((0.2, 0.9), ("a",)), ((0.9, 0.2, 0.2), ("a", "b", "c"))],
)
def test_uneven_spectra_count_as_pretrained_and_all_layers_where_most_do(spectra, expected):
    names = "abc"[: len(spectra)]
    alerts = Alerts(layers=[facts(name) for name in names])
    layers = {
        name: layer(quiet(attention_entropy=0.3), {"flatness": [flatness] * 4, "rank": [8] * 4})
        for name, flatness in zip(names, spectra)
    }
    given = alerts.judge(Record(0, layers))
    told = {name for alert in given for name in alert.layers}
    assert told == set(names) - set(expected)


def test_the_time_that_rules_take_is_small():
    import time

    names = [f"blocks.{place}.attn" for place in range(48)]
    full = layer(
        quiet(attention_entropy=0.9, attention_logit=5.0, attention_ahead=0.0,
              circuit_qk_worst=0.3, circuit_qk_norm=1.0, head_movement_min=0.01, head_unchanged=0.0,
              weights_not_finite=0.0),
        {"head_movement": [0.01] * 32, "circuit_qk_norm": [1.0] * 32, "circuit_ov_norm": [1.0] * 32},
    )  # fmt: skip
    alerts = Alerts(layers=[facts(name, 32) for name in names], pretrained=False)
    run([dict.fromkeys(names, full)] * 64, alerts)
    began = time.process_time()
    run([dict.fromkeys(names, full)] * 5, alerts, begin=10_000)
    assert (time.process_time() - began) / 5 < 0.2
    assert len(list(itertools.chain.from_iterable(run([dict.fromkeys(names, full)], alerts, begin=20_000)))) == 0


def test_a_write_is_a_notice_and_a_warning_once_the_loss_rises_after_it_until_it_is_good_again():
    alerts = Alerts(layers=[facts()])
    losses = [1.0, 1.02] * 6 + [1.5] * 8 + [0.9] * 8
    told = []
    for place, loss in enumerate(losses):
        written = ("embed.weight",) if place == 12 else ()
        record = Record(10 * place, {LAYER: LayerRecord({"hdi": 0.9})}, loss=loss, written=written)
        told += [(place, alert.level, alert.status) for alert in alerts.judge(record)]
        alerts, before = Alerts(layers=[facts()]), alerts
        alerts.load_state_dict(json.loads(json.dumps(before.state_dict())))
    assert told == [(12, "notice", "new"), (18, "warning", "new"), (24, "warning", "resolved")]
