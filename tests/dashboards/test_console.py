from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from hdi_callback import HDICallback, HeadDiversityMonitor, watch_heads
from hdi_callback.attention import survey
from hdi_callback.dashboards import console
from hdi_callback.dashboards.console import place_to_read, print_layers
from hdi_callback.errors import MisconfigurationError
from hdi_callback.monitoring.alerts import Alert, Finding
from hdi_callback.monitoring.plain_table import plain_table
from hdi_callback.rules import Rule
from tests.models import LAYERS, Classifier

CODE = (
    "from hdi_callback.attention import survey\n"
    "from hdi_callback.dashboards.console import print_layers\n"
    "from tests.models import Classifier\n"
    "found = survey(Classifier())\n"
    "print_layers(found.layers, found.refused, every_n_steps=50)\n"
)


def test_without_a_terminal_the_layers_are_plain_lines(capsys):
    found = survey(Classifier())
    print_layers(found.layers, found.refused, every_n_steps=50)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "hdi_callback watches 2 attention layers, every 50 optimizer steps"
    assert [line.split(":")[0].strip() for line in lines[1:]] == LAYERS


@pytest.mark.slow
def test_a_table_on_a_terminal(root):
    controller, terminal = pty.openpty()
    done = subprocess.Popen(
        [sys.executable, "-c", CODE], cwd=root, stdout=terminal, env=os.environ | {"COLUMNS": "120", "TERM": "xterm"}
    )
    os.close(terminal)
    shown = b""
    while True:
        try:
            part = os.read(controller, 4096)
        except OSError:  # the other end is closed
            break
        if not part:
            break
        shown += part
    os.close(controller)
    assert done.wait() == 0
    text = re.sub(r"\x1b\[[0-9;]*m", "", shown.decode())
    assert "┃ layer" in text
    assert all(name in text for name in LAYERS)


def test_modules_that_are_not_watched_are_listed_with_the_reason(capsys):
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.num_heads = 3
            self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(32, 32) for _ in range(4))

    found = survey(nn.ModuleDict({"odd": Odd(), "good": Classifier()}))
    print_layers(found.layers, found.refused, every_n_steps=5)
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.strip().startswith("odd:")]
    assert "not watched: it could not be run with synthetic inputs" in line, "it has no forward"


@pytest.mark.parametrize(("heads", "key_heads", "shown"), [(4, 4, ": 4 heads"), (4, 2, ": 4 (2 key) heads")])
def test_grouped_key_heads_are_shown(capsys, heads, key_heads, shown):
    class Grouped(nn.Module):
        def __init__(self):
            super().__init__()
            self.num_heads, self.num_key_value_heads = heads, key_heads
            self.q_proj, self.out_proj = nn.Linear(32, 32), nn.Linear(32, 32)
            self.k_proj, self.v_proj = nn.Linear(32, 8 * key_heads), nn.Linear(32, 8 * key_heads)

        def forward(self, x):
            parts = (part(x).unflatten(-1, (-1, 8)).transpose(1, 2) for part in (self.q_proj, self.k_proj, self.v_proj))
            out = nn.functional.scaled_dot_product_attention(*parts, enable_gqa=True)
            return self.out_proj(out.transpose(1, 2).flatten(2))

    found = survey(nn.ModuleDict({"attn": Grouped()}))
    print_layers(found.layers, found.refused, every_n_steps=5)
    assert f"attn{shown} of width 8" in capsys.readouterr().out


COLLAPSE = """
import sys
from hdi_callback.dashboards.console import AlertLines
from hdi_callback.monitoring.alerts import Alert, Finding
from hdi_callback.monitoring.plain_table import plain_table
from hdi_callback.monitoring.readings import LayerRecord, Record
from hdi_callback.monitoring.session.sink import Result
told = Finding("all heads are nearly identical", level="critical")
lines = AlertLines()
for step in (4, 8):
    alert = Alert(step, "attn", "mean alignment", "critical", f"step {step}, attn: {told.what}", told)
    lines.write(Result(Record(step, {"attn": LayerRecord()}), (alert,)))
"""


