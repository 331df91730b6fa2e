"""What a number depends on: which features of which tokens, seen by derivatives."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

_MATTERS = 1e-6  # a derivative, relative to the largest

Where = tuple[str, int]  # a linear map, and which of its calls
Elements = dict[Where, Tensor]  # which features of which tokens: (tokens, features), of those calls that matter
Features = tuple[tuple[str, tuple[int, ...]], ...]  # by linear map


def elements_of(leaves: Mapping[Where, Tensor], loss: Tensor) -> Elements:
    """Find the elements of leaves that a number depends on.

    Args:
        leaves: what linear maps answered, ``(..., features)``.
        loss: the number.

    Returns:
        Those with a derivative.
    """
    gradients = gradients_of(leaves, loss)
    largest = max((float(one.abs().max()) for one in gradients.values()), default=0.0)
    if not largest > 0:
        return {}
    matter = {where: one.abs() > _MATTERS * largest for where, one in gradients.items()}
    return {where: one for where, one in matter.items() if one.any()}


def gradients_of(leaves: Mapping[Where, Tensor], loss: Tensor, *, is_kept: bool = False) -> dict[Where, Tensor]:
    """Derive a number by leaves.

    Args:
        leaves: what linear maps answered, ``(..., features)``.
        loss: the number.
        is_kept: whether the derivatives are to be derived again.

    Returns:
        ``(tokens, features)`` for each leaf on which it may depend.
    """
    if not loss.requires_grad:
        return {}
    gradients = torch.autograd.grad(
        loss, list(leaves.values()), retain_graph=True, allow_unused=True, create_graph=is_kept
    )
    return {
        where: gradient.reshape(-1, gradient.shape[-1])
        for where, gradient in zip(leaves, gradients)
        if gradient is not None
    }


def depends_on(tensor: Tensor, on: list[Tensor]) -> bool:
    """Tell whether a tensor has a derivative by any of others.

    Args:
        tensor: the tensor.
        on: the others.

    Returns:
        True if so.
    """
    if not tensor.requires_grad or not on:
        return False
    loss = (tensor * torch.randn_like(tensor)).sum()
    gradients = torch.autograd.grad(loss, on, retain_graph=True, allow_unused=True)
    return any(gradient is not None and bool(gradient.any()) for gradient in gradients)


def common_to(all_of_them: list[Elements]) -> Elements:
    """Intersect.

    Args:
        all_of_them: at least one.

    Returns:
        The elements that are in all of them.
    """
    first, *others = all_of_them
    for other in others:
        first = {where: mask & other[where] for where, mask in first.items() if where in other}
    return {where: mask for where, mask in first.items() if mask.any()}


def without(elements: Elements, others: Elements) -> Elements:
    """Take away.

    Args:
        elements: from these.
        others: what is taken away.

    Returns:
        The elements that are left.
    """
    left = {where: mask & ~others[where] if where in others else mask for where, mask in elements.items()}
    return {where: mask for where, mask in left.items() if mask.any()}


def features_of(elements: Elements) -> Features:
    """Name the features, whatever their tokens.

    Args:
        elements: of any linear maps.

    Returns:
        The features of each map, sorted.
    """
    found: dict[str, set[int]] = {}
    for (path, _), mask in elements.items():
        found.setdefault(path, set()).update(mask.any(0).nonzero().flatten().tolist())
    return tuple((path, tuple(sorted(features))) for path, features in sorted(found.items()))


def are_same(one: Elements, other: Elements) -> bool:
    """Compare.

    Args:
        one: some elements.
        other: some elements.

    Returns:
        Whether they are the same.
    """
    return one.keys() == other.keys() and all(torch.equal(mask, other[where]) for where, mask in one.items())


def have(elements: Elements, of_map: tuple[str, tuple[int, ...]]) -> bool:
    """Tell whether some elements are features of a map.

    Args:
        elements: the elements.
        of_map: the map, and its features.

    Returns:
        True if so.
    """
    return any(path == of_map[0] and bool(mask[:, of_map[1]].any()) for (path, _), mask in elements.items())


def token_of(elements: Elements) -> tuple[Where, int] | None:
    """Name the token that all elements belong to.

    Args:
        elements: the elements.

    Returns:
        The token, and in which call of which map; `None` if there are several.
    """
    tokens = [(where, token) for where, mask in elements.items() for token in mask.any(1).nonzero().flatten().tolist()]
    return tokens[0] if len(tokens) == 1 else None
