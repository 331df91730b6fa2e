"""Where the results of a run go: what every trainer's shell opens besides the trainer's own loggers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hdi_callback.dashboards import console, tensorboard, wandb
from hdi_callback.dashboards.pictures import Outlet, Pictures, can_draw, save_in
from hdi_callback.monitoring.history import History
from hdi_callback.monitoring.session import Session
from hdi_callback.monitoring.settings import Settings
from hdi_callback.monitoring.sink import OnAlert, Sink
from hdi_callback.monitoring.warn_once import WarnOnce


def print_layers(session: Session, settings: Settings, say: Callable[[str], Any] | None = None) -> None:
    """Print once which layers were found.

    Args:
        session: a session that has started.
        settings: with ``verbose``; nothing is printed without.
        say: prints a line.
    """
    options: dict[str, Any] = {} if say is None else {"say": say}
    if settings.verbose:
        with session.warn_once.guard("printing the layers"):
            console.print_layers(
                session.monitor.layers,
                session.monitor.refused,
                every_n_steps=settings.every_n_steps,
                interventions=session.interventions,
                **options,
            )


def alert_sinks(settings: Settings, history: History | None, say: Callable[[str], Any], otherwise: str) -> list[Sink]:
    """Print alerts, and call the user's function with them.

    Args:
        settings: with ``on_alert``.
        history: where all alerts are kept.
        say: prints a line.
        otherwise: where they are kept without a history.

    Returns:
        The sinks.
    """
    sinks: list[Sink] = [console.AlertLines(say, otherwise if history is None else history)]
    return sinks if settings.on_alert is None else [*sinks, OnAlert(settings.on_alert)]


def picture_sinks(
    settings: Settings, history: History | None, outlets: Iterable[Outlet | None], *, is_resumed: bool
) -> list[Sink]:
    """Draw pictures, for those who take them and into a folder beside the history.

    Args:
        settings: with ``figures_every``.
        history: where readings are kept.
        outlets: what takes pictures; `None` for what cannot.
        is_resumed: the readings that the history holds are drawn as well.

    Returns:
        The sink; none if no pictures are wanted, nobody takes them, or matplotlib is not installed.
    """
    chosen = [outlet for outlet in outlets if outlet is not None]
    if history is not None:
        chosen.append(save_in(lambda: history.path.with_name(_folder_of(history.path))))
    if settings.figures_every == 0 or not chosen or not can_draw():
        return []
    before = history.path if history is not None and is_resumed else None
    return [Pictures(chosen, every=settings.figures_every, before=before)]


def _folder_of(history: Path) -> str:
    """Name the folder of pictures: that of a second history is told from that of the first."""
    return "figures" if history.stem == "history" else f"figures-{history.stem.removeprefix('history-')}"


class Dashboards:
    """TensorBoard and W&B beside a trainer that has no loggers of its own.

    Args:
        metrics: names of the curves to log.
        warn_once: takes what goes wrong.

    Attributes:
        folder: directory of the TensorBoard run that was opened here; a checkpoint keeps it.
        outlets: what takes pictures.
    """

    def __init__(self, metrics: Sequence[str] | None, warn_once: WarnOnce) -> None:
        self._metrics, self._warn_once = list(metrics or ()), warn_once
        self._writer: Any = None
        self.outlets: list[Outlet] = []
        self.folder: str | None = None

    def tensorboard(
        self, writer: Any, wished: Path, state: Mapping[str, Any] | None, layers: Sequence[str] = ()
    ) -> list[Sink]:
        """Write to TensorBoard.

        Args:
            writer: a `SummaryWriter` of the user's, or True to open one.
            wished: directory of the run, if no other run has it.
            state: what is resumed.
            layers: names of layers.

        Returns:
            The sink, if it could be opened.
        """
        sinks: list[Sink] = []
        with self._warn_once.guard("opening TensorBoard"):
            opened = self._open(wished, state) if writer is True else writer
            sinks.append(tensorboard.Board(opened, self._metrics, layers))
            if hasattr(opened, "add_image"):
                self.outlets.append(tensorboard.add_picture(opened))
        return sinks

    def wandb(self, run: Any, layers: Sequence[str], axis: str, *, is_guest: bool = False) -> list[Sink]:
        """Log to a W&B run.

        Args:
            run: the run.
            layers: names of layers.
            axis: the axis of the curves.
            is_guest: somebody else logs the rows, see `RunLog`.

        Returns:
            The sink, if the run can be joined.
        """
        sinks: list[Sink] = []
        with self._warn_once.guard("joining the W&B run"):
            sinks.append(wandb.RunLog(run, self._metrics, layers, axis, is_guest=is_guest))
            self.outlets.append(wandb.add_picture(run, axis))
        return sinks

    def close(self) -> None:
        """Close the writer, unless it is the user's."""
        self.outlets.clear()
        if self._writer is not None:
            with self._warn_once.guard("closing TensorBoard"):
                self._writer.close()

    def _open(self, wished: Path, state: Mapping[str, Any] | None) -> Any:
        from torch.utils.tensorboard import SummaryWriter

        self.close()
        folder = tensorboard.place_board(wished, state)
        self.folder = str(folder)
        # What an interrupted run has written beyond its checkpoint is to be hidden.
        last = None if state is None else state.get("last_step")
        self._writer = SummaryWriter(str(folder), purge_step=None if last is None else last + 1)
        return self._writer
