"""Dimensions of the inputs of attention: which are sequences, and which are heads."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Axes:
    """The dimensions in front of ``(length, features)`` or ``(queries, keys)``.

    Attributes:
        lead: their sizes, with one dimension that holds both taken apart.
        batch: which of them number sequences.
    """

    lead: tuple[int, ...]
    batch: tuple[int, ...]

    @property
    def heads_dims(self) -> tuple[int, ...]:
        """The dimensions that number heads."""
        return tuple(dim for dim in range(len(self.lead)) if dim not in self.batch)

    @property
    def sequences(self) -> int:
        """Number of sequences."""
        return math.prod(self.lead[dim] for dim in self.batch)

    @property
    def heads(self) -> int:
        """Number of heads."""
        return math.prod(self.lead[dim] for dim in self.heads_dims)

    def opened(self, tensor: Tensor) -> Tensor | None:
        """View a tensor with these leading dimensions.

        Args:
            tensor: ``(*lead, a, b)``, or with leading dimensions that multiply to the same number, or of size one.

        Returns:
            ``(*lead, a, b)``, where a dimension may be one; `None` if it does not fit.
        """
        ours = tuple(tensor.shape[:-2])
        if len(ours) < len(self.lead) and math.prod(ours) == math.prod(self.lead):
            return tensor.reshape(*self.lead, *tensor.shape[-2:]) if _can_view(tensor, self.lead) else None
        if len(ours) > len(self.lead):
            return None
        padded = tensor[(None,) * (len(self.lead) - len(ours))] if len(ours) < len(self.lead) else tensor
        fits = all(size in (1, lead) for size, lead in zip(padded.shape, self.lead, strict=False))
        return padded if fits else None

    def rows(self, tensor: Tensor, sequences: Tensor, positions: Tensor | None) -> Tensor:
        """Select some sequences, and some positions of each.

        Args:
            tensor: ``(*lead, length, features)`` as `opened` returns it.
            sequences: ``(S,)``, numbers of sequences, ascending, none twice.
            positions: ``(q,)``; None: all.

        Returns:
            ``(S, heads or 1, q, features)``, a copy unless all of it is taken.
        """
        sizes = [self.lead[dim] for dim in self.batch]
        length, features = len(self.lead), len(self.lead) + 1
        if positions is not None and tensor.shape[-2] > 1:
            # Both at once: a copy of all positions may be a copy of all scores.
            moved = tensor.permute(*self.batch, length, *self.heads_dims, features)
            moved = moved.expand(*sizes, *moved.shape[len(sizes) :])
            index = tuple(part[:, None] for part in unravel(sequences, sizes))
            places = (*index, positions)
            taken = moved[places] if index else moved[positions][None]  # (S, q, *heads, features)
            if not index:
                taken = taken.expand(len(sequences), *taken.shape[1:])
            return taken.reshape(*taken.shape[:2], -1, taken.shape[-1]).transpose(1, 2)
        moved = tensor.permute(*self.batch, *self.heads_dims, length, features)
        moved = moved.expand(*sizes, *moved.shape[len(sizes) :])
        if sizes and len(sequences) == self.sequences:
            return moved.reshape(len(sequences), -1, *moved.shape[-2:])
        taken = moved[unravel(sequences, sizes)] if sizes else moved[None].expand(len(sequences), *moved.shape)
        return taken.reshape(taken.shape[0], -1, *taken.shape[-2:])


def _can_view(tensor: Tensor, lead: Sequence[int]) -> bool:
    try:
        tensor.view(*lead, *tensor.shape[-2:])
    except RuntimeError:
        return False
    return True


def unravel(index: Tensor, sizes: Sequence[int]) -> tuple[Tensor, ...]:
    """Split flat numbers into one for each dimension, the last one fastest.

    Args:
        index: whole numbers.
        sizes: of the dimensions.

    Returns:
        One tensor for each dimension.
    """
    parts: list[Tensor] = []
    for size in reversed(sizes):
        parts.append(index % size)
        index = index // size
    return tuple(reversed(parts))


def resolve(
    lead: Sequence[int], queries: int, tokens: Sequence[int], heads: int | None = None, *, keys: int = 0
) -> Axes | None:
    """Find which leading dimensions are sequences, from the token counts of earlier linear maps.

    Args:
        lead: sizes of the dimensions in front of ``(length, features)``.
        queries: length of a sequence of queries.
        tokens: how many tokens the inputs of linear maps have, the latest first.
        heads: how many heads are claimed, which decides where several readings are possible.
        keys: length of a sequence of keys, where queries may be some of those that a map made.

    Returns:
        The dimensions; `None` where sequences and heads cannot be separated.
    """
    lead = tuple(lead)
    by_queries, by_keys = _fitting(lead, queries, tokens), _fitting(lead, keys, tokens)
    for way in [*by_queries, *by_keys]:
        if heads is not None and way.heads == heads:
            return way
    usual = tuple(range(len(lead) - 1))
    for way in [*by_queries, *by_keys]:
        if way.lead == lead and way.batch == usual:
            return way
    if by_queries:
        return by_queries[0]
    if heads is not None and len(lead) == 1 and lead[0] % heads == 0:
        return Axes((lead[0] // heads, heads), (0,))
    return Axes(lead, usual) if len(lead) >= 2 else None


def _fitting(lead: tuple[int, ...], length: int, tokens: Sequence[int]) -> list[Axes]:
    counts = dict.fromkeys(count // length for count in tokens if count % length == 0) if length else {}
    return [way for sequences in counts for way in _ways(lead, sequences)]


def _ways(lead: tuple[int, ...], sequences: int) -> list[Axes]:
    fitting = dims_of(lead, sequences)
    fitting.sort(key=lambda batch: batch != tuple(range(len(batch))))  # sequences come first as a rule
    if fitting or len(lead) != 1 or lead[0] % sequences:
        return [Axes(lead, batch) for batch in fitting]
    return [Axes((sequences, lead[0] // sequences), (0,))]  # torch's own order where both share a dimension


def dims_of(sizes: Sequence[int], count: int) -> list[tuple[int, ...]]:
    """Find the dimensions whose sizes multiply to a number.

    Args:
        sizes: of all dimensions.
        count: of the things.

    Returns:
        Each choice of dimensions whose sizes multiply to it, the fewest first.
    """
    dims = range(len(sizes))
    subsets = (some for number in range(len(sizes) + 1) for some in itertools.combinations(dims, number))
    return [some for some in subsets if math.prod(sizes[dim] for dim in some) == count]


def spread(count: int, of: int, device: torch.device) -> Tensor:
    """Choose positions at a fixed stride, from the middle of each stretch.

    Args:
        count: how many to take at most.
        of: how many there are.
        device: where the result is needed; nothing is copied from the host.

    Returns:
        ``(min(count, of),)``, ascending.
    """
    taken = min(count, of)
    return (torch.arange(taken, device=device) * 2 + 1) * of // (2 * max(taken, 1))
