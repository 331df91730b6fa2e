r"""Both lenses of well-conditioned heads, from one product of the unwhitened weights.

With :math:`P_{hg} = K_h K_g^\top` and whiteners :math:`T_h P_{hh} T_h^\top = I`, the subspaces are compared by
:math:`\lVert T_h P_{hg} T_g^\top \rVert` and the unwhitened heads by :math:`\lVert P_{hg} \rVert`. Whitening a product
amplifies its rounding by :math:`\lVert T_h \rVert \lVert T_g \rVert`, which the host reads first: heads beyond the
limit are whitened before they are multiplied, see `whitening`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hdi_callback.core.products import products_of
from hdi_callback.core.whitening import SINGLE, head_chunks

_SPREAD = 4.0
"""Largest product of the mean of a head's squared singular values and the mean of their inverses: float32 then gives
overlaps to 1e-7, and to 5e-7 where they are near 1."""


@dataclass(frozen=True)
class BothLenses:
    """Squared norms of the blocks of products of the heads of one layer.

    Attributes:
        shared: ``(H, H)``, of heads taken to orthonormal rows.
        energy: ``(H, H)``, of heads scaled to norm 1.
        norm: ``(H,)``, norms of the heads, in float64.
        flatness: ``(H,)``, geometric over arithmetic mean of the squared singular values, in float64.
    """

    shared: Tensor
    energy: Tensor
    norm: Tensor
    flatness: Tensor


def lenses_of_products(
    weight: Tensor, *, rank_tol: float, memory_budget: int, kept: list[tuple[slice, Tensor]] | None = None
) -> BothLenses | None:
    """Compute the block norms of both lenses of one layer from one product in float32.

    Args:
        weight: ``(H, k, d)``, on a CPU, not of float64: the host inspects the values.
        rank_tol: singular values below ``rank_tol`` times a head's largest are not to count.
        memory_budget: bytes of temporary memory beyond a copy in float32 of a weight in another type.
        kept: receives the blocks of the product, as `HeadProducts` holds them.

    Returns:
        The norms; `None` where a head is dead, rank-deficient, or too ill-conditioned for float32.
    """
    H, k, _ = weight.shape
    weight = weight.float()
    gram = (weight @ weight.mT).double()
    trace = gram.diagonal(dim1=-2, dim2=-1).sum(-1)
    # Fourth powers of norms must not leave the range of float32 either.
    low, high = trace.aminmax()
    if not (float(low) > 1e-12 and float(high) < 1e15 and float(low) > rank_tol**2 * float(high)):
        return None
    factor, info = torch.linalg.cholesky_ex(gram / trace[:, None, None], check_errors=False)
    if bool(info.any()):
        return None
    eye = torch.eye(k, dtype=gram.dtype, device=gram.device)
    whitener = torch.linalg.solve_triangular(factor, eye.expand_as(gram), upper=False)
    amplified = float(whitener.square().sum((-2, -1)).max())
    if not (amplified <= _SPREAD * k * k and rank_tol**2 * amplified <= SINGLE):
        return None
    norm = trace.sqrt()
    T = (whitener / norm[:, None, None]).float()
    flat, parts = weight.flatten(0, 1), head_chunks(H, 16 * k * H * k, memory_budget, at_least=4)
    shared, energy = weight.new_empty(2, H, H)
    for part, product in products_of(flat, H, parts):
        heads, others = part.stop - part.start, H - part.start
        _write(energy, part, product.square().sum((1, 3)))
        taken = T[part] @ product.view(heads, k, others * k)
        # (others, heads * k, k), strided: batched products read it as it lies.
        both = taken.view(heads * k, others, k).transpose(0, 1) @ T[part.start :].mT
        _write(shared, part, both.square_().view(others, heads, k * k).sum(-1).mT)
        if kept is not None:
            kept.append((part, product))
    energy /= (trace[:, None] * trace).float()
    flatness = (2 * factor.diagonal(dim1=-2, dim2=-1).log().mean(-1)).exp() * k
    return BothLenses(shared, energy, norm, flatness)


def _write(matrix: Tensor, part: slice, blocks: Tensor) -> None:
    """Write the rows of some heads from the diagonal on, and their mirror image."""
    matrix[part, part.start :] = blocks
    matrix[part.start :, part] = blocks.mT
