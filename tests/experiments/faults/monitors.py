"""The monitors that are compared: each gives a score at every reading, the higher the worse."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from typing import Any

from tests.experiments.faults.plan import EVERY

OFF = ("merged messages", "no contribution")
"""Rules that were asked in these runs and are off by default since, as they told nothing that others did not."""

Result = dict[str, Any]
Scores = list[tuple[int, float]]

BY_DEFAULT = (
    "mean alignment", "worst pair", "forecast", "shared direction", "dead heads", "falling rank", "weights not finite",
    "tied heads",
)  # fmt: skip


def _of_losses(name: str, score: Callable[[float, list[float]], float]) -> Callable[[Result], Scores]:
    def scores(run: Result) -> Scores:
        values = [math.inf if value is None else value for value in run[name]]
        each = [score(values[step], values[max(0, step - 20) : step]) if step >= 10 else -math.inf
                for step in range(len(values))]  # fmt: skip
        return [(step, max(each[max(0, step - EVERY + 1) : step + 1])) for step in range(0, len(values), EVERY)]

    return scores


def _spike(value: float, past: list[float]) -> float:
    known = [one for one in past if math.isfinite(one)]
    if not math.isfinite(value) or not known:
        return math.inf
    middle = statistics.median(known)
    spread = 1.48 * statistics.median(abs(one - middle) for one in known)
    return (value - middle) / (spread + 0.01)


def _growth(value: float, past: list[float]) -> float:
    known = [one for one in past if math.isfinite(one)]
    if not math.isfinite(value) or not known:
        return math.inf
    return math.log10(max(value, 1e-12) / max(statistics.median(known), 1e-12))


def _norms(run: Result) -> Scores:
    values = run["norms"]
    return [
        (EVERY * place, math.inf if value is None else abs(math.log(max(value, 1e-12) / values[0])))
        for place, value in enumerate(values)
    ]


def _reading(metric: str, sign: int) -> Callable[[Result], Scores]:
    def scores(run: Result) -> Scores:
        found = []
        for reading in run["readings"]:
            values = [layer[metric] for layer in reading["values"].values() if metric in layer]
            if values:
                found.append((reading["step"], max(sign * value for value in values)))
        return found

    return scores


def _relative_norm(run: Result) -> Scores:
    began = run["readings"][0]["values"] if run["readings"] else {}
    first = {name: layer.get("hdi_head_norm") for name, layer in began.items()}
    found = []
    for reading in run["readings"]:
        ratios = [
            layer["hdi_head_norm"] / first[name]
            for name, layer in reading["values"].items()
            if layer.get("hdi_head_norm") is not None and first.get(name)
        ]
        if ratios:
            found.append((reading["step"], -min(ratios)))
    return found


MONITORS: dict[str, Callable[[Result], Scores]] = {
    "loss spike": _of_losses("losses", _spike),
    "gradient norm, against its past": _of_losses("gradients", _growth),
    "norm of attention's weights, against the start": _norms,
    "HDI of keys: mean alignment": _reading("hdi_alignment", 1),
    "HDI of keys: worst pair": _reading("hdi_worst_alignment", 1),
    "HDI of keys: mean alignment by energy": _reading("hdi_energy_alignment", 1),
    "norm of keys falls": _relative_norm,
    "HDI of updates falls": _reading("update_hdi", -1),
    "entropy of updates falls": _reading("update_entropy_min", -1),
    "QK circuits: worst pair": _reading("circuit_qk_worst", 1),
    "OV circuits: worst pair": _reading("circuit_ov_worst", 1),
    "keys as they come: worst pair": _reading("hdi_keys_energy_worst_pair", 1),
    "attention: mean entropy falls": _reading("attention_entropy", -1),
    "attention: mean entropy rises": _reading("attention_entropy", 1),
    "attention: sink": _reading("attention_sink", 1),
    "attention: largest score": _reading("attention_logit", 1),
    "attention: heads attend alike": _reading("attention_alike_worst", 1),
    "attention: overlap": _reading("attention_overlap", 1),
    "head correlation of outputs": _reading("head_correlation", 1),
    "contribution of the weakest head": _reading("head_contribution_min", -1),
    "movement of the slowest head, too little": _reading("head_movement_min", -1),
    "movement of the slowest head, too much": _reading("head_movement_min", 1),
    "tokens: mean cosine": _reading("token_cosine", 1),
    "tokens: effective rank": _reading("token_rank", -1),
}


def alarm_of(scores: Scores, limit: float, start: int) -> int | None:
    """Give the step of the first score beyond a limit at or after a step."""
    return next((step for step, score in scores if step >= start and score > limit), None)


def alarm_of_rules(run: Result, start: int, *, default_metrics: bool) -> int | None:
    """Give the step of the first alert of the rules as they ship, notices aside."""
    steps = [
        step
        for step, _, rule, level in run["alerts"]
        if level != "notice" and step >= start and rule not in OFF and (rule in BY_DEFAULT or not default_metrics)
    ]
    return min(steps, default=None)
