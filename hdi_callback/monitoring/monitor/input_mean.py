"""Sums over the input tokens of a layer -> effective rank and mean cosine, see `TokenSpread`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hdi_callback.core.tokens import TokenSpread, energy_of_tokens


@dataclass(frozen=True)
class InputMean:
    """Weighted sums over the input tokens of a layer.

    Attributes:
        count: sum of the weights.
        total: ``(d,)``, sum of the tokens.
        size: sum of the squared norms of the tokens.
        directions: ``(d,)``, sum of the tokens scaled to norm 1.
        pointing: sum of the weights of tokens other than zero, which have a direction.
        pointing_squares: sum of the squares of these weights.
    """

    count: Tensor
    total: Tensor
    size: Tensor
    directions: Tensor
    pointing: Tensor
    pointing_squares: Tensor

    @classmethod
    def of(cls, tokens: Tensor, weights: Tensor) -> InputMean:
        """Add up tokens.

        Args:
            tokens: ``(n, d)``, float64.
            weights: ``(n,)``.

        Returns:
            Their sums.
        """
        norm = torch.linalg.vector_norm(tokens, dim=-1)
        directed = weights * (norm != 0)
        return cls(
            weights.sum(),
            weights @ tokens,
            weights @ norm.square(),
            (directed / torch.where(norm == 0, 1, norm)) @ tokens,
            directed.sum(),
            directed.square().sum(),
        )

    @classmethod
    def none(cls, width: int, device: torch.device) -> InputMean:
        """Sums over no tokens.

        Args:
            width: d.
            device: where.

        Returns:
            Zeros.
        """
        zero, zeros = torch.zeros((), device=device), torch.zeros(width, device=device)
        return cls(zero, zeros, zero, zeros, zero, zero)

    def tensors(self) -> list[Tensor]:
        """The tensors that add up over ranks, in a fixed order."""
        return [self.count, self.total, self.size, self.directions, self.pointing, self.pointing_squares]


@dataclass(frozen=True)
class InputSums:
    """Sums over the input tokens of a layer that give their effective rank and mean cosine.

    Attributes:
        mean: sums over the tokens before centring.
        variance: sum of the squared norms of the centred tokens.
        energy: squared Frobenius norm of the sum of their outer products.
    """

    mean: InputMean
    variance: Tensor
    energy: Tensor

    @classmethod
    def of_rows(cls, mean: InputMean, rows: Tensor, weights: Tensor) -> InputSums:
        """Sums of centred tokens; inner products are taken in float32.

        Args:
            mean: sums over the tokens.
            rows: ``(n, d)``, float64, centred, times the roots of the weights; overwritten.
            weights: ``(n,)``.

        Returns:
            The sums.
        """
        size = torch.linalg.vector_norm(rows)
        small = rows.div_(torch.where(size > 0, size, 1)).float()
        return cls(mean, size.square(), energy_of_tokens(small, weights).double() * size**4)

    @classmethod
    def in_single(cls, tokens: Tensor, weights: Tensor) -> InputSums | None:
        """Sums of tokens in float32: the mean is subtracted twice, and long sums are made of short ones.

        Args:
            tokens: ``(n, d)``, float32, on a CPU: the host reads their norms.
            weights: ``(n,)``, float64, at least 0.

        Returns:
            The sums; `None` where norms leave the range of float32, or are not finite.
        """
        norm = torch.linalg.vector_norm(tokens, dim=-1)
        if not len(norm) or not 1e-10 < float(norm.max()) < 1e15:
            return None
        directed = weights * (norm != 0)
        # Each sum over tokens is made of parts, which add up in float64.
        part = torch.eye(_PARTS, dtype=torch.float32, device=tokens.device).repeat_interleave(
            -(-len(tokens) // _PARTS), dim=1
        )[:, : len(tokens)]
        counts, points = part * weights.float(), part * (directed / torch.where(norm == 0, 1, norm)).float()
        total, directions = (torch.cat([counts, points]) @ tokens).double().view(2, _PARTS, -1).sum(1)
        count = weights.sum()
        mean = (total / count.clamp_min(1)).float()
        centred = tokens - mean
        rest = (counts @ centred).double().sum(0)
        centred -= (rest / count.clamp_min(1)).float()
        if bool((weights != 1).any()):
            centred *= weights.sqrt().float()[:, None]
        variance = torch.linalg.vector_norm(centred, dim=-1).double().square().sum()
        scale = 1.0 if 1e-4 < float(variance) < 1e16 or not float(variance) else float(variance.sqrt())
        if scale != 1.0:  # fourth powers are added up
            centred /= scale
        energy = energy_of_tokens(centred, weights).double() * scale**4
        squares = weights @ norm.double().square()
        sums = InputMean(
            count, mean.double() * count + rest, squares, directions, directed.sum(), directed.square().sum()
        )
        return cls(sums, variance, energy)

    @staticmethod
    def scatter_of(mean: InputMean, rows: Tensor) -> Tensor:
        """The scatter of this rank's centred tokens, to add up over ranks with each pair of features once.

        It is in float32, whose rounding changes the sums, which are made of squares, by about 1e-7.

        Args:
            mean: sums over the tokens of all ranks.
            rows: ``(n, d)``, float64, centred, times the roots of the weights.

        Returns:
            Its rows in four chunks, each from the diagonal on, as one flat tensor; these leave out 3/8 of it.
        """
        small = (rows / _scale_of(mean)).float()
        d = small.shape[-1]
        return torch.cat([(small[:, start:end].mT @ small[:, start:]).flatten() for start, end in _chunks(d)])

    @staticmethod
    def bytes_of_scatter(width: int) -> int:
        """Bytes of the result of `scatter_of`.

        Args:
            width: features of a token.

        Returns:
            A little more than half of those of a whole scatter.
        """
        return 4 * sum((end - start) * (width - start) for start, end in _chunks(width))

    @classmethod
    def of_scatter(cls, mean: InputMean, half: Tensor) -> InputSums:
        """Sums from a scatter over all ranks.

        Args:
            mean: sums over the tokens of all ranks.
            half: the sum of the results of `scatter_of`.

        Returns:
            The sums.
        """
        d, scale = mean.total.shape[-1], _scale_of(mean)
        trace = energy = torch.zeros((), dtype=torch.float64, device=half.device)
        sizes = [(end - start) * (d - start) for start, end in _chunks(d)]
        for block, (start, end) in zip(torch.split(half, sizes), _chunks(d)):
            block = block.view(end - start, d - start).double()
            own = block[:, : len(block)]
            trace = trace + own.diagonal().sum()
            # Pairs with later features count twice, above and below the diagonal.
            energy = energy + 2 * block.square().sum() - own.square().sum()
        return cls(mean, trace * scale**2, energy * scale**4)

    def spread(self) -> TokenSpread:
        """Effective rank and mean cosine of the tokens, see `token_spread`.

        Returns:
            The spread; NaN with fewer than two tokens.
        """
        mean = self.mean
        rank = self.variance.square() / self.energy
        # Equal tokens leave a residue: the rounding of the captured values.
        is_one = self.variance <= (8 * torch.finfo(torch.float32).eps) ** 2 * mean.size
        rank = torch.where(is_one, 0, rank)
        pairs = mean.pointing.square() - mean.pointing_squares
        cosine = (mean.directions.square().sum() - mean.pointing_squares) / pairs
        known = mean.count > 1
        return TokenSpread(
            torch.where(known & mean.size.isfinite(), rank, torch.nan),
            torch.where(known & (pairs > 0), cosine.clamp(-1, 1), torch.nan),
            mean.count,
        )


def _scale_of(mean: InputMean) -> Tensor:
    scale = mean.size.sqrt()
    return torch.where(scale > 0, scale, 1)


def _chunks(width: int) -> list[tuple[int, int]]:
    """First and last row of each chunk of a scatter."""
    step = max(1, -(-width // 4))
    return [(start, min(start + step, width)) for start in range(0, width, step)]


_PARTS = 8
