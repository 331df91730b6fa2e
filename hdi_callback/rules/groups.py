"""Groups of heads that are alike: heads joined by a chain of pairs at or above a limit."""

from __future__ import annotations

import math
from collections.abc import Iterable

from hdi_callback.rules.series import Row, Series

Groups = tuple[tuple[int, ...], ...]
Pair = tuple[int, int, float]

EQUAL = 1 - 4e-7  # overlap from which on heads are equal: their key weights differ by less than a thousandth


def groups_of(pairs: Iterable[tuple[int, int]]) -> Groups:
    """Join pairs that share a head: (4, 5), (0, 1), (1, 3) to (0, 1, 3), (4, 5)."""
    groups: list[set[int]] = []
    for pair in pairs:
        group_of_pair = set(pair).union(*(group for group in groups if group & set(pair)))
        groups = [group for group in groups if not group & group_of_pair] + [group_of_pair]
    return tuple(sorted(tuple(sorted(group)) for group in groups))


def heads_in(groups: Groups) -> tuple[int, ...]:
    """Return all heads of some groups, in ascending order."""
    return tuple(sorted({head for group in groups for head in group}))


def groups_at(pairs: Iterable[Pair], limit: float, before: Groups = (), lower: float = math.inf) -> Groups:
    """Join the pairs at or above a limit; within groups of before a lower one, so that noise changes no names."""
    group_of = {head: place for place, group in enumerate(before) for head in group}
    return groups_of(
        (h, g)
        for h, g, value in pairs
        if value >= limit or (value >= lower and h in group_of and group_of[h] == group_of.get(g))
    )


def pairs_in(row: Row, matrix: str) -> list[Pair]:
    """Return all pairs of heads with the entries of a matrix; none where it was not measured."""
    rows = row.matrices[matrix].tolist() if matrix in row.matrices else []
    return [(h, g, value) for h, of_head in enumerate(rows) for g, value in enumerate(of_head[:h])]


def equal_heads(row: Row) -> Groups:
    """Find key heads whose weights are equal, up to rotation and scale."""
    energy = row.values.get("hdi_energy_worst_alignment", 0.0)
    # Alignment is a little further from 1 than overlap.
    if row.values.get("hdi_worst_pair", 0.0) < EQUAL or energy < EQUAL - 1e-5:
        return ()
    pairs = zip(pairs_in(row, "overlap"), pairs_in(row, "energy_pair_alignment"))
    return groups_of((h, g) for (h, g, same), (*_, alike) in pairs if same >= EQUAL and alike >= EQUAL - 1e-5)


def without_initial(groups: Groups, initial: Groups, series: Series) -> Groups:
    """Leave out groups that pretrained weights had at the first reading; of fresh weights all count."""
    before = set(heads_in(initial)) if series.is_pretrained else set[int]()
    return tuple(group for group in groups if not before.issuperset(group))
