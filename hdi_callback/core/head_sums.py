"""Sums of head outputs that add up over batches and ranks: `HeadMoments` and `HeadSums` -> `HeadCovariance`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from hdi_callback.core.covariance import HeadCovariance, summarise
from hdi_callback.core.output_products import (
    TINY,
    block_sums,
    centred_outputs,
    mixing_of,
    subtract_mean,
    upper_chunks,
    without_padding,
)
from hdi_callback.core.products import HeadProducts, laid_out, products_of, row_products
from hdi_callback.errors import ShapeError


@dataclass(frozen=True)
class HeadMoments:
    """Count, mean and centred second moments of head outputs: a plain record that can be merged in any order.

    Attributes:
        count: number of tokens, a scalar tensor.
        mean: ``(H, d_v)``.
        scatter: ``(H, d_v, H, d_v)``, sum over tokens of the outer products of the centred outputs.
    """

    count: Tensor
    mean: Tensor
    scatter: Tensor

    @classmethod
    def of(cls, outputs: Tensor, weights: Tensor | None = None) -> HeadMoments:
        """Compute the moments of a batch of tokens.

        Args:
            outputs: ``(tokens, H, d_v)``.
            weights: ``(tokens,)``, how often each token counts, 0 for padding; once by default.

        Returns:
            Its moments, in float32 or wider.

        Raises:
            ShapeError: if `outputs` has another number of dimensions.
        """
        if outputs.dim() != 3:
            raise ShapeError(f"Head outputs have the shape (tokens, heads, width), got {tuple(outputs.shape)}.")
        count, mean, centred, weighted = centred_outputs(outputs, weights)
        return cls(count, mean, (weighted.mT @ centred).reshape(*mean.shape, *mean.shape))

    def merge(self, other: HeadMoments) -> HeadMoments:
        """Join the moments of two disjoint sets of tokens (Chan, Golub and LeVeque 1983).

        Args:
            other: moments of the same heads.

        Returns:
            The moments of the union.
        """
        count = self.count + other.count
        shift = other.mean - self.mean
        share = other.count / count.clamp_min(TINY)
        outer = shift[:, :, None, None] * shift[None, None] * (self.count * share)
        return HeadMoments(count, self.mean + shift * share, self.scatter + other.scatter + outer)

    def update(self, outputs: Tensor) -> HeadMoments:
        """Add a batch of tokens.

        Args:
            outputs: ``(tokens, H, d_v)``.

        Returns:
            The moments of all tokens so far.
        """
        return self.merge(HeadMoments.of(outputs))

    def trace(self, output_weight: Tensor) -> Tensor:
        r"""Compute :math:`T_{hg} = \operatorname{tr} \operatorname{Cov}(z_h, z_g)`, block by block.

        Args:
            output_weight: ``(H, d_v, d)``.

        Returns:
            ``(H, H)``; divided by the number of tokens.
        """
        mixing = mixing_of(output_weight.to(self.scatter.dtype))
        return (self.scatter * mixing).sum((1, 3)) / self.count

    def covariance(self, output_weight: Tensor) -> HeadCovariance:
        """Compute the covariance term of all tokens so far.

        Args:
            output_weight: ``(H, d_v, d)``.

        Returns:
            The covariance, without standard errors.
        """
        return summarise(self.count, self.trace(output_weight), self.scatter.square().sum((1, 3)))


@dataclass(frozen=True)
class HeadSums:
    r"""Sums over centred tokens, which add up over ranks that hold different tokens.

    Every rank centres its tokens by the mean of all ranks. Without a scatter no ``(H d_v)^2`` matrix is sent:

    .. math:: n T_{hg} = \sum_r \sum_{t \in r} \langle z_h(t) - \bar z_h, z_g(t) - \bar z_g \rangle

    Attributes:
        count: number of tokens, a scalar tensor.
        products: ``(H, H)``, the inner sums above.
        scatter: ``(scatter_size(H, d_v),)``, sum over tokens of the outer products of the centred outputs, in chunks of
            heads, each with all heads from its first one on; `None` if `output_overlap` is not asked for.
    """

    count: Tensor
    products: Tensor
    scatter: Tensor | None = None

    @classmethod
    def of(
        cls,
        outputs: Tensor,
        output_weight: Tensor | None,
        mean: Tensor,
        *,
        with_scatter: bool = False,
        weights: Tensor | None = None,
    ) -> HeadSums:
        """Add up the tokens of this rank.

        Args:
            outputs: ``(tokens, H, d_v)``; none at all is allowed.
            output_weight: ``(H, d_v, d)``; `None` to leave `products` zero until `mixed` is called with it.
            mean: ``(H, d_v)``, mean over the tokens of all ranks.
            with_scatter: keep the scatter as well.
            weights: ``(tokens,)``, how often each token counts, 0 for padding; once by default.

        Returns:
            Their sums, in float32 or wider.
        """
        wide = torch.promote_types(outputs.dtype, torch.float32)
        centred = subtract_mean(outputs.to(wide).flatten(1), mean.to(wide).flatten())
        if weights is None:
            weighted, count = centred, centred.new_full((), outputs.shape[0])
        else:
            centred, weights = without_padding(centred, weights)
            weighted, count = weights[:, None] * centred, weights.sum()
        H, width = mean.shape
        if not with_scatter:
            if output_weight is None:
                return cls(count, centred.new_zeros(H, H))
            return cls(count, block_sums(weighted, centred, output_weight.to(wide))[0])
        features = laid_out(centred.mT)
        counted = features if weighted is centred else laid_out(weighted.mT)
        scatter = torch.cat(
            [
                row_products(counted[part.start * width : part.stop * width], features[part.start * width :]).flatten()
                for part in upper_chunks(H)
            ]
        )
        sums = cls(count, centred.new_zeros(H, H), scatter)
        return sums if output_weight is None else sums.mixed(output_weight)

    def mixed(self, output_weight: Tensor, products: HeadProducts | None = None) -> HeadSums:
        """Compute `products` from the scatter.

        Args:
            output_weight: ``(H, d_v, d)``.
            products: of the heads' slices of the output projection, as `head_covariance` takes them; overwritten.

        Returns:
            The same sums with them, in the type of the scatter.

        Raises:
            ShapeError: if there is no scatter.
        """
        if self.scatter is None:
            raise ShapeError("Sums without a scatter cannot be mixed by an output weight.")
        H = self.products.shape[-1]
        flat = output_weight.to(self.scatter.dtype).flatten(0, 1)
        inner = flat.new_empty(H, H)
        parts = upper_chunks(H)
        is_known = products is not None and tuple(part for part, _ in products.parts) == parts
        mixings = iter(products.parts) if products is not None and is_known else products_of(flat, H, iter(parts))
        for (part, scatter), (_, mixing) in zip(self._chunks(self.scatter), mixings):
            sums = mixing.to(scatter.dtype).mul_(scatter).sum((1, 3))
            inner[part, part.start :] = sums
            inner[part.start :, part] = sums.mT
        return HeadSums(self.count, inner, self.scatter)

    @staticmethod
    def scatter_size(heads: int, width: int) -> int:
        """Number of entries of a scatter.

        Args:
            heads: H.
            width: d_v.

        Returns:
            About 5/8 of ``(H d_v)^2``.
        """
        pairs: int = sum((part.stop - part.start) * (heads - part.start) for part in upper_chunks(heads))
        return pairs * width * width

    def _chunks(self, scatter: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Chunks of heads, and the scatter of each with all heads from its first one on."""
        H = self.products.shape[-1]
        width = math.isqrt(scatter.numel() // self.scatter_size(H, 1))
        sizes = [(part.stop - part.start) * (H - part.start) * width**2 for part in upper_chunks(H)]
        for part, values in zip(upper_chunks(H), torch.split(scatter, sizes)):
            yield part, values.view(part.stop - part.start, width, H - part.start, width)

    def __add__(self, other: HeadSums) -> HeadSums:
        """Join disjoint sets of tokens."""
        both = None if self.scatter is None or other.scatter is None else self.scatter + other.scatter
        return HeadSums(self.count + other.count, self.products + other.products, both)

    def squares(self) -> Tensor:
        """Add up the squares of each block of the scatter.

        Returns:
            ``(H, H)``, in float64, from which the overlap of head outputs is computed.

        Raises:
            ShapeError: if there is no scatter.
        """
        if self.scatter is None:
            raise ShapeError("Sums without a scatter have no squares of it.")
        found = torch.zeros_like(self.products, dtype=torch.float64)
        for part, scatter in self._chunks(self.scatter):
            # Before squaring, as squares of small outputs leave the range of float32.
            sums = scatter.double().square_().sum((1, 3))
            found[part, part.start :] = sums
            found[part.start :, part] = sums.mT
        return found

    def covariance(self, squares: Tensor | None = None) -> HeadCovariance:
        """Compute the covariance term of all tokens that were added up.

        Args:
            squares: of the scatter, as `squares` gives them; by default they are computed if there is a scatter.

        Returns:
            The covariance, without standard errors; without a scatter and its squares, also without `output_overlap`.
        """
        if squares is None and self.scatter is not None:
            squares = self.squares()
        return summarise(self.count, self.products / self.count, squares)


def count_and_total(outputs: Tensor, weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Number and sum of tokens.

    Args:
        outputs: ``(tokens, H, d_v)``.
        weights: ``(tokens,)``, how often each token counts, 0 for padding; once by default.

    Returns:
        The number, and the sum ``(H, d_v)``, in float32 or wider.
    """
    wide = outputs.to(torch.promote_types(outputs.dtype, torch.float32)).flatten(1)
    if weights is None:
        return wide.new_full((), len(wide)), wide.sum(0).view(outputs.shape[1:])
    wide, weights = without_padding(wide, weights)
    return weights.sum(), (weights @ wide).view(outputs.shape[1:])
