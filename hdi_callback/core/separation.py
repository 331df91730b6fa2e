r"""Linear algebra that takes heads apart: a fresh subspace for one, and its part in the output given to another."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hdi_callback.core.subspaces import orthonormal_bases
from hdi_callback.errors import ShapeError


@torch.no_grad()
def fresh_head(weight: Tensor, head: int, *, generator: torch.Generator | None = None) -> Tensor:
    r"""Draw a projection for one head, as far from the subspaces of the others as there is room.

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
    others = orthonormal_bases(remaining, method="exact").rows.flatten(0, 1)
    used, directions = torch.linalg.eigh(others.mT @ others)  # ascending
    free = max(k, int((used < 1e-9).sum()))
    draw = torch.randn(free, min(k, free), generator=generator, dtype=torch.float64).to(weight.device)
    rows = torch.linalg.qr(draw).Q.mT @ directions[:, :free].mT  # (min(k, d), d)
    fresh = torch.zeros(k, d, dtype=torch.float64, device=weight.device)
    norm = torch.linalg.vector_norm(remaining, dim=(-2, -1)).mean()
    fresh[: rows.shape[0]] = rows * (norm / rows.shape[0] ** 0.5)
    return fresh.to(weight.dtype)


@dataclass(frozen=True)
class Folding:
    """What it takes to let one head speak for another.

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
    r"""Give the part of a leaving head in the layer's output to a head that attends as it does.

    Heads with the same attention weights have :math:`o_b = A x W_b^\top + b_b` and :math:`o_a = A x W_a^\top + b_a`.
    With :math:`M = W_b W_a^+` the contribution :math:`o_b W_O^b` becomes :math:`o_a M^\top W_O^b` and a constant, so
    that :math:`W_O^a + M^\top W_O^b` and a shift of the bias leave the layer's function as it was. Ours.

    Args:
        values: ``(d_v, d_in)`` each, value weights of the head that stays and of the one that leaves.
        outputs: ``(d_v, d)`` each, their slices of the output projection.
        biases: ``(d_v,)`` each, their value biases.

    Returns:
        The output weight of the head that stays, the shift of the bias, and what is lost.

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
    rest = (leave - M @ stay).mT @ leaving
    lost = rest.norm() / whole.norm().clamp_min(torch.finfo(torch.float64).tiny)
    shift = torch.zeros(leaving.shape[-1], dtype=torch.float64, device=leaving.device)
    if biases is not None:
        shift = (biases[1].double() - biases[0].double() @ M.mT) @ leaving
    dtype = outputs[0].dtype
    return Folding((output + M.mT @ leaving).to(dtype), shift.to(dtype), lost)
