"""Real event files, read back by TensorBoard's own reader."""

from __future__ import annotations

import io

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader
from torch.utils.tensorboard import SummaryWriter

from hdi_callback.dashboards import Curves, TensorBoard, sink_for
from hdi_callback.dashboards.names import all_tags, curves
from tests.dashboards.synthetic import collapsing, facts_of


def test_the_event_file_has_the_curves_two_pictures_and_one_text_for_one_event(tmp_path):
    from PIL import Image

    writer = SummaryWriter(str(tmp_path))
    facts = facts_of(12, 12)
    sink = TensorBoard(writer, facts)
    records = list(collapsing(12, 12, 20, layer=7, pair=(1, 3)))
    for record in records:
        sink.write(record)
    sink.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    tags = events.Tags()
    assert sorted(tags["scalars"]) == sorted(all_tags([one["name"] for one in facts]))
    assert len(tags["scalars"]) == 42
    for tag in tags["scalars"]:
        points = events.Scalars(tag)
        assert [point.step for point in points] == [record.step for record in records]
        assert [point.value for point in points] == pytest.approx([curves(record)[tag] for record in records], abs=1e-6)
    assert sorted(tags["images"]) == ["hdi/evidence/worst_pair", "hdi/heads", "hdi/map"]
    last = events.Images("hdi/map")[-1]
    assert last.step == records[-1].step
    assert np.asarray(Image.open(io.BytesIO(last.encoded_image_string))).shape[-1] == 3
    (text,) = events.Tensors("hdi/alerts/text_summary")
    words = text.tensor_proto.string_val[0].decode()
    assert words.startswith("**new, warning** (hdi explain worst pair): heads 1 and 3 of model.layers.7.self_attn are")
    assert "    interventions=[ReviveHeads()]\n" in words


def test_a_reading_is_one_event_but_for_a_writer_with_an_add_scalar_of_its_own(tmp_path):
    class Doubling(SummaryWriter):
        def add_scalar(self, tag, scalar_value, *args, **kwargs):
            super().add_scalar(tag, 2 * scalar_value, *args, **kwargs)

    (record,) = collapsing(2, 4, 1, layer=1, pair=(1, 3))
    expected = curves(record)
    for kind, factor, count in ((SummaryWriter, 1, 1), (Doubling, 2, len(expected))):
        sink = TensorBoard(kind(str(tmp_path / kind.__name__)))
        sink.write(record)
        sink.close()
        (file,) = (tmp_path / kind.__name__).iterdir()
        events = [event.summary.value for event in LegacyEventFileLoader(str(file)).Load()]
        events = [[value for value in event if value.HasField("simple_value")] for event in events]
        written = {value.tag: value.simple_value for event in events for value in event}
        assert written == pytest.approx({tag: factor * value for tag, value in expected.items()}, rel=1e-6)
        assert sum(map(bool, events)) == count


def test_metrics_that_are_asked_for_have_curves_too(tmp_path):
    writer = SummaryWriter(str(tmp_path))
    sink = TensorBoard(writer, metrics=["hdi_alignment"])
    for record in collapsing(2, 4, 2, layer=1, pair=(1, 3)):
        sink.write(record)
    sink.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert "hdi/per_layer/hdi_alignment/model.layers.0.self_attn" in events.Tags()["scalars"]


def test_any_other_logger_gets_the_curves_at_their_own_step():
    class Logger:
        experiment = object()

        def __init__(self):
            self.logged = []

        def log_metrics(self, metrics, step=None):
            self.logged.append((step, metrics))

    logger = Logger()
    sink = sink_for(logger)
    assert isinstance(sink, Curves)
    records = list(collapsing(2, 4, 3, layer=1, pair=(1, 3)))
    for record in records:
        sink.write(record)
    assert logger.logged == [(record.step, curves(record)) for record in records]


def test_the_tensorboard_logger_of_lightning_gets_the_same(tmp_path):
    from lightning.pytorch.loggers import TensorBoardLogger

    assert isinstance(sink_for(TensorBoardLogger(tmp_path)), TensorBoard)
