r"""Linear algebra that separates two heads: a fresh subspace for one, its contribution folded into the other."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

_TINY = 1e-300


@torch.no_grad()
def fresh_head(weight: Tensor, head: int) -> Tensor:
    r"""Return a projection for one head, as far from the subspaces of the others as the width allows.

    It is spanned by the directions that the others use least, the smallest eigenvectors of the sum of their
    projectors: orthogonal to all others where they leave ``d_k`` free dimensions. Its rows are orthogonal, of equal
    length, and of the mean norm of the other heads. Ours.

    Args:
        weight: ``(H, d_k, d)``, the projections of all heads, two at least.
        head: the head whose projection is replaced.

    Returns:
        ``(d_k, d)``, in the type and on the device of `weight`.

    Example:
        >>> weight = torch.eye(6).reshape(3, 2, 6).index_select(0, torch.tensor([0, 1, 1]))  # head 2 copies head 1
        >>> fresh = fresh_head(weight, 2)
        >>> bool((weight[:2] @ fresh.mT).abs().max() < 1e-6), round(float(fresh.norm() / weight[2].norm()), 4)
        (True, 1.0)
    """
    k = weight.shape[1]
    other_heads = torch.cat([weight[:head], weight[head + 1 :]]).double()
    _, sigma, right = torch.linalg.svd(other_heads, full_matrices=False)
    bases = (right * (sigma > 1e-6 * sigma[..., :1])[..., None]).flatten(0, 1)  # orthonormal rows of each head
    rows = torch.linalg.eigh(bases.mT @ bases).eigenvectors[:, :k].mT  # the least used first
    norm = torch.linalg.vector_norm(other_heads, dim=(-2, -1)).mean()
    return F.pad(rows * (norm / len(rows) ** 0.5), (0, 0, 0, k - len(rows))).to(weight.dtype)


@torch.no_grad()
def fold_head(
    queries: Tensor, keys: Tensor, values: Tensor, outputs: Tensor, *, is_normed: bool = False
) -> tuple[Tensor, Tensor]:
    r"""Fold the contribution of a leaving head into a head that attends alike; bound what it changes.

    Heads with the same attention weights have :math:`o_b = A x W_b^\top` and :math:`o_a = A x W_a^\top`. With
    :math:`M = W_b W_a^+` the output weight :math:`W_O^a + M^\top W_O^b` leaves the layer's function as it was, but for
    the share :math:`\ell` of the map :math:`W_b^\top W_O^b` that is no function of the values that stay. Where the
    scores differ, too, :math:`B = W_Q^\top W_K`, the error of the head's output relative to it is at most

    .. math:: \epsilon = \min(1, \sqrt{s^2 + \ell^2}), \qquad
              s = \frac{\lVert B_a - B_b \rVert_F}{\min(\sqrt{d_k}, \lVert B_b \rVert_F)}

    for independent tokens of unit variance: :math:`s^2` is then the variance of the difference of the scores, rows of
    attention have a cosine of :math:`\gamma = e^{-s^2/2}`, and the error is
    :math:`\sqrt{1 + (1 - 2 \gamma)(1 - \ell^2)}`. Small scores count relative to their size. Ours.

    Args:
        queries: ``(2, d_k, d)``, of the head that stays and of the one that leaves; a bias is one more column.
        keys: ``(2, d_k, d)``, without biases, which drop out of the softmax.
        values: ``(2, d_v, d)``; a bias is one more column.
        outputs: ``(2, d_v, d)``, their slices of the output projection.
        is_normed: a norm follows queries and keys, so that the scale of the weights says nothing.

    Returns:
        The output weight of the head that stays, and the error, 1 where everything is lost; both in float64.

    Example:
        >>> query, key, value, output = torch.randn(4, 2, 8, generator=torch.Generator().manual_seed(0))
        >>> pairs = [torch.stack(pair) for pair in ((query, query), (key, key), (value, 3 * value), (output, output))]
        >>> folded, error = fold_head(*pairs)
        >>> bool(torch.allclose(folded, 4 * output.double(), atol=1e-5)), bool(error < 1e-6)
        (True, True)
    """
    (q_stays, q_leaves), (k_stays, k_leaves) = queries.double(), keys.double()
    (stays, leaves), (output, leaving) = values.double(), outputs.double()
    M = leaves @ torch.linalg.pinv(stays)
    lost = _norm_of_product(leaves - M @ stays, leaving) / _norm_of_product(leaves, leaving).clamp_min(_TINY)
    limit = _norm_of_product(q_leaves, k_leaves).clamp_min(_TINY)
    if is_normed:
        q_stays = q_stays * (limit / _norm_of_product(q_stays, k_stays).clamp_min(_TINY))
    else:
        limit = limit.clamp_max(q_leaves.shape[0] ** 0.5)
    apart = _norm_of_product(torch.cat([q_stays, q_leaves]), torch.cat([k_stays, -k_leaves])) / limit
    return output + M.mT @ leaving, torch.hypot(apart, lost).clamp_max(1)


def _norm_of_product(left: Tensor, right: Tensor) -> Tensor:
    """Return the Frobenius norm of ``left.mT @ right``, which is not formed."""
    return ((left @ left.mT) * (right @ right.mT)).sum().clamp_min(0).sqrt()
