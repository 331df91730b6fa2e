"""The file that a report is, read without a browser."""

from __future__ import annotations

import csv
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from torch import nn

from hdi_callback import audit, report
from hdi_callback.dashboards.report.losses import find_losses
from hdi_callback.dashboards.report.pair_matrices import pair_alignment
from hdi_callback.dashboards.report.runs import page_of_run
from hdi_callback.errors import MisconfigurationError
from hdi_callback.monitoring.history import History, read_history
from hdi_callback.monitoring.readings import LayerRecord, Record
from tests.dashboards.report.synthetic import write_run

_VOID = {"meta", "link", "input", "br"}


class _Balance(HTMLParser):
    """Checks that every element is closed, and collects what would be loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loaded: list[str] = []
        self.text = ""

    def handle_starttag(self, tag, attributes):
        if tag not in _VOID:
            self.open.append(tag)
        self.loaded += [value for name, value in attributes if name in ("src", "href") and value]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if not self.open or self.open[-1] not in ("script", "style"):
            self.text += data


def read(page: Path) -> _Balance:
    parser = _Balance()
    parser.feed(page.read_text(encoding="utf-8"))
    assert parser.open == []
    return parser


def data_of(page: Path) -> list[dict]:
    (found,) = re.findall(r'<script type="application/json" id="hdi-data">(.*?)</script>', page.read_text(), re.S)
    return json.loads(found)


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    write_run(folder / "bad" / "hdi" / "history.jsonl")
    write_run(folder / "good" / "hdi" / "history.jsonl", collapsed=None)
    return folder


def test_a_report_begins_with_the_alerted_layer_and_its_pair_of_heads(runs):
    found = report(runs / "bad")
    assert found.path == runs / "bad" / "hdi" / "report.html"
    assert found.is_unusual
    page = read(found.path)
    assert page.loaded == ["data:,"]
    assert page.text.index("model.blocks.2.attn: heads 1 and 3 are nearly one head") < page.text.index("Layers")
    assert data_of(found.path)[0]["start"] == "model.blocks.2.attn"


def test_a_run_without_alerts_says_so_and_names_its_closest_pair(runs, tmp_path):
    found = report(runs / "good", path=tmp_path / "new folder" / "page.html")
    assert not found.is_unusual
    assert "No active alert. The two closest heads are" in read(found.path).text


def test_the_verdict_names_layers_without_compared_heads(tmp_path):
    write_run(tmp_path / "one" / "history.jsonl", heads=1, collapsed=None)
    page = page_of_run(tmp_path / "one")
    assert page.verdict == "No active alert. No two heads were compared at step 700: fewer than two live heads."
    assert dict(page.facts)["layers"] == "4 x Attention, 1 head of width 4"

    history = History(tmp_path / "some" / "history.jsonl")
    history.begin(0, [])
    known = LayerRecord({"hdi_worst_alignment": 0.001}, {"worst_alignment_pair": [0, 2]})
    layers = {"a": LayerRecord(), "b": known, "c": LayerRecord()}
    history.write(Record(50, layers, {"hdi/a": "fewer than two live heads"}))
    assert page_of_run(tmp_path / "some").verdict == (
        "No active alert. The two closest heads are 0 and 2 of b (alignment 0.00). "
        "No two heads of a and 1 more were compared at step 50: fewer than two live heads."
    )

    history = History(tmp_path / "none" / "history.jsonl")
    history.begin(0, [])
    history.write(Record(50, {"a": LayerRecord()}, {"a": "its key weight cannot be read"}))
    page = page_of_run(tmp_path / "none")
    assert (page.state, page.verdict) == (
        "unknown", "No active alert. No two heads were compared at step 50: its key weight cannot be read."
    )  # fmt: skip


def test_layers_are_sorted_by_alignment_with_unmeasured_ones_last(tmp_path):
    history = History(tmp_path / "history.jsonl")
    history.begin(0, [])
    values = {"below": {"hdi_worst_alignment": -0.1}, "none": {}, "chance": {"hdi_worst_alignment": 0.0}}
    layers = {name: LayerRecord(of) for name, of in values.items()}
    history.write(Record(50, layers))
    shown = report(tmp_path, path=tmp_path / "page.html").path.read_text(encoding="utf-8")
    assert re.findall(r"<td class='layer'>(\w+)</td>", shown) == ["chance", "below", "none"]


def test_the_map_of_a_layer_has_the_measured_values(runs):
    import base64

    (run,) = data_of(report(runs / "bad").path)
    layer, step = run["start"], run["steps"][-1]
    packed = list(base64.b64decode(run["matrices"][layer][str(step)]))
    kept = read_history(runs / "bad" / "hdi" / "history.jsonl").matrices(step, layer)["pair_alignment"]
    rows, columns = torch.triu_indices(4, 4, 1)
    expected = kept[rows, columns].clamp(0, 1)
    assert torch.allclose(torch.tensor(packed) / 250, expected.float(), atol=1 / 250)
    assert max(packed) / 250 > 0.98


def test_two_runs_are_compared_side_by_side_with_the_largest_difference_first(runs, tmp_path):
    found = report(runs / "bad", runs / "good", path=tmp_path / "both.html")
    assert list(found.verdicts) == ["bad", "good"]
    text = read(found.path).text
    assert text.index("What differs") < text.index("UNUSUAL") < text.index("NOTHING UNUSUAL")
    assert "model.blocks.2.attn: closest two heads" in text


def test_an_audit_is_a_page_as_well(tmp_path):
    model = nn.ModuleDict({"<i>a": nn.MultiheadAttention(32, 4), "b": nn.MultiheadAttention(32, 4)})
    found = report(audit(model), path=tmp_path / "audit.html")
    page = read(found.path)
    assert "<i>a" in page.text  # escaped in the file
    assert "Nothing unusual in 2 layers" in page.text


def test_layer_names_cannot_inject_a_script(tmp_path):
    name = "</script><script>alert(1)</script>"
    history = History(tmp_path / "history.jsonl")
    history.begin(0, [{"name": name, "num_heads": 2}])
    history.write(Record(0, {name: LayerRecord({"hdi": 0.5, "hdi_worst_alignment": 0.2})}))
    page = report(tmp_path).path
    assert "<script>alert" not in page.read_text()
    assert data_of(page)[0]["layers"] == [name]


def test_a_history_without_a_reading_is_a_page_that_says_so(tmp_path):
    History(tmp_path / "history.jsonl").begin(0, [{"name": "attn", "num_heads": 4}])
    found = report(tmp_path)
    assert not found.is_unusual
    assert "There is no reading yet." in read(found.path).text


def test_many_readings_are_thinned_and_the_largest_value_is_kept(tmp_path):
    history = History(tmp_path / "history.jsonl", matrix_every=0)
    history.begin(0, [{"name": "attn", "num_heads": 4}])
    for step in range(1000):
        value = 0.9 if step == 501 else 0.1
        history.write(
            Record(step, {"attn": LayerRecord({"hdi_worst_alignment": value}, {"worst_alignment_pair": [0, 2]})})
        )
    run = page_of_run(tmp_path).data
    assert len(run["steps"]) <= 240
    (row,) = run["maps"]["hdi_worst_alignment"]["values"]
    assert sorted(row)[-2:] == [0.1, 0.9]
    assert run["steps"][-1] == 999


def test_the_page_of_a_large_run_stays_within_its_bound(tmp_path, monkeypatch):
    from hdi_callback.dashboards.report import pair_matrices as room

    write_run(tmp_path / "history.jsonl", layers=6, heads=24, steps=6, width=2, features=64)
    monkeypatch.setattr(room, "_MOST_BYTES", 4000)
    matrices = page_of_run(tmp_path).data["matrices"]
    assert sum(len(text) for of in matrices.values() for text in of.values()) <= 4000
    assert "500" in matrices["model.blocks.2.attn"]


def test_the_loss_is_found_in_the_files_of_loggers(tmp_path):
    history = tmp_path / "hdi" / "history.jsonl"
    assert find_losses(history) == []
    with (tmp_path / "metrics.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerows(
            [["epoch", "step", "val_loss", "train_loss"], [0, 10, "", 2.5], [0, 20, "", 2.0], [0, 20, 2.2, ""]]
        )
    first, second = find_losses(history)
    assert (first.name, first.steps, first.values) == ("train_loss", [10, 20], [2.5, 2.0])
    assert (second.name, second.values) == ("val_loss", [2.2])


def test_the_loss_of_transformers_and_tensorboard_is_found(tmp_path):
    from torch.utils.tensorboard import SummaryWriter

    state = {"log_history": [{"step": 5, "loss": 3.0}, {"step": 10, "loss": 2.0}, {"step": 10, "eval_loss": 2.5}]}
    (tmp_path / "a" / "checkpoint-10").mkdir(parents=True)
    (tmp_path / "a" / "checkpoint-10" / "trainer_state.json").write_text(json.dumps(state))
    assert [(loss.name, loss.values) for loss in find_losses(tmp_path / "a" / "hdi" / "history.jsonl")] == [
        ("loss", [3.0, 2.0]),
        ("eval_loss", [2.5]),
    ]
    with SummaryWriter(tmp_path / "b") as writer:
        for step in range(3):
            writer.add_scalar("train/loss", 3.0 - step, step)
    (curve,) = find_losses(tmp_path / "b" / "hdi" / "history.jsonl")
    assert (curve.name, curve.steps, curve.values) == ("train/loss", [0, 1, 2], [3.0, 2.0, 1.0])


def test_a_file_that_cannot_be_written_is_an_error_that_says_so(runs, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(MisconfigurationError, match="cannot be written"):
        report(runs / "bad", path=tmp_path / "file" / "page.html")
    with pytest.raises(MisconfigurationError, match="at least one run"):
        report()


def test_numbers_are_rounded_once_so_that_verdict_and_tables_agree(tmp_path):
    write_run(tmp_path / "history.jsonl", collapsed=None)
    read_back = read_history(tmp_path / "history.jsonl").records()[-1].layers
    rows = page_of_run(tmp_path / "history.jsonl", "run").data["table"]
    shown = {row["layer"]: f"{row['worst']:.2f}" for row in rows}
    assert shown == {name: f"{layer.values['hdi_worst_alignment']:.2f}" for name, layer in read_back.items()}


def test_the_title_lists_the_names_of_all_runs(tmp_path):
    for name in ("a", "b", "c"):
        write_run(tmp_path / name / "history.jsonl", steps=1, collapsed=None)
    page = report(*(tmp_path / name for name in "abc"), path=tmp_path / "page.html")
    assert "<title>Attention heads of a, b and c</title>" in page.path.read_text()


def test_the_page_explains_its_colours_and_marks(runs, tmp_path):
    text = read(report(runs / "bad", path=tmp_path / "page.html").path).text
    explained = (
        "0: as by chance",
        "0.8: limit of a pair",
        "1: identical heads",
        "not measured",
        "the pair that is named",
    )
    assert [words for words in explained if words not in text] == []


def test_a_run_is_named_by_its_folder_and_by_its_file_where_it_is_not_the_first(tmp_path):
    files = {"hdi/history.jsonl": "run", "hdi/history-1.jsonl": "run (history-1)", "plain.jsonl": "run (plain)"}
    for file, name in files.items():
        History(tmp_path / "run" / file).begin(0, [])
        assert page_of_run(tmp_path / "run" / file).name == name


def test_alignment_comes_from_overlap_and_chance_and_is_missing_without_either():
    overlap = torch.tensor([[1.0, 0.4], [0.4, 1.0]])
    layer = LayerRecord({"hdi_chance": 0.75})
    assert torch.allclose(pair_alignment({"overlap": overlap}, layer), torch.tensor([[1.0, 0.2], [0.2, 1.0]]))
    assert pair_alignment({}, layer) is None
    assert pair_alignment({"overlap": overlap}, None) is None
    assert pair_alignment({"overlap": overlap}, LayerRecord()) is None


def test_interventions_pairs_and_the_time_of_a_run_are_on_its_page(tmp_path):
    write_run(tmp_path / "history.jsonl")
    history = History(tmp_path / "history.jsonl")
    history.note("intervention", step=300, intervention="ReviveHeads", layer="model.blocks.2.attn", message="<revived>")
    page = report(tmp_path, path=tmp_path / "page.html").path
    text = read(page).text
    assert "Every intervention (1)" in text
    assert "<revived>" in text
    assert "2023-11-14 22:13 UTC, watched for 0:07:00" in text
    maps = data_of(page)[0]["maps"]
    assert maps["hdi_worst_alignment"]["pairs"][2][-1] == [1, 3]
    assert maps["hdi_alignment"]["pairs"] == []


def test_losses_on_the_axis_of_a_trainer_are_placed_at_optimizer_steps(tmp_path):
    history = History(tmp_path / "run" / "hdi" / "history.jsonl")
    history.begin(0, [])
    for step in (0, 50, 100):
        history.write(Record(step, {"attn": LayerRecord({"hdi": 0.5})}, axis=2 * step))
    (tmp_path / "run" / "metrics.csv").write_text("step,train_loss\n40,3.5\n200,2.5\n")
    (curve,) = page_of_run(tmp_path / "run").data["losses"]
    assert (curve["name"], curve["steps"], curve["values"]) == ("train_loss", [20.0, 100.0], [3.5, 2.5])


@pytest.mark.parametrize(("most", "note"), [(3, "A column is the highest of 3 readings"), (8, "")])
def test_a_long_run_says_how_many_readings_a_column_of_its_map_merges(tmp_path, monkeypatch, most, note):
    monkeypatch.setattr("hdi_callback.dashboards.report.page_data._MOST_COLUMNS", most)
    write_run(tmp_path / "history.jsonl", steps=8, collapsed=None)
    written = report(tmp_path, path=tmp_path / "page.html").path.read_text()
    assert note in written
    assert ("A column is the highest" in written) == bool(note)
    data = json.loads(re.search(r'id="hdi-data">(.*?)</script>', written, re.S)[1])
    (run,) = data["runs"] if isinstance(data, dict) else data
    assert run["steps"] == ([200, 500, 700] if note else run["readings"])
