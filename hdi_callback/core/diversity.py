r"""Head Diversity Index: the weights of a layer's heads -> `HeadDiversity`.

Every definition is ours, chosen so that the properties that Fokoué (arXiv 2605.20271) states in his abstract hold. The
overlap is the normalised projection kernel, used on the heads of frozen models by Yamagiwa, Takase and Shimodaira
(arXiv 2601.10266).
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import NamedTuple

import torch
from torch import Tensor

from hdi_callback.core.pairs import at_least, head_chunks, largest_pair, live_pairs, mean_over_pairs, symmetric
from hdi_callback.core.whitening import WhitenedHeads, by_layers, whiten_layers
from hdi_callback.errors import MisconfigurationError, ShapeError


@dataclass(frozen=True)
class Lens:
    """Diversity of a layer's heads through one lens. All fields have the batch dimensions of the weights in front."""

    index: Tensor  #: 1 - mean overlap over the pairs of live heads; NaN with fewer than two of them
    overlap: Tensor  #: ``(H, H)``, overlap of every pair, in [0, 1], diagonal 1 (0 for dead heads)
    alignment: Tensor  #: mean overlap against chance; 0 is chance, 1 identical, negative less alike than chance
    pair_alignment: Tensor  #: ``(H, H)``, overlap of every pair against its own chance; NaN for dead heads
    worst: Tensor  #: largest overlap of a pair
    worst_pair: Tensor  #: ``(2,)``, the two heads of that pair; -1 with fewer than two live heads
    worst_alignment: Tensor  #: the largest alignment of a pair
    #: ``(2,)``, the two heads of that pair; not `worst_pair` where ranks differ, as wide heads overlap more by chance
    worst_alignment_pair: Tensor
    effective_heads: Tensor  #: n / (1 + (n-1)(1-index)) for n live heads


@dataclass(frozen=True)
class HeadDiversity:
    """Overlaps of a layer's heads, and their indices. All fields have the batch dimensions of the weights in front."""

    subspace: Lens  #: every direction that a head uses counts alike; `subspace.index` is the HDI
    energy: Lens  #: directions are weighted by how strongly they are used (RV coefficient, linear CKA)
    chance: Tensor  #: the HDI of independent, uniformly random subspaces of these ranks
    ceiling: Tensor  #: an upper bound of the HDI for these ranks (Welch type, not always attained)
    rank: Tensor  #: ``(H,)``, numerical ranks, whole numbers as floats
    #: ``(H,)``, spectral flatness of each head, the geometric over the arithmetic mean of its squared singular values,
    #: 1 if all are equal; 0 for a head of deficient rank
    flatness: Tensor
    dead: Tensor  #: ``(H,)``, True where a head is all but zero
    head_norm: Tensor  #: ``(H,)``, Frobenius norm of each head; NaN in a layer that is not finite


@torch.no_grad()
def head_diversity(weight: Tensor, *, rank_tol: float = 1e-6) -> HeadDiversity:
    r"""Compute the Head Diversity Index of a layer, with its overlaps, worst pair, chance and energy twin.

    .. math:: \mathrm{HDI} = 1 - \operatorname{mean}_{h<g} \kappa_{hg}, \qquad
              \kappa_{hg} = \lVert Q_h Q_g^\top \rVert_F^2 / \sqrt{r_h r_g} = \operatorname{mean}_i \cos^2 \theta_i

    (the last for equal ranks). Invariant under ``W_h -> A_h W_h`` for invertible ``A_h``. A fresh model sits at chance,
    :math:`1 - d_k / d`, not at 1. The energy overlap is :math:`\lVert W_h W_g^\top \rVert_F^2 / (\lVert W_h W_h^\top
    \rVert_F \lVert W_g W_g^\top \rVert_F)`. The definition is ours, after the abstract of Fokoué 2026.

    Args:
        weight: ``(..., H, d_k, d)``, one projection per head, rows are features as in ``nn.Linear.weight``. Under
            grouped-query attention pass the distinct key heads.
        rank_tol: singular values below ``rank_tol`` times a head's largest do not count; 1e-7 is the finest.

    Returns:
        The diversity, in float32 (float64 for a float64 weight). A layer with weights that are not finite has NaN
        everywhere; others in the batch are not affected.

    Raises:
        MisconfigurationError: if `rank_tol` is not in (0, 1).
        ShapeError: if `weight` has fewer than three dimensions or an empty one.

    Example:
        >>> weight = torch.eye(4).reshape(2, 2, 4)  # two heads in orthogonal planes
        >>> diversity = head_diversity(weight)
        >>> float(diversity.subspace.index), float(diversity.subspace.effective_heads)
        (1.0, 2.0)
        >>> diversity.energy.worst_pair.tolist()
        [0, 1]
    """
    _require_heads(weight, rank_tol)
    *batch, H, k, d = weight.shape
    sums = diversity_sums(whiten_layers(weight.reshape(-1, H, k, d), rank_tol))
    return diversity_of(DiversitySums(*(part.reshape(*batch, *part.shape[1:]) for part in sums)), d)


