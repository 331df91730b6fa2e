"""Histories of runs in which one pair of heads merges, measured on weights and judged by the rules."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from hdi_callback.core import head_diversity
from hdi_callback.monitoring.alerts import Alerts
from hdi_callback.monitoring.history import History
from hdi_callback.monitoring.readings import Measurement, Reading
from hdi_callback.monitoring.rules import choose_rules


def write_run(
    path: Path,
    *,
    layers: int = 4,
    heads: int = 4,
    width: int = 4,
    features: int = 32,
    steps: int = 8,
    every: int = 100,
    collapsed: tuple[int, ...] | None = (2, 1, 3),
    name: Callable[[int], str] = "model.blocks.{}.attn".format,
    seed: int = 0,
    lost: tuple[int, ...] = (),
) -> list[str]:
    """Write the history of a run.

    Of `collapsed`, a layer and heads of it, all come close to the first head. The weights of the layers `lost` are NaN
    in the second half.
    """
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(layers, heads, width, features, generator=generator)
    names = [name(layer) for layer in range(layers)]
    facts = [
        {
            "name": layer_name, "type": "Attention", "num_heads": heads, "num_key_heads": heads, "head_dim": width,
            "value_dim": width, "width": features, "kind": "separate Linear",
        }
        for layer_name in names
    ]  # fmt: skip
    history = History(path, matrix_every=1 if layers * heads < 3000 else 4)
    history.begin(0, facts)
    alerts = Alerts(choose_rules("default"), facts)
    for place in range(steps):
        if collapsed is not None and place > steps // 3:
            layer, first, *others = collapsed
            weight[layer, others] += 0.7 * (weight[layer, first] - weight[layer, others])
        weight += 0.02 * torch.randn(weight.shape, generator=generator)
        if place >= steps // 2:
            weight[list(lost)] = torch.nan
        values = head_diversity(weight)
        reading = Reading(
            place * every, tuple(names), (Measurement(tuple(names), "key", values),), time=1.7e9 + 60 * place
        )
        record = reading.record()
        news = alerts.judge(record)
        history.write(record, news)
        for alert in news:
            history.note("alert", **alert.to_dict())
    return names
