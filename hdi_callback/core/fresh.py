r"""Linear algebra that separates heads: a fresh subspace for one, its contribution folded into another."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hdi_callback.errors import ShapeError


@torch.no_grad()
def fresh_head(weight: Tensor, head: int, *, generator: torch.Generator | None = None) -> Tensor:
    r"""Draw a projection for one head, as far from the subspaces of the others as the width allows.

    Where the others leave ``d_k`` free dimensions, its row space is uniformly random among them, orthogonal to all
    others; else it is spanned by the directions that the others use least (the smallest eigenvectors of the sum of
    their projectors). Its rows are orthogonal, of equal length, and of the mean norm of the other heads. Ours.

    Args:
        weight: ``(H, d_k, d)``, the projections of all heads.
        head: the head that is drawn anew.
        generator: source of the random numbers, on the CPU; torch's own by default.

    Returns:
        ``(d_k, d)``, in the type and on the device of `weight`.

    Raises:
        ShapeError: if `weight` does not have three dimensions and two heads, or there is no such head.

    Example:
        >>> weight = torch.eye(6).reshape(3, 2, 6).index_select(0, torch.tensor([0, 1, 1]))  # head 2 copies head 1
        >>> fresh = fresh_head(weight, 2)
        >>> bool((weight[:2] @ fresh.mT).abs().max() < 1e-6), round(float(fresh.norm() / weight[2].norm()), 4)
        (True, 1.0)
    """
    if weight.dim() != 3 or weight.shape[0] < 2 or not 0 <= head < weight.shape[0]:
        raise ShapeError(
            "A fresh head needs (heads >= 2, width, in_features) and one of the heads, got "
            f"{tuple(weight.shape)} and head {head}."
        )
    _, k, d = weight.shape
    wide = weight.double()
    remaining = torch.cat([wide[:head], wide[head + 1 :]])
    _, sigma, right = torch.linalg.svd(remaining, full_matrices=False)
    bases = (right * (sigma > 1e-6 * sigma[..., :1])[..., None]).flatten(0, 1)  # orthonormal rows of each head
    used, directions = torch.linalg.eigh(bases.mT @ bases)  # ascending
    free = min(d, max(k, int((used < 1e-9).sum())))
    draw = torch.randn(free, min(k, free), generator=generator, dtype=torch.float64).to(weight.device)
    rows = torch.linalg.qr(draw).Q.mT @ directions[:, :free].mT  # (min(k, d), d)
    fresh = torch.zeros(k, d, dtype=torch.float64, device=weight.device)
    norm = torch.linalg.vector_norm(remaining, dim=(-2, -1)).mean()
    fresh[: rows.shape[0]] = rows * (norm / rows.shape[0] ** 0.5)
    return fresh.to(weight.dtype)


@torch.no_grad()
def attention_agreement(
    queries: tuple[Tensor, Tensor],
    keys: tuple[Tensor, Tensor],
    query_biases: tuple[Tensor, Tensor] | None = None,
    *,
    is_normed: bool = False,
) -> Tensor:
    r"""Estimate the cosine of two heads' attention rows from their weights.

    .. math:: \gamma = e^{-s^2 / 2}, \qquad s^2 = \max(1, \sigma^{-2}) \, \lVert B_a - B_b \rVert_F^2 / d_k,
              \qquad B = W_Q^\top W_K, \quad \sigma^2 = \lVert B_b \rVert_F^2 / d_k

    For tokens that are independent with unit variance, as behind a LayerNorm, :math:`s^2` is the variance of the
    difference of the two heads' scores, and for Gaussian scores over many tokens :math:`\gamma` is the cosine of
    their rows of attention. Scores are taken to have a standard deviation of at least one: two heads with nearly
    uniform attention would agree only because neither is selective yet. A query bias adds its part; the bias of the
    keys drops out of the softmax. Ours.

    Args:
        queries: ``(d_k, d)`` each, query weights of the head that stays and of the one that leaves.
        keys: ``(d_k, d)`` each, their key weights.
        query_biases: ``(d_k,)`` each.
        is_normed: a norm follows queries and keys, so that the scale of the weights says nothing.

    Returns:
        A number in [0, 1], in float64; 1 where both attend alike.

    Example:
        >>> query, key = torch.randn(2, 8, 32, generator=torch.Generator().manual_seed(0))
        >>> turn = torch.linalg.qr(torch.ones(8, 8) + torch.eye(8)).Q  # another basis of the same head
        >>> round(float(attention_agreement((query, turn @ query), (key, turn @ key))), 6)
        1.0
    """
    (q_a, q_b), (k_a, k_b) = [weight.double() for weight in queries], [weight.double() for weight in keys]
    d_k = q_a.shape[-2]

    def product(q: Tensor, k: Tensor, r: Tensor, m: Tensor) -> Tensor:  # <Q^T K, R^T M>
        return ((q @ r.mT) * (k @ m.mT)).sum()

    inner, size_a, size_b = product(q_a, k_a, q_b, k_b), product(q_a, k_a, q_a, k_a), product(q_b, k_b, q_b, k_b)
    if is_normed:
        cosine = inner / (size_a * size_b).sqrt()
        return torch.exp(cosine.clamp(-1, 1) - 1)
    apart = size_a + size_b - 2 * inner
    if query_biases is not None:
        shift_a, shift_b = (bias.double() @ key for bias, key in zip(query_biases, (k_a, k_b)))
        apart = apart + (shift_a - shift_b).square().sum()
        size_b = size_b + shift_b.square().sum()
    spread = (size_b / d_k).clamp(max=1)
    # Two heads without any scores attend alike; 0/0 otherwise.
    tiny = torch.finfo(torch.float64).tiny
    return torch.exp(-apart.clamp_min(0) / d_k / spread.clamp_min(tiny) / 2)


def folding_error(lost: Tensor, agreement: Tensor) -> Tensor:
    r"""Estimate the relative error of a head's output once it is folded into another head.

    .. math:: \epsilon^2 = \frac{\lVert A_b X C_b - A_a X C_b' \rVert^2}{\lVert A_b X C_b \rVert^2}
              = 1 + (1 - 2 \gamma)(1 - \ell^2)

    with attention :math:`A`, tokens :math:`X` that are independent with unit variance, :math:`C_b = W_V^\top W_O` of
    the head that leaves, :math:`C_b'` the part of it that the other head's values can express, :math:`\ell` the share
    of :math:`C_b` beyond that (`Folding.lost`), and :math:`\gamma` how alike both attend
    (`attention_agreement`). Heads of the same attention lose :math:`\ell`; heads with the same
    values and unrelated attention lose everything. Ours.

    Args:
        lost: share of the map from input to output that cannot be expressed.
        agreement: cosine of the attention rows.

    Returns:
        Root mean square of the change over that of the head's output, at most 1.

    Example:
        >>> float(folding_error(torch.tensor(0.0), torch.tensor(1.0)))
        0.0
        >>> round(float(folding_error(torch.tensor(0.3), torch.tensor(1.0))), 6)
        0.3
    """
    square = 1 + (1 - 2 * agreement) * (1 - lost.square())
    return square.clamp(0, 1).sqrt()


@dataclass(frozen=True)
class Folding:
    """Output weight and bias with which one head contributes for two.

    Attributes:
        output: ``(d_v, d)``, the output weight of the head that stays.
        bias: ``(d,)``, what is added to the layer's bias.
        lost: share of the leaving head's map from input to output, by norm, that the other cannot express; 0 where its
            values are a linear function of the other's.
    """

    output: Tensor
    bias: Tensor
    lost: Tensor


@torch.no_grad()
def fold_head(
    values: tuple[Tensor, Tensor],
    outputs: tuple[Tensor, Tensor],
    biases: tuple[Tensor, Tensor] | None = None,
) -> Folding:
    r"""Fold the contribution of a leaving head into a head with the same attention.

    Heads with the same attention weights have :math:`o_b = A x W_b^\top + b_b` and :math:`o_a = A x W_a^\top + b_a`.
    With :math:`M = W_b W_a^+` the contribution :math:`o_b W_O^b` becomes :math:`o_a M^\top W_O^b` and a constant, so
    that :math:`W_O^a + M^\top W_O^b` and a shift of the bias leave the layer's function as it was. Ours.

    Args:
        values: ``(d_v, d_in)`` each, value weights of the head that stays and of the one that leaves.
        outputs: ``(d_v, d)`` each, their slices of the output projection.
        biases: ``(d_v,)`` each, their value biases.

    Returns:
        The output weight of the head that stays, the shift of the bias, and the share that is lost.

    Example:
        >>> values, output = torch.randn(2, 8, generator=torch.Generator().manual_seed(0)), torch.ones(2, 8)
        >>> folded = fold_head((values, 3 * values), (output, output))
        >>> bool(torch.allclose(folded.output, 4 * output, atol=1e-5)), bool(folded.lost < 1e-6)
        (True, True)
    """
    stay, leave = (value.double() for value in values)
    output, leaving = (weight.double() for weight in outputs)
    M = leave @ torch.linalg.pinv(stay)
    whole = leave.mT @ leaving  # (d_in, d)
    residue = (leave - M @ stay).mT @ leaving
    lost = residue.norm() / whole.norm().clamp_min(torch.finfo(torch.float64).tiny)
    shift = torch.zeros(leaving.shape[-1], dtype=torch.float64, device=leaving.device)
    if biases is not None:
        shift = (biases[1].double() - biases[0].double() @ M.mT) @ leaving
    dtype = outputs[0].dtype
    return Folding((output + M.mT @ leaving).to(dtype), shift.to(dtype), lost)
