"""Sites: where an attention that was read runs in a forward, so that it is recognised again in later ones."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hdi_callback.attention.discovery.heads import FoundAttention
from hdi_callback.attention.discovery.planes import repeats, reshaped
from hdi_callback.attention.discovery.products import Unreadable
from hdi_callback.attention.layer import Site
from hdi_callback.attention.normalisers import SOFTMAX
from hdi_callback.attention.tape import Step


def site_of(attn: FoundAttention, steps: list[Step]) -> Site:
    """Return where an attention runs, among the steps of its tape; raise `Unreadable` if that is not regular."""
    step, heads, normaliser = attn.core.step, attn.heads, attn.core.normaliser
    ordinal = step.ordinal if normaliser is None else normaliser.start.ordinal
    part, number = attn.core.parts[0], attn.numbers[0]
    query = torch.arange(number.shape[1]).expand_as(number)
    if attn.core.query_of is None or part.units is None:
        shape = step.inputs[0].shape[:-1]
        dims = _dims(reshaped(number, shape), reshaped(query, shape), heads)
        return Site(step.path or "", ordinal, "fused", heads, dims, dims)
    query_of, units = attn.core.query_of, part.units
    if bool((query_of < 0).any()):
        raise Unreadable("rows without scores")
    count = int(max(query_of.max(), units.max())) + 1
    head_of, place_of = torch.full((count,), -1), torch.full((count,), -1)
    for numbers, unit in zip(attn.numbers, [part.units for part in attn.core.parts]):
        if unit is not None and numbers.shape == unit.shape:
            has_scores = unit >= 0
            head_of[unit[has_scores]] = numbers[has_scores]
            place_of[unit[has_scores]] = torch.arange(unit.shape[1]).expand_as(unit)[has_scores]
    rows = _dims(head_of[query_of], place_of[query_of], heads)
    out = _dims(number, query, heads)
    is_flipped = part.product is not None and part.product.is_flipped
    site = Site(step.path or "", ordinal, "softmax", heads, rows, out, attn.core.dim, is_flipped)
    if normaliser is None:
        return site

    def behind(step: Step) -> tuple[str, int]:
        between = steps[normaliser.start.number + 1 : step.number + 1]
        return (step.op, [each.op for each in between].count(step.op)) if between else ("", 0)

    is_softmax, is_causal = normaliser.name == SOFTMAX, normaliser.is_causal
    scores, weights = behind(normaliser.scores.cell.step or normaliser.start), behind(step)
    return replace(site, kind="normaliser", scores=scores, weights=weights, is_causal=is_causal, is_softmax=is_softmax)


def _dims(head: Tensor, query: Tensor, heads: int) -> tuple[str, ...]:
    """Return the names of the dims of two grids, the head and the query of each row."""
    names = []
    for dim, size in enumerate(head.shape):
        by_head, by_query = not repeats(head, dim), not repeats(query, dim)
        if by_head and by_query:
            raise Unreadable("a dimension runs over heads and queries")
        if not by_head:
            names.append("q" if by_query else "b")
            continue
        along = head.movedim(dim, 0).reshape(size, -1)[:, 0]
        at = torch.arange(size)
        if size <= heads and len(along.unique()) == size:
            names.append("h")
        elif torch.equal(along, at % heads):
            names.append("bh")
        elif size % heads == 0 and torch.equal(along, at // (size // heads)):
            names.append("hb")
        else:
            raise Unreadable("its heads lie in no regular order")
    if "q" not in names and names and head.shape[-1] == 1:  # one query
        names[-1] = "q"
    if "q" not in names:
        raise Unreadable("there is no dimension of queries: run a forward of more tokens")
    return tuple(names)


def merged_sites(sites: list[tuple[Site, object]], counts: Counter[Any]) -> dict[object, list[Site]]:
    """Return layer -> its sites, of attentions that come again after a period (loops, recomputation) the first."""
    places: dict[Any, list[tuple[Site, object]]] = {}
    for site, layer in sorted(sites, key=lambda item: (item[0].path, item[0].ordinal)):
        places.setdefault(site.place, []).append((site, layer))
    merged: dict[object, list[Site]] = {}
    for place, items in places.items():
        count = counts[place]
        at = {site.ordinal: (replace(site, ordinal=0), layer) for site, layer in items}
        period = next(p for p in range(1, count + 1) if all(at.get(i) == at.get(i % p) for i in range(count)))
        for site, layer in items:
            if site.ordinal < period:
                merged.setdefault(layer, []).append(replace(site, period=period))
    return merged
