"""The curves of a run: six for the model, three for each layer, and what was asked for by name."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import NamedTuple

from hdi_callback.record import Record

ALERTS = "hdi/alerts"
MAP, HEADS, EVIDENCE = "hdi/map", "hdi/heads", "hdi/evidence"


class ModelCurve(NamedTuple):
    """What a curve of the model means."""

    range: str  # of its values
    meaning: str  # a clause
    expect: str  # what is usual


MODEL_CURVES = {
    "hdi/mean": ModelCurve(
        "0 to 1",
        "Head Diversity Index, mean over the layers",
        "a fresh model starts at chance, 1 - d_k/d, and not at 1: with 12 heads at 0.917",
    ),
    "hdi/min": ModelCurve(
        "0 to 1", "Head Diversity Index of the lowest layer", "as `hdi/mean`; the highest value is often that of step 0"
    ),
    "hdi/closest_pair": ModelCurve(
        "at most 1: 0 is chance, 1 the same head",
        "alignment of the two most similar heads of any layer",
        "a slow rise; a jump to 1 is a copied head",
    ),
    "hdi/alignment": ModelCurve(
        "at most 1: 0 is chance, 1 the same head",
        "mean alignment of the heads of the worst layer",
        "near 0 at the start, then a slow rise",
    ),
    "hdi/covariance": ModelCurve(
        "any number, in units of the output squared",
        "mean covariance of two heads' contributions, in the layer where it is largest",
        "near 0 at the start",
    ),
    ALERTS: ModelCurve("a whole number", "number of active alerts; notices are not counted", "0"),
}
"""Tag -> meaning."""

PICTURES = {
    MAP: "A row for each layer and a column for each reading, coloured by the alignment of the two closest heads.",
    HEADS: "Alignment of every two heads of the worst layer.",
    EVIDENCE: "The number that an alert accuses over the steps, the accused layer or heads in red; below it the "
    "patterns of attention of some of these heads before it began, and at the alert.",
}
"""The pictures; the last is drawn at an alert."""

AUDITED = {
    "dead heads": "The weights of a head are all but zero for queries, keys, values or the output.",
    "copied layers": "Two layers have equal weights to the bit, though they do not share them.",
    "unmatched weights": "Training has matched queries with keys, or values with outputs, in the other layers and not "
    "in this one: it was not trained, or its heads or rows are in another order.",
    "weights missing": "The file has no weights for a role of a layer, so that nothing can be said of it.",
}
"""Findings of audits, where a run has rules of their own or nothing of the kind."""

LAYER_CURVES = {"hdi": "hdi", "hdi_worst_alignment": "worst_alignment", "head_covariance": "covariance"}
"""Metric -> its name in the tag of a layer."""


def curves(record: Record, metrics: Iterable[str] = ()) -> dict[str, float]:
    """Return the points of all curves at one reading."""
    hdi = record.values("hdi").values()
    points = {
        "hdi/mean": statistics.fmean(hdi) if hdi else None,
        "hdi/min": min(hdi, default=None),
        "hdi/closest_pair": max(record.values("hdi_worst_alignment").values(), default=None),
        "hdi/alignment": max(record.values("hdi_alignment").values(), default=None),
        "hdi/covariance": max(record.values("head_covariance").values(), default=None),
        ALERTS: float(sum(alert.level != "notice" for alert in record.active)),
    }
    for metric in dict.fromkeys([*LAYER_CURVES, *metrics]):
        for layer, value in record.values(metric).items():
            points[_layer_tag(metric, layer)] = value
    return {tag: value for tag, value in points.items() if value is not None}


def _layer_tag(metric: str, layer: str) -> str:
    return f"hdi/per_layer/{LAYER_CURVES.get(metric, metric)}/{layer}"


def all_tags(layers: Iterable[str], metrics: Iterable[str] = ()) -> list[str]:
    """Return the tags of all curves of a run with these layers."""
    wanted = dict.fromkeys([*LAYER_CURVES, *metrics])
    return [*MODEL_CURVES, *(_layer_tag(metric, layer) for layer in layers for metric in wanted)]
