"""`Thresholds`: the limits of the default rules."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from hdi_callback.arguments import did_you_mean, number, shown
from hdi_callback.errors import MisconfigurationError


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
        scores: cosine of the QK circuits of two heads that is a warning. This and the following are asked only where
            their metric is measured: ``metrics=[...]``.
        messages: cosine of the OV circuits of two heads, where it was below 0.5 at first.
        alike: cosine of the attention of two heads, with the uniform part taken out; off, as the heads of a healthy
            cross-attention all come to attend to the same tokens.
        entropy: mean entropy of attention over log n, below which it is a warning.
        logit: largest score.
        sink: attention to one position, of the head that gives it least; off, as no run was detected by it alone or
            first, and large language models have such sinks in health.
        tokens: mean cosine of two input tokens of the layer, at three readings in a row.
        contribution: share of a head in the output, below which it is a warning; off, as it predicted nothing.
        start: mean entropy of attention at step 0 of fresh weights, below which it is a warning.
        flat: mean entropy of attention that is a warning if it was never lower, after 15 readings.
        later: share of attention to later tokens, where they were hidden before.
        vanishing: norm of a head's circuit over what it was at first, below which it is a warning.
        weight_jump: relative change of the weights of a head from one reading to the next, if it is four times the
            largest before of the head that moved least.
        unchanged: share of the weights of a layer that are, to the last bit, what they were at the reading before.
        inputs: factor by which the effective rank of the input tokens of a layer falls at once, if it never
            changed by nearly as much before.
        shrink: mean norm of the queries or the keys over the least at any reading before, at two readings in a row.
        dead: norm of a head's key weight over what it was, or over that of the heads beside it; off, as it detected
            nothing that `vanishing` did not.
        narrow: spectral flatness of a head over what it was twelve readings before, and over what it was at first.
        sharpen: factor by which the mean entropy of attention falls within eight readings, if it never changed by
            nearly as much before.
        flatten: factor by which the mean entropy of attention comes nearer to that of uniform attention at once, at
            four readings in a row.
    """

    mean: float | None = 0.5
    energy_mean: float | None = 0.95
    critical: float | None = 0.9
    pair: float | None = 0.8
    energy_pair: float | None = None
    forecast: float | None = 0.9
    jump: float | None = 0.8
    rank: float | None = 0.05
    tied: float | None = 1e-6
    trend: float | None = 0.05
    scores: float | None = 0.9
    messages: float | None = 0.9
    alike: float | None = None
    entropy: float | None = 0.01
    logit: float | None = 50.0
    sink: float | None = None
    tokens: float | None = 0.998
    contribution: float | None = None
    start: float | None = 0.5
    flat: float | None = 0.9995
    later: float | None = 0.001
    vanishing: float | None = 0.1
    weight_jump: float | None = 0.05
    unchanged: float | None = 0.9
    inputs: float | None = 1.4
    shrink: float | None = 0.5
    dead: float | None = None
    narrow: float | None = 0.4
    sharpen: float | None = 4.0
    flatten: float | None = 3.0

    def __post_init__(self) -> None:
        for item in fields(self):
            limit = check_limit(f"{item.name} of Thresholds", getattr(self, item.name), below=_BELOW.get(item.name, 1))
            object.__setattr__(self, item.name, limit)


_BELOW = {"logit": math.inf, "weight_jump": math.inf, "inputs": math.inf, "sharpen": math.inf, "flatten": math.inf}


def check_limit(argument: str, value: Any, *, below: float = 1) -> float | None:
    """Check a limit.

    Args:
        argument: name of the argument.
        value: its value.
        below: upper bound.

    Returns:
        A number above 0, or `None` where it is switched off.
    """
    if value is None:
        return None
    return number(argument, value, above=0, below=below, example="", remedy="; write null (None) to switch it off")


TRIED = Thresholds()


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
            checked[pattern][name] = check_limit(f'thresholds["{pattern}"]["{name}"]', limit, below=_BELOW.get(name, 1))
    return checked
