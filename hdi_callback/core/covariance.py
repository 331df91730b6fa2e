r"""The empirical covariance term: head outputs and the output projection -> `HeadCovariance`.

Head h contributes :math:`z_h(t) = o_h(t) W_h` to the layer's output at token t. No ``(tokens, H, d)`` tensor is ever
formed: `head_covariance` takes the second moments of the output projection's input, block by block; a reading, which
reports the covariance term alone, takes sums that are numbers (`ContributionSums`) and add up over ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from hdi_callback.errors import ShapeError


@dataclass(frozen=True)
class HeadCovariance:
    """Covariance and correlation of the heads' contributions to the layer's output, over tokens.

    All fields have the batch dimensions of the outputs in front.
    """

    trace: Tensor  #: ``(H, H)``, trace of the covariance of two heads' contributions; units of output squared
    variance: Tensor  #: v, mean variance of a head, the mean of the diagonal
    covariance: Tensor  #: c, mean covariance of two heads, the mean off the diagonal; the empirical covariance term
    correlation: Tensor  #: rho = c / v, in [-1/(H-1), 1]
    #: Var(mean head) / v = 1/H + (1-1/H) rho, the variance reduction that the ensemble achieves
    variance_factor: Tensor
    effective_heads: Tensor  #: 1 / variance factor, capped at H (negative correlation would exceed it)
    output_overlap: Tensor  #: ``(H, H)``, energy overlap of the head outputs before the output projection
    tokens: Tensor  #: number of tokens


@torch.no_grad()
def head_covariance(outputs: Tensor, output_weight: Tensor, valid: Tensor | None = None) -> HeadCovariance:
    r"""Compute the empirical covariance term of a layer's heads.

    .. math:: T = \operatorname{blocksum}(S \circ (W_O^\top W_O)), \quad v = \operatorname{tr} T / H, \quad
              c = (\textstyle\sum T - \operatorname{tr} T) / (H (H-1)), \quad \rho = c / v

    The decomposition is that of Ueda and Nakano 1996. rho is measured after the output projection, which can hide equal
    heads; `output_overlap`, measured before it, does not.

    Args:
        outputs: ``(..., tokens, H, d_v)``, input of the output projection by head.
        output_weight: ``(..., H, d_v, d)``, the output projection's slice of each head.
        valid: ``(..., tokens)``, boolean; False for padding, which is not read.

    Returns:
        The covariance, in float32 or wider. Fewer than two tokens: NaN.

    Raises:
        ShapeError: if the shapes do not belong together.

    Example:
        >>> outputs = torch.randn(100, 1, 4, generator=torch.Generator().manual_seed(0)).expand(100, 3, 4)
        >>> twins = head_covariance(outputs, torch.eye(4).expand(3, 4, 4))
        >>> round(float(twins.correlation), 5)
        1.0
    """
    if outputs.dim() < 3 or outputs.shape[-2:] != output_weight.shape[-3:-1] or 0 in output_weight.shape:
        raise ShapeError(
            "Head outputs (..., tokens, heads, width) and an output weight (..., heads, width, out_features) must "
            f"agree, got {tuple(outputs.shape)} and {tuple(output_weight.shape)}."
        )
    if valid is not None and valid.shape != outputs.shape[:-2]:
        raise ShapeError(f"`valid` has the shape {tuple(outputs.shape[:-2])}, got {tuple(valid.shape)}.")
    H = outputs.shape[-2]
    count, _, centred, scale = _centred(outputs, valid)
    flat, weight = centred.flatten(-2), output_weight.to(centred.dtype).flatten(-3, -2)

    def blocks(matrix: Tensor) -> Tensor:  # (..., H d_v, H d_v) -> sums of its blocks (..., H, H)
        sums: Tensor = matrix.unflatten(-1, (H, -1)).unflatten(-3, (H, -1)).sum((-3, -1))
        return sums

    scatter = flat.mT @ flat
    products, shared = blocks(scatter * (weight @ weight.mT)), blocks(scatter.square())
    trace = torch.where(count > 1, scale.square() / count, torch.nan)[..., None, None] * products
    variance, covariance = _mean_terms(trace.sum((-2, -1)), trace.diagonal(dim1=-2, dim2=-1).sum(-1), H)
    factor = trace.sum((-2, -1)) / H**2 / variance
    size = shared.diagonal(dim1=-2, dim2=-1).sqrt()
    return HeadCovariance(
        trace=trace,
        variance=variance,
        covariance=covariance,
        correlation=covariance / variance,
        variance_factor=factor,
        # Heads that cancel leave rounding of either sign: cap before inverting.
        effective_heads=1 / factor.clamp_min(1 / H),
        output_overlap=shared / (size[..., :, None] * size[..., None, :]),
        tokens=count,
    )


class ContributionSums(NamedTuple):
    """Sums over tokens of the heads' contributions to a layer's output, which add up over ranks."""

    tokens: Tensor  # ``(...)``, number of tokens
    total: Tensor  # ``(..., H, d)``, sum of the contributions of each head; zeros ``(..., 1, 1)`` if `about_mean`
    own: Tensor  # ``(...)``, sum of the squared norms of the contributions of single heads, in float64
    whole: Tensor  # ``(...)``, sum of the squared norms of what all heads contribute together


@torch.no_grad()
def contribution_sums(
    outputs: Tensor, output_weight: Tensor, valid: Tensor | None = None, *, about_mean: bool = True
) -> ContributionSums:
    """Return sums of the contributions of heads, of arguments as `head_covariance` takes them, for `covariance_term`.

    They are formed about the mean of these tokens, as squares about zero would lose the digits of small deviations. So
    are the squares if `about_mean`; else they are about zero, in float64, and add up with those of other ranks.
    """
    count, mean, centred, scale = _centred(outputs, valid)
    weight = output_weight.to(centred.dtype)
    wide = torch.float32 if weight.device.type == "mps" else torch.float64
    whole = (centred.flatten(-2) @ weight.flatten(-3, -2)).square().sum((-2, -1), dtype=wide)
    heads = centred.transpose(-3, -2)  # (..., H, tokens, d_v)
    own = ((heads.mT @ heads) * (weight @ weight.mT)).sum((-3, -2, -1), dtype=wide)
    count, size = count.to(wide), scale.to(wide).square()
    if about_mean:
        return ContributionSums(count, count.new_zeros(*count.shape, 1, 1), own * size, whole * size)
    shift = (mean.to(wide)[..., None, :] @ weight.to(wide))[..., 0, :]  # (..., H, d)
    return ContributionSums(
        count,
        count[..., None, None] * shift,
        own * size + count * shift.square().sum((-2, -1)),
        whole * size + count * shift.sum(-2).square().sum(-1),
    )


@torch.no_grad()
def covariance_term(sums: ContributionSums, heads: int) -> Tensor:
    """Return the mean covariance of two heads' contributions, as `HeadCovariance.covariance`."""
    count, total, own, whole = sums
    own = own / count - (total / count[..., None, None]).square().sum((-2, -1))
    whole = whole / count - (total.sum(-2) / count[..., None]).square().sum(-1)
    return torch.where(count > 1, _mean_terms(whole, own, heads)[1], torch.nan)


