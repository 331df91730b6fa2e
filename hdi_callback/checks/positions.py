"""Rotary positions: which features of a head are turned together, and by what angles."""

from __future__ import annotations

import torch
from torch import Tensor

from hdi_callback.attention.cores import Core
from hdi_callback.attention.labels import Label, Labels
from hdi_callback.attention.planes import small, unique_rows
from hdi_callback.attention.tape import Step
from hdi_callback.checks.scores import KEPT

_ROWS = 64  # of queries, keys or values are looked at for pairs


def pairs_of(labels: Labels, label: Label) -> frozenset[tuple[int, int]]:
    """Say which places of a head have the same two features."""
    short = small(label.features)
    if short.shape[-1] != label.features.shape[-1]:  # one feature at all places
        return frozenset()
    rows, _ = unique_rows(short.reshape(-1, short.shape[-1])[:_ROWS])
    pairs: set[tuple[int, int]] = set()
    for row in rows.tolist():
        places: dict[int, list[int]] = {}
        for place, number in enumerate(row):
            members = labels.members(number)
            if len(members) == 2 and len({labels.owner(one) for one in members}) == 1:
                places.setdefault(number, []).append(place)
        pairs |= {(mine[0], mine[1]) for mine in places.values() if len(mine) == 2}
    return frozenset(pairs)


def cosines_of(labels: Labels, core: Core, starts: Tensor) -> Tensor | None:
    """Read the cosines that features are multiplied with, in place: ``x * cos + turned(x) * sin``.

    Args:
        labels: of the tape.
        core: the attention.
        starts: ``(heads, width)``, the feature at each place of each head, before it is turned.

    Returns:
        ``(heads, tokens, width)`` of the first heads and tokens, NaN where nothing is known; `None` if there is no
        such table.
    """
    product = labels.products.of(core.score_step) if core.score_step is not None else None
    sides = core.step.inputs[:2] if product is None else [product.first, product.second]
    for step in labels.leading_to(sides):
        found = _cosines(labels, step, starts) if step.op == "mul" else None
        if found is not None:
            return found
    return None


def _cosines(labels: Labels, step: Step, starts: Tensor) -> Tensor | None:
    main = next((view for view in step.inputs if view.cell.is_mapped and view.is_float), None)
    table = next((view.value for view in step.inputs if view.value is not None and view.numel > 1), None)
    label = labels.may_read(main) if main is not None else None
    made = step.outputs[0]
    if made is None or label is None or table is None or table.is_complex() or label.features.shape != made.shape:
        return None
    whole = [1] * (len(made.shape) - table.dim()) + list(table.shape)
    kept = [size if size > 1 else min(full, KEPT) for size, full in zip(whole, made.shape)]
    width = kept[-1]
    if width != made.shape[-1] or width > starts.shape[1]:
        return None
    cosines = table.cpu().double().expand(kept)
    here = tuple(map(slice, kept))
    features, tokens = label.features[here], label.tokens[here][..., 0]
    found = torch.full((min(len(starts), 2), KEPT, starts.shape[1]), torch.nan, dtype=torch.double)
    for head in range(len(found)):
        is_mine = (features == starts[head, :width]).all(-1) & (tokens > 0) & (tokens <= KEPT)
        found[head, tokens[is_mine] - 1, :width] = cosines[is_mine]
    return None if bool(found.isnan().all()) else found
