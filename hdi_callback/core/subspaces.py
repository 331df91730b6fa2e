r"""Orthonormal bases of the heads' row spaces, their overlaps and their principal angles.

Whitening each head first and multiplying once afterwards is the order that is exact: whitening after one big product
would amplify its rounding by the square of the condition number.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from hdi_callback.errors import MisconfigurationError, ShapeError

Method = Literal["whiten", "svd", "exact"]

_FINEST_RANK_TOL = 1e-7  # its square must stay above the rounding of a Gram matrix in float64
_CHUNK_ELEMENTS = 2**24  # of the product of the bases, about 64 MB in float32


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

    With ``M_h = K_h K_h^T`` in float64 and ``L L^T = M_h + s I``, the rows of ``L^{-1} K_h`` have singular values
    :math:`q = \sigma / \sqrt{\sigma^2 + s}`. Two steps of :math:`q \mapsto 2.5 q^3 - 1.5 q^5` then drive them to 0 or
    1: a rank cut without an eigensolver, a mask or a shape that depends on the data. The method is ours.

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
    _require_method(method)
    scaled, dead = _normalise(weight, rank_tol)
    out = torch.float64 if method == "exact" or weight.dtype == torch.float64 else torch.float32
    return _bases(scaled, dead, scaled @ scaled.mT, rank_tol, method, out)


def _bases(scaled: Tensor, dead: Tensor, gram: Tensor, rank_tol: float, method: Method, out: torch.dtype) -> HeadBases:
    """Compute the bases of heads of norm 1 from themselves and their Gram matrices."""
    wide = scaled.dtype
    if method == "svd":
        rows = _svd_rows(scaled.to(out), rank_tol)
    else:
        whitener = _whitener(gram, rank_tol)
        # TF32 rounds the weight itself, which moves the subspace of an ill-conditioned head: on CUDA stay in float64.
        multiply_in = wide if scaled.is_cuda else out
        rows = (whitener.to(multiply_in) @ scaled.to(multiply_in)).to(out)
    rows = rows.masked_fill(dead[..., None, None], 0)
    return HeadBases(rows, rows.square().sum((-2, -1)).round(), dead)


@torch.no_grad()
def head_overlap(rows: Tensor, rank: Tensor | None = None) -> Tensor:
    r"""Compute the normalised overlap of every pair of head subspaces.

    .. math:: \kappa_{hg} = \lVert Q_h Q_g^\top \rVert_F^2 / \sqrt{r_h r_g}

    The normalised projection kernel (Yamagiwa, Takase and Shimodaira 2026, on frozen models). Memory is bounded: the
    product of all rows is formed in chunks of heads, the upper triangle alone.

    Args:
        rows: ``(..., H, d_k, d)``, as `orthonormal_bases` gives them; a dead head is all zeros.
        rank: ``(..., H)``, ranks of the heads; computed from the rows by default.

    Returns:
        ``(..., H, H)``, symmetric, in [0, 1]; zero in the rows of dead heads.

    Example:
        >>> head_overlap(torch.eye(4).reshape(2, 2, 4)).tolist()
        [[1.0, 0.0], [0.0, 1.0]]
    """
    rank = rows.square().sum((-2, -1)) if rank is None else rank.to(rows.dtype)
    # A live head has rank >= 1, so the clamp only reaches dead heads (0/0).
    scale = (rank[..., :, None] * rank[..., None, :]).sqrt().clamp_min(1)
    return (shared_energy(rows) / scale).clamp(0, 1)


def shared_energy(rows: Tensor) -> Tensor:
    r"""Compute :math:`\lVert A_h A_g^\top \rVert_F^2` for every pair of heads, in chunks of bounded memory.

    Args:
        rows: ``(..., H, d_k, d)``.

    Returns:
        ``(..., H, H)``, symmetric.
    """
    *batch, H, k, d = rows.shape
    flat = rows.reshape(*batch, H * k, d)
    layers = max(1, torch.Size(batch).numel())
    # Four chunks leave out 3/8 of the product, and more of them gain little.
    step = max(1, min(math.ceil(H / 4), _CHUNK_ELEMENTS // max(1, layers * k * H * k)))
    energy = rows.new_zeros(*batch, H, H)
    for start in range(0, H, step):
        stop = min(start + step, H)
        product = flat[..., start * k : stop * k, :] @ flat[..., start * k :, :].mT
        blocks = product.reshape(*batch, stop - start, k, H - start, k).square().sum((-3, -1))
        energy[..., start:stop, start:] = blocks
        energy[..., start:, start:stop] = blocks.mT
    return energy


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
    rows = orthonormal_bases(weight, rank_tol=rank_tol, method="svd").rows
    blocks = rows[..., :, None, :, :] @ rows[..., None, :, :, :].mT
    finite = blocks.isfinite().all(-1).all(-1)[..., None]
    cosines = torch.linalg.svdvals(blocks.nan_to_num()).clamp(0, 1)
    return torch.where(finite, cosines, torch.nan)


def _normalise(weight: Tensor, rank_tol: float) -> tuple[Tensor, Tensor]:
    """Scale every head to norm 1, in the widest type at hand, and tell the dead ones; not finite becomes NaN."""
    _require_rank_tol(rank_tol)
    if weight.dim() < 3 or 0 in weight.shape[-3:]:
        raise ShapeError(
            "A head weight has the shape (..., heads, width, in_features), none of them empty; got "
            f"{tuple(weight.shape)}. Write weight.unflatten(0, (num_heads, -1)) for an nn.Linear.weight."
        )
    wide = weight.to(torch.float32 if weight.device.type == "mps" else torch.float64)
    if weight.dtype == wide.dtype:
        # The squares in a norm leave the range of the type at the root of it; narrower weights are far from there.
        peak = wide.abs().amax((-3, -2, -1), keepdim=True)
        wide = wide / torch.where((peak > 0) & peak.isfinite(), peak, 1)
    norm = torch.linalg.vector_norm(wide, dim=(-2, -1))  # (..., H)
    largest = norm.amax(-1, keepdim=True)
    dead = ((norm < rank_tol * largest) | (largest == 0)) & largest.isfinite()
    norm = torch.where(largest.isfinite(), norm.masked_fill(dead, 1), torch.nan)
    # `wide` is a copy of the weight by now, so it is changed in place: a float64 copy more would double the memory.
    return wide.div_(norm[..., None, None]).masked_fill_(dead[..., None, None], 0), dead


def _flatness(gram: Tensor) -> Tensor:
    """Geometric over arithmetic mean of the eigenvalues of Gram matrices (..., k, k); a zero counts as 1e-14."""
    k = gram.shape[-1]
    size = torch.linalg.matrix_norm(gram)
    shift = torch.where(size > 0, _FINEST_RANK_TOL**2 * size, 1.0)[..., None, None]
    shifted = gram + shift * torch.eye(k, dtype=gram.dtype, device=gram.device)
    factor, info = torch.linalg.cholesky_ex(shifted, check_errors=False)
    trace = shifted.diagonal(dim1=-2, dim2=-1).sum(-1)
    flatness = (2 * factor.diagonal(dim1=-2, dim2=-1).log().mean(-1)).exp() / (trace / k)
    return torch.where(info == 0, flatness, torch.nan)


def _require_method(method: str) -> None:
    if method not in get_args(Method):
        raise MisconfigurationError(f"`method` must be one of {get_args(Method)}, got {method!r}.")


def _require_rank_tol(rank_tol: float) -> None:
    if not 0 < rank_tol < 1:
        raise MisconfigurationError(f"`rank_tol` must lie between 0 and 1, got {rank_tol}. Write rank_tol=1e-6.")


def _whitener(gram: Tensor, rank_tol: float) -> Tensor:
    """Take the Gram matrices of heads (..., k, k) to T with T gram T^T a projector on the directions that count."""
    k = gram.shape[-1]
    eye = torch.eye(k, dtype=gram.dtype, device=gram.device)
    size = torch.linalg.matrix_norm(gram)
    shift = torch.where(size > 0, max(rank_tol, _FINEST_RANK_TOL) ** 2 * size, 1.0)[..., None, None]
    factor, info = torch.linalg.cholesky_ex(gram + shift * eye, check_errors=False)
    T = torch.linalg.solve_triangular(factor, eye.expand_as(gram), upper=False)
    W = eye - shift * (T @ T.mT)
    for _ in range(2):
        C = 2.5 * W - 1.5 * (W @ W)
        T, W = C @ T, C @ W @ C
    return torch.where((info == 0)[..., None, None], T, torch.nan)


def _svd_rows(scaled: Tensor, rank_tol: float) -> Tensor:
    """Right singular vectors that count, padded with zero rows to the shape of the weight."""
    *_, k, d = scaled.shape
    finite = scaled.isfinite().all(-1).all(-1)[..., None, None]
    _, sigma, rows = torch.linalg.svd(scaled.nan_to_num(), full_matrices=False)
    counts = sigma > rank_tol * sigma[..., :1]
    rows = rows * counts[..., None]
    return torch.where(finite, torch.nn.functional.pad(rows, (0, 0, 0, max(0, k - d))), torch.nan)
