r"""Head Diversity Index: weights, or key covariances, of the heads of a layer -> `HeadDiversity`.

Every definition is ours, chosen so that the properties that Fokoué (arXiv 2605.20271) states in his abstract hold.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from hdi_callback.core.pairs import largest_pair, live_pairs, mean_over_pairs
from hdi_callback.core.subspaces import (
    _bases,
    _flatness,
    _normalise,
    _require_method,
    _require_rank_tol,
    _whitener,
    head_overlap,
    shared_energy,
)
from hdi_callback.errors import ShapeError


@dataclass(frozen=True)
class HeadDiversity:
    """How far apart the heads of a layer are. All fields have the batch dimensions of the weights in front.

    The subspace lens counts every direction that a head uses alike; the energy lens weighs it by how strongly it is
    used.

    Attributes:
        index: HDI, 1 - mean overlap over the pairs of live heads; NaN with fewer than two of them.
        overlap: ``(H, H)``, normalised overlap of every pair, in [0, 1], diagonal 1 (0 for dead heads).
        alignment: mean overlap against chance: 0 chance, 1 identical, negative: more orthogonal than chance.
        worst: largest overlap of a pair.
        worst_pair: ``(2,)``, the two heads of that pair; -1 with fewer than two live heads.
        worst_alignment: the largest alignment of a pair.
        worst_alignment_pair: ``(2,)``, the two heads of that pair: not `worst_pair` where ranks differ, as wide heads
            overlap more by chance.
        nearest: ``(H,)``, for each head the head that it overlaps most with; -1 if there is none.
        nearest_overlap: ``(H,)``, that overlap.
        effective_heads: n / (1 + (n-1)(1-HDI)) for n live heads.
        chance: the HDI of independent, uniformly random subspaces of these ranks.
        ceiling: an upper bound of the HDI for these ranks (Welch type, not always attained).
        normalised_index: index / ceiling.
        rank: ``(H,)``, numerical ranks, whole numbers as floats.
        effective_rank: ``(H,)``, participation ratio ``(tr G)^2 / ||G||_F^2`` of the squared singular values of each
            head, ``G = W_h W_h^T``: over how many directions its energy is spread, in [1, d_k]; 0 for a dead head.
        flatness: ``(H,)``, spectral flatness ``det(G)^(1/d_k) / (tr(G)/d_k)``: 1 if a head uses all its directions
            alike; falls to 0 if it loses some, and only mildly if others grow. 0 for a dead head.
        dead: ``(H,)``, True where a head is all but zero.
        energy_index: 1 - mean energy overlap.
        energy_overlap: ``(H, H)``, RV coefficient (linear CKA) of every pair.
        energy_alignment: mean energy overlap against chance (random rotations of the heads' own spectra).
        energy_worst: largest energy overlap of a pair.
        energy_worst_pair: ``(2,)``, the two heads of that pair.
        energy_worst_alignment: the largest energy alignment of a pair.
        energy_worst_alignment_pair: ``(2,)``, the two heads of that pair.
    """

    index: Tensor
    overlap: Tensor
    alignment: Tensor
    worst: Tensor
    worst_pair: Tensor
    worst_alignment: Tensor
    worst_alignment_pair: Tensor
    nearest: Tensor
    nearest_overlap: Tensor
    effective_heads: Tensor
    chance: Tensor
    ceiling: Tensor
    normalised_index: Tensor
    rank: Tensor
    effective_rank: Tensor
    flatness: Tensor
    dead: Tensor
    energy_index: Tensor
    energy_overlap: Tensor
    energy_alignment: Tensor
    energy_worst: Tensor
    energy_worst_pair: Tensor
    energy_worst_alignment: Tensor
    energy_worst_alignment_pair: Tensor


@torch.no_grad()
def head_diversity(
    weight: Tensor, *, rank_tol: float = 1e-6, method: Literal["whiten", "svd", "exact"] = "whiten"
) -> HeadDiversity:
    r"""Compute the Head Diversity Index of a layer, with its overlaps, worst pair, chance and energy twin.

    .. math:: \mathrm{HDI} = 1 - \operatorname{mean}_{h<g} \kappa_{hg}, \qquad
              \kappa_{hg} = \lVert Q_h Q_g^\top \rVert_F^2 / \sqrt{r_h r_g} = \operatorname{mean}_i \cos^2 \theta_i

    (the last for equal ranks). Invariant under ``W_h -> A_h W_h`` for invertible ``A_h``. A fresh model sits at chance,
    :math:`1 - d_k / d`, not at 1. The definition is ours, after the abstract of Fokoué 2026.

    Args:
        weight: ``(..., H, d_k, d)``, one projection per head, rows are features as in ``nn.Linear.weight``. Under
            grouped-query attention pass the distinct key heads.
        rank_tol: singular values below ``rank_tol`` times a head's largest do not count.
        method: ``"whiten"`` (default: no eigensolver, no host sync), ``"svd"`` (batched SVD) or ``"exact"`` (float64).

    Returns:
        The diversity, in float32 (float64 for a float64 weight or ``"exact"``). A layer with weights that are not
        finite has NaN everywhere; others in the batch are not affected.

    Raises:
        MisconfigurationError: if `method` is unknown or `rank_tol` is not in (0, 1).
        ShapeError: if `weight` has fewer than three dimensions or an empty one.

    Example:
        >>> weight = torch.eye(4).reshape(2, 2, 4)  # two heads in orthogonal planes
        >>> float(head_diversity(weight).index), float(head_diversity(weight).effective_heads)
        (1.0, 2.0)
    """
    _require_method(method)
    scaled, dead = _normalise(weight, rank_tol)
    gram = scaled @ scaled.mT
    out = torch.float64 if method == "exact" or weight.dtype == torch.float64 else torch.float32
    bases = _bases(scaled, dead, gram, rank_tol, method, out)
    energy = shared_energy(scaled.to(out))
    overlap = head_overlap(bases.rows, bases.rank)
    return _summarise(overlap, energy, bases.rank, _flatness(gram), dead, weight.shape[-1])


@torch.no_grad()
def head_diversity_from_covariance(
    covariance: Tensor, *, tokens: int | None = None, rank_tol: float = 1e-6
) -> HeadDiversity:
    r"""Compute the same quantities from the covariance of the heads' keys, or of any other feature of the heads.

    The overlap becomes the mean squared canonical correlation, the energy overlap the RV coefficient. A covariance has
    only the Gram, so accumulate it in float64; it is whitened in float64.

    Args:
        covariance: ``(..., H, d_k, H, d_k)``, centred covariance of the features of all heads.
        tokens: number of tokens it was estimated from; chance is then ``d_k / (tokens - 1)``. Without it alignment,
            chance and ceiling are NaN.
        rank_tol: square roots of eigenvalues below ``rank_tol`` times a head's largest do not count.

    Returns:
        The diversity, in float64; NaN everywhere in a layer whose covariance is not finite.

    Raises:
        MisconfigurationError: if `rank_tol` is not in (0, 1).
        ShapeError: if `covariance` does not have the shape ``(..., H, d_k, H, d_k)``.

    Example:
        >>> keys = torch.randn(1000, 2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        >>> covariance = torch.cov(keys.flatten(1).T).reshape(2, 3, 2, 3)
        >>> bool(head_diversity_from_covariance(covariance, tokens=1000).index > 0.99)
        True
    """
    if covariance.dim() < 4 or covariance.shape[-4:-2] != covariance.shape[-2:]:
        raise ShapeError(
            f"A key covariance has the shape (..., heads, width, heads, width), got {tuple(covariance.shape)}. "
            "Write torch.cov(keys.flatten(1).T).reshape(heads, width, heads, width)."
        )
    _require_rank_tol(rank_tol)
    finite = covariance.isfinite().flatten(-4).all(-1)[..., None, None, None, None]
    # An infinite block between two heads would clamp to an overlap of 1.
    blocks = torch.where(finite, covariance.double(), torch.nan).transpose(-3, -2)  # (..., H, H, k, k)
    own = blocks.diagonal(dim1=-4, dim2=-3).movedim(-1, -3)  # (..., H, k, k)
    variance = own.diagonal(dim1=-2, dim2=-1).sum(-1)
    largest = variance.amax(-1, keepdim=True)
    dead = ((variance < rank_tol**2 * largest) | (largest == 0)) & largest.isfinite()
    scale = torch.where(largest.isfinite(), variance.masked_fill(dead, 1), torch.nan).rsqrt().masked_fill(dead, 0)
    blocks = blocks * (scale[..., :, None] * scale[..., None, :])[..., None, None]
    own = own * scale.square()[..., None, None]
    T = _whitener(own, rank_tol)
    rank = (T @ own @ T.mT).diagonal(dim1=-2, dim2=-1).sum(-1).round()
    shared = (T[..., :, None, :, :] @ blocks @ T[..., None, :, :, :].mT).square().sum((-2, -1))
    overlap = (shared / (rank[..., :, None] * rank[..., None, :]).sqrt().clamp_min(1)).clamp(0, 1)
    # Two independent samples of n tokens correlate like random subspaces of R^(n-1).
    width = float("nan") if tokens is None else float(tokens - 1)
    return _summarise(overlap, blocks.square().sum((-2, -1)), rank, _flatness(own), dead, width)


def diversity_penalty(weight: Tensor, *, eps: float = 1e-6) -> Tensor:
    r"""Compute the mean overlap of the heads as a penalty to train with; differentiable.

    Through Cholesky whitening with ``L L^T = W W^T + eps ||W||_F^2 / d_k I`` and never through an SVD, whose gradient
    blows up at repeated singular values. Exactly aligned heads are a stationary point: separating clones needs noise.
    Ours.

    Args:
        weight: ``(..., H, d_k, d)`` with at least two heads. A zero head overlaps with none and gets no gradient; a
            head of deficient rank counts as full, so that its overlaps read low.
        eps: size of the ridge, relative to the mean squared singular value of a head.

    Returns:
        ``(...)``, mean overlap over the pairs, in [0, 1]; in float32 or wider.

    Raises:
        ShapeError: if there are fewer than two heads.

    Example:
        >>> weight = torch.eye(4).reshape(2, 2, 4).requires_grad_()
        >>> diversity_penalty(weight).item()
        0.0
    """
    if weight.dim() < 3 or weight.shape[-3] < 2:
        raise ShapeError(f"A penalty on pairs needs (..., heads >= 2, width, in_features), got {tuple(weight.shape)}.")
    *batch, H, k, d = weight.shape
    weight = weight.to(torch.promote_types(weight.dtype, torch.float32))  # no Cholesky in half precision
    gram = weight @ weight.mT
    ridge = eps * gram.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
    ridge = torch.where(ridge > 0, ridge, 1)
    eye = torch.eye(k, dtype=weight.dtype, device=weight.device)
    factor, _ = torch.linalg.cholesky_ex(gram + ridge * eye, check_errors=False)
    rows = torch.linalg.solve_triangular(factor, weight, upper=False).reshape(*batch, H * k, d)
    shared = (rows @ rows.mT).reshape(*batch, H, k, H, k).square().sum((-3, -1)) / k
    mean: Tensor = (shared.sum((-2, -1)) - shared.diagonal(dim1=-2, dim2=-1).sum(-1)) / (H * (H - 1))
    return mean


def _summarise(
    overlap: Tensor, energy: Tensor, rank: Tensor, flatness: Tensor, dead: Tensor, width: float
) -> HeadDiversity:
    """Reduce the matrices of a layer. `energy` holds the squared norms of the cross products of heads of norm 1."""
    H = overlap.shape[-1]
    rank = rank.to(overlap.dtype)
    live, pairs = ~dead, live_pairs(dead)
    eye = torch.eye(H, dtype=torch.bool, device=overlap.device)
    heads = live.sum(-1).to(overlap.dtype)
    # A product that rounds to 1 + 1e-7 is 1; the diagonal is 1 by definition, unless the weights are not finite.
    overlap = torch.where(eye & live[..., None] & overlap.isfinite(), 1, overlap)
    own = energy.diagonal(dim1=-2, dim2=-1)
    energy_overlap = energy / (own[..., :, None] * own[..., None, :]).sqrt()
    energy_overlap = torch.where(live[..., :, None] & live[..., None, :], energy_overlap.clamp(0, 1), 0)
    energy_overlap = torch.where(eye & live[..., None] & energy_overlap.isfinite(), 1, energy_overlap)

    subspace_chance = (rank[..., :, None] * rank[..., None, :]).sqrt() / width
    participation = torch.where(dead, 0, 1 / own)  # (tr G)^2 / ||G||^2, the energy's own count of directions
    energy_chance = (participation[..., :, None] * participation[..., None, :]).sqrt() / width

    mean, chance = mean_over_pairs(overlap, pairs), mean_over_pairs(subspace_chance, pairs)
    energy_mean = mean_over_pairs(energy_overlap, pairs)
    worst, worst_pair, nearest, nearest_overlap = largest_pair(overlap, pairs)
    energy_worst, energy_worst_pair, _, _ = largest_pair(energy_overlap, pairs)
    worst_alignment, worst_alignment_pair, *_ = largest_pair(_above_chance(overlap, subspace_chance), pairs)
    energy_worst_alignment, energy_worst_alignment_pair, *_ = largest_pair(
        _above_chance(energy_overlap, energy_chance), pairs
    )
    # ||sum_h P_h / sqrt(r_h)||_F^2 >= (its trace)^2 / d, by Cauchy-Schwarz.
    crowding = ((rank.sqrt() * live).sum(-1).square() / width - heads) / (heads * (heads - 1))
    ceiling = torch.where(mean.isnan(), torch.nan, 1 - crowding.clamp_min(0))
    effective = torch.where(heads < 2, heads, heads / (1 + (heads - 1) * mean))
    return HeadDiversity(
        index=1 - mean,
        overlap=overlap,
        alignment=_above_chance(mean, chance),
        worst=worst,
        worst_pair=worst_pair,
        worst_alignment=worst_alignment,
        worst_alignment_pair=worst_alignment_pair,
        nearest=nearest,
        nearest_overlap=nearest_overlap,
        effective_heads=effective,
        chance=1 - chance,
        ceiling=ceiling,
        normalised_index=(1 - mean) / ceiling,
        rank=rank,
        effective_rank=participation,
        flatness=torch.where(dead, 0, flatness.to(overlap.dtype)),
        dead=dead,
        energy_index=1 - energy_mean,
        energy_overlap=energy_overlap,
        energy_alignment=_above_chance(energy_mean, mean_over_pairs(energy_chance, pairs)),
        energy_worst=energy_worst,
        energy_worst_pair=energy_worst_pair,
        energy_worst_alignment=energy_worst_alignment,
        energy_worst_alignment_pair=energy_worst_alignment_pair,
    )


def _above_chance(overlap: Tensor, chance: Tensor) -> Tensor:
    """Rescale so that 0 is chance and 1 identical; NaN where chance itself is identical (d_k >= d)."""
    return torch.where(chance < 1 - 1e-6, (overlap - chance) / (1 - chance), torch.nan)
