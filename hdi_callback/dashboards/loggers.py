"""The sink of a logger: TensorBoard, W&B, or any other one by its `log_metrics`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hdi_callback.dashboards.tags import curves
from hdi_callback.dashboards.tensorboard import TensorBoard
from hdi_callback.dashboards.wandb import Wandb
from hdi_callback.record import Record, Sink


class Curves:
    """Gives the curves of a run to a function, such as the `log_metrics` of a logger."""

    name = "logging"

    def __init__(self, log: Callable[[dict[str, float], int], object], metrics: Sequence[str] = ()) -> None:
        self._log, self._metrics = log, metrics

    def open(self, layers: Sequence[Mapping[str, Any]]) -> None:
        """Do nothing."""

    def write(self, record: Record) -> None:
        """Log one record."""
        self._log(curves(record, self._metrics), record.step)

    def close(self) -> None:
        """Do nothing."""


def sink_for(target: Any, metrics: Sequence[str] = (), past: Sequence[Record] = ()) -> Sink:
    """Return the sink of a Lightning logger, a `SummaryWriter`, a W&B run, a function, or what has `log_metrics`."""
    run = getattr(target, "experiment", target)
    if hasattr(run, "add_image"):
        return TensorBoard(run, metrics, past)
    if hasattr(run, "define_metric") and hasattr(run, "alert"):
        return Wandb(run, metrics, past)
    if not hasattr(target, "log_metrics"):
        return Curves(target, metrics)
    return Curves(lambda values, step: target.log_metrics(values, step=step), metrics)
