r"""Whitening: each head as a small matrix times orthonormal rows; shared by both lenses and the circuits.

With :math:`K_h` the weight of a head scaled to norm 1, :math:`G_h = K_h K_h^\top` and a whitener :math:`T_h`, the rows
:math:`R_h = T_h K_h` span what the head reads, and :math:`K_h = M_h R_h` with :math:`M_h = G_h T_h^\top`. From one
product :math:`B = R R^\top` then follow the subspaces, :math:`\lVert B_{hg} \rVert`, and the energy,
:math:`\lVert M_h B_{hg} M_g^\top \rVert`. Whitening first is the order that is exact: whitening after one big product
would amplify its rounding by the square of the condition number. The other direction amplifies nothing.

Weights are read in chunks of heads: no copy of a whole weight in float64 is made.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from hdi_callback.core.slices import has_fast_float64, sliced_gram, sliced_product
from hdi_callback.core.tensors import may_decide_on_host
from hdi_callback.errors import MisconfigurationError, ShapeError

Method = Literal["whiten", "svd", "exact"]

DEFAULT_BUDGET = 2**26
"""Bytes of temporary memory beyond the rows of the layers at hand: 64 MiB."""

SINGLE = 1e-7
"""Largest error of an overlap in float32."""

_FINEST_RANK_TOL = 1e-7  # its square must stay above the rounding of a Gram matrix in float64


@dataclass(frozen=True)
class WhitenedHeads:
    """The heads of some layers, each as a small matrix times orthonormal rows.

    Attributes:
        rows: ``(..., H, d_k, d)``; ``rows.mT @ rows`` is the projector on the head's row space. Zeros for a dead head.
        back: ``(..., H, d_k, d_k)``; ``back @ rows`` is the head, scaled to norm 1; in float64.
        gram: ``(..., H, d_k, d_k)``, Gram matrices of the heads scaled to norm 1, in float64.
        norm: ``(..., H)``, norms of the heads, in float64; NaN in a layer that is not finite.
        dead: ``(..., H)``, True where a norm is below the rank tolerance times the layer's largest.
    """

    rows: Tensor
    back: Tensor
    gram: Tensor
    norm: Tensor
    dead: Tensor


def whiten_heads(
    weight: Tensor,
    *,
    rank_tol: float,
    method: Method = "whiten",
    metric: Tensor | None = None,
    memory_budget: int = DEFAULT_BUDGET,
    precise: bool = False,
) -> WhitenedHeads:
    """Whiten every head: each as a small matrix times orthonormal rows.

    Args:
        weight: ``(..., H, d_k, d)``.
        rank_tol: singular values below ``rank_tol`` times a head's largest do not count.
        method: as in `orthonormal_bases`.
        metric: ``(..., d, d)``, positive semi-definite: rows are then orthonormal in it; the identity by default.
        memory_budget: bytes of temporary memory beyond the rows.
        precise: multiply in float64 before rounding to float32, where that is fast: weak directions of a head are then
            as exact as strong ones.

    Returns:
        The heads in float32; float64 for a float64 weight or ``"exact"``.
    """
    out = torch.float64 if method == "exact" or weight.dtype == torch.float64 else torch.float32
    gram, peak = gram_matrices(weight, metric=metric, memory_budget=memory_budget)
    norm = gram.diagonal(dim1=-2, dim2=-1).sum(-1).clamp_min(0).sqrt()  # (..., H), in units of the peak
    largest = norm.amax(-1, keepdim=True)
    finite = largest.isfinite()
    dead = ((norm < rank_tol * largest) | (largest == 0)) & finite
    # Powers of two, which round nothing: a scale that rounds the whitener costs the weak directions of a head.
    unit = torch.where(finite, _power_of_two(norm.masked_fill(dead, 1)), torch.nan)
    gram.div_(unit.square()[..., None, None]).masked_fill_(dead[..., None, None], 0)
    scale = (1 / unit).masked_fill(dead, 0) / peak
    rest = (norm / unit).masked_fill(dead, 1)[..., None, None]  # in [1, 2)
    if method == "svd":
        rows, back = _by_svd(weight, scale, out, rank_tol, memory_budget)
    else:
        whitener = torch.empty_like(gram)
        may_look = may_decide_on_host(weight) and out == torch.float32 and method == "whiten" and not precise
        tolerance = SINGLE if may_look else 0.0
        # A dozen matrices of the size of a head's Gram matrix live at once in there.
        for part in head_chunks(gram.shape[-3], gram[..., 0, :, :].numel() * 8 * 12, memory_budget):
            whitener[..., part, :, :] = whitener_of(gram[..., part, :, :], rank_tol, tolerance)
        rows = _rows(whitener, scale, weight, out, memory_budget, precise=precise)
        if method == "exact":
            whitener = _polish(rows, whitener, metric, memory_budget)
        back = gram @ whitener.mT
    norm = torch.where(finite, norm * peak, torch.nan)
    return WhitenedHeads(rows, back.div_(rest), gram.div_(rest.square()), norm, dead)


def whitener_of(gram: Tensor, rank_tol: float, tolerance: float = 0.0) -> Tensor:
    r"""Compute whiteners T of Gram matrices: ``T gram T^T`` is a projector on the directions that count.

    With ``L L^T = gram + s I``, ``L^{-1}`` takes singular values to :math:`q = \sigma / \sqrt{\sigma^2 + s}`. Two steps
    of :math:`q \mapsto 2.5 q^3 - 1.5 q^5` then drive them to 0 or 1: a rank cut without an eigensolver, a mask or a
    shape that depends on the data.

    Args:
        gram: ``(..., k, k)``.
        rank_tol: square roots of eigenvalues below ``rank_tol`` times the size of the matrix do not count.
        tolerance: the two steps are left out if ``sum(1 - q^2)`` is at most this for every matrix, which the host
            reads; at 0, the default, it reads nothing.

    Returns:
        ``(..., k, k)``; NaN where the factorisation fails.
    """
    k = gram.shape[-1]
    eye = torch.eye(k, dtype=gram.dtype, device=gram.device)
    size = torch.linalg.matrix_norm(gram)
    shift = torch.where(size > 0, max(rank_tol, _FINEST_RANK_TOL) ** 2 * size, 1.0)[..., None, None]
    factor, info = torch.linalg.cholesky_ex(gram + shift * eye, check_errors=False)
    T: Tensor = torch.linalg.solve_triangular(factor, eye.expand_as(gram), upper=False)
    if tolerance and bool((shift[..., 0, 0] * T.square().sum((-2, -1)) <= tolerance).all() & (info == 0).all()):
        return T
    W = eye - shift * (T @ T.mT)
    C = 2.5 * W - 1.5 * (W @ W)
    T, W = C @ T, C @ W @ C
    T = (2.5 * W - 1.5 * (W @ W)) @ T
    return torch.where((info == 0)[..., None, None], T, torch.nan)


def flatness_of(gram: Tensor) -> Tensor:
    """Geometric over arithmetic mean of the eigenvalues of Gram matrices; a zero counts as 1e-14.

    Args:
        gram: ``(..., k, k)``.

    Returns:
        ``(...)``.
    """
    k = gram.shape[-1]
    size = torch.linalg.matrix_norm(gram)
    shift = torch.where(size > 0, _FINEST_RANK_TOL**2 * size, 1.0)[..., None, None]
    shifted = gram + shift * torch.eye(k, dtype=gram.dtype, device=gram.device)
    factor, info = torch.linalg.cholesky_ex(shifted, check_errors=False)
    trace = shifted.diagonal(dim1=-2, dim2=-1).sum(-1)
    flatness = (2 * factor.diagonal(dim1=-2, dim2=-1).log().mean(-1)).exp() / (trace / k)
    return torch.where(info == 0, flatness, torch.nan)


def head_chunks(heads: int, bytes_of_head: int, budget: int, *, at_least: int = 1) -> Iterator[slice]:
    """Split the heads into chunks whose temporaries fit into a budget, of at least one head each.

    Args:
        heads: H.
        bytes_of_head: bytes of temporary memory that a head takes.
        budget: bytes of temporary memory.
        at_least: number of chunks even where fewer would fit.

    Yields:
        Slices of the heads, in order.
    """
    step = max(1, min(math.ceil(heads / at_least), budget // max(1, bytes_of_head)))
    for start in range(0, heads, step):
        yield slice(start, min(start + step, heads))


def require_arguments(weight: Tensor, rank_tol: float, method: str = "whiten", memory_budget: int = 1) -> None:
    """Check the arguments of whitening.

    Args:
        weight: ``(..., H, d_k, d)``.
        rank_tol: in (0, 1).
        method: one of `Method`.
        memory_budget: positive.

    Raises:
        MisconfigurationError: if one of the others is out of range; says what to write.
        ShapeError: if `weight` has fewer than three dimensions or an empty one.
    """
    if method not in get_args(Method):
        raise MisconfigurationError(f"`method` must be one of {get_args(Method)}, got {method!r}.")
    require_rank_tol(rank_tol)
    if memory_budget < 1:
        raise MisconfigurationError(f"`memory_budget` is a number of bytes, got {memory_budget}. Write 64 * 2**20.")
    if weight.dim() < 3 or 0 in weight.shape[-3:]:
        raise ShapeError(
            "A head weight has the shape (..., heads, width, in_features), none of them empty; got "
            f"{tuple(weight.shape)}. Write weight.unflatten(0, (num_heads, -1)) for an nn.Linear.weight."
        )


def require_rank_tol(rank_tol: float) -> None:
    """Check a rank tolerance.

    Args:
        rank_tol: in (0, 1).

    Raises:
        MisconfigurationError: if it is not.
    """
    if not 0 < rank_tol < 1:
        raise MisconfigurationError(f"`rank_tol` must lie between 0 and 1, got {rank_tol}. Write rank_tol=1e-6.")


def _widest(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64


def _peak(weight: Tensor) -> Tensor:
    """Scale of each layer, (..., 1), without which squares would leave the range of the widest type."""
    wide = _widest(weight.device)
    if weight.dtype != wide:
        return torch.ones((*weight.shape[:-3], 1), dtype=wide, device=weight.device)  # narrower ones are far from there
    low, high = torch.aminmax(weight.flatten(-3), dim=-1, keepdim=True)
    peak = torch.maximum(-low, high)
    return torch.where((peak > 0) & peak.isfinite(), _power_of_two(peak), 1)


def _power_of_two(size: Tensor) -> Tensor:
    """Largest power of two that is not above a positive number; 1 for what is not finite."""
    _, exponent = torch.frexp(torch.where(size.isfinite(), size, 1))
    return torch.ldexp(torch.ones_like(size), exponent - 1)


def gram_matrices(
    weight: Tensor, *, metric: Tensor | None = None, memory_budget: int = DEFAULT_BUDGET
) -> tuple[Tensor, Tensor]:
    """Multiply every head with itself in float64, in chunks of heads.

    Args:
        weight: ``(..., H, d_k, d)``.
        metric: ``(..., d, d)``, between the two; the identity by default.
        memory_budget: bytes of temporary memory.

    Returns:
        The Gram matrices ``(..., H, d_k, d_k)`` of the weights divided by a power of two, and that ``(..., 1)``: 1
        unless the weights are float64, whose squares may leave the range.
    """
    *batch, H, k, d = weight.shape
    peak = _peak(weight)
    wide = _widest(weight.device)
    sliced = wide == torch.float64 and weight.dtype != wide and metric is None and not has_fast_float64(weight.device)
    gram = torch.empty(*batch, H, k, k, dtype=wide, device=weight.device)
    each = torch.Size(batch).numel() * k * d * (16 if sliced else 8 if metric is None else 16)
    S = None if metric is None else metric.to(wide)[..., None, :, :]

    def of_some(heads: Tensor) -> Tensor:
        if sliced:
            return sliced_gram(heads)
        heads = heads.to(wide)
        if weight.dtype == wide:
            heads = heads / peak[..., None, None]
        return (heads if S is None else heads @ S) @ heads.mT

    for part in head_chunks(H, each, memory_budget):
        gram[..., part, :, :] = of_some(weight[..., part, :, :])
    return gram, peak


def _rows(whitener: Tensor, scale: Tensor, weight: Tensor, out: torch.dtype, budget: int, *, precise: bool) -> Tensor:
    """Multiply each head with its whitener, chunk by chunk."""
    *batch, H, k, d = weight.shape
    rows = torch.empty(*batch, H, k, d, dtype=out, device=weight.device)
    # TF32 rounds the weight itself, which moves the subspace of an ill-conditioned head: on CUDA stay in float64.
    fast = has_fast_float64(weight.device)
    in_float64 = out == torch.float64 or ((precise or weight.is_cuda) and fast)
    multiply_in = _widest(weight.device) if in_float64 else out
    sliced = not in_float64 and not fast
    each = torch.Size(batch).numel() * k * d * (24 if sliced else 16 if in_float64 else 8)
    for part in head_chunks(H, each, budget):
        T, heads = whitener[..., part, :, :] * scale[..., part, None, None], weight[..., part, :, :]
        rows[..., part, :, :] = sliced_product(T, heads) if sliced else T.to(multiply_in) @ heads.to(multiply_in)
    return rows


def _polish(rows: Tensor, whitener: Tensor, metric: Tensor | None, budget: int) -> Tensor:
    """Cut the rank once more by the Gram matrix of the rows, in place; returns the whitener of the result."""
    # A Gram matrix has the square of the head's condition number, and its rounding with it; that of the rows has not.
    *batch, H, k, d = rows.shape
    polished = torch.empty_like(whitener)
    for part in head_chunks(H, torch.Size(batch).numel() * k * d * 16, budget):
        own = rows[..., part, :, :]
        W = (own if metric is None else own @ metric.to(own.dtype)[..., None, :, :]) @ own.mT
        C = 2.5 * W - 1.5 * (W @ W)
        rows[..., part, :, :] = C @ own
        polished[..., part, :, :] = C @ whitener[..., part, :, :]
    return polished


def _by_svd(weight: Tensor, scale: Tensor, out: torch.dtype, rank_tol: float, budget: int) -> tuple[Tensor, Tensor]:
    """Right singular vectors that count, padded with zero rows to the shape of the weight, and the way back."""
    *batch, H, k, d = weight.shape
    rows = torch.zeros(*batch, H, k, d, dtype=out, device=weight.device)
    back = torch.empty(*batch, H, k, k, dtype=scale.dtype, device=weight.device)
    for part in head_chunks(H, torch.Size(batch).numel() * k * d * 32, budget):
        scaled = (weight[..., part, :, :].to(scale.dtype) * scale[..., part, None, None]).to(out)
        finite = scaled.isfinite().all(-1).all(-1)[..., None, None]
        _, sigma, right = torch.linalg.svd(scaled.nan_to_num(), full_matrices=False)
        right = right * (sigma > rank_tol * sigma[..., :1])[..., None]
        rows[..., part, : right.shape[-2], :] = right
        rows[..., part, :, :] = torch.where(finite, rows[..., part, :, :], torch.nan)
        back[..., part, :, :] = scaled @ rows[..., part, :, :].mT
    return rows, back
