"""Scores that grow because queries and keys alone are driven: does `QKClip` bring such runs back?

python -m tests.experiments.faults.growth --output docs/benchmarks/qk-clip.md

Each run has an untouched twin and a healthy run of the same seed. The limit is the largest score that the healthy run
came to at its readings, as whoever uses it would take it; healthy runs themselves are held at their own. That choice
was made on the seeds from 70,000 on and on healthy runs from 50,000 on (with 0.9, 1.0, 1.1 and 1.25 of that score), and
fixed before any of the seeds below was used.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import math
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path

from scipy.stats import t as student

from hdi_callback.monitoring.interventions import QKClip
from tests.experiments.faults.faults import Act, Fault, Run
from tests.experiments.faults.plan import HEALTHY, Job
from tests.experiments.faults.qk_clip import largest
from tests.experiments.faults.report import COST, Result
from tests.experiments.faults.run import RESULTS, train

LIMIT, SHARE = 6.0, 1.0
"""The limit that was tried beside other interventions; and the limit here, as a share of what healthy runs come to."""
ROUNDING, SLIGHT = 1e-7, 1e-3
"""Shares by which the weights of nudged twins differ at first: about the last bit of a float32, and a thousandth."""
WANTED, HEALTHY_RUNS, FIRST, FIRST_HEALTHY = 10, 20, 100_000, 110_000
METRICS = ["hdi", "attention_entropy", "attention_logit_bound"]
BASES = ("text", "text, grouped", "text, multi-query, Muon", "text, four layers")


def _faster(factor: float) -> Act:
    """Give queries and keys parameter groups of their own, without decay and with a rate of their own."""

    def begin(run: Run, step: int) -> None:
        own = {id(layer.q_proj.weight) for layer in run.layers} | {id(layer.k_proj.weight) for layer in run.layers}
        for optimizer in run.optimizers:
            for group in list(optimizer.param_groups):
                mine = [parameter for parameter in group["params"] if id(parameter) in own]
                if mine:
                    group["params"] = [parameter for parameter in group["params"] if id(parameter) not in own]
                    rest = {name: value for name, value in group.items() if name != "params"}
                    added = {**rest, "params": mine, "lr": factor * rest["lr"], "weight_decay": 0.0, "is_own": True}
                    optimizer.add_param_group(added)

    return begin


def _for_steps(factor: float, start: int, stop: int) -> Act:
    def before(run: Run, step: int) -> None:
        if start <= step < stop:
            for optimizer in run.optimizers:
                for group in optimizer.param_groups:
                    if group.get("is_own"):
                        group["lr"] *= factor

    return before


def _grow(rate: float) -> Act:
    def after(run: Run, step: int) -> None:
        for layer in run.layers:
            layer.q_proj.weight *= rate
            layer.k_proj.weight *= rate

    return after


KINDS = {
    "queries and keys learn 100 times faster": Fault("optimisation", True, True, begin=_faster(100), start=0),
    "queries and keys learn 100 times faster, from step 40 on": Fault(
        "optimisation", True, True, begin=_faster(1), before=_for_steps(100, 40, 2**40)
    ),
    "queries and keys learn 300 times faster, for 5 steps": Fault(
        "optimisation", True, True, begin=_faster(1), before=_for_steps(300, 40, 45)
    ),
    "queries and keys grow by 5 % a step": Fault("optimisation", True, True, after=_grow(1.05)),
}


def candidates(first: int = FIRST) -> Iterator[Job]:
    """Give runs in the order in which they are made: every training by turns, and then the next kind of growth."""
    seed = first
    while True:
        for place in range(len(KINDS)):
            for turn, base in enumerate(BASES):
                yield Job(list(KINDS)[(place + turn) % len(KINDS)], base, seed)
                seed += 1


def make(job: Job, limit: float | None, folder: Path, *, nudge: float = 0.0) -> Result:
    """Make a run, if it is not made; `acted` is how many steps changed a weight."""
    done = folder / f"{job.name}-{f'nudged by {nudge:g}' if nudge else limit}.json.gz"
    if not done.is_file():
        clip = [] if limit is None else [QKClip(limit)]
        result = train(job, None, clip, KINDS.get(job.kind), METRICS, nudge=nudge)
        result["acted"] = clip[0].count if clip else 0
        partial = done.with_suffix(".partial")
        partial.write_bytes(gzip.compress(json.dumps(result).encode(), mtime=0))
        partial.rename(done)
    result = json.loads(gzip.decompress(done.read_bytes()))
    print(job.name, limit, result["validation"][-1], f"{largest(result):.1f}", result["acted"], flush=True)
    return result


def loss_of(run: Result) -> float:
    final = run["validation"][-1]
    return float("inf") if final is None else final


def healthy_candidates(first: int = FIRST_HEALTHY) -> Iterator[Job]:
    """Give healthy runs in the order in which they are made: every training by turns."""
    for seed in itertools.count(first):
        yield Job(HEALTHY, BASES[seed % len(BASES)], seed)


def limit_of(healthy: Result) -> float:
    """The limit that follows from a healthy run."""
    return round(SHARE * largest(healthy), 2)


def of_growth(folder: Path, wanted: int) -> list[str]:
    """Make runs until enough have diverged, and write what the intervention did to all of them."""
    lines = [
        "| growth | training | largest score | healthy | untouched | `QKClip` | its limit | its largest score |",
        "|---|---|---|---|---|---|---|---|",
    ]
    diverged = saved = tried = 0
    for job in candidates():
        if diverged == wanted:
            break
        healthy, run = make(Job(HEALTHY, job.base, job.seed), None, folder), make(job, None, folder)
        tried += 1
        if loss_of(run) <= loss_of(healthy) + COST:
            continue
        limit = limit_of(healthy)
        clipped = make(job, limit, folder)
        is_saved = loss_of(clipped) <= loss_of(healthy) + COST
        diverged, saved = diverged + 1, saved + is_saved
        losses = " | ".join(f"{loss_of(one):.2f}" for one in (healthy, run, clipped))
        mark = "" if is_saved else ", not saved"
        lines.append(
            f"| {job.kind} | {job.base} | {largest(run):.0f} | {losses}{mark} | {limit:.1f} | {largest(clipped):.0f} |"
        )
    said = (
        f"{tried} runs whose queries and keys alone were driven were made until {wanted} had diverged, that is, ended "
        f"more than {COST} nats above the healthy run of their seed. **With `QKClip` {saved} of these "
        f"{diverged} ended within {COST} nats of it, or below.**"
    )
    return [said, "", *lines]


def of_healthy(folder: Path, wanted: int) -> list[str]:
    """Make healthy runs until it acted in enough of them, and write what it did, and what a nudge does."""
    clipped, acted, jobs = [], [], []
    nudged: dict[float, list[float]] = {ROUNDING: [], SLIGHT: []}
    tried = 0
    for job in healthy_candidates():
        if len(jobs) == wanted:
            break
        plain = make(job, None, folder)
        run = make(job, limit_of(plain), folder)
        tried += 1
        if not run["acted"]:
            continue
        jobs.append(job)
        clipped.append(loss_of(run) - loss_of(plain))
        acted.append(run["acted"])
        for nudge, found in nudged.items():
            found.append(loss_of(make(job, None, folder, nudge=nudge)) - loss_of(plain))
    is_muon = ["Muon" in job.base for job in jobs]
    rounded = [round(abs(value), 4) for value in clipped]
    lines = [
        f"{tried} healthy runs of these trainings were made until it had acted in {wanted}, each with the largest "
        "score of its own untouched twin as the limit: it observes all queries of every step, and a reading some of "
        f"every fifth, so it acted at {min(acted, default=0)} to {max(acted, default=0)} steps of 100. **It "
        f"changed the final loss by {max(rounded, default=0.0):.3f} nats at most, by more than 0.01 in "
        f"{sum(value > 0.01 for value in rounded)} of {len(jobs)}.** Beside it the same runs without it, whose weights "
        f"were moved at random before the first step: by {ROUNDING:g} of each, as rounding may do, and by {SLIGHT:g}. "
        "Final losses less that of the untouched run, in nats: means with 95 % intervals, the range, and in how many "
        "runs it is more than 0.01 (rose, fell).",
        "",
        f"| | runs | `QKClip` | weights moved by {ROUNDING:g} | by {SLIGHT:g} |",
        "|---|---|---|---|---|",
    ]
    for name, chosen in (("all", [True] * len(jobs)), ("Muon", is_muon), ("AdamW", [not one for one in is_muon])):
        cells = [
            of_differences([value for value, is_own in zip(values, chosen) if is_own])
            for values in (clipped, *nudged.values())
        ]
        lines.append(f"| {name} | {sum(chosen)} | {' | '.join(cells)} |")
    return lines


def of_differences(values: Sequence[float]) -> str:
    """Write the mean, the range, and how many are far from 0; losses are known to three digits behind the point."""
    if not values:
        return "-"
    rose, fell = (sum(round(sign * value, 4) > 0.01 for value in values) for sign in (1, -1))
    span = f"from {min(values):+.3f} to {max(values):+.3f}"
    return f"{interval(values, 4, is_signed=True)}, {span}, {rose} and {fell}"


def interval(values: Sequence[float], digits: int = 2, *, is_signed: bool = False) -> str:
    """Write a mean with its 95 % interval (Student)."""
    if not values:
        return "-"
    if not all(map(math.isfinite, values)):
        return "not finite in some"
    middle, sign = statistics.fmean(values), "+" if is_signed else ""
    if len(values) < 2:
        return f"{middle:{sign}.{digits}f}"
    error = float(student.ppf(0.975, len(values) - 1)) * statistics.stdev(values) / math.sqrt(len(values))
    return f"{middle:{sign}.{digits}f} ({middle - error:{sign}.{digits}f} to {middle + error:{sign}.{digits}f})"


def publish(lines: list[str], output: Path | None) -> None:
    """Print a report, and keep it."""
    text = "\n".join(lines) + "\n"
    print(text)
    if output is not None:
        output.write_text(text)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=RESULTS / "growth")
    parser.add_argument("--wanted", type=int, default=WANTED, help="runs that diverge")
    parser.add_argument("--healthy", type=int, default=HEALTHY_RUNS, help="healthy runs in which it acts")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(argv)
    options.results.mkdir(parents=True, exist_ok=True)
    of_limit = "the largest score" if SHARE == 1 else f"{SHARE:g} of the largest score"
    publish([
        "Made by `python -m tests.experiments.faults.growth --output docs/benchmarks/qk-clip.md`. Final validation "
        f"losses in nats; the healthy run has the same seed. The limit of `QKClip` is {of_limit} that the healthy run "
        "came to at its readings.",
        "",
        *of_growth(options.results, options.wanted),
        "",
        *of_healthy(options.results, options.healthy),
    ], options.output)  # fmt: skip


if __name__ == "__main__":
    main()
