"""Small HTML tables that objects show in a notebook."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hdi_callback.attention import AttentionLayer, Refusal
    from hdi_callback.monitoring.alerts import Alert

_COLOURS = {"critical": "#d62728", "warning": "#b35900", "notice": "#666666"}
_MOST_ROWS = 100


def table(headings: Sequence[str], rows: Iterable[Sequence[object]], title: str = "") -> str:
    """An HTML table; cells are escaped.

    Args:
        headings: headings of the columns.
        rows: at most a hundred are shown.
        title: a line above it.

    Returns:
        HTML.

    Example:
        >>> table(["layer"], [["<b>"]])
        '<table><thead><tr><th>layer</th></tr></thead><tbody><tr><td>&lt;b&gt;</td></tr></tbody></table>'
    """
    cells = list(rows)
    body = "".join(f"<tr>{''.join(f'<td>{escape(str(cell))}</td>' for cell in row)}</tr>" for row in cells[:_MOST_ROWS])
    head = "".join(f"<th>{escape(heading)}</th>" for heading in headings)
    more = f"<p>and {len(cells) - _MOST_ROWS} more</p>" if len(cells) > _MOST_ROWS else ""
    above = f"<p><b>{escape(title)}</b></p>" if title else ""
    return f"{above}<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{more}"


def alert_line(alert: Alert) -> str:
    """An alert as a line of HTML.

    Args:
        alert: the alert.

    Returns:
        HTML.
    """
    colour = _COLOURS["notice"] if alert.is_resolved else _COLOURS[alert.level]
    return f'<p><b style="color:{colour}">{escape(alert.status)}</b> {escape(alert.message)}</p>'


def layer_table(layers: Sequence[AttentionLayer], refused: Sequence[Refusal]) -> str:
    """A table of the layers that are watched and of those that are not.

    Args:
        layers: watched layers.
        refused: refused attention.

    Returns:
        HTML.
    """
    rows: list[tuple[object, ...]] = [
        (layer.name, layer.num_heads, layer.num_key_heads, layer.head_dim, layer.kind) for layer in layers
    ]
    rows += [(one.name, "", "", "", f"not watched: {one.reason}") for one in refused]
    title = f"hdi_callback watches {len(layers)} attention layers"
    return table(["layer", "heads", "key heads", "head width", "layout"], rows, title)


def run_summary(
    name: str, layers: Sequence[AttentionLayer], refused: Sequence[Refusal], alerts: Sequence[Alert], history: object
) -> str:
    """Summary of a watched run: its alerts, its history, its layers.

    Args:
        name: name of the callback.
        layers: watched layers.
        refused: refused attention.
        alerts: those that are active.
        history: where the history is; `None` for nowhere.

    Returns:
        HTML.
    """
    state = f"{len(alerts) or 'no'} active alert{'s' if len(alerts) > 1 else ''}"
    lines = "".join(map(alert_line, alerts[:_MOST_ROWS]))
    place = "" if history is None else f"<p>history: <code>{escape(str(history))}</code></p>"
    watched = layer_table(layers, refused) if layers or refused else "<p>no run has begun</p>"
    return f"<p><b>{escape(name)}</b>: {state}</p>{lines}{place}{watched}"
