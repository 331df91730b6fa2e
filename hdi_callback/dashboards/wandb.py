"""Weights & Biases: curves with their extremes, two pictures, a table of alerts, and alerts by mail or chat."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hdi_callback.dashboards.layer_table import name_layers
from hdi_callback.dashboards.pictures import Pictures
from hdi_callback.dashboards.tags import all_tags, curves
from hdi_callback.dashboards.verdict import becomes_warning
from hdi_callback.record import Alert, Record

_STEP = "hdi/step"
_LEVELS = {"warning": "WARN", "critical": "ERROR"}
_COLUMNS = ("step", "level", "status", "rule", "layers", "message", "what to do now", "code")


class Wandb:
    """Logs a run to W&B.

    A reading is added to the row of `wandb.log` that is open, and has an axis of its own, ``hdi/step``: a row of our
    own would move W&B's step on, which then drops rows that a training logs with an explicit step.
    """

    name = "logging to W&B"

    def __init__(self, run: Any, metrics: Sequence[str] = (), past: Sequence[Record] = ()) -> None:
        self._run, self._metrics = run, metrics
        self._pictures = Pictures(past)
        self._alerts = [alert for record in past for alert in record.alerts]
        self._open_row: int | None = None

    def open(self, layers: Sequence[Mapping[str, Any]]) -> None:
        """Define the axis of the curves, and their extremes in the summary of the run."""
        self._pictures.open(layers)
        self._run.define_metric(_STEP, hidden=True)
        # By their full names: the "*" of Lightning's logger counts before a pattern. A dot that is not escaped is a
        # path of nested values (wandb issue 8445).
        for tag in all_tags([facts["name"] for facts in layers], self._metrics):
            if "*" not in tag:
                self._run.define_metric(tag.replace(".", "\\."), step_metric=_STEP, summary="min,max,last")

    def write(self, record: Record) -> None:
        """Log one record, and send its new alerts."""
        import wandb

        if self._open_row == self._run.step:  # nobody else has logged since
            self._run.log({}, commit=True)
        row: dict[str, Any] = {_STEP: record.step, **curves(record, self._metrics)}
        for tag, picture in self._pictures.add(record).items():
            row[tag] = wandb.Image(picture)
        urgent = [alert for alert in record.alerts if becomes_warning(alert, self._alerts)]
        self._alerts += record.alerts
        if self._alerts and (record.alerts or record.is_last):
            rows: list[Iterable[Any]] = [_table_row(alert) for alert in self._alerts]
            row["hdi/alert_table"] = wandb.Table(columns=list(_COLUMNS), data=rows)
        self._run.log(row, commit=False)
        self._open_row = self._run.step
        for alert in urgent:
            title = f"Attention heads: {alert.rule} in {name_layers(alert.layers)}"
            text = f"step {alert.step}: {alert.message}\n{alert.remedy}"
            self._run.alert(title, text, level=_LEVELS[alert.level], wait_duration=1)  # 0 would be a minute

    def close(self) -> None:
        """Commit the last row."""
        if self._open_row == self._run.step:
            self._run.log({}, commit=True)


def _table_row(alert: Alert) -> list[Any]:
    words = alert.level, alert.status, alert.rule, name_layers(alert.layers), alert.message, alert.action, alert.code
    return [alert.step, *words]
