"""What was found, printed once at the start of training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hdi_callback.attention import AttentionLayer, Refusal


def print_layers(
    layers: Sequence[AttentionLayer],
    refused: Sequence[Refusal],
    *,
    every_n_steps: int,
    say: Callable[[str], None] = print,
) -> None:
    """Print the layers that are watched and those that are not: a table on a terminal, plain lines elsewhere.

    Args:
        layers: the layers that are watched.
        refused: modules that look like attention but cannot be read.
        every_n_steps: optimizer steps between readings.
        say: takes the plain lines where no table can be drawn.
    """
    title = f"hdi_callback watches {len(layers)} attention layers, every {every_n_steps} optimizer steps"
    if not _print_table(title, layers, refused):
        say("\n".join(_lines(title, layers, refused)))


def _heads(layer: AttentionLayer) -> str:
    if layer.num_key_heads == layer.num_heads:
        return str(layer.num_heads)
    return f"{layer.num_heads} ({layer.num_key_heads} key)"


def _width(layer: AttentionLayer) -> str:
    return str(layer.head_dim) if layer.value_dim == layer.head_dim else f"{layer.head_dim} / {layer.value_dim}"


def _print_table(title: str, layers: Sequence[AttentionLayer], refused: Sequence[Refusal]) -> bool:
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        return False
    console = Console()
    if not console.is_terminal:
        return False
    table = Table(title=title, title_justify="left")
    for heading, justify in (("layer", "left"), ("heads", "right"), ("width", "right"), ("layout", "left")):
        table.add_column(heading, justify="right" if justify == "right" else "left", overflow="fold")
    for layer in layers:
        table.add_row(layer.name, _heads(layer), _width(layer), layer.kind)
    for refusal in refused:
        table.add_row(f"[dim]{refusal.name}[/dim]", "", "", f"[yellow]not watched: {refusal.reason}[/yellow]")
    console.print(table)
    return True


def _lines(title: str, layers: Sequence[AttentionLayer], refused: Sequence[Refusal]) -> list[str]:
    lines = [title]
    lines += [f"  {layer.name}: {_heads(layer)} heads of width {_width(layer)}, {layer.kind}" for layer in layers]
    lines += [f"  {refusal.name}: not watched: {refusal.reason}" for refusal in refused]
    return lines
