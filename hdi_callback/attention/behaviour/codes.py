"""Numbers that are written into factors, and read back from what comes of them.

A feature that answers with a factor of its own is known again wherever it arrives without being mixed with others.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable

import torch
from torch import Tensor

BASE = 64  # of the digits by which features and heads are known

Draw = Callable[[str, int, tuple[int, ...]], Tensor]  # what a linear map answers, in which of its calls
Change = Callable[[int, Tensor], Tensor]  # what becomes of attention weights


def _even(times: float) -> Change:
    return lambda _, weights: torch.full_like(weights, times / weights.shape[-1])


# The weights of constant queries and keys, which leave out padding that is masked; and even ones, by which the values
# of padding that is zero are left out of all sums alike.
SAME_WEIGHTS: tuple[tuple[Change, Change], ...] = (
    (lambda _, weights: weights, lambda _, weights: 2 * weights),
    (_even(1.0), _even(2.0)),
)


def draw_random(path: str, call: int, shape: tuple[int, ...]) -> Tensor:
    """Draw away from zero, and of a size that leaves products of order one both with and without a scale.

    Args:
        path: the linear map.
        call: which of its calls.
        shape: ``(..., features)``.

    Returns:
        What it answers.
    """
    sizes: Tensor = torch.empty(shape).uniform_(0.5, 1.5) * float(shape[-1]) ** -0.125
    return sizes * torch.randn(shape).sign()


def draw_varied(path: str, call: int, shape: tuple[int, ...]) -> Tensor:
    """Draw features that differ from token to token, the same whenever they are asked for.

    Args:
        path: the linear map.
        call: which of its calls.
        shape: ``(..., features)``.

    Returns:
        What it answers.
    """
    return torch.empty(shape).uniform_(0.5, 1.5, generator=_generator(path, call))


def draw_mixed(path: str, features: list[int], shares: tuple[float, float]) -> Draw:
    """Draw the same whenever asked, some features of one map as the sum of shares of two draws.

    Args:
        path: the map.
        features: which of its features.
        shares: of the two draws.

    Returns:
        What draws so.
    """

    def drawn(other: str, call: int, shape: tuple[int, ...]) -> Tensor:
        one, second = (torch.empty(shape).uniform_(-1.5, 1.5, generator=_generator(other, n + call)) for n in (0, 999))
        if other == path:
            one[..., features] = shares[0] * one[..., features] + shares[1] * second[..., features]
        return one

    return drawn


def draw_times(path: str, factors: Tensor) -> Draw:
    """Draw the same for all tokens, and multiply what one of the maps answers by a factor for each feature.

    Args:
        path: the map.
        factors: ``(features,)``.

    Returns:
        What draws so.
    """

    def drawn(other: str, call: int, shape: tuple[int, ...]) -> Tensor:
        features: Tensor = torch.empty(shape[-1]).uniform_(0.5, 1.5, generator=_generator(other, 0))
        return (features * factors if other == path else features).expand(shape)

    return drawn


def _generator(path: str, call: int) -> torch.Generator:
    return torch.Generator().manual_seed(zlib.crc32(f"{path} {call}".encode()))


def digits_of(numbers: Tensor) -> list[Tensor]:
    """Write numbers by their digits, the lowest first, and a last one that checks them.

    Args:
        numbers: whole numbers.

    Returns:
        One tensor for each digit.
    """
    digits = [numbers % BASE]
    while int((numbers := numbers // BASE).max()):
        digits.append(numbers % BASE)
    return [*digits, _check_digit(digits)]


def _check_digit(digits: list[Tensor]) -> Tensor:
    total = torch.zeros_like(digits[0])
    for place, digit in enumerate(digits):
        total += (2 * place + 5) * digit
    return (total + 11) % BASE


def read_numbers(plain: Tensor, coded: list[Tensor], digit: Callable[[Tensor], Tensor]) -> Tensor | None:
    """Read the number of each feature from its digits; all tokens have to agree.

    Args:
        plain: what comes without a code, ``(tokens, features)``.
        coded: what comes of each digit, ``(tokens, features)``.
        digit: takes the ratio of both to the digit.

    Returns:
        ``(features,)``; `None` if they cannot be read.
    """
    counts = plain.abs() > 1e-3 * plain.abs().max()
    if not counts.any(0).all():
        return None
    digits: list[Tensor] = []
    for one in coded:
        read = digit(one / plain)
        whole = read.round()
        if not ((read - whole).abs() < 0.05)[counts].all():
            return None
        least, most = whole.where(counts, torch.inf).amin(0), whole.where(counts, -torch.inf).amax(0)
        if not torch.equal(least, most) or least.min() < 0 or most.max() >= BASE:
            return None
        digits.append(least.long())
    numbers, is_right = numbers_of(digits)
    return numbers if is_right.all() else None


def numbers_of(digits: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Put digits together.

    Args:
        digits: as `digits_of` gives them.

    Returns:
        The numbers, and whether the digit that checks each is right.
    """
    *own, check = digits
    return torch.stack([digit * BASE**power for power, digit in enumerate(own)]).sum(0), check == _check_digit(own)
