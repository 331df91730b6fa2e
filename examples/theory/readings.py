"""The curves of the package for a recorded layer, at one moment."""

from __future__ import annotations

import torch
from torch import Tensor

from examples.theory.models import Recorded
from hdi_callback.core import (
    attention_rows,
    head_covariance,
    head_diversity,
    ov_circuits,
    qk_circuits,
    row_metrics,
    token_spread,
)


def weights_of(layer: Recorded, role: str) -> Tensor:
    """(H, width, d) of "query", "key", "value"; (H, width, out) of "output"."""
    linear = getattr(layer, role)
    weight = linear.weight.detach().double()
    return weight.mT.unflatten(0, (layer.heads, -1)) if role == "output" else weight.unflatten(0, (layer.heads, -1))


def head_outputs(layer: Recorded) -> Tensor:
    """(tokens, H, width), the input of the output projection."""
    outputs = layer.scores().softmax(-1) @ layer.features(layer.value)
    return outputs.transpose(1, 2).flatten(0, 1)


def readings(layer: Recorded) -> dict[str, float]:
    """The curves of the layer, under the names that they have in a history."""
    query, key, value, output = (weights_of(layer, role) for role in ("query", "key", "value", "output"))
    diversity = head_diversity(key)
    scores = layer.scores()
    visible = scores.isfinite()
    rows = row_metrics(attention_rows(scores.softmax(-1), visible))
    covariance = head_covariance(head_outputs(layer), output)
    off = ~torch.eye(layer.heads, dtype=torch.bool)
    spread = token_spread(layer.inputs.double().flatten(0, 1))
    return {
        "hdi": float(diversity.subspace.index),
        "circuit_qk_worst": float(qk_circuits(query, key).cosine[off].max()),
        "circuit_ov_worst": float(ov_circuits(value, output).cosine[off].max()),
        "head_correlation": float(covariance.correlation),
        "head_output_overlap": float(covariance.output_overlap[off].mean()),
        "attention_entropy": float(rows.entropy.mean()),
        "attention_alike": float(rows.alike[off].mean()),
        "token_rank": float(spread.rank),
    }
