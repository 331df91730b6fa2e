"""A small grouped-query model, and every metric of it computed the long way in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import combinations
from typing import Any

import numpy as np
import torch
from scipy.linalg import subspace_angles
from torch import Tensor, nn
from torch.nn import functional as F

from hdi_callback.monitor import HeadDiversityMonitor

HEADS, KEY_HEADS, WIDTH = 4, 2, 32
D = WIDTH // HEADS


class Attention(nn.Module):
    """Causal attention of four heads on two key heads."""

    def __init__(self, *, eager: bool = False) -> None:
        super().__init__()
        self.eager = eager
        self.query = nn.Linear(WIDTH, WIDTH)
        self.key = nn.Linear(WIDTH, KEY_HEADS * D)
        self.value = nn.Linear(WIDTH, KEY_HEADS * D)
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q = self.query(x).view(b, t, -1, D).transpose(1, 2)
        k, v = (one(x).view(b, t, -1, D).transpose(1, 2) for one in (self.key, self.value))
        k, v = (one.repeat_interleave(HEADS // KEY_HEADS, 1) for one in (k, v))
        if self.eager:
            hidden = torch.ones(t, t, dtype=torch.bool, device=x.device).triu(1)
            scores = (q @ k.mT / math.sqrt(D)).masked_fill(hidden, -torch.inf)
            o = scores.softmax(-1) @ v
        else:
            o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.mix(o.transpose(1, 2).reshape(b, t, -1))


class Model(nn.Module):
    """Residual layers of `Attention`."""

    def __init__(self, layers: int = 2, *, eager: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Attention(eager=eager) for _ in range(layers))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + self.dropout(layer(x))
        return x


def inputs_of(model: Model, x: Tensor) -> list[Tensor]:
    """What comes into each layer."""
    found = []
    for layer in model.layers:
        found.append(x)
        x = x + layer(x)
    return found


def naive(layer: Attention, x: Tensor, before: dict[str, Tensor] | None = None) -> dict[str, float]:
    """Every metric of a layer whose input is ``(batch, length, width)``, computed in float64 from definitions."""
    x = x.detach().double()
    weights = {name: one.detach().double() for name, one in layer.named_parameters()}
    query = weights["query.weight"].view(HEADS, D, WIDTH)
    key, value = (weights[f"{name}.weight"].view(KEY_HEADS, D, WIDTH) for name in ("key", "value"))
    output = weights["mix.weight"].T.reshape(HEADS, D, WIDTH)
    found = {**_of_keys(key), **_of_circuits(query, key, value, output)}

    q = (x @ weights["query.weight"].T + weights["query.bias"]).unflatten(-1, (HEADS, D)).transpose(1, 2)
    k, v = (
        (x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]).unflatten(-1, (KEY_HEADS, D)).transpose(1, 2)
        for name in ("key", "value")
    )
    k, v = (one[:, [0, 0, 1, 1]] for one in (k, v))
    scores = q @ k.mT / math.sqrt(D)
    t = x.shape[1]
    scores = scores.masked_fill(torch.ones(t, t, dtype=torch.bool).triu(1), -torch.inf)
    rows = scores.softmax(-1)
    found |= of_rows(rows, scores)
    outputs = (rows @ v).transpose(1, 2).flatten(0, 1)  # (tokens, H, d_v)
    found |= of_outputs(outputs, output)
    if before is not None:
        own = ("query.weight", "mix.weight")  # of heads, and not of groups
        moved, size = torch.zeros(HEADS).double(), torch.zeros(HEADS).double()
        for name in own:
            now, last = (one[name].double() for one in (weights, before))
            now, last = (one if name[0] == "q" else one.T for one in (now, last))
            moved += (now - last).reshape(HEADS, -1).square().sum(-1)
            size += last.reshape(HEADS, -1).square().sum(-1)
        found["head_movement_min"] = float((moved / size).sqrt().min())
    return found


def _of_keys(key: Tensor) -> dict[str, float]:
    G, k, d = key.shape
    overlaps, energies = [], []
    for h, g in combinations(range(G), 2):
        overlaps.append(float(np.mean(np.cos(subspace_angles(key[h].T.numpy(), key[g].T.numpy())) ** 2)))
        between = (key[h] @ key[g].T).square().sum()
        energies.append(float(between / ((key[h] @ key[h].T).norm() * (key[g] @ key[g].T).norm())))
    overlap, chance = float(np.mean(overlaps)), k / d
    return {
        "hdi": 1 - overlap,
        "hdi_worst_pair": max(overlaps),
        "hdi_alignment": (overlap - chance) / (1 - chance),
        "hdi_worst_alignment": (max(overlaps) - chance) / (1 - chance),
        "hdi_effective_heads": G / (1 + (G - 1) * overlap),
        "_energy": float(np.mean(energies)),
    }


def _of_circuits(query: Tensor, key: Tensor, value: Tensor, output: Tensor) -> dict[str, float]:
    found = {}
    scores = [query[h].T @ key[h // 2] for h in range(HEADS)]
    writes = [value[h // 2].T @ output[h] for h in range(HEADS)]
    for name, maps in (("circuit_qk", scores), ("circuit_ov", writes)):
        cosines = [
            float((maps[h] * maps[g]).sum() / (maps[h].norm() * maps[g].norm()))
            for h, g in combinations(range(HEADS), 2)
        ]
        found |= {f"{name}_worst": max(cosines), f"{name}_norm": min(float(one.norm()) for one in maps)}
    return found


def of_outputs(outputs: Tensor, output: Tensor) -> dict[str, float]:
    """Metrics of head outputs ``(tokens, H, d_v)`` and an output weight ``(H, d_v, d)``."""
    H = outputs.shape[1]
    added = torch.einsum("thv,hvd->htd", outputs, output)
    centred = added - added.mean(1, keepdim=True)
    T = torch.einsum("htd,gtd->hg", centred, centred) / outputs.shape[0]
    return {"head_covariance": float((T.sum() - T.trace()) / (H * (H - 1)))}


def of_rows(rows: Tensor, scores: Tensor) -> dict[str, float]:
    """Metrics of causal attention ``(batch, H, t, t)``; the first query, which sees one key, is left out."""
    b, H, t, _ = rows.shape
    entropy = torch.zeros(H).double()
    for s in range(b):
        for i in range(1, t):
            a = rows[s, :, i, : i + 1].double()
            entropy += -(a * a.clamp_min(1e-300).log()).sum(-1) / math.log(i + 1)
    n = b * (t - 1)

    visible = scores > -torch.inf
    mean = scores.masked_fill(~visible, 0).sum(-1) / visible.sum(-1)
    return {
        "attention_entropy": float(entropy.mean() / n),
        "attention_logit": float((scores.amax(-1) - mean).max()),
        "attention_sink": float((rows[:, :, 1:, 0].double().sum((0, 2)) / n).max()),
        "attention_ahead": 0.0,
    }


def after_a_call(model: nn.Module, forward: Callable[[], Any], **settings: Any) -> HeadDiversityMonitor:
    """Return the monitor of a model that has been called once, so that its layers are known."""
    monitor = HeadDiversityMonitor(model, **settings)
    forward()
    return monitor
