"""The statistics of healthy runs: how far each metric came, and how many runs raised a rule."""

from __future__ import annotations

from dataclasses import dataclass

HEALTHY_RUNS = 144  # of small models, in docs/benchmarks/alerts-*.md
HEALTHY_RUNS_WITH_ROWS = 1298  # in docs/benchmarks/faults.json.gz
HEALTHY_RUNS_JUDGED = 1095  # of these, judged by the present rules


@dataclass(frozen=True)
class _Peak:
    """The extreme of a metric over healthy runs.

    Attributes:
        value: the largest, or least, value in any of them.
        runs: number of runs.
        is_least: whether small values are the bad ones.
        digits: decimals in messages.
        of: reference of the value, if it is a share or a multiple.
    """

    value: float
    runs: int = HEALTHY_RUNS
    is_least: bool = False
    digits: int = 2
    of: str = ""


_HEALTHY_PEAKS = {
    "hdi_alignment": _Peak(0.39, HEALTHY_RUNS + HEALTHY_RUNS_WITH_ROWS),
    "hdi_energy_alignment": _Peak(0.94, HEALTHY_RUNS + HEALTHY_RUNS_WITH_ROWS),
    "hdi_worst_alignment": _Peak(0.459, HEALTHY_RUNS + HEALTHY_RUNS_WITH_ROWS),
    "hdi_energy_worst_alignment": _Peak(0.99),
    "circuit_qk_worst": _Peak(0.545, HEALTHY_RUNS_WITH_ROWS),
    "attention_entropy": _Peak(0.374, HEALTHY_RUNS_WITH_ROWS, is_least=True),
    "attention_logit": _Peak(44.5, HEALTHY_RUNS_WITH_ROWS, digits=0),
    "attention_sink": _Peak(0.878, HEALTHY_RUNS_WITH_ROWS),
    "became flat": _Peak(3, HEALTHY_RUNS_WITH_ROWS, digits=0, of=" readings in a row"),
    "vanishing weights": _Peak(0.3676, HEALTHY_RUNS_JUDGED, is_least=True, of=" of the first norm"),
    "dead heads": _Peak(0.7083, HEALTHY_RUNS_JUDGED, is_least=True, of=" of the first norm"),
    "falling rank": _Peak(0.7298, HEALTHY_RUNS_JUDGED, is_least=True, of=" of the first flatness"),
    "weight jump": _Peak(2.204, HEALTHY_RUNS_JUDGED, of=" times the largest change before"),
    "sudden shrink": _Peak(0.8665, HEALTHY_RUNS_JUDGED, is_least=True, of=" of the least norm before"),
    "later tokens": _Peak(0.0, HEALTHY_RUNS_JUDGED, digits=3),
    "merged messages": _Peak(0.4992, HEALTHY_RUNS_JUDGED),
    "fewer keys": _Peak(1.0, HEALTHY_RUNS_JUDGED, is_least=True, of=" of the keys"),
    "tokens alike": _Peak(0.9942, HEALTHY_RUNS_JUDGED, digits=3),
    "narrowing heads": _Peak(0.7437, HEALTHY_RUNS_JUDGED, is_least=True, of=" of the flatness before"),
    "sudden sharpening": _Peak(1.864, HEALTHY_RUNS_JUDGED, of=" times"),
    "sudden flattening": _Peak(1.637, HEALTHY_RUNS_JUDGED, of=" times"),
    "sharp from the start": _Peak(8.92, HEALTHY_RUNS_JUDGED, digits=1),
}
"""Metric, or rule -> its extreme over the healthy runs of docs/benchmarks/alerts-*.md and faults.json.gz."""

_OF_SEVERAL: dict[str, dict[str, float]] = {
    "flat attention": {"limit": 0.9995, "readings": 15},
    "frozen heads": {"readings": 3},
    "inputs lose rank": {"fall": 1.4, "factor": 4.0},
    "one key": {},
    "rounded away": {"share": 0.9, "readings": 3},
    "shared direction": {"limit": 0.8},
    "untrained weights": {"readings": 5},
}
"""Rules that judge more than one number, with the arguments under which healthy runs were judged by them."""

_RAISED = {"inputs lose rank": 1}
"""Rule -> number of healthy runs that raised it, if any did."""


def healthy_peak(metric: str, limit: float) -> str:
    """A clause with the limit that was reached, and how far the metric came in healthy runs.

    Args:
        metric: the metric, or the rule.
        limit: the limit.

    Returns:
        The clause; empty if nothing is known.

    Example:
        >>> healthy_peak("attention_entropy", 0.01)
        'the limit is 0.01, and none of 1298 healthy runs of small models fell below 0.37'
    """
    peak = _HEALTHY_PEAKS.get(metric)
    if peak is None:
        return ""
    at, came = f"{limit:.{peak.digits}f}{peak.of}", f"{peak.value:.{peak.digits}f}"
    runs = f"{peak.runs} healthy runs of small models"
    if limit < peak.value if peak.is_least else limit > peak.value:
        so = f"none of {runs} fell below {came}" if peak.is_least else f"{runs} came to {came} at most"
        return f"the limit is {at}, and {so}"
    return f"the limit is {at}, which healthy runs reach: of {runs} one came to {came}"


def how_often_raised(rule: str, **arguments: float) -> str:
    """A clause with the number of healthy runs that raised a rule which judges several numbers.

    Args:
        rule: its name.
        **arguments: the arguments of the rule.

    Returns:
        The clause; empty if healthy runs were judged with other arguments.

    Example:
        >>> how_often_raised("frozen heads", readings=3)
        'none of 1095 healthy runs of small models raised "frozen heads"'
        >>> how_often_raised("frozen heads", readings=1)
        ''
    """
    if _OF_SEVERAL[rule] != arguments:
        return ""
    return f'{_RAISED.get(rule, "none")} of {HEALTHY_RUNS_JUDGED} healthy runs of small models raised "{rule}"'
