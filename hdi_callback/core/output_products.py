"""Products of centred head outputs, in blocks of two heads: what the covariance term and its sums are made of."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from hdi_callback.core.products import HeadProducts, gains_by_layout, laid_out, products_of, row_products
from hdi_callback.core.whitening import head_chunks

TINY = 1e-30


@functools.cache
def upper_chunks(heads: int) -> tuple[slice, ...]:
    """Chunks of heads; with a chunk's heads against all from its first on, symmetry saves 3/8 of the products."""
    return tuple(head_chunks(heads, 1, heads, at_least=4))


def without_padding(flat: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs with zeros in tokens of weight 0, which may hold NaN, and the weights in the type of the outputs."""
    weights = weights.to(flat.dtype)
    return torch.where(weights[:, None] == 0, 0, flat), weights


def centred_outputs(outputs: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Token count, mean ``(H, d_v)``, centred tokens ``(tokens, H d_v)``, and these times their weights."""
    wide = outputs.to(torch.promote_types(outputs.dtype, torch.float32)).flatten(1)
    # Centre before multiplying: E[oo'] - mm' in float32 loses 9e-3 with a common mean of 1000.
    if weights is None:
        mean = wide.sum(0) / max(len(wide), 1)
        centred = weighted = subtract_mean(wide, mean)
        count = wide.new_full((), len(wide))
    else:
        wide, weights = without_padding(wide, weights)
        count = weights.sum()
        mean = weights @ wide / count.clamp_min(TINY)
        centred = subtract_mean(wide, mean)
        weighted = weights[:, None] * centred
    return count, mean.view(outputs.shape[1:]), centred, weighted


def subtract_mean(tokens: Tensor, mean: Tensor) -> Tensor:
    """Tokens less their mean, with contiguous features where their products are faster then."""
    if not gains_by_layout(tokens.mT):
        return tokens - mean
    # Copied first, then subtracted in place: one expression takes twice as long.
    return tokens.mT.contiguous().sub_(mean[:, None]).mT


def block_sums(
    weighted: Tensor, centred: Tensor, output_weight: Tensor, known: HeadProducts | None = None
) -> tuple[Tensor, Tensor]:
    """Block sums over each pair of heads, ``(H, H)``: of scatter times mixing, and of the squared scatter."""
    # In chunks of heads, upper triangle only: 5/8 of a product, and no symmetric matrix is ever held whole.
    H, width, _ = output_weight.shape
    flat = output_weight.flatten(0, 1)
    inner, shared = flat.new_empty(H, H), flat.new_empty(H, H)
    mixings = iter(known.parts) if known is not None and flat.dtype == torch.float32 else None
    if mixings is None:
        mixings = products_of(flat, H, iter(upper_chunks(H)))
    features = laid_out(centred.mT)
    counted = features if weighted is centred else laid_out(weighted.mT)
    for heads, mixing in mixings:
        start = heads.start
        own = slice(start * width, heads.stop * width)
        scatter = row_products(counted[own], features[start * width :]).view_as(mixing)
        for matrix, blocks in ((inner, mixing.mul_(scatter)), (shared, scatter.square_())):
            sums = blocks.sum((1, 3))
            matrix[heads, start:] = sums
            matrix[start:, heads] = sums.mT
    return inner, shared


def mixing_of(output_weight: Tensor) -> Tensor:
    """Inner products of the rows of the output weight, (H, d_v, H, d_v)."""
    H, width, _ = output_weight.shape
    flat = output_weight.flatten(0, 1)
    return (flat @ flat.mT).reshape(H, width, H, width)


def mean_terms(trace: Tensor) -> tuple[Tensor, Tensor]:
    """Mean variance and mean covariance of (..., H, H) traces."""
    H = trace.shape[-1]
    own = trace.diagonal(dim1=-2, dim2=-1).sum(-1)
    pairs = float(H * (H - 1)) or torch.nan
    return own / H, (trace.sum((-2, -1)) - own) / pairs
