"""The page of results: which faults were reported, how soon and where, and which healthy trainings raised an alarm."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from scipy.stats import binomtest

from hdi_callback.rules import RULES
from tests.studies.experiments.faults.kinds import FAULTS, START, Fault
from tests.studies.experiments.faults.plan import HEALTHY, HELD_OUT, plan
from tests.studies.experiments.faults.trainings import BASES, PROVOKED

Result = dict[str, Any]

ABOUT = """\
# Trainings with faults

Made by `python -m tests.studies.experiments.faults --output docs/faults.md`: {made:,} of {planned:,} planned
trainings, the first in a drawn order. Small models learn text, digits, a table, or to reverse a sequence, mostly for
100 steps; the default rules judge a reading every five steps. A fault begins at step {start}, or with the training.
It is *reported* if a warning or a critical alert follows. Seeds are *held out* if nothing had used them when the
limits of the rules were set.
"""

BY_FAULT = """
*Steps*: from the fault to its first alert, median. *Place*: of the reported faults of one layer, or of some heads of
it, how often the first alerts name exactly that layer, and those heads. *Refused*: no layer could be read, and a
warning before training says so. In italics: attention cannot show it.
"""

LIMITS = """
## What it does not tell

- The rules were written with these kinds of faults in view, and sixteen were chosen from twenty-eight on these
  trainings, those on held-out seeds among them.
- Models have at most eight heads and four layers (an encoder of six, trained before, excepted) and learn in seconds.
- Most faults are abrupt, and {harmless} of the {reported} that were reported ended with a loss at most 0.05 nats above
  the mean of the healthy trainings.
"""


def page(runs: Sequence[Result]) -> str:
    """Write what came out, as Markdown."""
    about = ABOUT.format(made=len(runs), planned=len(plan()), start=START)
    lines = [about, *_summary(runs), BY_FAULT, *_by_fault(runs), "", _by_training(runs), "", _by_rule(runs)]
    reported = [run for run in runs if run["kind"] != HEALTHY and alarms(run)]
    harmless = sum(cost(run, runs) <= 0.05 for run in reported)
    return "\n".join(lines) + "\n" + LIMITS.format(harmless=harmless, reported=len(reported))


def alarms(run: Result) -> list[dict[str, Any]]:
    """The warnings and critical alerts since the fault began; of a healthy training all."""
    start = FAULTS[run["kind"]].start if run["kind"] in FAULTS else 0
    return [alert for alert in run["alerts"] if alert["level"] != "notice" and alert["step"] >= start]


def cost(run: Result, runs: Sequence[Result]) -> float:
    """How far the final validation loss is above the mean of the healthy trainings of its kind, in nats."""
    healthy = [one["loss"] for one in runs if one["kind"] == HEALTHY and one["base"] == run["base"]]
    return run["loss"] - statistics.fmean(healthy) if healthy else math.nan


def rate(runs: Sequence[Result]) -> str:
    """How many raised an alarm, with its interval."""
    count, of = sum(bool(alarms(run)) for run in runs), len(runs)
    if not of:
        return "-"
    if not count:
        return f"0 of {of} (below {300 / of:.2g} %)"
    interval = binomtest(count, of).proportion_ci(method="wilson")
    return f"{count} of {of} ({100 * interval.low:.0f} to {100 * interval.high:.0f} %)"


def _summary(runs: Sequence[Result]) -> list[str]:
    rows: dict[str, Callable[[Result], bool]] = {
        "with a fault that attention can show": lambda run: run["kind"] in FAULTS and FAULTS[run["kind"]].shows,
        "with a fault that it cannot show": lambda run: run["kind"] in FAULTS and not FAULTS[run["kind"]].shows,
        "healthy": lambda run: run["kind"] == HEALTHY,
    }
    lines = ["| trainings | reported | of these on held-out seeds |", "|---|---|---|"]
    for name, is_meant in rows.items():
        chosen = [run for run in runs if is_meant(run)]
        lines.append(f"| {name} | {rate(chosen)} | {rate([run for run in chosen if run['seed'] >= HELD_OUT])} |")
    return lines


def _by_fault(runs: Sequence[Result]) -> list[str]:
    lines = ["| fault | reported | steps | place |", "|---|---|---|---|"]
    for kind, fault in FAULTS.items():
        chosen = [run for run in runs if run["kind"] == kind]
        found = [run for run in chosen if alarms(run)]
        steps = [alarms(run)[0]["step"] - fault.start for run in found]
        refused = sum(run["readings"] == 0 and bool(run["warnings"]) for run in chosen)
        right = sum(_names_place(run, fault) for run in found)
        cells = [
            kind if fault.shows else f"*{kind}*",
            f"{len(found)}/{len(chosen)}" + (f", {refused} refused" if refused else ""),
            f"{statistics.median(steps):.0f}" if steps else "",
            f"{right}/{len(found)}" if fault.is_of_layer else "",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _names_place(run: Result, fault: Fault) -> bool:
    """Whether the first alarms name the layer of a fault and no other, and if it is one of some heads, these alone."""
    found = alarms(run)
    place: dict[str, set[int]] = {}
    for alert in found:
        if alert["step"] == found[0]["step"]:
            for layer, heads in alert["where"].items():
                place.setdefault(layer, set()).update(heads)
    if place.keys() != {run["layer"]}:
        return False
    heads = place[run["layer"]] or set(range(BASES[run["base"]].heads))  # none are named where it is all of them
    return not fault.heads or heads == set(range(fault.heads))


def _by_training(runs: Sequence[Result]) -> str:
    """One sentence on faults, and one on healthy trainings."""
    shares = []
    for base in BASES:
        chosen = [run for run in runs if run["base"] == base and run["kind"] != HEALTHY and FAULTS[run["kind"]].shows]
        shares.append(f"{base} {sum(bool(alarms(run)) for run in chosen)}/{len(chosen)}")
    healthy = [run for run in runs if run["kind"] == HEALTHY]
    counts = Counter(run["base"] for run in healthy)
    alarmed = Counter(run["base"] for run in healthy if alarms(run))
    seen = "; ".join(f"{base} {alarmed[base]}/{counts[base]}" for base in [*BASES, *PROVOKED])
    return f"Reported by training, of what attention can show: {'; '.join(shares)}.\n\nAlarms in health: {seen}."


def _by_rule(runs: Sequence[Result]) -> str:
    stated = Counter(rule for run in runs if run["kind"] != HEALTHY for rule in {one["rule"] for one in alarms(run)})
    counts = sorted((-stated[rule.name], rule.name) for rule in RULES)
    return (
        f"Faulty trainings in which a rule stated an alert: {', '.join(f'{name} {-count}' for count, name in counts)}."
    )
