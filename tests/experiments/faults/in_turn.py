"""What it costs in faults that are found, if rules see three of four layers at other readings.

python -m tests.experiments.faults.in_turn --results runs/faults --output docs/benchmarks/in-turn.md

The layers of these trainings are small, and are read at every reading. Here their readings are judged again as if they
were wide: without the layers that `LayerRotation` skips. A training has 20 readings or so: after
the first of them a layer has its turn five times, and its circuits two or three times.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hdi_callback.monitoring.metrics import DETAILS, METRICS
from hdi_callback.monitoring.monitor.rotation import EVERY as ROTATED
from hdi_callback.monitoring.monitor.rotation import LayerRotation
from tests.experiments.faults.faults import FAULTS
from tests.experiments.faults.judging import judge_again
from tests.experiments.faults.monitors import Result, alarm_of_rules
from tests.experiments.faults.plan import EVERY, HEALTHY
from tests.experiments.faults.report import read
from tests.experiments.faults.run import RESULTS

KEPT_OF = {
    source: {name for name, metric in METRICS.items() if metric.source == source} | {*DETAILS[source].arrays}
    for source in ROTATED
}
"""Source that is skipped in turn -> its curves, and what is kept of heads."""


def in_turn(run: Result) -> Result:
    """Leave out of a run's readings what `LayerRotation` would have skipped."""
    rotation = LayerRotation(ROTATED)
    wide = [{**layer, "width": 10**6} for layer in run["facts"]]
    readings = []
    for reading in run["readings"]:
        rotation.begin(wide)
        left_out = {
            layer["name"]: {
                key for source in ROTATED if layer["name"] in rotation.skipped(source) for key in KEPT_OF[source]
            }
            for layer in wide
        }
        readings.append({**reading, **{part: _without(reading[part], left_out) for part in ("values", "arrays")}})
        rotation.end()
    return {**run, "readings": readings}


def _without(layers: dict[str, Any], left_out: dict[str, set[str]]) -> dict[str, Any]:
    return {
        name: {key: value for key, value in of.items() if key not in left_out.get(name, ())}
        for name, of in layers.items()
    }


SHOWN = {name: fault.start for name, fault in FAULTS.items() if fault.shows}


def count(runs: list[Result], starts: dict[str, int] = SHOWN) -> dict[str, Any]:
    """Judge runs at every reading and in turn, and compare the alarms; `starts` are the steps at which faults begin."""
    ways: dict[str, Callable[[Result], Result]] = {"whole": lambda run: run, "in turn": in_turn}
    found: dict[str, Any] = {"faults": 0, "healthy": 0, "later": [], "missed": {}}
    found |= {f"{what} {way}": 0 for what in ("reported", "false") for way in ways}
    for run in runs:
        is_healthy = run["kind"] == HEALTHY
        if not run.get("readings") or not (is_healthy or run["kind"] in starts):
            continue
        start = 0 if is_healthy else starts[run["kind"]]
        alarm = {way: alarm_of_rules(judge_again(cut(run)), start) for way, cut in ways.items()}
        found["healthy" if is_healthy else "faults"] += 1
        for way, step in alarm.items():
            found[f"{'false' if is_healthy else 'reported'} {way}"] += step is not None
        if is_healthy or alarm["whole"] is None:
            continue
        if alarm["in turn"] is None:
            found["missed"][run["kind"]] = found["missed"].get(run["kind"], 0) + 1
        else:
            found["later"].append((alarm["in turn"] - alarm["whole"]) / EVERY)
    return found


def report(parts: dict[str, dict[str, Any]]) -> list[str]:
    lines = [
        "Made by `python -m tests.experiments.faults.run --part again`, `--part fresh` and "
        "`python -m tests.experiments.faults.in_turn --output docs/benchmarks/in-turn.md`.",
        "",
        "| seeds | faults detected, every layer at every reading | in turn | detected as early | "
        "readings later, mean and most | healthy runs alarmed, every layer | in turn |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, of in parts.items():
        later = of["later"] or [0.0]
        same = sum(one <= 0 for one in of["later"])
        lines.append(
            f"| {name} | {of['reported whole']} of {of['faults']} | {of['reported in turn']} | {same} | "
            f"{statistics.fmean(later):.1f}, {max(later):.0f} | {of['false whole']} of {of['healthy']} | "
            f"{of['false in turn']} |"
        )
    missed: dict[str, int] = {}
    for of in parts.values():
        for kind, number in of["missed"].items():
            missed[kind] = missed.get(kind, 0) + number
    listed = ", ".join(f"{kind} ({number})" for kind, number in sorted(missed.items(), key=lambda one: -one[1]))
    return [*lines, "", f"Detected at every reading and not in turn: {listed or 'none'}.", ""]


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(argv)
    text = "\n".join(report({part: count(read(options.results / part)) for part in ("again", "fresh")}))
    if options.output is None:
        print(text)
    else:
        options.output.write_text(text)


if __name__ == "__main__":
    main()
