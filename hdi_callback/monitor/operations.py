"""The forward outside attention as a part of the contract: which operations each module runs, and how often.

Counted are operations on what depends on parameters and on the batch, with those numbers that are no sizes (the
probability of dropout, factors, what a norm adds), up to the last map: what follows makes the loss. Modules whose
paths differ by numbers alone are one group: where one of them varies from batch to batch, as experts and dropped layers
do, none of them is compared.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from hdi_callback.attention import operations as ops
from hdi_callback.attention.discovery.find import name_without_wrappers
from hdi_callback.attention.tape import MADE, WEIGHT, Step, Tape
from hdi_callback.checks import Facts

OPERATIONS = "operations"

Counts = dict[tuple[str, str], tuple[int, tuple[float, ...]]]
"""Module and name of an operation, `""` where anything runs in it -> how often it runs, and its numbers."""
GONE = "nothing runs in {} any more"


def operations_of(tape: Tape, facts: Iterable[Facts]) -> dict[str, Counts]:
    """Return group -> its operations, but for those from the maps of an attention to its output."""
    inside = {number for each in facts for number in range(*each.steps)}
    last = max((step.number for step in tape.steps if step.op in ops.MAPS and _has_parameter(step)), default=-1)
    groups: dict[str, Counts] = {}
    for step in tape.steps[: last + 1]:
        path = None if step.module is None else name_without_wrappers(step.module)
        parts = [] if path is None else path.split(".")
        for outer in (".".join(parts[: end + 1]) for end in range(len(parts))):
            groups.setdefault(_group(outer), {})[outer, ""] = 1, ()
        if path is not None and step.number not in inside and step.op not in ops.COPIES:
            name, numbers = _named(step)
            count, before = groups[_group(path)].get((path, name), (0, ()))
            groups[_group(path)][path, name] = count + 1, tuple(sorted({*before, *numbers}))
    return groups


def _group(path: str) -> str:
    return re.sub(r"\d+", "*", path)


def _has_parameter(step: Step) -> bool:
    return any(view.cell.kind in {WEIGHT, MADE} and view.cell.is_mapped for view in step.inputs)


def _named(step: Step) -> tuple[str, list[float]]:
    numbers = [float(f"{value:.4g}") for value in (*step.args, *step.kwargs.values()) if type(value) is float]
    if step.op in {"bernoulli", *ops.DROPOUTS}:
        return "dropout", [float(f"{1 - number:.4g}") if step.op == "bernoulli" else number for number in numbers]
    return "a map" if step.op in ops.MATMULS and _has_parameter(step) else step.op, numbers


def tell_operations(before: Counts, after: Counts) -> dict[str, tuple[str, ...]]:
    """Return what has changed -> the modules in which it has."""
    told: dict[str, tuple[str, ...]] = {}
    for path, name in {**before, **after}:
        new, old = (_times(*counts.get((path, name), (0, ()))) for counts in (after, before))
        text = "{} runs now" if (path, "") in after else GONE
        text = f"{name} runs {new} in {{}}, and {old} before" if name else text
        if new != old and (not name or ((path, "") in before and (path, "") in after)):
            told[text] = (*told.get(text, ()), path)
    return told


def loses(before: Counts, after: Counts) -> bool:
    """Return whether a module that goes on has lost an operation, or has another in its place, but for dropout."""
    return any(
        (path, "") in after and count > after.get((path, name), (0, ()))[0]
        for (path, name), (count, _) in before.items() if name not in {"", "dropout"}
    )  # fmt: skip


def _times(count: int, numbers: tuple[float, ...]) -> str:
    times = "never" if not count else "once" if count == 1 else f"{count} times"
    return f"{times} with {' and '.join(f'{number:.4g}' for number in numbers)}" if numbers else times
