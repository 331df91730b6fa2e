"""Parts of alert messages: numbers, heads, earlier values, remedies."""

from __future__ import annotations

from collections.abc import Sequence

from hdi_callback.monitoring.alerts import Row, Series
from hdi_callback.monitoring.rules.lenses import WORST, Lens, pair_of

SEPARATE = (
    'ReviveHeads(max_output_error=1) or DiversityPenalty(measure="circuit"), after which heads attended to different '
    "things in trials, at no cost in loss"
)
"""What helps against heads that have merged (docs/evidence.md, interventions one at a time)."""

NO_REMEDY = "no remedy has been shown to help"


def named_groups(groups: Sequence[Sequence[int]], what: str = "nearly one head") -> str:
    """A clause about groups of heads.

    Args:
        groups: at least one, of two heads or more.
        what: what each group is.

    Returns:
        ``"heads 1, 2 and 3 are nearly one head, and so are heads 4 and 5"``.
    """
    first, *others = (named_heads(group) for group in groups)
    return f"{first} are {what}" + "".join(f", and so are {other}" for other in others)


def named_heads(heads: Sequence[int]) -> str:
    """Heads by their numbers.

    Args:
        heads: at least one.

    Returns:
        ``"head 1"``, ``"heads 1, 2 and 3"``.
    """
    if len(heads) == 1:
        return f"head {heads[0]}"
    return f"heads {', '.join(str(head) for head in heads[:-1])} and {heads[-1]}"


def decimal(value: float) -> str:
    """A number in [-1, 1] with two digits: 0.93."""
    return f"{value:.2f}"


def row_before(series: Series) -> Row | None:
    """The reading to compare with: ten readings ago, or the oldest one."""
    return series.rows[max(0, len(series.rows) - 11)] if len(series.rows) > 1 else None


def earlier(series: Series, metric: str) -> str:
    """A clause with the value of a metric some readings ago.

    Args:
        series: the readings of a layer.
        metric: its name.

    Returns:
        A clause that begins with a comma; empty if it is not known.
    """
    row = row_before(series)
    if row is None or metric not in row.values:
        return ""
    return f", {decimal(row.values[metric])} {series.latest.step - row.step} steps ago"


def pair_earlier(series: Series, lens: Lens, pair: tuple[int, ...]) -> str:
    """A clause with the alignment of a pair some readings ago.

    Args:
        series: the readings of a layer.
        lens: the lens of the alignment.
        pair: two heads.

    Returns:
        A clause that begins with a comma; empty if it is not known.
    """
    row = row_before(series)
    if row is None or WORST[lens] not in row.values:
        return ""
    value, steps = decimal(row.values[WORST[lens]]), series.latest.step - row.step
    # The pair's own value is known if it was the worst pair then; otherwise the worst value bounds it.
    return (
        f", {value} {steps} steps ago"
        if pair_of(row, lens) == pair
        else f", {steps} steps ago no pair was above {value}"
    )


def shared_directions(series: Series) -> str:
    """A clause about the directions that heads share in the energy lens.

    Args:
        series: the readings of a layer.

    Returns:
        A clause without its end, ``"one direction has taken"``.
    """
    spread = [value for value in series.latest.arrays.get("effective_rank", ()) if value > 0]
    if not spread:
        return "the same directions have taken"
    widest = max(spread)
    return "one direction has taken" if widest < 2 else f"the same few directions (about {widest:.0f}) have taken"
