"""The curves of a run: six for the model, three for each layer, and what was asked for by name."""

from __future__ import annotations

from collections.abc import Iterable

from hdi_callback.record import Record

ALERTS = "hdi/alerts"
MAP, HEADS, EVIDENCE = "hdi/map", "hdi/heads", "hdi/evidence"
"""The pictures; the last is drawn at an alert."""

MODEL_CURVES = {
    "hdi/mean": "HDI, mean over the layers",
    "hdi/min": "HDI of the lowest layer",
    "hdi/closest_pair": "largest alignment of any two heads of a layer: 0 chance, 1 the same head",
    "hdi/alignment": "mean alignment of the heads of the worst layer",
    "hdi/covariance": "largest covariance of head outputs of any layer",
    ALERTS: "active alerts, without notices",
}
"""Tag -> meaning."""

LAYER_CURVES = {"hdi": "hdi", "hdi_worst_alignment": "worst_alignment", "head_covariance": "covariance"}
"""Metric -> its name in the tag of a layer."""


def curves(record: Record, metrics: Iterable[str] = (), prefix: str = "") -> dict[str, float]:
    """Return the points of all curves at one reading.

    Example:
        >>> from hdi_callback.record import LayerRecord
        >>> layers = {"blocks.0.attn": LayerRecord({"hdi": 0.9}), "blocks.1.attn": LayerRecord({"hdi": 0.5})}
        >>> points = curves(Record(step=0, layers=layers))
        >>> points["hdi/mean"], points["hdi/min"], points["hdi/per_layer/hdi/blocks.1.attn"]
        (0.7, 0.5, 0.5)
    """
    points = {
        "hdi/mean": record.mean("hdi"),
        "hdi/min": min(record.values("hdi").values(), default=None),
        "hdi/closest_pair": max(record.values("hdi_worst_alignment").values(), default=None),
        "hdi/alignment": max(record.values("hdi_alignment").values(), default=None),
        "hdi/covariance": max(record.values("head_covariance").values(), default=None),
        ALERTS: float(sum(alert.level != "notice" for alert in record.active)),
    }
    for metric in dict.fromkeys([*LAYER_CURVES, *metrics]):
        for layer, value in record.values(metric).items():
            points[layer_tag(metric, layer)] = value
    return {prefix + tag: value for tag, value in points.items() if value is not None}


def layer_tag(metric: str, layer: str) -> str:
    """Return the tag of a metric of a layer."""
    return f"hdi/per_layer/{LAYER_CURVES.get(metric, metric)}/{layer}"


def all_tags(layers: Iterable[str], metrics: Iterable[str] = (), prefix: str = "") -> list[str]:
    """Return the tags of all curves of a run with these layers."""
    wanted = dict.fromkeys([*LAYER_CURVES, *metrics])
    per_layer = [layer_tag(metric, layer) for layer in layers for metric in wanted]
    return [prefix + tag for tag in (*MODEL_CURVES, *per_layer)]
