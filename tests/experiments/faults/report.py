"""The results: which monitor detected which fault, how early, and how often it alarmed without one.

python -m tests.experiments.faults.report --output docs/benchmarks/faults.md --raw docs/benchmarks/faults.json.gz \\
    --rules docs/benchmarks/faults-by-rule.md
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

from hdi_callback.monitoring.rules import default_rules
from tests.experiments.faults.extremes import extremes_of, trained_layers
from tests.experiments.faults.faults import FAULTS
from tests.experiments.faults.judging import NOW, judge_again
from tests.experiments.faults.monitors import MONITORS, Result, Scores, alarm_of, alarm_of_rules
from tests.experiments.faults.plan import CONFIRMING, EVERY, FRESH, HEALTHY, PARTS, STEPS, THIRD, is_possible
from tests.experiments.faults.prediction import table
from tests.experiments.faults.run import PUBLISHED, RESULTS
from tests.experiments.faults.trainings import PROVOKED

COST = 0.05
SHIPPED = "rules as they ship"
LOSS, GRADIENT = "loss spike", "gradient norm, against its past"
RULES = {SHIPPED: False, "those of them on key weights alone": True}


def read(folder: Path) -> list[Result]:
    return [json.loads(gzip.decompress(path.read_bytes())) for path in sorted(folder.glob("*.json.gz"))]


def published(path: Path, besides: Sequence[Result]) -> list[Result]:
    """Read the runs that are published, without those that were made here."""
    made = {(run["kind"], run["base"], run["seed"]) for run in besides}
    runs = map(condensed, json.loads(gzip.decompress(path.read_bytes())) if path.is_file() else [])
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
    return f"{hits}/{runs} (below {100 * upper:.{2 if upper < 0.01 else 1 if upper < 0.1 else 0}f} %)"


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
    of_fresh = dict.fromkeys(names, 0)
    for run in healthy:
        for name, step in alarms(run, 0).items():
            false[name] += step is not None
            of_fresh[name] += step is not None and run["seed"] >= FRESH
    fresh = sum(run["seed"] >= FRESH for run in healthy)
    return {
        "limits": limits,
        "rows": rows,
        "false": false,
        "healthy": len(healthy),
        "of_fresh": of_fresh,
        "fresh": fresh,
    }


def order(rows: Sequence[dict], name: str) -> tuple[int, int]:
    """Count the faults that the rules reported before a monitor did, if it did, and the other way round."""
    earlier = later = 0
    for row in rows:
        ours, theirs = (math.inf if row["alarms"][one] is None else row["alarms"][one] for one in (SHIPPED, name))
        earlier, later = earlier + (ours < theirs), later + (theirs < ours)
    return earlier, later


def before_both(rows: Sequence[dict]) -> list[dict]:
    """Give the faults that the rules reported before a loss spike and before the gradient norm, if these did at all."""
    return [row for row in rows if all(order([row], name)[0] for name in (LOSS, GRADIENT))]


def report(found: dict, looked_at: int) -> list[str]:
    rows, names = found["rows"], [*RULES, *MONITORS]
    shown = [row for row in rows if row["shows"]]
    fresh = [row for row in shown if row["seed"] >= FRESH]
    costly = [row for row in shown if row["left"] is not None]
    earlier_runs = found["healthy"] - found["fresh"], len(shown) - len(fresh)
    ahead = before_both(shown)
    lines = [
        "Made by `python -m tests.experiments.faults.run --part looked-at`, `--part confirming`, `--part again`, "
        "`--part third`, `--part fresh` and "
        "`python -m tests.experiments.faults.report --output docs/benchmarks/faults.md` "
        "(`make faults` makes all of them, and more runs).",
        "",
        f"{looked_at} healthy runs set the limits of all monitors (the score that one in a hundred of them goes "
        f"beyond). *Fresh* are {found['fresh']} healthy runs and {len(fresh)} with shown faults that were made after "
        f"the last change of a rule, on seeds that nothing had used; *all* are these and {earlier_runs[0]} and "
        f"{earlier_runs[1]} that had been made before it, judged again. {len(rows)} runs with "
        f"{len({row['kind'] for row in rows})} faults. {STEPS} steps a run, a "
        f"reading every {EVERY}. *Shown* are the {len(shown)} runs with faults that attention can show; {len(costly)} "
        f"of them cost more than {COST} nats, that is, left the validation loss of all healthy twins by that much. "
        "*Rules first*: on how many of the shown ones the rules as they ship alarmed at an earlier reading than the "
        "monitor, or alone; *it first*: the other way round.",
        "",
        f"The rules were before both a loss spike and the gradient norm on {len(ahead)} of the {len(shown)} shown "
        f"runs, of {len({row['kind'] for row in ahead})} kinds; on {len(before_both(costly))} of the {len(costly)} "
        f"costly ones, of {len({row['kind'] for row in before_both(costly)})} kinds.",
        "",
        "| monitor | fresh shown faults detected | all shown faults detected | rules first | it first | "
        "of the costly ones | before the loss had left | median lead in steps | "
        "fresh healthy runs alarmed | all healthy runs alarmed |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name in names:
        reported = [row for row in shown if row["alarms"][name] is not None]
        of_costly = [row for row in costly if row["alarms"][name] is not None]
        leads = [row["left"] - row["alarms"][name] for row in of_costly]
        early = sum(lead > 0 for lead in leads)
        lead = f"{statistics.median(leads):+.0f}" if leads else "-"
        earlier, later = ("-", "-") if name == SHIPPED else order(shown, name)
        reported_of_fresh = f"{sum(row['seed'] >= FRESH for row in reported)}/{len(fresh)}" if fresh else "-"
        false_of_fresh = bound(found["of_fresh"][name], found["fresh"]) if found["fresh"] else "-"
        lines.append(
            f"| {name} | {reported_of_fresh} | {len(reported)}/{len(shown)} | {earlier} | {later} | "
            f"{len(of_costly)}/{len(costly)} | {early}/{len(costly)} | {lead} | {false_of_fresh} | "
            f"{bound(found['false'][name], found['healthy'])} |"
        )
    lines += [
        "",
        "#### By fault",
        "",
        "Steps of the first alarm; `-`: none. *Cost*: final validation loss above the mean of the healthy twins, in "
        "nats. The last column names the readings (and loss and gradient) that detected it, earliest first.",
        "",
        "| fault | training | cost | loss left at | rules | of them on key weights | detected by |",
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
    lines += ["", f"Missed by all rules, on at least one run: {'; '.join(silent) or 'none'}."]
    return lines


def of_rules(healthy: Sequence[Result], faulty: Sequence[Result]) -> list[str]:
    """Write of each rule how many shown faults it reported, alone and first, and how many healthy runs it alarmed."""
    shown = [run for run in faulty if FAULTS[run["kind"]].shows]
    counts = {}
    for rule in [rule.name for rule in default_rules()]:
        alone = first = reported = of_fresh = 0
        for run in shown:
            steps = _first_by_rule(run, FAULTS[run["kind"]].start)
            if rule in steps:
                reported, of_fresh = reported + 1, of_fresh + (run["seed"] >= FRESH)
                alone += len(steps) == 1
                first += steps[rule] == min(steps.values())
        false = sum(rule in _first_by_rule(run, 0) for run in healthy)
        counts[rule] = (of_fresh, reported, first, alone, false)
    lines = [
        f"Of the {len(shown)} shown runs (*fresh*: of those on seeds that nothing had used) how many a rule detected, "
        "how many it detected first (or at the same reading as the first), and how many it detected alone; and of "
        f"{len(healthy)} healthy runs how many it alarmed. Rules that detected something in other series alone "
        "stand in the evidence.",
        "",
        "| rule | fresh detected | detected | first | alone | healthy runs alarmed |",
        "|---|---|---|---|---|---|",
    ]
    ordered = sorted(counts, key=lambda rule: (-counts[rule][3], -counts[rule][2], -counts[rule][1]))
    return [*lines, *(f"| {rule} | {' | '.join(map(str, counts[rule]))} |" for rule in ordered if rule != "trend")]


def _first_by_rule(run: Result, start: int) -> dict[str, int]:
    """The step of the first alarm of each rule at or after a step."""
    found: dict[str, int] = {}
    for step, _, rule, level in run["alerts"]:
        if level != "notice" and step >= start:
            found[rule] = min(step, found.get(rule, step))
    return found


def _step(step: int | None) -> str:
    return "-" if step is None else str(step)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument(
        "--published", type=Path, default=PUBLISHED, help="runs that were made before, kept in one file"
    )
    parser.add_argument("--output", type=Path)
    parser.add_argument("--rules", type=Path, help="where to write what each rule reported")
    parser.add_argument("--raw", type=Path, help="file for the scores of every run, compressed")
    options = parser.parse_args(argv)
    here = [condensed(run) for part in PARTS for run in read(options.results / part)]
    runs = sorted([*here, *published(options.published, here)], key=lambda run: (run["seed"], run["kind"]))
    looked_at = [run for run in runs if run["kind"] == HEALTHY and run["seed"] < FRESH]
    confirming = [run for run in runs if run["seed"] >= CONFIRMING]
    judged = [run for run in confirming if run.get("rules") == NOW]
    healthy = [run for run in judged if run["kind"] == HEALTHY]
    faulty = [run for run in judged if is_possible(run["kind"], run["base"])]
    found = judge(healthy, faulty, looked_at)
    by_rule = "\n".join([
        "Made by `python -m tests.experiments.faults.report --rules docs/benchmarks/faults-by-rule.md`.",
        "",
        *of_rules(healthy, faulty),
    ]) + "\n"  # fmt: skip
    print(by_rule)
    if options.rules is not None:
        options.rules.write_text(by_rule)
    prediction = [
        "",
        "#### Fresh or loaded?",
        "",
        *of_origin(judged),
        "",
        "#### Which reading goes with the final loss?",
        "",
        "Rank correlation of what a monitor gives at a share of the steps with the final validation loss, both against "
        "the median of the healthy runs of that training; 95 % intervals by bootstrap over runs. Rows stand in the "
        "order of the looked-at runs; the confirming runs had no part in it. Most faults begin at step 40.",
        "",
        *table([run for run in runs if run["seed"] < CONFIRMING], confirming),
    ]
    text = "\n".join([*report(found, len(looked_at)), *prediction]) + "\n"
    print(text)
    if options.output is not None:
        options.output.write_text(text)
    if options.raw is not None:
        options.raw.write_bytes(gzip.compress(json.dumps(runs).encode(), mtime=0))


def is_trained_before(run: Result) -> bool:
    """Whether the weights had been trained before the run, as none of those are that the plan calls fresh."""
    base = PROVOKED.get(run["base"])
    return base is not None and (base.trained_before > 0 or base.task == "order")


def of_origin(runs: Sequence[Result]) -> list[str]:
    """Write how often weights were taken for trained ones, of runs that began fresh and of those that did not."""
    counts = {}
    for name, of_kind in (
        ("fresh", [run for run in runs if not is_trained_before(run)]),
        (
            "trained byte models",
            [run for run in runs if is_trained_before(run) and PROVOKED[run["base"]].task == "text"],
        ),
        (
            "the trained encoder",
            [run for run in runs if is_trained_before(run) and PROVOKED[run["base"]].task == "order"],
        ),
    ):
        layers = [trained_layers(run) for run in of_kind]
        models = sum(2 * trained > of for trained, of in layers)
        counts[name] = (
            bound(models, len(layers)) if layers else "-",
            sum(one for one, _ in layers),
            sum(of for _, of in layers),
        )
    lines = ["| began | taken for loaded | layers that look trained |", "|---|---|---|"]
    return [*lines, *(f"| {name} | {models} | {some} of {of} |" for name, (models, some, of) in counts.items())]


def condensed(run: Result) -> Result:
    """Keep of a run what the tables need: of one that was looked at no losses and gradients, whose scores are kept."""
    if "scores" in run:
        names = ["losses", "gradients"] if run["seed"] < THIRD else []
        return {name: value for name, value in run.items() if name not in names}
    run = judge_again(run)
    names = ["kind", "base", "seed", "validation", "alerts", "rules", "warnings"]
    names += ["losses", "gradients"] if run["seed"] >= THIRD else []
    return {
        **{name: run[name] for name in names if name in run},
        "scores": {name: _plain(of(run)) for name, of in MONITORS.items()},
        "extremes": extremes_of(run),
        "trained": trained_layers(run),
    }


def _plain(scores: Scores) -> list[list[float | None]]:
    """Round scores; infinite ones, as of a loss that is not finite, are null."""
    known = [(step, score) for step, score in scores if math.isfinite(score) or score == math.inf]
    return [[step, float(f"{score:.3g}") if math.isfinite(score) else None] for step, score in known]


if __name__ == "__main__":
    main()
