r"""Effective rank and mean cosine of a layer's input tokens: rank collapse shows here before it shows in the heads."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hdi_callback.errors import ShapeError


@dataclass(frozen=True)
class TokenSpread:
    """Effective rank and mean cosine of tokens.

    Attributes:
        rank: effective rank of the centred tokens, the participation ratio ``(tr C)^2 / ||C||_F^2`` of the eigenvalues
            of their covariance, in [1, min(tokens - 1, d)]; 0 if all tokens are one up to rounding; NaN if it was not
            asked for.
        cosine: mean cosine between two tokens, not centred: 1 if all point the same way.
        tokens: number of tokens that count.
    """

    rank: Tensor
    cosine: Tensor
    tokens: Tensor


@dataclass(frozen=True)
class TokenSums:
    """Sums over the input tokens of a layer. Over ranks that were given one centre, all fields add up."""

    count: Tensor  # ``(...)``, number of tokens
    pointing: Tensor  # ``(...)``, number of tokens other than zero, which have a direction
    directions: Tensor  # ``(..., d)``, sum of the tokens scaled to norm 1, in float64
    size: Tensor  # ``(...)``, sum of their squared norms
    scatter: Tensor  # ``(..., d, d)``, sum of the outer products of the centred tokens; ``(..., 0, 0)`` without rank

    @classmethod
    @torch.no_grad()
    def from_tokens(
        cls, tokens: Tensor, valid: Tensor | None = None, *, centre: Tensor | None = None, with_rank: bool = True
    ) -> TokenSums:
        """Add up some tokens.

        Args:
            tokens: ``(..., n, d)``.
            valid: ``(..., n)``, boolean; False for padding, which may hold anything.
            centre: ``(..., d)``, the mean over the tokens of all ranks; by default that of these tokens.
            with_rank: also the scatter, which the effective rank needs.

        Returns:
            Their sums.
        """
        x = tokens.to(torch.promote_types(tokens.dtype, torch.float32))
        valid = torch.ones(x.shape[:-1], dtype=torch.bool, device=x.device) if valid is None else valid
        x = torch.where(valid[..., None], x, 0)
        wide = torch.float32 if x.device.type == "mps" else torch.float64
        norm = torch.linalg.vector_norm(x, dim=-1)
        count = valid.sum(-1).to(wide)
        units = x / torch.where(norm == 0, 1, norm)[..., None]
        scatter = x.new_empty(*x.shape[:-2], 0, 0)
        if with_rank:
            if centre is None:
                centre = x.sum(-2) / count.clamp_min(1)[..., None].to(x.dtype)
            centred = torch.where(valid[..., None], x - centre.to(x.dtype)[..., None, :], 0)
            scatter = centred.mT @ centred
        # A token of NaN points somewhere: it must show.
        pointing = (norm != 0).sum(-1).to(wide)
        return cls(count, pointing, units.sum(-2, dtype=wide), norm.to(wide).square().sum(-1), scatter)

    @classmethod
    def zeros(cls, width: int, device: torch.device | str | None = None, *, with_rank: bool = True) -> TokenSums:
        """Return the sums of no tokens of one layer."""
        return cls.from_tokens(torch.zeros(0, width, device=device), with_rank=with_rank)


@torch.no_grad()
def token_metrics(sums: TokenSums) -> TokenSpread:
    """Compute the effective rank and the mean cosine of all tokens that were added up.

    Args:
        sums: over the tokens.

    Returns:
        The spread, in float64; NaN with fewer than two tokens.
    """
    cosine = (sums.directions.square().sum(-1) - sums.pointing) / (sums.pointing * (sums.pointing - 1))
    cosine = torch.where(sums.pointing > 1, cosine.clamp(-1, 1), torch.nan)
    rank = torch.full_like(cosine, torch.nan)
    if sums.scatter.shape[-1]:
        variance = sums.scatter.diagonal(dim1=-2, dim2=-1).sum(-1)
        # Scaled, as fourth powers leave the range of float32.
        scale = torch.where(variance > 0, variance, 1)
        energy = torch.linalg.matrix_norm(sums.scatter / scale[..., None, None]).square()
        # Equal tokens leave a residue: rounding.
        is_one = variance <= (8 * torch.finfo(sums.scatter.dtype).eps) ** 2 * sums.size
        rank = torch.where(is_one, 0, (variance / scale).square() / energy).to(cosine.dtype)
        rank = torch.where(sums.count > 1, rank, torch.nan)
    return TokenSpread(rank, cosine, sums.count)


def token_spread(tokens: Tensor, valid: Tensor | None = None) -> TokenSpread:
    r"""Compute the effective rank and the mean cosine of tokens.

    .. math:: \frac{(\operatorname{tr} C)^2}{\lVert C \rVert_F^2}, \qquad
              \frac{\lVert \sum_t u_t \rVert^2 - n}{n (n - 1)}, \quad u_t = x_t / \lVert x_t \rVert

    Args:
        tokens: ``(..., n, d)``.
        valid: ``(..., n)``, boolean; False for padding.

    Returns:
        The spread, in float64; NaN with fewer than two tokens.

    Raises:
        ShapeError: if `tokens` has fewer than two dimensions, or `valid` does not fit.

    Example:
        >>> spread = token_spread(torch.eye(4))  # four orthogonal tokens lie evenly in three dimensions
        >>> round(float(spread.rank), 4), float(spread.cosine)
        (3.0, 0.0)
    """
    if tokens.dim() < 2 or (valid is not None and valid.shape != tokens.shape[:-1]):
        raise ShapeError(
            f"Tokens have the shape (..., tokens, features) and `valid` (..., tokens), got {tuple(tokens.shape)} and "
            f"{None if valid is None else tuple(valid.shape)}."
        )
    return token_metrics(TokenSums.from_tokens(tokens, valid))
