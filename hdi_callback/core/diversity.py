r"""Head Diversity Index: weights, or key covariances, of the heads of a layer -> `HeadDiversity`.

Every definition is ours, chosen so that the properties that Fokoué (arXiv 2605.20271) states in his abstract hold.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from hdi_callback.core.pairs import largest_pair, live_pairs, mean_over_pairs
from hdi_callback.core.products import HeadProducts
from hdi_callback.core.subspaces import block_norms, normalised
from hdi_callback.core.tensors import may_decide_on_host, require_tensors
from hdi_callback.core.well_conditioned import BothLenses, lenses_of_products
from hdi_callback.core.whitening import (
    DEFAULT_BUDGET,
    Method,
    flatness_of,
    require_arguments,
    require_rank_tol,
    whiten_heads,
    whitener_of,
)
from hdi_callback.errors import MisconfigurationError, ShapeError


@dataclass(frozen=True)
class DiversityLens:
    """Diversity of a layer's heads through one lens: the fields of `HeadDiversity.subspace` and `HeadDiversity.energy`.

    Attributes:
        index: 1 - mean overlap over the pairs of live heads; NaN with fewer than two of them.
        overlap: ``(H, H)``, overlap of every pair, in [0, 1], diagonal 1 (0 for dead heads).
        alignment: mean overlap against chance: 0 chance, 1 identical, negative: less alike than chance.
        pair_alignment: ``(H, H)``, overlap of every pair against its own chance; NaN for dead heads.
        chance: the index of independent random heads of these ranks, or spectra.
        worst: largest overlap of a pair.
        worst_pair: ``(2,)``, the two heads of that pair; -1 with fewer than two live heads.
        worst_alignment: the largest alignment of a pair.
        worst_alignment_pair: ``(2,)``, the two heads of that pair.
        nearest: ``(H,)``, for each head the head that it overlaps most with; -1 if there is none.
        nearest_overlap: ``(H,)``, that overlap.
        effective_heads: n / (1 + (n-1)(1-index)) for n live heads.
    """

    index: Tensor
    overlap: Tensor
    alignment: Tensor
    pair_alignment: Tensor
    chance: Tensor
    worst: Tensor
    worst_pair: Tensor
    worst_alignment: Tensor
    worst_alignment_pair: Tensor
    nearest: Tensor
    nearest_overlap: Tensor
    effective_heads: Tensor


@dataclass(frozen=True)
class HeadDiversity:
    """Overlaps of a layer's heads, and their indices. All fields have the batch dimensions of the weights in front.

    The subspace lens counts every direction that a head uses alike; the energy lens weighs it by how strongly it is
    used. Fields without a prefix are those of the subspace lens, those with ``energy_`` of the other one; `subspace`
    and `energy` give each lens as a `DiversityLens`, whose fields are described there.

    Attributes:
        index: HDI, 1 - mean overlap over the pairs of live heads; NaN with fewer than two of them.
        overlap: ``(H, H)``, normalised overlap of every pair, in [0, 1], diagonal 1 (0 for dead heads).
        alignment: mean overlap against chance: 0 chance, 1 identical, negative: more orthogonal than chance.
        pair_alignment: ``(H, H)``, alignment of every pair.
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
        head_norm: ``(H,)``, Frobenius norm of each head; NaN in a layer that is not finite.
        energy_index: 1 - mean energy overlap.
        energy_overlap: ``(H, H)``, RV coefficient (linear CKA) of every pair.
        energy_alignment: mean energy overlap against chance (random rotations of the heads' own spectra).
        energy_pair_alignment: ``(H, H)``, energy alignment of every pair.
        energy_worst: largest energy overlap of a pair.
        energy_worst_pair: ``(2,)``, the two heads of that pair.
        energy_worst_alignment: the largest energy alignment of a pair.
        energy_worst_alignment_pair: ``(2,)``, the two heads of that pair.
        energy_nearest: ``(H,)``, for each head the head of its largest energy overlap.
        energy_nearest_overlap: ``(H,)``, that overlap.
        energy_effective_heads: n / (1 + (n-1)(1-energy index)).
        energy_chance: the energy index of random rotations of the heads' own spectra.
    """

    index: Tensor
    overlap: Tensor
    alignment: Tensor
    pair_alignment: Tensor
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
    head_norm: Tensor
    energy_index: Tensor
    energy_overlap: Tensor
    energy_alignment: Tensor
    energy_pair_alignment: Tensor
    energy_worst: Tensor
    energy_worst_pair: Tensor
    energy_worst_alignment: Tensor
    energy_worst_alignment_pair: Tensor
    energy_nearest: Tensor
    energy_nearest_overlap: Tensor
    energy_effective_heads: Tensor
    energy_chance: Tensor

    @property
    def subspace(self) -> DiversityLens:
        """The lens that counts every direction alike."""
        return DiversityLens(**{item.name: getattr(self, item.name) for item in fields(DiversityLens)})

    @property
    def energy(self) -> DiversityLens:
        """The lens that weighs directions by how strongly they are used."""
        return DiversityLens(**{item.name: getattr(self, f"energy_{item.name}") for item in fields(DiversityLens)})


@torch.no_grad()
def head_diversity(
    weight: Tensor,
    *,
    rank_tol: float = 1e-6,
    method: Method = "whiten",
    metric: Tensor | None = None,
    tokens: int | None = None,
    memory_budget: int = DEFAULT_BUDGET,
) -> HeadDiversity:
    r"""Compute the Head Diversity Index of a layer, with its overlaps, worst pair, chance and energy twin.

    .. math:: \mathrm{HDI} = 1 - \operatorname{mean}_{h<g} \kappa_{hg}, \qquad
              \kappa_{hg} = \lVert Q_h Q_g^\top \rVert_F^2 / \sqrt{r_h r_g} = \operatorname{mean}_i \cos^2 \theta_i

    (the last for equal ranks). Invariant under ``W_h -> A_h W_h`` for invertible ``A_h``. A fresh model sits at chance,
    :math:`1 - d_k / d`, not at 1. The definition is ours, after the abstract of Fokoué 2026.

    With the covariance of the layer's input as `metric` it is the index of the keys as they come: the mean squared
    canonical correlation and the RV coefficient of the features :math:`W_h x`. A gain that is folded from a norm into
    the weights then changes nothing.

    Args:
        weight: ``(..., H, d_k, d)``, one projection per head, rows are features as in ``nn.Linear.weight``. Under
            grouped-query attention pass the distinct key heads.
        rank_tol: singular values below ``rank_tol`` times a head's largest do not count.
        method: ``"whiten"`` (default: no eigensolver, no host sync), ``"svd"`` (batched SVD) or ``"exact"`` (float64).
        metric: ``(..., d, d)`` or ``(d, d)``, centred covariance of the projections' inputs; the identity by default.
            With fewer tokens than d it is cheaper to pass the centred features ``weight @ inputs.mT`` as the weight.
        tokens: number of tokens that `metric` was estimated from; chance is then ``d_k / (tokens - 1)``. With a metric
            and without it, alignment, chance and ceiling are NaN.
        memory_budget: bytes of temporary memory beyond one copy of a layer's weight in the type of the result, and of
            its Gram matrices in float64; one head at a time is the least.

    Returns:
        The diversity, in float32 (float64 for a float64 weight or ``"exact"``). A layer with weights that are not
        finite has NaN everywhere; others in the batch are not affected.

    Raises:
        MisconfigurationError: if `method` is unknown or has no metric, or `rank_tol` is not in (0, 1), or
            `memory_budget` is not positive.
        ShapeError: if `weight` has fewer than three dimensions or an empty one, or `metric` does not fit it.

    Example:
        >>> weight = torch.eye(4).reshape(2, 2, 4)  # two heads in orthogonal planes
        >>> float(head_diversity(weight).index), float(head_diversity(weight).effective_heads)
        (1.0, 2.0)
        >>> head_diversity(weight).energy.worst_pair.tolist()
        [0, 1]
    """
    blocks, _ = _measured(
        weight, rank_tol=rank_tol, method=method, metric=metric, tokens=tokens, memory_budget=memory_budget, kept=None
    )
    return blocks.diversity()


@dataclass(frozen=True)
class HeadBlocks:
    """Overlaps, spectra and norms of the heads of some layers, from which `HeadDiversity` is computed.

    Attributes:
        overlap: ``(..., H, H)``.
        energy: ``(..., H, H)``, squared norms of the products of heads of norm 1.
        rank: ``(..., H)``.
        flatness: ``(..., H)``, in float64.
        dead: ``(..., H)``.
        norm: ``(..., H)``, in float64.
        width: ``(...)``, features that the heads read.
    """

    overlap: Tensor
    energy: Tensor
    rank: Tensor
    flatness: Tensor
    dead: Tensor
    norm: Tensor
    width: Tensor

    def diversity(self) -> HeadDiversity:
        """Reduce the matrices, all layers at once.

        Returns:
            The diversity.
        """
        return _summarise(self)


@torch.no_grad()
def blocks_and_products(
    weight: Tensor,
    *,
    rank_tol: float = 1e-6,
    method: Method = "whiten",
    memory_budget: int = DEFAULT_BUDGET,
    keeps_products: bool = True,
) -> tuple[HeadBlocks, HeadProducts | None]:
    """Compute the `HeadBlocks` of layers; return the products of one layer's heads for reuse.

    The products are those of the unwhitened weights, to the rounding of float32: going back from whitened heads is
    exact.

    Args:
        weight: ``(..., H, d_k, d)``; ``(1, H, d_k, d)`` on a CPU for products, as the host inspects the values.
        rank_tol: as in `head_diversity`.
        method: as in `head_diversity`.
        memory_budget: as in `head_diversity`, beside the products.
        keeps_products: return the products.

    Returns:
        The blocks; the products, or `None` where a head is dead, or they are not finite, or are not float32.
    """
    kept: list[tuple[slice, Tensor]] | None = [] if keeps_products else None
    found, scale = _measured(
        weight, rank_tol=rank_tol, method=method, metric=None, tokens=None, memory_budget=memory_budget, kept=kept
    )
    if kept is None:
        return found, None
    is_whole = found.overlap.dtype == torch.float32 and not bool(found.dead.any()) and bool(scale.isfinite().all())
    return found, HeadProducts(tuple(kept), scale[0].float()) if is_whole else None


def _measured(
    weight: Tensor,
    *,
    rank_tol: float,
    method: Method,
    metric: Tensor | None,
    tokens: int | None,
    memory_budget: int,
    kept: list[tuple[slice, Tensor]] | None,
) -> tuple[HeadBlocks, Tensor]:
    """Blocks of some layers, and the norms by which their heads were divided in the kept products."""
    require_tensors(weight=weight)
    require_arguments(weight, rank_tol, method, memory_budget)
    *batch, H, k, d = weight.shape
    layers = weight.reshape(-1, H, k, d)
    metrics = None if metric is None else _metrics(metric, weight, method)
    # As many layers at once as have their rows within the budget, at least one: rows are the only copy of a weight.
    step = max(1, memory_budget // (H * k * d * 8))
    results = []
    both: BothLenses | None = None
    if len(layers) == 1 and metric is None and method == "whiten" and may_decide_on_host(weight):
        both = lenses_of_products(layers[0], rank_tol=rank_tol, memory_budget=memory_budget, kept=kept)
    if both is not None:
        rank = both.shared.new_full((1, H), float(k))
        found = (normalised(both.shared[None], rank), both.energy[None], rank, both.flatness[None])
        results.append((*found, torch.zeros(1, H, dtype=torch.bool, device=weight.device), both.norm[None]))
    for start in range(0, max(1, len(layers)) if both is None else 0, step):
        part = slice(start, start + step)
        S = None if metrics is None else metrics[part if len(metrics) > 1 else slice(0, 1)]
        heads = whiten_heads(layers[part], rank_tol=rank_tol, method=method, metric=S, memory_budget=memory_budget)
        S = None if S is None else S.to(heads.rows.dtype)
        shared, energy = block_norms(
            heads.rows, heads.back.to(heads.rows.dtype), S, memory_budget=memory_budget, kept=kept
        )
        rank = shared.diagonal(dim1=-2, dim2=-1).round()  # of a head's rows with themselves: a projector's
        results.append((normalised(shared, rank), energy, rank, flatness_of(heads.gram), heads.dead, heads.norm))
        del heads
    overlap, energy, rank, flatness, dead, norm = (
        torch.cat(each).reshape(*batch, *each[0].shape[1:]) for each in zip(*results)
    )
    width = float(d) if metric is None else float("nan") if tokens is None else float(tokens - 1)
    scale = norm if both is None else torch.ones_like(norm)
    return HeadBlocks(overlap, energy, rank, flatness, dead, norm, overlap.new_full(batch, width)), scale


@torch.no_grad()
def head_diversity_from_covariance(
    covariance: Tensor, *, tokens: int | None = None, rank_tol: float = 1e-6
) -> HeadDiversity:
    r"""Compute `HeadDiversity` from the covariance of the heads' keys, or of any other features of the heads.

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
    require_tensors(covariance=covariance)
    if covariance.dim() < 4 or covariance.shape[-4:-2] != covariance.shape[-2:] or 0 in covariance.shape[-2:]:
        raise ShapeError(
            f"A key covariance has the shape (..., heads, width, heads, width), got {tuple(covariance.shape)}. "
            "Write torch.cov(keys.flatten(1).T).reshape(heads, width, heads, width)."
        )
    require_rank_tol(rank_tol)
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
    T = whitener_of(own, rank_tol)
    rank = (T @ own @ T.mT).diagonal(dim1=-2, dim2=-1).sum(-1).round()
    shared = (T[..., :, None, :, :] @ blocks @ T[..., None, :, :, :].mT).square().sum((-2, -1))
    overlap = (shared / (rank[..., :, None] * rank[..., None, :]).sqrt().clamp_min(1)).clamp(0, 1)
    # Two independent samples of n tokens correlate like random subspaces of R^(n-1).
    width = float("nan") if tokens is None else float(tokens - 1)
    energy = blocks.square().sum((-2, -1))
    widths = overlap.new_full(covariance.shape[:-4], width)
    return HeadBlocks(overlap, energy, rank, flatness_of(own), dead, variance.sqrt(), widths).diversity()


def _summarise(blocks: HeadBlocks) -> HeadDiversity:
    """Reduce the matrices of some layers."""
    overlap, energy, dead, flatness, norm = blocks.overlap, blocks.energy, blocks.dead, blocks.flatness, blocks.norm
    rank, width = blocks.rank, blocks.width
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

    subspace_chance = (rank[..., :, None] * rank[..., None, :]).sqrt() / width[..., None, None]
    participation = torch.where(dead, 0, 1 / own)  # (tr G)^2 / ||G||^2, the energy's own count of directions
    energy_chance = (participation[..., :, None] * participation[..., None, :]).sqrt() / width[..., None, None]

    mean, chance = mean_over_pairs(overlap, pairs), mean_over_pairs(subspace_chance, pairs)
    energy_mean = mean_over_pairs(energy_overlap, pairs)
    worst, worst_pair, nearest, nearest_overlap = largest_pair(overlap, pairs)
    energy_worst, energy_worst_pair, energy_nearest, energy_nearest_overlap = largest_pair(energy_overlap, pairs)
    both = live[..., :, None] & live[..., None, :]
    pair_alignment = torch.where(both, _above_chance(overlap, subspace_chance), torch.nan)
    energy_pair_alignment = torch.where(both, _above_chance(energy_overlap, energy_chance), torch.nan)
    worst_alignment, worst_alignment_pair, *_ = largest_pair(pair_alignment, pairs)
    energy_worst_alignment, energy_worst_alignment_pair, *_ = largest_pair(energy_pair_alignment, pairs)
    energy_mean_chance = mean_over_pairs(energy_chance, pairs)
    # ||sum_h P_h / sqrt(r_h)||_F^2 >= (its trace)^2 / d, by Cauchy-Schwarz.
    crowding = ((rank.sqrt() * live).sum(-1).square() / width - heads) / (heads * (heads - 1))
    ceiling = torch.where(mean.isnan(), torch.nan, 1 - crowding.clamp_min(0))
    effective, energy_effective = (
        torch.where(heads < 2, heads, heads / (1 + (heads - 1) * each)) for each in (mean, energy_mean)
    )
    return HeadDiversity(
        index=1 - mean,
        overlap=overlap,
        alignment=_above_chance(mean, chance),
        pair_alignment=pair_alignment,
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
        head_norm=norm.to(overlap.dtype),
        energy_index=1 - energy_mean,
        energy_overlap=energy_overlap,
        energy_alignment=_above_chance(energy_mean, energy_mean_chance),
        energy_pair_alignment=energy_pair_alignment,
        energy_worst=energy_worst,
        energy_worst_pair=energy_worst_pair,
        energy_worst_alignment=energy_worst_alignment,
        energy_worst_alignment_pair=energy_worst_alignment_pair,
        energy_nearest=energy_nearest,
        energy_nearest_overlap=energy_nearest_overlap,
        energy_effective_heads=energy_effective,
        energy_chance=1 - energy_mean_chance,
    )


def _metrics(metric: Tensor, weight: Tensor, method: Method) -> Tensor:
    """Check a metric, and flatten its batch dimensions as those of the weight."""
    if method == "svd":
        raise MisconfigurationError('The SVD knows no metric. Write method="whiten", or "exact" for float64.')
    batch, d = weight.shape[:-3], weight.shape[-1]
    if metric.shape != (d, d) and metric.shape != (*batch, d, d):
        raise ShapeError(
            f"A metric for a weight {tuple(weight.shape)} has the shape {(d, d)} or {(*batch, d, d)}, got "
            f"{tuple(metric.shape)}."
        )
    return metric.reshape(-1, d, d)


def _above_chance(overlap: Tensor, chance: Tensor) -> Tensor:
    """Rescale so that 0 is chance and 1 identical; NaN where chance itself is identical (d_k >= d)."""
    return torch.where(chance < 1 - 1e-6, (overlap - chance) / (1 - chance), torch.nan)
