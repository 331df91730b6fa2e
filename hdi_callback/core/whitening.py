r"""Whitening: each head as a small matrix times orthonormal rows.

With :math:`K_h` the weight of a head scaled to norm 1, :math:`G_h = K_h K_h^\top` and a whitener :math:`T_h`, the rows
:math:`Q_h = T_h K_h` span what the head reads, and :math:`K_h = M_h Q_h` with :math:`M_h = G_h T_h^\top`. From one
product :math:`B = Q Q^\top` follow the subspaces, :math:`\lVert B_{hg} \rVert`, and the energy,
:math:`\lVert M_h B_{hg} M_g^\top \rVert`. Whitening after one product of the weights would amplify its rounding by the
square of the condition number; this order amplifies nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from hdi_callback.core.pairs import TEMPORARY, head_chunks

_FINEST_RANK_TOL = 1e-7  # its square must stay above the rounding of a Gram matrix in float64

_SPREAD = 4.0
"""Largest product of the mean of a head's squared singular values and the mean of their inverses at which a Gram
matrix in float32 gives overlaps to 1e-7."""


class WhitenedHeads(NamedTuple):
    """The heads of some layers, each as a small matrix times orthonormal rows."""

    rows: Tensor  # ``(..., H, d_k, d)``; ``rows.mT @ rows`` projects on the head's row space; zeros for a dead head
    # ``(..., H, d_k, d_k)``; ``mixing @ rows`` is the head, scaled to norm 1; in float64 where conditioning asks for it
    mixing: Tensor
    norm: Tensor  # ``(..., H)``, norms of the heads, in float64; NaN in a layer that is not finite
    dead: Tensor  # ``(..., H)``, True where a norm is below the rank tolerance times the layer's largest
    flatness: Tensor  # ``(..., H)``, geometric over arithmetic mean of the squared singular values


def whiten_heads(weight: Tensor, rank_tol: float) -> WhitenedHeads:
    """Return whitened heads: in float32 where a CPU shows that all are well-conditioned, else in float64.

    A device is not asked, as the host would wait for it. Singular values below ``rank_tol`` times a head's largest do
    not count.
    """
    out = torch.promote_types(weight.dtype, torch.float32)
    if weight.is_cpu and out == torch.float32:
        whitened = _well_conditioned(weight.float(), rank_tol)
        if whitened is not None:
            return whitened
    wide = torch.float32 if weight.device.type == "mps" else torch.float64
    *batch, H, k, d = weight.shape
    gram = torch.empty(*batch, H, k, k, dtype=wide, device=weight.device)
    rows = torch.empty(*batch, H, k, d, dtype=out, device=weight.device)
    chunks = list(head_chunks(H, torch.Size(batch).numel() * k * d * 16))
    for part in chunks:
        heads = weight[..., part, :, :].to(wide)
        gram[..., part, :, :] = heads @ heads.mT
    norm = gram.diagonal(dim1=-2, dim2=-1).sum(-1).sqrt()
    norm, dead = dead_heads(norm, rank_tol)
    scale = (1 / norm).masked_fill(dead, 0)[..., None, None]
    gram = gram * scale.square()
    T = whitener_of(gram, rank_tol)
    # Also this product in float64: TF32 would round the weight itself, which moves the subspace of a weak direction.
    for part in chunks:
        rows[..., part, :, :] = (T * scale)[..., part, :, :] @ weight[..., part, :, :].to(wide)
    mixing = gram @ T.mT
    flatness = k * torch.exp(2 / k * torch.linalg.slogdet(mixing)[1])
    return WhitenedHeads(rows, mixing, norm, dead, flatness)


def whiten_layers(layers: Tensor, rank_tol: float = 1e-6) -> WhitenedHeads:
    """Whiten the heads of stacked layers ``(L, H, d_k, d)``, some layers at a time."""
    return WhitenedHeads(*by_layers(lambda weight: whiten_heads(weight, rank_tol), layers))


def by_layers(function: Callable[..., tuple[Tensor, ...]], *stacks: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors that a function makes of some layers of the stacks at a time, joined.

    On a CPU large layers gain nothing from being together, and one fits into the cache; elsewhere a call costs its
    launches.
    """
    numbers = max(1, stacks[0][:1].numel())
    at_once = 1 if stacks[0].is_cpu and numbers >= 2**17 else max(1, TEMPORARY // (4 * numbers))
    if at_once >= len(stacks[0]):
        return function(*stacks)
    parts = [function(*some) for some in zip(*(stack.split(at_once) for stack in stacks))]
    return tuple(torch.cat(tensors) for tensors in zip(*parts))


def _well_conditioned(weight: Tensor, rank_tol: float) -> WhitenedHeads | None:
    """Whiten heads by Gram matrices in float32; `None` where one is dead, deficient or too ill-conditioned for it."""
    gram = (weight @ weight.mT).double()
    squares = gram.diagonal(dim1=-2, dim2=-1).sum(-1)
    factor, info = torch.linalg.cholesky_ex(gram / squares[..., None, None], check_errors=False)
    eye = torch.eye(gram.shape[-1], dtype=gram.dtype)
    T = torch.linalg.solve_triangular(factor, eye.expand_as(gram), upper=False)
    low, high = map(float, squares.aminmax())
    amplified = float(T.square().sum((-2, -1)).amax())
    # Fourth powers of norms must not leave the range of float32 either. A NaN fails each comparison.
    in_range = low > 1e-12 and high < 1e15 and low > rank_tol**2 * high
    is_clear = amplified <= _SPREAD * gram.shape[-1] ** 2 and rank_tol**2 * amplified <= 1e-7
    if not (in_range and is_clear and not bool(info.any())):
        return None
    norm = squares.sqrt()
    rows = (T / norm[..., None, None]).float() @ weight
    flatness = gram.shape[-1] * factor.diagonal(dim1=-2, dim2=-1).log().mean(-1).mul(2).exp()
    return WhitenedHeads(rows, factor.float(), norm, torch.zeros_like(norm, dtype=torch.bool), flatness)


def whitener_of(gram: Tensor, rank_tol: float) -> Tensor:
    r"""Return whiteners T of Gram matrices ``(..., k, k)``: ``T gram T^T`` projects on the directions that count.

    Square roots of eigenvalues below ``rank_tol`` times the matrix's size do not count; NaN where the factorisation
    fails. With ``L L^T = gram + s I``, ``L^{-1}`` takes singular values to :math:`q = \sigma / \sqrt{\sigma^2 + s}`.
    Two steps of :math:`q \mapsto 2.5 q^3 - 1.5 q^5` then drive them to 0 or 1: a rank cut without an eigensolver, a
    mask or a shape that depends on the data. Ours.
    """
    eye = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
    size = torch.linalg.matrix_norm(gram)
    shift = torch.where(size > 0, max(rank_tol, _FINEST_RANK_TOL) ** 2 * size, 1.0)[..., None, None]
    factor, info = torch.linalg.cholesky_ex(gram + shift * eye, check_errors=False)
    T: Tensor = torch.linalg.solve_triangular(factor, eye.expand_as(gram), upper=False)
    W = eye - shift * (T @ T.mT)
    C = 2.5 * W - 1.5 * (W @ W)
    T, W = C @ T, C @ W @ C
    T = (2.5 * W - 1.5 * (W @ W)) @ T
    return torch.where((info == 0)[..., None, None], T, torch.nan)


def dead_heads(norm: Tensor, rank_tol: float) -> tuple[Tensor, Tensor]:
    """Return the norms ``(..., H)``, all NaN in a layer that is not finite, and which heads are all but zero."""
    largest = norm.amax(-1, keepdim=True)
    norm = torch.where(largest.isfinite(), norm, torch.nan)
    return norm, (norm < rank_tol * largest) | (norm == 0)
