"""The mean squared error of an ensemble's mean as bias, variance and covariance of its members."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hdi_callback.errors import ShapeError


@dataclass(frozen=True)
class BiasVarianceCovariance:
    """Terms of the mean squared error of an ensemble's mean.

    Attributes:
        bias: mean squared bias of the ensemble.
        variance: v, mean variance of a member.
        covariance: c, mean covariance of two members.
        mse: mean squared error of the mean member; ``bias + variance / H + (1 - 1/H) covariance``.
    """

    bias: Tensor
    variance: Tensor
    covariance: Tensor
    mse: Tensor


def bias_variance_covariance(predictions: Tensor, target: Tensor) -> BiasVarianceCovariance:
    r"""Decompose the mean squared error of an ensemble's mean (Ueda and Nakano 1996).

    .. math:: \mathrm{MSE} = \mathrm{bias}^2 + v / H + (1 - 1/H)\, c

    exact for moments over these replicates.

    Args:
        predictions: ``(replicates, H, ...)``, outputs of each member in each replicate of the experiment.
        target: ``(...)``.

    Returns:
        The terms, averaged over the remaining dimensions.

    Raises:
        ShapeError: if the shapes do not belong together.

    Example:
        >>> terms = bias_variance_covariance(torch.tensor([[1.0, 3.0], [3.0, 1.0]]), torch.tensor(2.0))
        >>> float(terms.mse), float(terms.variance), float(terms.covariance)
        (0.0, 1.0, -1.0)
    """
    if predictions.dim() < 2 or predictions.shape[2:] != target.shape or not predictions.numel():
        raise ShapeError(
            f"Predictions have the shape (replicates, heads, *target.shape), got {tuple(predictions.shape)} for a "
            f"target of {tuple(target.shape)}."
        )
    R, H = predictions.shape[:2]
    centred = (predictions - predictions.mean(0)).reshape(R, H, -1)
    trace = torch.einsum("rhx,rgx->hg", centred, centred) / (R * max(1, target.numel()))
    own = trace.diagonal().sum()
    variance, covariance = own / H, (trace.sum() - own) / (float(H * (H - 1)) or torch.nan)
    ensemble = predictions.mean(1)
    return BiasVarianceCovariance(
        bias=(ensemble.mean(0) - target).square().mean(),
        variance=variance,
        covariance=covariance,
        mse=(ensemble - target).square().mean(),
    )
