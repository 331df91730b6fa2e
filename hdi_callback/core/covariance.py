r"""The empirical covariance term: head outputs and the output projection -> `HeadCovariance`.

Head h contributes :math:`z_h(t) = o_h(t) W_h` to the layer's output at token t. No ``(tokens, H, d)`` tensor is ever
formed: everything follows from the covariance of the output projection's input, block by block.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hdi_callback.core.products import HeadProducts, gains_by_layout, laid_out, products_of, row_products
from hdi_callback.core.tensors import require_tensors
from hdi_callback.core.whitening import head_chunks
from hdi_callback.errors import ShapeError


@dataclass(frozen=True)
class HeadCovariance:
    """How correlated the contributions of the heads to the layer's output are, over the tokens of a batch.

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
        count, mean, centred, weighted = _centred(outputs, weights)
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
        share = other.count / count.clamp_min(1)
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
        mixing = _mixing(output_weight.to(self.scatter.dtype))
        return (self.scatter * mixing).sum((1, 3)) / self.count

    def covariance(self, output_weight: Tensor) -> HeadCovariance:
        """Compute the covariance term of all tokens so far.

        Args:
            output_weight: ``(H, d_v, d)``.

        Returns:
            The covariance, without standard errors.
        """
        return _summarise(self.count, self.trace(output_weight), self.scatter.square().sum((1, 3)))


