r"""Probability of an overlap between independently drawn heads: an upper bound, valid at initialisation only."""

from __future__ import annotations

import math

from hdi_callback.errors import ShapeError


def chance_of_overlap(overlap: float, *, ranks: tuple[float, float], width: int, pairs: int = 1) -> float:
    r"""Bound the probability that one of `pairs` independent pairs of random subspaces overlaps this much.

    The overlap of two independent, uniformly random subspaces of ranks r and s in d dimensions has the mean
    :math:`\mu = \sqrt{rs}/d` and the variance :math:`2(d-r)(d-s) / (d^2(d-1)(d+2))`. A Beta law with these moments
    (ours; a Gaussian tail is wrong) has, for :math:`x \ge \mu` and :math:`m = \mu(1-\mu)/\mathrm{Var} - 1`, the tail

    .. math:: P(\kappa \ge x) \le (x/\mu)^{\mu m} \, ((1-x)/(1-\mu))^{(1-\mu) m}

    (Dümbgen 1998), and the pairs add up as Šidák's correction says. Valid at initialisation only: the heads of every
    trained model are far from random.

    Args:
        overlap: normalised overlap of the pair, in [0, 1].
        ranks: ranks of its two heads.
        width: input width d.
        pairs: number of pairs among which it is the largest.

    Returns:
        An upper bound of the probability, in [0, 1]; 1 where the subspaces fill the space, which says nothing.

    Raises:
        ShapeError: if a rank is below 1, or there is no pair.

    Example:
        >>> chance_of_overlap(0.9, ranks=(8, 8), width=64, pairs=28) < 1e-12
        True
        >>> chance_of_overlap(0.125, ranks=(8, 8), width=64, pairs=28)  # exactly at chance
        1.0
    """
    r, s = ranks
    if min(r, s) < 1 or pairs < 1:
        raise ShapeError(f"An overlap needs two live heads and at least one pair, got ranks {ranks} and {pairs} pairs.")
    d = width
    if max(r, s) >= d:
        return 1.0
    mean = math.sqrt(r * s) / d
    if overlap <= mean:
        return 1.0
    if overlap >= 1:
        return 0.0
    variance = 2 * (d - r) * (d - s) / (d**2 * (d - 1) * (d + 2))
    m = mean * (1 - mean) / variance - 1
    log_tail = m * (mean * math.log(overlap / mean) + (1 - mean) * math.log((1 - overlap) / (1 - mean)))
    return -math.expm1(pairs * math.log1p(-min(math.exp(log_tail), 1 - 1e-16)))
