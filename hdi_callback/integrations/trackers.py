"""What a transformers `Trainer` reports to, and how the curves of heads get there."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from types import FrameType
from typing import Any

from hdi_callback.dashboards import Curves, TensorBoard, Wandb
from hdi_callback.guard import warn
from hdi_callback.record import Record, Sink

Log = Callable[[dict[str, float], int], object]
"""Takes the curves of a reading, and its step: ``accelerator.log``, ``fabric.log_dict``, ``mlflow.log_metrics``."""

LOGS: dict[str, Callable[[Any], Log | None]] = {
    "MLflowCallback": lambda own: own._ml_flow.log_metrics,
    "CometCallback": lambda own: (
        own._experiment and (lambda values, step: own._experiment.log_metrics(values, step=step))
    ),
    "SwanLabCallback": lambda own: own._swanlab.log,
    # The trainer gives no step either, and its axis of its own.
    "TrackioCallback": lambda own: lambda values, step: own._trackio.log({**values, "train/global_step": step}),
    "DVCLiveCallback": lambda own: (
        lambda values, step: [own.live.log_metric(tag, value, plot=True) for tag, value in values.items()]
    ),
    "ClearMLCallback": lambda own: (
        lambda values, step: [
            own._clearml_task.get_logger().report_scalar("hdi", tag, value, step) for tag, value in values.items()
        ]
    ),
}
"""Name of a class of transformers that reports -> the function of its present run that takes curves."""

_SILENT = {"codecarbon"}  # it takes no curves, the trainer's own neither


def trainers_callbacks() -> Sequence[Any]:
    """Return all callbacks of the trainer that calls this one, from the call stack: no callback is given the others."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        handler = frame.f_locals.get("self") if frame.f_code.co_name == "call_event" else None
        if isinstance(callbacks := getattr(handler, "callbacks", None), list):
            return callbacks
        frame = frame.f_back
    return ()


def tracker_sinks(
    callbacks: Iterable[Any], wanted: Sequence[str], metrics: Sequence[str], past: Sequence[Record]
) -> list[Sink]:
    """Return a sink for each run that the trainer reports to; warn of names in ``report_to`` that get no curves."""
    from transformers.integrations import integration_utils

    names = {kind.__name__: name for name, kind in integration_utils.INTEGRATION_TO_CALLBACK.items()}
    sinks: list[Sink] = []
    without = set(wanted)
    for callback in callbacks:
        kinds = [kind.__name__ for kind in type(callback).__mro__]
        reporter = next((kind for kind in kinds if kind in names), "")
        log = next((LOGS[kind](callback) for kind in kinds if kind in LOGS), None)
        run = getattr(sys.modules.get("wandb"), "run", None) if reporter == "WandbCallback" else None
        before = len(sinks)
        if reporter == "TensorBoardCallback" and callback.tb_writer is not None:
            sinks.append(TensorBoard(callback.tb_writer, metrics, past=past))
        elif run is not None:
            sinks.append(Wandb(run, metrics, past=past))
        elif log is not None:
            sinks.append(Curves(log, metrics))
        if reporter:
            (without.discard if len(sinks) > before else without.add)(names[reporter])
    for name in sorted(without - _SILENT):
        warn(
            f"{name} gets no curves of heads: write HDITrainerCallback(log=...), a function of a dictionary and a step."
        )
    return sinks
