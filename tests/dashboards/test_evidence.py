"""What is drawn as the evidence of an alert: the numbers of the reading, read back from the figure."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from matplotlib.colors import to_hex

from hdi_callback.dashboards.names import EVIDENCE
from hdi_callback.dashboards.pictures import ACCUSED, OTHERS, Patterns, Pictures, draw_evidence
from hdi_callback.dashboards.report import write_report
from hdi_callback.record import Alert, LayerRecord, Record
from tests.dashboards.synthetic import facts_of, write

NAMES = [facts["name"] for facts in facts_of(3, 4)]


def leaking(readings: int = 12, at: int = 8, heads=(1, 2), layers: int = 3) -> list[Record]:
    """Readings in which later tokens are seen by two heads of the second layer."""
    records, active = [], ()
    for reading in range(readings):
        shares = {name: [0.0] * 4 for name in (facts["name"] for facts in facts_of(layers, 4))}
        if reading >= at:
            shares[NAMES[1]] = [0.3 + 0.1 * head if head in heads else 0.0 for head in range(4)]
        measured = {
            name: LayerRecord(
                {"attention_ahead": max(share), "hdi_worst_alignment": 0.1, "hdi": 0.9}, {"attention_ahead": share}
            )
            for name, share in shares.items()
        }
        alerts = ()
        if reading == at:
            alerts = active = (
                Alert(
                    10 * at, "later tokens", "critical", {NAMES[1]: heads}, "later tokens are seen", value=0.5,
                    threshold=0.001, metric="attention_ahead", since=10 * at - 5,
                ),
            )  # fmt: skip
        records.append(Record(10 * reading, measured, alerts=alerts, active=active, is_last=reading == readings - 1))
    return records


def of_colour(panel, colour) -> list[list[float]]:
    return [
        list(line.get_ydata())
        for line in panel.lines
        if to_hex(line.get_color()) == colour and len(line.get_ydata()) > 2
    ]


def test_the_accused_number_is_drawn_over_the_steps_with_the_other_layers_in_grey_and_the_onset_marked():
    records = leaking()
    (alert,) = records[8].alerts
    figure = draw_evidence(alert, records)
    panel = figure.axes[0]
    assert of_colour(panel, ACCUSED) == [[record.layers[NAMES[1]].values["attention_ahead"] for record in records[:9]]]
    assert of_colour(panel, OTHERS) == [[0.0] * 9] * 2
    assert [line.get_xdata()[0] for line in panel.lines if line.get_linestyle() == ":"] == [75]
    assert panel.collections[-1].get_offsets().tolist() == [[80, pytest.approx(0.5)]]


def test_heads_that_are_accused_have_a_panel_of_their_own_with_the_others_in_grey():
    records = leaking()
    (alert,) = records[8].alerts
    _, panel = draw_evidence(alert, records).axes
    assert panel.get_title(loc="left").startswith("red: heads 1, 2; grey: others of")
    expected = [[0.0] * 8 + [0.3 + 0.1 * head] for head in (1, 2)]
    np.testing.assert_allclose(of_colour(panel, ACCUSED), expected, rtol=1e-6)
    assert len(of_colour(panel, OTHERS)) == 2


def with_patterns(records: list[Record]) -> list[Record]:
    """Rows in which a query sees itself alone, from the fault on the next one; every other query is sampled."""
    patterns = [torch.eye(32).roll(shift, 1).expand(4, 32, 32).clone() for shift in (0, 1)]
    for place, record in enumerate(records[:-1]):
        pattern = patterns[place >= 8]
        pattern[:, 1::2] = math.nan
        record.layers[NAMES[1]].matrices["attention_pattern"] = pattern
    return records


def test_the_pattern_of_each_accused_head_is_drawn_before_the_alert_began_and_at_it():
    *records, _ = with_patterns(leaking())
    kept = Patterns()
    for record in records:
        kept.add(record)
    (alert,) = records[8].alerts
    assert list(kept.around(alert)) == [70, 80], "the reading before step 75, at which it began, and that of the alert"
    figure = draw_evidence(alert, records, kept.around(alert))
    pictures = {panel.get_title(loc="left"): panel.images[0].get_array() for panel in figure.axes if panel.images}
    assert list(pictures) == ["head 1, step 70", "head 2, step 70", "head 1, step 80", "head 2, step 80"]
    before, after = (torch.eye(32).roll(shift, 1)[::2].numpy() for shift in (0, 1))
    for title, table in pictures.items():
        expected = before if "70" in title else after
        np.testing.assert_array_equal(table, expected[:, : table.shape[1]], title)


def test_the_first_heads_are_shown_where_a_whole_layer_is_accused_and_none_of_key_heads():
    *records, _ = with_patterns(leaking(heads=(1, 3)))
    kept = Patterns()
    for record in records:
        kept.add(record)
    (alert,) = records[8].alerts
    of_layer = replace(alert, where={NAMES[1]: ()})
    figure = draw_evidence(of_layer, records, kept.around(of_layer))
    titles = [panel.get_title(loc="left") for panel in figure.axes if panel.images]
    assert titles[:3] == ["head 0, step 70", "head 1, step 70", "head 2, step 70"]
    assert kept.around(replace(alert, unit="key heads")) == {}


def test_a_history_keeps_the_patterns_of_what_an_alert_accuses_and_the_report_draws_them(tmp_path):
    run = write(tmp_path / "hdi" / "history.jsonl", facts_of(3, 4), iter(with_patterns(leaking())))
    of_layers = run.matrices(80)
    assert {name: set(matrices) for name, matrices in of_layers.items()} == {
        NAMES[1]: {"attention_pattern_70", "attention_pattern_80"}
    }
    assert torch.equal(of_layers[NAMES[1]]["attention_pattern_70"][0, ::2], torch.eye(32)[::2])
    page = write_report(run).read_text()
    assert "head 1, step 70" in page
    assert "head 2, step 80" in page


def test_the_heads_of_frozen_weights_are_drawn_by_their_own_movement():
    moves = [[0.01, 0.02, 0.01], [0.01, 0.0, 0.02], [0.01, 0.0, 0.01]]
    records = [
        Record(step, {"a": LayerRecord({"head_movement_min": min(move)}, {"head_movement": move})})
        for step, move in enumerate(moves)
    ]
    alert = Alert(2, "frozen weights", "warning", {"a": (1,)}, "", value=0.0, threshold=0.0, metric="head_movement_min")
    _, panel = draw_evidence(alert, records).axes
    np.testing.assert_allclose(of_colour(panel, ACCUSED), [[0.02, 0.0, 0.0]], rtol=1e-6)


def test_each_of_many_layers_has_its_curve():
    records = leaking(layers=40)
    (alert,) = records[8].alerts
    panel = draw_evidence(alert, records).axes[0]
    assert len(of_colour(panel, OTHERS)) == 39


def test_an_alert_without_a_number_that_was_read_has_no_evidence():
    records = leaking()
    (alert,) = records[8].alerts
    assert draw_evidence(Alert(80, "own", "warning", {NAMES[1]: ()}, ""), records) is None
    assert draw_evidence(Alert(80, "own", "warning", {"gone": ()}, "", metric="attention_ahead"), records) is None
    assert draw_evidence(alert, []) is None


def test_it_is_drawn_at_the_alert_however_short_the_share_of_time_is(monkeypatch):
    clock = SimpleNamespace(monotonic=iter(range(0, 10**9, 1000)).__next__)
    monkeypatch.setattr("hdi_callback.dashboards.pictures.time", clock)
    pictures = Pictures()
    drawn = [pictures.add(record) for record in leaking()]
    assert [f"{EVIDENCE}/later_tokens" in at for at in drawn] == [False] * 8 + [True] + [False] * 3


def test_a_number_that_is_not_finite_leaves_a_gap():
    values = [0.1, math.nan, 0.3, 0.5]
    records = [Record(step, {"a": LayerRecord({"attention_ahead": value})}) for step, value in enumerate(values)]
    alert = Alert(3, "later tokens", "critical", {"a": ()}, "", metric="attention_ahead")
    panel = draw_evidence(alert, records).axes[0]
    (curve,) = of_colour(panel, ACCUSED)
    assert math.isnan(curve[1])
    assert curve[2:] == [0.3, 0.5]


def test_the_report_draws_the_same_evidence(tmp_path):
    run = write(tmp_path / "hdi" / "history.jsonl", facts_of(3, 4), iter(leaking()))
    assert 'aria-label="Evidence of step 80, critical: later tokens"' in write_report(run).read_text()