class DiversitySums(NamedTuple):
    """Squared norms of products of heads, small enough for the host; layers in front."""

    shared: Tensor  # ``(..., H, H)``, squared norms of the products of two heads' orthonormal rows
    energy: Tensor  # ``(..., H, H)``, the same of the heads themselves, scaled to norm 1
    norm: Tensor  # ``(..., H)``, norms of the heads
    dead: Tensor  # ``(..., H)``, True where a head is all but zero
    flatness: Tensor  # ``(..., H)``, spectral flatness of the heads


@torch.no_grad()
def diversity_sums(heads: WhitenedHeads) -> DiversitySums:
    """Reduce whitened heads ``(L, H, d_k, d)`` to what `diversity_of` takes, some layers at a time."""

    def of_layers(*tensors: Tensor) -> DiversitySums:
        some = WhitenedHeads(*tensors)
        norms = _block_norms(some.rows, some.mixing.to(some.rows.dtype))
        return DiversitySums(*norms, some.norm, some.dead, some.flatness)

    return DiversitySums(*by_layers(of_layers, *heads))


def _block_norms(rows: Tensor, mixing: Tensor) -> tuple[Tensor, Tensor]:
    r"""Return :math:`\lVert B_{hg} \rVert^2` and :math:`\lVert M_h B_{hg} M_g^\top \rVert^2` of :math:`B = Q Q^\top`.

    Of rows Q ``(L, H, k, d)`` and mixing M ``(L, H, k, k)``; both ``(L, H, H)`` and symmetric.
    """
    L, H, k, _ = rows.shape
    flat = rows.flatten(1, 2)  # (L, H k, d)
    shared, energy = [], []
    # The product, and what it becomes, side by side.
    for part in head_chunks(H, 2 * L * k * H * k * rows.element_size(), at_least=at_least(rows)):
        n, m = part.stop - part.start, H - part.start
        product = flat[:, part.start * k : part.stop * k] @ flat[:, part.start * k :].mT
        mixed = mixing[:, part] @ product.view(L, n, k, m * k)
        shared.append((part, product.square_().view(L, n, k, m, k).sum((2, 4))))
        # (L, others, heads k, k), strided: batched products read it as it lies.
        mixed = mixed.view(L, n * k, m, k).transpose(1, 2) @ mixing[:, part.start :].mT
        energy.append((part, mixed.square_().view(L, m, n, k * k).sum(-1).mT))
    return symmetric(H, shared), symmetric(H, energy)


@torch.no_grad()
def diversity_of(sums: DiversitySums, width: int) -> HeadDiversity:
    """Reduce the squared norms of the blocks, all layers at once; `width` is the number of input features."""
    shared, energy, dead = sums.shared, sums.energy, sums.dead
    out = shared.dtype
    live = ~dead
    heads = live.sum(-1).to(out)
    rank = shared.diagonal(dim1=-2, dim2=-1).round()  # of a head's rows with themselves: a projector's
    own = energy.diagonal(dim1=-2, dim2=-1)
    participation = torch.where(dead, 0, 1 / own)  # (tr G)^2 / ||G||^2, the energy's own count of directions
    # A live head has rank >= 1, so the clamp only reaches dead heads (0/0).
    subspace = shared / _outer(rank).sqrt().clamp_min(1)
    chance, energy_chance = _outer(rank).sqrt() / width, _outer(participation).sqrt() / width
    mean_chance = mean_over_pairs(chance, live_pairs(dead))
    # ||sum_h P_h / sqrt(r_h)||_F^2 >= (its trace)^2 / d, by Cauchy-Schwarz.
    crowding = ((rank.sqrt() * live).sum(-1).square() / width - heads) / (heads * (heads - 1))
    both = _lens(torch.stack([subspace, energy / _outer(own).sqrt()]), torch.stack([chance, energy_chance]), dead)
    lenses = [Lens(**{item.name: getattr(both, item.name)[place] for item in fields(both)}) for place in (0, 1)]
    return HeadDiversity(
        subspace=lenses[0],
        energy=lenses[1],
        chance=1 - mean_chance,
        ceiling=torch.where(mean_chance.isnan(), torch.nan, 1 - crowding.clamp_min(0)),
        rank=rank,
        flatness=torch.where(dead, 0, sums.flatness).to(out),
        dead=dead,
        head_norm=sums.norm.to(out),
    )


