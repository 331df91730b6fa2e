"""A run in which one pair of heads merges, as data: what dashboards are shown with, without a training."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from hdi_callback.monitoring.alerts import Alerts
from hdi_callback.monitoring.readings import LayerRecord, Record
from hdi_callback.monitoring.rules import WorstPair
from hdi_callback.monitoring.session.sink import Result


def collapsing_run(
    layers: int, heads: int, *, layer: int, pair: tuple[int, int], readings: int = 40, every: int = 50
) -> Iterator[Result]:
    """Give the results of a run whose `pair` in one layer becomes one head after three fifths of it."""
    names = [f"model.layers.{number}.self_attn" for number in range(layers)]
    facts = [{"name": name, "num_heads": heads, "num_key_heads": heads, "width": 16 * heads} for name in names]
    alerts = Alerts([WorstPair()], facts)
    above = torch.triu_indices(heads, heads, 1)
    drawn = torch.Generator().manual_seed(0)
    for reading in range(readings):
        merged = 1 / (1 + math.exp(-(reading - 0.6 * readings) / (0.04 * readings)))
        measured = {}
        for number, name in enumerate(names):
            noise = 0.01 * torch.randn(heads, heads, generator=drawn, dtype=torch.float64)
            alignment = ((noise + noise.T) / 2).fill_diagonal_(1)
            if number == layer:
                alignment[pair[0], pair[1]] = alignment[pair[1], pair[0]] = merged
            measured[name] = _layer(alignment, above)
        step = reading * every
        record = Record(step, measured, axis=step, time=1.7e9 + step)
        news = alerts.judge(record)
        yield Result(record, tuple(news), (), tuple(alerts.active), reading == readings - 1)


def _layer(alignment: torch.Tensor, above: torch.Tensor) -> LayerRecord:
    pairs = alignment[above[0], above[1]]
    worst = int(pairs.argmax())
    pair = [int(above[0][worst]), int(above[1][worst])]
    overlap = alignment * (1 - 1 / 16) + 1 / 16
    index = 1 - float(overlap[above[0], above[1]].mean())
    values = {
        "hdi": index,
        "hdi_worst_pair": float(pairs[worst]) * (1 - 1 / 16) + 1 / 16,
        "hdi_effective_heads": len(alignment) / (1 + (len(alignment) - 1) * (1 - index)),
        "hdi_alignment": float(pairs.mean()),
        "hdi_worst_alignment": float(pairs[worst]),
        "hdi_energy_alignment": float(pairs.mean()),
        "hdi_energy_worst_alignment": float(pairs[worst]),
    }
    arrays = {f"{energy}worst_{kind}pair": pair for energy in ("", "energy_") for kind in ("", "alignment_")}
    return LayerRecord(values, arrays, {"pair_alignment": alignment, "overlap": overlap})
