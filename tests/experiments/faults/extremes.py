"""How near a healthy run came to what rules judge that no monitor of the comparison gives a score of."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterator
from typing import Any

from hdi_callback.monitoring.origin import has_been_trained
from tests.experiments.faults.monitors import Result

Rows = list[dict[str, Any]]


def layers_of(run: Result) -> Iterator[Rows]:
    """Give the readings of each layer: values and arrays in one."""
    for name in run["readings"][0]["values"] if run["readings"] else ():
        yield [reading["values"].get(name, {}) | _named(reading["arrays"].get(name, {})) for reading in run["readings"]]


def _named(arrays: dict[str, Any]) -> dict[str, Any]:
    return {f"heads: {name}": array for name, array in arrays.items()}


def _curve(rows: Rows, metric: str) -> list[float]:
    return [row[metric] for row in rows if row.get(metric) is not None]


def _of_first(rows: Rows, array: str) -> Iterator[float]:
    """Give what later readings of heads are of the first, of heads that did not begin near zero."""
    arrays = [heads for heads in _curve(rows, f"heads: {array}") if None not in heads]
    first = arrays[0] if arrays else []
    middle = statistics.median(first) if first else 0.0
    for now in arrays[1:]:
        yield from (after / before for after, before in zip(now, first) if before > 0.1 * middle > 0)


def _vanishing(rows: Rows) -> Iterator[float]:
    yield from _of_first(rows, "circuit_qk_norm")
    yield from _of_first(rows, "circuit_ov_norm")


def _dead(rows: Rows) -> Iterator[float]:
    yield from _of_first(rows, "head_norm")


def _lost(rows: Rows) -> Iterator[float]:
    yield from _of_first(rows, "flatness")


def _narrowed(rows: Rows) -> Iterator[float]:
    """Flatness over the least of the layer twelve readings before, or over the head's own first, if that is less."""
    arrays = [heads for heads in _curve(rows, "heads: flatness") if None not in heads]
    for place, heads in enumerate(arrays[1:], 1):
        least = min(arrays[max(0, place - 12)])
        yield from (now / min(first, least) for now, first in zip(heads, arrays[0]) if min(now, first, least) > 0)


def _sharpened(rows: Rows) -> Iterator[float]:
    entropies = _curve(rows, "attention_entropy")
    for place in range(13, len(entropies)):
        if entropies[place] > 0:
            yield min(entropies[: place - 7]) / entropies[place]


def _flattened(rows: Rows) -> Iterator[float]:
    distances = [max(1 - value, 1e-7) for value in _curve(rows, "attention_entropy")]
    for place in range(6, len(distances) - 3):
        before, now = distances[:place][-12:], distances[place : place + 4]
        fall = math.log(statistics.median(before) / statistics.median(now))
        if min(before) >= 5e-4 and math.log(before[-1] / now[0]) >= 0.6 * fall:
            yield min(before) / max(now)


def _first_score(rows: Rows) -> Iterator[float]:
    yield from _curve(rows[:1], "attention_logit")


def _jump(rows: Rows) -> Iterator[float]:
    """Changes of at least a twentieth, of any head, over the largest before of the head that moved least."""
    moves = [heads for heads in _curve(rows, "heads: head_movement") if None not in heads]
    for place in range(5, len(moves)):
        before = max(map(min, moves[:place]))
        if before > 0 and max(moves[place]) >= 0.05:
            yield max(moves[place]) / before


def _shrunk(rows: Rows) -> Iterator[float]:
    for metric in ("query_norm", "key_norm"):
        norms = _curve(rows, metric)
        for place in range(5, len(norms) - 1):
            if min(norms[:place]) > 0:
                yield max(norms[place : place + 2]) / min(norms[:place])


def _unchanged(rows: Rows) -> Iterator[float]:
    least = [min(shares) for shares in _curve(rows, "heads: head_unchanged") if None not in shares]
    yield from (min(three) for three in zip(least, least[1:], least[2:]))


def _later(rows: Rows) -> Iterator[float]:
    shares = _curve(rows, "attention_ahead")
    if shares and shares[0] < 1e-6:
        yield from shares


def _messages(rows: Rows) -> Iterator[float]:
    cosines = _curve(rows, "circuit_ov_worst")
    if cosines and cosines[0] < 0.5:
        yield from cosines


def _keys(rows: Rows) -> Iterator[float]:
    yield from (after / before for before, after in itertools.pairwise(_curve(rows, "attention_keys")))


def _tokens(rows: Rows) -> Iterator[float]:
    cosines = _curve(rows, "token_cosine")
    yield from (min(three) for three in zip(cosines, cosines[1:], cosines[2:]))


MEASURES: dict[str, tuple[Callable[[Rows], Iterator[float]], bool]] = {
    "vanishing weights": (_vanishing, True),
    "dead heads": (_dead, True),
    "falling rank": (_lost, True),
    "weight jump": (_jump, False),
    "sudden shrink": (_shrunk, True),
    "rounded away": (_unchanged, False),
    "later tokens": (_later, False),
    "merged messages": (_messages, False),
    "fewer keys": (_keys, True),
    "tokens alike": (_tokens, False),
    "narrowing heads": (_narrowed, True),
    "sudden sharpening": (_sharpened, False),
    "sudden flattening": (_flattened, False),
    "sharp from the start": (_first_score, False),
}
"""Rule -> what it judges, of the readings of a layer, and whether small values are those to warn of."""

OF_FRESH = frozenset({"sharp from the start"})
"""Rules that judge fresh weights alone."""


def extremes_of(run: Result) -> dict[str, float]:
    """Give the value of a run that is worst to each rule; of a published run those that are kept."""
    if "extremes" in run:
        return run["extremes"]
    found = {}
    for rule, (measure, is_least) in MEASURES.items():
        if rule in OF_FRESH and 2 * trained_layers(run)[0] > trained_layers(run)[1]:
            continue
        values = [value for rows in layers_of(run) for value in measure(rows)]
        if values:
            found[rule] = float(f"{min(values) if is_least else max(values):.4g}")
    return found


def trained_layers(run: Result) -> tuple[int, int]:
    """Count the layers that look as if they had been trained before the run, and all of them."""
    if "trained" in run:
        return run["trained"]
    if not run["readings"]:
        return 0, 0
    facts = {one["name"]: one for one in run["facts"]}
    first = run["readings"][0]["arrays"]
    return sum(has_been_trained(arrays, facts[name]) for name, arrays in first.items()), len(first)
