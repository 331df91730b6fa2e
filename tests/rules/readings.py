"""Records by hand: curves in, alerts out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hdi_callback.record import Alert, LayerRecord, Record
from hdi_callback.rules import Alerts

LAYER = "blocks.0.attn"
EVERY = 50


def facts(name: str = LAYER, heads: int = 4, keys: int | None = None, **others: Any) -> dict[str, Any]:
    keys = heads if keys is None else keys
    return {"name": name, "num_heads": heads, "num_key_heads": keys, "head_dim": 8, "width": 64, "normed": [],
            "parameters": {"lora_B.weight": 2, "norm.weight": 1}} | others  # fmt: skip


def quiet(**values: float) -> dict[str, float]:
    """What a healthy layer reads."""
    return {
        "hdi_alignment": 0.02,
        "hdi_energy_alignment": 0.1,
        "hdi_worst_alignment": 0.06,
        "hdi_energy_worst_alignment": 0.2,
        "hdi_worst_pair": 0.17,
        "hdi_effective_heads": 3.0,
    } | values


def closest(*pairs: tuple[int, int, float], heads: int = 4) -> torch.Tensor:
    matrix = torch.full((heads, heads), 0.05, dtype=torch.float64).fill_diagonal_(1)
    for one, other, value in pairs:
        matrix[one, other] = matrix[other, one] = value
    return matrix


def layer(values: Mapping[str, float], heads=None, matrices=None, absent=None) -> LayerRecord:
    return LayerRecord(dict(values), dict(heads or {}), dict(matrices or {}), dict(absent or {}))


def run(
    readings: Sequence[LayerRecord | Mapping[str, LayerRecord]],
    alerts: Alerts | None = None,
    *,
    losses: Sequence[float | None] | None = None,
    begin: int = 0,
    every: int = EVERY,
    **options: Any,
) -> list[tuple[Alert, ...]]:
    """Judge readings of one layer, or of several, and give the alerts of each."""
    alerts = Alerts(**({"layers": [facts()], "pretrained": False} | options)) if alerts is None else alerts
    given = []
    for place, reading in enumerate(readings):
        layers = {LAYER: reading} if isinstance(reading, LayerRecord) else dict(reading)
        loss = None if losses is None else losses[place]
        given.append(alerts.judge(Record(begin + every * place, layers, loss=loss)))
    return given


def curve(metric: str, values: Sequence[float], **fixed: float) -> list[LayerRecord]:
    return [layer({metric: value, **fixed}) for value in values]


def raised(given: Sequence[Sequence[Alert]]) -> list[tuple[int, str, str, tuple[int, ...]]]:
    """Reading, rule, level and heads of the first layer, of the alerts that begin or get worse."""
    return [
        (place, alert.rule, alert.level, next(iter(alert.where.values())))
        for place, alerts in enumerate(given)
        for alert in alerts
        if not alert.is_over
    ]
