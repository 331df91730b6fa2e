"""TensorBoard's own page in a headless Chromium, with the page's defaults."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
import urllib.request

import pytest
from torch.utils.tensorboard import SummaryWriter

from hdi_callback.dashboards.tensorboard import Board
from hdi_callback.monitoring.metrics import DEFAULT_METRICS
from tests.browser import Browser
from tests.dashboards.collapsing_run import collapsing_run

AXES = """(() => {
  const charts = [];
  const walk = (node) => {
    if (node.tagName === "VZ-LINE-CHART2")
      charts.push(Array.from((node.shadowRoot || node).querySelectorAll("text")).map((text) => text.textContent));
    for (const next of [...(node.children || []), ...(node.shadowRoot ? node.shadowRoot.children : [])]) walk(next);
  };
  walk(document.body);
  return charts;
})()"""


@pytest.mark.slow
@pytest.mark.browser
@pytest.mark.parametrize(("layers", "heads", "layer", "pair"), [(4, 4, 2, (1, 3)), (48, 32, 17, (3, 21))])
def test_the_charts_of_alignment_span_the_whole_scale_by_default(tmp_path, layers, heads, layer, pair):
    writer = SummaryWriter(str(tmp_path / "hdi"))
    board = Board(writer, DEFAULT_METRICS, [f"model.layers.{number}.self_attn" for number in range(layers)])
    for result in collapsing_run(layers, heads, layer=layer, pair=pair, readings=30):
        board.write(result)
    writer.close()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = ["-m", "tensorboard.main", "--logdir", str(tmp_path), "--port", str(port), "--load_fast=false"]
    server = subprocess.Popen([sys.executable, *command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(200):
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/data/runs", timeout=5).read()
                break
            except OSError:
                time.sleep(0.3)
        with Browser() as browser:
            browser.open(f"http://127.0.0.1:{port}/#custom_scalars", width=1440)
            browser.until(f"{AXES}.length > 0 && {AXES}[0].length > 4")
            assert {"0", "1"} <= set(browser.value(AXES)[0]), "the worst alignment stands at 1 and is not cut off"
    finally:
        server.terminate()
        server.wait(20)
