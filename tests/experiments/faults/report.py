"""What came out: which monitor told which fault, how early, and how often it told of none.

python -m tests.experiments.faults.report --output docs/benchmarks/faults.md --raw docs/benchmarks/faults.json.gz
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path

from scipy.stats import beta

from tests.experiments.faults.faults import FAULTS
from tests.experiments.faults.monitors import MONITORS, Result, Scores, alarm_of, alarm_of_rules
from tests.experiments.faults.plan import AGAIN, EVERY, HEALTHY, PARTS, STEPS
from tests.experiments.faults.prediction import table
from tests.experiments.faults.run import PUBLISHED, RESULTS

COST = 0.05
RULES = {"rules as they ship": False, "those of them on key weights alone": True}


def read(folder: Path) -> list[Result]:
    return [json.loads(gzip.decompress(path.read_bytes())) for path in sorted(folder.glob("*.json.gz"))]


def published(path: Path, besides: Sequence[Result]) -> list[Result]:
    """Read the runs that are published, without those that were made here."""
    made = {(run["kind"], run["base"], run["seed"]) for run in besides}
    runs = json.loads(gzip.decompress(path.read_bytes())) if path.is_file() else []
    return [run for run in runs if (run["kind"], run["base"], run["seed"]) not in made]


def limits_of(healthy: Sequence[Result]) -> dict[str, float]:
    """The score of each monitor that one in a hundred healthy runs goes beyond, infinite scores aside."""
    found = {}
    for name, scores_of in MONITORS.items():
        largest = [max((score for _, score in scores_of(run) if math.isfinite(score)), default=-math.inf)
                   for run in healthy]  # fmt: skip
        known = sorted(score for score in largest if score > -math.inf)
        found[name] = known[-1 - len(known) // 100] if known else math.inf
    return found


def departure(run: Result, twins: Sequence[Result], start: int) -> int | None:
    """Give the step at which the validation loss has left that of all healthy twins by 0.05 nats, at two readings.

    Asked from the fault on; of a fault that is there from the start not at the first two readings, where the loss is
    that of the initialisation.
    """
    away = []
    for place, value in enumerate(run["validation"]):
        highest = max(twin["validation"][place] for twin in twins)
        away.append(value is None or value > highest + COST)
    first = max(2, -(-start // EVERY))
    return next((EVERY * place for place in range(first, len(away) - 1) if away[place] and away[place + 1]), None)


def bound(hits: int, runs: int) -> str:
    """Write a rate with its upper 95 % bound (Clopper and Pearson)."""
    upper = 1.0 if hits == runs else float(beta.ppf(0.95, hits + 1, runs - hits))
    return f"{hits}/{runs} (below {100 * upper:.0f} %)"


def judge(healthy: Sequence[Result], faulty: Sequence[Result], looked_at: Sequence[Result]) -> dict:
    """Put every run against every monitor, at limits from the looked-at runs alone."""
    limits = limits_of(looked_at)
    names = [*RULES, *MONITORS]

    def alarms(run: Result, start: int) -> dict[str, int | None]:
        found = {name: alarm_of_rules(run, start, weights_alone=alone) for name, alone in RULES.items()}
        return found | {name: alarm_of(of(run), limits[name], start) for name, of in MONITORS.items()}

    rows = []
    for run in faulty:
        fault = FAULTS[run["kind"]]
        twins = [twin for twin in (*healthy, *looked_at) if twin["base"] == run["base"]]
        left = departure(run, twins, fault.start)
        final = run["validation"][-1]
        typical = statistics.fmean(twin["validation"][-1] for twin in twins)
        rows.append({
            "kind": run["kind"], "base": run["base"], "seed": run["seed"], "left": left,
            "cost": None if final is None else round(final - typical, 3),
            "shows": fault.shows, "is_cause": fault.is_cause, "alarms": alarms(run, fault.start),
        })  # fmt: skip
    false = dict.fromkeys(names, 0)
    for run in healthy:
        for name, step in alarms(run, 0).items():
            false[name] += step is not None
    return {"limits": limits, "rows": rows, "false": false, "healthy": len(healthy)}


def report(found: dict, looked_at: int) -> list[str]:
    rows, names = found["rows"], [*RULES, *MONITORS]
    shown = [row for row in rows if row["shows"]]
    costly = [row for row in shown if row["left"] is not None]
    lines = [
        "Made by `python -m tests.experiments.faults.run --part looked-at`, `--part confirming` and "
        "`python -m tests.experiments.faults.report --output docs/benchmarks/faults.md` "
        "(`make faults` makes all of them, and more runs).",
        "",
        f"{looked_at} healthy runs were looked at and set the limits of all monitors (the score that one in a hundred "
        "of them goes beyond); "
        f"{found['healthy']} other healthy runs and {len(rows)} runs with {len({row['kind'] for row in rows})} faults "
        f"confirm them. {STEPS} steps a run, a reading every {EVERY}. *Shown* are the {len(shown)} runs with faults "
        f"that attention can show; {len(costly)} of them cost more than {COST} nats, that is, left the validation loss "
        "of all healthy twins by that much.",
        "",
        "| monitor | shown faults told | of the costly ones | before the loss had left | median lead in steps | "
        "healthy runs alarmed |",
        "|---|---|---|---|---|---|",
    ]
    for name in names:
        told = [row for row in shown if row["alarms"][name] is not None]
        of_costly = [row for row in costly if row["alarms"][name] is not None]
        leads = [row["left"] - row["alarms"][name] for row in of_costly]
        early = sum(lead > 0 for lead in leads)
        lead = f"{statistics.median(leads):+.0f}" if leads else "-"
        lines.append(
            f"| {name} | {len(told)}/{len(shown)} | {len(of_costly)}/{len(costly)} | {early}/{len(costly)} | {lead} | "
            f"{bound(found['false'][name], found['healthy'])} |"
        )
    lines += [
        "",
        "#### By fault",
        "",
        "Steps of the first alarm; `-`: none. *Cost*: final validation loss above the mean of the healthy twins, in "
        "nats. The last column names the readings (and loss and gradient) that told, earliest first.",
        "",
        "| fault | training | cost | loss left at | rules | of them on key weights | told by |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in sorted(rows, key=lambda row: (list(FAULTS).index(row["kind"]), row["seed"])):
        default, every = (_step(row["alarms"][name]) for name in RULES)
        tellers = sorted((row["alarms"][name], name) for name in MONITORS if row["alarms"][name] is not None)
        named = ", ".join(f"{name} {step}" for step, name in tellers[:3]) or "-"
        cost = "not finite" if row["cost"] is None else f"{row['cost']:+.2f}"
        kind = row["kind"] if row["shows"] else f"*{row['kind']}*"
        lines.append(f"| {kind} | {row['base']} | {cost} | {_step(row['left'])} | {default} | {every} | {named} |")
    silent = sorted({row["kind"] for row in rows if row["alarms"][next(iter(RULES))] is None})
    lines += ["", f"No rule told, on at least one run: {'; '.join(silent) or 'none'}."]
    return lines


def _step(step: int | None) -> str:
    return "-" if step is None else str(step)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument(
        "--published", type=Path, default=PUBLISHED, help="runs that were made before, kept in one file"
    )
    parser.add_argument("--output", type=Path)
    parser.add_argument("--raw", type=Path, help="where to keep what every run came to, compressed")
    options = parser.parse_args(argv)
    made = {part: read(options.results / part) for part in PARTS}
    before = published(options.published, [run for runs in made.values() for run in runs])
    all_looked_at = [*made["looked-at"], *made["confirming"]] + [run for run in before if run["seed"] < AGAIN]
    looked_at = [run for run in all_looked_at if run["kind"] == HEALTHY]
    runs = made["again"] + [run for run in before if run["seed"] >= AGAIN]
    healthy = [run for run in runs if run["kind"] == HEALTHY]
    found = judge(healthy, [run for run in runs if run["kind"] != HEALTHY], looked_at)
    prediction = [
        "",
        "#### Which reading goes with the final loss?",
        "",
        "Rank correlation of what a monitor gives at a share of the steps with the final validation loss, both against "
        "the median of the healthy runs of that training; 95 % intervals by bootstrap over runs. Rows stand in the "
        "order of the looked-at runs; the confirming runs had no part in it. Most faults begin at step 40.",
        "",
        *table(all_looked_at, runs),
    ]
    text = "\n".join([*report(found, len(looked_at)), *prediction]) + "\n"
    print(text)
    if options.output is not None:
        options.output.write_text(text)
    if options.raw is not None:
        options.raw.write_bytes(gzip.compress(json.dumps(_raw([*all_looked_at, *runs])).encode(), mtime=0))


def _raw(runs: Sequence[Result]) -> list[dict]:
    kept = ("kind", "base", "seed", "validation", "losses", "gradients", "alerts")
    return [
        {name: run[name] for name in kept} | {"scores": {name: _plain(of(run)) for name, of in MONITORS.items()}}
        for run in sorted(runs, key=lambda run: (run["seed"], run["kind"]))
    ]


def _plain(scores: Scores) -> list[list[float | None]]:
    """Round scores; infinite ones, as of a loss that is not finite, are null."""
    known = [(step, score) for step, score in scores if math.isfinite(score) or score == math.inf]
    return [[step, float(f"{score:.3g}") if math.isfinite(score) else None] for step, score in known]


if __name__ == "__main__":
    main()
