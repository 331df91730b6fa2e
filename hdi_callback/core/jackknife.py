"""Standard errors of the covariance term, by leaving out one sequence at a time (delete-one-group jackknife)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hdi_callback.core.output_products import TINY, mean_terms, mixing_of, without_padding

_CHUNK = 2**22  # numbers that are held at once


def jackknife(
    outputs: Tensor, output_weight: Tensor, count: Tensor, mean: Tensor, trace: Tensor, lengths: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Standard errors of covariance and correlation; tokens lie sequence by sequence, of these lengths."""
    weight = output_weight.to(mean.dtype)
    mixing = mixing_of(weight)
    centred = outputs.to(mean.dtype) - mean
    values = []
    for part in torch.split(centred, list(lengths)):
        others = count - part.shape[0]
        flat = part.flatten(1)
        own = ((flat.mT @ flat).view_as(mixing) * mixing).sum((1, 3))
        # The mean of the others, up to its sign, as all outputs are centred.
        mean_of_others = torch.einsum("hi,hid->hd", part.sum(0) / others, weight)
        left = (count * trace - own) / others - mean_of_others @ mean_of_others.mT
        values.append(torch.stack(mean_terms(torch.where(others > 1, left, torch.nan))))
    variance, covariance = torch.stack(values, -1)
    return _spread(covariance), _spread(covariance / variance)


def jackknife_of_numbered(
    outputs: Tensor,
    output_weight: Tensor,
    count: Tensor,
    mean: Tensor,
    trace: Tensor,
    numbers: Tensor,
    num_sequences: int,
    weights: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Standard errors of covariance and correlation; the sequence of each token is a tensor on the device."""
    W = output_weight.to(mean.dtype)
    H, _, width = W.shape
    weights = torch.ones(outputs.shape[0], dtype=mean.dtype, device=outputs.device) if weights is None else weights
    flat, weights = without_padding(outputs.to(mean.dtype).flatten(1), weights)
    centred = torch.where(weights[:, None] == 0, 0, flat - mean.flatten()).view(outputs.shape)
    of_sequence = weights.new_zeros(num_sequences).index_add(0, numbers, weights)
    tokens = weights.new_zeros(num_sequences).index_add(0, numbers, (weights > 0).to(weights.dtype))
    total = W.new_zeros(num_sequences, H, width)
    products = W.new_zeros(num_sequences, H, H)
    step = max(1, _CHUNK // (H * width))
    for part in range(0, outputs.shape[0], step):
        within = slice(part, part + step)
        z = torch.einsum("thi,hid->thd", centred[within], W)
        scaled = z * weights[within, None, None]
        total.index_add_(0, numbers[within], scaled)
        products.index_add_(0, numbers[within], scaled @ z.mT)
    others = count - of_sequence
    mean_of_others = total / others.clamp_min(TINY)[:, None, None]
    left = (count * trace - products) / others.clamp_min(TINY)[:, None, None] - mean_of_others @ mean_of_others.mT
    # No token that is left has a mean, and a single one no variance: what stands there is rounding.
    variance, covariance = mean_terms(torch.where((tokens.sum() - tokens > 1)[:, None, None], left, torch.nan))
    live = tokens > 0
    return _spread_of(covariance, live), _spread_of(covariance / variance, live)


def _spread_of(values: Tensor, live: Tensor) -> Tensor:
    n = live.sum()
    mean = torch.where(live, values, 0).sum() / n
    return ((n - 1) / n * torch.where(live, values - mean, 0).square().sum()).sqrt()


def _spread(values: Tensor) -> Tensor:
    n = values.shape[0]
    return ((n - 1) / n * (values - values.mean()).square().sum()).sqrt()
