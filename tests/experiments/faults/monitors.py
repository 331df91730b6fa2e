"""The monitors that are compared: each gives a score at every reading, the higher the worse."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from typing import Any

from tests.experiments.faults.plan import EVERY

Result = dict[str, Any]
Scores = list[tuple[int, float]]

ON_KEYS = (
    "mean alignment", "worst pair", "forecast", "shared direction", "dead heads", "falling rank", "weights not finite",
    "tied heads", "narrowing heads",
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
    values = run["norms"] if run["norms"][0] else []
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


def _fall(metric: str) -> Callable[[Result], Scores]:
    """How far a norm has fallen against the first reading, as a logarithm."""

    def scores(run: Result) -> Scores:
        began = run["readings"][0]["values"] if run["readings"] else {}
        first = {name: layer.get(metric) for name, layer in began.items()}
        found = []
        for reading in run["readings"]:
            falls = [
                math.log(first[name] / max(layer[metric], 1e-12))
                for name, layer in reading["values"].items()
                if layer.get(metric) is not None and first.get(name)
            ]
            if falls:
                found.append((reading["step"], max(falls)))
        return found

    return scores


def _finder(run: Result) -> Scores:
    """Warnings of the package itself before training, as of heads that cannot be told apart."""
    return [(0, float(bool(run["warnings"])))]


_MEASURES: dict[str, Callable[[Result], Scores]] = {
    "warnings before training": _finder,
    "loss spike": _of_losses("losses", _spike),
    "gradient norm, against its past": _of_losses("gradients", _growth),
    "norm of attention's weights, against the start": _norms,
    "HDI of keys: mean alignment": _reading("hdi_alignment", 1),
    "HDI of keys: worst pair": _reading("hdi_worst_alignment", 1),
    "HDI of keys: mean alignment by energy": _reading("hdi_energy_alignment", 1),
    "norm of keys falls": _fall("hdi_head_norm"),
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
    "attention to later tokens": _reading("attention_ahead", 1),
    "head correlation of outputs": _reading("head_correlation", 1),
    "contribution of the weakest head": _reading("head_contribution_min", -1),
    "movement of the slowest head, too little": _reading("head_movement_min", -1),
    "movement of the slowest head, too much": _reading("head_movement_min", 1),
    "share of weights that do not change": _reading("head_unchanged", 1),
    "norm of QK circuits falls": _fall("circuit_qk_norm"),
    "norm of OV circuits falls": _fall("circuit_ov_norm"),
    "tokens: mean cosine": _reading("token_cosine", 1),
    "tokens: effective rank": _reading("token_rank", -1),
}


def _of_made_or_published(name: str, measure: Callable[[Result], Scores]) -> Callable[[Result], Scores]:
    """Measure a run that was made here; of one that was published take the scores that are kept."""

    def scores(run: Result) -> Scores:
        if "scores" not in run:
            return measure(run)
        return [(step, math.inf if score is None else score) for step, score in run["scores"][name]]

    return scores


MONITORS = {name: _of_made_or_published(name, measure) for name, measure in _MEASURES.items()}


def alarm_of(scores: Scores, limit: float, start: int) -> int | None:
    """Give the step of the first score beyond a limit at or after a step."""
    return next((step for step, score in scores if step >= start and score > limit), None)


def alarm_of_rules(run: Result, start: int, *, weights_alone: bool = False) -> int | None:
    """Give the step of the first alert of the rules as they ship, notices aside; or of those on key weights alone."""
    steps = [
        step
        for step, _, rule, level in run["alerts"]
        if level != "notice" and step >= start and (rule in ON_KEYS or not weights_alone)
    ]
    return min(steps, default=None)
