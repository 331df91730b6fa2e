"""Heads of several sequences whose queries come from different rows, as where a router chooses experts."""

from __future__ import annotations

from collections import Counter
from typing import Any

from hdi_callback.attention.layer.heads import Role
from hdi_callback.attention.trace.core_view import CoreView
from hdi_callback.attention.trace.head_rows import Rows
from hdi_callback.attention.trace.support import Support

MOST_ROWS = 512  # of the weights of a core that are read: batch x heads x windows


def joined_by_sequence(
    view: CoreView, members: list[list[int]], read: dict[int, dict[Role, list[Rows]]]
) -> list[list[int]]:
    """Join the parts of one head in several sequences.

    A head occurs in every sequence: parts with the same keys occur in the same sequences.

    Args:
        view: of the core.
        members: for each head its parts.
        read: for each part the rows of each role; those of queries go where heads are joined.

    Returns:
        The parts of each head.
    """
    by_keys: dict[Any, list[list[int]]] = {}
    for of_head in members:
        by_keys.setdefault(tuple(read[of_head[0]]["key"]), []).append(of_head)
    if len(by_keys) == len(members) or len(read) >= MOST_ROWS:  # of more, some are read
        return members
    sequences = _sequences({unit: supports["key"] for unit, supports in view.supports.items()})
    if all(len({frozenset(map(sequences.get, one)) for one in alike}) == 1 for alike in by_keys.values()):
        return members
    joined: dict[Any, list[int]] = {}
    counts: Counter[Any] = Counter()
    for unit in sorted(read):
        read[unit]["query"] = []
        key = (*read[unit]["key"], *read[unit]["value"])
        joined.setdefault((key, counts[key, sequences[unit]]), []).append(unit)
        counts[key, sequences[unit]] += 1
    return list(joined.values())


def _sequences(keys: dict[int, Support]) -> dict[int, int]:
    """Number the sequences that parts of a core attend to: those whose keys have tokens in common are of one."""
    tokens = {n: {(leaf, at) for leaf in key.masks for at in key.positions(leaf)} for n, key in keys.items()}
    found: list[set[tuple[int, int]]] = []
    for own in tokens.values():
        apart = [other for other in found if other.isdisjoint(own)]
        found = [*apart, own.union(*(other for other in found if not other.isdisjoint(own)))]
    return {
        n: next((i for i, sequence in enumerate(found) if not sequence.isdisjoint(own)), -1)
        for n, own in tokens.items()
    }
