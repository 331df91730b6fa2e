r"""`HeadContribution`: c_h = sqrt(E \|o_h W_h\|^2 / E \|sum_g o_g W_g\|^2), the share of a head in the output."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hdi_callback.core.contribution import ContributionSums
from hdi_callback.core.tensors import may_decide_on_host


@dataclass(frozen=True)
class HeadContribution:
    """Size of each head's contribution to the output of its layer.

    Attributes:
        relative: ``(H,)``, RMS over tokens of the norm of what a head adds, over that of what all heads add together.
        not_finite: ``(H,)``, 1 where an output of the head is NaN or infinite, 0 elsewhere.
        tokens: number of tokens.
    """

    relative: Tensor
    not_finite: Tensor
    tokens: Tensor

    @classmethod
    def of(cls, sums: ContributionSums, bad: Tensor) -> HeadContribution:
        """The contributions from sums of squares.

        Args:
            sums: over the tokens.
            bad: ``(H,)``, True where an output of the head is not finite.

        Returns:
            The contribution of each head.
        """
        return cls(sums.relative, bad.to(sums.count.dtype), sums.count)


def contribution_sums(
    outputs: Tensor, output_weight: Tensor, weights: Tensor | None, trace: Tensor | None = None
) -> ContributionSums:
    """Weighted sums over tokens of the heads' contributions.

    Args:
        outputs: ``(tokens, H, d_v)``.
        output_weight: ``(H, d_v, d)``.
        weights: ``(tokens,)``, how often each token counts, 0 for padding; once if `None`.
        trace: ``(H, H)``, trace of the covariance of two heads' contributions, if it is known: then tokens need not be
            projected.

    Returns:
        Their sums.
    """
    if trace is not None:
        return _contributions_of(trace, outputs, output_weight, weights)
    if weights is None:
        return ContributionSums.of(outputs, output_weight)
    wide = outputs.to(torch.promote_types(outputs.dtype, torch.float32))
    # Squares are added up, so that tokens are scaled by the root of their weight; NaN in padding stays out.
    counted = torch.where(weights[:, None, None] == 0, 0, wide * weights.sqrt()[:, None, None])
    sums = ContributionSums.of(counted, output_weight)
    return ContributionSums(weights.sum().to(sums.count.dtype), sums.heads, sums.output)


def _contributions_of(
    trace: Tensor, outputs: Tensor, output_weight: Tensor, weights: Tensor | None
) -> ContributionSums:
    """Second moments of contributions: their covariance, and the squares of their means."""
    wide = outputs.to(trace.dtype)
    if weights is None:
        count, mean = trace.new_full((), len(wide)), wide.mean(0)
    else:
        weights = weights.to(trace.dtype)
        count = weights.sum()
        counted = torch.where(weights[:, None, None] == 0, 0, wide)
        mean = torch.tensordot(weights, counted, 1) / count
    means = (mean[:, None, :] @ output_weight.to(trace.dtype))[:, 0]  # (H, d)
    heads = count * (trace.diagonal() + means.square().sum(-1))
    output = count * (trace.sum() + means.sum(0).square().sum())
    return ContributionSums(count, heads.clamp_min(0), output.clamp_min(0))


def not_finite(outputs: Tensor, weights: Tensor | None, sums: ContributionSums | None = None) -> Tensor:
    """Return which heads have NaN or infinite outputs.

    Args:
        outputs: ``(tokens, H, d_v)``.
        weights: ``(tokens,)``, 0 for padding, which does not count; `None` if there is none.
        sums: sums over the outputs: where the host may read them, and they are finite, so are the outputs.

    Returns:
        ``(H,)``, boolean.
    """
    if sums is not None and may_decide_on_host(outputs) and bool(sums.heads.isfinite().all()):
        return torch.zeros(outputs.shape[1], dtype=torch.bool, device=outputs.device)
    if weights is not None:
        outputs = torch.where((weights != 0)[:, None, None], outputs, 0)
    return (outputs * 0).sum((0, 2)).isnan()  # 0 * x is NaN for NaN and infinity
