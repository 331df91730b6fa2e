"""Weights & Biases: what the summary of a run keeps of the curves, and alerts that reach people by mail or chat."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from hdi_callback.monitoring.warn_once import attempt_each

if TYPE_CHECKING:
    from hdi_callback.monitoring.sink import Result

_EXTREMES = {"hdi": "min", "hdi_worst_pair": "max", "head_correlation": "max"}
_LEVELS = {"warning": "WARN", "critical": "ERROR"}
_SECONDS_BETWEEN = 300  # of two alerts with the same title


class Extremes:
    """Lets the summary of the run keep the lowest index and the highest overlap, as those are what one looks for.

    Each curve is defined by its full name, because a pattern would yield to the ``*`` of Lightning's own logger. To
    W&B a dot in the name of a metric is a step into nested values unless it is escaped (wandb issue 8445).

    Args:
        run: a `wandb` run.
        metrics: names of metrics.
        prefix: what stands before every tag.
        step_metric: the axis of the curves.
    """

    def __init__(
        self, run: Any, metrics: Sequence[str], prefix: str = "", step_metric: str = "trainer/global_step"
    ) -> None:
        self._run, self._prefix, self._step_metric = run, prefix, step_metric
        self._metrics = [metric for metric in metrics if metric in _EXTREMES]
        self._defined: set[str] = set()

    def define(self, layers: Iterable[str]) -> None:
        """Define the curves of layers, before their first values are logged; those that are defined are left alone.

        Args:
            layers: names of layers.
        """
        names = list(layers)
        wanted = {
            f"{metric}/{name}": _EXTREMES[metric]
            for metric in self._metrics
            for name in [*names, *(("mean", "min") if metric == "hdi" else ())]
        }
        new = {tag: extreme for tag, extreme in wanted.items() if tag not in self._defined}
        self._defined.update(new)
        attempt_each(partial(self._define, tag, extreme) for tag, extreme in new.items())

    def _define(self, tag: str, extreme: str) -> None:
        name = f"{self._prefix}{tag}".replace(".", "\\.")
        self._run.define_metric(name, step_metric=self._step_metric, summary=f"{extreme},last")


def send_alerts(run: Any, result: Result) -> None:
    """Send what is new as `wandb` alerts: one for each rule and level at a reading, and each at most every 5 minutes.

    Args:
        run: a `wandb` run, also offline.
        result: a reading and what came of it.
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


class RunLog:
    """Logs the curves and alerts of a run to a `wandb` run, where no trainer's logger does.

    Args:
        run: a `wandb` run.
        metrics: names of metrics.
        layers: names of layers.
        step_metric: the axis of the curves, logged with every reading.
        is_guest: put the readings into the rows that somebody else logs, so that a row with a step of their own, which
            W&B drops if it comes late, is not overtaken. A reading gets a row of its own only if the next one comes
            before anything else was logged.
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
        self._extremes.define(layers)

    def write(self, result: Result) -> None:
        """Log one reading and what came of it.

        Args:
            result: the reading.
        """
        tags = result.record.scalars(self._metrics)
        row = {**tags, self._step_metric: result.record.axis}
        attempt_each(
            [
                partial(self._extremes.define, result.record.layers),  # some are found after the start
                partial(self._log, row),
                partial(send_alerts, self._run, result),
            ]
        )

    def _log(self, row: dict[str, Any]) -> None:
        if not self._is_guest:
            self._run.log(row)
            return
        if self._open_row == self._run.step:
            self._run.log({}, commit=True)
        self._run.log(row, commit=False)
        self._open_row = self._run.step
