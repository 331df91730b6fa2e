"""Tell which rows and columns of parameters are old ones in another place, by a few entries of each.

No step of an optimizer does that: a file in another layout does, or code that reorders, splits or swaps weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from hdi_callback.checks.facts import ranges

_ENTRIES, _FEWEST = 16, 8  # that stand for a row or a column, in a regular grid; that tell one from another
_LARGEST = 2**24  # entries that are kept in all, 64 MiB; larger models are not compared
_NEAR = 0.7  # distance from an old row, as a share of that from the next one, if it is that row but for some steps
_LEAST, _MOST = 4, 128  # rows of a parameter that are called moved; that are looked for

Side = tuple[int, str, int, int]  # number of a parameter, ``rows`` or ``columns``, how many, and how long they are
Place = tuple[str, str]  # the layer that a parameter belongs to, or `""`, and its name there or in the model
Key = tuple[Any, ...]


@torch.no_grad()
def sketch_of(parameters: Sequence[nn.Parameter], home: torch.device) -> tuple[list[Side], Tensor]:
    """Return sides of parameters, and entries of each of their rows or columns, one after the other."""
    sides: list[Side] = []
    entries = [torch.zeros(0, device=home)]
    for number, parameter in enumerate(parameters):
        if parameter.dim() < 2:
            continue
        matrix = parameter.flatten(1) if parameter.dim() == 4 else parameter.flatten(0, -2)
        for lines, side in (("rows", matrix), ("columns", matrix.mT)):
            if len(side) >= _LEAST and side.shape[1] >= _FEWEST:
                sides.append((number, lines, *side.shape))
                grid = side[:, :: max(1, side.shape[1] // _ENTRIES)][:, :_ENTRIES]
                entries.append(grid.to(home, torch.float32).reshape(-1))
    return (sides, torch.cat(entries)) if sum(map(len, entries)) <= _LARGEST else ([], entries[0])


class Places:
    """Rows and columns as they were at the last comparison; `moved`: parameter -> which of them were others."""

    def __init__(self) -> None:
        self.moved: dict[Place, str] = {}
        self._before: dict[Key, Tensor] = {}  # with number and length of rows

    def compare(self, names: Sequence[Place | None], sides: Sequence[Side], entries: Tensor) -> None:
        """Find what has moved in entries that `sketch_of` returned, of parameters with these names."""
        now: dict[Key, Tensor] = {}
        groups: dict[Key, list[Key]] = {}
        sizes = [count * min(_ENTRIES, length) for _, _, count, length in sides]
        for (number, lines, *shape), part in zip(sides, entries.split(sizes)):
            key: Key = names[number], lines, *shape
            now |= {key: part.view(shape[0], -1)} if key[0] else {}
            if key[0] and key in self._before:
                groups.setdefault(key[2:], []).append(key)
        moved: dict[Place, str] = {}
        for keys in groups.values():
            old, new = (torch.stack([table[key] for key in keys]) for table in (self._before, now))
            has_left = (new - old).norm(dim=-1) > _NEAR * (old - old.mean(1, keepdim=True)).norm(dim=-1)
            for number, key in enumerate(keys):
                text = "" if key[0] in moved else _moved(number, keys, old, new[number], has_left)
                moved |= {key[0]: text} if text else {}
        self.moved |= moved
        self._before |= now


def _moved(number: int, keys: Sequence[Key], old: Tensor, new: Tensor, has_left: Tensor) -> str:
    """Return in words which rows of one of the sides are old ones of it or of another; `""` for none."""
    left = has_left[number].nonzero().flatten()
    every = max(1, -(-len(left) // _MOST))
    rows = left[::every]
    distances = torch.cdist(new[rows], old.flatten(0, 1), compute_mode="donot_use_mm_for_euclid_dist")
    (near, further), places = distances.topk(2, largest=False).values.T, distances.argmin(1)
    is_old = (near < _NEAR * further) & (places != rows + number * len(new))
    pairs = [*zip(rows[is_old].tolist(), places[is_old].tolist())]
    # Rows that many are alike to, and a few that begin as copies of others, have not moved.
    is_copied = not bool(has_left.flatten()[places[is_old]].all()) and 2 * every * len(pairs) < len(new)
    if len(pairs) < max(_LEAST, len(rows) / 2) or len({at for _, at in pairs}) < len(pairs) or is_copied:
        return ""
    runs = groupby(enumerate(pairs), lambda each: (each[1][0] - each[0], each[1][1] - each[0], each[1][1] // len(new)))
    longest = max(([pair for _, pair in run] for _, run in runs), key=len)
    (place, lines, *_), (other, other_lines, *_) = keys[number], keys[longest[0][1] // len(new)]
    (now,), (was,) = ranges([row for row, _ in longest]), ranges([at % len(new) for _, at in longest])
    own_name, other_name = (f"`{'.'.join(filter(None, each))}`" for each in (place, other))
    owner = "it in another place" if other == place else other_name
    more = f", and {len(pairs) - len(longest)} more" if len(pairs) > len(longest) else ""
    return f"{lines} of {own_name} are old {other_lines} of {owner}: {was} at {now}{more}"
