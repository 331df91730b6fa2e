"""TensorBoard: curves, two pictures, alerts as text."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from hdi_callback.dashboards.pictures import Pictures
from hdi_callback.dashboards.tags import ALERTS, curves
from hdi_callback.record import Alert, Record


class TensorBoard:
    """Writes a run to TensorBoard."""

    name = "writing to TensorBoard"

    def __init__(self, writer: Any, metrics: Sequence[str] = (), past: Sequence[Record] = ()) -> None:
        self._writer, self._metrics = writer, metrics
        self._pictures = Pictures(past)

    def open(self, layers: Sequence[Mapping[str, Any]]) -> None:
        """Take the facts of the layers."""
        self._pictures.open(layers)

    def write(self, record: Record) -> None:
        """Write one record."""
        self._add_scalars(curves(record, self._metrics), record.step)
        lines = [_as_text(alert) for alert in record.alerts]
        lines += [f"**{action.name}**: {action.message}" for action in record.actions]
        if lines:
            self._writer.add_text(ALERTS, "\n\n".join(lines), record.step)
        for tag, picture in self._pictures.add(record).items():
            self._writer.add_image(tag, picture, record.step, dataformats="HWC")

    def _add_scalars(self, points: Mapping[str, float], step: int) -> None:
        """Write the points of all curves as one event, where the writer has a file of events."""
        if not hasattr(self._writer, "_get_file_writer"):
            for tag, value in points.items():
                self._writer.add_scalar(tag, value, step)
            return
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in points.items()]
        self._writer._get_file_writer().add_summary(Summary(value=values), step)

    def close(self) -> None:
        """Write out what is buffered."""
        self._writer.flush()


def _as_text(alert: Alert) -> str:
    """An alert in Markdown; its code keeps its lines."""
    action = f"\n\n{alert.action}." if alert.action else ""
    action += f"\n\n{textwrap.indent(alert.code, '    ')}" if alert.code else ""
    return f"**{alert.status}, {alert.level}**: {alert.message}{action}"
