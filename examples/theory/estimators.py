"""Nadaraya-Watson heads whose kernels see a subspace of the keys, and the closed forms of their noise."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def kernel_weights(bases: Tensor, keys: Tensor, queries: Tensor, bandwidth: float) -> Tensor:
    """Weights of Gaussian kernels in the subspaces of the heads.

    Args:
        bases: (H, k, d), rows orthonormal within a head.
        keys: (..., n, d).
        queries: (..., q, d).
        bandwidth: b.

    Returns:
        (..., H, q, n), each row adds up to 1.
    """
    q = queries.unsqueeze(-3) @ bases.mT
    k = keys.unsqueeze(-3) @ bases.mT
    return (-torch.cdist(q, k, compute_mode="donot_use_mm_for_euclid_dist").square() / (2 * bandwidth**2)).softmax(-1)


def overlap_factor(cosine: float, bandwidth: float, spread: float) -> float:
    """The closed form O(c) by which one principal angle multiplies the noise covariance of two heads.

    Keys N(0, 1) in each direction, queries N(0, spread^2), Gaussian kernels, to leading order in 1/n.
    """
    B = 1 + bandwidth**2
    q, p = spread**2 * cosine**2 / B, cosine * (1 - spread**2 / B)
    return B / math.sqrt((B - q) ** 2 - p**2)


def noise_covariance(bases: Tensor, bandwidth: float, spread: float) -> Tensor:
    """Covariance of the heads' noise times n over sigma^2, (H, H): the product of O(c) over the principal angles."""
    cosines = torch.linalg.svdvals(torch.einsum("hid,gjd->hgij", bases, bases)).clamp(0, 1)
    factors = [overlap_factor(float(c), bandwidth, spread) for c in cosines.flatten()]
    return torch.tensor(factors, dtype=torch.float64).view(cosines.shape).prod(-1)


def aligned_heads(heads: int, k: int, d: int) -> Tensor:
    return torch.eye(d, dtype=torch.float64)[:k].repeat(heads, 1, 1)


def orthogonal_heads(heads: int, k: int, d: int) -> Tensor:
    return torch.eye(d, dtype=torch.float64)[: heads * k].view(heads, k, d)


def random_heads(heads: int, k: int, d: int, draw: torch.Generator) -> Tensor:
    return torch.linalg.qr(torch.randn(heads, d, k, generator=draw, dtype=torch.float64)).Q.mT


def heads_at_angle(heads: int, k: int, angle: float) -> Tensor:
    """Heads that share k directions and have k of their own, so that all principal angles have cosine cos^2(angle).

    HDI is 1 - cos^4(angle): 0 for angle 0, and 1 for a right angle. The width is k (heads + 1).
    """
    eye = torch.eye(k * (heads + 1), dtype=torch.float64)
    own = eye[k:].view(heads, k, -1)
    return math.cos(angle) * eye[:k] + math.sin(angle) * own