def _mean_terms(total: Tensor, own: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """Return the mean variance and the mean covariance of heads from the sum of all entries and of the diagonal."""
    return own / heads, (total - own) / (float(heads * (heads - 1)) or torch.nan)


def _centred(outputs: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the number of tokens, their mean ``(..., H, d_v)``, and them about it, over a scale that is returned too.

    Squares of small numbers would leave the range of float32.
    """
    x = outputs.to(torch.promote_types(outputs.dtype, torch.float32))
    if valid is None:
        count = x.new_full(x.shape[:-3], x.shape[-3])
    else:
        count, x = valid.sum(-1, dtype=x.dtype), torch.where(valid[..., None, None], x, 0)
    mean = x.sum(-3) / count.clamp_min(1)[..., None, None]
    # Centred before multiplying: E[oo'] - mm' in float32 loses 9e-3 with a common mean of 1000.
    centred = x - mean[..., None, :, :]
    if valid is not None:
        centred = torch.where(valid[..., None, None], centred, 0)
    scale = centred.new_zeros(count.shape) if x.shape[-3] == 0 else centred.abs().amax((-3, -2, -1))
    scale = torch.where(scale > 0, scale, 1)
    return count, mean, centred / scale[..., None, None, None], scale


@torch.no_grad()
def outputs_not_finite(outputs: Tensor, valid: Tensor | None = None) -> Tensor:
    """Return which heads ``(..., H)`` have NaN or infinite outputs ``(..., tokens, H, d_v)``, but for padding."""
    if valid is not None:
        outputs = torch.where(valid[..., None, None], outputs, 0)
    return (outputs * 0).sum((-3, -1)).isnan()  # 0 * x is NaN for NaN and infinity
