"""The documentation as it is built, in a headless Chromium: on a phone and on a screen."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.browser import Browser

pytestmark = [pytest.mark.slow, pytest.mark.browser]

CUT_OFF = """[...document.querySelectorAll("pre")].filter((code) => code.clientWidth
  && code.scrollWidth > code.clientWidth + 1).map((code) => code.textContent.slice(0, 60))"""
WITHOUT_BUTTON = """[...document.querySelectorAll("div.highlight")].filter((block) => !block.querySelector(".copybtn"))
  .map((block) => block.textContent.slice(0, 60))"""


NO_PICTURE = "[...document.images].filter((one) => one.complete && !one.naturalWidth).map((one) => one.src)"


@pytest.fixture(scope="module")
def site(tmp_path_factory, root_of_all) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-q", "-b", "html", str(root_of_all / "docs"), str(folder)]
    subprocess.run(command, cwd=root_of_all, check=True, capture_output=True)
    return folder


@pytest.fixture(scope="module")
def root_of_all() -> Path:
    return Path(__file__).parents[2]


@pytest.fixture(scope="module")
def browser():
    with Browser() as one:
        yield one


def test_no_code_is_cut_off_every_block_can_be_copied_and_every_picture_is_there(browser, site):
    pages = sorted(site.glob("*.html"))
    assert len(pages) > 20
    found = {}
    for page in pages:
        if page.stem in ("api", "genindex", "search", "supported-models"):  # no code, or a table of a thousand rows
            continue
        for width in (390, 1440):
            browser.open(page.as_uri(), width=width)
            browser.until("!document.querySelector('div.highlight') || Boolean(document.querySelector('.copybtn'))")
            wrong = {
                "cut off": browser.value(CUT_OFF),
                "cannot be copied": browser.value(WITHOUT_BUTTON),
                "no picture": browser.value(
                    "[...document.images].filter((one) => !one.naturalWidth).map((one) => one.src)"
                ),
                "wider than the window": browser.value("document.documentElement.scrollWidth > window.innerWidth + 1"),
                "errors": list(browser.errors),
            }
            found |= {f"{page.stem} at {width}: {what}": one for what, one in wrong.items() if one}
    assert found == {}


def test_the_page_begins_with_the_collapse(browser, site):
    browser.open((site / "index.html").as_uri(), width=1440)
    pictures = browser.value("[...document.querySelectorAll('article img')].map((one) => one.src.split('/').pop())")
    assert pictures[:2] == ["collapse.png", "before-after.png"]
    words = browser.value("document.querySelector('article').innerText")
    assert words.index("heads 0 and 5 are nearly one head") < words.index("In your own training")
