"""Make every picture of docs/images but the drawn one: ``make images``, or ``python -m tests.pictures``.

    python -m tests.pictures --runs runs/pictures

trains both demos first, unless the folder holds them. The figures of docs/images/claims come from ``make theory``.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from PIL import Image

from hdi_callback import load_history, read_alerts, read_history, report
from hdi_callback.dashboards.figures import plot_layers, plot_trajectories
from hdi_callback.dashboards.maps import HeadPanel, draw_heads
from tests.browser import DRAWN, Browser
from tests.dashboards.board_page import tensorboard, write_board
from tests.dashboards.report.synthetic import write_run

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "docs" / "images"
_SETTLED = 15.0  # seconds until TensorBoard has drawn its charts, on a busy machine


def demo(folder: Path, *arguments: str) -> Path:
    """Train a demo, unless the folder holds one; gives its history."""
    path = folder / "version_0" / "hdi" / "history.jsonl"
    if not path.is_file():
        command = [sys.executable, str(ROOT / "examples" / "train_gpt.py"), "--no-wandb", "--out", str(folder)]
        subprocess.run([*command, *arguments], check=True)
    return path


def draw_demos(runs: Path) -> None:
    """Draw the curves of the healthy demo; and of the collapse the map of layers, and its heads before and after."""
    healthy, collapse = demo(runs / "healthy"), demo(runs / "collapse", "--collapse")
    plot_trajectories(load_history(healthy)).savefig(IMAGES / "trajectories.png", dpi=90)
    plot_layers(collapse).savefig(IMAGES / "collapse.png", dpi=130)
    alert = next(one for one in read_alerts(collapse) if one.rule == "worst pair")
    run, pair, sides = read_history(collapse), alert.finding.heads, []
    with tempfile.TemporaryDirectory() as name:
        for step in (alert.step, run.matrix_steps(alert.layer)[-1]):
            path, matrix = Path(name) / f"{step}.png", run.matrices(step, alert.layer)["pair_alignment"]
            value = float(matrix[pair[0], pair[1]])
            draw_heads([HeadPanel(alert.layer, matrix, pair, value, step == alert.step)], step).savefig(path, dpi=100)
            sides.append(Image.open(path).convert("RGB"))
    both = Image.new("RGB", (sum(side.width for side in sides), sides[0].height), "white")
    for place, side in enumerate(sides):
        both.paste(side, (place * sides[0].width, 0))
    both.quantize(128).save(IMAGES / "before-after.png", optimize=True)


def photograph_boards(browser: Browser, runs: Path, folder: Path) -> None:
    """Photograph the pages Custom Scalars, of the collapse, and Images, of 48 layers of 32 heads."""
    with tensorboard(runs / "collapse") as address:
        browser.open(f"{address}/#custom_scalars", width=1280, height=860)
        time.sleep(_SETTLED)
        browser.picture(IMAGES / "tensorboard.png", whole=False)
    write_board(folder / "hdi", 48, 32, layer=17, pair=(3, 21))
    with tensorboard(folder) as address:
        browser.open(f"{address}/#images", width=1280, height=720)
        time.sleep(_SETTLED)
        browser.picture(IMAGES / "tensorboard-images.png", whole=False)


def photograph_reports(browser: Browser, folder: Path) -> None:
    """Photograph a report of 48 layers of 32 heads, on a screen and on a phone."""
    path = folder / "run" / "history.jsonl"
    write_run(path, layers=48, heads=32, width=2, features=64, steps=24, collapsed=(17, 3, 21))
    page = report(path, path=folder / "page.html", title="Attention heads of a run").path
    for name, width, height in (("report.png", 1280, 1000), ("report-phone.png", 390, 844)):
        browser.open(page.as_uri(), width=width, height=height, ready=DRAWN)
        browser.picture(IMAGES / name, whole=False)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Make the pictures of the documentation.")
    parser.add_argument("--runs", type=Path, help="folder of the two demos; trained if they are not there")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as name, Browser() as browser:
        folder = Path(name)
        runs = folder / "runs" if options.runs is None else options.runs
        draw_demos(runs)
        photograph_boards(browser, runs, folder / "board")
        photograph_reports(browser, folder)


if __name__ == "__main__":
    main()
