"""Penalties on heads that are alike, to train with; differentiable."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hdi_callback.core.circuits import groups_of, require_circuit
from hdi_callback.errors import ShapeError

_TINY = 1e-30


def diversity_penalty(weight: Tensor, *, eps: float = 1e-6) -> Tensor:
    r"""Compute the mean overlap of the heads, a differentiable penalty.

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


def circuit_penalty(query: Tensor, key: Tensor, key_of: Sequence[int] | None = None) -> Tensor:
    r"""Compute the mean squared cosine of the heads' QK circuits, a differentiable penalty.

    .. math:: \operatorname{mean}_{h \ne g} \frac{\langle B_h, B_g \rangle^2}{\lVert B_h \rVert^2 \lVert B_g \rVert^2}

    Equal circuits are a stationary point: separating clones needs noise. Ours.

    Args:
        query: ``(H, d_k, d)``, at least two heads.
        key: ``(G, d_k, d')``, the distinct key heads.
        key_of: the key head of each query head; by default groups of equal size lie side by side.

    Returns:
        The mean, in [0, 1], in float32 or wider; a head of zeros has cosine 0 with all others.

    Raises:
        ShapeError: if the shapes do not belong together, or there are fewer than two heads.

    Example:
        >>> weight = torch.eye(4).reshape(2, 2, 4).requires_grad_()
        >>> circuit_penalty(weight, weight).item()
        0.0
    """
    require_circuit(query, key, key_of, "query", "key")
    H = query.shape[0]
    if query.dim() != 3 or H < 2:
        raise ShapeError(f"A penalty on pairs needs (heads >= 2, width, features), got {tuple(query.shape)}.")
    wide = torch.promote_types(torch.promote_types(query.dtype, key.dtype), torch.float32)
    group = groups_of(H, key.shape[0], key_of, query.device)
    query, key = query.to(wide), key.to(wide)
    # The cosine does not depend on a head's scale; without division by it, fourth powers of small weights underflow.
    query = query / torch.linalg.vector_norm(query.detach(), dim=(-2, -1), keepdim=True).clamp_min(_TINY)
    key = key / torch.linalg.vector_norm(key.detach(), dim=(-2, -1), keepdim=True).clamp_min(_TINY)
    of_queries = torch.einsum("hid,gjd->hgij", query, query)
    of_keys = torch.einsum("hid,gjd->hgij", key, key)
    if group is not None:
        of_keys = of_keys[group][:, group]
    inner = (of_queries * of_keys).sum((-2, -1))
    size = inner.diagonal()
    squared = inner.square() / (size[:, None] * size[None, :]).clamp_min(_TINY)
    pairs = ~torch.eye(H, dtype=torch.bool, device=query.device)
    return torch.where(pairs, squared, 0).sum() / (H * (H - 1))
