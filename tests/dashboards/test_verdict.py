from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest

from hdi_callback.dashboards.verdict import events, state, urgent_of, verdict
from hdi_callback.monitor.forward_source import NOT_ARMED
from hdi_callback.record import Alert, LayerRecord, Record
from tests.dashboards.synthetic import CODE, TO_DO, collapsing, facts_of

FACTS = [{"name": "a"}, {"name": "b"}]


def record(step=0, *, values=None, **changes) -> Record:
    values = {"hdi": 0.9, "hdi_worst_alignment": 0.25} if values is None else values
    layers = {name: LayerRecord(dict(values), {"worst_alignment_pair": [1, 3]}) for name in "ab"}
    return Record(step, layers, **changes)


def alert(step=0, status="new", level="warning", rule="worst pair", layer="a") -> Alert:
    return Alert(step, rule, level, {layer: (1, 3)}, f"heads 1 and 3 of {layer} are nearly one head", "write this",
                 status=status)  # fmt: skip


@pytest.mark.parametrize(
    ("records", "layers", "said"),
    [
        ([], [], "no attention layer is watched"),
        ([], FACTS, "there is no reading yet"),
        ([record(5, values={})], FACTS, "no layer was measured at step 5"),
        ([record(values={"trains": 1.0})], FACTS, "no layer was measured"),
        ([record(values={"hdi": math.nan})], FACTS, "no layer was measured"),
        ([record(values={}, absent={"key weights": "sharded"})], FACTS, r"no layer was measured at step 0 \(sharded\)"),
    ],
)
def test_a_run_that_measured_nothing_is_nothing_to_judge(records, layers, said):
    found = verdict(records, layers)
    assert found.state == "nothing to judge"
    assert re.search(said, found.text)
    assert found.text.startswith("Nothing to judge: ")
    assert "alert" not in found.text


def test_a_run_without_alerts_names_its_closest_pair():
    found = verdict([record(0), record(50)], FACTS)
    assert (found.state, found.alert) == ("clear", None)
    assert found.text == (
        "No alert in 2 readings of 2 layers. The two closest are heads 1 and 3 of a, with alignment 0.25 "
        "(0 chance, 1 the same head)."
    )


def test_a_change_of_what_attention_computes_is_the_verdict_to_the_end_of_a_run():
    change = replace(alert(50, rule="contract change"), message="attention in a is so since step 50: dropout 0.9")
    found = verdict([record(0), record(50, alerts=(change,)), record(100), record(150)], FACTS)
    assert (found.state, found.alert.action) == ("alert", "write this")
    assert found.text == "Since step 50: attention in a is so since step 50: dropout 0.9."
    notice = replace(change, level="notice")
    assert verdict([record(50, alerts=(notice,)), record(100)], FACTS).state == "clear"


def test_layers_that_were_not_measured_are_named_beside_those_that_were():
    layers = {**record().layers, "b": LayerRecord(absent={"hdi": "its weights are computed"})}
    found = verdict([replace(record(), layers=layers)], FACTS)
    assert found.state == "clear"
    assert found.text.endswith("b was not measured at step 0 (its weights are computed).")


def test_an_active_alert_is_said_with_what_to_do():
    *records, last = collapsing(4, 6, 60, layer=2, pair=(1, 3))
    found = verdict([*records, last], facts_of(4, 6))
    assert (found.state, found.alert.action, found.alert.code) == ("alert", TO_DO, CODE)
    assert found.text.startswith("Since step 2000: heads 1 and 3 of model.layers.2.self_attn are nearly one head")


def test_the_most_serious_of_several_alerts_is_said_and_notices_are_none():
    active = (alert(10, level="notice", rule="n"), alert(20), alert(30, level="critical", layer="b"))
    found = verdict([record(50, active=active)], FACTS)
    assert found.text == "2 alerts are active. The first: since step 30: heads 1 and 3 of b are nearly one head."
    assert verdict([record(50, active=active[:1])], FACTS).state == "clear"


def test_alerts_that_are_over_are_counted():
    records = [record(0, alerts=(alert(0),)), record(10, alerts=(alert(10, "resolved"),)), record(20)]
    assert verdict(records, FACTS).text.startswith("No active alert in 3 readings")
    assert verdict(records, FACTS).text.endswith("1 earlier alert is over.")


def test_an_audit_says_no_step():
    clear, bad = record(), record(active=(alert(),))
    assert verdict([clear], FACTS, is_audit=True).text.startswith("Nothing unusual in 2 layers. The two closest")
    assert verdict([bad], FACTS, is_audit=True).text == "heads 1 and 3 of a are nearly one head."


def test_an_event_is_one_row_from_its_beginning_to_its_end():
    records = [
        record(0, alerts=(alert(0), alert(0, layer="b"))),
        record(10, alerts=(alert(10, "worse", "critical"),)),
        record(20, alerts=(alert(20, "resolved", "critical"),)),
        record(30, alerts=(alert(30),)),
        record(40, alerts=(alert(40, "resolved", layer="b"),)),
    ]
    assert [(event.step, event.level, event.layers, state(event)) for event in events(records)] == [
        (0, "critical", ("a",), "resolved at step 20"),
        (0, "warning", ("b",), "resolved at step 40"),
        (30, "warning", ("a",), "active"),
    ]


def test_key_heads_are_called_so_where_heads_share_their_keys():
    facts = [{"name": name, "num_heads": 8, "num_key_heads": 4} for name in "ab"]
    assert "The two closest are key heads 1 and 3 of a" in verdict([record()], facts).text


def test_what_is_urgent_began_or_got_worse_and_is_no_notice():
    notice, warning, worse = alert(0, level="notice"), alert(10, "worse"), alert(20, "worse", "critical")
    over = alert(30, "resolved", "critical")
    assert urgent_of((notice, warning, worse, over)) == [warning, worse]


NO_FORWARD = {"attention rows": NOT_ARMED, "head outputs": NOT_ARMED}


def test_what_was_not_read_is_part_of_the_verdict_also_of_the_last_reading_which_has_no_forward():
    during, last = record(0), record(4, is_last=True)
    during.layers["b"].absent["attention rows"] = "its heads are computed one after the other"
    for layer in last.layers.values():
        layer.absent.update(NO_FORWARD)
    said = " Attention rows were not read in 1 of 2 layers (its heads are computed one after the other)."
    assert said in verdict([during, last], FACTS).text
    assert said in verdict([replace(during, active=(alert(),))], FACTS).text
    assert "not read" not in verdict([record(0), last], FACTS).text
