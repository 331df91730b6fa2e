"""What the index says about the error, under the idealised model in which it can be proved."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from examples.theory.estimators import overlap_factor
from hdi_callback.core import head_diversity


def overlap_factor_by_quadrature(cosine: float, bandwidth: float, spread: float) -> float:
    """E over queries of E_x[K_h K_g] / (E_x K_h E_x K_g), Gaussian kernels, keys N(0, 1), queries N(0, spread^2)."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(120)
    weights = weights / weights.sum()
    B = 1 + bandwidth**2
    s = spread * nodes[:, None]
    t = spread * (cosine * nodes[:, None] + math.sqrt(1 - cosine**2) * nodes[None])
    joint = np.exp(-0.5 * (B * s**2 - 2 * cosine * s * t + B * t**2) / (B**2 - cosine**2)) / math.sqrt(B**2 - cosine**2)
    apart = np.exp(-0.5 * (s**2 + t**2) / B) / B
    return float((weights[:, None] * weights[None] * joint / apart).sum())


def heads_at_equal_angles(angle: float, k: int = 3) -> torch.Tensor:
    eye = torch.eye(2 * k, dtype=torch.float64)
    return torch.stack([eye[:k], math.cos(angle) * eye[:k] + math.sin(angle) * eye[k:]])


@pytest.mark.parametrize(("bandwidth", "spread"), [(0.8, 1.0), (1.5, 0.5), (1.0, 0.2)])
def test_the_closed_form_is_the_expectation_over_queries(bandwidth, spread):
    for cosine in (0.0, 0.3, 0.7, 0.95):
        expected = overlap_factor_by_quadrature(cosine, bandwidth, spread)
        assert overlap_factor(cosine, bandwidth, spread) == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize(("bandwidth", "spread"), [(0.8, 1.0), (1.5, 0.5), (1.0, 0.2)])
def test_the_noise_that_two_heads_share_falls_as_their_index_rises(bandwidth, spread):
    angles = np.linspace(0.05, math.pi / 2, 12)
    index = [float(head_diversity(heads_at_equal_angles(angle)).index) for angle in angles]
    noise = [overlap_factor_by_quadrature(math.cos(angle), bandwidth, spread) ** 3 for angle in angles]
    assert index == pytest.approx(np.sin(angles) ** 2)
    assert (np.diff(index) > 0).all()
    assert (np.diff(noise) < 0).all()
