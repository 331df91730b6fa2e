"""`Support`: which features of which positions a tensor depends on, by the zeros of its derivative.

An element that a tensor does not depend on has a derivative of exactly zero, so that a support is exact if the numbers
are drawn at random.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_ROUNDING = 1e-7  # of a derivative, relative to the largest
_FEW_PARTS = 8  # that are derived one by one
_NONE, _SEVERAL = -1, -2  # in place of a number


@dataclass(frozen=True, eq=False)
class Support:
    """The elements of leaves that a tensor depends on.

    Attributes:
        masks: number of the leaf -> ``(positions, features)``, each with at least one element.
    """

    masks: Mapping[int, Tensor]

    @classmethod
    def of(
        cls,
        output: Tensor,
        leaves: Sequence[Tensor],
        positions: Tensor | Sequence[int] | None = None,
        axes: Sequence[int] | None = None,
    ) -> Support:
        """Support of a random combination of a tensor's elements: the nonzeros of its derivatives.

        Args:
            output: the tensor, ``(..., width)``.
            leaves: ``(..., features)`` each.
            positions: of the elements, counted over all dims but the last; all of them by default.
            axes: that number the features of each leaf, the last by default.

        Returns:
            The elements of leaves with a derivative that is not zero.
        """
        return cls._where(derivatives(output, weights_at(output, positions), leaves, axes))

    @classmethod
    def of_combination(cls, output: Tensor, weights: Tensor, leaves: Sequence[Tensor]) -> Support:
        """Support of a combination of a tensor's elements: the nonzeros of its derivatives.

        Args:
            output: the tensor.
            weights: of its elements, of its shape.
            leaves: ``(..., features)`` each.

        Returns:
            The elements of leaves with a derivative that is not zero.
        """
        return cls._where(derivatives(output, weights, leaves))

    @classmethod
    def _where(cls, found: Mapping[int, Tensor]) -> Support:
        largest = max((float(derivative.abs().max()) for derivative in found.values()), default=0.0)
        masks = (
            {leaf: derivative.abs() > _ROUNDING * largest for leaf, derivative in found.items()} if largest > 0 else {}
        )
        return cls({leaf: mask for leaf, mask in masks.items() if mask.any()})

    @classmethod
    def of_each(cls, output: Tensor, parts: Sequence[Tensor], leaves: Sequence[Tensor]) -> list[Support]:
        """Supports of several parts of a tensor, such as the keys of each head.

        Where no element of a leaf acts on two of them, the numbers of parts are written in binary into the weights of
        combinations, as `columns_of` does with columns: n parts take log2(n) derivatives rather than n.

        Args:
            output: the tensor, ``(..., width)``.
            parts: the positions of each, counted over all dims but the last.
            leaves: ``(..., features)`` each.

        Returns:
            The support of each part.
        """
        numbers: dict[tuple[int, ...], int] = {}
        of_part = [numbers.setdefault(tuple(at.tolist()), len(numbers)) for at in parts]
        supports = cls._of_disjoint(output, list(numbers), leaves)
        if supports is None:
            supports = [cls.of(output, leaves, at) for at in numbers]
        return [supports[number] for number in of_part]

    @classmethod
    def _of_disjoint(
        cls, output: Tensor, parts: Sequence[Sequence[int]], leaves: Sequence[Tensor]
    ) -> list[Support] | None:
        """Supports of all parts in one backward; `None` where two have a position or an element of a leaf in common."""
        owner = torch.full((output.shape[:-1].numel(), 1), -1)
        for number, at in enumerate(parts):
            owner[list(at)] = number
        if len(parts) < _FEW_PARTS or int((owner >= 0).sum()) < sum(map(len, parts)):
            return None
        codes, sizes = _codes_of(output, owner.view(*output.shape[:-1], 1), leaves)
        if any((code == _SEVERAL).any() for code in codes.values()):
            return None
        largest = torch.zeros(len(parts))
        for leaf, code in codes.items():
            is_live = code >= 0
            largest = largest.scatter_reduce(0, code[is_live], sizes[leaf][is_live].abs(), "amax")
        found: list[dict[int, Tensor]] = [{} for _ in parts]
        for leaf, code in codes.items():
            kept = code.where(sizes[leaf].abs() > _ROUNDING * largest[code.clamp_min(0)], _NONE)
            for part in kept[kept >= 0].bincount().nonzero().flatten().tolist():
                found[part][leaf] = kept == part
        return [cls(masks) for masks in found]

    def __bool__(self) -> bool:
        return bool(self.masks)

    def is_equal(self, other: Support) -> bool:
        """Return whether both hold the same elements of the same leaves."""
        return self.masks.keys() == other.masks.keys() and all(
            torch.equal(mask, other.masks[leaf]) for leaf, mask in self.masks.items()
        )

    @property
    def is_of_several_positions(self) -> bool:
        """Whether more than one position of a leaf is in it."""
        return any(len(self.positions(leaf)) > 1 for leaf in self.masks)

    def only(self, leaves: Iterable[int]) -> Support:
        """Keep some leaves.

        Args:
            leaves: their numbers.

        Returns:
            The support within them.
        """
        kept = set(leaves)
        return Support({leaf: mask for leaf, mask in self.masks.items() if leaf in kept})

    def features(self, leaf: int) -> tuple[int, ...]:
        """Number the features within a leaf, whatever their positions.

        Args:
            leaf: number of the leaf.

        Returns:
            The features, ascending.
        """
        return tuple(self.masks[leaf].any(0).nonzero().flatten().tolist()) if leaf in self.masks else ()

    def positions(self, leaf: int) -> tuple[int, ...]:
        """Number the positions within a leaf, whatever their features.

        Args:
            leaf: number of the leaf.

        Returns:
            The positions, ascending.
        """
        return tuple(self.masks[leaf].any(1).nonzero().flatten().tolist()) if leaf in self.masks else ()


def derivatives(
    output: Any, gradient: Tensor, leaves: Sequence[Any], axes: Sequence[int] | None = None
) -> dict[int, Tensor]:
    """The derivatives of a weighted sum of a tensor's elements.

    Args:
        output: the tensor.
        gradient: the weights of its elements in the combination.
        leaves: tensors, or edges of the graph.
        axes: that number the features of each leaf, the last by default.

    Returns:
        Number of the leaf -> its derivative, ``(positions, features)``; those that the output cannot depend on are
        left out.
    """
    if not leaves or not getattr(output, "requires_grad", True):
        return {}
    gradient = gradient.to(output.dtype) if isinstance(output, Tensor) and output.is_complex() else gradient
    found = torch.autograd.grad(output, list(leaves), gradient, retain_graph=True, allow_unused=True)
    made = {number: torch.nan_to_num(derivative) for number, derivative in enumerate(found) if derivative is not None}
    if axes is not None:
        made = {number: derivative.movedim(axes[number], -1) for number, derivative in made.items() if derivative.dim()}
    return {
        number: derivative.reshape(-1, derivative.shape[-1] if derivative.dim() else 1)
        for number, derivative in made.items()
    }


def depends_on(output: Tensor, other: Any) -> bool:
    """Return whether any element of a tensor depends on another tensor.

    Args:
        output: the tensor.
        other: a tensor, or an edge of the graph.

    Returns:
        True if so.
    """
    return any(derivative.any() for derivative in derivatives(output, random_weights(output.shape), [other]).values())


def weights_at(output: Tensor, positions: Tensor | Sequence[int] | None = None) -> Tensor:
    """Random weights for the elements of a tensor, or of some of its positions, bounded away from zero.

    Args:
        output: the tensor, ``(..., width)``.
        positions: counted over all dims but the last, all by default; elements at others weigh nothing.

    Returns:
        Numbers between 0.5 and 1.5 of its shape, the same for the same shape.
    """
    if positions is None:
        return random_weights(output.shape)
    weights = torch.zeros(output.shape)
    at = torch.as_tensor(positions, dtype=torch.long)
    weights.view(-1, output.shape[-1])[at] = random_weights((len(at), output.shape[-1]))
    return weights


def element(shape: Sequence[int], *index: int) -> Tensor:
    """Return the weights that choose one element, or all elements of a row.

    Args:
        shape: of the tensor.
        index: of the element.

    Returns:
        One there, zero elsewhere, of that shape.
    """
    weights = torch.zeros(tuple(shape))
    weights[index] = 1.0
    return weights


def columns_of(output: Tensor, leaves: Sequence[Any]) -> dict[int, Tensor]:
    """Return which column of a tensor each element of leaves acts on.

    The number of a column is written in binary into the weights of several combinations of its elements: an element
    that acts on one column alone has, in each of them, all of its derivative or nothing.

    Args:
        output: ``(..., columns)``.
        leaves: tensors, or edges of the graph.

    Returns:
        Number of the leaf -> ``(positions, features)``, the column; -1 where there is none, -2 where there are several.
    """
    codes, _ = _codes_of(output, torch.arange(output.shape[-1]), leaves, _ROUNDING, 1e-3)
    return codes


def _codes_of(
    output: Tensor, numbers: Tensor, leaves: Sequence[Any], rounding: float = 0.0, tolerance: float = 0.0
) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
    """Return on which of the numbered elements of a tensor each element of leaves acts.

    Args:
        output: the tensor.
        numbers: of its elements, below zero for those that are skipped.
        leaves: tensors, or edges of the graph.
        rounding: a derivative is none below this much of the largest.
        tolerance: one is all of another that differs from it by this much of it.

    Returns:
        For each leaf the numbers, `_NONE` or `_SEVERAL`; and the derivatives by all.
    """
    weights = weights_at(output) * (numbers >= 0)
    whole = derivatives(output, weights, leaves)
    largest = max((float(one.abs().max()) for one in whole.values()), default=0.0)
    if not largest > 0:
        return {}, {}
    codes = {leaf: torch.zeros(one.shape, dtype=torch.long) for leaf, one in whole.items()}
    for bit in range(max(1, int(numbers.max()).bit_length())):
        part = derivatives(output, weights * ((numbers >> bit) & 1), leaves)
        for leaf, derivative in whole.items():
            some, least = part.get(leaf, torch.zeros_like(derivative)), tolerance * derivative.abs()
            is_set = (some - derivative).abs() <= least
            is_clear = (is_set | (some.abs() <= least)) & (codes[leaf] >= 0)
            codes[leaf] = torch.where(is_clear, codes[leaf] + (is_set.long() << bit), _SEVERAL)
    return {leaf: code.where(whole[leaf].abs() > rounding * largest, _NONE) for leaf, code in codes.items()}, whole


def agreed(codes: Tensor) -> Tensor:
    """Read one column for each feature, on which all positions agree.

    Args:
        codes: ``(positions, features)``, as `columns_of` returns them.

    Returns:
        ``(features,)``, -1 where there is none, -2 where positions differ.
    """
    most = codes.amax(0)
    fits = ((codes == most) | (codes == -1)).all(0)
    return most.where(fits & (most >= -1), -2)


def random_weights(shape: Sequence[int]) -> Tensor:
    """Random weights bounded away from zero.

    Args:
        shape: of the elements.

    Returns:
        Numbers between 0.5 and 1.5, the same for the same shape.
    """
    generator = torch.Generator().manual_seed(len(shape))
    return torch.rand(tuple(shape), generator=generator) + 0.5
