"""Mean cosine of a layer's input tokens: rank collapse shows here before it shows in the heads."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class TokenSums(NamedTuple):
    """Sums over the input tokens of a layer, which add up over ranks."""

    pointing: Tensor  # ``(...)``, number of tokens other than zero, which have a direction
    directions: Tensor  # ``(..., d)``, sum of the tokens scaled to norm 1, in float64


@torch.no_grad()
def token_sums(tokens: Tensor, valid: Tensor | None = None) -> TokenSums:
    """Add up tokens.

    Args:
        tokens: ``(..., n, d)``.
        valid: ``(..., n)``, boolean; False for padding, which may hold anything.

    Returns:
        What `mean_cosine` takes.
    """
    x = tokens.to(torch.promote_types(tokens.dtype, torch.float32))
    x = x if valid is None else torch.where(valid[..., None], x, 0)
    wide = torch.float32 if x.device.type == "mps" else torch.float64
    norm = torch.linalg.vector_norm(x, dim=-1)
    is_pointing = norm != 0  # also a token of NaN: it must show
    units = x / torch.where(is_pointing, norm, 1)[..., None]
    return TokenSums(is_pointing.sum(-1, dtype=wide), units.sum(-2, dtype=wide))


@torch.no_grad()
def mean_cosine(sums: TokenSums) -> Tensor:
    r"""Return the mean cosine of two tokens, 1 if all point the same way; NaN of fewer than two.

    .. math:: \frac{\lVert \sum_t u_t \rVert^2 - n}{n (n - 1)}, \quad u_t = x_t / \lVert x_t \rVert

    Example:
        >>> float(mean_cosine(token_sums(torch.eye(4))))  # four orthogonal tokens
        0.0
    """
    n, directions = sums
    cosine = (directions.square().sum(-1) - n) / (n * (n - 1))
    return torch.where(n > 1, cosine.clamp(-1, 1), torch.nan)