@dataclass(frozen=True)
class HeadSums:
    r"""Sums over tokens about the mean of all tokens: what adds up over ranks that hold different tokens.

    Once every rank knows the mean of all tokens, each adds up its own; without a scatter no ``(H d_v)^2`` matrix has to
    travel:

    .. math:: n T_{hg} = \sum_r \sum_{t \in r} \langle z_h(t) - \bar z_h, z_g(t) - \bar z_g \rangle

    Attributes:
        count: number of tokens, a scalar tensor.
        products: ``(H, H)``, the inner sums above.
        scatter: ``(scatter_size(H, d_v),)``, sum over tokens of the outer products of the centred outputs, in chunks of
            heads, each with all heads from its first one on; `None` if the overlap of the outputs before the output
            projection is not wanted.
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
        """Add up the tokens at hand.

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
        centred = _less(outputs.to(wide).flatten(1), mean.to(wide).flatten())
        if weights is None:
            weighted, count = centred, centred.new_full((), outputs.shape[0])
        else:
            centred, weights = _counted(centred, weights)
            weighted, count = weights[:, None] * centred, weights.sum()
        H, width = mean.shape
        if not with_scatter:
            if output_weight is None:
                return cls(count, centred.new_zeros(H, H))
            return cls(count, _block_sums(weighted, centred, output_weight.to(wide))[0])
        features = laid_out(centred.mT)
        counted = features if weighted is centred else laid_out(weighted.mT)
        scatter = torch.cat(
            [
                row_products(counted[part.start * width : part.stop * width], features[part.start * width :]).flatten()
                for part in _upper_chunks(H)
            ]
        )
        sums = cls(count, centred.new_zeros(H, H), scatter)
        return sums if output_weight is None else sums.mixed(output_weight)

    def mixed(self, output_weight: Tensor, products: HeadProducts | None = None) -> HeadSums:
        """Compute `products` from the scatter.

        Args:
            output_weight: ``(H, d_v, d)``.
            products: of the heads' slices of the output projection, as `head_covariance` takes them; used up.

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
        parts = _upper_chunks(H)
        is_known = products is not None and tuple(part for part, _ in products.parts) == parts
        mixings = iter(products.parts) if products is not None and is_known else products_of(flat, H, iter(parts))
        for (part, scatter), (_, mixing) in zip(self._chunks(self.scatter), mixings):
            sums = mixing.to(scatter.dtype).mul_(scatter).sum((1, 3))
            inner[part, part.start :] = sums
            inner[part.start :, part] = sums.mT
        return HeadSums(self.count, inner, self.scatter)

    @staticmethod
    def scatter_size(heads: int, width: int) -> int:
        """Count the numbers of a scatter.

        Args:
            heads: H.
            width: d_v.

        Returns:
            About 5/8 of ``(H d_v)^2``.
        """
        pairs: int = sum((part.stop - part.start) * (heads - part.start) for part in _upper_chunks(heads))
        return pairs * width * width

    def _chunks(self, scatter: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Give the chunks of heads, and the scatter of each with all heads from its first one on."""
        H = self.products.shape[-1]
        width = math.isqrt(scatter.numel() // self.scatter_size(H, 1))
        sizes = [(part.stop - part.start) * (H - part.start) * width**2 for part in _upper_chunks(H)]
        for part, values in zip(_upper_chunks(H), torch.split(scatter, sizes)):
            yield part, values.view(part.stop - part.start, width, H - part.start, width)

    def __add__(self, other: HeadSums) -> HeadSums:
        """Join disjoint sets of tokens."""
        both = None if self.scatter is None or other.scatter is None else self.scatter + other.scatter
        return HeadSums(self.count + other.count, self.products + other.products, both)

    def squares(self) -> Tensor:
        """Add up the squares of each block of the scatter.

        Returns:
            ``(H, H)``, in float64; what the overlap of head outputs is made of.

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
        return _summarise(self.count, self.products / self.count, squares)


@functools.cache
def _upper_chunks(heads: int) -> tuple[slice, ...]:
    """Part the heads so that 3/8 of the products of every two are left out, as the others tell the same."""
    return tuple(head_chunks(heads, 1, heads, at_least=4))


def count_and_total(outputs: Tensor, weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Count tokens and add them up.

    Args:
        outputs: ``(tokens, H, d_v)``.
        weights: ``(tokens,)``, how often each token counts, 0 for padding; once by default.

    Returns:
        How many, and their sum ``(H, d_v)``, in float32 or wider.
    """
    wide = outputs.to(torch.promote_types(outputs.dtype, torch.float32)).flatten(1)
    if weights is None:
        return wide.new_full((), len(wide)), wide.sum(0).view(outputs.shape[1:])
    wide, weights = _counted(wide, weights)
    return weights.sum(), (weights @ wide).view(outputs.shape[1:])


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
        weights: ``(tokens,)``, how often each token counts, 0 for padding, whose outputs may be anything; once by
            default.
        sequences: in place of `lengths`, the number of the sequence of each token, ``(tokens,)``, in any order, and how
            many sequences there are; those without a token that counts are passed over.
        products: of the heads' slices of the output projection, as `ov_circuits_and_products` leaves them; they are
            used up.

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
    count, mean, centred, weighted = _centred(outputs, weights)
    inner, shared = _block_sums(weighted, centred, output_weight.to(centred.dtype), products)
    trace = inner / count
    errors: tuple[Tensor, Tensor] | None = None
    if lengths is not None and sum(lengths) != outputs.shape[0]:
        raise ShapeError(f"`lengths` must add up to the {outputs.shape[0]} tokens, got {sum(lengths)}.")
    lengths = [length for length in lengths or [] if length]  # leaving out nothing is no replicate
    if len(lengths) > 1:
        errors = _jackknife(outputs, output_weight, count, mean, trace, lengths)
    elif sequences is not None and sequences[1] > 1:
        errors = _jackknife_of_numbered(outputs, output_weight, count, mean, trace, *sequences, weights)
    return _summarise(count if weights is None else _tokens(weights), trace, shared, errors)


_TINY = 1e-30
_CHUNK = 2**22  # numbers that are kept at once for standard errors


def _counted(flat: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Bring weights to the type of the outputs; those that do not count may be NaN, and must not spoil the others."""
    weights = weights.to(flat.dtype)
    return torch.where(weights[:, None] == 0, 0, flat), weights


def _centred(outputs: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Count tokens, take their mean ``(H, d_v)`` off, and give them ``(tokens, H d_v)``, once more as they count."""
    wide = outputs.to(torch.promote_types(outputs.dtype, torch.float32)).flatten(1)
    # Centre before multiplying: E[oo'] - mm' in float32 loses 9e-3 with a common mean of 1000.
    if weights is None:
        mean = wide.sum(0) / max(len(wide), 1)
        centred = weighted = _less(wide, mean)
        count = wide.new_full((), len(wide))
    else:
        wide, weights = _counted(wide, weights)
        count = weights.sum()
        mean = weights @ wide / count.clamp_min(_TINY)
        centred = _less(wide, mean)
        weighted = weights[:, None] * centred
    return count, mean.view(outputs.shape[1:]), centred, weighted


def _less(tokens: Tensor, mean: Tensor) -> Tensor:
    """Take the mean off, and leave the features one after the other where their products are formed faster so."""
    if not gains_by_layout(tokens.mT):
        return tokens - mean
    # Laid out first, and then subtracted in place: both at once takes twice as long.
    return tokens.mT.contiguous().sub_(mean[:, None]).mT


def _block_sums(
    weighted: Tensor, centred: Tensor, output_weight: Tensor, known: HeadProducts | None = None
) -> tuple[Tensor, Tensor]:
    """Sum scatter times mixing, and the squared scatter, over the blocks of each pair of heads: ``(H, H)`` twice."""
    # In chunks of heads, the upper triangle alone: that is 5/8 of a product, and no symmetric matrix is held whole.
    H, width, _ = output_weight.shape
    flat = output_weight.flatten(0, 1)
    inner, shared = flat.new_empty(H, H), flat.new_empty(H, H)
    mixings = iter(known.parts) if known is not None and flat.dtype == torch.float32 else None
    if mixings is None:
        mixings = products_of(flat, H, iter(_upper_chunks(H)))
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


def _tokens(weights: Tensor) -> Tensor:
    """How many tokens count; NaN if that is not known."""
    return (weights > 0).sum() + weights.sum() * 0


def _mixing(output_weight: Tensor) -> Tensor:
    """Inner products of the rows of the output weight, (H, d_v, H, d_v)."""
    H, width, _ = output_weight.shape
    flat = output_weight.flatten(0, 1)
    return (flat @ flat.mT).reshape(H, width, H, width)


def _terms(trace: Tensor) -> tuple[Tensor, Tensor]:
    """Mean variance and mean covariance of (..., H, H) traces."""
    H = trace.shape[-1]
    own = trace.diagonal(dim1=-2, dim2=-1).sum(-1)
    pairs = float(H * (H - 1)) or torch.nan
    return own / H, (trace.sum((-2, -1)) - own) / pairs


def _summarise(
    count: Tensor, trace: Tensor, shared: Tensor | None, errors: tuple[Tensor, Tensor] | None = None
) -> HeadCovariance:
    """Reduce the traces; `shared` holds the squared norms of the blocks of the scatter before the projection."""
    H = trace.shape[-1]
    nan = trace.new_full((), torch.nan)
    trace = torch.where(count > 1, trace, nan)
    variance, covariance = _terms(trace)
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


def _jackknife(
    outputs: Tensor, output_weight: Tensor, count: Tensor, mean: Tensor, trace: Tensor, lengths: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Leave out one sequence at a time, through its own sums."""
    weight = output_weight.to(mean.dtype)
    mixing = _mixing(weight)
    centred = outputs.to(mean.dtype) - mean
    values = []
    for part in torch.split(centred, list(lengths)):
        others = count - part.shape[0]
        flat = part.flatten(1)
        own = ((flat.mT @ flat).view_as(mixing) * mixing).sum((1, 3))
        # The mean of the others, up to its sign, as all outputs are centred.
        mean_of_others = torch.einsum("hi,hid->hd", part.sum(0) / others, weight)
        left = (count * trace - own) / others - mean_of_others @ mean_of_others.mT
        values.append(torch.stack(_terms(torch.where(others > 1, left, torch.nan))))
    variance, covariance = torch.stack(values, -1)
    return _spread(covariance), _spread(covariance / variance)


def _jackknife_of_numbered(
    outputs: Tensor,
    output_weight: Tensor,
    count: Tensor,
    mean: Tensor,
    trace: Tensor,
    numbers: Tensor,
    num_sequences: int,
    weights: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Leave out one sequence at a time, where the device alone knows which tokens are whose."""
    W = output_weight.to(mean.dtype)
    H, _, width = W.shape
    weights = torch.ones(outputs.shape[0], dtype=mean.dtype, device=outputs.device) if weights is None else weights
    flat, weights = _counted(outputs.to(mean.dtype).flatten(1), weights)
    centred = torch.where(weights[:, None] == 0, 0, flat - mean.flatten()).view(outputs.shape)
    of_sequence = weights.new_zeros(num_sequences).index_add(0, numbers, weights)
    total = W.new_zeros(num_sequences, H, width)
    products = W.new_zeros(num_sequences, H, H)
    step = max(1, _CHUNK // (H * width))
    for part in range(0, outputs.shape[0], step):
        within = slice(part, part + step)
        z = torch.einsum("thi,hid->thd", centred[within], W)
        scaled = z * weights[within, None, None]
        total.index_add_(0, numbers[within], scaled)
        products.index_add_(0, numbers[within], scaled @ z.mT)
    others = count - of_sequence
    mean_of_others = total / others.clamp_min(_TINY)[:, None, None]
    left = (count * trace - products) / others.clamp_min(_TINY)[:, None, None] - mean_of_others @ mean_of_others.mT
    variance, covariance = _terms(left)
    live = of_sequence > 0
    return _spread_of(covariance, live), _spread_of(covariance / variance, live)


def _spread_of(values: Tensor, live: Tensor) -> Tensor:
    n = live.sum()
    mean = torch.where(live, values, 0).sum() / n
    spread = ((n - 1) / n * torch.where(live, values - mean, 0).square().sum()).sqrt()
    return torch.where(n > 1, spread, torch.nan)


def _spread(values: Tensor) -> Tensor:
    n = values.shape[0]
    return ((n - 1) / n * (values - values.mean()).square().sum()).sqrt()


@dataclass(frozen=True)
class BiasVarianceCovariance:
    """The mean squared error of an ensemble's mean, taken apart.

    Attributes:
        bias: mean squared bias of the ensemble.
        variance: v, mean variance of a member.
        covariance: c, mean covariance of two members.
        mse: mean squared error of the mean member; ``bias + variance / H + (1 - 1/H) covariance``.
    """

    bias: Tensor
    variance: Tensor
    covariance: Tensor
    mse: Tensor


def bias_variance_covariance(predictions: Tensor, target: Tensor) -> BiasVarianceCovariance:
    r"""Take apart the mean squared error of a mean over members (Ueda and Nakano 1996).

    .. math:: \mathrm{MSE} = \mathrm{bias}^2 + v / H + (1 - 1/H)\, c

    exact for moments over the replicates given.

    Args:
        predictions: ``(replicates, H, ...)``, outputs of each member in each replicate of the experiment.
        target: ``(...)``.

    Returns:
        The terms, averaged over the remaining dimensions.

    Raises:
        ShapeError: if the shapes do not belong together.

    Example:
        >>> terms = bias_variance_covariance(torch.tensor([[1.0, 3.0], [3.0, 1.0]]), torch.tensor(2.0))
        >>> float(terms.mse), float(terms.variance), float(terms.covariance)
        (0.0, 1.0, -1.0)
    """
    require_tensors(predictions=predictions, target=target)
    if predictions.dim() < 2 or predictions.shape[2:] != target.shape or not predictions.numel():
        raise ShapeError(
            f"Predictions have the shape (replicates, heads, *target.shape), got {tuple(predictions.shape)} for a "
            f"target of {tuple(target.shape)}."
        )
    R, H = predictions.shape[:2]
    centred = (predictions - predictions.mean(0)).reshape(R, H, -1)
    trace = torch.einsum("rhx,rgx->hg", centred, centred) / (R * max(1, target.numel()))
    variance, covariance = _terms(trace)
    ensemble = predictions.mean(1)
    return BiasVarianceCovariance(
        bias=(ensemble.mean(0) - target).square().mean(),
        variance=variance,
        covariance=covariance,
        mse=(ensemble - target).square().mean(),
    )
