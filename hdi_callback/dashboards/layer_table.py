"""The table of layers: one line for all layers that are alike, one for each layer with an alert."""

from __future__ import annotations

import io
import math
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hdi_callback.checks import joined_name
from hdi_callback.record import Alert, Record

_WIDTH = 80  # characters
_SHAPE = ("kind", "num_heads", "num_key_heads", "num_value_heads", "head_dim", "value_dim")


def layer_rows(
    layers: Sequence[Mapping[str, Any]],
    record: Record | None = None,
    active: Iterable[Alert] = (),
) -> list[dict[str, str]]:
    """Return the lines of the table: layer or layers, heads, width of a head, and so on -> text."""
    rules: dict[str, list[str]] = {}
    for alert in active:
        if alert.level != "notice":
            for layer in alert.where:
                rules.setdefault(layer, []).append(alert.rule)
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for facts in layers:
        name = facts["name"]
        shape = (*(facts.get(size) for size in _SHAPE), re.sub(r"\d+", "#", name), name if name in rules else None)
        groups.setdefault(shape, []).append(facts)
    return [_row(group, record, rules.get(group[0]["name"], [])) for group in groups.values()]


def _row(group: Sequence[Mapping[str, Any]], record: Record | None, rules: Sequence[str]) -> dict[str, str]:
    """The line of layers of one shape."""
    facts, names = group[0], [facts["name"] for facts in group]
    heads, key_heads = facts.get("num_heads", "?"), facts.get("num_key_heads")
    head_dim, value_dim = facts.get("head_dim", "?"), facts.get("value_dim")
    row = {
        "layer": joined_name(names),
        "heads": f"{heads}" if key_heads in (None, heads) else f"{heads} ({key_heads} key)",
        "width": f"{head_dim}" if value_dim in (None, head_dim) else f"{head_dim} ({value_dim} value)",
        "layout": str(facts.get("kind", "")),
        "alert": ", ".join(dict.fromkeys(rules)),
    }
    if record is None:
        return row
    hdi, worst, mean = (
        {name: value for name, value in record.values(metric).items() if name in names and math.isfinite(value)}
        for metric in ("hdi", "hdi_worst_alignment", "hdi_alignment")
    )
    row |= {"HDI": _range(hdi.values()), "closest": "-", "pair": ""}
    row["mean"] = f"{max(mean.values()):.2f}" if mean else "-"
    if worst:
        layer = max(worst, key=lambda name: worst[name])
        row |= {"closest": f"{worst[layer]:.2f}", "pair": " and ".join(map(str, closest_pair(record, layer)))}
        if row["pair"] and len(names) > 1:
            row["pair"] += f" of {number_in(layer, names)}"
    return row


def layers_text(
    layers: Sequence[Mapping[str, Any]],
    refused: Mapping[str, str] | None = None,
    record: Record | None = None,
    active: Iterable[Alert] = (),
) -> str:
    """Return the table as text."""
    columns = ["layer", "heads", "width", "layout"]
    if record is not None:
        columns = ["layer", "heads", "HDI", "closest", "pair"]
        columns += ["alert"] if any(alert.level != "notice" for alert in active) else []
    rows = [[row[column] for column in columns] for row in layer_rows(layers, record, active)]
    lines = table_lines(columns, rows, _WIDTH, gap=2 if record is None else 1) if rows else []
    reasons: dict[str, list[str]] = {}
    for name, reason in (refused or {}).items():
        reasons.setdefault(reason, []).append(name)
    for reason, names in reasons.items():
        text = f"not watched: {joined_name(names)}: {reason}"
        lines += textwrap.wrap(text, _WIDTH, subsequent_indent="  ", break_on_hyphens=False)
    return "\n".join(lines)


def table_lines(
    headings: Sequence[str], rows: Sequence[Sequence[str]], width: int, gap: int = 2, *, has_header: bool = True
) -> list[str]:
    """Return a table as lines of text; texts are wrapped, and names and numbers are not, unless a name is long."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    is_long = max(len(row[0]) for row in rows) > width / 2
    table = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0), show_header=has_header)
    for heading in headings:
        is_wrapped = heading in {"layout", "pair", "alert", "text"} or (is_long and heading == "layer")
        table.add_column(heading, overflow="fold", no_wrap=not is_wrapped)
    for row in rows:
        table.add_row(*map(Text, row))
    console = Console(file=io.StringIO(), width=width, color_system=None)
    with console.capture() as captured:
        console.print(table)
    return [line.rstrip() for line in captured.get().splitlines()]


def number_in(layer: str, names: Sequence[str]) -> str:
    """Return the number that tells a layer from others; its name if they differ in more than one number."""
    if len({re.sub(r"\d+", "#", name) for name in names}) > 1:
        return layer
    numbers = zip(*(re.findall(r"\d+", name) for name in names))
    varying = [place for place, column in enumerate(numbers) if len(set(column)) > 1]
    return str(re.findall(r"\d+", layer)[varying[0]]) if len(varying) == 1 else layer


def compared(facts: Mapping[str, Any]) -> str:
    """Return what is compared in a layer: ``"heads"``, or ``"key heads"`` where several heads share their keys."""
    return "heads" if facts.get("num_key_heads") in {None, facts.get("num_heads")} else "key heads"


def closest_pair(record: Record, layer: str) -> tuple[int, ...]:
    """Return the two closest heads of a layer; empty if no two live heads were compared."""
    pair = tuple(int(head) for head in record.layers[layer].heads.get("worst_alignment_pair", ()) if head is not None)
    return pair if len(pair) == 2 and min(pair) >= 0 else ()


def _range(values: Iterable[float]) -> str:
    texts = sorted({f"{value:.2f}" for value in values}, key=float)
    return "-" if not texts else texts[0] if len(texts) == 1 else f"{texts[0]}-{texts[-1]}"
