"""The report as a person sees it, in a headless Chromium."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import escape, unescape
from pathlib import Path

import numpy as np
import pytest

from hdi_callback.dashboards.report import write_report
from tests.dashboards.synthetic import collapsing, facts_of, write

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
pytestmark = [pytest.mark.browser, pytest.mark.skipif(CHROMIUM is None, reason="needs a headless chromium")]
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--hide-scrollbars",
)  # fmt: skip
CHECK = """
<script>
const box = (element) => element.getBoundingClientRect();
const texts = [...document.querySelectorAll("svg text")].filter((text) => text.textContent.trim());
const found = {
  wide: document.documentElement.scrollWidth > window.innerWidth + 1,
  verdict: box(document.querySelector(".verdict")).bottom,
  map: box(document.querySelector("svg")).bottom,
  strange: texts.map((text) => getComputedStyle(text).fill)
    .filter((fill) => fill !== getComputedStyle(document.body).color && fill !== "rgb(209, 36, 47)"),
  outside: texts.filter((text) => box(text).left < box(text.ownerSVGElement).left - 2
    || box(text).right > box(text.ownerSVGElement).right + 2).map((text) => text.textContent),
};
const out = document.createElement("pre");
out.id = "found"; out.textContent = JSON.stringify(found); document.body.append(out);
</script>
"""


def chromium(folder: Path, page: Path, *arguments: str) -> str:
    command = [str(CHROMIUM), *FLAGS, f"--user-data-dir={folder / 'profile'}", *arguments, page.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


@pytest.fixture(scope="module", params=[(48, 32, 17, (3, 21)), (4, 6, 2, (1, 3))], ids=["48x32", "4x6"])
def page(request, tmp_path_factory):
    layers, heads, layer, pair = request.param
    path = tmp_path_factory.mktemp("page") / "run" / "hdi" / "history.jsonl"
    run = write(path, facts_of(layers, heads), collapsing(layers, heads, 40, layer=layer, pair=pair))
    return write_report(run)


@pytest.mark.parametrize("width", [500, 1280])
def test_verdict_and_map_are_on_the_first_screen_and_no_text_is_cut_off(page, tmp_path, width):
    checked = tmp_path / "checked.html"
    checked.write_text(page.read_text().replace("</body>", f"{CHECK}</body>"))
    seen = chromium(tmp_path, checked, "--dump-dom", f"--window-size={width},900")
    found = json.loads(unescape(re.search(r'<pre id="found">(.*?)</pre>', seen, re.DOTALL)[1]))
    assert not found["wide"]
    assert found["outside"] == []
    assert found["strange"] == [], "drawings have the ink of the page, but for the red names of alerts"
    assert found["verdict"] < 500
    assert found["map"] < 900


def test_no_table_is_cut_or_scrolls_on_a_phone_of_400_pixels(page, tmp_path):
    """Chromium has no window below 500 pixels, so that the page stands in a frame."""
    script = """<script>
    const tables = [...document.querySelectorAll("table")].filter((table) => table.offsetParent);
    const isCut = (table) => table.getBoundingClientRect().right > window.innerWidth;
    const cut = tables.filter(isCut).map((table) => table.innerText);
    parent.postMessage(JSON.stringify({number: tables.length, width: window.innerWidth, cut}), "*");
    </script>"""
    framed = page.read_text().replace("</body>", f"{script}</body>")
    frame = tmp_path / "frame.html"
    frame.write_text(
        f'<pre id="found"></pre><iframe srcdoc="{escape(framed)}" style="width: 400px; border: 0"></iframe>'
        "<script>onmessage = (event) => { document.getElementById('found').textContent = event.data; };</script>"
    )
    seen = chromium(tmp_path, frame, "--dump-dom", "--virtual-time-budget=5000")
    found = json.loads(unescape(re.search(r'<pre id="found">(.*?)</pre>', seen, re.DOTALL)[1]))
    assert found["width"] == 400
    assert found["number"] >= 3
    assert found["cut"] == []


@pytest.mark.parametrize("is_dark", [False, True], ids=["light", "dark"])
def test_the_page_is_legible_in_light_and_dark_and_the_layer_is_seen(page, tmp_path, is_dark):
    from PIL import Image

    picture = tmp_path / "screen.png"
    dark = ["--blink-settings=preferredColorScheme=0"] if is_dark else []
    chromium(tmp_path, page, f"--screenshot={picture}", "--window-size=1280,900", *dark)
    pixels = np.asarray(Image.open(picture).convert("RGB")).astype(int)
    paper = pixels[2, 2].mean()
    assert (paper < 60) == is_dark
    ink = np.abs(pixels.mean(-1) - paper) > 150
    assert ink.mean() > 0.005, "the text stands out from the page"
    yellow = (pixels[..., 0] > 215) & (pixels[..., 1] > 180) & (pixels[..., 2] < 110)
    assert yellow[:, :700].sum() > 200


def test_it_prints_on_paper(page, tmp_path):
    paper = tmp_path / "report.pdf"
    chromium(tmp_path, page, f"--print-to-pdf={paper}")
    assert paper.read_bytes()[:5] == b"%PDF-"
