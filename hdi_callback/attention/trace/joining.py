"""Cores that form one layer: heads that are computed one by one, and those of ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hdi_callback.attention.trace.head_rows import HeadRows
from hdi_callback.attention.trace.outputs import SEVERAL_SUMMED, receiver_of
from hdi_callback.attention.trace.own_inputs import inputs_of_rows
from hdi_callback.attention.trace.support import columns_of, derivatives, random_weights
from hdi_callback.attention.trace.traced_cores import TracedCores

_OWN_PROJECTIONS = "the outputs of its heads, each of which has an output projection of its own"

_Part = tuple[int, HeadRows]  # number of a core, and its heads
_Joined = tuple[tuple[int, ...], HeadRows]


def joined(trace: TracedCores, parts: list[_Part]) -> list[_Joined]:
    """Join cores of a single head each: together they are one layer.

    One map takes their outputs side by side; or they are added up, as they are or behind a map of each.

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
    receivers |= _receiver_of_chain(trace, receivers)
    taking = Counter(receivers.values())
    alone = [number for number, one in receivers.items() if one is None or taking[one] == 1]
    first_of = _summed_heads(trace, dict(parts), {number: receivers[number] for number in alone})
    layers: dict[tuple[str, int], list[_Part]] = {}
    for place, (number, heads) in enumerate(parts):
        receiver = receivers.get(number)
        key = ("part", place) if receiver is None else ("map", receiver)
        key = ("sum", first_of[number]) if number in first_of else key
        layers.setdefault(key, []).append((number, heads))
    return [_side_by_side(of_layer, _why_not_read(of_layer, first_of, receivers)) for of_layer in layers.values()]


def _why_not_read(of_layer: list[_Part], first_of: Mapping[int, int], receivers: Mapping[int, int | None]) -> str:
    """The outputs of heads that are added up, in words; empty for others."""
    number = of_layer[0][0]
    if number not in first_of:
        return ""
    return SEVERAL_SUMMED if receivers[number] is None else _OWN_PROJECTIONS


def _summed_heads(
    trace: TracedCores, heads: Mapping[int, HeadRows], receivers: Mapping[int, int | None]
) -> dict[int, int]:
    """Find heads over the same tokens whose outputs are only used as a sum, in which each token may weigh them.

    Args:
        trace: of one run.
        heads: of each core.
        receivers: number of a core -> that of the map that takes its output, and nothing of another one; `None` if no
            map takes it.

    Returns:
        Number of a core -> that of the first head of its layer.
    """
    if len(receivers) < 2:
        return {}
    # What depends on a weighted sum alone has proportional derivatives by its terms; every end has weights of its own.
    ends = enumerate(end for end in trace.run.ends if end.requires_grad and not end.is_complex())
    own = ((end, random_weights((place + 1, *end.shape))[place]) for place, end in ends)
    total = sum(((end * weights).sum().float() for end, weights in own), torch.zeros(()))
    terms = [trace.cores[n].output if one is None else trace.leaves[one].output for n, one in receivers.items()]
    found = derivatives(total, torch.ones(()), terms)
    derivative = {
        number: trace.cores[number].by_row(found[place]).flatten(0, 1) if receivers[number] is None else found[place]
        for place, number in enumerate(receivers)
        if place in found
    }
    layers: dict[int, list[int]] = {}
    for number in derivative:
        alike = (
            first
            for first in layers
            if (receivers[first] is None) == (receivers[number] is None)
            and _are_terms_of_a_sum(derivative[first], derivative[number])
            and _attend_alike(trace, heads[first], heads[number], (first, number))
        )
        layers.setdefault(next(alike, number), []).append(number)
    return {number: first for first, of_layer in layers.items() if len(of_layer) > 1 for number in of_layer}


def _are_terms_of_a_sum(one: Tensor, other: Tensor) -> bool:
    """Return whether two derivatives ``(tokens, width)`` differ by a factor above zero for each token, at most."""
    if one.shape != other.shape or one.shape[-1] < 2 or not one.any() or not other.any():
        return False
    product, sizes = (one * other).sum(-1), one.norm(dim=-1) * other.norm(dim=-1)
    return bool((sizes - product <= 1e-4 * sizes).all())


def _attend_alike(trace: TracedCores, one: HeadRows, other: HeadRows, numbers: tuple[int, int]) -> bool:
    """Return whether two heads attend to the same tokens."""
    tokens = [inputs_of_rows(trace, heads.rows["key"][0])[0] for heads in (one, other)]
    shapes = {trace.cores[number].weights.shape for number in numbers}
    return len(shapes) == 1 and tokens[0].shape == tokens[1].shape and torch.equal(*tokens)


def _side_by_side(parts: list[_Part], outputs: str) -> _Joined:
    numbers, heads = tuple(number for number, _ in parts), [heads for _, heads in parts]
    if len(parts) == 1:
        return numbers, heads[0]
    roles = [role for role in heads[0].rows if all(role in head.rows for head in heads)]
    rows = {role: [head.rows[role][0] for head in heads] for role in roles}
    normed = set().union(*(head.normed for head in heads))
    return numbers, HeadRows(rows, [head.members[0] for head in heads], normed, outputs_left_out=outputs)


def _of_ranks(trace: TracedCores, parts: list[_Part]) -> list[_Joined]:
    """Join cores of the same maps, each with the heads that one rank attends with: together they are one layer."""
    alike: dict[Any, list[_Part]] = {}
    for number, heads in parts:
        maps = tuple((role, tuple({row.parameter: 0 for row in rows})) for role, rows in heads.rows.items())
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


def _receiver_of_chain(trace: TracedCores, first: dict[int, int | None]) -> dict[int, int]:
    """Find the linear map of the concatenated outputs of a cascade of heads, each of which feeds the next.

    Args:
        trace: of one run.
        first: number of a core -> that of the first map that takes its output.

    Returns:
        Number of a core -> that of the map, where an earlier map takes what the core gives as well.
    """
    receivers = sorted({one for one in first.values() if one is not None}, reverse=True)
    numbers, found = sorted(first), dict[int, int]()
    for receiver in receivers if len(receivers) > 1 else ():
        codes = columns_of(trace.leaves[receiver].input, [trace.cores[number].output for number in numbers])
        columns = {numbers[place]: set(code[code >= 0].tolist()) for place, code in codes.items()}
        columns = {number: own for number, own in columns.items() if own and number not in found}
        if len(columns) > 1 and sum(map(len, columns.values())) == len(set().union(*columns.values())):
            found |= dict.fromkeys(columns, receiver)
    return found
