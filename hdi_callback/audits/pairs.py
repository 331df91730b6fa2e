"""Weights that training leaves matched in pairs, queries with keys and values with outputs, compared between layers.

Scores stay the same if the queries of a head are multiplied by a matrix and its keys by the inverse transpose. By this
symmetry gradient flow conserves ``W_q W_q.T - W_k W_k.T``, and the same of values and outputs: what training adds to
the one Gram matrix it adds to the other. So after some hundred steps the cosines between the rows of a pair are
correlated, head by head; of rows that are drawn anew, in another order, or of another head they are not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from hdi_callback.arguments import listed
from hdi_callback.attention import AttentionLayer
from hdi_callback.record import Alert, Level

_PAIRS = (("query", "key"), ("value", "output"))
_FEWEST_LAYERS, _FEWEST_ROWS = 4, 8
_TRAINED = 2.5  # match of two thirds of the layers, in units of what chance reaches
_SURE = 6.0  # standard deviations at which two of the heads of all layers belong together
_ACTION = "Look at the order of heads and rows where the file was written, and at whether all was loaded and trained"


@torch.no_grad()
def unmatched_weights(layers: Sequence[AttentionLayer], step: int) -> list[Alert]:
    """Return the layers whose weights do not match in pairs, while those of the others do."""
    clauses: dict[str, list[str]] = {}
    is_sure = set()
    for pair in _PAIRS:
        both = [layer for layer in layers if all(role in layer.weights for role in pair)]
        compared = [layer for layer in both if layer.weight(pair[0]).shape[1] >= _FEWEST_ROWS]
        rows = {layer.name: _cosines(layer, pair) for layer in compared}
        sizes = {name: _size(_match(*of_layer).diagonal()) for name, of_layer in rows.items()}
        if len(sizes) < _FEWEST_LAYERS or sorted(sizes.values())[len(sizes) // 3] < _TRAINED:
            continue  # too few layers, or untrained ones
        for name in (name for name, size in sizes.items() if size < 1):
            text = f"its {pair[0]} and {pair[1]} weights match by chance alone"
            if partner := _partner(name, rows):
                is_sure.add(name)
                heads = "other heads" if partner == name else partner
                text = f"its {pair[1]} weights match the {pair[0]} weights of {heads}"
            clauses.setdefault(name, []).append(text)
    alerts = []
    for name, of_layer in clauses.items():
        message = f"{name} is unlike the other layers, whose weights training has matched: {listed(of_layer)}"
        level: Level = "warning" if name in is_sure else "notice"
        alerts.append(Alert(step, "unmatched weights", level, {name: ()}, message, _ACTION))
    return alerts


def _cosines(layer: AttentionLayer, pair: tuple[str, str]) -> tuple[Tensor, Tensor]:
    """Return ``(heads, n)`` of both roles: the cosines of each two rows of a head, less their mean, of norm one."""
    weights = [layer.weight(role).detach().float() for role in pair]
    heads, size = min(map(len, weights)), weights[0].shape[1]
    i, j = torch.triu_indices(size, size, 1, device=weights[0].device)
    first, second = (
        # Heads that share keys are one, with the sum of their Gram matrices.
        F.normalize(weight.unflatten(0, (heads, -1)).transpose(1, 2).flatten(2), dim=-1)
        for weight in weights
    )
    cosines = ((rows @ rows.mT)[:, i, j] for rows in (first, second))
    first, second = (F.normalize(of_heads - of_heads.mean(1, keepdim=True), dim=1) for of_heads in cosines)
    return first, second


def _match(first: Tensor, second: Tensor) -> Tensor:
    """Return the correlation of each two heads, in standard deviations of what it is of independent rows."""
    return first @ second.T * math.sqrt(first.shape[1])


def _size(of_heads: Tensor) -> float:
    """Return the root mean square over heads, in units of what chance reaches with three standard deviations."""
    return float(of_heads.square().mean().sqrt()) / (1 + 3 / math.sqrt(2 * len(of_heads)))


def _partner(name: str, rows: dict[str, tuple[Tensor, Tensor]]) -> str:
    """Return the layer to whose first weights the second weights of most heads of a layer belong; ``""`` if none."""
    second = rows[name][1]
    for other_name, (first, _) in rows.items():
        if first.shape[1] == second.shape[1]:
            best = _match(first, second).abs().amax(0)
            if 2 * int((best >= _SURE).sum()) > len(best):
                return other_name
    return ""
