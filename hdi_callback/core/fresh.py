r"""Linear algebra that separates two heads: a fresh subspace for one, its contribution folded into the other."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

_TINY = 1e-300


@torch.no_grad()
def fresh_head(weight: Tensor, head: int) -> Tensor:
    """Return a projection ``(d_k, d)`` for one of the heads ``(H, d_k, d)``, as far from the others as it can be.

    It is spanned by the directions that the others use least, the smallest eigenvectors of the sum of their
    projectors: orthogonal to all others where they leave ``d_k`` free dimensions. Its rows are orthogonal, of equal
    length, and of the mean norm of the other heads. Ours.
    """
    k = weight.shape[1]
    other_heads = torch.cat([weight[:head], weight[head + 1 :]]).double()
    _, sigma, right = torch.linalg.svd(other_heads, full_matrices=False)
    bases = (right * (sigma > 1e-6 * sigma[..., :1])[..., None]).flatten(0, 1)  # orthonormal rows of each head
    rows = torch.linalg.eigh(bases.mT @ bases).eigenvectors[:, :k].mT  # the least used first
    norm = torch.linalg.vector_norm(other_heads, dim=(-2, -1)).mean()
    return F.pad(rows * (norm / len(rows) ** 0.5), (0, 0, 0, k - len(rows))).to(weight.dtype)


@torch.no_grad()
def fold_head(queries: Tensor, keys: Tensor, values: Tensor, outputs: Tensor) -> tuple[Tensor, Tensor]:
    r"""Return the output weight of a head that takes over another's contribution, and the relative error of that.

    Heads with the same attention weights have :math:`o_b = A x W_b^\top` and :math:`o_a = A x W_a^\top`. With
    :math:`M = W_b W_a^+` the output weight :math:`W_O^a + M^\top W_O^b` leaves the layer's function as it was, but for
    the share :math:`\ell` of the map :math:`W_b^\top W_O^b` that is no function of the values that stay. Where the
    scores differ, too, :math:`B = W_Q^\top W_K`, the error is at most :math:`\min(1, \sqrt{s^2 + \ell^2})` with
    :math:`s = \lVert B_a - B_b \rVert_F / \min(\sqrt{d_k}, \lVert B_b \rVert_F)`, as :math:`s^2` is the variance of the
    difference of the scores of independent tokens of unit variance. Small scores count relative to their size. Ours.

    Each argument has the head that stays and the one that leaves, ``(2, width, d)``; a bias is one more column, but of
    keys, whose bias drops out of the softmax. Both results are in float64.
    """
    (q_stays, q_leaves), (k_stays, k_leaves) = queries.double(), keys.double()
    (stays, leaves), (output, leaving) = values.double(), outputs.double()
    M = leaves @ torch.linalg.pinv(stays)
    lost = _norm_of_product(leaves - M @ stays, leaving) / _norm_of_product(leaves, leaving).clamp_min(_TINY)
    limit = _norm_of_product(q_leaves, k_leaves).clamp(_TINY, q_leaves.shape[0] ** 0.5)
    apart = _norm_of_product(torch.cat([q_stays, q_leaves]), torch.cat([k_stays, -k_leaves])) / limit
    return output + M.mT @ leaving, torch.hypot(apart, lost).clamp_max(1)


def _norm_of_product(left: Tensor, right: Tensor) -> Tensor:
    """Return the Frobenius norm of ``left.mT @ right``, which is not formed."""
    return ((left @ left.mT) * (right @ right.mT)).sum().clamp_min(0).sqrt()