def _lens(overlap: Tensor, chance: Tensor, dead: Tensor) -> Lens:
    """Reduce the overlaps of every pair, given their chance; lenses are stacked in front."""
    live, pairs = ~dead, live_pairs(dead)
    both = live[..., :, None] & live[..., None, :]
    heads = live.sum(-1).to(overlap.dtype)
    eye = torch.eye(dead.shape[-1], dtype=torch.bool, device=dead.device)
    # A product that rounds to 1 + 1e-7 is 1; the diagonal is 1 by definition, unless the weights are not finite.
    overlap = torch.where(eye & overlap.isfinite(), 1, overlap.clamp(0, 1))
    overlap = torch.where(both, overlap, 0)
    pair_alignment = torch.where(both, _above_chance(overlap, chance), torch.nan)
    mean = mean_over_pairs(overlap, pairs)
    worst, worst_pair = largest_pair(overlap, pairs)
    worst_alignment, worst_alignment_pair = largest_pair(pair_alignment, pairs)
    return Lens(
        index=1 - mean,
        overlap=overlap,
        alignment=_above_chance(mean, mean_over_pairs(chance, pairs)),
        pair_alignment=pair_alignment,
        worst=worst,
        worst_pair=worst_pair,
        worst_alignment=worst_alignment,
        worst_alignment_pair=worst_alignment_pair,
        effective_heads=torch.where(heads < 2, heads, heads / (1 + (heads - 1) * mean)),
    )


def _above_chance(overlap: Tensor, chance: Tensor) -> Tensor:
    """Rescale so that 0 is chance and 1 identical; NaN where chance itself is identical (d_k >= d)."""
    return torch.where(chance < 1 - 1e-6, (overlap - chance) / (1 - chance), torch.nan)


def _outer(each: Tensor) -> Tensor:
    """Products of the numbers of every two heads, ``(..., H, H)``."""
    return each[..., :, None] * each[..., None, :]


@torch.no_grad()
def principal_cosines(weight: Tensor, *, rank_tol: float = 1e-6) -> Tensor:
    r"""Compute the cosines of the principal angles between every pair of head subspaces.

    They are the singular values of :math:`Q_h Q_g^\top` (Björck and Golub 1973), here by a batched SVD in float64, for
    which the host waits. float32 cannot resolve angles under about 3.5e-4 rad, so that the cosine is the number to
    report.

    Args:
        weight: ``(..., H, d_k, d)``.
        rank_tol: singular values below ``rank_tol`` times a head's largest do not count.

    Returns:
        ``(..., H, H, min(d_k, d))``, descending, in [0, 1]; zeros beyond the smaller of the two ranks.

    Raises:
        MisconfigurationError: if `rank_tol` is not in (0, 1).
        ShapeError: if `weight` has fewer than three dimensions or an empty one.

    Example:
        >>> weight = torch.eye(4).reshape(2, 2, 4)  # two heads in orthogonal planes
        >>> principal_cosines(weight)[0, 1].tolist()
        [0.0, 0.0]
    """
    _require_heads(weight, rank_tol)
    _, sigma, right = torch.linalg.svd(weight.double(), full_matrices=False)
    largest = sigma[..., :1]
    is_dead = largest < rank_tol * largest.amax(-2, keepdim=True)
    Q = right * ((sigma > rank_tol * largest) & ~is_dead)[..., None]  # (..., H, min(d_k, d), d)
    cosines = torch.linalg.svdvals(Q[..., :, None, :, :] @ Q[..., None, :, :, :].mT)
    clamped: Tensor = cosines.clamp(0, 1)
    return clamped.to(torch.promote_types(weight.dtype, torch.float32))


def _require_heads(weight: Tensor, rank_tol: float) -> None:
    if not 0 < rank_tol < 1:
        raise MisconfigurationError(f"`rank_tol` must lie between 0 and 1, got {rank_tol}. Write rank_tol=1e-6.")
    if weight.dim() < 3 or 0 in weight.shape[-3:]:
        raise ShapeError(
            "A head weight has the shape (..., heads, width, in_features), none of them empty; got "
            f"{tuple(weight.shape)}. Write weight.unflatten(0, (num_heads, -1)) for an nn.Linear.weight."
        )
