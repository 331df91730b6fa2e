"""The report as a person sees it, in a headless Chromium: on a phone and on a screen, in light and dark, on paper."""

from __future__ import annotations

import csv
import math
from pathlib import Path

import pytest
import torch
from torch import nn

from hdi_callback import audit, report
from tests.browser import DRAWN, Browser
from tests.dashboards.report.synthetic import write_run

pytestmark = [pytest.mark.browser, pytest.mark.slow]

TEXTS = Path(__file__).parents[2].joinpath("texts.js").read_text()


@pytest.fixture(scope="module")
def browser():
    with Browser() as opened:
        yield opened


def _grouped() -> nn.Module:
    """Sixteen heads that share eight keys, of which two are nearly one in layer 5."""
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=64, num_hidden_layers=8, num_attention_heads=16, num_key_value_heads=8, intermediate_size=32,
        vocab_size=16,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        keys = model.model.layers[5].self_attn.k_proj.weight
        keys[8:12] = keys[20:24] + 1e-4 * torch.randn(4, 64)
    return model


@pytest.fixture(scope="module")
def pages(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    write_run(folder / "small" / "hdi" / "history.jsonl")
    with (folder / "small" / "metrics.csv").open("w", newline="") as file:
        csv.writer(file).writerows(
            [["step", "train_loss"], *([step, 1 + 3 * math.exp(-step / 300)] for step in range(0, 701, 20))]
        )
    write_run(folder / "good" / "hdi" / "history.jsonl", collapsed=None)
    write_run(
        folder / "deep" / "history.jsonl", layers=48, heads=32, width=2, features=64, steps=8, collapsed=(17, 3, 21)
    )
    write_run(
        folder / "deepest" / "history.jsonl",
        layers=96,
        heads=128,
        width=2,
        features=256,
        steps=8,
        collapsed=(61, 7, 90),
    )
    write_run(folder / "lost" / "history.jsonl", collapsed=None, lost=(1,))
    write_run(folder / "alone" / "history.jsonl", heads=1, collapsed=None)
    write_run(folder / "apart" / "history.jsonl", layers=1, heads=2, features=8, collapsed=None, seed=0)
    write_run(folder / "wide" / "history.jsonl", every=100_000, steps=30)
    long_name = ("wrapper" * 4 + ".") * 9 + "{}.attention"
    write_run(folder / "long" / "history.jsonl", name=long_name.format)
    write_run(folder / "three" / "history.jsonl", heads=8, width=2, collapsed=(1, 2, 4, 7))
    found = {
        name: report(folder / name, path=folder / f"{name}.html").path
        for name in ("small", "good", "deep", "deepest", "three", "lost", "alone", "apart", "wide", "long")
    }
    found["audit"] = report(audit(_grouped()), path=folder / "audit.html").path
    found["both"] = report(folder / "small", folder / "good", path=folder / "both.html").path
    found["trio"] = report(*(folder / name for name in ("small", "good", "three")), path=folder / "trio.html").path
    return found


def show(browser: Browser, page: Path, width: int = 1440, *, dark: bool = False) -> None:
    browser.open(page.as_uri(), width=width, dark=dark, ready=DRAWN)


@pytest.mark.parametrize("width", [390, 1440])
@pytest.mark.parametrize("name", ["small", "good", "deep", "deepest", "both", "trio", "audit", "lost", "long"])
def test_no_text_is_cut_off_or_covered_and_no_script_error_occurs(browser, pages, name, width):
    show(browser, pages[name], width)
    assert browser.value(f"(() => {{ {TEXTS} return texts.cutOff(); }})()") == []
    assert browser.value(f"(() => {{ {TEXTS} return texts.overlaps(); }})()") == []
    assert browser.errors == []


def test_the_check_of_texts_detects_cut_off_and_covered_text(browser, pages):
    show(browser, pages["small"], 390)
    browser.value(
        "document.querySelector('main').insertAdjacentHTML('beforeend',"
        ' \'<p style="margin-top:-30px">covered words</p><p style="width:600px">wide</p>'
        '<div style="width:40px;overflow:hidden;white-space:nowrap">far too long for this</div>\')'
    )
    assert any(
        "covered words" in message for message in browser.value(f"(() => {{ {TEXTS} return texts.overlaps(); }})()")
    )
    cut = browser.value(f"(() => {{ {TEXTS} return texts.cutOff(); }})()")
    assert "the page is wider than the window" in cut
    assert any("far too long" in message for message in cut)


@pytest.mark.parametrize("width", [390, 1440])
@pytest.mark.parametrize(
    ("name", "layer", "pair"), [("small", 2, (1, 3)), ("deep", 17, (3, 21)), ("deepest", 61, (7, 90))]
)
def test_the_layer_and_the_pair_are_shown_at_once(browser, pages, name, layer, pair, width):
    show(browser, pages[name], width)
    at_once = browser.value("document.querySelector('.verdict').getBoundingClientRect().bottom")
    assert at_once < 500
    words = browser.value("document.querySelector('.verdict').innerText")
    assert f"model.blocks.{layer}.attn: heads {pair[0]} and {pair[1]} are nearly one head" in words
    rows = browser.value("document.querySelector('.layers-map').data[0].z.map((row) => row[row.length - 1])")
    assert [row for row, value in enumerate(rows) if value > 0.8] == [layer]
    labels = browser.value("[...document.querySelectorAll('.layers-map .ytick text')].map((one) => one.textContent)")
    assert sum(str(layer) in label and "▸" in label for label in labels) == 1
    marks = browser.value("document.querySelector('.heads-map').data.slice(-1)[0].x.concat([])")
    assert sorted(marks) == sorted(pair)
    heads = browser.value("document.querySelector('.heads-map').data[0].z")
    assert heads[pair[0]][pair[1]] > 0.95
    assert sum(value is not None and value > 0.8 for row in heads for value in row) == 2


def test_the_page_of_an_audit_shows_the_layer_and_the_pair(browser, pages):
    show(browser, pages["audit"], 390)
    assert "layers.5.self_attn: heads 2 and 5" in browser.value("document.querySelector('.verdict').innerText")
    rows = browser.value("document.querySelector('.layers-map').data[0].z.map((row) => row[0])")
    assert [row for row, value in enumerate(rows) if value > 0.8] == [5]
    assert sorted(browser.value("document.querySelector('.heads-map').data.slice(-1)[0].x.concat([])")) == [2, 5]
    assert browser.value("getComputedStyle(document.querySelector('.slider').closest('label')).display") == "none"


def test_metrics_that_were_not_measured_are_named_and_not_drawn(browser, pages):
    browser.open(pages["lost"].as_uri(), width=1440, ready=DRAWN)
    assert browser.value("document.querySelector('.spectra-note').textContent") == (
        "model.blocks.1.attn, step 700: not measured."
    )
    for drawing in ("spectra", "heads-map"):
        assert browser.value(f"document.querySelector('.{drawing}').style.display") == "none"
    browser.open(pages["alone"].as_uri(), width=1440, ready=DRAWN)
    assert browser.value("document.querySelector('.pair').textContent").endswith("no pair of heads was compared.")
    assert "closest pair" not in browser.value("document.querySelector('.spectra-note').textContent")


def test_a_curve_below_chance_stays_inside_its_plot(browser, pages):
    browser.open(pages["apart"].as_uri(), width=1440, ready=DRAWN)
    node = "document.querySelector('.timeline')"
    lowest, range_ = browser.value(f"[Math.min(...{node}.data[0].y), {node}.layout.yaxis.range[0]]")
    assert range_ < lowest < -0.02


def test_the_last_step_is_labelled_with_any_number_of_digits(browser, pages):
    browser.open(pages["wide"].as_uri(), width=1440, ready=DRAWN)
    labels = browser.value("[...document.querySelectorAll('.layers-map .xtick text')].map((one) => one.textContent)")
    assert labels[-1] == "2900000"


def test_the_label_beside_a_list_is_not_broken_within_words(browser, pages):
    browser.open(pages["long"].as_uri(), width=390, ready=DRAWN)
    assert browser.value("document.querySelector('.controls label').getBoundingClientRect().height") < 50


def test_all_heads_that_merge_are_marked(browser, pages):
    show(browser, pages["three"])
    mark = "document.querySelector('.heads-map').data.slice(-1)[0]"
    pairs = {
        tuple(sorted(pair))
        for pair in zip(browser.value(f"{mark}.x.concat([])"), browser.value(f"{mark}.y.concat([])"))
    }
    assert pairs == {(2, 4), (2, 7), (4, 7)}
    assert "heads 2, 4 and 7" in browser.value("document.querySelector('.pair').textContent")
    assert "heads 2, 4 and 7 are nearly one head" in browser.value("document.querySelector('.verdict').innerText")


def test_the_collapsed_layer_is_painted_in_another_colour(browser, pages, tmp_path):
    from PIL import Image

    show(browser, pages["deep"])
    browser.picture(tmp_path / "page.png")
    box = browser.value(
        "(() => { const b = document.querySelector('.layers-map .heatmaplayer image').getBoundingClientRect();"
        " return [b.left + scrollX, b.top + scrollY, b.width, b.height]; })()"
    )
    picture = Image.open(tmp_path / "page.png").convert("RGB")
    left, top, width, height = box

    def brightness(layer: int, place: float) -> float:
        return sum(picture.getpixel((int(left + place * width), int(top + (layer + 0.5) * height / 48)))) / 3

    assert brightness(17, 0.97) > 130  # cividis goes from dark blue to yellow
    assert max(brightness(layer, 0.97) for layer in range(48) if layer != 17) < 110


def test_the_slider_moves_the_maps(browser, pages):
    show(browser, pages["small"])
    late = browser.value("document.querySelector('.heads-map').data[0].z[1][3]")
    moved = (
        "(() => { const s = document.querySelector('.slider'); s.value = 0;"
        " s.dispatchEvent(new Event('input', {bubbles: true}));"
        " return [document.querySelector('.heads-map').data[0].z[1][3],"
        " document.querySelector('.step-words').textContent,"
        " document.querySelector('.layers-map').layout.shapes[1].x0]; })()"
    )
    early, words, column = browser.value(moved)
    assert late > 0.95
    assert early < 0.5
    assert (words, column) == ("step 0", 0)


def test_another_layer_can_be_chosen_from_the_list_and_on_the_map(browser, pages):
    show(browser, pages["deep"])
    choose = (
        "(() => { const s = document.querySelector('.layer-choice'); s.value = 'model.blocks.5.attn';"
        " s.dispatchEvent(new Event('change')); return document.querySelector('.pair').textContent; })()"
    )
    assert browser.value(choose).startswith("model.blocks.5.attn, step 700: heads ")
    browser.value("document.querySelector('.layers-map').emit('plotly_click', {points: [{x: 2, y: 40}]})")
    assert browser.value("document.querySelector('.pair').textContent").startswith("model.blocks.40.attn, step 200: ")
    assert browser.value("document.querySelector('.layer-choice').value") == "model.blocks.40.attn"


def test_the_loss_is_drawn_above_the_alerts_on_the_same_step_axis(browser, pages):
    show(browser, pages["small"])
    curves = browser.value("document.querySelector('.timeline').data.map((one) => [one.yaxis, one.x.length])")
    assert ["y2", 36] in curves
    words = browser.value("document.querySelector('.timeline').closest('figure').innerText")
    assert "Above: train_loss." in words


def test_dark_and_light_mode_have_different_colours(browser, pages):
    colours = []
    for dark in (False, True):
        show(browser, pages["small"], dark=dark)
        paper, ink = (browser.value(f"getComputedStyle(document.body).{name}") for name in ("backgroundColor", "color"))
        colours.append((paper, ink, browser.value("document.querySelector('.layers-map').layout.font.color")))
    assert colours[0] != colours[1]
    assert colours[1][0] == "rgb(13, 17, 23)"
    assert colours[0][2] != colours[1][2]


def test_every_drawing_has_a_text_description(browser, pages):
    show(browser, pages["small"])
    said = browser.value("[...document.querySelectorAll('[role=img]')].map((one) => one.getAttribute('aria-label'))")
    assert len(said) == 4
    assert sum("heads 1 and 3" in words for words in said) >= 2
    assert all(
        browser.value("[...document.querySelectorAll('input, select')].map((one) => one.getAttribute('aria-label'))")
    )


def test_the_report_can_be_printed(browser, pages, tmp_path):
    import base64

    show(browser, pages["small"])
    data = base64.b64decode(browser.call("Page.printToPDF", printBackground=True)["data"])
    assert data.startswith(b"%PDF")
    assert 2 <= data.count(b"/Type /Page\n") + data.count(b"/Type /Page ") <= 6
    assert browser.errors == []
