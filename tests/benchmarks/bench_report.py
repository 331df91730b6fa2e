"""Measure what a report of a large run takes, and write docs/benchmarks/report.md.

    python -m tests.benchmarks.bench_report --output docs/benchmarks/report.md

Writes the history of a run of 96 layers of 128 heads with 1000 readings, in which one pair merges, as a training does
with its defaults; then reads it and writes the report, in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch

from hdi_callback.monitoring.history import History
from tests.benchmarks.ratios import write
from tests.dashboards.collapsing_run import collapsing_run

_CHILD = """
import json, sys, time
from pathlib import Path
import torch
from hdi_callback import read_history, report
torch.set_num_threads(1)
start = time.process_time()
run = read_history(sys.argv[1])
read = time.process_time()
steps = {name: run.matrix_steps(name) for name in run.records()[-1].layers}
found = time.process_time()
del run
made = report(sys.argv[1])
done = time.process_time()
with open("/proc/self/status") as file:
    peak = next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM"))
print(json.dumps({
    "read": read - start, "report": done - found, "page": Path(made.path).stat().st_size, "peak": peak,
    "maps": sum(map(len, steps.values())), "verdict": made.verdicts,
}))
"""


def write_run(path: Path, layers: int, heads: int, readings: int) -> float:
    """Write the history; gives the processor seconds that writing itself took."""
    torch.set_num_threads(1)
    history = History(path)
    drawn = torch.Generator().manual_seed(1)
    names = [f"model.layers.{number}.self_attn" for number in range(layers)]
    history.begin(0, [{"name": name, "num_heads": heads, "num_key_heads": heads} for name in names])
    taken = 0.0
    for result in collapsing_run(layers, heads, layer=17 % layers, pair=(3, 21 % heads), readings=readings):
        single = {  # as a training measures them of every head
            name: {
                "nearest": torch.randint(heads, (heads,), generator=drawn).tolist(),
                "rank": [16] * heads,
                **{key: torch.rand(heads, generator=drawn, dtype=torch.float64).tolist()
                   for key in ("nearest_overlap", "effective_rank", "flatness", "head_norm")},
            }
            for name in result.record.layers
        }  # fmt: skip
        whole = {
            name: replace(layer, arrays={**single[name], **layer.arrays})
            for name, layer in result.record.layers.items()
        }
        start = time.process_time()
        history.write(replace(result.record, layers=whole), result.alerts)
        for alert in result.alerts:
            history.note("alert", **alert.to_dict())
        taken += time.process_time() - start
    return taken


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Measure what a report of a large run takes.")
    parser.add_argument("--layers", type=int, default=96)
    parser.add_argument("--heads", type=int, default=128)
    parser.add_argument("--readings", type=int, default=1000)
    parser.add_argument("--output", type=Path, help="the page to write; printed without")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "hdi" / "history.jsonl"
        written = write_run(path, options.layers, options.heads, options.readings)
        sizes = [file.stat().st_size / 1e6 for file in (path, path.with_suffix(".matrices"))]
        done = subprocess.run([sys.executable, "-c", _CHILD, str(path)], capture_output=True, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    (verdict,) = found["verdict"].values()
    whole = (options.layers, options.heads, options.readings) == (96, 128, 1000)
    sized = f" --layers {options.layers} --heads {options.heads} --readings {options.readings}"
    shape = f"{options.layers} layers of {options.heads} heads, {options.readings} readings"
    command = f"python -m tests.benchmarks.bench_report{'' if whole else sized} --output docs/benchmarks/report.md"
    page = f"""# A report of a large run

`{command}`, torch {torch.__version__},
one thread; times are of the processor. {shape}; the numbers are drawn, and one pair of
heads merges.

| what | |
|---|---|
| the history: numbers, and matrices | {sizes[0]:.0f} MB and {sizes[1]:.0f} MB, of the 200 MB that it may have |
| maps of heads by heads that it keeps | {found["maps"]:,} |
| writing it, seconds a reading | {written / options.readings:.2f} |
| reading it | {found["read"]:.0f} s |
| reading it and writing the report | {found["report"]:.0f} s |
| the report | {found["page"] / 1e6:.1f} MB |
| peak of memory | {found["peak"] / 1e6:,.0f} MB |

The report says: "{verdict}"
"""
    write(page.splitlines(), options.output)


if __name__ == "__main__":
    main()
