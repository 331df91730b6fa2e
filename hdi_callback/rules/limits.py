"""The limits of all rules, in one table, and `thresholds` that change them by layer."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from hdi_callback.arguments import did_you_mean, shown
from hdi_callback.errors import MisconfigurationError

Thresholds = Mapping[str, Mapping[str, float | None]]


@dataclass(frozen=True)
class Limit:
    """A limit of a rule."""

    value: float  # its default
    meaning: str  # what it bounds
    below: float = 1.0  # what it must lie below; above zero it must always be


LIMITS: dict[str, Limit] = {
    "mean": Limit(0.5, "mean alignment of a layer's key heads, as subspaces"),
    "energy_mean": Limit(0.95, "the same, each direction weighted by its energy"),
    "critical": Limit(0.9, "mean alignment, as subspaces, that is critical"),
    "pair": Limit(0.8, "alignment of two key heads, as subspaces"),
    "copied": Limit(0.95, "alignment that two key heads reach at once, as copies do"),
    "values": Limit(0.9, "cosine of the OV circuits of two heads"),
    "frozen": Limit(3, "readings in a row at which weights do not move", math.inf),
    "unchanged": Limit(0.9, "share of a head's weights that are bit-identical to those of the reading before"),
    "vanishing": Limit(0.1, "norm of a head's circuit as a share of that at the first reading"),
    "start": Limit(0.5, "mean entropy of attention of fresh weights at step 0"),
    "flat": Limit(0.9995, "mean entropy of attention that stays uniform, or becomes so"),
    "with_loss": Limit(9.0, "rise of the loss in usual changes, times that of a quantity in largest ones", math.inf),
    "later": Limit(0.001, "share of attention to tokens after the query"),
}
"""Name in `thresholds` -> limit."""


def check_thresholds(thresholds: Any) -> dict[str, dict[str, float | None]]:
    """Return limits by pattern of layer names, checked: ``{"decoder.*": {"mean": 0.7, "pair": None}}``."""
    patterns = {} if thresholds is None else thresholds
    if not isinstance(patterns, Mapping) or not all(
        isinstance(pattern, str) and isinstance(limits, Mapping) for pattern, limits in patterns.items()
    ):
        raise MisconfigurationError(
            f"`thresholds` must be a dictionary from patterns of layer names to limits, got {shown(thresholds)}: write "
            '{"*": {"pair": 0.9}}.'
        )
    for pattern, limits in patterns.items():
        for name, value in limits.items():
            argument = f'thresholds["{pattern}"]["{name}"]'
            if name not in LIMITS:
                hint = did_you_mean(name, LIMITS)
                raise MisconfigurationError(f"{argument} is no limit: they are {', '.join(LIMITS)}.{hint}")
            below, is_number = LIMITS[name].below, isinstance(value, numbers.Real) and not isinstance(value, bool)
            if value is not None and not (is_number and 0 < value < below):
                bound = "" if below == math.inf else f" and below {below:g}"
                raise MisconfigurationError(
                    f"{argument} must be a number above 0{bound}, or None to switch it off, got {shown(value)}: write "
                    f"{LIMITS[name].value:g}."
                )
    return {pattern: dict(limits) for pattern, limits in patterns.items()}


def limits_of(layer: str, thresholds: Thresholds) -> dict[str, float]:
    """Return all limits of a layer, infinity where one is off; of several patterns that match, the last one counts."""
    limits = {name: limit.value for name, limit in LIMITS.items()}
    for pattern, changed in thresholds.items():
        if fnmatchcase(layer, pattern):
            limits |= {name: math.inf if value is None else float(value) for name, value in changed.items()}
    return limits
