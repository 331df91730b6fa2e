"""Bounded samples of tokens, taken without waiting for the device."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hdi_callback.attention.layer.sharding import on_parts


@dataclass(frozen=True)
class TokenSample:
    """Tokens of one forward or of several.

    Attributes:
        rows: ``(tokens, features)``, detached; a DTensor where the features are spread over ranks.
        sequences: ``(tokens,)``, the number of the sequence that each belongs to.
        weights: ``(tokens,)``, how many tokens each represents, 0 for padding; `None` if all represent `share`.
        share: tokens that each represents where there are no weights.
        num_tokens: number of tokens, padding included, that the sample was taken from.
    """

    rows: Tensor
    sequences: Tensor
    weights: Tensor | None
    share: float
    num_tokens: int

    def thinned(self, size: int) -> TokenSample:
        """Keep tokens spread evenly over the sample.

        Args:
            size: how many to keep; all, if there are no more.

        Returns:
            A sample of at most this size.
        """
        kept = len(self.rows)
        if kept <= size:
            return self
        places = torch.arange(size, device=self.sequences.device) * kept // size
        factor = kept / max(size, 1)
        return replace(
            self,
            rows=on_parts(lambda rows: rows[places], self.rows),
            sequences=self.sequences[places],
            weights=None if self.weights is None else self.weights[places] * factor,
            share=self.share * factor,
        )

    def weight(self) -> Tensor:
        """Return the weight of each token.

        Returns:
            ``(tokens,)``, float32.
        """
        if self.weights is not None:
            return self.weights
        return torch.full(self.sequences.shape, self.share, dtype=torch.float32, device=self.sequences.device)


def joined(samples: Sequence[TokenSample]) -> TokenSample:
    """Join samples of different tokens.

    Args:
        samples: at least one.

    Returns:
        All of them.
    """
    if len(samples) == 1:
        return samples[0]
    first = samples[0]
    device = first.sequences.device
    are_alike = all(sample.weights is None and sample.share == first.share for sample in samples)
    return TokenSample(
        rows=torch.cat([sample.rows.to(device) for sample in samples]),
        sequences=torch.cat([sample.sequences.to(device) for sample in samples]),
        weights=None if are_alike else torch.cat([sample.weight().to(device) for sample in samples]),
        share=first.share,
        num_tokens=sum(sample.num_tokens for sample in samples),
    )


def shared_out(sizes: Sequence[int], limit: int) -> list[int]:
    """Share out a number of tokens in proportion.

    Args:
        sizes: tokens that there are, by forward.
        limit: tokens that may be kept.

    Returns:
        Tokens to keep, by forward: all of them if they are few, at least one of each as long as there is room.
    """
    total = sum(sizes)
    if total <= limit:
        return list(sizes)
    shares = [max(min(1, size), size * limit // total) for size in sizes]
    for place in sorted(range(len(shares)), key=lambda place: -shares[place]):
        shares[place] -= min(max(0, sum(shares) - limit), shares[place])
    return shares


def sample_tokens(outputs: Tensor, limit: int, *, padded: Tensor | None = None, first_sequence: int = 0) -> TokenSample:
    """Sample tokens spread evenly over all sequences and positions, all of them if they are few.

    Of N tokens it takes floor(j N / P) for j = 0 ... P-1, with P the largest prime up to the limit: of B sequences of
    length T these are the positions T frac(j B / P), which lie evenly in the sequence unless P divides B. A plain
    stride with a common factor would see the same few positions of every sequence. Padding is skipped; as its
    amount is known on the device alone, room that it leaves is filled with tokens of weight zero.

    Args:
        outputs: ``(..., length, features)``.
        limit: largest number of tokens to keep, at least 2.
        padded: ``(tokens,)``, true where a token is padding; float with NaN where that is not known.
        first_sequence: number of the first sequence.

    Returns:
        The sample, detached and copied.
    """
    lead = outputs.shape[:-1]
    num_tokens = math.prod(lead)
    length = max(1, lead[-1] if len(lead) > 1 else num_tokens)
    device = outputs.device
    kept = num_tokens if num_tokens <= limit else largest_prime(limit)
    places = torch.arange(kept, device=device)
    weights = None
    if kept < num_tokens and padded is None:
        places = places * num_tokens // kept
    elif padded is not None and kept == num_tokens:
        weights = 1 - padded.to(torch.float32)
    elif padded is not None:
        doubt = padded.to(torch.float32)
        order = (doubt > 0).to(torch.int8).argsort(stable=True)
        count = (doubt <= 0).sum()  # none at all where it is NaN
        spread = torch.where(count > kept, places * count // kept, places)
        weights = (places < count) * (count / kept).clamp_min(1) + doubt.sum() * 0
        places = order[spread.clamp_max(num_tokens - 1)]
    rows = on_parts(lambda part: _rows(part, places, is_whole=kept == num_tokens), outputs)
    return TokenSample(rows, first_sequence + places // length, weights, num_tokens / max(kept, 1), num_tokens)


def _rows(outputs: Tensor, places: Tensor, *, is_whole: bool) -> Tensor:
    flat = outputs.detach().reshape(-1, outputs.shape[-1])
    return flat.clone() if is_whole else flat[places]


def largest_prime(limit: int) -> int:
    """Find the largest prime up to a limit.

    Args:
        limit: at least 2.

    Returns:
        The prime.
    """
    return next(n for n in range(limit, 1, -1) if all(n % f for f in range(2, math.isqrt(n) + 1)))
