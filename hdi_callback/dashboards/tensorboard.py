"""TensorBoard: one chart per metric with all layers in it, beside the curve of each layer; alerts as text and marks."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hdi_callback.monitoring.warn_once import attempt_each

if TYPE_CHECKING:
    from hdi_callback.monitoring.sink import Result

# The curve on which an alert is marked: the index, unless the rule judges pairs.
_MARKED = {"hdi_worst_alignment": "hdi_worst_pair", "hdi_energy_worst_alignment": "hdi_worst_pair"}


def lay_out_charts(writer: Any, metrics: Sequence[str], prefix: str = "") -> None:
    """Describe the page "Custom Scalars": for each metric one chart that holds the curves of all layers.

    Args:
        writer: a `torch.utils.tensorboard.SummaryWriter`.
        metrics: names of metrics.
        prefix: what stands before every tag.
    """
    charts = {
        metric: ["Multiline", [f"^{re.escape(prefix + metric)}/.*", f"^{re.escape(f'{prefix}alert/{metric}')}/.*"]]
        for metric in metrics
    }
    writer.add_custom_scalars({f"{prefix}head diversity": charts})


def write_alerts(writer: Any, result: Result, prefix: str = "") -> None:
    """Write alerts and interventions as text, and mark each alert on the curve that it is about.

    The text is under ``hdi_alerts`` and ``hdi_interventions``, the marks are scalars under ``alert/<metric>/<layer>``.

    Args:
        writer: a `torch.utils.tensorboard.SummaryWriter`.
        result: a reading and what came of it.
        prefix: what stands before every tag.
    """
    axis = result.record.axis
    writes: list[Callable[[], object]] = []
    if result.alerts:
        lines = [f"- **{'resolved' if item.is_resolved else item.level}** {item.message}" for item in result.alerts]
        writes.append(partial(writer.add_text, f"{prefix}hdi_alerts", "\n".join(lines), axis))
    if result.actions:
        lines = [f"- {item.message}" for item in result.actions]
        writes.append(partial(writer.add_text, f"{prefix}hdi_interventions", "\n".join(lines), axis))
    for alert in result.alerts:
        metric = _MARKED.get(alert.finding.metric or "", "hdi")
        value = result.record.layers[alert.layer].values.get(metric)
        if value is not None and alert.level != "notice" and not alert.is_resolved:
            writes.append(partial(writer.add_scalar, f"{prefix}alert/{metric}/{alert.layer}", value, axis))
    attempt_each(writes)


def place_board(folder: Path, state: Mapping[str, Any] | None) -> Path:
    """Choose the directory of a run: the one that it has begun, or one in which no other run has written.

    TensorBoard shows the event files of one directory as one run, so that of two runs in it one hides the other.

    Args:
        folder: the directory that one would like; further runs get ``<folder>-1``, ``<folder>-2``, ...
        state: what a checkpoint of the run keeps, with the directory under ``"tensorboard"``.

    Returns:
        The directory.
    """
    if state is not None:
        begun = Path(state["tensorboard"]) if state.get("tensorboard") else folder  # earlier versions knew one alone
        if begun.is_dir() and begun.parent.resolve() == folder.parent.resolve():
            return begun
    names = itertools.chain([folder], (folder.with_name(f"{folder.name}-{number}") for number in itertools.count(1)))
    return next(one for one in names if not one.exists() or (one.is_dir() and not any(one.glob("*tfevents*"))))


class Board:
    """Writes the curves and alerts of a run to a TensorBoard writer, where no trainer's logger does.

    Args:
        writer: a `torch.utils.tensorboard.SummaryWriter`.
        metrics: names of metrics.
    """

    name = "writing to TensorBoard"

    def __init__(self, writer: Any, metrics: Sequence[str]) -> None:
        self.writer, self._metrics = writer, list(metrics)
        lay_out_charts(writer, self._metrics)

    def write(self, result: Result) -> None:
        """Write one reading and what came of it.

        Args:
            result: the reading.
        """
        tags = result.record.scalars(self._metrics)
        axis = result.record.axis
        attempt_each(
            [
                *(partial(self.writer.add_scalar, tag, value, axis) for tag, value in tags.items()),
                partial(write_alerts, self.writer, result),
            ]
        )
