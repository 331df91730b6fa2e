r"""The empirical covariance term: head outputs and the output projection -> `HeadCovariance`.

Head h contributes :math:`z_h(t) = o_h(t) W_h` to the layer's output at token t. No ``(tokens, H, d)`` tensor is ever
formed: everything follows from the covariance of the output projection's input, block by block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hdi_callback.core.jackknife import jackknife, jackknife_of_numbered
from hdi_callback.core.output_products import block_sums, centred_outputs, mean_terms
from hdi_callback.core.products import HeadProducts
from hdi_callback.core.tensors import require_tensors
from hdi_callback.errors import ShapeError


@dataclass(frozen=True)
class HeadCovariance:
    """Covariance and correlation of the heads' contributions to the layer's output, over the tokens of a batch.

    Attributes:
        trace: ``(H, H)``, trace of the covariance of two heads' contributions; units of output squared.
        variance: v, mean variance of a head, the mean of the diagonal.
        covariance: c, mean covariance of two heads, the mean off the diagonal: the empirical covariance term.
        correlation: rho = c / v, in [-1/(H-1), 1].
        variance_factor: Var(mean head) / v = 1/H + (1-1/H) rho, the variance reduction that the ensemble achieves.
        effective_heads: 1 / variance factor, capped at H (negative correlation would exceed it).
        output_overlap: ``(H, H)``, energy overlap of the head outputs before the output projection.
        tokens: number of tokens.
        covariance_error: delete-one-sequence jackknife standard error of `covariance`; NaN without sequences.
        correlation_error: the same of `correlation`.
    """

    trace: Tensor
    variance: Tensor
    covariance: Tensor
    correlation: Tensor
    variance_factor: Tensor
    effective_heads: Tensor
    output_overlap: Tensor
    tokens: Tensor
    covariance_error: Tensor
    correlation_error: Tensor


@torch.no_grad()
def head_covariance(
    outputs: Tensor,
    output_weight: Tensor,
    *,
    lengths: Sequence[int] | None = None,
    weights: Tensor | None = None,
    sequences: tuple[Tensor, int] | None = None,
    products: HeadProducts | None = None,
) -> HeadCovariance:
    r"""Compute the empirical covariance term of a layer's heads.

    .. math:: T = \operatorname{blocksum}(S \circ (W_O^\top W_O)), \quad v = \operatorname{tr} T / H, \quad
              c = (\textstyle\sum T - \operatorname{tr} T) / (H (H-1)), \quad \rho = c / v

    The decomposition is that of Ueda and Nakano 1996. rho is measured after the output projection, which can hide equal
    heads; `output_overlap`, measured before it, does not.

    Args:
        outputs: ``(tokens, H, d_v)``, input of the output projection by head.
        output_weight: ``(H, d_v, d)``, the output projection's slice of each head.
        lengths: tokens of each sequence, in their order, adding up to all tokens. Two or more give standard errors by
            leaving out one sequence at a time (tokens of one sequence are correlated: an i.i.d. formula is too small).
        weights: ``(tokens,)``, how often each token counts, 0 for padding, whose outputs are not read; once by default.
        sequences: in place of `lengths`, the number of the sequence of each token, ``(tokens,)``, in any order, and how
            many sequences there are; those with padding only are skipped.
        products: of the heads' slices of the output projection, as `ov_circuits_and_products` returns them; they are
            overwritten.

    Returns:
        The covariance, in float32 or wider. Fewer than two tokens: NaN.

    Raises:
        ShapeError: if the two shapes do not belong together.

    Example:
        >>> outputs = torch.randn(100, 1, 4, generator=torch.Generator().manual_seed(0)).expand(100, 3, 4)
        >>> twins = head_covariance(outputs, torch.eye(4).expand(3, 4, 4))
        >>> round(float(twins.correlation), 5)
        1.0
    """
    require_tensors(outputs=outputs, output_weight=output_weight)
    agree = outputs.dim() == output_weight.dim() == 3 and outputs.shape[1:] == output_weight.shape[:2]
    if not agree or 0 in output_weight.shape:
        raise ShapeError(
            "Head outputs (tokens, heads, width) and an output weight (heads, width, out_features) must agree, got "
            f"{tuple(outputs.shape)} and {tuple(output_weight.shape)}."
        )
    count, mean, centred, weighted = centred_outputs(outputs, weights)
    inner, shared = block_sums(weighted, centred, output_weight.to(centred.dtype), products)
    trace = inner / count
    errors: tuple[Tensor, Tensor] | None = None
    if lengths is not None and sum(lengths) != outputs.shape[0]:
        raise ShapeError(f"`lengths` must add up to the {outputs.shape[0]} tokens, got {sum(lengths)}.")
    lengths = [length for length in lengths or [] if length]  # leaving out nothing is no replicate
    if len(lengths) > 1:
        errors = jackknife(outputs, output_weight, count, mean, trace, lengths)
    elif sequences is not None and sequences[1] > 1:
        errors = jackknife_of_numbered(outputs, output_weight, count, mean, trace, *sequences, weights)
    return summarise(count if weights is None else _tokens(weights), trace, shared, errors)


def _tokens(weights: Tensor) -> Tensor:
    """Number of tokens with a weight above 0; NaN if a weight is."""
    return (weights > 0).sum() + weights.sum() * 0


def summarise(
    count: Tensor, trace: Tensor, shared: Tensor | None, errors: tuple[Tensor, Tensor] | None = None
) -> HeadCovariance:
    """Reduce the traces; `shared` holds the squared norms of the blocks of the scatter before the projection."""
    H = trace.shape[-1]
    nan = trace.new_full((), torch.nan)
    trace = torch.where(count > 1, trace, nan)
    variance, covariance = mean_terms(trace)
    correlation = covariance / variance
    factor = trace.sum() / H**2 / variance
    shared = nan.expand(H, H) if shared is None else shared
    own = shared.diagonal()
    overlap = shared / (own[:, None] * own[None, :]).sqrt()
    covariance_error, correlation_error = errors or (nan, nan)
    return HeadCovariance(
        trace=trace,
        variance=variance,
        covariance=covariance,
        correlation=correlation,
        variance_factor=factor,
        # Heads that cancel leave rounding of either sign: cap before inverting.
        effective_heads=1 / factor.clamp_min(1 / H),
        output_overlap=overlap,
        tokens=count,
        covariance_error=covariance_error,
        correlation_error=correlation_error,
    )
