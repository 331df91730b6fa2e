"""Size of the HTML report of a long run, and the time to write it.

python -m tests.studies.benchmarks.report
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from hdi_callback import load_history, write_report
from tests.dashboards.synthetic import collapsing, facts_of, write
from tests.studies.benchmarks.timing import arguments, seconds, table

SIZES = {"12 layers of 12 heads, 200 readings": (12, 12, 200), "48 layers of 32 heads, 200 readings": (48, 32, 200)}


def main() -> None:
    arguments(__doc__, rounds=1).parse_args()
    rows: list[tuple[object, ...]] = [("run", "report, kB", "history, MB", "to read it, s", "to write the report, s")]
    for name, (layers, heads, readings) in SIZES.items():
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "history.jsonl"
            records = collapsing(layers, heads, readings, layer=1, pair=(0, 3))
            run = write(path, facts_of(layers, heads), records)
            reading = seconds(lambda path=path: load_history(path), "cpu")
            writing = seconds(lambda run=run: write_report(run), "cpu")
            size = sum(file.stat().st_size for file in path.parent.rglob("*") if file.suffix != ".html")
            report = path.with_name("report.html").stat().st_size
        rows.append((name, f"{report / 1e3:.0f}", f"{size / 1e6:.0f}", f"{reading:.2f}", f"{writing:.2f}"))
    table(*rows)


if __name__ == "__main__":
    main()
