"""What is known of fresh weights: whether a layer has them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch

from hdi_callback.rules.series import Row, Series

DEVIATIONS = 6.0  # standard deviations from which on the spectrum of a layer is none of an initialisation
SMALL = 0.4  # size of key weights, relative to variance one over the input width, that is small: GPT-2 has 0.55


def has_been_trained(row: Row, facts: Mapping[str, Any]) -> bool:
    """Return whether the spectrum of the median key head is too uneven for an initialisation.

    Entries that are drawn independently give a head a spectral flatness of known law, whatever their scale: it is a
    power of Mauchly's statistic of sphericity, exact for Gaussian entries and nearly so for uniform ones. Training
    makes few directions strong; of a few dozen steps it may go unnoticed. False if it is not known.
    """
    d, k = facts.get("width"), facts.get("head_dim")
    ranks = row.heads.get("rank", ())
    flatness = [value for value, rank in zip(row.per_head("flatness"), ranks) if rank == k and value > 0]
    if d is None or k is None or not 2 <= k <= d or len(flatness) < max(1, len(ranks) / 2):
        return False
    mean, deviation = _law_of_flatness(k, d)
    return bool((mean - statistics.median(map(math.log, flatness))) / deviation > DEVIATIONS)


def began_small(series: Series) -> bool:
    """Return whether the key weights of all heads were fresh and small at the first reading."""
    sizes, width = series.first.per_head("head_norm"), series.facts.get("head_dim")
    return not series.is_pretrained and bool(sizes and width) and max(sizes) < SMALL * math.sqrt(width or 0)


@cache
def _law_of_flatness(k: int, d: int) -> tuple[float, float]:
    """Mean and standard deviation of the logarithm of the flatness of k independent Gaussian rows in d dimensions."""
    halves = torch.arange(d, d - k, -1, dtype=torch.float64, device="cpu") / 2
    whole = torch.tensor(k * d / 2, dtype=torch.float64, device="cpu")
    mean = torch.digamma(halves).mean() - torch.digamma(whole) + math.log(k)
    variance = torch.polygamma(1, halves).mean() / k - torch.polygamma(1, whole)
    return float(mean), math.sqrt(float(variance))
