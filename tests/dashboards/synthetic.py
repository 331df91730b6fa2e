"""A run in which two heads of one layer become the same head, as records: no training, no rules."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from hdi_callback.history import History, RunHistory, load_history
from hdi_callback.record import Action, Alert, LayerRecord, Record

TO_DO = "Revive one of the two"
CODE = "interventions=[ReviveHeads()]"


def facts_of(layers: int, heads: int, key_heads: int | None = None) -> list[dict[str, Any]]:
    return [
        {
            "name": f"model.layers.{layer}.self_attn", "type": "Attention", "num_heads": heads,
            "num_key_heads": key_heads or heads, "num_value_heads": key_heads or heads, "head_dim": 64, "value_dim": 64,
            "width": 64 * heads, "kind": "separate Linear", "normed": [], "trains": True, "all_train": True,
        }
        for layer in range(layers)
    ]  # fmt: skip


def collapsing(
    layers: int, heads: int, readings: int, *, layer: int, pair: tuple[int, int], every: int = 50
) -> Iterator[Record]:
    """Give the records; the alert comes when the alignment of the pair is above 0.8, and stays."""
    names = [facts["name"] for facts in facts_of(layers, heads)]
    drawn = torch.Generator().manual_seed(0)
    active: tuple[Alert, ...] = ()
    for reading in range(readings):
        merged = 1 / (1 + math.exp(-(reading - 0.6 * readings) / (0.04 * readings)))
        step = reading * every
        measured = {}
        for number, name in enumerate(names):
            noise = 0.02 * torch.randn(heads, heads, generator=drawn)
            alignment = ((noise + noise.T) / 2).fill_diagonal_(1)
            if number == layer:
                alignment[pair[0], pair[1]] = alignment[pair[1], pair[0]] = merged
            measured[name] = layer_record(alignment)
        alerts: tuple[Alert, ...] = ()
        if merged > 0.8 and not active:
            message = (
                f"heads {pair[0]} and {pair[1]} of {names[layer]} are nearly one head: alignment rose to {merged:.2f}"
            )
            where = {names[layer]: pair}
            alerts = active = (
                Alert(
                    step,
                    "worst pair",
                    "warning",
                    where,
                    message,
                    TO_DO,
                    merged,
                    0.8,
                    "hdi_worst_alignment",
                    step,
                    code=CODE,
                ),
            )
        actions = (Action(step, "save checkpoint", (names[layer],), "saved the model"),) if alerts else ()
        yield Record(
            step, measured, time=1.7e9 + step, loss=1 + 3 * math.exp(-reading / readings * 4), alerts=alerts,
            actions=actions, active=active, is_last=reading == readings - 1,
        )  # fmt: skip


def layer_record(alignment: torch.Tensor) -> LayerRecord:
    heads = len(alignment)
    above = torch.triu_indices(heads, heads, 1)
    pairs = alignment[above[0], above[1]]
    worst = int(pairs.argmax())
    overlap = alignment * (1 - 1 / heads) + 1 / heads
    values = {
        "hdi": 1 - float(overlap[above[0], above[1]].mean()),
        "hdi_alignment": float(pairs.mean()),
        "hdi_worst_alignment": float(pairs[worst]),
        "head_covariance": 0.1 * float(pairs[worst]),
        "trains": 1.0,
    }
    lists = {"worst_alignment_pair": [int(above[0][worst]), int(above[1][worst])], "head_norm": [1.0] * heads}
    return LayerRecord(values, lists, {"pair_alignment": alignment, "overlap": overlap})


def write(path: Path, facts: Sequence[dict[str, Any]], records: Iterator[Record]) -> RunHistory:
    history = History(path, facts)
    for record in records:
        history.write(record)
    history.close()
    return load_history(path)
