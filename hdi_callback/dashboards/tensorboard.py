"""TensorBoard: a page of charts, alerts as text and marks, pictures."""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hdi_callback.guard import attempt_each
from hdi_callback.monitoring.session.sink import ALERTS, WORST

if TYPE_CHECKING:
    from hdi_callback.dashboards.pictures import Outlet, Picture
    from hdi_callback.monitoring.alerts import Alert
    from hdi_callback.monitoring.session.sink import Result

# The curve on which an alert is marked: the index, unless the rule judges pairs.
_MARKED = {"hdi_worst_alignment": "hdi_worst_pair", "hdi_energy_worst_alignment": "hdi_worst_pair"}
_LAYERS_A_CHART = 8
_SCALE = {"scale/chance": 0.0, "scale/same head": 1.0}
_ONE_ALERT = {"scale/one alert": 1.0}
_BY_GROUPS = ("hdi_worst_alignment", "hdi_worst_pair")  # on the scale from chance to the same head


def lay_out_charts(writer: Any, metrics: Sequence[str], prefix: str = "", layers: Iterable[str] = ()) -> None:
    """Define the page "Custom Scalars": curves over all layers, then layers in groups, then each metric.

    The page cuts off outliers, such as the one of 48 layers that collapsed. So the charts of alignment include two
    constant curves, chance and the same head, which fix the scale. That of alerts has one at a single alert, so that an
    alert that was soon resolved is not cut off either.

    Args:
        writer: a `torch.utils.tensorboard.SummaryWriter`.
        metrics: names of metrics.
        prefix: text before every tag.
        layers: names of layers, in model order.
    """
    scale = [_exactly(prefix + tag) for tag in _SCALE]
    first = {
        "worst alignment of two heads, over all layers (0 chance, 1 identical heads)": [
            _exactly(prefix + WORST), f"^{re.escape(prefix)}alert/worst_alignment/.*", *scale,
        ],
        "active alerts": [_exactly(prefix + tag) for tag in (ALERTS, *_ONE_ALERT)],
    }  # fmt: skip
    if "hdi" in metrics:
        first["HDI: mean of the layers, and the lowest"] = [
            _exactly(f"{prefix}hdi/{summary}") for summary in ("mean", "min")
        ]
    means = [f"{metric}/max" for metric in ("hdi_alignment", "hdi_energy_alignment") if metric in metrics]
    if means:
        first["mean alignment, of the worst layer"] = [*(_exactly(prefix + tag) for tag in means), *scale]
    groups = {}
    grouped = next((metric for metric in _BY_GROUPS if metric in metrics), None)
    names = list(layers)
    if grouped is not None and len(names) > _LAYERS_A_CHART:
        for start in range(0, len(names), _LAYERS_A_CHART):
            some = names[start : start + _LAYERS_A_CHART]
            tags = [tag for name in some for tag in _curve_and_marks(prefix, grouped, re.escape(name))]
            groups[f"{grouped}: {some[0]} to {some[-1]}"] = [*tags, *scale]
    others = {metric: _curve_and_marks(prefix, metric, ".*") for metric in metrics}
    layout = {
        f"{prefix}head diversity, all layers": first,
        f"{prefix}head diversity, layers in groups": groups,
        f"{prefix}head diversity": others,
    }
    charts = {
        category: {title: ["Multiline", tags] for title, tags in described.items()}
        for category, described in layout.items()
        if described
    }
    writer.add_custom_scalars(charts)


def _exactly(tag: str) -> str:
    return f"^{re.escape(tag)}$"


def _curve_and_marks(prefix: str, metric: str, layer: str) -> list[str]:
    end = "" if layer == ".*" else "$"
    marks = ".*" if layer == ".*" else rf"{layer}(/step \d+)?$"
    return [f"^{re.escape(prefix + metric)}/{layer}{end}", f"^{re.escape(f'{prefix}alert/{metric}')}/{marks}"]


