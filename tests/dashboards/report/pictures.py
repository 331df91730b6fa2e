"""Take the picture of a report that docs/command-line.md shows: ``python -m tests.dashboards.report.pictures``."""

from __future__ import annotations

import tempfile
from pathlib import Path

from hdi_callback import report
from tests.browser import Browser
from tests.dashboards.report.synthetic import write_run

IMAGES = Path(__file__).parents[3] / "docs" / "images"


def main() -> None:
    with tempfile.TemporaryDirectory() as name, Browser() as browser:
        folder = Path(name)
        write_run(
            folder / "run" / "history.jsonl", layers=48, heads=32, width=2, features=64, steps=24, collapsed=(17, 3, 21)
        )
        page = report(folder / "run", path=folder / "page.html", title="Attention heads of a run").path
        ready = "document.documentElement.dataset.drawn === 'yes'"
        browser.open(page.as_uri(), width=1280, height=1000, ready=ready)
        browser.picture(IMAGES / "report.png", whole=False)


if __name__ == "__main__":
    main()
