"""What loggers get of a run: curves; TensorBoard and W&B also pictures and alerts."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from hdi_callback.checks import joined_name
from hdi_callback.dashboards.names import ALERTS, all_tags, curves
from hdi_callback.dashboards.pictures import Pictures
from hdi_callback.dashboards.verdict import urgent_of
from hdi_callback.record import Alert, Record

Layers = Sequence[Mapping[str, Any]]  # their facts
Records = Sequence[Record]
_STEP = "hdi/step"
_LEVELS = {"warning": "WARN", "critical": "ERROR"}


class Curves:
    """Gives the curves of a run to a function, such as the `log_metrics` of a logger."""

    name = "logging"
    is_thread_safe = False

    def __init__(self, target: Any, layers: Layers = (), metrics: Sequence[str] = (), past: Records = ()) -> None:
        self._target, self._metrics, self._pictures = target, metrics, Pictures(layers, past)

    def write(self, record: Record) -> None:
        """Log one record."""
        self._target(curves(record, self._metrics), record.step)

    def close(self) -> None:
        """Write out what is buffered."""


class TensorBoard(Curves):
    """Writes a run to TensorBoard: curves, pictures, alerts as text."""

    name = "writing to TensorBoard"
    is_thread_safe = True  # its writer has a queue of events

    def write(self, record: Record) -> None:
        """Write one record."""
        self._write_curves(curves(record, self._metrics), record.step)
        lines = [_as_markdown(alert) for alert in record.alerts]
        lines += [f"**{action.name}**: {action.message}" for action in record.actions]
        if lines:
            self._target.add_text(ALERTS, "\n\n".join(lines), record.step)
        for tag, picture in self._pictures.add(record).items():
            self._target.add_image(tag, picture, record.step, dataformats="HWC")

    def close(self) -> None:
        """Write out what is buffered."""
        self._target.flush()

    def _write_curves(self, values: Mapping[str, float], step: int) -> None:
        """Write all curves as one event, as each event wakes the thread of the writer."""
        from tensorboard.compat.proto.summary_pb2 import Summary
        from torch.utils.tensorboard import SummaryWriter

        if getattr(type(self._target), "add_scalar", None) is SummaryWriter.add_scalar and self._target.file_writer:
            together = Summary(value=[Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()])
            self._target.file_writer.add_summary(together, step)
        else:
            for tag, value in values.items():
                self._target.add_scalar(tag, value, step)


class Wandb(Curves):
    """Logs a run to W&B: curves with their extremes, pictures, and alerts by mail or chat.

    A reading is added to the row of `wandb.log` that is open, and has an axis of its own, ``hdi/step``: a row of our
    own would move W&B's step on, which then drops rows that a training logs with an explicit step.
    """

    name = "logging to W&B"

    def __init__(self, target: Any, layers: Layers = (), metrics: Sequence[str] = (), past: Records = ()) -> None:
        super().__init__(target, layers, metrics, past)
        self._open_row: int | None = None
        target.define_metric(_STEP, hidden=True)
        # By their full names: the "*" of Lightning's logger counts before a pattern. A dot that is not escaped is a
        # path of nested values (wandb issue 8445).
        for tag in all_tags([facts["name"] for facts in layers], self._metrics):
            if "*" not in tag:
                target.define_metric(tag.replace(".", "\\."), step_metric=_STEP, summary="min,max,last")

    def write(self, record: Record) -> None:
        """Log one record, and send its new alerts."""
        import wandb

        self.close()
        row: dict[str, Any] = {_STEP: record.step, **curves(record, self._metrics)}
        for tag, picture in self._pictures.add(record).items():
            row[tag] = wandb.Image(picture)
        self._target.log(row, commit=False)
        self._open_row = self._target.step
        for alert in urgent_of(record.alerts):
            title = f"Attention heads: {alert.rule} in {joined_name(alert.layers)}"
            text = f"step {alert.step} (hdi explain {alert.rule}): {alert.message}\n{alert.remedy}"
            self._target.alert(title, text, level=_LEVELS[alert.level], wait_duration=1)  # 0 would be a minute

    def close(self) -> None:
        """Commit the last row, unless somebody else has logged since."""
        if self._open_row == self._target.step:
            self._target.log({}, commit=True)


def sink_for(target: Any, layers: Layers = (), metrics: Sequence[str] = (), past: Records = ()) -> Curves:
    """Return the sink of a Lightning logger, a `SummaryWriter`, a W&B run, a function, or what has `log_metrics`."""
    run = getattr(target, "experiment", target)
    if hasattr(run, "add_image"):
        return TensorBoard(run, layers, metrics, past)
    if hasattr(run, "define_metric") and hasattr(run, "alert"):
        return Wandb(run, layers, metrics, past)
    if not hasattr(target, "log_metrics"):
        return Curves(target, layers, metrics)
    return Curves(lambda values, step: target.log_metrics(values, step=step), layers, metrics)


def _as_markdown(alert: Alert) -> str:
    """Return an alert with its code as lines of their own."""
    action = f"\n\n{alert.action}." if alert.action else ""
    action += f"\n\n{textwrap.indent(alert.code, '    ')}" if alert.code else ""
    return f"**{alert.status}, {alert.level}** (hdi explain {alert.rule}): {alert.message}{action}"