def test_a_critical_alert_is_printed_once_and_the_first_one_links_to_its_explanation(root):
    done = subprocess.run([sys.executable, "-c", COLLAPSE], cwd=root, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    first, second = done.stdout.splitlines()
    assert (
        first == "hdi_callback critical: step 4, attn: all heads are nearly identical. More: hdi explain mean-alignment"
    )
    assert second == "hdi_callback critical: step 8, attn: all heads are nearly identical"


@pytest.mark.slow
@pytest.mark.parametrize("way", ["-W error", "captureWarnings", "record"])
def test_a_critical_alert_is_a_python_warning_if_warnings_are_errors_or_captured(root, way):
    before = {
        "-W error": "import warnings; from hdi_callback.errors import HeadCollapseWarning as W\n"
        "warnings.simplefilter('error', W)\n",
        "captureWarnings": "import logging; logging.basicConfig(); logging.captureWarnings(True)\n",
        "record": "import warnings; warnings.catch_warnings(record=True).__enter__(); import atexit\n"
        "atexit.register(lambda: print('HeadCollapseWarning' if warnings._showwarnmsg_impl.__self__ else '',"
        " file=sys.stderr))\n",
    }[way]
    done = subprocess.run([sys.executable, "-c", before + COLLAPSE], cwd=root, capture_output=True, text=True)
    assert "HeadCollapseWarning" in done.stderr


def test_the_link_to_an_explanation_is_the_documentation_url_if_the_package_has_one(monkeypatch):
    known = {"Project-URL": ["Repository, https://example.org/hdi", "Documentation, https://example.org/docs/"]}
    console._documentation.cache_clear()
    assert place_to_read("worst pair") == "hdi explain worst-pair"
    monkeypatch.setattr(console, "metadata", lambda _: SimpleNamespace(get_all=known.get))
    console._documentation.cache_clear()
    assert place_to_read("worst pair") == "https://example.org/docs/what-number-is-bad.html"
    assert place_to_read("a rule of one's own") == ""
    console._documentation.cache_clear()


def test_notebook_representations_escape_names():
    alert = Alert(4, "<attn>", "worst pair", "warning", "step 4, <attn>: two heads", Finding("two heads"))
    assert alert._repr_html_() == ('<p><b style="color:#b35900">warning</b> step 4, &lt;attn&gt;: two heads</p>')
    monitor = HeadDiversityMonitor(Classifier())
    shown = monitor._repr_html_()
    assert all(f"<td>{name}</td><td>4</td>" in shown for name in LAYERS)
    monitor.close()
    assert "no run has begun" in HDICallback()._repr_html_()


def test_printed_objects_show_layers_and_numbers_and_no_tensors():
    model = nn.ModuleDict({"watched": nn.MultiheadAttention(32, 4), "odd\ud800": nn.MultiheadAttention(32, 1)})
    with HeadDiversityMonitor(model) as monitor:
        reading = monitor.measure(7)
        lines = str(monitor).splitlines()
    assert lines[0] == f"hdi_callback watches {len(monitor.layers)} attention layers"
    assert "  watched: 4 heads of width 8, layout: nn.MultiheadAttention, packed" in lines
    assert repr(monitor).startswith("<HeadDiversityMonitor of ")
    record = reading.record()
    title, headings, *rows = str(record).splitlines()
    column = headings.split().index("hdi")
    numbers = {row.split()[0]: row.split()[column] for row in rows}
    assert title == "step 7"
    assert float(numbers["watched"]) == pytest.approx(record.layers["watched"].values["hdi"], rel=1e-2)
    assert r"odd\ud800" in numbers or len(monitor.layers) == 1
    shown = [repr(monitor), str(monitor), repr(reading), repr(record), str(record), repr(record.layers["watched"])]
    shown += [repr(monitor.layers[0]), str(HDICallback())]
    assert all("tensor(" not in text and " object at 0x" not in text for text in shown)
    assert str(HDICallback()) == "HDICallback: no run has begun"


def test_a_printed_callback_names_its_history_and_its_layers(tmp_path):
    model = Classifier()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with watch_heads(model, optimizer, log_dir=tmp_path, verbose=False) as heads:
        with heads.step():
            model(torch.zeros(2, 3, dtype=torch.long)).sum().backward()
            optimizer.step()
        lines = str(heads).splitlines()
    assert lines[0].endswith(": no active alert")
    assert lines[1] == f"  history: {heads.history_path}"
    assert lines[2] == "hdi_callback watches 2 attention layers"


def test_a_printed_table_says_how_many_rows_it_leaves_out():
    table = plain_table(["layer", "HDI"], [[f"layer {number}", "0.5"] for number in range(103)])
    assert table.splitlines()[100:] == ["layer 99  0.5", "and 3 more"]


def test_a_rule_passed_as_a_string_is_refused_with_the_class_to_write():
    class WorstPairs(Rule):  # one of the user's own is none of `hdi_callback.rules`
        name = "worst pairs"

        def judge(self, series, active):
            return None

    with pytest.raises(MisconfigurationError, match=r"Did you mean WorstPair\(\) of hdi_callback\.rules\?"):
        HDICallback(alerts=["worst_pairs"])
