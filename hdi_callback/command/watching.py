"""`hdi watch`: a run followed in the terminal."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from hdi_callback.dashboards.layer_table import layers_text
from hdi_callback.dashboards.verdict import State, verdict
from hdi_callback.errors import MisconfigurationError
from hdi_callback.history import RunHistory, load_history

if TYPE_CHECKING:
    from rich.console import RenderableType

_SHADES = " .:-=+*#%@"  # of an alignment from 0 to 1, readable without colours
_STYLES: dict[State, str] = {"alert": "bold red", "clear": "bold green", "nothing to judge": "bold yellow"}


def follow(run: str, *, once: bool, idle: float | None, interval: float) -> State:
    """Draw a run again and again, and return its state at the end; wait for one that has not begun."""
    from rich.console import Console
    from rich.live import Live

    if interval <= 0 or (idle is not None and idle <= 0):
        raise MisconfigurationError("`--interval` and `--idle` must be positive numbers of seconds.")
    console = Console(highlight=False)
    if once:
        history = load_history(run)
        console.print(frame(history, console.width))
        return verdict(history.records, history.layers).state
    run_history: RunHistory | None = None
    size, last_change = -1, time.monotonic()
    with Live(f"Waiting for a run to begin in {run} ...", console=console, auto_refresh=False) as live:
        live.refresh()
        try:
            while True:
                if run_history is None:
                    run_history = _begun(run)
                if run_history is not None and (now := run_history.path.stat().st_size) != size:
                    size, last_change, run_history = now, time.monotonic(), load_history(run_history.path)
                    live.update(frame(run_history, console.width), refresh=True)
                if (run_history is not None and run_history.records and run_history.records[-1].is_last) or (
                    idle is not None and time.monotonic() - last_change >= idle
                ):
                    break
                time.sleep(interval)
        except KeyboardInterrupt:  # Ctrl-C ends it
            pass
    return "nothing to judge" if run_history is None else verdict(run_history.records, run_history.layers).state


def _begun(run: str) -> RunHistory | None:
    """The history of a run; `None` if there is none yet."""
    try:
        return load_history(run)
    except MisconfigurationError:
        return None


def frame(history: RunHistory, width: int) -> RenderableType:
    """Return what rich prints of a run: its layers at the last reading, the closest pair over time, the verdict."""
    from rich.console import Group
    from rich.text import Text

    judgement = verdict(history.records, history.layers)
    last = history.records[-1] if history.records else None
    parts = [Text(f"{history.path}, step {'-' if last is None else last.step}", style="dim")]
    if last is not None:
        parts += [Text(), Text(layers_text(history.layers, None, last, last.active, width=width))]
        worst = [max(record.values("hdi_worst_alignment").values(), default=math.nan) for record in history.records]
        parts += [Text(), Text(f"closest pair: {curve(worst, width - 16)}")]
    parts += [Text(), Text(judgement.text, style=_STYLES[judgement.state])]
    return Group(
        *parts,
        *([Text(f"What to do: {judgement.action}"), Text(judgement.code, no_wrap=True)] if judgement.action else []),
    )


def curve(values: Sequence[float], columns: int) -> str:
    """Draw a curve of alignments in one line; each column has the largest of its readings.

    Example:
        >>> curve([0.0, 0.5, 1.0, 0.2], 2)
        '=@'
    """
    columns = min(columns, len(values))
    marks = ""
    for column in range(columns):
        of_column = values[column * len(values) // columns : (column + 1) * len(values) // columns]
        finite = [value for value in of_column if math.isfinite(value)]
        shade = round(min(max(max(finite), 0.0), 1.0) * (len(_SHADES) - 1)) if finite else 0
        marks += _SHADES[shade]
    return marks
