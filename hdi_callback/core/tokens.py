r"""Effective rank and mean cosine of a layer's input tokens: rank collapse shows here before it shows in the heads."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hdi_callback.core.products import laid_out, row_products
from hdi_callback.core.tensors import require_tensors
from hdi_callback.errors import ShapeError

_CHUNK_ELEMENTS = 2**22  # of a product of two chunks of tokens, about 16 MB in float32


@dataclass(frozen=True)
class TokenSpread:
    """Effective rank and mean cosine of tokens. All fields have the batch dimensions of the tokens in front.

    Attributes:
        rank: effective rank of the centred tokens, the participation ratio ``(tr C)^2 / ||C||_F^2`` of the eigenvalues
            of their covariance, in [1, min(tokens - 1, d)]; 0 if all tokens are one up to rounding.
        cosine: mean cosine between two tokens, not centred: 1 if all point the same way.
        tokens: number of tokens that count.
    """

    rank: Tensor
    cosine: Tensor
    tokens: Tensor


@torch.no_grad()
def token_spread(tokens: Tensor, valid: Tensor | None = None) -> TokenSpread:
    r"""Compute the effective rank and the mean cosine of tokens.

    .. math:: \frac{(\operatorname{tr} C)^2}{\lVert C \rVert_F^2}, \qquad
              \frac{\lVert \sum_t u_t \rVert^2 - n}{n (n - 1)}, \quad u_t = x_t / \lVert x_t \rVert

    The Gram matrix of the tokens has the eigenvalues of their covariance, so that with fewer tokens than features no
    ``d x d`` matrix is formed.

    Args:
        tokens: ``(..., n, d)``.
        valid: ``(..., n)``, boolean; False for padding.

    Returns:
        The spread, in float32 or wider; NaN with fewer than two tokens.

    Raises:
        ShapeError: if `tokens` has fewer than two dimensions, or `valid` does not fit.

    Example:
        >>> spread = token_spread(torch.eye(4))  # four orthogonal tokens lie evenly in three dimensions
        >>> round(float(spread.rank), 4), float(spread.cosine)
        (3.0, 0.0)
    """
    require_tensors(tokens=tokens)
    if tokens.dim() < 2 or (valid is not None and valid.shape != tokens.shape[:-1]):
        raise ShapeError(
            f"Tokens have the shape (..., tokens, features) and `valid` (..., tokens), got {tuple(tokens.shape)} and "
            f"{None if valid is None else tuple(valid.shape)}."
        )
    wide = tokens.to(torch.promote_types(tokens.dtype, torch.float32))
    counts = torch.ones(tokens.shape[:-1], dtype=torch.bool, device=tokens.device) if valid is None else valid
    wide = torch.where(counts[..., None], wide, 0)
    n = counts.sum(-1).to(wide.dtype)
    mean = wide.sum(-2, keepdim=True) / n.clamp_min(1)[..., None, None]
    centred = torch.where(counts[..., None], wide - mean, 0)
    # Scaled to norm 1, so that fourth powers stay in the range of float32.
    size = torch.linalg.vector_norm(centred, dim=(-2, -1), keepdim=True)
    whole = torch.linalg.vector_norm(wide, dim=(-2, -1), keepdim=True)
    one = size <= 8 * torch.finfo(wide.dtype).eps * whole
    centred = centred / torch.where(one, 1, size)
    rank = 1 / gram_energy(centred if tokens.shape[-2] < tokens.shape[-1] else centred.mT)
    rank = torch.where(one[..., 0, 0], 0, rank)

    norm = torch.linalg.vector_norm(wide, dim=-1)
    directed = counts & (norm != 0)  # a token of zeros points nowhere
    pointing = directed.sum(-1).to(wide.dtype)
    total = torch.where(directed[..., None], wide / norm[..., None], 0).sum(-2)
    cosine = (total.square().sum(-1) - pointing) / (pointing * (pointing - 1))
    known = n > 1
    return TokenSpread(
        torch.where(known, rank, torch.nan), torch.where(pointing > 1, cosine.clamp(-1, 1), torch.nan), n
    )


def gram_energy(rows: Tensor) -> Tensor:
    """Compute the squared Frobenius norm of ``rows @ rows.mT`` in chunks of rows.

    Args:
        rows: ``(..., n, d)``, of norm 1 or so: fourth powers are added up.

    Returns:
        ``(...)``, in the type of the rows.
    """
    rows = laid_out(rows)
    *batch, n, _ = rows.shape
    # Four chunks leave out 3/8 of the product.
    step = max(1, min(-(-n // 4), _CHUNK_ELEMENTS // max(1, torch.Size(batch).numel() * n)))
    energy = rows.new_zeros(batch)
    for start in range(0, n, step):
        # Pairs with later rows count twice, above and below the diagonal.
        block = row_products(rows[..., start : start + step, :], rows[..., start:, :])
        energy += 2 * block.square().sum((-2, -1)) - block[..., : block.shape[-2]].square().sum((-2, -1))
    return energy


_BLOCK = 128  # tokens of which every one is paired with every one of the next block
_FULL = 512  # up to so many tokens, or features, all pairs are computed


def energy_of_tokens(rows: Tensor, weights: Tensor) -> Tensor:
    r"""Estimate the squared Frobenius norm of ``rows.mT @ rows``, in a time that grows with the tokens alone.

    .. math:: \Bigl\lVert \sum_t w_t x_t x_t^\top \Bigr\rVert^2
              = \sum_t w_t^2 \lVert x_t \rVert^4 + \sum_{t \ne s} w_t w_s \langle x_t, x_s \rangle^2

    Up to 512 tokens, or features, it is exact. Beyond, each token is paired with 256 others that a fixed order of the
    tokens puts beside it, and their mean is taken for all pairs. No token is left out, so that a single outlier has its
    full effect. Ours.

    Args:
        rows: ``(n, d)``, tokens times the roots of their weights, of norm 1 or so: fourth powers are added up.
        weights: ``(n,)``, at least 0.

    Returns:
        A scalar, in the type of the rows.
    """
    n, d = rows.shape
    if min(n, d) <= _FULL:
        return gram_energy(rows if n < d else rows.mT)
    place = torch.arange(n, device=rows.device)
    # A permutation that is the same on every device and draws nothing: neighbours in a text must not be paired.
    order = ((place * place * 7919 + place * 40503) % 65521).argsort(stable=True)
    blocks, counts = (torch.split(one[order], _BLOCK) for one in (rows, weights.to(rows.dtype)))
    seen, pairs = rows.new_zeros(()), rows.new_zeros(())
    for one, other in zip(range(len(blocks)), [*range(1, len(blocks)), 0]):
        seen += row_products(blocks[one], blocks[other]).square().sum()
        pairs += counts[one].sum() * counts[other].sum()
    total = weights.sum()
    own: Tensor = torch.linalg.vector_norm(rows, dim=-1).pow(4).sum()
    of_pairs = (total.square() - weights.square().sum()).to(rows.dtype)
    return own + seen * of_pairs / pairs.clamp_min(torch.finfo(rows.dtype).tiny)
