"""Judge the runs with the rules as they were fixed before them, and write what comes out.

python -m tests.experiments.collapse.report --part again --output docs/benchmarks/alerts-again.md
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scipy.stats import binomtest

from hdi_callback.monitoring.alerts import Alert, is_at_least
from hdi_callback.monitoring.history import read_records
from hdi_callback.monitoring.readings import Record
from hdi_callback.monitoring.rules import default_rules
from hdi_callback.monitoring.rules.replay import replay
from tests.experiments.collapse.forces import KINDS
from tests.experiments.collapse.plan import EVERY, HEALTHY, PARTS
from tests.experiments.collapse.run import RESULTS
from tests.experiments.pages import publish

# The alignment whose 0.9 is the collapse, for each kind; the first that is reached counts.
_SUBSPACE = ("hdi_alignment", "hdi_worst_alignment")
_COLLAPSE: dict[str, tuple[str, ...]] = {"shared direction": ("hdi_energy_alignment",), "falling rank": ()}
_ARRIVED = 0.9

# Each part is judged with the limits that were fixed before it; only this one was changed since.
_LIMITS_THEN: dict[str, dict[str, float | None]] = {"confirming": {"jump": 0.65}, "looked-at": {"jump": 0.65}}


@dataclass(frozen=True)
class Run:
    """One finished run, and what the rules say of it."""

    kind: str
    start: int
    layer: str
    layers: int
    records: list[Record]
    alerts: list[Alert]
    result: dict[str, Any]

    @property
    def begin(self) -> int:
        """Step from which an alert is no false alarm."""
        return 0 if self.kind in ("tied initialisation", "high learning rate") else self.start

    @property
    def alarms(self) -> list[Alert]:
        """Warnings and above that begin."""
        return [alert for alert in self.alerts if is_at_least(alert.level, "warning") and not alert.is_resolved]

    @property
    def false_alarms(self) -> list[Alert]:
        if self.kind == HEALTHY:
            return self.alarms
        return [alert for alert in self.alarms if alert.step < self.begin]

    @property
    def arrival(self) -> int | None:
        """Step at which the collapse is complete, once it has begun."""
        metrics = _COLLAPSE.get(self.kind, _SUBSPACE)
        names = list(self.records[0].layers) if self.kind == "high learning rate" else [self.layer]
        return next(
            (
                record.step
                for record in self.records
                for name in names
                if record.step >= self.begin
                and any(record.layers[name].values.get(metric, 0) >= _ARRIVED for metric in metrics)
            ),
            None,
        )

    def first(self, rule: str | None = None) -> int | None:
        """Step of the first alarm about the collapse, of one rule or of any."""
        steps = [
            alert.step
            for alert in self.alarms
            if alert.step >= self.begin
            and rule in (None, alert.rule)
            and (alert.layer == self.layer or self.kind == "high learning rate")
        ]
        return min(steps, default=None)


def load(folder: Path) -> list[Run]:
    runs = []
    limits = {"*": _LIMITS_THEN.get(folder.name, {})}
    for path in sorted(folder.glob("*.json")):
        result = json.loads(path.read_text())
        spec, history = result["spec"], path.with_suffix(".jsonl")
        records, alerts = read_records(history), replay(history, thresholds=limits)
        layers = len(records[0].layers)
        runs.append(Run(spec["kind"], spec["start"], result["layer"], layers, records, alerts, result))
    return runs


def share(hits: int, of: int) -> str:
    """Write a share with its exact 95 % interval (Clopper and Pearson)."""
    if of == 0:
        return "-"
    interval = binomtest(hits, of).proportion_ci(0.95, method="exact")
    return f"{hits}/{of} ({100 * interval.low:.0f}-{100 * interval.high:.0f} %)"


def bound(hits: int, of: int) -> str:
    """Write a count with the upper 95 % bound of its rate (one-sided)."""
    high = binomtest(hits, of, alternative="less").proportion_ci(0.95, method="exact").high
    return f"{hits}/{of} (below {100 * high:.1f} %)"


def middle(values: Sequence[int]) -> str:
    return f"{statistics.median(values):.0f} ({min(values)} to {max(values)})" if values else "-"


def false_alarm_table(runs: Sequence[Run]) -> list[str]:
    healthy = [run for run in runs if run.kind == HEALTHY]
    lines = ["| rule | healthy runs with an alarm (95 % bound) | their layers |", "|---|---|---|"]
    layers = sum(run.layers for run in healthy)
    for name in [*(rule.name for rule in default_rules() if rule.name != "trend"), "any of them"]:
        chosen = [[alert for alert in run.false_alarms if name in (alert.rule, "any of them")] for run in healthy]
        touched = sum(len({alert.layer for alert in alerts}) for alerts in chosen)
        lines.append(f"| {name} | {bound(sum(map(bool, chosen)), len(healthy))} | {bound(touched, layers)} |")
    noticed = sum(any(alert.rule == "trend" for alert in run.alerts) for run in healthy)
    lines.append(f"| trend (a notice, no alarm) | {bound(noticed, len(healthy))} | |")
    return lines


def detection_table(runs: Sequence[Run]) -> list[str]:
    lines = [
        f"| collapse | runs | reach {_ARRIVED} | alarm raised | before {_ARRIVED} | delay in steps | lead in steps |",
        "|---|---|---|---|---|---|---|",
    ]
    for kind in (kind for kind in KINDS if any(run.kind == kind for run in runs)):
        chosen = [run for run in runs if run.kind == kind]
        arrived = [run for run in chosen if run.arrival is not None]
        caught = [run for run in chosen if run.first() is not None]
        ahead = [run for run in arrived if is_before(run)]
        delays = [run.first() - run.begin for run in caught]  # type: ignore[operator]
        leads = [run.arrival - run.first() for run in arrived if run.first() is not None]  # type: ignore[operator]
        lines.append(
            f"| {kind} | {len(chosen)} | {len(arrived)} | {share(len(caught), len(chosen))} | "
            f"{share(len(ahead), len(arrived))} | {middle(delays)} | {middle(leads)} |"
        )
    return lines


def is_before(run: Run) -> bool:
    """Return whether an alarm came before the collapse was complete; equal heads may be reported at step 0."""
    first, arrival = run.first(), run.arrival
    assert arrival is not None
    return first is not None and (first < arrival or first == arrival == 0)


def rule_table(runs: Sequence[Run]) -> list[str]:
    rules = [rule.name for rule in default_rules() if rule.name != "trend"]
    lines = [f"| collapse | {' | '.join(rules)} |", "|---" * (len(rules) + 1) + "|"]
    for kind in (kind for kind in KINDS if any(run.kind == kind for run in runs)):
        chosen = [run for run in runs if run.kind == kind]
        cells = []
        for rule in rules:
            delays = [run.first(rule) - run.begin for run in chosen if run.first(rule) is not None]  # type: ignore[operator]
            cells.append(f"{len(delays)}, after {statistics.median(delays):.0f}" if delays else "-")
        lines.append(f"| {kind} | {' | '.join(cells)} |")
    return lines


def range_table(runs: Sequence[Run]) -> list[str]:
    """How far healthy runs go, by task: the ground on which the limits stand."""
    lines = ["| largest in healthy runs | digits: median (largest) | text: median (largest) |", "|---|---|---|"]
    metrics = {
        "mean alignment, subspace": "hdi_alignment",
        "mean alignment, energy": "hdi_energy_alignment",
        "worst pair, subspace": "hdi_worst_alignment",
        "worst pair, energy": "hdi_energy_worst_alignment",
    }
    for name, metric in metrics.items():
        cells = []
        for task in ("digits", "text"):
            tops = [
                max(layer.values[metric] for record in run.records for layer in record.layers.values())
                for run in runs
                if run.kind == HEALTHY and run.result["spec"]["shape"]["task"] == task
            ]
            cells.append(f"{statistics.median(tops):.2f} ({max(tops):.2f})")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def report(folder: Path, part: str) -> list[str]:
    runs = load(folder / part)
    collapses = [run for run in runs if run.arrival is not None and run.kind != HEALTHY]
    early = [run for run in runs if run.kind != HEALTHY and run.false_alarms]
    healthy = [run for run in runs if run.kind == HEALTHY]
    tasks = [sum(run.result["spec"]["shape"]["task"] == task for run in healthy) for task in ("digits", "text")]
    learnt = sum(run.result["train_loss"] < run.result["first_loss"] - 0.5 for run in healthy)
    minutes = sum(run.result["cpu_seconds"] for run in runs) / 60
    return [
        f"Made by `python -m tests.experiments.collapse.run --part {part}` and",
        f"`python -m tests.experiments.collapse.report --part {part} --output docs/benchmarks/alerts-{part}.md`.",
        f"A reading every {EVERY} steps; seeds are in `tests/experiments/collapse/plan.py`. Brackets: 95 % intervals.",
        "",
        f"{len(healthy)} healthy runs ({tasks[0]} on digits, {tasks[1]} on text; {learnt} of them lowered their "
        f"training loss by more than 0.5) and {len(runs) - len(healthy)} that were made to collapse; "
        f"{minutes:.0f} minutes of one core.",
        "",
        "#### False alarms",
        "",
        *false_alarm_table(runs),
        "",
        f"In the runs that collapse, before the collapse begins: {bound(len(early), len(runs) - len(healthy))}.",
        "",
        "#### Collapses",
        "",
        *detection_table(runs),
        "",
        f"Of all collapses that reach alignment {_ARRIVED}, an alarm came before in "
        f"{share(sum(map(is_before, collapses)), len(collapses))}.",
        "",
        "#### By rule: runs with an alarm, and the median delay in steps",
        "",
        *rule_table(runs),
        "",
        "#### How far healthy runs go",
        "",
        *range_table(runs),
    ]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", choices=PARTS, required=True)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(argv)
    publish(report(options.results, options.part), options.output)


if __name__ == "__main__":
    main()
