"""Groups of heads that are alike: heads joined by a chain of pairs at or above a limit."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor

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


def aligned_pairs(row: Row, facts: Mapping[str, Any]) -> list[Pair]:
    """Return pairs of key heads with their alignment: all of them, or without matrices each head with its nearest."""
    if "pair_alignment" in row.matrices:
        return list(_below_diagonal(row.matrices["pair_alignment"]))
    width, ranks = facts.get("width"), row.heads.get("rank", ())
    nearest, overlaps = row.heads.get("nearest", ()), row.per_head("nearest_overlap")
    if width and ranks and nearest and overlaps:
        return [
            (h, int(g), _above_chance(overlap, ranks[h], ranks[int(g)], width))
            for h, (g, overlap) in enumerate(zip(nearest, overlaps))
            if g >= 0
        ]
    return _closest(row, "worst_alignment_pair", "hdi_worst_alignment")


def similar_pairs(row: Row, matrix: str) -> list[Pair]:
    """Return pairs of heads with the entries of a matrix; without it only the closest pair."""
    if matrix in row.matrices:
        return list(_below_diagonal(row.matrices[matrix]))
    return _closest(row, f"{matrix}_worst_pair", f"{matrix}_worst")


def equal_heads(row: Row) -> Groups:
    """Find key heads whose weights are equal, up to rotation and scale."""
    energy = row.values.get("hdi_energy_worst_alignment", 0.0)
    # Alignment is a little further from 1 than overlap.
    if row.values.get("hdi_worst_pair", 0.0) < EQUAL or energy < EQUAL - 1e-5:
        return ()
    if "overlap" in row.matrices and "energy_pair_alignment" in row.matrices:
        overlap, energies = row.matrices["overlap"].tolist(), row.matrices["energy_pair_alignment"].tolist()
        pairs = ((h, g) for h in range(len(overlap)) for g in range(h))
        return groups_of((h, g) for h, g in pairs if overlap[h][g] >= EQUAL and energies[h][g] >= EQUAL - 1e-5)
    near = zip(row.heads.get("nearest", ()), row.per_head("nearest_overlap"))
    return groups_of((h, int(g)) for h, (g, value) in enumerate(near) if g >= 0 and value >= EQUAL)


def without_initial(groups: Groups, initial: Groups, series: Series) -> Groups:
    """Leave out groups that pretrained weights had at the first reading; of fresh weights all count."""
    before = set(heads_in(initial)) if series.is_pretrained else set[int]()
    return tuple(group for group in groups if not before.issuperset(group))


def _below_diagonal(matrix: Tensor) -> Iterator[Pair]:
    for h, row in enumerate(matrix.tolist()):
        for g, value in enumerate(row[:h]):
            yield h, g, value


def _closest(row: Row, pair: str, metric: str) -> list[Pair]:
    heads = row.heads.get(pair, ())
    if len(heads) != 2 or min(heads) < 0 or metric not in row.values:
        return []
    return [(max(heads), min(heads), row.values[metric])]


def _above_chance(overlap: float, rank: float, second_rank: float, width: int) -> float:
    chance = math.sqrt(rank * second_rank) / width
    return (overlap - chance) / (1 - chance) if chance < 1 - 1e-6 else math.nan
