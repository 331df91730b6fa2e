"""The loggers of a Lightning trainer: curves to each; text, tables and pictures where its public API takes them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from hdi_callback.dashboards import tensorboard, wandb
from hdi_callback.guard import attempt_each

if TYPE_CHECKING:
    from hdi_callback.dashboards.pictures import Outlet, Picture
    from hdi_callback.monitoring.session.sink import Result


class LoggerSink:
    """Writes to one logger of the trainer, chosen by its methods and not by its name.

    Args:
        logger: a Lightning logger.
        metrics: names of metrics.
        prefix: text before every tag.
    """

    def __init__(self, logger: Any, metrics: Sequence[str], prefix: str) -> None:
        self._logger, self._metrics, self._prefix = logger, list(metrics), prefix
        self.logger_type = type(logger).__name__
        self.name = f"logging to {self.logger_type}"
        self._extremes: wandb.Extremes | None = None
        self._extra: Callable[[Result], object] | None = None

    def lay_out(self, layers: Iterable[str]) -> None:
        """Define the charts before the first values, if the logger can.

        Args:
            layers: names of layers.
        """
        experiment = self._experiment
        if hasattr(experiment, "add_custom_scalars"):
            tensorboard.lay_out_charts(experiment, self._metrics, self._prefix, layers)
        elif hasattr(experiment, "define_metric"):
            self._extremes = wandb.Extremes(experiment, self._metrics, self._prefix)
            self._extremes.define(layers)

    def write(self, result: Result) -> None:
        """Write the result of one reading.

        Args:
            result: the reading.
        """
        tags = result.scalars(self._metrics)
        named = {self._prefix + tag: value for tag, value in tags.items()}
        if self._extra is None:
            self._extra = self._choose_extra()
        attempt_each(
            [
                *([] if self._extremes is None else [partial(self._extremes.define, result.record.layers)]),
                partial(self._logger.log_metrics, named, step=result.record.axis),
                partial(self._extra, result),
            ]
        )

    def pictures(self) -> Outlet | None:
        """The outlet for pictures.

        Returns:
            The outlet; `None` if the logger takes none.
        """
        experiment = self._experiment
        if hasattr(experiment, "add_image"):
            return tensorboard.add_picture(experiment, self._prefix)
        if hasattr(experiment, "alert") and hasattr(self._logger, "log_image"):
            return self._log_image
        if self._is_mlflow(experiment):
            return self._log_artifact
        if _is_comet(experiment):
            return self._log_to_comet
        if _is_aim(experiment):
            return self._track_image
        return None

    @property
    def _experiment(self) -> Any:
        return getattr(self._logger, "experiment", None)

    def _is_mlflow(self, experiment: Any) -> bool:
        return hasattr(self._logger, "run_id") and hasattr(experiment, "log_text") and hasattr(experiment, "log_image")

    def _choose_extra(self) -> Callable[[Result], object]:
        experiment = self._experiment
        if hasattr(experiment, "add_text") and hasattr(experiment, "add_scalar"):
            return tensorboard.AlertBoard(experiment, self._prefix).write
        if hasattr(experiment, "alert"):
            return _WandbExtra(self._logger, experiment, self._metrics, self._prefix).write
        if self._is_mlflow(experiment):
            return _AlertText(experiment, self._logger.run_id, self._prefix).write
        if _is_comet(experiment):
            return self._log_text_to_comet
        if _is_aim(experiment):
            return self._track_text
        return lambda result: None

    def _log_image(self, picture: Picture) -> None:
        self._logger.log_image(self._prefix + picture.tag, [picture.pixels], step=picture.axis)

    def _log_artifact(self, picture: Picture) -> None:
        place = f"{self._prefix}attention_heads/{picture.name}_step_{picture.step}.png"
        self._experiment.log_image(self._logger.run_id, picture.pixels, place)

    def _log_to_comet(self, picture: Picture) -> None:
        # As an image: in an array Comet would rescale the colours to its range.
        self._experiment.log_image(_image(picture), name=self._prefix + picture.tag, step=picture.axis)

    def _log_text_to_comet(self, result: Result) -> None:
        if lines := _lines(result):
            self._experiment.log_text("\n".join(lines), step=result.record.axis)

    def _track_image(self, picture: Picture) -> None:
        import aim

        self._experiment.track(aim.Image(_image(picture)), name=self._prefix + picture.tag, step=picture.axis)

    def _track_text(self, result: Result) -> None:
        if lines := _lines(result):
            import aim

            name = f"{self._prefix}attention_heads/alert_text"
            self._experiment.track(aim.Text("\n".join(lines)), name=name, step=result.record.axis)


def _is_comet(experiment: Any) -> bool:
    return all(hasattr(experiment, name) for name in ("log_text", "log_image", "log_other"))


def _is_aim(experiment: Any) -> bool:
    return all(hasattr(experiment, name) for name in ("track", "get_image_sequence", "get_text_sequence"))


def _image(picture: Picture) -> Any:
    from PIL import Image  # a dependency of matplotlib, without which there are no pictures

    return Image.fromarray(picture.pixels)


def _lines(result: Result) -> list[str]:
    """New alerts and actions of a reading, one line each."""
    lines = [f"{item.status}: {item.message}" for item in result.alerts]
    return [*lines, *(item.message for item in result.actions)]


class _WandbExtra:
    def __init__(self, logger: Any, run: Any, metrics: Sequence[str], prefix: str) -> None:
        self._logger, self._run, self._prefix = logger, run, prefix
        self._tables = wandb.RunTables(metrics)

    def write(self, result: Result) -> None:
        tables = self._tables.add(result)
        has_way = hasattr(self._logger, "log_table")
        logs = [
            partial(self._logger.log_table, self._prefix + name, columns=columns, data=rows, step=result.record.axis)
            for name, (columns, rows) in (tables.items() if has_way else ())
        ]
        attempt_each([*logs, partial(wandb.send_alerts, self._run, result)])


class _AlertText:
    """One text artifact of an MLflow run with all alerts and actions."""

    def __init__(self, client: Any, run_id: Any, prefix: str) -> None:
        self._client, self._run_id, self._prefix = client, run_id, prefix
        self._lines: list[str] = []

    def write(self, result: Result) -> None:
        if lines := _lines(result):
            self._lines += lines
            text = "\n".join(self._lines) + "\n"
            self._client.log_text(self._run_id, text, f"{self._prefix}attention_heads/alerts.txt")
