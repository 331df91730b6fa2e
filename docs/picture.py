"""Draw docs/images/architecture.svg from the imports as they are: ``python docs/picture.py``.

A box is a room, with its folders; an arrow means "imports", and is left out where others lead there already. What all
rooms import (`errors`, `arguments`, `deprecation`, `guard`) is the ground.
"""

from __future__ import annotations

import ast
import textwrap
from html import escape
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "hdi_callback"
PICTURE = Path(__file__).with_name("images") / "architecture.svg"
GROUND = ("errors", "arguments", "deprecation", "guard")
ROOMS = {  # where each stands: column and row, and what it does
    "core": (0, 4, "tensors in, tensors out"),
    "attention": (2, 4, "modules in, heads out"),
    "monitoring": (1, 3, "arm, capture, measure, keep, judge"),
    "audits": (1, 2, "a model in, a verdict out"),
    "dashboards": (1, 1, "readings made visible"),
    "integrations": (2, 0, "a trainer's hooks"),
    "command": (0, 0, "the command line"),
}
WIDTH, HEIGHT, COLUMN, ROW, LEFT, TOP = 280, 92, 306, 128, 22, 18
LETTERS = 46  # of a line of folders in a box


def imports_of_rooms() -> dict[str, set[str]]:
    """Give the rooms that each room imports."""
    found: dict[str, set[str]] = {room: set() for room in ROOMS}
    for room in ROOMS:
        for path in (PACKAGE / room).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                if isinstance(node, ast.ImportFrom):
                    names = [f"{node.module}.{alias.name}" for alias in node.names]
                parts = [name.split(".") for name in names if name.startswith("hdi_callback.")]
                found[room] |= {part[1] for part in parts if part[1] in ROOMS and part[1] != room}
    return found


def needed(arrows: dict[str, set[str]]) -> list[tuple[str, str]]:
    """Leave out arrows to where others lead already."""

    def reach(room: str) -> set[str]:
        return set().union(*({other} | reach(other) for other in arrows[room]))

    return [
        (room, other) for room in arrows for other in sorted(arrows[room])
        if not any(other in reach(between) for between in arrows[room] - {other})
    ]  # fmt: skip


def corner(room: str) -> tuple[int, int]:
    """Give the upper left corner of a box."""
    column, row, _ = ROOMS[room]
    return LEFT + column * COLUMN, TOP + row * ROW


def picture() -> str:
    """Write the picture."""
    boxes, arrows = [], []
    for room, (_, _, what) in ROOMS.items():
        x, y = corner(room)
        folders = sorted(path.parent.name for path in (PACKAGE / room).glob("*/__init__.py"))
        lines = [(room, 'font-weight="600" fill="#0f172a"'), (what, 'fill="#475569"')]
        listed = textwrap.wrap(" · ".join(folders), LETTERS)
        lines += [(line.removesuffix(" ·"), 'fill="#6366f1"') for line in listed]
        middle, first = x + WIDTH // 2, y + 15 + (HEIGHT - 20 * len(lines)) // 2
        boxes.append(f'<rect x="{x}" y="{y}" width="{WIDTH}" height="{HEIGHT}" rx="8"/>')
        boxes += [
            f'<text x="{middle}" y="{first + 20 * place}" stroke="none" {style}>{escape(text)}</text>'
            for place, (text, style) in enumerate(lines)
        ]
    for room, other in needed(imports_of_rooms()):
        (x, y), (to_x, to_y) = corner(room), corner(other)
        side = (to_x > x) - (to_x < x)
        start, end = x + WIDTH // 2 + side * WIDTH // 4, to_x + WIDTH // 2 - side * WIDTH // 4
        arrows.append(f'<path d="M{start} {y + HEIGHT} L{end} {to_y - 2}"/>')
    height, ground = TOP + 5 * ROW, "on the ground of all: " + ", ".join(GROUND)
    width = 2 * LEFT + 2 * COLUMN + WIDTH
    body = "\n    ".join(boxes)
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" \
font-family="system-ui, sans-serif" font-size="12.5">
  <!-- Written by docs/picture.py -->
  <defs>
    <marker id="arrow" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" orient="auto">
      <path d="M0 0 L10 5 L0 10 z" fill="#64748b"/>
    </marker>
  </defs>
  <rect width="{width}" height="{height}" fill="#ffffff"/>
  <g stroke="#64748b" stroke-width="1.6" fill="none" marker-end="url(#arrow)">
    {(chr(10) + "    ").join(arrows)}
  </g>
  <g stroke="#94a3b8" stroke-width="1.2" fill="#f8fafc" text-anchor="middle">
    {body}
  </g>
  <text x="{width // 2}" y="{height - 8}" fill="#64748b" text-anchor="middle">{ground}; an arrow means: imports</text>
</svg>
"""


if __name__ == "__main__":
    PICTURE.write_text(picture())
