"""One event, one alert: what is merged, what it says, how it gets worse and ends."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from hdi_callback.record import Alert
from hdi_callback.rules import Alerts
from hdi_callback.rules.series import Row, Series
from tests.rules.readings import LAYER, closest, curve, facts, layer, quiet, raised, run
from tests.rules.test_rules import CALM, WAVERING, circuits, entropy, equal, moves, norms, pair


def together(*parts, matrices=None):
    """One reading of what several readings measured."""
    values, heads, all_matrices = {}, {}, {}
    for part in parts:
        values |= part.values
        heads |= part.heads
        all_matrices |= part.matrices
    return layer(values, heads, all_matrices | (matrices or {}))


def healthy():
    return together(pair(0.1), circuits(0.1), moves(0.01, 0.01, 0.01, 0.01))


def near(one: int, other: int, *more):
    return pair(0.9, 0.2, (one, other, 0.9), *more, step_pair=(one, other))


def copied(one: int = 0, other: int = 2):
    moved = [0.01] * 4
    moved[other] = 0.8
    return together(equal(one, other), circuits(1.0, (one, other, 1.0)), moves(*moved))


def told(given):
    return [(place, alert.status, alert.rule, alert.level) for place, found in enumerate(given) for alert in found]


def test_copied_heads_are_one_alert_with_the_cause_first():
    given = run([healthy()] * 8 + [copied()])
    (alert,) = given[8]
    assert (alert.rule, alert.also) == ("copied heads", ("merged values",))
    assert (alert.where, alert.status, alert.level, alert.since) == ({LAYER: (0, 2)}, "new", "warning", 400)
    assert alert.message == (
        f"heads 0 and 2 of {LAYER} are nearly one head: alignment jumped from at most 0.10 to 1.00 between steps 350 "
        "and 400; their key weights are equal, as of copies (also: merged values)"
    )
    assert len(alert.message) < 280


def test_copies_that_drift_apart_stay_one_event_at_one_level_until_they_are_apart():
    readings = [
        healthy(),
        *[equal()] * 2,
        pair(0.95, 0.95, (0, 1, 0.95), step_pair=(0, 1)),
        pair(0.75, 0.1, (0, 1, 0.75)),
    ]
    given = run([*readings, pair(0.65, 0.1, (0, 1, 0.65))])
    assert told(given) == [(1, "new", "copied heads", "warning"), (5, "resolved", "copied heads", "warning")]


def test_a_cause_is_an_event_of_its_own_while_another_lasts():
    jump = moves(0.5, 0.5, 0.5, 0.5)
    nan = layer({"weights_not_finite": 1.0}, {"weights_not_finite": [0, 1, 0, 0]})
    ahead = curve("attention_ahead", [0.0, 0.4])
    quiet_ones = [together(healthy(), ahead[0])] + [together(near(0, 2), moves(0.01, 0.01, 0.01, 0.01), ahead[0])] * 6
    given = run([
        *quiet_ones,
        together(near(0, 2), jump, ahead[0]),
        together(near(0, 2), moves(0.01, 0.01, 0.01, 0.01), ahead[1]),
        together(near(0, 2), moves(0.01, 0.01, 0.01, 0.01), ahead[1], nan),
        together(equal(), moves(0.01, 0.01, 0.01, 0.01), ahead[1], nan),
    ])  # fmt: skip
    assert told(given) == [
        (1, "new", "worst pair", "warning"),
        (8, "new", "later tokens", "critical"),
        (9, "new", "weights not finite", "critical"),
        (10, "new", "copied heads", "warning"),
    ]


def test_rules_on_other_heads_of_the_layer_are_another_event():
    reading = together(near(0, 1), circuits(0.95, (2, 3, 0.95)))
    assert [alert[1:] for alert in raised(run([healthy(), reading]))] == [
        ("worst pair", "warning", (0, 1)), ("merged values", "warning", (2, 3)),
    ]  # fmt: skip


def test_a_rule_that_follows_within_a_few_readings_joins_the_event_in_silence():
    alerts = Alerts(layers=[facts()], pretrained=False)
    first = together(near(0, 2), circuits(0.1))
    given = run([healthy(), first, first, first, together(near(0, 2), circuits(0.95))], alerts)
    assert raised(given) == [(1, "worst pair", "warning", (0, 2))]
    assert [(alert.rule, alert.also) for alert in alerts.active] == [("worst pair", ("merged values",))]


def test_a_rule_that_follows_much_later_is_a_new_event():
    first = together(near(0, 2), circuits(0.1))
    given = run([healthy()] + [first] * 6 + [together(near(0, 2), circuits(0.95))])
    assert [alert[:2] for alert in raised(given)] == [(1, "worst pair"), (7, "merged values")]


def test_what_spreads_to_another_layer_is_the_same_event():
    apart, close = circuits(0.1), circuits(0.95)
    given = run([{"a": apart, "b": apart}, {"a": close, "b": apart}, {"a": close, "b": close}],
                layers=[facts("a"), facts("b")])  # fmt: skip
    assert told(given) == [(1, "new", "merged values", "warning"), (2, "worse", "merged values", "warning")]
    assert given[2][0].layers == ("a", "b")
    assert given[2][0].message.startswith("spread: heads 0 and 2 of b write alike: ")


def test_an_event_ends_at_the_reading_that_clears_it_and_names_the_intervention_that_acted():
    alerts = Alerts(layers=[facts()], pretrained=False)
    run([healthy()] * 8 + [copied()], alerts)
    alerts.expect_change(LAYER, [0, 2], 401, "ReviveHeads")
    ((over,),) = run([together(pair(0.08), circuits(0.1), moves(0.9, 0.01, 0.9, 0.01))], alerts, begin=450)
    assert (over.status, alerts.active) == ("resolved", ())
    assert over.message == (
        f"copied heads of step 400 in {LAYER} is over, after ReviveHeads wrote heads 0 and 2 of {LAYER} at step 401"
    )


def test_the_end_of_an_event_of_two_layers_names_the_intervention_that_wrote_one_of_them_alone():
    names = ["a", "b"]
    for written in names:
        alerts = Alerts(layers=[facts(name) for name in names], pretrained=False)
        run([dict.fromkeys(names, pair(0.1)), dict.fromkeys(names, pair(0.9))], alerts)
        alerts.expect_change(written, [1, 3], 51, "ReviveHeads")
        ((over,),) = run([dict.fromkeys(names, pair(0.1))], alerts, begin=100)
        assert over.message == (
            f"worst pair of step 50 in a and b is over, after ReviveHeads wrote heads 1 and 3 of {written} at step 51"
        )


def test_one_rule_on_many_layers_is_one_alert():
    names = [f"blocks.{place}.attn" for place in range(12)]
    before, after = (dict.fromkeys(names, one) for one in curve("attention_ahead", [0.0, 0.4]))
    given = run([before, after], layers=[facts(name) for name in names])
    (alert,) = given[1]
    assert alert.where == dict.fromkeys(names, ())
    assert alert.layers == tuple(names)
    assert alert.message == (
        "attention in blocks.0.attn reaches tokens after the query: their share jumped from 0.00 to 0.40 between steps "
        "0 and 50; they were hidden at step 0; likewise in 11 layers, blocks.1.attn to blocks.11.attn"
    )
    few = run([{"a": before[names[0]], "b": before[names[0]]}, {"a": after[names[0]], "b": after[names[0]]}])
    assert few[1][0].message.endswith("; likewise in b")


def test_layers_of_one_event_that_recover_leave_what_is_active_and_the_event_ends_with_the_last():
    alerts = Alerts(layers=[facts("a"), facts("b")], pretrained=False)
    hidden, seen = curve("attention_ahead", [0.0, 0.4])
    both, one, none = {"a": seen, "b": seen}, {"a": hidden, "b": seen}, {"a": hidden, "b": hidden}
    given = run([none, both, one, one, one], alerts)
    assert [alert.layers for alert in alerts.active] == [("b",)]
    assert [place for place, found in enumerate(given) if found] == [1]
    (over,) = run([none], alerts, begin=1000)[0]
    assert (over.status, over.layers) == ("resolved", ("a", "b"))
    assert over.message == "later tokens of step 50 in a and b is over"
    assert alerts.active == ()


def test_an_event_gets_worse_with_its_level_and_once_heads_have_doubled():
    readings = [pair(0.1, 0.1)] + [
        pair(0.9, 0.3, *pairs)
        for pairs in (((0, 1, 0.9),), ((0, 1, 0.9), (1, 2, 0.9)), ((0, 1, 0.9), (1, 2, 0.9), (2, 3, 0.9)))
    ]
    given = run(readings)
    assert [(place, alert.status, alert.where[LAYER]) for place, alerts in enumerate(given) for alert in alerts] == [
        (1, "new", (0, 1)), (3, "worse", (0, 1, 2, 3)),
    ]  # fmt: skip
    assert given[3][0].message.startswith(f"all 4 heads of {LAYER} are nearly one head: alignment ")


def test_a_more_serious_finding_that_joins_makes_the_event_worse():
    readings = [pair(0.1)] + [pair(0.9, 0.2)] * 2 + [pair(0.9, 0.95)]
    assert told(run(readings)) == [(1, "new", "worst pair", "warning"), (3, "worse", "worst pair", "critical")]


def test_heads_that_hover_at_a_limit_are_reported_once():
    given = run([pair(0.1)] + [pair(value) for value in (0.81, 0.79, 0.81, 0.78, 0.82, 0.75, 0.81)])
    assert raised(given) == [(1, "worst pair", "warning", (1, 3))]


def test_an_alert_lasts_while_its_metric_or_its_layer_is_not_read_and_ends_at_the_reading_that_clears_it():
    gone, apart, close = layer({}), circuits(0.1), circuits(0.95)
    for missing in ({"a": gone, "b": apart}, {"b": apart}):
        alerts = Alerts(layers=[facts("a"), facts("b")], pretrained=False)
        begin = [{"a": apart, "b": apart}, {"a": close, "b": apart}]
        assert told(run([*begin, *[missing] * 20], alerts)) == [(1, "new", "merged values", "warning")]
        assert [alert.layers for alert in alerts.active] == [("a",)]
        assert told(run([{"a": apart, "b": apart}], alerts, begin=5000)) == [
            (0, "resolved", "merged values", "warning")
        ]


def test_key_heads_are_named_as_such_under_grouped_keys():
    close = pair(0.9, 0.2, (0, 1, 0.9), step_pair=(0, 1))
    (alert,) = run([pair(0.1), close], layers=[facts(heads=8, keys=4)])[1]
    assert alert.unit == "key heads"
    assert alert.message.startswith(f"key heads 0 and 1 of {LAYER} are nearly one head: ")
    (alert,) = run([pair(0.1), pair(0.1, 0.6)], layers=[facts(heads=8, keys=4)])[1]
    assert alert.message.startswith(
        f"all 4 key heads of {LAYER} are converging: mean alignment jumped from 0.02 to 0.60"
    )
    (alert,) = run([pair(0.1), close])[1]
    assert (alert.unit, alert.message[:13]) == ("heads", "heads 0 and 1")


def test_key_heads_and_their_query_heads_are_one_event():
    grouped = [facts(heads=8, keys=4)]
    close = pair(0.9, 0.2, (0, 1, 0.9), step_pair=(0, 1))
    own, other = (
        layer({"circuit_ov_worst": 0.95}, {}, {"circuit_ov": closest(alike, heads=8)})
        for alike in ((0, 3, 0.95), (4, 7, 0.95))
    )
    assert len(run([pair(0.1), together(close, own)], layers=grouped)[1]) == 1
    assert len(run([pair(0.1), together(close, other)], layers=grouped)[1]) == 2


@pytest.mark.parametrize(("count", "said"), [(1, "head 0"), (2, "both heads"), (32, "all 32 heads")])
def test_all_heads_are_called_so(count, said):
    broken = layer({"weights_not_finite": float(count)}, {"weights_not_finite": [1] * count})
    (alert,) = run([broken], layers=[facts(heads=count)])[0]
    assert alert.message == f"the weights of {said} of {LAYER} hold NaN or infinity"


WHEN = {
    "jumped from 3 to 52 between steps 150 and 200": [3, 3, 3, 3, 52],
    "jumped from 8 to 52 between steps 250 and 300": [3, 3, 3, 4, 6, 8, 52],
    "rose from 3 to 52 between steps 50 and 300": [3, 3, 12, 22, 32, 42, 52],
    "rose from 4 to 52 between steps 150 and 550": [3, *[4] * 3, 9, 14, 19, 24, 30, 36, 45, 52],
}


@pytest.mark.parametrize("words", WHEN)
def test_the_message_says_when_it_happened_as_measured(words):
    series = Series(LAYER, facts(), Row(0, {}))
    for place, value in enumerate(WHEN[words]):
        series.append(Row(50 * place, {"attention_logit": float(value)}))
    assert series.change("attention_logit", 0) == words


EVERY_SENTENCE = {
    "weights not finite": (
        [layer({"weights_not_finite": 0.0}), layer({"weights_not_finite": 1.0}, {"weights_not_finite": [0, 0, 1, 0]})],
        "the weights of head 2 of {layer} hold NaN or infinity: they did not at step 0",
    ),
    "frozen weights": (
        [moves(0.01, 0.01, 0.01, 0.01)] + [moves(0.0, 0.01, 0.0, 0.01)] * 3,
        "the weights of heads 0 and 2 of {layer} do not move: not since step 0",
    ),
    "rounded away": (
        [moves(0.1, 0.1, 0.1, 0.1, unchanged=0.1)] + [moves(1e-5, 1e-5, 1e-5, 1e-5, unchanged=0.95)] * 3,
        "the weights of all 4 heads of {layer} hardly change: 95 % of them are bit-identical between steps 100 and 150",
    ),
    "vanishing weights": (
        [norms([1] * 4), norms([1, 0.05, 1, 1])],
        "the query and key weights of head 1 of {layer} fade away: the norm of the circuit is at 5 % of that at step 0",
    ),
    "sharp from the start": (
        entropy(0.3, attention_logit=40.0),
        "attention is sharp in {layer} before anything was learned: mean entropy 0.30, largest score 40",
    ),
    "flat attention": (
        entropy(*[0.9998] * 15, attention_logit=0.01),
        "attention in {layer} has stayed uniform since step 0: mean entropy 0.9998, largest score 0.01",
    ),
    "mean alignment": (
        [pair(0.1, 0.1), pair(0.94, 0.93, (0, 1, 0.94), (1, 2, 0.94), (2, 3, 0.94))],
        "all 4 heads of {layer} are nearly one head: mean alignment jumped from 0.10 to 0.93 between steps 0 and 50, "
        "and 3.0 effective heads are left",
    ),
    "merged values": (
        [circuits(0.1), circuits(0.95, (0, 1, 0.95), (2, 3, 0.92))],
        "heads 0 and 1 as well as 2 and 3 of {layer} write alike, group by group: largest cosine of their OV circuits "
        "jumped from 0.10 to 0.95 between steps 0 and 50",
    ),
    "copied heads": (
        [equal()],
        "heads 0 and 1 of {layer} have equal key weights: they are tied, were copied, or this is a bug; equal "
        "gradients keep them equal",
    ),
}  # fmt: skip


@pytest.mark.parametrize("rule", EVERY_SENTENCE)
def test_each_rule_says_what_where_and_when(rule):
    readings, sentence = EVERY_SENTENCE[rule]
    (alert,) = run(readings)[-1]
    assert (alert.rule, alert.message) == (rule, sentence.format(layer=LAYER))


def test_a_change_with_the_loss_is_told_with_both_numbers():
    given = run(entropy(*WAVERING, 0.6, 0.6), losses=[*CALM, 1.4, 1.4])
    assert [alert.message for alerts in given for alert in alerts] == [
        f"{LAYER} changed as the loss rose: its mean entropy went from 0.86 to 0.6 between steps 650 and 700, 16 "
        "times as far as ever up to step 600, and the loss from 1.1 to 1.4"
    ]


def test_a_change_with_the_loss_is_compared_with_those_up_to_the_step_that_it_names():
    given = run(entropy(*WAVERING[:-1], 0.3, 0.2, 0.2), losses=[*CALM[:-1], 1.0, 1.4, 1.4])
    assert [alert.message for alerts in given for alert in alerts] == [
        f"{LAYER} changed as the loss rose: its mean entropy went from 0.3 to 0.2 between steps 650 and 700, 18 times "
        "as far as ever up to step 600, and the loss from 1 to 1.4"
    ]


def test_alerts_are_plain_data():
    given = run([healthy()] * 8 + [copied()] + [healthy()])
    alerts = [alert for found in given for alert in found]
    assert [alert.status for alert in alerts] == ["new", "resolved"]
    assert [Alert.from_dict(json.loads(json.dumps(asdict(alert)))) for alert in alerts] == alerts
    assert alerts[0].value is not None


def test_a_run_without_anything_to_report_reports_nothing():
    assert run([layer(quiet())] * 20) == [()] * 20
