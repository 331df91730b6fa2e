"""Which of several cores are one layer: heads that are computed one by one, and those of ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hdi_callback.attention.trace.head_rows import HeadRows
from hdi_callback.attention.trace.outputs import receiver_of
from hdi_callback.attention.trace.support import columns_of
from hdi_callback.attention.trace.traced_cores import TracedCores

_Part = tuple[int, HeadRows]  # number of a core, and its heads
_Joined = tuple[tuple[int, ...], HeadRows]


def joined(trace: TracedCores, parts: list[_Part]) -> list[_Joined]:
    """Join cores of a single head each whose outputs one map takes side by side: together they are one layer.

    Args:
        trace: of one run.
        parts: the cores that were read.

    Returns:
        The numbers of the cores of each layer, and its heads.
    """
    if trace.run.ranks > 1:
        return _of_ranks(trace, parts)
    single = {
        number for number, heads in parts if len(heads.members) == 1 and heads.units.count == 1 and heads.tied is None
    }
    receivers = {number: receiver_of(trace, trace.cores[number]) for number in single}
    receivers |= _behind_a_chain(trace, receivers)
    by_receiver: dict[int, list[_Part]] = {}
    for place, (number, heads) in enumerate(parts):
        receiver = receivers.get(number)
        by_receiver.setdefault(-1 - place if receiver is None else receiver, []).append((number, heads))
    return [_side_by_side(of_layer) for of_layer in by_receiver.values()]


def _side_by_side(parts: list[_Part]) -> _Joined:
    numbers, heads = tuple(number for number, _ in parts), [heads for _, heads in parts]
    if len(parts) == 1:
        return numbers, heads[0]
    roles = [role for role in heads[0].rows if all(role in one.rows for one in heads)]
    rows = {role: [one.rows[role][0] for one in heads] for role in roles}
    return numbers, HeadRows(rows, [one.members[0] for one in heads], set().union(*(one.normed for one in heads)))


def _of_ranks(trace: TracedCores, parts: list[_Part]) -> list[_Joined]:
    """Join cores of the same maps, each with the heads that one rank attends with: together they are one layer."""
    alike: dict[Any, list[_Part]] = {}
    for number, heads in parts:
        maps = tuple((role, tuple({one.parameter: 0 for one in rows})) for role, rows in heads.rows.items())
        alike.setdefault((receiver_of(trace, trace.cores[number]), maps), []).append((number, heads))
    layers: list[_Joined] = []
    for of_layer in alike.values():
        number, first = of_layer[0]
        if all(heads.rows == first.rows for _, heads in of_layer):  # every rank attends with the same heads
            layers.append(((number,), first))
            continue
        of_heads = [(number, heads, place) for number, heads in of_layer for place in range(len(heads.members))]
        of_heads.sort(key=lambda one: [rows[one[2]].features[0] for rows in reversed(one[1].rows.values())])
        whole = replace(
            first,
            rows={role: [heads.rows[role][place] for _, heads, place in of_heads] for role in first.rows},
            members=[heads.members[place] for _, heads, place in of_heads],
            normed=set().union(*(heads.normed for _, heads in of_layer)),
        )
        layers.append((tuple(number for number, _, _ in of_heads), whole))
    return layers


def _behind_a_chain(trace: TracedCores, first: dict[int, int | None]) -> dict[int, int]:
    """Find the map that takes side by side what heads give that are fed by one another, as in a cascade of heads.

    Args:
        trace: of one run.
        first: number of a core -> that of the first map that takes what it gives.

    Returns:
        Number of a core -> that of the map, where an earlier map takes what the core gives as well.
    """
    receivers = sorted({one for one in first.values() if one is not None}, reverse=True)
    numbers, found = sorted(first), dict[int, int]()
    for receiver in receivers if len(receivers) > 1 else ():
        codes = columns_of(trace.leaves[receiver].taken, [trace.cores[number].output for number in numbers])
        columns = {numbers[place]: set(code[code >= 0].tolist()) for place, code in codes.items()}
        columns = {number: own for number, own in columns.items() if own and number not in found}
        if len(columns) > 1 and sum(map(len, columns.values())) == len(set().union(*columns.values())):
            found |= dict.fromkeys(columns, receiver)
    return found
