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


@dataclass(frozen=True)
class DimensionRoles:
    """Roles of the leading dimensions of an attention in one forward, by which later ones are read.

    Attributes:
        of_sequences: for each dimension whether it numbers sequences; None where its size was one.
        heads: how many heads there were.
        is_shared: sequences and heads share a single dimension, which `of_sequences` takes apart.
    """

    of_sequences: tuple[bool | None, ...]
    heads: int
    is_shared: bool = False

    @classmethod
    def of(cls, axes: Axes, dims: int) -> DimensionRoles:
        """Note the roles of dimensions.

        Args:
            axes: how its dimensions were read.
            dims: how many there were before one that holds both was taken apart.

        Returns:
            The roles.
        """
        roles = tuple(None if size == 1 else dim in axes.batch for dim, size in enumerate(axes.lead))
        return cls(roles, axes.heads, is_shared=dims < len(axes.lead))

    def contradict(self, other: DimensionRoles) -> bool:
        """Tell whether a dimension has another role.

        Args:
            other: of the same forward.

        Returns:
            True if one number sequences by a dimension that numbers heads to the other.
        """
        pairs = zip(self.of_sequences, other.of_sequences, strict=False)
        is_alike = len(self.of_sequences) == len(other.of_sequences) and self.is_shared == other.is_shared
        return is_alike and any(None not in pair and pair[0] != pair[1] for pair in pairs)

    def axes(self, lead: Sequence[int]) -> Axes | None:
        """Read dimensions of a later forward, whose sizes may differ.

        Args:
            lead: their sizes.

        Returns:
            Which number sequences; `None` if that is not known.
        """
        lead = tuple(lead)
        if self.is_shared:
            if len(lead) != 1 or lead[0] % self.heads or None in self.of_sequences:
                return None
            sequences = lead[0] // self.heads
            is_outside = bool(self.of_sequences[0])
            return Axes((sequences, self.heads) if is_outside else (self.heads, sequences), (0 if is_outside else 1,))
        if len(lead) != len(self.of_sequences):
            return None
        known = [dim for dim, role in enumerate(self.of_sequences) if role]
        unknown = [dim for dim, role in enumerate(self.of_sequences) if role is None]
        for number in reversed(range(len(unknown) + 1)):
            for some in itertools.combinations(unknown, number):
                axes = Axes(lead, tuple(sorted([*known, *some])))
                if axes.heads == self.heads or (not unknown and len(lead) > 1):
                    return axes
        return None


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
    if heads is not None and (by_claim := _of_as_many(lead, heads)):
        return by_claim[0]
    usual = tuple(range(len(lead) - 1))
    for way in [*by_queries, *by_keys]:
        if way.lead == lead and way.batch == usual:
            return way
    if by_queries:
        return by_queries[0]
    if heads is not None and len(lead) == 1 and lead[0] % heads == 0:
        return Axes((lead[0] // heads, heads), (0,))
    return Axes(lead, usual) if len(lead) >= 2 else None


def are_ambiguous(
    lead: Sequence[int], queries: int, tokens: Sequence[int], heads: int | None, *, keys: int = 0
) -> bool:
    """Tell whether several dimensions may number the heads, as where there are as many windows beside them.

    Args:
        lead: as `resolve` takes it, like all others.
        queries: length of a sequence of queries.
        tokens: how many tokens the inputs of linear maps have.
        heads: how many heads are claimed.
        keys: length of a sequence of keys.

    Returns:
        True if more than one reading has the claimed heads, and its first dimension numbers sequences.
    """
    lead = tuple(lead)
    ways = [*_fitting(lead, queries, tokens), *_fitting(lead, keys, tokens)]
    fitting = [way for way in ways if way.lead == lead and way.heads == heads and 0 in way.batch]
    fitting = fitting if fitting or heads is None else _of_as_many(lead, heads)
    return len({tuple(dim for dim in way.heads_dims if lead[dim] > 1) for way in fitting}) > 1


def _of_as_many(lead: tuple[int, ...], heads: int) -> list[Axes]:
    """Read the dimensions by the number of heads alone; blocks that are filled up hold more tokens than maps made."""
    ways = [Axes(lead, batch) for batch in dims_of(lead, math.prod(lead) // heads) if 0 in batch and len(lead) > 1]
    return [way for way in ways if way.heads == heads]


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
