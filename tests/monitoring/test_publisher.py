"""`Publisher`: what follows from a reading."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from hdi_callback.errors import MonitoringWarning
from hdi_callback.monitoring.alerts import Alerts, Finding, Rule
from hdi_callback.monitoring.interventions import ScaleLearningRate
from hdi_callback.monitoring.ranks.rendezvous import Rendezvous
from hdi_callback.monitoring.readings import AMBIGUOUS_MASK, LayerRecord, Reading, Readout, Record
from hdi_callback.monitoring.session.publisher import Publisher
from hdi_callback.monitoring.warn_once import WarnOnce


@pytest.mark.parametrize(
    ("names", "listed"), [(["a", "b.attn"], "`a`, `b.attn`"), (["a", "b", "c", "d"], "`a`, `b`, `c` and others")]
)
def test_layers_with_an_ambiguous_padding_mask_are_reported_once_with_three_names(names, listed):
    absent = {f"head_covariance/{name}": AMBIGUOUS_MASK for name in names} | {"hdi/x": "its weights are not finite"}
    written: list[Any] = []
    sink = SimpleNamespace(name="a sink", write=lambda result: written.append(result.record.step))
    publisher = Publisher(None, None, (), [cast("Any", sink)], Rendezvous(None), lambda _: None, WarnOnce())
    with pytest.warns(MonitoringWarning) as caught:
        for step in (0, 1):
            publisher.publish(cast("Readout", SimpleNamespace(record=lambda step=step: Record(step, {}, absent))))
    assert [str(one.message) for one in caught] == [f"Head outputs of {listed} are absent: {AMBIGUOUS_MASK}."]
    assert written == [0, 1]


def test_a_reading_whose_numbers_cannot_be_read_out_is_published_with_the_reason():
    class Broken(Readout):
        def record(self) -> Record:
            raise RuntimeError("the copy failed")

    published: list[Record] = []
    sink = SimpleNamespace(name="a sink", write=lambda result: published.append(result.record))
    publisher = Publisher(None, None, (), [cast("Any", sink)], Rendezvous(None), lambda _: None, WarnOnce())
    reading = Reading(7, ("attn",), (), epoch=1, axis=14)
    with pytest.warns(MonitoringWarning, match="reading out head diversity failed"):
        publisher.publish(Broken(reading))
    (record,) = published
    assert (record.step, record.epoch, record.axis, record.layers["attn"].values) == (7, 1, 14, {})
    assert record.absent == {"attn": "reading out head diversity failed"}


def test_an_intervention_ends_one_reading_late_if_the_ranks_could_not_agree_when_its_alert_ended():
    class Between(Rule):
        name = "between"

        def judge(self, series, active):
            return Finding("something") if 2 <= series.latest.step < 4 else None

    failing = [4]

    class Late(Rendezvous):
        def share(self, value: Any) -> Any:
            if step in failing:
                raise RuntimeError("a rank is late")
            return value

    scale, alerts = ScaleLearningRate(0.5), Alerts([Between()])
    scale.attach(cast("Any", SimpleNamespace(layers={}, optimizers=[])))
    publisher = Publisher(None, alerts, (scale,), (), Late(None), lambda _: None, WarnOnce())
    said, is_active = [], []
    with pytest.warns(MonitoringWarning, match="agreeing on interventions"):
        for step in range(7):
            record = Record(step, {"attn": LayerRecord({})})
            (result,) = publisher.publish(cast("Readout", SimpleNamespace(record=lambda record=record: record)))
            said += [action.message for action in result.actions]
            is_active.append(scale.is_active)
    assert is_active == [False, False, True, True, True, False, False]
    assert said == [
        "step 2, attn: ScaleLearningRate multiplied the learning rate by 0.5 (between: warning)",
        "step 5, attn: ScaleLearningRate restored the learning rate, as its alert is not active any more",
    ]
