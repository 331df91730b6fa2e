"""Which share of weights stands still, to the last bit: in bfloat16 alone, with copies in float32, and in float32.

python -m tests.experiments.faults.rounding --output docs/benchmarks/rounding.md

*Rounded away* compares the weights of two readings. In bfloat16 alone, updates below half a unit in the last place are
lost for good; with copies in float32 they add up, and the rounded weights of two readings that are near may be the same
as well.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from tests.experiments.faults import run as runs
from tests.experiments.faults.faults import Fault, Run
from tests.experiments.faults.plan import Job

SEED = 9_100_001
RESULTS = Path("runs/rounding")
Weights = Literal["float32", "bfloat16 and copies in float32", "bfloat16 alone"]
BASES = ("text", "digits, post-norm, SGD", "text, multi-query, Muon")
RATES = (1.0, 0.1, 0.01)
EVERY = {"text": (1, 5, 20)}
"""Steps between readings; 5 in the other trainings."""
READINGS = 3
"""In a row at which the rule wants its share."""


def fault_of(weights: Weights, rate: float) -> Fault:
    """Steps at a share of the rate, on weights that are kept so."""

    def before(run: Run, step: int) -> None:
        run.scale_rates(rate)
        if weights == "bfloat16 and copies in float32" and run.kept:
            for place, parameter in enumerate(run.model.parameters()):
                parameter.copy_(run.kept[str(place)])

    def after(run: Run, step: int) -> None:
        for place, parameter in enumerate(run.model.parameters()):
            if weights == "bfloat16 and copies in float32":
                run.kept[str(place)] = parameter.clone()
            if weights != "float32":
                parameter.copy_(parameter.bfloat16())

    return Fault("", is_cause=True, shows=True, before=before, after=after, start=0)


def highest_limit(readings: list[dict[str, Any]]) -> float:
    """The highest share that would have been reached by every head of a layer at three readings in a row."""
    found = 0.0
    for layer in readings[0]["values"]:
        least = [min(row["arrays"][layer].get("head_unchanged") or [0.0]) for row in readings]
        windows = [least[place : place + READINGS] for place in range(1, len(least) - READINGS + 1)]
        found = max(found, *(min(window) for window in windows))
    return found


def made(base: str, rate: float, every: int, weights: Weights, folder: Path) -> dict[str, Any]:
    """Train once, unless that was done; give the loss and the highest limit."""
    kind = f"{weights}, rate times {rate}, every {every}"
    path = folder / f"{Job(kind, base, SEED).name}.json"
    if not path.is_file():
        runs.EVERY = every
        metrics = ["hdi", "head_movement_min"]
        result = runs.train(Job(kind, base, SEED), fault=fault_of(weights, rate), metrics=metrics)
        path.write_text(
            json.dumps({"loss": result["validation"][-1], "share": highest_limit(result["readings"])}), "utf-8"
        )
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def page(folder: Path) -> str:
    kinds = get_args(Weights)
    rows = []
    for base in BASES:
        for every in EVERY.get(base, (5,)):
            for rate in RATES:
                found = [made(base, rate, every, weights, folder) for weights in kinds]
                cells = [f"{one['share']:.2f} ({one['loss']:.2f})" for one in found]
                rows.append(f"| {base} | {rate:g} | {every} | {' | '.join(cells)} |")
    head = (
        "Made by `python -m tests.experiments.faults.rounding --output docs/benchmarks/rounding.md`: one training of "
        f"100 steps each, seed {SEED}, torch {torch.__version__.partition('+')[0]}. The highest limit that *rounded "
        "away* would have been raised at, and the loss of validation at the end.\n\n"
        f"| training | share of the rate | steps between readings | {' | '.join(kinds)} |\n|---|---|---|---|---|---|"
    )
    return "\n".join([head, *rows, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--results", type=Path, default=RESULTS, help="runs that are there are not made again")
    parser.add_argument("--output", type=Path, help="where to write the table; printed by default")
    options = parser.parse_args()
    options.results.mkdir(parents=True, exist_ok=True)
    text = page(options.results)
    if options.output is None:
        print(text)
    else:
        options.output.write_text(text)


if __name__ == "__main__":
    main()
