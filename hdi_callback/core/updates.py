r"""Updates of the heads' weights between two readings, W(t) - W(t - k): movement, diversity, spectral entropy."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from hdi_callback.core.diversity import HeadDiversity, head_diversity
from hdi_callback.core.tensors import require_tensors
from hdi_callback.core.whitening import DEFAULT_BUDGET, gram_matrices
from hdi_callback.errors import ShapeError


@dataclass(frozen=True)
class HeadUpdate:
    r"""Change of the heads' weights between two readings. All fields have the weights' batch dimensions in front.

    Attributes:
        movement: ``(H,)``, :math:`\lVert W(t) - W(t-k) \rVert / \lVert W(t-k) \rVert`; 0 means frozen, or updates that
            round away. NaN for a head that was zero.
        diversity: `HeadDiversity` of the updates: low if heads learn the same. A head that did not move is dead in it.
        spectral_entropy: ``(H,)``, entropy of the update's energy over its directions, over log d_k: 1 spread evenly, 0
            one direction; NaN for a head that did not move, or of width one.
    """

    movement: Tensor
    diversity: HeadDiversity
    spectral_entropy: Tensor


@torch.no_grad()
def head_movement(weight: Tensor, before: Tensor) -> Tensor:
    r"""Compute the relative change of each head's weights, :math:`\lVert W - W' \rVert / \lVert W' \rVert`.

    Args:
        weight: ``(..., H, d_k, d)``.
        before: the same at an earlier reading; in any type, on any device.

    Returns:
        ``(..., H)``, in float32 or wider; 0 means frozen, or updates that round away; NaN for a head that was zero.

    Raises:
        ShapeError: if the shapes differ.

    Example:
        >>> head_movement(torch.full((2, 1, 4), 3.0), torch.full((2, 1, 4), 2.0)).tolist()
        [0.5, 0.5]
    """
    require_tensors(3, weight=weight, before=before)
    update = weight_update(weight, before)
    moved = torch.linalg.vector_norm(update, dim=(-2, -1))
    size = torch.linalg.vector_norm(before.to(update.device), dim=(-2, -1), dtype=update.dtype)
    return torch.where(size == 0, torch.nan, moved / size)


@torch.no_grad()
def head_update(
    weight: Tensor, before: Tensor, *, rank_tol: float = 1e-6, memory_budget: int = DEFAULT_BUDGET
) -> HeadUpdate:
    """Compute movement, diversity and spectral entropy of the heads' updates.

    The circuits of updates are ``qk_circuits(weight_update(query, ...), weight_update(key, ...))``.

    Args:
        weight: ``(..., H, d_k, d)``.
        before: the same at an earlier reading; in any type, on any device.
        rank_tol: as in `head_diversity`.
        memory_budget: as in `head_diversity`.

    Returns:
        The movement, diversity and spectral entropy of the updates.

    Raises:
        MisconfigurationError: if `rank_tol` is not in (0, 1), or `memory_budget` is not positive.
        ShapeError: if the shapes differ, or `weight` is no head weight.

    Example:
        >>> before = torch.zeros(2, 2, 4) + 1
        >>> update = head_update(before + torch.eye(4).reshape(2, 2, 4), before)
        >>> float(update.diversity.index), update.spectral_entropy.round(decimals=4).tolist()
        (1.0, [1.0, 1.0])
    """
    require_tensors(3, weight=weight, before=before)
    update = weight_update(weight, before)
    diversity = head_diversity(update, rank_tol=rank_tol, memory_budget=memory_budget)
    entropy = torch.where(diversity.dead, torch.nan, spectral_entropy(update))
    return HeadUpdate(head_movement(weight, before), diversity, entropy)


def weight_update(weight: Tensor, before: Tensor) -> Tensor:
    """Subtract the weights of an earlier reading, in float32 or wider.

    Args:
        weight: ``(..., H, d_k, d)``.
        before: the same at an earlier reading; in any type, on any device.

    Returns:
        The difference, on the device of `weight`.

    Raises:
        ShapeError: if the shapes differ.
    """
    require_tensors(2, weight=weight, before=before)
    if weight.shape != before.shape:
        raise ShapeError(f"Two readings of one weight have one shape, got {weight.shape} and {before.shape}.")
    wide = torch.promote_types(torch.promote_types(weight.dtype, before.dtype), torch.float32)
    return weight.to(wide) - before.to(weight.device, wide, non_blocking=True)


@torch.no_grad()
def spectral_entropy(weight: Tensor) -> Tensor:
    r"""Compute the entropy of each head's energy over its directions, :math:`-\sum_i p_i \log p_i / \log d_k`.

    :math:`p_i` are the squared singular values over their sum, the eigenvalues of :math:`P = W W^\top / \lVert W
    \rVert^2`. No eigensolver is needed, as

    .. math:: x \log x = \int_{-\infty}^{\infty} \Bigl( \frac{x e^y}{1 + e^y} - \frac{x e^y}{x + e^y} \Bigr) dy

    and the trapezoidal rule is exact to 1e-6 with 30 Cholesky factors of :math:`P + e^y I`. Ours.

    Args:
        weight: ``(..., H, d_k, d)``.

    Returns:
        ``(..., H)``, in float32 or wider: 1 if the energy is spread evenly, 0 if it lies in one direction; NaN for a
        head of zeros or of width one.

    Raises:
        ShapeError: if something is no tensor of floating point numbers, or has too few dimensions.

    Example:
        >>> spectral_entropy(torch.eye(3)[None]).round(decimals=4).tolist()
        [1.0]
    """
    require_tensors(3, weight=weight)
    k = weight.shape[-2]
    out = torch.promote_types(weight.dtype, torch.float32)
    if k < 2:
        return torch.full(weight.shape[:-2], torch.nan, dtype=out, device=weight.device)
    gram, _ = gram_matrices(weight)
    P = gram / gram.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None]
    eye = torch.eye(k, dtype=P.dtype, device=P.device)
    entropy = torch.zeros_like(P[..., 0, 0])
    step = 1.2  # the error of the rule is 2 exp(-2 pi^2 / step)
    for node in range(-15, 16):
        s = math.exp(step * node)
        factor, _ = torch.linalg.cholesky_ex(P + s * eye, check_errors=False)
        inverse = torch.linalg.solve_triangular(factor, eye.expand_as(P), upper=False).square().sum((-2, -1))
        entropy += step * s * ((k - s * inverse) - 1 / (1 + s))
    return (entropy / math.log(k)).clamp(0, 1).to(out)