class AlertBoard:
    """Writes alerts and interventions as text, and marks each alert on the curve of its metric.

    The text is under ``hdi_alerts`` and ``hdi_interventions``. A mark is a curve of one point, which smoothing does not
    change: ``alert/<metric>/<layer>``, and ``alert/<metric>/<layer>/step <s>`` for those after the first; and
    ``alert/worst_alignment/<layer>`` on the curve over all layers.

    Args:
        writer: a `torch.utils.tensorboard.SummaryWriter`.
        prefix: text before every tag.
    """

    def __init__(self, writer: Any, prefix: str = "") -> None:
        self._writer, self._prefix = writer, prefix
        self._marked: dict[str, int] = {}  # tag -> the step of its one point

    def write(self, result: Result) -> None:
        """Write new alerts and actions of one reading, and the two ends of the scale of alignment.

        Args:
            result: the result of a reading.
        """
        writer, axis = self._writer, result.record.axis
        writes: list[Callable[[], object]] = []
        if result.active is not None:
            writes += [partial(writer.add_scalar, self._prefix + tag, value, axis) for tag, value in _ONE_ALERT.items()]
        if any("hdi_worst_alignment" in layer.values for layer in result.record.layers.values()):
            writes += [partial(writer.add_scalar, self._prefix + tag, value, axis) for tag, value in _SCALE.items()]
        if result.alerts:
            lines = [f"- **{item.status}** {item.message}" for item in result.alerts]
            writes.append(partial(writer.add_text, f"{self._prefix}hdi_alerts", "\n".join(lines), axis))
        if result.actions:
            lines = [f"- {item.message}" for item in result.actions]
            writes.append(partial(writer.add_text, f"{self._prefix}hdi_interventions", "\n".join(lines), axis))
        for alert in result.alerts:
            if alert.level != "notice" and not alert.is_resolved:
                writes += self._marks(alert, result)
        attempt_each(writes)

    def _marks(self, alert: Alert, result: Result) -> list[Callable[[], object]]:
        metric = _MARKED.get(alert.finding.metric or "", "hdi")
        values = result.record.layers[alert.layer].values
        marks = {
            f"{self._prefix}alert/{metric}/{alert.layer}": values.get(metric),
            f"{self._prefix}alert/worst_alignment/{alert.layer}": values.get("hdi_worst_alignment"),
        }
        step = result.record.step
        written: list[Callable[[], object]] = []
        for wished, value in marks.items():
            tag = wished if self._marked.get(wished, step) == step else f"{wished}/step {step}"
            if value is not None and tag not in self._marked:
                self._marked[tag] = step
                written.append(partial(self._writer.add_scalar, tag, value, result.record.axis))
        return written


def add_picture(writer: Any, prefix: str = "") -> Outlet:
    """An outlet that writes pictures to the page "Images".

    Args:
        writer: a `torch.utils.tensorboard.SummaryWriter`.
        prefix: text before every tag.

    Returns:
        The outlet.
    """

    def write(picture: Picture) -> None:
        writer.add_image(prefix + picture.tag, picture.pixels, picture.axis, dataformats="HWC")

    return write


def place_board(folder: Path, state: Mapping[str, Any] | None) -> Path:
    """The directory of a run: the one that it has begun, or one without files of other runs.

    TensorBoard shows the event files of one directory as one run, so that two runs in it would hide each other.

    Args:
        folder: the wished directory; further runs get ``<folder>-1``, ``<folder>-2``, ...
        state: state from a checkpoint of the run, with the directory under ``"tensorboard"``.

    Returns:
        The directory.
    """
    if state is not None:
        begun = Path(state["tensorboard"]) if state.get("tensorboard") else folder  # earlier versions had only one
        if begun.is_dir() and begun.parent.resolve() == folder.parent.resolve():
            return begun
    names = itertools.chain([folder], (folder.with_name(f"{folder.name}-{number}") for number in itertools.count(1)))
    return next(name for name in names if not name.exists() or (name.is_dir() and not any(name.glob("*tfevents*"))))


def await_later_name(folder: Path) -> None:
    """Wait, at most a second, until a new event file sorts after the existing ones.

    TensorBoard reads the files of a run in the order of their names, which begin with the second in which they were
    opened. Within one second a counter follows as text, in which 10 sorts before 9: a file that goes back to a
    checkpoint would be read before the events that it has to replace.

    Args:
        folder: directory of the run.
    """
    names = [path.name for path in folder.glob("events.out.tfevents.*")]
    while any(name.startswith(f"events.out.tfevents.{int(time.time()):010d}.") for name in names):
        time.sleep(0.02)


class Board:
    """Writes the curves and alerts of a run to a TensorBoard writer, without a trainer's logger.

    Args:
        writer: a `torch.utils.tensorboard.SummaryWriter`.
        metrics: names of metrics.
        layers: names of layers, in model order.
    """

    name = "writing to TensorBoard"

    def __init__(self, writer: Any, metrics: Sequence[str], layers: Iterable[str] = ()) -> None:
        self.writer, self._metrics = writer, list(metrics)
        self._alerts = AlertBoard(writer)
        lay_out_charts(writer, self._metrics, layers=layers)

    def write(self, result: Result) -> None:
        """Write the result of one reading.

        Args:
            result: the reading.
        """
        tags = result.scalars(self._metrics)
        axis = result.record.axis
        attempt_each(
            [
                *(partial(self.writer.add_scalar, tag, value, axis) for tag, value in tags.items()),
                partial(self._alerts.write, result),
            ]
        )
