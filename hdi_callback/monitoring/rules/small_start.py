"""Heads whose fresh key weights are small: what training adds soon outweighs them, and no direction is lost by that."""

from __future__ import annotations

import math

from hdi_callback.monitoring.alerts import Series

SMALL = 0.4
"""Size of key weights, relative to independent ones of variance one over the input width, below which they are small.

GPT-2's standard deviation of 0.02 is 0.55 of that at its width of 768 and 0.16 at a width of 64; the default of
`torch.nn.Linear` is 0.58.
"""


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
