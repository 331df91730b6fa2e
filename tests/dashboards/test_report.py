from __future__ import annotations

import math
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from hdi_callback.dashboards.names import look_up
from hdi_callback.dashboards.report import write_report
from hdi_callback.errors import MisconfigurationError
from hdi_callback.history import RunHistory
from hdi_callback.record import Alert, LayerRecord, Record
from tests.dashboards.synthetic import CODE, TO_DO, collapsing, facts_of, write

_VOID = {"meta", "link", "br", "img", "input"}


class Page(HTMLParser):
    """The texts of a page by element, and what it would load."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.stack: list[str] = []
        self.texts: list[tuple[str, str]] = []
        self.loads: list[str] = []
        self.unclosed: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        self.loads += [value for key in ("src", "href", "xlink:href") if (value := found.get(key)) and value[0] != "#"]
        if tag not in _VOID:
            self.stack.append(f"{tag}.{found.get('class', '')}")

    def handle_endtag(self, tag):
        opened = self.stack.pop()
        if opened.split(".")[0] != tag:
            self.unclosed.append(f"{opened} closed by {tag}")

    def handle_startendtag(self, tag, attrs):
        if tag not in _VOID:
            self.handle_starttag(tag, attrs)
            self.stack.pop()
        else:
            self.handle_starttag(tag, attrs)

    def handle_data(self, data):
        if data.strip():
            self.texts.append((" ".join(self.stack), data.strip()))

    def of(self, element: str) -> list[str]:
        return [text for path, text in self.texts if element in path]


@pytest.fixture(scope="module")
def big(tmp_path_factory):
    path = tmp_path_factory.mktemp("big") / "run_7" / "hdi" / "history.jsonl"
    run = write(path, facts_of(48, 32), collapsing(48, 32, 400, layer=17, pair=(3, 21)))
    return run, write_report(run)


@pytest.mark.slow
def test_the_report_of_a_large_run_is_one_file_below_a_megabyte_that_loads_nothing(big):
    run, path = big
    assert path == run.path.with_name("report.html")
    assert path.stat().st_size < 500_000
    page = Page(path.read_text())
    assert page.unclosed == []
    assert page.stack == []
    assert all(address.startswith("data:") for address in page.loads)
    assert "<script" not in path.read_text()
    assert page.of("title")[0].endswith("run_7")
    assert "heads 3 and 21 of model.layers.17.self_attn are nearly one head" in " ".join(page.of("div.verdict alert"))
    rows = [text for text in page.of("table.layers") if text.startswith("model.layers.")]
    assert rows == ["model.layers.0-16,18-47.self_attn", "model.layers.17.self_attn"]


@pytest.fixture
def small(tmp_path):
    return write(tmp_path / "run" / "hdi" / "history.jsonl", facts_of(4, 6), collapsing(4, 6, 60, layer=2, pair=(1, 3)))


def page_of(run: RunHistory, **arguments) -> Page:
    return Page(write_report(run, **arguments).read_text())


def test_the_verdict_has_beside_it_what_to_paste(small):
    page = page_of(small)
    box = page.of("div.verdict alert")
    assert box[-2:] == [f"What to do now: {TO_DO}.", CODE]
    assert any("ALERT" in text for text in box)


def test_the_counts_of_alerts_agree_wherever_they_are_said(small):
    notice = Alert(0, "merged values", "notice", {"model.layers.0.self_attn": (0, 1)}, "heads write alike")
    first, *rest = small.records
    page = page_of(replace(small, records=[replace(first, alerts=(notice,)), *rest]))
    assert "Alerts (1 raised, 1 active, 1 notice)" in page.of("h2")
    assert "1 raised, 1 active, 1 notice" in page.of("table.facts")
    assert len([text for text in page.of("table.alerts") if text in {"warning", "notice", "critical"}]) == 2


def test_each_alert_leads_to_what_explains_its_rule(small):
    heading, rule = (page_of(small).of("table.alerts")[at] for at in (4, 11))
    assert heading == "hdi explain"
    assert look_up(rule).text == "worst pair"


def test_the_curves_have_a_legend(small):
    texts = page_of(small).of("svg")
    assert {"training loss", "closest pair, highest", "lowest", "alert"} <= set(texts)
    assert not any("resolved" in text for text in texts)


def test_texts_of_a_user_are_escaped(tmp_path):
    name = '<script>alert("x")</script>&.attn'
    facts = [{**facts_of(1, 4)[0], "name": name}]
    (record,) = collapsing(1, 4, 1, layer=0, pair=(1, 3))
    record = replace(record, layers={name: next(iter(record.layers.values()))})
    text = write_report(write(tmp_path / "<i>" / "history.jsonl", facts, iter([record]))).read_text()
    assert "<script" not in text
    assert Page(text).of("title")[0].endswith("/<i>")


def test_a_run_without_a_reading_and_one_that_measured_nothing_are_nothing_to_judge(tmp_path):
    empty = RunHistory(tmp_path / "history.jsonl", facts_of(2, 4), [])
    page = page_of(empty)
    assert "Nothing to judge: there is no reading yet." in page.of("div.verdict nothing")
    blank = [replace(record, layers={}) for record in collapsing(2, 4, 3, layer=1, pair=(1, 3))]
    page = page_of(replace(empty, records=[replace(record, active=(), alerts=()) for record in blank]))
    assert any("NOTHING TO JUDGE" in text for text in page.of("div.verdict nothing"))


def test_what_is_no_history_is_an_error_that_says_what_to_write(small, tmp_path):
    with pytest.raises(MisconfigurationError, match="write load_history"):
        write_report("runs/a")


def test_a_run_in_which_all_is_nan_from_the_start_has_a_report(tmp_path):
    name = facts_of(1, 4)[0]["name"]
    broken = Alert(0, "weights not finite", "critical", {name: ()}, f"the weights of {name} hold NaN")
    layer = LayerRecord({"hdi": math.nan, "hdi_worst_alignment": math.nan, "weights_not_finite": 4.0})
    records = [Record(step, {name: layer}, loss=math.nan, active=(broken,)) for step in (0, 50)]
    page = page_of(RunHistory(tmp_path / "history.jsonl", facts_of(1, 4), records))
    assert f"Since step 0: the weights of {name} hold NaN." in page.of("div.verdict alert")
