"""Weights that training leaves matched in pairs, queries with keys and values with outputs, compared between layers.

Scores stay the same if the queries of a head are multiplied by a matrix and its keys by the inverse transpose. By this
symmetry gradient flow conserves ``W_q W_q.T - W_k W_k.T``, and the same of values and outputs: what training adds to
the one Gram matrix it adds to the other. So after some hundred steps the cosines between the rows of a pair are
correlated, head by head; of rows that are drawn anew, in another order, or of another head they are not. Queries and
keys that were exchanged match as well, but the softmax ignores a bias of keys, which therefore gets no gradient.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from hdi_callback.arguments import listed
from hdi_callback.attention import AttentionLayer
from hdi_callback.attention.layer import bias_of
from hdi_callback.record import Alert, Level

_PAIRS = (("query", "key"), ("value", "output"))
_FEWEST_LAYERS, _FEWEST_ROWS = 4, 8
_TRAINED = 2.5  # match of two thirds of the layers, in units of what chance reaches
_SURE = 6.0  # standard deviations at which two of the heads of all layers belong together
_FACTOR = 4.0  # of the ratio of norms of a pair, to that in the median layer
_BIAS = 10.0  # times that the larger of two biases is as large as the other, where training moves one of them alone
_ACTION = "Look at the order of heads and rows where the file was written, and at whether all was loaded and trained"


@torch.no_grad()
def unmatched_weights(layers: Sequence[AttentionLayer], step: int) -> list[Alert]:
    """Return the layers whose weights do not match in pairs, or lack a factor, while those of the others do."""
    clauses: dict[str, list[str]] = {}
    is_sure = set()
    for pair in _PAIRS:
        both = [layer for layer in layers if all(role in layer.weights for role in pair)]
        compared = [layer for layer in both if layer.weight(pair[0]).shape[1] >= _FEWEST_ROWS]
        rows = {layer.name: _cosines(layer, pair) for layer in compared}
        sizes = {name: _size(_match(*of_layer).diagonal()) for name, of_layer in rows.items()}
        if len(sizes) < _FEWEST_LAYERS or sorted(sizes.values())[len(sizes) // 3] < _TRAINED:
            continue  # too few layers, or untrained ones
        norms = {layer.name: float(layer.weight(pair[0]).norm() / layer.weight(pair[1]).norm()) for layer in compared}
        usual = statistics.median(norms.values())
        for name, size in sizes.items():
            partner = _partner(name, rows) if size < 1 else ""
            if partner:
                is_sure.add(name)
                heads = "other heads" if partner == name else partner
                clauses.setdefault(name, []).append(f"its {pair[1]} weights match the {pair[0]} weights of {heads}")
            elif size < 1:
                clauses.setdefault(name, []).append(f"its {pair[0]} and {pair[1]} weights match by chance alone")
            elif not 1 / _FACTOR < norms[name] / usual < _FACTOR:
                ratio = f"the norm of its {pair[0]} weights is {norms[name]:.2g} times that of its {pair[1]} weights"
                clauses.setdefault(name, []).append(f"{ratio}, of the median layer {usual:.2g}")
    ratios = {layer.name: bias for layer in layers if (bias := _bias_ratio(layer)) is not None}
    usual = statistics.median(ratios.values() or [math.inf])
    for name, bias in ratios.items() if len(ratios) >= _FEWEST_LAYERS and usual < 1 / _BIAS else ():
        if bias > _BIAS:
            is_sure.add(name)
            text = f"the bias of its keys is {bias:.2g} times that of its queries, of the median layer {usual:.2g}"
            clauses.setdefault(name, []).append(f"{text}, as if they were exchanged")
    alerts = []
    for name, of_layer in clauses.items():
        message = f"{name} is unlike the other layers, whose weights training has matched: {listed(of_layer)}"
        level: Level = "warning" if name in is_sure else "notice"
        alerts.append(Alert(step, "unmatched weights", level, {name: ()}, message, _ACTION))
    return alerts


def _bias_ratio(layer: AttentionLayer) -> float | None:
    """Return the norm of the bias of keys over that of queries; `None` if it has not both."""
    norms = []
    for weight in (layer.weights[role] for role in ("query", "key") if role in layer.weights):
        biases = [each for head in range(weight.heads) if (each := bias_of(weight, head)) is not None]
        if len(biases) < weight.heads:
            return None
        norms.append(float(torch.cat([bias.detach()[places].float() for bias, places in biases]).norm()))
    if len(norms) < 2 or not any(norms):
        return None
    return norms[1] / norms[0] if norms[0] else math.inf


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
