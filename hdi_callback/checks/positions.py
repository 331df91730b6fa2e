"""Rotary positions: which features of a head are turned together, and by what angles."""

from __future__ import annotations

import torch
from torch import Tensor

from hdi_callback.attention.cores import Core
from hdi_callback.attention.labels import Label, Labels
from hdi_callback.attention.planes import small, unique_rows
from hdi_callback.attention.tape import Step

_TOKENS = 64  # of which angles are read
_TABLES = 4  # that are looked at for each role


def pairs_of(labels: Labels, label: Label) -> frozenset[tuple[int, int]]:
    """Say which places of a head have the same two features."""
    short = small(label.features)
    if short.shape[-1] != label.features.shape[-1]:  # one feature at all places
        return frozenset()
    rows, _ = unique_rows(short.reshape(-1, short.shape[-1])[:64])
    pairs: set[tuple[int, int]] = set()
    for row in rows.tolist():
        places: dict[int, list[int]] = {}
        for place, number in enumerate(row):
            members = labels.members(number)
            if len(members) == 2 and len({labels.owner(one) for one in members}) == 1:
                places.setdefault(number, []).append(place)
        pairs |= {(mine[0], mine[1]) for mine in places.values() if len(mine) == 2}
    return frozenset(pairs)


def angles_of(labels: Labels, core: Core, role: str, starts: Tensor) -> Tensor | None:
    """Read the cosines that features are multiplied with, in place: ``x * cos + turned(x) * sin``.

    Args:
        labels: of the tape.
        core: the attention.
        role: ``"query"`` or ``"key"``.
        starts: ``(heads, width)``, the feature at each place of each head, before it is turned.

    Returns:
        ``(heads, tokens, width)`` of the first heads and tokens, NaN where nothing is known; `None` if there is no
        such table.
    """
    part = core.parts[0]
    if part.product is None:
        views = [core.step.taken[0 if role == "query" else 1]]
    else:
        product = labels.products.of(core.score_step) if core.score_step is not None else None
        views = [product.first, product.second] if product is not None else []
    found = None
    tables = 0
    for step in labels.behind(views):
        if step.op != "mul" or tables == _TABLES:
            continue
        read = _table(labels, step, starts)
        if read is not None:
            tables += 1
            found = read if found is None else torch.where(found.isnan(), read, found)
    return found


def _table(labels: Labels, step: Step, starts: Tensor) -> Tensor | None:
    main = next((view for view in step.taken if view.cell.is_mapped and view.is_float), None)
    table = next((view for view in step.taken if view.value is not None and view.numel > 1), None)
    made = step.made[0]
    if main is None or table is None or table.value is None or made is None or table.value.is_complex():
        return None
    label = labels.may_read(main)
    if label is None or label.features.shape != made.shape or made.shape[-1] > starts.shape[1]:
        return None
    value = table.value.cpu().double()
    value = value.reshape(*[1] * (len(made.shape) - value.dim()), *value.shape)
    whole = (*[1] * (len(made.shape) - len(table.shape)), *table.shape)
    sizes = [have if size > 1 else min(full, _TOKENS) for have, size, full in zip(value.shape, whole, made.shape)]
    if sizes[-1] != made.shape[-1]:
        return None
    here = tuple(slice(size) for size in sizes)
    features, tokens = label.features[here], label.tokens[here][..., 0]
    value = value.expand(sizes)
    heads, width = starts.shape
    found = torch.full((min(heads, 2), _TOKENS, width), torch.nan, dtype=torch.double)
    for head in range(len(found)):
        is_mine = (features == starts[head, : sizes[-1]]).all(-1)
        at = tokens[is_mine] - 1
        rows = value[is_mine][(at >= 0) & (at < _TOKENS)]
        found[head, at[(at >= 0) & (at < _TOKENS)], : sizes[-1]] = rows
    return None if bool(found.isnan().all()) else found
