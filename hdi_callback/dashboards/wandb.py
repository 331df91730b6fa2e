"""Weights & Biases: curves, extremes in the summary of a run, tables, pictures, and alerts by mail or chat."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from hdi_callback.guard import attempt_each
from hdi_callback.monitoring.metrics import METRICS
from hdi_callback.monitoring.session.sink import ALERTS, WORST

if TYPE_CHECKING:
    from hdi_callback.dashboards.pictures import Outlet, Picture
    from hdi_callback.monitoring.session.sink import Result

_EXTREMES = {
    "hdi": "min",
    "hdi_energy": "min",
    "hdi_worst_pair": "max",
    "hdi_alignment": "max",
    "hdi_energy_alignment": "max",
    "hdi_worst_alignment": "max",
    "hdi_energy_worst_alignment": "max",
    "head_correlation": "max",
}
_OVERALL = {WORST: "max", ALERTS: "max"}
_LEVELS = {"warning": "WARN", "critical": "ERROR"}
_SECONDS_BETWEEN = 300  # of two alerts with the same title
_MOST_ROWS = 1000


class Extremes:
    """Makes the summary of the run keep the lowest index and the highest overlap.

    Each curve is defined by its full name, because the ``*`` of Lightning's own logger overrides a pattern. In W&B a
    dot in the name of a metric means nested values unless it is escaped (wandb issue 8445). A name with a star cannot
    be defined, so that the summary has the last value of such a layer and no extreme.

    Args:
        run: a `wandb` run.
        metrics: names of metrics.
        prefix: text before every tag.
        step_metric: the axis of the curves.
    """

    def __init__(
        self, run: Any, metrics: Sequence[str], prefix: str = "", step_metric: str = "trainer/global_step"
    ) -> None:
        self._run, self._prefix, self._step_metric = run, prefix, step_metric
        self._metrics = [metric for metric in metrics if metric in _EXTREMES]
        self._ends = {name: end for name in metrics if name in METRICS and (end := METRICS[name].worst) is not None}
        self._defined: set[str] = set()

    def define(self, layers: Iterable[str]) -> None:
        """Define the curves of layers before their first values are logged; defined ones are left as they are.

        Args:
            layers: names of layers.
        """
        names = list(layers)
        wanted = {
            f"{metric}/{name}": _EXTREMES[metric]
            for metric in self._metrics
            for name in [*names, *(("mean", "min") if metric == "hdi" else ())]
        }
        wanted |= _OVERALL | {f"{metric}/{end}": end for metric, end in self._ends.items()}
        new = {tag: extreme for tag, extreme in wanted.items() if tag not in self._defined and "*" not in tag}
        self._defined.update(new)
        attempt_each(partial(self._define, tag, extreme) for tag, extreme in new.items())

    def _define(self, tag: str, extreme: str) -> None:
        name = f"{self._prefix}{tag}".replace(".", "\\.")
        self._run.define_metric(name, step_metric=self._step_metric, summary=f"{extreme},last")


def send_alerts(run: Any, result: Result) -> None:
    """Send new alerts by `wandb.alert`: one for each rule and level at a reading, each at most every 5 minutes.

    Args:
        run: a `wandb` run, also offline.
        result: the result of a reading.
    """
    texts: dict[tuple[str, str], list[str]] = {}
    for alert in result.alerts:
        if alert.level != "notice" and not alert.is_resolved:
            texts.setdefault((f"Attention heads: {alert.rule}", _LEVELS[alert.level]), []).append(alert.message)
    for action in result.actions:
        texts.setdefault((f"Attention heads: {action.intervention}", "INFO"), []).append(action.message)
    attempt_each(
        partial(run.alert, title=title, text="\n".join(messages), level=level, wait_duration=_SECONDS_BETWEEN)
        for (title, level), messages in texts.items()
    )


class RunTables:
    """The tables of a run: its alerts, and the last values of its layers.

    Args:
        metrics: names of the metrics that are logged.
    """

    ALERTS: ClassVar[tuple[str, ...]] = (
        "step", "layer", "level", "rule", "heads", "value", "limit", "resolved", "message",
    )  # fmt: skip

    def __init__(self, metrics: Sequence[str]) -> None:
        self._metrics = list(dict.fromkeys(["hdi", "hdi_worst_alignment", *metrics]))
        self._alerts: list[list[Any]] = []
        self._has_new, self._next = False, 0.0

    def add(self, result: Result) -> dict[str, tuple[list[str], list[list[Any]]]]:
        """Add one reading; return the tables if they are due.

        Args:
            result: the result of a reading.

        Returns:
            Name -> columns and rows: when there are new alerts, at most every five minutes, and at the end of the run.
        """
        for alert in result.alerts:
            finding, heads = alert.finding, ", ".join(map(str, alert.finding.heads))
            row = [alert.step, alert.layer, alert.level, alert.rule, heads, finding.value, finding.threshold]
            self._alerts.append([*row, alert.is_resolved, alert.message])
        self._has_new = self._has_new or bool(result.alerts)
        now = time.monotonic()
        if not result.is_last and (not self._has_new or now < self._next):
            return {}
        # Each is a file of its own, so that a run of many alerts must not log one with each.
        self._has_new, self._next = False, now + _SECONDS_BETWEEN
        tables = {"attention_heads/layer_table": self._layers(result)}
        if self._alerts:
            tables["attention_heads/alert_table"] = (list(self.ALERTS), self._alerts[-_MOST_ROWS:])
        return tables

    def _layers(self, result: Result) -> tuple[list[str], list[list[Any]]]:
        layers = result.record.layers
        metrics = [metric for metric in self._metrics if any(metric in layer.values for layer in layers.values())]
        rules: dict[str, list[str]] = {}
        for alert in result.active or ():
            if alert.level != "notice":
                rules.setdefault(alert.layer, []).append(alert.rule)
        rows = []
        for name, layer in layers.items():
            pair = ", ".join(str(int(head)) for head in layer.arrays.get("worst_alignment_pair", ()))
            values = [layer.values.get(metric) for metric in metrics]
            rows.append([result.record.step, name, pair, ", ".join(rules.get(name, ())), *values])
        return ["step", "layer", "closest heads", "alert", *metrics], rows


def add_picture(run: Any, step_metric: str) -> Outlet:
    """An outlet that logs pictures to a run, in rows of its own or those of another logger.

    Args:
        run: a `wandb` run.
        step_metric: the axis of the pictures.

    Returns:
        What takes pictures.
    """

    def log(picture: Picture) -> None:
        import wandb

        run.log({picture.tag: wandb.Image(picture.pixels), step_metric: picture.axis}, commit=False)

    return log


class RunLog:
    """Logs the curves and alerts of a run to a `wandb` run, without a trainer's logger.

    Args:
        run: a `wandb` run.
        metrics: names of metrics.
        layers: names of layers.
        step_metric: the axis of the curves, logged with every reading.
        is_guest: add the readings to rows that another logger commits: W&B drops rows with an older step, so that rows
            of ours would displace theirs. A reading gets a row of its own only if the next one comes before anything
            else was logged.
    """

    name = "logging to W&B"

    def __init__(
        self,
        run: Any,
        metrics: Sequence[str],
        layers: Iterable[str],
        step_metric: str = "step",
        *,
        is_guest: bool = False,
    ) -> None:
        self._run, self._metrics, self._step_metric, self._is_guest = run, list(metrics), step_metric, is_guest
        self._open_row: int | None = None
        if is_guest:  # the axis of all others is not ours
            for metric in self._metrics:
                run.define_metric(f"{metric}/*", step_metric=step_metric)
        self._extremes = Extremes(run, self._metrics, step_metric=step_metric)
        self._tables = RunTables(self._metrics)
        self._extremes.define(layers)

    def write(self, result: Result) -> None:
        """Log the result of one reading.

        Args:
            result: the reading.
        """
        tags = result.scalars(self._metrics)
        row = {**tags, self._step_metric: result.record.axis}
        log_tables = partial(self._log_tables, result)
        attempt_each(
            [
                partial(self._extremes.define, result.record.layers),  # some layers are found after the start
                # An own row is committed at once, tables included; another logger's row only receives values.
                *([] if self._is_guest else [log_tables]),
                partial(self._log, row),
                *([log_tables] if self._is_guest else []),
                partial(send_alerts, self._run, result),
            ]
        )

    def _log_tables(self, result: Result) -> None:
        tables = self._tables.add(result)
        if tables:
            import wandb

            self._run.log(
                {name: wandb.Table(columns=[*columns], data=[*rows]) for name, (columns, rows) in tables.items()},
                commit=False,
            )

    def _log(self, row: dict[str, Any]) -> None:
        if not self._is_guest:
            self._run.log(row)
            return
        if self._open_row == self._run.step:
            self._run.log({}, commit=True)
        self._run.log(row, commit=False)
        self._open_row = self._run.step
