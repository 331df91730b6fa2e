"""Equality of features over a few tokens: which outputs of linear maps are inputs of attention.

A feature is a vector over tokens, and two that agree on a dozen tokens to rounding are the same feature. A rotation by
position changes features and keeps the norm of those that it turns; a constant factor changes neither direction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_FEW = 4  # tokens below which norms may agree by chance


def tolerance(*tensors: Tensor) -> float:
    """Return the largest relative difference that is rounding.

    Args:
        tensors: what is compared.

    Returns:
        1e-4 in float32, more in types of fewer digits.
    """
    return max(1e-4, *(4 * torch.finfo(tensor.dtype).eps for tensor in tensors if tensor.is_floating_point()))


@dataclass(frozen=True, eq=False)
class HeadMatch:
    """Match of claimed heads with observed heads.

    Attributes:
        fits: ``(observed heads, claimed heads)``, True where they agree.
        how: in what sense they agree: ``"as they are"``, ``"rotated"``, ``"normed"``.
    """

    fits: Tensor
    how: str


def match_heads(observed: Tensor, claimed: Tensor, tol: float) -> list[HeadMatch]:
    """Compare every observed head with every head that is claimed.

    Args:
        observed: ``(P, H, width)``.
        claimed: ``(P, G, width)``.
        tol: from `tolerance`.

    Returns:
        One match for each sense in which heads may agree, the strictest first; of vectors that are all alike no head
        agrees.
    """
    x, y = observed.double(), claimed.double()
    length = _residual(x.flatten(2).permute(1, 0, 2).flatten(1), y.permute(1, 0, 2).flatten(1))
    ways = [HeadMatch(length < tol**2, "as they are")]
    if len(x) >= _FEW:
        norms = _residual(x.square().sum(-1).T, y.square().sum(-1).T)
        # A norm behind the map makes the norms of all tokens alike, and then they are no evidence.
        varied = (_spread(x) > 20 * tol)[:, None] & (_spread(y) > 20 * tol)
        ways.append(HeadMatch((norms < tol**2) & varied, "rotated"))
        cosines = torch.einsum("phw,pgw->phg", x, y) / (x.norm(dim=-1)[:, :, None] * y.norm(dim=-1)[:, None]).clamp_min(
            1e-300
        )
        ways.append(HeadMatch((cosines.amin(0) > 1 - tol**2) & (x.shape[-1] > 2), "normed"))
    return ways


def _residual(x: Tensor, y: Tensor) -> Tensor:
    """The part of each row of x that is no multiple of a row of y, squared and relative; 1 where either is zero."""
    products, xx, yy = x @ y.T, x.square().sum(-1), y.square().sum(-1)
    whole = xx[:, None] * yy
    share = products.square() / whole.clamp_min(1e-300)
    # Where nearly nothing is left, it is computed without the cancellation of 1 - cos^2.
    factors = (products / yy.clamp_min(1e-300))[..., None]
    left = torch.stack([(row - factor * y).square().sum(-1) for row, factor in zip(x, factors, strict=True)])
    exact = torch.where(share > 0.99, left / xx.clamp_min(1e-300)[:, None], 1 - share)
    residual: Tensor = torch.where(whole > 0, exact, 1.0)
    return residual


def _spread(x: Tensor) -> Tensor:
    """Spread of the norms of a head over tokens, relative to their mean."""
    norms = x.norm(dim=-1)
    spread: Tensor = norms.std(0) / norms.mean(0).clamp_min(1e-300)
    return spread


def find_features(observed: Tensor, made: Tensor, tol: float) -> Tensor:
    """Find each feature of the inputs of attention among those of a map, as it is or times a factor.

    Args:
        observed: ``(P, features)``.
        made: ``(P, features of the map)``.
        tol: from `tolerance`.

    Returns:
        ``(features,)``, the number of the feature of the map, -1 where there is none.
    """
    if len(observed) < _FEW:
        return torch.full((observed.shape[1],), -1, device="cpu")
    y = made.double().T
    x, step = observed.double().T, max(1, 2**22 // max(y.shape[0], 1))
    return torch.cat([_nearest(x[start : start + step], y, tol) for start in range(0, len(x), step)])


def may_hold(observed: Tensor, made: Sequence[Tensor]) -> list[bool]:
    """Return which maps may have given one feature: most maps of a deep model are ruled out by that alone.

    Args:
        observed: ``(P, H, width)``.
        made: ``(P, features)`` of each map.

    Returns:
        Of each map, False where `find_features` and `find_rotated` would not find the first feature of the first head.
    """
    if len(observed) < _FEW or not made:
        return [False] * len(made)
    x, y = observed[:, 0].float(), torch.cat([outputs.cpu().float() for outputs in made], 1)
    slack = 1e-4 + 8 * tolerance(observed, *made) ** 2
    near, width = _near(x[:, 0], y, slack), x.shape[1]
    if not width % 2:
        squares = y.square()
        for apart in sorted({1, width // 2}):
            norms = x[:, 0].square() + x[:, apart].square()
            for lag in sorted({1, width // 2}):
                if lag < y.shape[1]:  # a pair across two maps costs a comparison in vain
                    near[:-lag] |= _near(norms, squares[:, :-lag] + squares[:, lag:], slack)
    return [bool(part.any()) for part in torch.split(near, [outputs.shape[1] for outputs in made])]


def _near(x: Tensor, y: Tensor, slack: float) -> Tensor:
    """Return which columns are nearly multiples of a vector; a share that is not finite may be that of one."""
    share = (x @ y).square() / (x.square().sum() * y.square().sum(0)).clamp_min(1e-30)
    is_far: Tensor = share < 1 - slack
    return ~is_far


def _nearest(x: Tensor, y: Tensor, tol: float) -> Tensor:
    xx, yy = x.square().sum(-1), y.square().sum(-1)
    share = (x @ y.T).square() / (xx[:, None] * yy).clamp_min(1e-300)
    best = share.argmax(-1)
    chosen = y[best]
    factor = (x * chosen).sum(-1) / yy[best].clamp_min(1e-300)
    left = (x - factor[:, None] * chosen).square().sum(-1)
    # Relative to how much the feature varies: a large mean that all features share would hide what differs.
    varies = (x - x.mean(-1, keepdim=True)).square().sum(-1)
    is_same = (left <= tol**2 * varies.clamp_min(1e-300)) & (varies > tol**2 * xx)
    return torch.where(is_same, best, -1)


def find_rotated(observed: Tensor, made: Tensor, tol: float) -> Tensor:
    """Find features that were turned in pairs, by the norms of the pairs.

    Args:
        observed: ``(P, H, width)``.
        made: ``(P, features of the map)``.
        tol: from `tolerance`.

    Returns:
        ``(H, width)``, numbers of features of the map, -1 where none is found; which of a pair is which is not known.
    """
    _, H, width = observed.shape
    found = torch.full((H, width), -1, device="cpu")
    if width % 2 or len(observed) < _FEW:
        return found
    x, y = observed.double(), made.double()
    pairings = {(width // 2, tuple(range(width // 2))), (1, tuple(range(0, width, 2)))}
    for apart, firsts in sorted(pairings):
        first = torch.tensor(firsts, device="cpu")
        norms = (x[..., first].square() + x[..., first + apart].square()).flatten(1)
        for lag in sorted({1, width // 2}):
            if lag >= y.shape[1]:
                continue
            pool = y[:, :-lag].square() + y[:, lag:].square()
            places = find_features(norms, pool, 2 * tol).view(H, -1)
            there = places >= 0
            if int(there.sum()) > int((found[:, first] >= 0).sum()):
                found[:, first] = places
                found[:, first + apart] = torch.where(there, places + lag, -1)
    return found
