"""Runs whose numbers are written by hand, judged by the default rules."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from hdi_callback.history import History
from hdi_callback.record import LayerRecord, Record
from hdi_callback.rules import Alerts

HEADS, EVERY = 4, 50
COLLAPSED = "model.blocks.2.attn"


def write_run(
    path: Path, *, readings: int = 10, layers: int = 4, collapsed: str | None = COLLAPSED, is_last: bool = True
) -> Path:
    """Write a history in which heads 1 and 3 of a layer become one at reading 6, and return its path."""
    facts = [
        {"name": f"model.blocks.{number}.attn", "num_heads": HEADS, "num_key_heads": HEADS, "head_dim": 8,
         "value_dim": 8, "kind": "separate", "trains": True, "all_train": True}
        for number in range(layers)
    ]  # fmt: skip
    history, alerts = History(path, facts), Alerts("default", None, facts, pretrained=False)
    for reading in range(readings):
        record = Record(
            reading * EVERY,
            {one["name"]: _layer(one["name"] == collapsed and reading >= 6) for one in facts},
            time=1e9 + reading,
            loss=2.0 - 0.1 * reading,
            is_last=is_last and reading == readings - 1,
        )
        found = alerts.judge(record)
        history.write(replace(record, alerts=found, active=alerts.active))
    history.close()
    return history.path


def _layer(is_collapsed: bool) -> LayerRecord:
    worst = 0.97 if is_collapsed else 0.05
    alignment = torch.full((HEADS, HEADS), 0.02).fill_diagonal_(1)
    alignment[1, 3] = alignment[3, 1] = worst
    values = {"hdi": 0.74, "hdi_alignment": 0.02, "hdi_worst_alignment": worst, "hdi_worst_pair": 0.3,
              "hdi_energy_alignment": 0.02, "hdi_energy_worst_alignment": worst,
              "weights_not_finite": 0.0, "trains": 1.0}  # fmt: skip
    heads = {"worst_alignment_pair": [1, 3], "worst_pair": [1, 3], "energy_worst_alignment_pair": [1, 3],
             "rank": [8] * HEADS, "head_norm": [1.0] * HEADS}  # fmt: skip
    return LayerRecord(values, heads, {"pair_alignment": alignment, "overlap": alignment.clone()})
