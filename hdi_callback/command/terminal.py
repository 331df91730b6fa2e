"""Tables, sentences and maps as coloured cells in a terminal, with rich."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from hdi_callback.audits.audit import Audit, LayerAudit
from hdi_callback.errors import MisconfigurationError
from hdi_callback.monitoring.plain_table import decimal, heads_in_words

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from hdi_callback.audits.comparison import Comparison
    from hdi_callback.monitoring.alerts import Alert

LEVEL_STYLES = {"notice": "cyan", "warning": "yellow", "critical": "bold red"}

# Anchors of cividis (Nuñez, Anderton and Renslow 2018), which people see alike with and without colour blindness.
_CIVIDIS = ((0, 34, 78), (53, 69, 108), (102, 105, 112), (148, 142, 119), (200, 184, 102), (254, 232, 56))


def console(**options: Any) -> Console:
    """A rich console.

    Args:
        options: arguments of rich's `Console`.

    Returns:
        The console.

    Raises:
        MisconfigurationError: if rich is not installed.
    """
    try:
        from rich.console import Console
    except ImportError as error:
        raise MisconfigurationError(
            "Tables need rich: pip install 'hdi-callback[reports]', or write --json."
        ) from error
    return Console(highlight=False, soft_wrap=False, **options)


def colour_of(value: float) -> tuple[int, int, int]:
    """The colour of an alignment.

    Args:
        value: the alignment; below 0 is drawn as 0.

    Returns:
        Red, green and blue, 0 to 255.

    Example:
        >>> colour_of(0.0), colour_of(1.0)
        ((0, 34, 78), (254, 232, 56))
    """
    place = min(max(value, 0.0), 1.0) * (len(_CIVIDIS) - 1)
    low = min(int(place), len(_CIVIDIS) - 2)
    part = place - low
    red, green, blue = (round(a + (b - a) * part) for a, b in zip(_CIVIDIS[low], _CIVIDIS[low + 1]))
    return red, green, blue


def cell(value: float | None, width: int = 1) -> Text:
    """An alignment as a coloured cell that is also readable without colour.

    Args:
        value: the alignment; `None` or NaN where nothing was measured.
        width: characters of the cell.

    Returns:
        ``#`` from 0.8, the limit of a pair, ``o`` from 0.5, ``.`` below, and a blank where nothing was measured.
    """
    from rich.text import Text

    if value is None or math.isnan(value):
        return Text(" " * width)
    red, green, blue = colour_of(value)
    mark = "#" if value >= 0.8 else "o" if value >= 0.5 else "."
    ink = "black" if value >= 0.45 else "bright_black"
    return Text(mark * width, style=f"{ink} on rgb({red},{green},{blue})")


def legend(width: int) -> Text:
    """The legend of a map.

    Args:
        width: columns of the terminal; a narrow one gets a shorter legend.

    Returns:
        One line.
    """
    from rich.text import Text

    is_narrow = width < _NARROW
    line = Text("alignment: " if is_narrow else "alignment of the closest two heads: ")
    last = " 0.8 and above" if is_narrow else " 0.8 and above: nearly one head"
    for value, words in ((0.1, " below 0.5   "), (0.6, " 0.5 to 0.8   "), (1.0, last)):
        line.append_text(cell(value, 2))
        line.append(words)
    return line


_COLUMNS: dict[str, Callable[[LayerAudit], str | Text]] = {  # heading -> cell
    "heads": lambda layer: heads_in_words(layer.num_heads, layer.num_key_heads),
    "pair": lambda layer: "-".join(map(str, layer.worst_pair)) or "-",
    "aligned": lambda layer: _aligned(layer.worst_alignment),
    "mean": lambda layer: decimal(layer.alignment),
    "by energy": lambda layer: decimal(layer.energy_alignment),
    "HDI": lambda layer: decimal(layer.hdi),
    "chance": lambda layer: decimal(layer.chance),
    "effective": lambda layer: "-" if layer.effective_heads is None else f"{layer.effective_heads:.1f}",
    "dead": lambda layer: ",".join(map(str, layer.dead_heads)) or "0",
}
_LEFT_OUT = ("by energy", "effective", "chance", "mean", "HDI", "heads", "dead")  # on a narrow terminal, in this order
_WITH_ALL, _NARROW = 120, 100  # columns of a terminal
_LEAST_NAME = 24  # columns for the names of layers
_ABSENT = "not read"
_GAP, _SIGN = 3, 4  # between columns; of the sign in front, with its gap


def audit_table(audit: Audit, width: int) -> Table:
    """The table of an audit.

    Args:
        audit: the audit.
        width: of the terminal; a narrow one gets fewer columns, and names in several lines.

    Returns:
        A row for each layer; the unusual ones are marked by a sign and bold.
    """
    from rich import box
    from rich.table import Table
    from rich.text import Text

    cells: dict[str, list[str | Text]] = {
        heading: [heading, *(cell_of(layer) for layer in audit.layers if not layer.absent)]
        for heading, cell_of in _COLUMNS.items()
    }
    cells["pair"] += [_ABSENT for layer in audit.layers if layer.absent]
    widths = {heading: max(map(len, column)) + _GAP for heading, column in cells.items()}
    longest = max(len(layer.name) for layer in audit.layers)
    left_out = set(_LEFT_OUT[:2] if width < _WITH_ALL else ())
    for heading in _LEFT_OUT:
        if sum(widths[name] for name in widths.keys() - left_out) + min(longest, _LEAST_NAME) + _SIGN <= width:
            break
        left_out.add(heading)
    columns = {heading: cell_of for heading, cell_of in _COLUMNS.items() if heading not in left_out}
    room = width - _SIGN - sum(map(widths.__getitem__, columns))
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column("", no_wrap=True)
    table.add_column("layer", overflow="fold", min_width=16)
    for heading in columns:
        table.add_column(heading, justify="right", no_wrap=True)
    marked = {finding.layer for finding in audit.unusual}
    for layer in audit.layers:
        is_marked, name = layer.name in marked, Text(_in_lines(layer.name, room))
        if layer.absent:
            sign, word = ("!", "unusual") if is_marked else ("?", _ABSENT)
            heads = [columns["heads"](layer)] if "heads" in columns else []
            table.add_row(sign, name, *heads, Text(word, style="yellow"))
            continue
        own = (cell_of(layer) for cell_of in columns.values())
        table.add_row("!" if is_marked else "", name, *own, style="bold" if is_marked else None)
    return table


def _in_lines(name: str, room: int) -> str:
    """A dotted name, broken after dots where it is too long for a line."""
    lines = [""]
    for part in re.findall(r"[^.]*\.|[^.]+$", name):
        if lines[-1] and len(lines[-1]) + len(part) > room:
            lines.append("")
        lines[-1] += part
    return "\n".join(lines)


def _aligned(value: float | None) -> Text:
    from rich.text import Text

    return Text("-") if value is None else Text.assemble(cell(value, 2), " ", decimal(value))


def print_audit(out: Console, audit: Audit) -> None:
    """Print an audit: the table, what was not audited, the findings, and the verdict last.

    Args:
        out: where to.
        audit: the audit.
    """
    from rich.text import Text

    if audit.layers:
        out.print(audit_table(audit, out.width))
        out.print()
    for name, reason in audit.not_audited.items():
        out.print(Text(f"not audited: {name}: {reason}", style="yellow"), soft_wrap=True)
    for finding in audit.findings:
        sentence = f"{finding.level}: {finding.layer}: {finding.finding.what}"
        remedy = f"; try {finding.finding.remedy}" if finding.finding.remedy else ""
        out.print(Text(sentence + remedy, style=LEVEL_STYLES[finding.level]), soft_wrap=True)
    out.print(Text(audit.verdict, style="bold red" if audit.unusual else "bold"), soft_wrap=True)


def print_comparison(out: Console, comparison: Comparison, most: int) -> None:
    """Print a comparison: the layers that changed most, and the summary last.

    Args:
        out: where to.
        comparison: the comparison.
        most: largest number of rows.
    """
    from rich import box
    from rich.table import Table
    from rich.text import Text

    out.print(Text(f"A  {comparison.first}\nB  {comparison.second}\n"), soft_wrap=True)
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    is_narrow = out.width < _NARROW
    quantities = ["worst_alignment"] if is_narrow else ["worst_alignment", "alignment"]
    table.add_column("layer", overflow="fold", min_width=16)
    for quantity in ("pair", *({"worst_alignment": "aligned", "alignment": "mean"}[name] for name in quantities)):
        table.add_column(f"{quantity} in A", justify="right", no_wrap=True)
        table.add_column("in B", justify="right", no_wrap=True)
    table.add_column("heads that moved", justify="right", overflow="fold")
    for layer in comparison.layers[:most]:
        pairs = ("-".join(map(str, pair)) or "-" for pair in (layer.pair_before, layer.pair_after))
        numbers = [decimal(side.get(name)) for name in quantities for side in (layer.before, layer.after)]
        moved = [
            f"{head} ({layer.moved[head]:.2f})" if layer.moved else str(head)
            for head in layer.moved_heads[: 1 if is_narrow else 3]
        ]
        table.add_row(Text(layer.name), *pairs, *numbers, ", ".join(moved) or "-")
    if comparison.layers:
        out.print(table)
    if len(comparison.layers) > most:
        out.print(
            Text(f"{len(comparison.layers) - most} more layers changed less; --rows shows more of them."),
            soft_wrap=True,
        )
    for which, names in (("A", comparison.only_in_first), ("B", comparison.only_in_second)):
        if names:
            out.print(Text(f"only in {which}: {', '.join(names)}", style="yellow"), soft_wrap=True)
    for name, reason in (comparison.not_compared or {}).items():
        out.print(Text(f"not compared: {name}: {reason}", style="yellow"), soft_wrap=True)
    out.print(Text(comparison.summary, style="bold"), soft_wrap=True)


def print_alerts(out: Console, alerts: Iterable[Alert], active: Sequence[Alert]) -> None:
    """Print alerts, and how many are active.

    Args:
        out: where to.
        alerts: the alerts, in their order.
        active: those of them that are active at the end.
    """
    from rich.text import Text

    for alert in alerts:
        out.print(
            Text(f"{alert.status}: {alert.message}", style="green" if alert.is_resolved else LEVEL_STYLES[alert.level]),
            soft_wrap=True,
        )
    out.print(Text(active_sentence(active), style="bold red" if active else "bold"), soft_wrap=True)


def active_sentence(active: Sequence[Alert]) -> str:
    """A sentence about the number of active alerts and their layers.

    Args:
        active: warnings and critical alerts that are not resolved.

    Returns:
        One sentence.
    """
    if not active:
        return "No active alert."
    first = active[0]
    more = f", and {len(active) - 1} more" if len(active) > 1 else ""
    count = "1 active alert" if len(active) == 1 else f"{len(active)} active alerts"
    since = first.step if first.finding.since is None else first.finding.since
    began = f"{'; ' if ';' in first.finding.what else ', '}since step {since}"
    return f"{count}: {first.layer}: {first.finding.what}{began}{more}."
