"""Tables of what was told of trainings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from scipy.stats import binomtest

from hdi_callback.monitor import contract
from tests.studies.experiments.held_out.run import HEALTHY

Result = dict[str, Any]
COST = 0.02
"""A fault costs loss if the last twenty steps are above those of the healthy training with its seed by this and 5 %."""


def alarms(result: Result) -> list[dict[str, Any]]:
    """Return the warnings and critical alerts, of a fault those from its onset on."""
    return [
        alert
        for alert in result["alerts"]
        if alert["level"] != "notice" and alert["step"] >= result["onset"] * (result["kind"] != HEALTHY)
    ]


def is_told(result: Result) -> bool:
    return bool(alarms(result))


def is_told_by_rules(result: Result) -> bool:
    return any(alert["rule"] != contract.NAME for alert in alarms(result))


def is_told_by_loss(result: Result) -> bool:
    return any(step >= result["onset"] or result["kind"] == HEALTHY for step in result["of_loss"])


def has_cost(result: Result, healthy: dict[tuple[str, int], float]) -> bool:
    """Return whether the loss at the end is above that of the healthy training, or not a number."""
    usual = healthy.get((result["task"], result["seed"]), result["loss"])
    return not result["loss"] <= usual + max(COST, 0.05 * abs(usual))


def page(results: Sequence[Result]) -> str:
    """Write all tables."""
    healthy = [result for result in results if result["kind"] == HEALTHY]
    faulty = [result for result in results if result["kind"] != HEALTHY]
    usual = {(result["task"], result["seed"]): result["loss"] for result in healthy}
    costly = [result for result in faulty if has_cost(result, usual)]
    free = [result for result in faulty if result not in costly]
    lines = [
        "| trainings | told | by the rules | by the loss alone | told, and not by the loss |",
        "|---|---|---|---|---|",
    ]
    for name, group in (("faults", faulty), ("faults that cost loss", costly), ("faults that cost none", free)):
        only = [result for result in group if is_told(result) and not is_told_by_loss(result)]
        lines.append(f"| {name} | {_rates(group)} | {len(only)} |")
    lines.append(f"| healthy, accused | {_rates(healthy)} | |")
    lines += ["", "| fault | told | by the loss alone | cost loss | rules that state it |", "|---|---|---|---|---|"]
    for kind in dict.fromkeys(sorted(result["kind"] for result in faulty)):
        group = [result for result in faulty if result["kind"] == kind]
        rules = Counter(alarms(result)[0]["rule"] for result in group if alarms(result))
        told, by_loss = sum(map(is_told, group)), sum(map(is_told_by_loss, group))
        cost = sum(has_cost(result, usual) for result in group)
        names = ", ".join(f"{rule} {count}" for rule, count in rules.most_common())
        lines.append(f"| {kind} | {told}/{len(group)} | {by_loss}/{len(group)} | {cost} | {names} |")
    lines += ["", "| healthy task | accused | by the loss alone | rules |", "|---|---|---|---|"]
    for task in dict.fromkeys(sorted(result["task"] for result in healthy)):
        group = [result for result in healthy if result["task"] == task]
        rules = Counter(alert["rule"] for result in group for alert in alarms(result))
        names = ", ".join(f"{rule} {count}" for rule, count in rules.most_common())
        told, by_loss = sum(map(is_told, group)), sum(map(is_told_by_loss, group))
        lines.append(f"| {task} | {told}/{len(group)} | {by_loss}/{len(group)} | {names} |")
    return "\n".join(lines) + "\n"


def _rates(results: Sequence[Result]) -> str:
    return " | ".join(_rate(map(tells, results)) for tells in (is_told, is_told_by_rules, is_told_by_loss))


def _rate(told: Iterable[bool]) -> str:
    """Return how many were told, with the interval of Wilson."""
    each = list(told)
    if not each:
        return "-"
    interval = binomtest(sum(each), len(each)).proportion_ci(method="wilson")
    return f"{sum(each)} of {len(each)} ({100 * interval.low:.0f} to {100 * interval.high:.0f} %)"
