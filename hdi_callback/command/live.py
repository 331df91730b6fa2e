"""A live view of a run: its map of layers by steps, and the heads of its worst layer."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hdi_callback.attention.names import short_names
from hdi_callback.command.terminal import LEVEL_STYLES, active_sentence, cell, console, legend
from hdi_callback.dashboards.report.pair_matrices import pair_alignment
from hdi_callback.errors import MisconfigurationError
from hdi_callback.monitoring.alerts import Alert
from hdi_callback.monitoring.history import RunHistory, read_history
from hdi_callback.monitoring.history.run_folder import find_history
from hdi_callback.monitoring.plain_table import decimal
from hdi_callback.monitoring.readings import Record
from hdi_callback.monitoring.rules.replay import active_alerts

if TYPE_CHECKING:
    from rich.console import RenderableType

_FEWEST_COLUMNS = 8
_FEWEST_HEADS, _MOST_HEADS = 6, 24  # side by side, by the height of the terminal
_MOST_NAMED = 3  # heads of an alert, beside its layer


def follow(run: str, *, once: bool, until: int | None, idle: float | None, interval: float) -> bool:
    """Draw a run repeatedly until it ends.

    Args:
        run: a history, or the folder of a run.
        once: draw it once.
        until: end at the first reading of this step or a later one.
        idle: end if nothing was written for so many seconds.
        interval: seconds between two reads of the history.

    Returns:
        True if a warning or a critical alert is active.

    Raises:
        MisconfigurationError: if there is no such run.
    """
    if interval <= 0 or (idle is not None and idle <= 0):
        raise MisconfigurationError("`--interval` and `--idle` must be positive numbers of seconds.")
    path = find_history(run)
    out = console()
    if once:
        history, active = _poll(path)
        out.print(frame(history, active, out.width, out.height))
        return bool(active)
    from rich.live import Live

    active = []
    size, last_change = -1, time.monotonic()
    with Live(console=out, auto_refresh=False, vertical_overflow="crop") as live:
        try:
            while True:
                now = path.stat().st_size if path.exists() else size
                if now != size:
                    size, last_change = now, time.monotonic()
                    history, active = _poll(path)
                    live.update(frame(history, active, out.width, out.height), refresh=True)
                    if until is not None and any(record.step >= until for record in history.records()[-1:]):
                        break
                if idle is not None and time.monotonic() - last_change >= idle:
                    break
                time.sleep(interval)
        except KeyboardInterrupt:  # Ctrl-C ends it
            pass
    return bool(active)


def _poll(path: Path) -> tuple[RunHistory, list[Alert]]:
    history = read_history(path)
    alerts = [Alert.from_dict(line) for line in history.lines if line["kind"] == "alert"]
    return history, active_alerts(alerts)


def frame(history: RunHistory, active: Sequence[Alert], width: int, height: int) -> RenderableType:
    """One frame: active alerts, the map of layers, and the heads of one layer.

    Args:
        history: the run so far.
        active: the active alerts.
        width: columns of the terminal.
        height: lines of the terminal.

    Returns:
        A rich renderable.
    """
    from rich.console import Group
    from rich.text import Text

    records = history.records()
    parts: list[Any] = [Text(f"{history.path}, step {records[-1].step if records else '-'}", style="dim")]
    style = LEVEL_STYLES[active[0].level] if active else "bold green"
    parts.append(Text(("! " if active else "") + active_sentence(active), style=style))
    if not records:
        return Group(*parts, Text("There is no reading yet."))
    alerted = {alert.layer: alert.finding for alert in reversed(active)}
    heads = _heads_map(history, records, alerted, min(_MOST_HEADS, max(_FEWEST_HEADS, (height - 8) // 2)))
    shown = _layers_to_show(records, alerted, max(4, height - 8 - len(heads)))
    labels = _labels(list(records[-1].layers), shown, max(12, width // 3))
    label = max(map(len, labels.values()), default=8) + 2
    heads_of = {layer: _named(alerted[layer].heads if layer in alerted else (), records[-1], layer) for layer in shown}
    columns = max(_FEWEST_COLUMNS, width - label - 10 - max(map(len, heads_of.values()), default=0))
    for layer in shown:
        mark = "! " if layer in alerted else "  "
        line = Text(mark + labels[layer].ljust(label), style="bold" if layer in alerted else "")
        values = [record.layers[layer].values.get("hdi_worst_alignment") if layer in record.layers else None
                  for record in records]  # fmt: skip
        for value in squeezed(values, columns):
            line.append_text(cell(value))
        line.append(f"  {decimal(values[-1])} {heads_of[layer]}".rstrip())
        parts.append(line)
    hidden = [layer for layer in records[-1].layers if layer not in shown]
    if hidden:
        known = [records[-1].layers[layer].values.get("hdi_worst_alignment") for layer in hidden]
        largest = max((value for value in known if value is not None), default=None)
        most = "not measured" if largest is None else f"at most {decimal(largest)}"
        parts.append(Text(f"  {len(hidden)} more {'layer' if len(hidden) == 1 else 'layers'}, {most}", style="dim"))
    return Group(*parts, legend(width), *heads)


def squeezed(values: Sequence[float | None], columns: int) -> list[float | None]:
    """A curve with at most so many columns; each column has the largest of its readings.

    Args:
        values: a number for each reading; `None` where nothing was measured.
        columns: largest number of columns.

    Returns:
        The numbers of the columns.

    Example:
        >>> squeezed([0.1, 0.9, None, None, 0.2], 3)
        [0.9, None, 0.2]
    """
    if len(values) <= columns:
        return list(values)
    size = -(-len(values) // columns)
    parts = [
        [value for value in values[start : start + size] if value is not None] for start in range(0, len(values), size)
    ]
    return [max(part) if part else None for part in parts]


def _labels(names: Sequence[str], shown: Sequence[str], room: int) -> dict[str, str]:
    """Names of layers; where one does not fit, what they differ in."""
    labels = {name: name for name in names}
    if max((len(name) for name in shown), default=0) > room:
        labels = {name: f"layer {text}" if text.isdigit() else text for name, text in zip(names, short_names(names))}
    return {name: text if len(text := labels[name]) <= room else f"...{text[-(room - 3) :]}" for name in shown}


def _named(heads: Sequence[int], record: Record, layer: str) -> str:
    """The heads of an alert, or else the closest two."""
    heads = heads or _pair(record, layer)
    more = f"+{len(heads) - _MOST_NAMED}" if len(heads) > _MOST_NAMED else ""
    return "-".join(map(str, heads[:_MOST_NAMED])) + more


def _pair(record: Record, layer: str) -> tuple[int, ...]:
    arrays = record.layers[layer].arrays if layer in record.layers else {}
    return tuple(int(head) for head in arrays.get("worst_alignment_pair", ()) if head >= 0)


def _layers_to_show(records: Sequence[Record], alerted: Any, most: int) -> list[str]:
    """All layers if they fit; else the alerted ones and the worst of the others, in model order."""
    last = records[-1].layers
    ranked = sorted(last, key=lambda name: (name not in alerted, -last[name].values.get("hdi_worst_alignment", -1.0)))
    kept = set(ranked[:most])
    return [name for name in last if name in kept]


def _heads_map(history: RunHistory, records: Sequence[Record], alerted: Any, most: int) -> list[Any]:
    """Overlaps of the heads of the worst layer, at the last reading that kept them."""
    from rich.text import Text

    last = records[-1].layers
    worst = max(last, key=lambda name: last[name].values.get("hdi_worst_alignment", -1.0), default=None)
    layer = next(iter(alerted), worst)
    steps = [] if layer is None else history.matrix_steps(layer)
    record = next((record for record in reversed(records) if record.step in steps and layer in record.layers), None)
    if layer is None or record is None:
        return []
    alignment = pair_alignment(history.matrices(record.step, layer), record.layers[layer])
    if alignment is None:
        return []
    off = alignment.clone().fill_diagonal_(math.nan)
    if not off.isfinite().any():
        return []
    finding = alerted.get(layer)
    pair = finding.heads if finding is not None and finding.heads else _pair(record, layer)
    groups = finding.groups if finding is not None and finding.groups else (pair,)
    H = alignment.shape[-1]
    heads = list(range(H))
    if most < H:
        closest = off.nan_to_num(-1).amax(-1).argsort(descending=True).tolist()
        heads = sorted([*pair, *(head for head in closest if head not in pair)][:most])
    some = f" (the {len(heads)} closest of {H})" if len(heads) < H else ""
    rows: list[Any] = [Text(f"heads of {layer} at step {record.step}{some}:", style="bold")]
    rows.append(Text("    " + "".join(f"{head:>3}" for head in heads)))
    for head in heads:
        row = Text(f"{head:>3} ", style="bold" if head in pair else "")
        for other in heads:
            is_marked = head != other and any({head, other} <= set(group) for group in groups)
            value = None if head == other else float(alignment[head, other])
            row.append_text(Text("[", style="bold red") if is_marked else Text(" "))
            row.append_text(cell(value))
            row.append_text(Text("]", style="bold red") if is_marked else Text(" "))
        rows.append(row)
    return rows
