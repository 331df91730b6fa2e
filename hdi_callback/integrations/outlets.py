"""The sinks that the callbacks of all trainers open for a run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from hdi_callback.dashboards import console, tensorboard, wandb
from hdi_callback.dashboards.loggers import LoggerSink
from hdi_callback.dashboards.pictures import Outlet, Pictures, can_draw, save_in
from hdi_callback.guard import attempt_each
from hdi_callback.monitoring.history import History
from hdi_callback.monitoring.session.settings import Settings
from hdi_callback.monitoring.session.sink import OnAlert, Sink
from hdi_callback.monitoring.warn_once import WarnOnce


def _folder_of(history: Path) -> str:
    """Name of the folder of pictures, one for each history."""
    return "figures" if history.stem == "history" else f"figures-{history.stem.removeprefix('history-')}"


class Dashboards:
    """The sinks of a run besides its history: loggers, TensorBoard, W&B, pictures, the console.

    Each method opens one or joins an existing one; `sinks` returns them all.

    Args:
        settings: with ``metrics``, ``figures_every`` and ``on_alert``.
        warn_once: warns once of each kind of failure.

    Attributes:
        folder: directory of the TensorBoard run that was opened here, for the checkpoint.
    """

    def __init__(self, settings: Settings, warn_once: WarnOnce) -> None:
        self._settings, self._warn_once = settings, warn_once
        self._writer: Any = None
        self._opened: list[Sink] = []
        self._outlets: list[Outlet] = []  # outlets for pictures
        self.folder: str | None = None

    def loggers(self, loggers: Iterable[Any], prefix: str, layers: Sequence[str]) -> None:
        """Write to the loggers of a Lightning trainer.

        Args:
            loggers: those loggers.
            prefix: put before every tag.
            layers: names of layers.
        """
        for logger in loggers:
            sink = LoggerSink(logger, self._settings.curves, prefix)
            with self._warn_once.guard(f"laying out the charts of {sink.logger_type}"):
                attempt_each([partial(sink.lay_out, layers), partial(self._open_pictures, sink)])
            self._opened.append(sink)

    def _open_pictures(self, sink: LoggerSink) -> None:
        self._outlets += filter(None, [sink.pictures()])

    def tensorboard(self, writer: Any, wished: Path, state: Mapping[str, Any] | None, layers: Sequence[str]) -> None:
        """Write to TensorBoard.

        Args:
            writer: a `SummaryWriter` of the user's, or True to open one.
            wished: directory of the run, unless another run uses it.
            state: the state to resume from.
            layers: names of layers.
        """
        with self._warn_once.guard("opening TensorBoard"):
            opened = self._open(wished, state) if writer is True else writer
            self._opened.append(tensorboard.Board(opened, self._settings.curves, layers))
            if hasattr(opened, "add_image"):
                self._outlets.append(tensorboard.add_picture(opened))

    def wandb(self, run: Any, layers: Sequence[str], axis: str, *, is_guest: bool = False) -> None:
        """Log to a W&B run.

        Args:
            run: the run.
            layers: names of layers.
            axis: the axis of the curves.
            is_guest: another logger commits the rows, see `RunLog`.
        """
        with self._warn_once.guard("joining the W&B run"):
            self._opened.append(wandb.RunLog(run, self._settings.curves, layers, axis, is_guest=is_guest))
            self._outlets.append(wandb.add_picture(run, axis))

    def sinks(
        self, history: History | None, print_line: Callable[[str], Any], otherwise: str, *, is_resumed: bool
    ) -> list[Sink]:
        """All sinks: those opened here, pictures, console, the user's function.

        Args:
            history: the history file; pictures are also saved in a folder beside it.
            print_line: prints a line.
            otherwise: where alerts are kept without a history.
            is_resumed: draw the readings in the history as well.

        Returns:
            The sinks.
        """
        called = self._settings.on_alert
        lines = console.AlertLines(print_line, otherwise if history is None else history)
        return [
            *self._opened,
            *self._pictures(history, is_resumed),
            lines,
            *([] if called is None else [OnAlert(called)]),
        ]

    def close(self) -> None:
        """Close the TensorBoard writer, unless it is the user's."""
        self._opened.clear()
        self._outlets.clear()
        if self._writer is not None:
            with self._warn_once.guard("closing TensorBoard"):
                self._writer.close()
            self._writer = None

    def _pictures(self, history: History | None, is_resumed: bool) -> list[Sink]:
        """The sink that draws pictures, if they are asked for, have an outlet, and matplotlib is installed."""
        chosen, every = list(self._outlets), self._settings.figures_every
        if history is not None:
            chosen.append(save_in(lambda: history.path.with_name(_folder_of(history.path))))
        if every == 0 or not chosen or not can_draw():
            return []
        return [Pictures(chosen, every=every, before=history.path if history is not None and is_resumed else None)]

    def _open(self, wished: Path, state: Mapping[str, Any] | None) -> Any:
        from torch.utils.tensorboard import SummaryWriter

        folder = tensorboard.place_board(wished, state)
        self.folder = str(folder)
        tensorboard.await_later_name(folder)
        # Events that an interrupted run wrote beyond its checkpoint must be hidden.
        last = None if state is None else state.get("last_step")
        self._writer = SummaryWriter(str(folder), purge_step=None if last is None else last + 1)
        return self._writer
