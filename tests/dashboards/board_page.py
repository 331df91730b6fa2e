"""A TensorBoard server over a run in which one pair of heads merges, written as a training writes it."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter

from hdi_callback.dashboards.pictures import Pictures
from hdi_callback.dashboards.tensorboard import Board, add_picture
from hdi_callback.monitoring.metrics import DEFAULT_METRICS
from tests.dashboards.collapsing_run import collapsing_run


def write_board(
    folder: Path, layers: int, heads: int, *, layer: int, pair: tuple[int, int], readings: int = 30
) -> None:
    """Write curves, alerts and pictures of such a run."""
    writer = SummaryWriter(str(folder))
    board = Board(writer, DEFAULT_METRICS, [f"model.layers.{number}.self_attn" for number in range(layers)])
    pictures = Pictures([add_picture(writer)], every=10, share=1.0, share_at_end=1.0, clock=_hours())
    for result in collapsing_run(layers, heads, layer=layer, pair=pair, readings=30):
        board.write(result)
        pictures.write(result)
    writer.close()


def _hours() -> Callable[[], float]:
    """A clock of a run that has all the time that drawing needs."""
    passed = 0.0

    def now() -> float:
        nonlocal passed
        passed += 3600
        return passed

    return now


@contextmanager
def tensorboard(folder: Path) -> Iterator[str]:
    """Serve a folder; gives the address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # From the folder above, as the page shows the path that it was given.
    command = ["-m", "tensorboard.main", "--logdir", folder.name, "--port", str(port), "--load_fast=false"]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    server = subprocess.Popen([sys.executable, *command], cwd=folder.parent, **quiet)
    address = f"http://127.0.0.1:{port}"
    try:
        for _ in range(400):
            try:
                with urllib.request.urlopen(f"{address}/data/runs", timeout=5) as answer:
                    if b"[]" not in answer.read():
                        break
            except OSError:
                pass
            time.sleep(0.3)
        yield address
    finally:
        server.terminate()
        server.wait(20)
