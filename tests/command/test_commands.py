"""The command `hdi`, run in this process by the runner of its library, and once as a program."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from torch import nn

from hdi_callback.audits.audit import Audit, LayerAudit
from hdi_callback.command.commands import hdi
from hdi_callback.command.progress import layer_progress
from hdi_callback.command.terminal import audit_table, colour_of, console
from hdi_callback.monitoring.history import History
from hdi_callback.monitoring.readings import LayerRecord, Record
from tests.dashboards.report.synthetic import write_run


def run(*words: object, width: int = 200) -> Result:
    return CliRunner().invoke(hdi, [str(word) for word in words], prog_name="hdi", env={"COLUMNS": str(width)})


def healthy() -> nn.Module:
    torch.manual_seed(0)
    return nn.ModuleDict({name: nn.MultiheadAttention(32, 4) for name in ("first", "second")})


def collapsed() -> nn.Module:
    model = healthy()
    with torch.no_grad():
        keys = model["second"].in_proj_weight[32:64]
        keys[24:32] = keys[8:16] + 0.005 * torch.randn(8, 32)
    return model


@pytest.fixture(scope="module")
def bad_run(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("bad")
    write_run(path / "hdi" / "history.jsonl")
    return path


@pytest.fixture(scope="module")
def good_run(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("good")
    write_run(path / "version_0" / "hdi" / "history.jsonl", collapsed=None)
    return path


def test_the_help_names_every_command_and_the_exit_codes():
    shown = run("--help")
    assert shown.exit_code == 0
    assert {"audit", "report", "compare", "watch", "alerts", "explain", "replay", "allocate"} <= set(
        shown.output.split()
    )
    assert "Exit codes: 0 nothing is unusual" in shown.output


@pytest.mark.parametrize("command", sorted(hdi.commands))
def test_the_help_of_every_command_has_each_example_on_its_own_line(command):
    shown = run(command, "--help")
    assert shown.exit_code == 0
    assert len(shown.output.splitlines()) > 5
    assert "Examples: hdi" not in shown.output


def test_an_audit_ends_with_a_verdict_and_the_exit_code_agrees():
    good, bad = (run("audit", f"{__name__}:{name}") for name in ("healthy", "collapsed"))
    assert (good.exit_code, bad.exit_code) == (0, 1)
    assert good.output.splitlines()[-1].startswith("Nothing unusual in 2 layers.")
    assert bad.output.splitlines()[-1].startswith("1 of 2 layers is unusual. second: heads 1 and 3 are nearly one head")
    (row,) = (line for line in bad.output.splitlines() if line.startswith("!"))
    assert row.split()[1:4] == ["second", "4", "1-3"]


def test_an_audit_for_programs_is_one_json_object():
    found = run("audit", f"{__name__}:collapsed", "--json")
    assert found.exit_code == 1
    data = json.loads(found.stdout)
    assert data["findings"][0]["heads"] == [1, 3]
    assert [layer["worst_pair"] for layer in data["layers"]][1] == [1, 3]


def test_an_audit_takes_limits_and_patterns():
    assert run("audit", f"{__name__}:collapsed", "--threshold", "pair=off").exit_code == 0
    assert run("audit", f"{__name__}:collapsed", "--threshold", "sec*:pair=off").exit_code == 0
    assert run("audit", f"{__name__}:collapsed", "--exclude", "second").exit_code == 0


def test_a_narrow_terminal_cuts_no_name_off():
    shown = run("audit", f"{__name__}:collapsed", width=80).output
    assert "second" in shown
    assert "..." not in shown
    assert "…" not in shown


def wide(name: str, **options: Any) -> LayerAudit:
    return LayerAudit(name, 32, 8, 64, 0.8, 0.9, 0.1, 0.2, 0.93, (17, 31), 0.3, (1, 2), 12.3, **options)


@pytest.mark.parametrize(
    ("width", "headings"),
    [
        (50, ["layer", "pair", "aligned"]),
        (60, ["layer", "pair", "aligned", "dead"]),
        (80, ["layer", "heads", "pair", "aligned", "HDI", "dead"]),
        (100, ["layer", "heads", "pair", "aligned", "mean", "HDI", "chance", "dead"]),
        (200, ["layer", "heads", "pair", "aligned", "mean", "by energy", "HDI", "chance", "effective", "dead"]),
    ],
)
def test_an_audit_leaves_out_whole_columns_and_cuts_none_on_a_narrow_terminal(width, headings):
    layers = [
        wide("encoder.layer.10.attention.self", dead_heads=(1, 2)),
        wide("x"),
        LayerAudit("y", 32, 8, 64, absent="?"),
    ]
    out = console(file=io.StringIO(), width=width)
    out.print(audit_table(Audit("m", tuple(layers), {}, (), Record(0, {}), ()), width))
    first, _, *rows = out.file.getvalue().splitlines()
    assert re.split(r"  +", first.strip()) == headings
    assert all(len(row) <= width for row in rows)
    assert "".join(re.sub(r"^.{4}(\S*).*", r"\1", row) for row in rows) == "encoder.layer.10.attention.selfxy"
    assert all(row.split()[0].endswith((".", "self")) for row in rows[:-2]), "names are broken after dots"
    assert ("1,2" in rows[0]) == ("dead" in headings)


def test_letters_that_a_terminal_has_no_code_for_are_printed_as_escapes(tmp_path):
    write_run(tmp_path / "history.jsonl", name="блок.{}.attn".format)
    for command in ("alerts", "watch", "compare"):
        words = (tmp_path, *([tmp_path] if command == "compare" else ["--once"] if command == "watch" else []))
        shown = CliRunner(charset="ascii").invoke(hdi, [command, *map(str, words)])
        assert not isinstance(shown.exception, UnicodeError)
        assert r"\u0431\u043b\u043e\u043a.2.attn" in shown.output
    data = json.loads(CliRunner(charset="ascii").invoke(hdi, ["alerts", str(tmp_path), "--json"]).stdout)
    assert data["active"][0]["layer"] == "блок.2.attn"


@pytest.mark.parametrize("command", ["audit", "report", "compare", "watch", "alerts", "replay"])
def test_a_path_that_the_system_refuses_ends_with_one_line_and_exit_code_2(command, monkeypatch, tmp_path):
    def refuse(path, **options):
        raise PermissionError(13, "Permission denied", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "is_file", refuse)
        patch.setattr(Path, "is_dir", refuse)
        shown = run(command, tmp_path, *([tmp_path] if command == "compare" else []))
    assert shown.exit_code == 2
    assert shown.stderr == f"hdi: `{tmp_path}`: Permission denied.\n"


def test_a_run_in_the_place_of_a_model_is_named_as_a_run(bad_run):
    for path in (bad_run, bad_run / "hdi" / "history.jsonl"):
        shown = run("audit", path)
        assert shown.exit_code == 2
        assert f"`{path}` is a run, and no model: `hdi report {path}` judges it." in shown.stderr


def test_pages_are_written_to_the_requested_path(bad_run, good_run, tmp_path):
    audited = run("audit", f"{__name__}:collapsed", "--html", tmp_path / "audit.html")
    assert audited.exit_code == 1
    assert "heads 1 and 3 are nearly one head" in (tmp_path / "audit.html").read_text()
    both = run("report", bad_run, good_run, "-o", tmp_path / "both.html", "--title", "Two runs")
    assert both.exit_code == 1
    assert "<title>Two runs</title>" in (tmp_path / "both.html").read_text()
    assert "written: " in both.stderr
    alone = run("report", good_run, "--json", "-o", tmp_path / "good.html")
    assert alone.exit_code == 0
    assert json.loads(alone.stdout)["path"] == str(tmp_path / "good.html")


def test_alerts_are_listed_from_a_step_on(bad_run):
    all_of_them = json.loads(run("alerts", bad_run, "--json").stdout)
    last = max(alert["step"] for alert in all_of_them["alerts"])
    at, later = (json.loads(run("alerts", bad_run, "--json", "--since", since).stdout) for since in (last, last + 1))
    assert at["alerts"] == [alert for alert in all_of_them["alerts"] if alert["step"] == last] != []
    assert later["alerts"] == []
    assert all_of_them["active"] == later["active"]
    assert [alert["finding"]["heads"] for alert in all_of_them["active"]] == [[1, 3]]


@pytest.mark.parametrize("words", [["alerts"], ["replay"], ["replay", "--threshold", "pair=off"]])
def test_active_alerts_are_also_listed_under_their_key_of_version_0_1(bad_run, words):
    data = json.loads(run(words[0], bad_run, *words[1:], "--json").stdout)
    assert list(data) == ["alerts", "active", "standing"]
    assert data["standing"] == data["active"]


def test_the_alerts_command_ends_with_the_active_alerts(bad_run, good_run):
    bad, good = run("alerts", bad_run), run("alerts", good_run)
    assert (bad.exit_code, good.exit_code) == (1, 0)
    assert bad.output.splitlines()[-1].startswith("1 active alert: model.blocks.2.attn: heads 1 and 3")
    assert good.output.splitlines()[-1] == "No active alert."


def test_a_replay_with_other_limits_raises_other_alerts(bad_run):
    assert run("replay", bad_run).exit_code == 1
    assert run("replay", bad_run, "--threshold", "pair=off", "--threshold", "forecast=off").exit_code == 0


def test_a_comparison_names_the_layer_that_changed(bad_run, good_run):
    shown = run("compare", bad_run, good_run)
    assert shown.exit_code == 0
    assert shown.output.splitlines()[-1].startswith("model.blocks.2.attn changed most")
    models = json.loads(run("compare", f"{__name__}:healthy", f"{__name__}:collapsed", "--json").stdout)
    assert (models["layers"][0]["name"], models["layers"][0]["moved_heads"][0]) == ("second", 3)


def test_watching_shows_the_layer_the_pair_and_its_heads(bad_run, good_run):
    shown = run("watch", bad_run, "--once")
    assert shown.exit_code == 1
    lines = shown.output.splitlines()
    assert any(line.startswith("! model.blocks.2.attn") and line.endswith("1.00 1-3") for line in lines)
    assert sum("[#]" in line for line in lines) == 2
    assert run("watch", good_run, "--once").exit_code == 0


def test_watching_a_large_run_fits_the_terminal_and_keeps_the_alerted_layer(tmp_path):
    write_run(tmp_path / "history.jsonl", layers=48, heads=32, width=2, features=64, steps=5, collapsed=(17, 3, 21))
    lines = run("watch", tmp_path, "--once", width=100).output.splitlines()
    assert max(map(len, lines)) <= 100
    assert any(line.startswith("! model.blocks.17.attn") for line in lines)
    assert any("more layers, at most" in line for line in lines)
    assert sum("[#]" in line for line in lines) == 2


def test_watch_shows_that_nothing_was_measured_if_the_weights_are_nan(tmp_path):
    for name, lost in (("one", (1,)), ("all", (0, 1, 2, 3))):
        write_run(tmp_path / name / "history.jsonl", collapsed=None, lost=lost)
        shown = run("watch", tmp_path / name, "--once")
        assert shown.exit_code == 1
        assert re.search(r"! model\.blocks\.1\.attn  \.{4} {4}  -$", shown.output, re.M)
        assert "heads of" not in shown.output


def test_layers_with_long_names_are_told_apart_in_a_narrow_terminal(tmp_path):
    name = "wrapper." * 9 + "{}.attention"
    write_run(tmp_path / "history.jsonl", heads=8, collapsed=(2, 1, 3, 4), name=name.format)
    lines = run("watch", tmp_path, "--once", width=60).output.splitlines()
    assert max(map(len, lines)) <= 60
    assert [line[:9] for line in lines if "layer" in line and ".." in line] == [
        "  layer 0", "  layer 1", "! layer 2", "  layer 3"
    ]  # fmt: skip
    assert sum(line.count("[#]") for line in lines) == 6  # all pairs of the three heads, on both sides of the diagonal


def test_watching_ends_at_a_step_or_when_idle(bad_run, good_run):
    assert run("watch", bad_run, "--until", 700, "--interval", 0.01).exit_code == 1
    assert run("watch", good_run, "--idle", 0.02, "--interval", 0.01).exit_code == 0


def test_allocate_names_the_metrics_that_the_run_must_measure(bad_run, tmp_path):
    shown = run("allocate", bad_run, "--keys", 64)
    assert shown.exit_code == 2
    assert "attention_samples and token_rank" in shown.stderr
    history = History(tmp_path / "history.jsonl")
    history.begin(0, [{"name": "attn", "num_heads": 8, "num_key_heads": 8, "head_dim": 8}])
    layer = LayerRecord({"token_rank": 6.0}, {"attention_samples": [9.0, 11.0, 8.0, 12.0, 10.0, 9.0, 11.0, 10.0]})
    history.write(Record(50, {"attn": layer}))
    (found,) = json.loads(run("allocate", tmp_path, "--keys", 64, "--json").stdout)
    assert (found["layer"], found["num_heads"], found["step"]) == ("attn", 8, 50)
    assert (found["best_head_dim"] is None) == (found["reason"] is not None)
    assert found["best_num_heads"] * found["best_head_dim"] == 64


@pytest.mark.parametrize("content", [b"hello\nworld\n", b"\xff\xfe{\x00", b'{"a": 1}\n'])
def test_an_unreadable_history_is_reported_as_no_history_of_a_run(content, tmp_path):
    file = tmp_path / "hdi" / "history.jsonl"
    file.parent.mkdir()
    file.write_bytes(content)
    shown = run("alerts", str(tmp_path))
    assert shown.exit_code == 2
    assert shown.stderr.startswith(f"hdi: `{file}` is not the history of a run")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["audit", "no/such/place"], "There is no file or folder `no/such/place`"),
        (["audit"], "Missing argument 'MODEL'"),
        (["audit", "x", "--jsn"], "--json"),
        (["audti"], "No such command 'audti'"),
        (["alerts", "no/such/run"], "There is no file or folder `no/such/run`"),
        (["alerts", ".", "--since", "-3"], "-3 is not in the range"),
        (["report", "no/such/run"], "There is no file or folder"),
        (["replay", "{run}", "--threshold", "pair"], "`--threshold pair` cannot be read"),
        (["replay", "{run}", "--threshold", "pair=much"], "has no number after the sign"),
        (["replay", "{run}", "--threshold", "pear=0.9"], "Did you mean 'pair'?"),
        (["replay", "{run}", "--threshold", "pair=2"], "must lie between 0 and 1"),
        (["watch", "{run}", "--interval", "0"], "must be positive"),
        (["compare", "{run}", f"{__name__}:healthy"], "is a run and"),
        (["audit", f"{__name__}:healthy", "--include", "nothing.*"], "matches no attention layer"),
    ],
)
def test_an_error_is_one_line_that_says_what_to_write(bad_run, words, said):
    shown = run(*(word.replace("{run}", str(bad_run)) for word in words))
    assert shown.exit_code == 2
    assert said in shown.stderr
    assert len(shown.stderr.splitlines()) == 1
    assert shown.stdout == ""


def test_a_folder_with_several_runs_is_refused(bad_run, good_run, tmp_path):
    for name in ("a", "b"):
        History(tmp_path / name / "hdi" / "history.jsonl").begin(0, [])
    shown = run("alerts", tmp_path)
    assert shown.exit_code == 2
    assert "holds 2 histories" in shown.stderr


@pytest.mark.parametrize(("missing", "words"), [("rich", ["alerts", "{run}"]), ("plotly", ["report", "{run}"])])
def test_a_library_that_is_missing_is_named_with_the_extra_that_brings_it(monkeypatch, bad_run, missing, words):
    for module in [name for name in sys.modules if name.split(".")[0] == missing]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, missing, None)
    shown = run(*(word.replace("{run}", str(bad_run)) for word in words))
    assert shown.exit_code == 2
    assert "pip install 'hdi-callback[reports]'" in shown.stderr
    assert len(shown.stderr.splitlines()) == 1


def test_json_needs_no_table_library(monkeypatch, bad_run):
    monkeypatch.setitem(sys.modules, "rich", None)
    assert run("alerts", bad_run, "--json").exit_code == 1


@pytest.mark.slow
def test_the_program_works_from_a_shell(bad_run, root):
    command = [sys.executable, "-m", "hdi_callback"]
    done = subprocess.run([*command, "alerts", str(bad_run)], capture_output=True, text=True, cwd=root, check=False)
    assert done.returncode == 1
    assert "1 active alert: model.blocks.2.attn: heads 1 and 3" in done.stdout
    wrong = subprocess.run([*command, "alerts", "nowhere"], capture_output=True, text=True, cwd=root, check=False)
    assert wrong.returncode == 2
    assert wrong.stderr.startswith("hdi: There is no file or folder `nowhere`")
    assert "Traceback" not in wrong.stderr


def test_the_script_of_the_package_is_the_same_program(root):
    text = (root / "pyproject.toml").read_text()
    assert '[project.scripts]\nhdi = "hdi_callback.command:main"' in text


def without_attention() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8))


def unreadable() -> nn.Module:
    model = healthy()
    for part in model.values():
        part.forward = None  # as no function that can be run
        part.in_proj_weight = nn.Parameter(torch.zeros(7, 32))
    return model


@pytest.mark.parametrize(("model", "said"), [("without_attention", "no attention"), ("unreadable", "Nothing could")])
def test_an_audit_that_judged_no_layer_ends_with_exit_code_2(model, said):
    shown = run("audit", f"{__name__}:{model}")
    assert shown.exit_code == 2
    assert said in shown.output.splitlines()[-1]
    data = json.loads(run("audit", f"{__name__}:{model}", "--json").stdout)
    assert (data["is_unusual"], bool(data["not_audited"])) == (False, model == "unreadable")


def test_a_comparison_keeps_names_whole_on_a_narrow_terminal():
    shown = run("compare", f"{__name__}:nested", f"{__name__}:nested", width=80).output
    assert "model.blocks.0.attn" in shown
    assert max(map(len, shown.splitlines())) <= 80


def nested() -> nn.Module:
    torch.manual_seed(0)
    block = nn.ModuleDict({"attn": nn.MultiheadAttention(32, 4)})
    return nn.ModuleDict({"model": nn.ModuleDict({"blocks": nn.ModuleList([block])})})


def test_a_comparison_names_layers_of_one_side_and_no_change_below_rounding(good_run, tmp_path):
    write_run(tmp_path / "history.jsonl", layers=2, collapsed=None)
    last = run("compare", good_run, tmp_path).output.splitlines()[-1]
    assert last.endswith("2 layers are only in A.")
    before, after = re.search(r"pair (?:went from (\S+) to (\S+)[;.]|stays)", last).groups()
    assert before is None or before != after


@pytest.mark.parametrize("command", ["alerts", "replay"])
def test_a_run_that_has_just_begun_is_reported_without_readings(tmp_path, command):
    History(tmp_path / "history.jsonl").begin(0, [])
    shown = run(command, tmp_path)
    assert (shown.exit_code, shown.output.splitlines()) == (0, ["No active alert.", "There is no reading yet."])


def test_an_empty_history_is_reported_as_empty(tmp_path):
    (tmp_path / "history.jsonl").touch()
    for where in (tmp_path, tmp_path / "history.jsonl"):
        shown = run("alerts", where)
        assert shown.exit_code == 2
        assert "is empty: its run has not written to it yet" in shown.stderr


def test_the_list_of_commands_is_not_truncated():
    assert [line for line in run("--help", width=80).output.splitlines()[1:] if line.endswith("...")] == []


def test_a_comparison_without_comparable_heads_ends_with_exit_code_2(bad_run, tmp_path):
    write_run(tmp_path / "one" / "history.jsonl", heads=1, layers=3, collapsed=None)
    shown = run("compare", bad_run, tmp_path / "one")
    assert shown.exit_code == 2
    lines = shown.output.splitlines()
    assert lines[-1] == "No layer could be compared."
    assert "not compared: model.blocks.2.attn: no two of its heads were compared in B" in lines
    assert not any("aligned" in line for line in lines)


@pytest.mark.parametrize("words", [["replay", "{run}"], ["audit", f"{__name__}:healthy"]])
def test_a_threshold_whose_pattern_matches_no_layer_is_refused(bad_run, words):
    shown = run(*(word.format(run=bad_run) for word in words), "--threshold", "decoder.*:pair=0.5")
    assert shown.exit_code == 2
    assert "'decoder.*'" in shown.stderr
    assert ("model.blocks.0.attn" if words[0] == "replay" else "first") in shown.stderr


@pytest.mark.parametrize("limit", ["=0.5", "encoder.*:=0.5", "pair"])
def test_a_threshold_without_a_name_or_a_number_is_refused_with_examples(bad_run, limit):
    shown = run("replay", bad_run, "--threshold", limit)
    assert shown.exit_code == 2
    assert f"`--threshold {limit}` cannot be read: write --threshold pair=0.9" in shown.stderr


def test_cells_have_the_colours_of_cividis():
    from matplotlib import colormaps

    for value in (0.0, 0.2, 0.5, 0.8, 0.9, 1.0):
        truth = [255 * part for part in colormaps["cividis"](value)[:3]]
        assert colour_of(value) == pytest.approx(truth, abs=8)


def test_a_warning_goes_to_the_error_stream_and_names_keep_their_letters_in_json(tmp_path):
    path = tmp_path / "history.jsonl"
    write_run(path, name="слой.{}".format)
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    path.write_text("".join([*lines[:3], "half a line\n", *lines[3:]]), encoding="utf-8")
    shown = run("alerts", tmp_path, "--json")
    assert "слой.2" in shown.stdout
    assert json.loads(shown.stdout)["active"][0]["layer"] == "слой.2"
    assert "line 4 (it is not JSON)" in shown.stderr


def test_a_history_file_is_a_run_by_itself(bad_run):
    assert run("alerts", bad_run / "hdi" / "history.jsonl").stdout == run("alerts", bad_run).stdout


def test_progress_is_shown_only_on_a_terminal_with_unchanged_names(monkeypatch):
    with layer_progress(is_quiet=False) as progress:
        assert progress is None
    screen = io.StringIO()
    monkeypatch.setattr(screen, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    with layer_progress(is_quiet=True) as progress:
        assert progress is None
    with layer_progress(is_quiet=False) as progress:
        progress(1, 2, "[red].attn")
    assert "[red].attn" in screen.getvalue()
    assert screen.getvalue().endswith("\x1b[2K")  # the last line is erased


def test_curves_of_head_outputs_are_not_attributed_to_weights():
    assert re.search(r"read from +head outputs$", run("explain", "head_covariance").output, re.M)
    assert re.search(r"read from +key weights$", run("explain", "hdi").output, re.M)


def test_long_paths_are_not_broken_in_a_comparison(tmp_path):
    paths = [tmp_path / f"{'long' * 20}_{name}" for name in "ab"]
    for path in paths:
        write_run(path / "history.jsonl", steps=1, collapsed=None)
    lines = run("compare", *paths, width=60).output.splitlines()
    assert lines[:2] == [f"A  {paths[0]}", f"B  {paths[1]}"]


def test_the_summary_of_a_comparison_is_one_line_however_narrow_the_terminal(bad_run, good_run):
    last = run("compare", bad_run, good_run, width=60).output.splitlines()[-1]
    assert last.startswith("model.blocks.2.attn changed most")
    assert last.endswith(".")
