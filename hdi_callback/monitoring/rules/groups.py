"""Groups of similar heads: connected components of the pairs at or above a limit."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from hdi_callback.monitoring.alerts import Finding, Row, Series
from hdi_callback.monitoring.rules.lenses import WORST, Lens, pair_of

Groups = tuple[tuple[int, ...], ...]

_OVERLAP: dict[Lens, str] = {"subspace": "overlap", "energy": "energy_overlap"}
_WEIGHT: dict[Lens, str] = {"subspace": "rank", "energy": "effective_rank"}


def aligned_groups(
    row: Row, facts: Mapping[str, Any], lens: Lens, limit: float, *, kept: Groups = (), margin: float = 0.0
) -> Groups:
    """Groups of heads that are joined by a chain of pairs whose alignment reaches a limit.

    Args:
        row: a reading of a layer.
        facts: facts about the layer.
        lens: the lens of the alignment.
        limit: limit of the alignment of a pair.
        kept: groups that were reported; their pairs hold down to the limit less the margin.
        margin: see `kept`.

    Returns:
        Groups of two heads or more, each in ascending order. If a history holds no matrices, each head is joined only
        to its nearest; if that is not known, the closest pair represents all.
    """
    sizes, width = row.arrays.get(_WEIGHT[lens], ()), facts.get("width")
    least = _limits(limit, kept, margin)
    if width and sizes and _OVERLAP[lens] in row.matrices:
        overlap = row.matrices[_OVERLAP[lens]].tolist()
        H = len(overlap)
        pairs = [(h, g, overlap[h][g]) for h in range(H) for g in range(h) if min(sizes[h], sizes[g]) > 0]
        return groups_of(
            (h, g) for h, g, value in pairs if _above_chance(value, sizes[h], sizes[g], width) >= least(h, g)
        )
    prefix = "" if lens == "subspace" else "energy_"
    nearest, overlaps = row.arrays.get(f"{prefix}nearest", ()), row.arrays.get(f"{prefix}nearest_overlap", ())
    if width and sizes and nearest:
        near = [(h, int(g), value) for h, (g, value) in enumerate(zip(nearest, overlaps)) if g >= 0]
        return groups_of(
            (h, g) for h, g, value in near if _above_chance(value, sizes[h], sizes[g], width) >= least(h, g)
        )
    pair = pair_of(row, lens)
    return (pair,) if len(pair) == 2 and min(pair) >= 0 and row.values.get(WORST[lens], -1.0) >= least(*pair) else ()


def similar_groups(
    row: Row,
    matrix: str,
    limit: float,
    *,
    kept: Groups = (),
    margin: float = 0.0,
    is_joined: Callable[[int, int, float], bool] = lambda one, other, value: True,
) -> Groups:
    """Groups of heads that are joined by a chain of matrix entries that reach a limit.

    Args:
        row: a reading of a layer.
        matrix: name of a matrix in the history; ``<matrix>_worst_pair`` represents all if there is none.
        limit: limit of an entry.
        kept: groups that were reported; their pairs hold down to the limit less the margin.
        margin: see `kept`.
        is_joined: a further condition on two heads and their entry.

    Returns:
        Groups of two heads or more, each in ascending order.
    """
    least = _limits(limit, kept, margin)
    if matrix in row.matrices:
        entries = row.matrices[matrix].tolist()
        pairs = ((h, g, entries[h][g]) for h in range(len(entries)) for g in range(h))
        return groups_of((h, g) for h, g, value in pairs if value >= least(h, g) and is_joined(h, g, value))
    pair = tuple(sorted(int(head) for head in row.arrays.get(f"{matrix}_worst_pair", ())))
    value = row.values.get(f"{matrix}_worst", -1.0)
    is_known = len(pair) == 2 and min(pair) >= 0
    return (pair,) if is_known and value >= least(*pair) and is_joined(pair[0], pair[1], value) else ()


def joined_by_both(row: Row, limit: float) -> Groups:
    """Groups of heads that are joined by pairs whose overlap reaches a limit in both lenses.

    Args:
        row: a reading of a layer.
        limit: limit of both overlaps.

    Returns:
        Groups of two heads or more; without matrices the pair that is worst in both lenses.
    """
    if "overlap" in row.matrices and "energy_overlap" in row.matrices:
        entries, energies = row.matrices["overlap"].tolist(), row.matrices["energy_overlap"].tolist()
        H = len(entries)
        pairs = ((h, g) for h in range(H) for g in range(h) if min(entries[h][g], energies[h][g]) >= limit)
        return groups_of(pairs)
    nearest, overlaps = row.arrays.get("nearest", ()), row.arrays.get("nearest_overlap", ())
    return groups_of((h, int(g)) for h, (g, value) in enumerate(zip(nearest, overlaps)) if g >= 0 and value >= limit)


def groups_of(pairs: Iterable[tuple[int, int]]) -> Groups:
    """Join pairs that share a head.

    Args:
        pairs: of heads.

    Returns:
        Groups, in the order of their smallest heads.

    Example:
        >>> groups_of([(4, 5), (0, 1), (1, 3)])
        ((0, 1, 3), (4, 5))
    """
    found: list[set[int]] = []
    for pair in pairs:
        joined = set(pair).union(*(group for group in found if group & set(pair)))
        found = [group for group in found if not group & joined] + [joined]
    return tuple(sorted(tuple(sorted(group)) for group in found))


def heads_in(groups: Groups) -> tuple[int, ...]:
    """All heads of some groups, in ascending order."""
    return tuple(sorted({head for group in groups for head in group}))


def new_since_loading(groups: Groups, first: Groups, series: Series) -> Groups:
    """Leave out groups that pretrained weights had from the start.

    Args:
        groups: groups at the latest reading.
        first: groups at the first reading.
        series: the readings of a layer.

    Returns:
        For pretrained weights the groups with a head that was in none at first; for fresh ones all.
    """
    if not series.is_pretrained:
        return groups
    before = set(heads_in(first))
    return tuple(group for group in groups if not before.issuperset(group))


def reported_groups(finding: Finding) -> Groups:
    """The groups that a finding names; one of an earlier version names their heads alone."""
    return finding.groups or ((finding.heads,) if finding.heads else ())


def _limits(limit: float, kept: Groups, margin: float) -> Callable[[int, int], float]:
    """The limit of each pair: lower within a reported group, so that noise neither changes names nor divides groups."""
    group_of = {head: place for place, group in enumerate(kept) for head in group}

    def limit_of(one: int, other: int) -> float:
        place = group_of.get(one)
        return limit - margin if place is not None and place == group_of.get(other) else limit

    return limit_of


def _above_chance(overlap: float, one: float, other: float, width: int) -> float:
    chance = math.sqrt(one * other) / width
    return (overlap - chance) / (1 - chance) if chance < 1 - 1e-6 else math.nan
