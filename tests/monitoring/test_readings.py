from __future__ import annotations

import math

import pytest
import torch

from hdi_callback.core import head_covariance, head_diversity
from hdi_callback.monitoring.metrics import COVARIANCE
from hdi_callback.monitoring.readings import LayerRecord, Measurement, Reading, Readout, Record
from tests.skips import NEEDS_GPU


def reading(device: str = "cpu") -> Reading:
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(2, 4, 8, 32, generator=generator).to(device)
    outputs, output_weight = torch.randn(40, 4, 8, generator=generator), torch.randn(4, 8, 32, generator=generator)
    covariance = head_covariance(outputs.to(device), output_weight.to(device), lengths=[10] * 4)
    batched = type(covariance)(**{name: value[None] for name, value in vars(covariance).items()})
    return Reading(
        7,
        ("a", "b", "c"),
        (Measurement(("c", "a"), "key", head_diversity(weights)), Measurement(("a",), COVARIANCE, batched)),
        {"b": "cannot be read"},
        epoch=1,
        axis=14,
    )


def test_a_record_has_the_numbers_of_its_reading_in_model_order():
    source = reading()
    record = source.record()
    key, outputs = (measurement.values for measurement in source.measurements)
    assert (record.step, record.epoch, record.axis) == (7, 1, 14)
    assert list(record.layers) == ["a", "b", "c"]
    assert record.layers["c"].values["hdi"] == float(key.index[0])
    assert record.layers["a"].values["hdi"] == float(key.index[1])
    assert record.layers["a"].values["head_correlation"] == float(outputs.correlation[0])
    assert record.layers["a"].arrays["worst_pair"] == key.worst_pair[1].tolist()
    assert record.layers["a"].arrays["rank"] == [8, 8, 8, 8]
    assert torch.equal(record.layers["c"].matrices["overlap"], key.overlap[0])
    assert record.layers["b"] == LayerRecord()
    assert record.absent == {"b": "cannot be read"}


def test_the_number_of_dead_heads_is_absent_for_non_finite_weights():
    weights = torch.randn(2, 4, 8, 32, generator=torch.Generator().manual_seed(0))
    weights[0, 1, 0, 0], weights[1, 2] = math.nan, 0
    record = Reading(0, ("a", "b"), (Measurement(("a", "b"), "key", head_diversity(weights)),)).record()
    assert record.absent == {"hdi/a": "the weights are not finite"}
    assert "hdi_dead_heads" not in record.layers["a"].values
    assert record.layers["b"].values["hdi_dead_heads"] == 1


def test_scalars_leave_out_what_is_absent():
    tags = reading().record().scalars(["hdi", "head_covariance"])
    assert set(tags) == {"hdi/a", "hdi/c", "hdi/mean", "hdi/min", "head_covariance/a"}
    assert all(math.isfinite(value) for value in tags.values())


def test_a_record_without_an_index_has_no_summary():
    assert Record(0, {"a": LayerRecord(values={"head_covariance": 1.0})}).scalars(["hdi", "head_covariance"]) == {
        "head_covariance/a": 1.0
    }


def test_a_reading_on_the_cpu_is_ready_at_once():
    readout = Readout(reading())
    assert readout.is_ready()
    assert readout.record().scalars(["hdi"]) == reading().record().scalars(["hdi"])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason=NEEDS_GPU)
def test_the_readout_on_a_gpu_does_not_wait_and_has_the_same_numbers():
    source = reading("cuda")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        readout = Readout(source)
        readout.is_ready()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert readout.record().scalars(["hdi"]) == pytest.approx(reading().record().scalars(["hdi"]), abs=1e-6)


def test_the_worst_layer_comes_first_and_is_named():
    layers = {
        name: LayerRecord({"hdi": 1 - align, "hdi_alignment": align, "attention_entropy_min": align})
        for name, align in (("a", 0.1), ("b", 0.4), ("c", 0.2))
    }
    record = Record(0, {**layers, "d": LayerRecord()})
    metrics = ["hdi", "hdi_alignment", "attention_entropy_min", "head_covariance"]
    tags = record.scalars(metrics)
    assert list(tags)[:4] == ["hdi/mean", "hdi/min", "hdi_alignment/max", "attention_entropy_min/min"]
    assert tags["hdi_alignment/max"] == tags["hdi_alignment/b"] == 0.4
    assert tags["attention_entropy_min/min"] == 0.1
    assert record.worst(metrics) == {"hdi_alignment/max": "b", "attention_entropy_min/min": "a"}
    assert Record(0, {"d": LayerRecord()}).worst(metrics) == {}
