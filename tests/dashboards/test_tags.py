from __future__ import annotations

from dataclasses import replace

import pytest

from hdi_callback.dashboards.names import MODEL_CURVES, all_tags, curves
from hdi_callback.record import Alert, LayerRecord, Record
from tests.dashboards.synthetic import collapsing, facts_of


@pytest.mark.parametrize(("layers", "tags"), [(12, 42), (48, 150)])
def test_a_model_has_six_curves_and_each_layer_three(layers, tags):
    (record,) = collapsing(layers, 4, 1, layer=2, pair=(1, 3))
    names = [facts["name"] for facts in facts_of(layers, 4)]
    points = curves(record)
    assert len(points) == tags
    assert set(points) == set(all_tags(names))
    assert {tag.split("/")[0] for tag in points} == {"hdi"}


def test_the_curves_of_the_model_are_the_extremes_and_the_mean_of_its_layers():
    layers = {
        "a": LayerRecord({"hdi": 0.9, "hdi_worst_alignment": 0.1, "hdi_alignment": 0.05, "head_covariance": -1.0}),
        "b": LayerRecord({"hdi": 0.5, "hdi_worst_alignment": 0.7, "hdi_alignment": 0.3, "head_covariance": 2.0}),
    }
    active = tuple(Alert(0, "r", level, {"a": ()}, "m") for level in ("notice", "warning", "critical"))
    points = curves(Record(0, layers, active=active))
    assert {tag: points[tag] for tag in MODEL_CURVES} == {
        "hdi/mean": 0.7, "hdi/min": 0.5, "hdi/closest_pair": 0.7, "hdi/alignment": 0.3, "hdi/covariance": 2.0,
        "hdi/alerts": 2,
    }  # fmt: skip
    assert points["hdi/per_layer/worst_alignment/b"] == 0.7


def test_what_was_not_measured_is_absent():
    assert curves(Record(0, {"a": LayerRecord({"circuit_qk_norm": 0.2})})) == {"hdi/alerts": 0}


def test_a_metric_asked_for_by_name_is_in_the_tags():
    record = Record(0, {"a": LayerRecord({"hdi": 0.9, "circuit_qk_norm": 0.2})})
    points = curves(record, ["circuit_qk_norm"])
    assert points["hdi/per_layer/circuit_qk_norm/a"] == 0.2
    assert curves(replace(record), ["hdi"]).keys() == curves(record).keys(), "no default curve is drawn twice"
