r"""The empirical covariance term: head outputs and the output projection -> `HeadCovariance`.

Head h contributes :math:`z_h(t) = o_h(t) W_h` to the layer's output at token t. No ``(tokens, H, d)`` tensor is ever
formed: everything follows from `OutputMoments`, the second moments of the output projection's input, block by block.
Moments add up over ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from hdi_callback.core.pairs import head_chunks, symmetric
from hdi_callback.errors import ShapeError


@dataclass(frozen=True)
class HeadCovariance:
    """Covariance and correlation of the heads' contributions to the layer's output, over tokens.

    All fields have the batch dimensions of the outputs in front.

    Attributes:
        trace: ``(H, H)``, trace of the covariance of two heads' contributions; units of output squared.
        variance: v, mean variance of a head, the mean of the diagonal.
        covariance: c, mean covariance of two heads, the mean off the diagonal: the empirical covariance term.
        correlation: rho = c / v, in [-1/(H-1), 1].
        variance_factor: Var(mean head) / v = 1/H + (1-1/H) rho, the variance reduction that the ensemble achieves.
        effective_heads: 1 / variance factor, capped at H (negative correlation would exceed it).
        output_overlap: ``(H, H)``, energy overlap of the head outputs before the output projection.
        tokens: number of tokens.
    """

    trace: Tensor
    variance: Tensor
    covariance: Tensor
    correlation: Tensor
    variance_factor: Tensor
    effective_heads: Tensor
    output_overlap: Tensor
    tokens: Tensor


@dataclass(frozen=True)
class OutputMoments:
    """Count, mean and centred second moments of head outputs.

    Over ranks that were given one centre, `count` and `scatter` add up field by field.

    Attributes:
        count: ``(...)``, number of tokens.
        centre: ``(..., H, d_v)``, their mean; over ranks that of all tokens.
        scatter: ``(..., P)``, sum over tokens of the outer products of the centred outputs, in chunks of heads, each
            with all heads from its first one on: about 5/8 of ``(H d_v)^2`` numbers.
    """

    count: Tensor
    centre: Tensor
    scatter: Tensor

    @classmethod
    @torch.no_grad()
    def from_tokens(
        cls, outputs: Tensor, valid: Tensor | None = None, *, centre: Tensor | None = None
    ) -> OutputMoments:
        """Compute the moments of some tokens.

        Args:
            outputs: ``(..., tokens, H, d_v)``.
            valid: ``(..., tokens)``, boolean; False for padding, which may hold anything.
            centre: ``(..., H, d_v)``, the mean over the tokens of all ranks; by default that of these tokens.

        Returns:
            Their moments, in float32 or wider.
        """
        *batch, _, H, k = outputs.shape
        wide = outputs.to(torch.promote_types(outputs.dtype, torch.float32)).flatten(-2)
        count, total = count_and_total(outputs, valid)
        centre = total / count.clamp_min(1)[..., None, None] if centre is None else centre.to(wide.dtype)
        # Centred before multiplying: E[oo'] - mm' in float32 loses 9e-3 with a common mean of 1000.
        centred = wide - centre.flatten(-2)[..., None, :]
        if valid is not None:
            centred = torch.where(valid[..., None], centred, 0)
        moments = cls(count, centre, wide.new_empty(*batch, scatter_size(H, k)))
        for part, chunk in moments.chunks():
            first = part.start * k
            chunk.copy_((centred[..., first : part.stop * k].mT @ centred[..., first:]).view_as(chunk))
        return moments

    @classmethod
    def zeros(cls, heads: int, width: int, device: torch.device | str | None = None) -> OutputMoments:
        """Return the moments of no tokens of one layer."""
        scatter = torch.zeros(scatter_size(heads, width), device=device)
        return cls(torch.zeros((), device=device), torch.zeros(heads, width, device=device), scatter)

    def chunks(self) -> Iterator[tuple[slice, Tensor]]:
        """Chunks of heads, each with a view of its scatter, ``(..., heads, d_v, heads from its first one on, d_v)``."""
        H, k = self.centre.shape[-2:]
        start = 0
        for part in _chunks(H, k):
            shape = (part.stop - part.start, k, H - part.start, k)
            size = math.prod(shape)
            yield part, self.scatter[..., start : start + size].unflatten(-1, shape)
            start += size


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
    return covariance_from(covariance_sums(OutputMoments.from_tokens(outputs, valid), output_weight))


@dataclass(frozen=True)
class CovarianceSums:
    """Reduced second moments of head outputs, small enough for the host; layers in front.

    Attributes:
        count: ``(...)``, number of tokens.
        scale: ``(...)``, by which second moments were divided, as squares of small ones leave the range of float32.
        trace: ``(..., H, H)``, traces of the scaled second moments of contributions.
        shared: ``(..., H, H)``, squared norms of the scaled second moments before the output projection.
    """

    count: Tensor
    scale: Tensor
    trace: Tensor
    shared: Tensor


@torch.no_grad()
def covariance_sums(moments: OutputMoments, output_weight: Tensor) -> CovarianceSums:
    """Reduce moments, and output weights ``(..., H, d_v, d)``, to what `covariance_from` takes."""
    *_, H, k, _ = output_weight.shape
    weight = output_weight.to(moments.scatter.dtype)
    flat = weight.flatten(-3, -2)  # (..., H d_v, d)
    scale = moments.scatter.abs().amax(-1)
    scale = torch.where(scale > 0, scale, 1)
    trace, shared = [], []
    for part, chunk in moments.chunks():
        first = part.start * k
        mixing = (flat[..., first : part.stop * k, :] @ flat[..., first:, :].mT).view_as(chunk)
        chunk = chunk / scale[..., None, None, None, None]
        trace.append((part, mixing.mul_(chunk).sum((-3, -1))))
        shared.append((part, chunk.square_().sum((-3, -1))))
    return CovarianceSums(moments.count, scale, symmetric(H, trace), symmetric(H, shared))


@torch.no_grad()
def covariance_from(sums: CovarianceSums) -> HeadCovariance:
    """Divide the sums: the covariance, as `head_covariance` gives it."""
    H = sums.trace.shape[-1]
    count = sums.count[..., None, None]
    trace = torch.where(count > 1, sums.trace * sums.scale[..., None, None] / count, torch.nan)
    own, total = trace.diagonal(dim1=-2, dim2=-1), trace.sum((-2, -1))
    variance = own.sum(-1) / H
    covariance = (total - own.sum(-1)) / (float(H * (H - 1)) or torch.nan)
    factor = total / H**2 / variance
    size = sums.shared.diagonal(dim1=-2, dim2=-1).sqrt()
    return HeadCovariance(
        trace=trace,
        variance=variance,
        covariance=covariance,
        correlation=covariance / variance,
        variance_factor=factor,
        # Heads that cancel leave rounding of either sign: cap before inverting.
        effective_heads=1 / factor.clamp_min(1 / H),
        output_overlap=sums.shared / (size[..., :, None] * size[..., None, :]),
        tokens=sums.count,
    )


@torch.no_grad()
def count_and_total(outputs: Tensor, valid: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Count and add up tokens: over ranks, the sums of both give the mean for `OutputMoments.from_tokens`.

    Args:
        outputs: ``(..., tokens, H, d_v)``.
        valid: ``(..., tokens)``, boolean; False for padding.

    Returns:
        The number ``(...)`` and the sum ``(..., H, d_v)``, in float32 or wider.
    """
    wide = outputs.to(torch.promote_types(outputs.dtype, torch.float32))
    if valid is None:
        return wide.new_full(outputs.shape[:-3], outputs.shape[-3]), wide.sum(-3)
    return valid.sum(-1).to(wide.dtype), torch.where(valid[..., None, None], wide, 0).sum(-3)


@torch.no_grad()
def outputs_not_finite(outputs: Tensor, valid: Tensor | None = None) -> Tensor:
    """Return which heads have NaN or infinite outputs.

    Args:
        outputs: ``(..., tokens, H, d_v)``.
        valid: ``(..., tokens)``, boolean; False for padding.

    Returns:
        ``(..., H)``, boolean.
    """
    if valid is not None:
        outputs = torch.where(valid[..., None, None], outputs, 0)
    return (outputs * 0).sum((-3, -1)).isnan()  # 0 * x is NaN for NaN and infinity


def scatter_size(heads: int, width: int) -> int:
    """Return the number of entries of a scatter of one layer."""
    blocks: int = sum((part.stop - part.start) * (heads - part.start) for part in _chunks(heads, width))
    return width**2 * blocks


def _chunks(heads: int, width: int) -> Iterator[slice]:
    """Four chunks of heads, whose products with all heads from their first one on leave out 3/8; one of small heads."""
    return head_chunks(heads, 0, at_least=4 if heads * width >= 256 else 1)
