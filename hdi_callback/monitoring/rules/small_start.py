"""Heads whose fresh weights are small: what training adds soon outweighs them, and nothing is lost by that."""

from __future__ import annotations

import math

from hdi_callback.monitoring.alerts import Series

SMALL = 0.4
"""Size of key weights, relative to independent ones of variance one over the input width, below which they are small.

GPT-2's standard deviation of 0.02 is 0.55 of that at its width of 768 and 0.16 at a width of 64; the default of
`torch.nn.Linear` is 0.58.
"""


def began_small(series: Series) -> bool:
    """Return whether the key weights of all heads of a layer were fresh and small at the first reading.

    Args:
        series: the readings of a layer.

    Returns:
        False if their sizes are not known.
    """
    sizes, width = series.first.per_head("head_norm"), series.facts.get("head_dim")
    return not series.is_pretrained and bool(sizes and width) and max(sizes) < SMALL * math.sqrt(width or 0)


def has_lost_directions(series: Series, head: int, share: float) -> bool:
    """Return whether a less even spectrum of a head may mean that it has lost directions.

    Where fresh key weights are small, the few directions that training learns first soon outweigh all others, though
    none of these has shrunk. Of such heads the geometric mean of the squared singular values must have fallen as well.

    Args:
        series: the readings of a layer.
        head: number of the head.
        share: share of the first geometric mean at which directions count as lost.

    Returns:
        True for heads that began with weights of the usual size or pretrained, or of which no size is known.
    """
    first, now = series.first, series.latest
    sizes, width = first.per_head("head_norm"), series.facts.get("head_dim")
    if series.is_pretrained or not width or head >= len(sizes) or sizes[head] >= SMALL * math.sqrt(width):
        return True
    # Flatness is the geometric over the arithmetic mean, which is the squared norm over the number of directions.
    before = first.per_head("flatness")[head] * sizes[head] ** 2
    return now.per_head("flatness")[head] * now.per_head("head_norm")[head] ** 2 <= share * before


def has_come_together(series: Series, norms: str, pair: tuple[int, int], cosine: float, share: float = 1.0) -> bool:
    r"""Return whether circuits that are alike differ by no more than independent ones of their first size do.

    .. math:: \lVert C_h \rVert \lVert C_g \rVert (1 - \cos) \le \lVert C_h^0 \rVert \lVert C_g^0 \rVert

    Half the squared distance of two circuits, but for their sizes, against the same of independent ones at the first
    reading. Where fresh weights are small, all heads soon read the few directions that training learns first, so that
    their cosine is high, while what distinguishes them grows as well. Heads that merge lose it.

    Args:
        series: the readings of a layer.
        norms: name of the norms of its circuits.
        pair: two heads.
        cosine: of their circuits.
        share: what the right side is multiplied by.

    Returns:
        True for heads that began at zero, or of which no norms are known.
    """
    first, now = series.first.per_head(norms), series.latest.per_head(norms)
    if max(pair) >= min(len(first), len(now)):
        return True
    (one, other), (one_now, other_now) = ([sizes[head] for head in pair] for sizes in (first, now))
    return not one * other > 0 or one_now * other_now * (1 - cosine) <= share * one * other
