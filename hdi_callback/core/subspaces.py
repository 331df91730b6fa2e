r"""Orthonormal bases of the heads' row spaces, their overlaps and their principal angles."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hdi_callback.core.products import row_products
from hdi_callback.core.tensors import require_tensors
from hdi_callback.core.whitening import DEFAULT_BUDGET, Method, head_chunks, require_arguments, whiten_heads


@dataclass(frozen=True)
class HeadBases:
    """Orthonormal bases of the heads of a layer.

    Attributes:
        rows: ``(..., H, d_k, d)``; ``rows.mT @ rows`` is the projector on the head's row space. With the method
            ``"svd"`` the rows themselves are orthonormal, otherwise they are a tight frame (the polynomial rank cut
            leaves no zero rows); a dead head is all zeros.
        rank: ``(..., H)``, numerical rank of each head, whole numbers as floats.
        dead: ``(..., H)``, True where a head's norm is below `rank_tol` times the layer's largest.
    """

    rows: Tensor
    rank: Tensor
    dead: Tensor


@torch.no_grad()
def orthonormal_bases(weight: Tensor, *, rank_tol: float = 1e-6, method: Method = "whiten") -> HeadBases:
    r"""Compute an orthonormal basis of the row space of every head.

    Whitening by the Cholesky factor of each head's Gram matrix in float64, then a polynomial that cuts the rank without
    an eigensolver, a mask or a shape that depends on the data. The method is ours.

    Args:
        weight: ``(..., H, d_k, d)``, rows are features as in ``nn.Linear.weight``.
        rank_tol: singular values below ``rank_tol`` times a head's largest do not count. Whitening resolves none finer
            than 1e-7, and takes smaller ones for it; ``"svd"`` does.
        method: ``"whiten"`` (no host sync, static shapes), ``"svd"`` (batched SVD), ``"exact"`` (whiten, all in
            float64).

    Returns:
        The bases, in float32 (float64 for a float64 weight or ``"exact"``).

    Raises:
        MisconfigurationError: if `method` is unknown or `rank_tol` is not in (0, 1).
        ShapeError: if `weight` has fewer than three dimensions or an empty one.

    Example:
        >>> bases = orthonormal_bases(torch.eye(4).reshape(2, 2, 4))
        >>> bases.rank.tolist(), bases.dead.tolist()
        ([2.0, 2.0], [False, False])
    """
    require_tensors(weight=weight)
    require_arguments(weight, rank_tol, method)
    heads = whiten_heads(weight, rank_tol=rank_tol, method=method)
    rank = torch.linalg.vector_norm(heads.rows, dim=(-2, -1)).square().round()
    return HeadBases(heads.rows, rank, heads.dead)


@torch.no_grad()
def head_overlap(rows: Tensor, rank: Tensor | None = None, *, memory_budget: int = DEFAULT_BUDGET) -> Tensor:
    r"""Compute the normalised overlap of every pair of head subspaces.

    .. math:: \kappa_{hg} = \lVert Q_h Q_g^\top \rVert_F^2 / \sqrt{r_h r_g}

    The normalised projection kernel (Yamagiwa, Takase and Shimodaira 2026, on frozen models). Memory is bounded: the
    product of all rows is formed in chunks of heads, upper triangle only.

    Args:
        rows: ``(..., H, d_k, d)``, as `orthonormal_bases` gives them; a dead head is all zeros.
        rank: ``(..., H)``, ranks of the heads; computed from the rows by default.
        memory_budget: bytes of temporary memory.

    Returns:
        ``(..., H, H)``, symmetric, in [0, 1]; zero in the rows of dead heads.

    Raises:
        ShapeError: if something is no tensor of floating point numbers, or has too few dimensions.

    Example:
        >>> head_overlap(torch.eye(4).reshape(2, 2, 4)).tolist()
        [[1.0, 0.0], [0.0, 1.0]]
    """
    require_tensors(3, rows=rows)
    rank = torch.linalg.vector_norm(rows, dim=(-2, -1)).square() if rank is None else rank
    return normalised(block_norms(rows, memory_budget=memory_budget)[0], rank.to(rows.dtype))


def normalised(shared: Tensor, rank: Tensor) -> Tensor:
    """Divide the squared norms of the blocks of a product of bases by the ranks.

    Args:
        shared: ``(..., H, H)``.
        rank: ``(..., H)``.

    Returns:
        ``(..., H, H)``, in [0, 1]; zero in the rows of dead heads.
    """
    # A live head has rank >= 1, so the clamp only reaches dead heads (0/0).
    return (shared / (rank[..., :, None] * rank[..., None, :]).sqrt().clamp_min(1)).clamp(0, 1)


def block_norms(
    rows: Tensor,
    back: Tensor | None = None,
    metric: Tensor | None = None,
    *,
    memory_budget: int = DEFAULT_BUDGET,
    kept: list[tuple[slice, Tensor]] | None = None,
) -> tuple[Tensor, Tensor]:
    r"""Squared norms of the blocks of :math:`B = R S R^\top`, and of :math:`M_h B_{hg} M_g^\top`.

    One product serves both lenses: the blocks themselves compare subspaces; multiplied with the small matrices M they
    compare the unwhitened heads. In chunks of heads, upper triangle only.

    Args:
        rows: ``(..., H, d_k, d)``.
        back: ``(..., H, d_k, d_k)``, M; without it the second result is the first.
        metric: ``(..., d, d)``, S, symmetric; the identity by default.
        memory_budget: bytes of temporary memory.
        kept: receives the blocks :math:`M_h B_{hg} M_g^\top` of one layer, as `HeadProducts` holds them; with `back`.

    Returns:
        ``(..., H, H)`` twice, symmetric.
    """
    *batch, H, k, d = rows.shape
    flat = rows.reshape(*batch, H * k, d)
    shared, energy = rows.new_empty(*batch, H, H), rows.new_empty(*batch, H, H)
    # The product, and what it becomes, next to each other.
    each = torch.Size(batch).numel() * rows.element_size() * k * (2 * H * k + (0 if metric is None else d))
    # Four chunks leave out 3/8 of the product, and more of them gain little.
    for part in head_chunks(H, each, memory_budget, at_least=4):
        heads, others = part.stop - part.start, H - part.start
        left = flat[..., part.start * k : part.stop * k, :]
        product = row_products(left if metric is None else left @ metric, flat[..., part.start * k :, :])
        taken = None
        if back is not None:
            taken = back[..., part, :, :] @ product.reshape(*batch, heads, k, others * k)
        blocks = product.square_().reshape(*batch, heads, k, others, k).sum((-3, -1))
        _write(shared, part, blocks)
        del product
        if taken is None or back is None:
            continue
        # (others, heads * k, k), strided: batched products read it as it lies.
        by_other = taken.reshape(*batch, heads * k, others, k).transpose(-3, -2)
        taken = by_other @ back[..., part.start :, :, :].mT
        if kept is not None:
            kept.append((part, taken.reshape(others, heads, k, k).permute(1, 2, 0, 3)))
        squares = taken.square_() if kept is None else taken.square()
        blocks = squares.reshape(*batch, others, heads, k * k).sum(-1).mT
        _write(energy, part, blocks)
    return shared, shared if back is None else energy


def _write(matrix: Tensor, part: slice, blocks: Tensor) -> None:
    """Write the rows of some heads from the diagonal on, and their mirror image."""
    matrix[..., part, part.start :] = blocks
    matrix[..., part.start :, part] = blocks.mT


@torch.no_grad()
def principal_cosines(weight: Tensor, *, rank_tol: float = 1e-6) -> Tensor:
    r"""Compute the cosines of the principal angles between every pair of head subspaces.

    They are the singular values of :math:`Q_h Q_g^\top` (Bjorck and Golub 1973). float32 cannot resolve angles under
    about 3.5e-4 rad, so that the cosine is the number to report.

    Args:
        weight: ``(..., H, d_k, d)``.
        rank_tol: singular values below ``rank_tol`` times a head's largest do not count.

    Returns:
        ``(..., H, H, d_k)``, descending, in [0, 1]; zeros beyond the smaller of the two ranks.

    Raises:
        MisconfigurationError: if `rank_tol` is not in (0, 1).
        ShapeError: if `weight` has fewer than three dimensions or an empty one.

    Example:
        >>> weight = torch.eye(4).reshape(2, 2, 4)  # two heads in orthogonal planes
        >>> principal_cosines(weight)[0, 1].tolist()
        [0.0, 0.0]
    """
    require_tensors(weight=weight)
    rows = orthonormal_bases(weight, rank_tol=rank_tol, method="svd").rows
    blocks = rows[..., :, None, :, :] @ rows[..., None, :, :, :].mT
    finite = blocks.isfinite().all(-1).all(-1)[..., None]
    cosines = torch.linalg.svdvals(blocks.nan_to_num()).clamp(0, 1)
    return torch.where(finite, cosines, torch.nan)
