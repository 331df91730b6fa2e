"""The curves of the package for a recorded layer, at one moment."""

from __future__ import annotations

import torch
from torch import Tensor

from examples.theory.models import Recorded
from hdi_callback.core import attention_rows, circuit_similarity, head_covariance, head_diversity, row_metrics


def weights_of(layer: Recorded, role: str) -> Tensor:
    """(H, width, d) of "query", "key", "value"; (H, width, out) of "output"."""
    linear = getattr(layer, role)
    weight = linear.weight.detach().double()
    return weight.mT.unflatten(0, (layer.heads, -1)) if role == "output" else weight.unflatten(0, (layer.heads, -1))


def head_outputs(layer: Recorded) -> Tensor:
    """(tokens, H, width), the input of the output projection."""
    outputs = layer.scores().softmax(-1) @ layer.features(layer.value)
    return outputs.transpose(1, 2).flatten(0, 1)


def token_rank(tokens: Tensor) -> float:
    """Participation ratio of the eigenvalues of the covariance of tokens (n, d); 0 if all are one up to rounding."""
    covariance = torch.cov(tokens.double().mT)
    is_one = covariance.trace() <= (8 * torch.finfo(torch.float64).eps) ** 2 * tokens.double().square().sum(-1).mean()
    return 0.0 if is_one else float(covariance.trace().square() / covariance.square().sum())


def alike(rows: Tensor, visible: Tensor) -> Tensor:
    """Cosines (H, H) of the heads' rows (sequences, H, queries, keys) without their uniform part."""
    is_choice = visible.sum(-1, keepdim=True) > 1
    centred = torch.where(visible & is_choice, rows - rows.sum(-1, keepdim=True) / visible.sum(-1, keepdim=True), 0)
    return torch.corrcoef(centred.transpose(0, 1).flatten(1))  # their mean is zero


def readings(layer: Recorded) -> dict[str, float]:
    """The curves of the layer, under the names that they have in a history, and some that no history has."""
    query, key, value, output = (weights_of(layer, role) for role in ("query", "key", "value", "output"))
    scores = layer.scores()
    visible, weights = scores.isfinite(), scores.softmax(-1)
    covariance = head_covariance(head_outputs(layer), output)
    off = ~torch.eye(layer.heads, dtype=torch.bool)
    return {
        "hdi": float(head_diversity(key).subspace.index),
        "circuit_qk_worst": float(circuit_similarity(query, key).worst),
        "circuit_ov_worst": float(circuit_similarity(output, value).worst),
        "head_correlation": float(covariance.correlation),
        "head_output_overlap": float(covariance.output_overlap[off].mean()),
        "attention_entropy": float(row_metrics(attention_rows(weights, visible)).entropy.mean()),
        "attention_alike": float(alike(weights, visible)[off].mean()),
        "token_rank": token_rank(layer.inputs.flatten(0, 1)),
    }
