"""TensorBoard's own pages in a headless Chromium, with the pages' defaults, for a small run and one of 48 x 32."""

from __future__ import annotations

import base64
import io
import urllib.request
from dataclasses import dataclass
from typing import Any

import pytest

from tests.browser import Browser
from tests.dashboards.board_page import tensorboard, write_board

pytestmark = [pytest.mark.slow, pytest.mark.browser]

_WALK = """(() => {
  const found = [];
  const walk = (node) => {
    %s
    for (const next of [...(node.children || []), ...(node.shadowRoot ? node.shadowRoot.children : [])]) walk(next);
  };
  walk(document.body);
  return found;
})()"""
AXES = _WALK % (
    'if (node.tagName === "VZ-LINE-CHART2") found.push(Array.from((node.shadowRoot || node)'
    '.querySelectorAll("text")).map((text) => text.textContent));'
)
IMAGES = _WALK % (
    'if (node.tagName === "IMG" && node.naturalWidth) { const box = node.getBoundingClientRect();'
    " found.push([node.src, box.left, box.top, box.width, box.height, node.naturalWidth]); }"
)
WORDS = _WALK % (
    "for (const part of node.childNodes)"
    " if (part.nodeType === Node.TEXT_NODE && part.textContent.trim()) found.push(part.textContent.trim());"
)
OF_OTHERS = ("Multiple instances of Three.js",)  # what TensorBoard itself says in the console


@dataclass
class Board:
    address: str
    layer: int
    pair: tuple[int, int]
    layers: int
    heads: int


@pytest.fixture(scope="module", params=[(4, 4, 2, (1, 3)), (48, 32, 17, (3, 21))], ids=["4x4", "48x32"])
def board(request, tmp_path_factory):
    layers, heads, layer, pair = request.param
    folder = tmp_path_factory.mktemp("board")
    write_board(folder / "hdi", layers, heads, layer=layer, pair=pair)
    with tensorboard(folder) as address:
        yield Board(address, layer, pair, layers, heads)


@pytest.fixture(scope="module")
def browser():
    with Browser() as opened:
        yield opened


def open_page(browser: Browser, board: Board, page: str) -> None:
    browser.call("Page.navigate", url="about:blank")  # else only the fragment of the address changes
    browser.open(f"{board.address}/#{page}", width=1440)


def errors(browser: Browser) -> list[str]:
    return [error for error in browser.errors if not any(known in error for known in OF_OTHERS)]


def test_the_charts_of_alignment_span_the_whole_scale_by_default(browser, board):
    open_page(browser, board, "custom_scalars")
    browser.until(f"{AXES}.length > 0 && {AXES}[0].length > 4")
    assert {"0", "1"} <= set(browser.value(AXES)[0]), "the worst alignment is 1 and is not cut off"
    assert errors(browser) == []


@pytest.mark.parametrize("page", ["scalars", "timeseries"])
def test_the_first_charts_name_the_layer_of_the_alert(browser, board, page):
    open_page(browser, board, page)
    mark = f"model.layers.{board.layer}.self_attn"
    browser.until(f"{WORDS}.some((words) => words.endsWith({mark!r}))")
    words = browser.value(WORDS)
    assert not any("model.layers." in word and not word.endswith(mark) for word in words), "no other layer is in sight"
    assert errors(browser) == []


def shown_pictures(browser: Browser, board: Board) -> dict[str, tuple[Any, Any]]:
    """The two pictures of the page Images: as they were drawn, and as the page shows them."""
    from PIL import Image

    open_page(browser, board, "images")
    browser.until(f"{IMAGES}.length === 2")
    data = browser.call("Page.captureScreenshot", format="png")["data"]
    screen = Image.open(io.BytesIO(base64.b64decode(data))).convert("RGB")
    names = [words for words in browser.value(WORDS) if words in ("attention_heads/heads", "attention_heads/layers")]
    found = {}
    for name, (source, left, top, width, height, _) in zip(names, browser.value(IMAGES)):
        assert top + height <= 900, "it is seen without scrolling"
        with urllib.request.urlopen(source) as answer:
            drawn = Image.open(io.BytesIO(answer.read())).convert("RGB")
        found[name] = drawn, screen.crop((int(left), int(top), int(left + width), int(top + height)))
    return found


def is_yellow(pixel: tuple[int, int, int]) -> bool:
    return pixel[0] > 215 and pixel[1] > 180 and pixel[2] < 110


def is_red(pixel: tuple[int, int, int]) -> bool:
    return pixel[0] > 150 and pixel[1] < 110 and pixel[2] < 110


def test_the_page_of_pictures_shows_the_layer_and_rings_the_pair(browser, board):
    pictures = shown_pictures(browser, board)
    assert set(pictures) == {"attention_heads/heads", "attention_heads/layers"}
    assert errors(browser) == []
    _, layers = pictures["attention_heads/layers"]
    assert layers.width >= 300
    dark = [
        (x, y) for x in range(layers.width) for y in range(layers.height) if sum(layers.getpixel((x, y))) < 220
        and layers.getpixel((x, y))[2] > layers.getpixel((x, y))[0] + 30
    ]  # fmt: skip
    left, right = min(x for x, _ in dark), max(x for x, _ in dark)
    top, bottom = min(y for _, y in dark), max(y for _, y in dark)
    bar = int(left + 0.8 * (right - left))  # the colour scale is to the right of the map
    rows = [
        y for y in range(top, bottom + 1)
        if sum(is_yellow(layers.getpixel((x, y))) for x in range(left, bar)) > 0.1 * (bar - left)
    ]  # fmt: skip
    place = (board.layer + 0.5) / board.layers
    assert rows, "the collapsed layer is bright"
    assert (sum(rows) / len(rows) - top) / (bottom - top) == pytest.approx(place, abs=0.06)
    assert len(rows) / (bottom - top) < 1.6 / board.layers + 0.02, "and no other"
    _, heads = pictures["attention_heads/heads"]
    reds = [(x, y) for x in range(heads.width) for y in range(40, heads.height) if is_red(heads.getpixel((x, y)))]
    assert len(reds) > 40, "the pair is ringed, and its heads are named in red"


def test_the_page_of_texts_holds_the_sentence_of_the_alert(browser, board):
    open_page(browser, board, "text")
    a, b = board.pair
    said = f"model.layers.{board.layer}.self_attn: heads {a} and {b} are nearly one head"
    browser.until(f"{WORDS}.some((words) => words.includes({said!r}))")
    assert errors(browser) == []
