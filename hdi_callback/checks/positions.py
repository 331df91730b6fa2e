"""Rotary positions: which features of a head are turned together, and by what angles."""

from __future__ import annotations

import torch
from torch import Tensor

from hdi_callback.attention.discovery.cores import Core
from hdi_callback.attention.discovery.labels import SEVERAL, Label, Labels
from hdi_callback.attention.discovery.planes import small, unique_rows
from hdi_callback.attention.tape import Step
from hdi_callback.checks.scores import KEPT, sides_of

_FURTHEST = 4096  # tokens by which queries may be turned more than keys
_ROUNDING = 0.02  # of tables in bf16
_ROWS = 64  # of queries, keys or values are looked at for pairs


def pairs_of(labels: Labels, label: Label) -> frozenset[tuple[int, int]]:
    """Return the pairs of places of a head that hold the same two features, as a rotation makes them."""
    short = small(label.features)
    if short.shape[-1] != label.features.shape[-1] or not bool((short < SEVERAL).any()):  # one feature, or no sets
        return frozenset()
    rows, _ = unique_rows(short.reshape(-1, short.shape[-1])[:_ROWS])
    pairs: set[tuple[int, int]] = set()
    for row in rows.tolist():
        places: dict[int, list[int]] = {}
        for place, number in enumerate(row):
            members = labels.members(number)
            if len(members) == 2 and len({labels.owner(member) for member in members}) == 1:
                places.setdefault(number, []).append(place)
        pairs |= {(own_places[0], own_places[1]) for own_places in places.values() if len(own_places) == 2}
    return frozenset(pairs)


def cosines_of(labels: Labels, core: Core, starts: Tensor) -> Tensor | None:
    """Return the cosines that features are multiplied with, in place: ``x * cos + turned(x) * sin``.

    ``(heads, tokens, width)`` of the first heads and tokens, NaN where nothing is known; `None` if there is no table.
    `starts` are the features at each place of each head before they are turned, ``(heads, width)``.
    """
    steps = (step for step in labels.leading_to(sides_of(labels, core)) if step.op == "mul")
    return next((table for step in steps if (table := _cosines(labels, step, starts)) is not None), None)


def length_of(labels: Labels, core: Core) -> float | None:
    """Return the length of the rotation of queries and keys, 1 if they are only turned; `None` if it is not known."""
    for step in labels.leading_to(sides_of(labels, core)):
        before = [view.cell.step for view in step.inputs if view.cell.step is not None] if step.op == "add" else [step]
        tables = [
            view.value for part in before if part.op == "mul" for view in part.inputs
            if view.value is not None and view.numel > 1
        ]  # fmt: skip
        if len(tables) == 1 and tables[0].is_complex():
            lengths = tables[0].abs().double()
        elif len(tables) == 2 and step.op == "add" and tables[0].shape == tables[1].shape:
            lengths = (tables[0].double().square() + tables[1].double().square()).sqrt()
        else:
            continue
        return float(lengths.mean()) if float(lengths.max() - lengths.min()) < _ROUNDING else None
    return None


def _cosines(labels: Labels, step: Step, starts: Tensor) -> Tensor | None:
    main = next((view for view in step.inputs if view.cell.is_mapped and view.is_float), None)
    table = next((view.value for view in step.inputs if view.value is not None and view.numel > 1), None)
    label = labels.may_read(main) if main is not None else None
    result = step.outputs[0]
    if result is None or label is None or table is None or table.is_complex() or label.features.shape != result.shape:
        return None
    whole = [1] * (len(result.shape) - table.dim()) + list(table.shape)
    sizes = [size if size > 1 else min(full, KEPT) for size, full in zip(whole, result.shape)]
    width = sizes[-1]
    if width != result.shape[-1] or width > starts.shape[1]:
        return None
    cosines = table.cpu().double().expand(sizes)
    here = tuple(map(slice, sizes))
    features, tokens = label.features[here], label.tokens[here][..., 0]
    angles = torch.full((min(len(starts), 2), KEPT, starts.shape[1]), torch.nan, dtype=torch.double)
    for head in range(len(angles)):
        is_mine = (features == starts[head, :width]).all(-1) & (tokens > 0) & (tokens <= KEPT)
        angles[head, tokens[is_mine] - 1, :width] = cosines[is_mine]
    return None if bool(angles.isnan().all()) else angles


def turns_of(cosines: Tensor) -> Tensor:
    """Return cosines of the angles from one token to the next, ``(..., width)``, of tables ``(..., tokens, width)``."""
    # Wherever it starts, cos(a - d) + cos(a + d) = 2 cos(a) cos(d).
    here, around = cosines[..., 1:-1, :], cosines[..., :-2, :] + cosines[..., 2:, :]
    return (around / (2 * here)).where(here.abs() > 0.3, torch.nan).nanmedian(-2).values


def shift_of(query: Tensor, key: Tensor) -> int | None:
    """Return by how many tokens queries are turned more than keys, of tables ``(tokens, width)``; `None` if by none."""
    angles = turns_of(key).clamp(-1, 1).arccos()
    turns = angles.sin() > 0.1
    if not bool(turns.any()):
        return None
    phases = [
        torch.atan2((table[:-2] - table[2:]) / (2 * angles.sin()), table[1:-1])[:, turns] for table in (query, key)
    ]
    gap = phases[0] - phases[1]
    gap = torch.atan2(gap.sin().nanmean(0), gap.cos().nanmean(0))
    shifts = torch.arange(-_FURTHEST, _FURTHEST + 1)
    errors = torch.remainder(shifts[:, None] * angles[turns] - gap + torch.pi, 2 * torch.pi) - torch.pi
    near = shifts[errors.abs().amax(1) < 0.1]
    return int(near[near.abs().argmin()]) if len(near) else None
