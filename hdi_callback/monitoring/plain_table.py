"""Tables in plain text, for objects that are printed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from hdi_callback.attention.names import printable

if TYPE_CHECKING:
    from hdi_callback.attention import AttentionLayer, Refusal

_MOST_ROWS = 100


def plain_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in plain text: the first column to the left, numbers to the right.

    Args:
        headings: headings of the columns.
        rows: at most a hundred are shown.

    Returns:
        Lines, without a break at the end.

    Example:
        >>> print(plain_table(["layer", "HDI"], [["blocks.0.attn", "0.83"], ["head", "0.5"]]))
        layer           HDI
        blocks.0.attn  0.83
        head            0.5
    """
    cells = [list(headings), *([printable(cell) for cell in row] for row in rows)]
    shown = cells[: _MOST_ROWS + 1]
    widths = [max(map(len, column)) for column in zip(*shown)]
    lines = []
    for first, *others in shown:
        beside = [cell.rjust(width) for cell, width in zip(others, widths[1:])]
        lines.append("  ".join([first.ljust(widths[0]), *beside]).rstrip())
    if len(cells) > len(shown):
        lines.append(f"and {len(cells) - len(shown)} more")
    return "\n".join(lines)


def layer_lines(layers: Sequence[AttentionLayer], refused: Sequence[Refusal]) -> list[str]:
    """The layers that are watched and those that are not, a line each.

    Args:
        layers: watched layers.
        refused: refused attention.

    Returns:
        Lines.
    """
    lines = [
        f"  {layer.name}: {heads_in_words(layer.num_heads, layer.num_key_heads)} heads of width "
        f"{widths_in_words(layer)}, layout: {layer.kind}"
        for layer in layers
    ]
    return lines + [f"  {refusal.name}: not watched: {refusal.reason}" for refusal in refused]


def heads_in_words(num_heads: int, num_key_heads: int) -> str:
    """Number of heads of a layer.

    Args:
        num_heads: number of query heads.
        num_key_heads: number of key heads.

    Returns:
        ``"32"``, or ``"32 (8 key)"`` where heads share their keys.
    """
    return f"{num_heads} ({num_key_heads} key)" if num_key_heads != num_heads else str(num_heads)


def widths_in_words(layer: AttentionLayer) -> str:
    """Width of the heads of a layer.

    Args:
        layer: the layer.

    Returns:
        ``"64"``, or ``"64 / 128"`` where values have another width than keys.
    """
    return str(layer.head_dim) if layer.value_dim == layer.head_dim else f"{layer.head_dim} / {layer.value_dim}"


def decimal(value: float | None) -> str:
    """A number with two digits.

    Args:
        value: the number.

    Returns:
        ``"0.93"``; ``"-"`` if there is none.
    """
    return "-" if value is None else f"{value if abs(value) >= 0.005 else 0.0:.2f}"  # no -0.00
