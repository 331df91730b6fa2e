"""`Thresholds`: the limits of the default rules, and how sure an alarm at one is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from hdi_callback.arguments import did_you_mean, number, shown
from hdi_callback.errors import MisconfigurationError

HEALTHY_RUNS = 60  # of small models, in docs/benchmarks/alerts.md


@dataclass(frozen=True)
class Thresholds:
    """The limits of the default rules; `None` switches one off.

    Attributes:
        mean: mean alignment of a layer's heads in the subspace lens that is a warning.
        energy_mean: the same in the energy lens. Healthy language models come close to it: what they learn first is
            often one direction for all heads.
        critical: mean alignment in the subspace lens that is critical.
        pair: alignment of a pair in the subspace lens that is a warning.
        energy_pair: the same in the energy lens; off, as pairs of healthy heads reach 0.99.
        forecast: alignment in the subspace lens that a trend must be about to reach to be a warning.
        jump: mean alignment in the energy lens that is a warning if it is reached by a late, sudden rise.
        rank: spectral flatness of a head that is a warning, if it has fallen to a tenth of what it was at first.
        tied: probability, under independent initialisation, of heads as alike as they are at step 0.
        trend: rise of ``-log(1 - alignment)`` that is worth a notice.
    """

    mean: float | None = 0.5
    energy_mean: float | None = 0.95
    critical: float | None = 0.9
    pair: float | None = 0.8
    energy_pair: float | None = None
    forecast: float | None = 0.9
    jump: float | None = 0.8
    rank: float | None = 0.005
    tied: float | None = 1e-6
    trend: float | None = 0.05

    def __post_init__(self) -> None:
        for item in fields(self):
            object.__setattr__(self, item.name, check_limit(f"{item.name} of Thresholds", getattr(self, item.name)))


def check_limit(argument: str, value: Any) -> float | None:
    """Check a limit.

    Args:
        argument: where it was written.
        value: what came.

    Returns:
        A number in (0, 1), or `None` where it is switched off.
    """
    if value is None:
        return None
    return number(argument, value, above=0, below=1, example="", remedy="; write null (None) to switch it off")


TRIED = Thresholds()


def certainty_of(limit: float, tried: float | None) -> str:
    """Say how sure an alarm is; a limit that is easier to reach than the tried one has no evidence behind it."""
    if tried is None or limit < tried:
        return "this limit has not been tried on healthy runs"
    return f"none of {HEALTHY_RUNS} healthy runs of small models reached this limit (docs/alerts.md)"


def check_thresholds(thresholds: Any) -> dict[str, dict[str, float | None]] | None:
    """Check limits by layer.

    Args:
        thresholds: pattern of layer names -> limits (see `Thresholds`), or `None`.

    Returns:
        The same.

    Raises:
        MisconfigurationError: if it has another form, or a limit is unknown or cannot be reached.

    Example:
        >>> check_thresholds({"*": {"pair": 0.9}})
        {'*': {'pair': 0.9}}
    """
    known = [item.name for item in fields(Thresholds)]
    if thresholds is None:
        return None
    if isinstance(thresholds, Thresholds):
        changed = {name: value for name in known if (value := getattr(thresholds, name)) != getattr(TRIED, name)}
        raise MisconfigurationError(f'`thresholds` are given by pattern of layer names: write {{"*": {changed}}}.')
    if not isinstance(thresholds, Mapping):
        raise MisconfigurationError(
            f'`thresholds` must be a dictionary, got {shown(thresholds)}: write {{"*": {{"pair": 0.9}}}}.'
        )
    checked: dict[str, dict[str, float | None]] = {}
    for pattern, limits in thresholds.items():
        if not isinstance(pattern, str):
            raise MisconfigurationError(
                f'`thresholds` must have patterns of layer names as keys, got {shown(pattern)}: write {{"*": ...}}.'
            )
        if not isinstance(limits, Mapping):
            inner = f'{{"{pattern}": {shown(limits)}}}' if pattern in known else '{"pair": 0.9}'
            outer = "*" if pattern in known else pattern
            raise MisconfigurationError(
                f"`thresholds` for {pattern!r} must be a dictionary of limits, got {shown(limits)}: write "
                f'{{"{outer}": {inner}}}.'
            )
        checked[pattern] = {}
        for name, limit in limits.items():
            if name not in known:
                raise MisconfigurationError(
                    f"`thresholds` for {pattern!r} name {shown(name)}, which is none of {', '.join(known)}."
                    f"{did_you_mean(name, known)}"
                )
            checked[pattern][name] = check_limit(f'thresholds["{pattern}"]["{name}"]', limit)
    return checked
