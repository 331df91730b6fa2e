"""The forward outside attention as a part of the contract: which operations each module runs, and how often.

Counted are operations on what depends on parameters and on the batch, with those numbers that are no sizes (the
probability of dropout, factors, what a norm adds), up to the last map: what follows makes the loss. Modules whose
paths differ by numbers alone are one group: where one of them varies from batch to batch, as experts and dropped layers
do, none of them is compared.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from hdi_callback.attention import operations as ops
from hdi_callback.attention.discovery.find import name_without_wrappers
from hdi_callback.attention.tape import MADE, WEIGHT, Step, Tape
from hdi_callback.checks import Facts

__all__ = ["GONE", "OPERATIONS", "loses", "operations_of", "tell_operations"]

OPERATIONS = "operations"

Counts = dict[str, tuple[int, tuple[float, ...]]]
"""Name of an operation -> how often it runs, and its numbers."""


def operations_of(tape: Tape, facts: Iterable[Facts]) -> dict[str, dict[str, Counts]]:
    """Return group -> module -> its operations, but for those from the maps of an attention to its output."""
    steps = tape.steps
    inside = {number for each in facts for number in range(*each.steps)}
    last = max((step.number for step in steps if step.op in _MAPS and _has_parameter(step)), default=-1)
    groups: dict[str, dict[str, Counts]] = {}
    for step in steps[: last + 1]:
        if step.module is None:
            continue
        path = name_without_wrappers(step.module)
        for end in [*(match.start() for match in re.finditer(r"\.", path)), len(path)]:  # also modules around it run
            counts = groups.setdefault(re.sub(r"\d+", "*", path[:end]), {}).setdefault(path[:end], {})
        if step.number in inside or step.op in ops.COPIES:
            continue
        name, numbers = _named(step)
        count, before = counts.get(name, (0, ()))
        counts[name] = count + 1, tuple(sorted({*before, *numbers}))
    return groups


_MAPS = {*ops.MATMULS, *ops.CONVOLUTIONS}


def _has_parameter(step: Step) -> bool:
    return any(view.cell.kind in {WEIGHT, MADE} and view.cell.is_mapped for view in step.inputs)


def _named(step: Step) -> tuple[str, list[float]]:
    numbers = [float(f"{value:.4g}") for value in (*step.args, *step.kwargs.values()) if type(value) is float]
    if step.op in {"bernoulli", *ops.DROPOUTS}:
        return "dropout", [float(f"{1 - number:.4g}") if step.op == "bernoulli" else number for number in numbers]
    return "a map" if step.op in ops.MATMULS and _has_parameter(step) else step.op, numbers


def tell_operations(before: Mapping[str, Counts], after: Mapping[str, Counts]) -> dict[str, tuple[str, ...]]:
    """Return what has changed -> the modules in which it has."""
    told: dict[str, tuple[str, ...]] = {}
    for path in {**before, **after}:
        old, new = before.get(path, {}), after.get(path, {})
        texts = [
            f"{name} runs {_times(*new.get(name, (0, ())))} in {{}}, and {_times(*old.get(name, (0, ())))} before"
            for name in {**old, **new} if old.get(name) != new.get(name)
        ]  # fmt: skip
        for text in texts if path in before and path in after else [GONE if path in before else "{} runs now"]:
            told[text] = (*told.get(text, ()), path)
    return told


GONE = "nothing runs in {} any more"


def loses(before: Mapping[str, Counts], after: Mapping[str, Counts]) -> bool:
    """Return whether a module that goes on has lost an operation, or has another in its place, but for dropout."""
    return any(
        count > after[path].get(name, (0, ()))[0]
        for path in before.keys() & after.keys()
        for name, (count, _) in before[path].items()
        if name != "dropout"
    )


def _times(count: int, numbers: tuple[float, ...]) -> str:
    times = "never" if not count else "once" if count == 1 else f"{count} times"
    return f"{times} with {' and '.join(f'{number:.4g}' for number in numbers)}" if numbers else times
