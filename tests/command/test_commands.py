"""Every command on input that is good, and on input that is not."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import lightning
import pytest
import torch
from click.testing import CliRunner

from hdi_callback.command.commands import hdi
from hdi_callback.history import History
from hdi_callback.monitor.metrics import METRICS
from hdi_callback.rules import LIMITS, RULES
from tests.audits import models
from tests.command.runs import COLLAPSED, write_run

MODELS = "tests.audits.models"
ROOT = Path(__file__).parents[2]


def run(*words: object, width: int = 80):
    return CliRunner().invoke(hdi, [str(word) for word in words], prog_name="hdi", env={"COLUMNS": str(width)})


@pytest.fixture(scope="module")
def bad(tmp_path_factory) -> Path:
    return write_run(tmp_path_factory.mktemp("bad") / "hdi" / "history.jsonl").parents[1]


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> Path:
    return write_run(tmp_path_factory.mktemp("good") / "hdi" / "history.jsonl", collapsed=None).parents[1]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    model = models.build_encoder()
    keys = model.encoder.layers[1].self_attn.in_proj_weight[32:64]
    models.copy_head(keys, source=1, target=3)
    with torch.no_grad():
        keys[24:] += 0.02 * torch.randn(8, 32, generator=torch.Generator().manual_seed(1))
    path = tmp_path_factory.mktemp("checkpoint") / "a.pt"
    torch.save(model.state_dict(), path)
    return path


# --- check


def test_check_prints_cards_and_nothing_more_of_a_right_model():
    shown = run("check", f"{MODELS}:build_blocks")
    assert shown.exit_code == 0
    assert "blocks.0-1              4 heads of width 8 on 32, keys shared by none" in shown.output
    *_, verdict = shown.output.split("\n\n")
    first, judged, *reasons = verdict.splitlines()
    assert (first, judged) == ("Nothing is wrong or odd.", "2 of 2 layers were judged.")
    assert all(reason.startswith("Not asked: ") for reason in reasons)


def test_check_ends_with_the_finding_and_code_1():
    shown = run("check", "tests.checks.targets:wrong_and_a_batch")
    assert shown.exit_code == 1
    assert "WRONG  blocks.0-1.attn: each token attends to the next one" in shown.output


def test_check_counts_what_is_odd_only_if_it_is_strict():
    codes = [run("check", "tests.checks.targets:odd_and_a_batch", *more).exit_code for more in ((), ("--strict",))]
    assert codes == [0, 1]


def test_check_gives_plain_data():
    found = json.loads(run("check", "tests.checks.targets:wrong_and_a_batch", "--json").output)
    assert found["cards"][0]["heads"] == 4
    assert [(each["name"], each["verdict"]) for each in found["findings"]] == [("mask", "wrong")]


def test_check_says_what_is_missing_and_ends_with_code_2():
    shown = run("check", f"{MODELS}:build_encoder")
    assert shown.exit_code == 2
    assert "no batch is known" in str(shown.output) + str(shown.stderr)


def test_check_needs_the_config_of_transformers_alone(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=100, n_embd=48, n_layer=3, n_head=4)
    config.architectures = ["GPT2LMHeadModel"]
    config.save_pretrained(tmp_path)
    shown = run("check", tmp_path)
    assert shown.exit_code == 0
    assert "transformer.h.0-2.attn  4 heads of width 12 on 48" in shown.output
    assert "rows 0-47, 48-95, 96-143 of c_attn, head by head" in shown.output


def test_check_reads_a_lightning_checkpoint_with_its_class(tmp_path):
    from tests.checks.targets import Watched

    trainer = lightning.Trainer(logger=False, enable_checkpointing=False, accelerator="cpu")
    trainer.strategy.connect(Watched())
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    shown = run("check", tmp_path / "last.ckpt", "--model", "tests.checks.targets:Watched")
    assert shown.exit_code == 0, shown.output
    assert "net.blocks.0.attn       4 heads of width 8 on 32" in shown.output


# --- audit


def test_audit_ends_with_the_finding_its_remedy_and_code_1(checkpoint):
    shown = run("audit", checkpoint, "--model", f"{MODELS}:build_encoder")
    assert shown.exit_code == 1
    assert "heads 1 and 3 of encoder.layers.1.self_attn" in shown.output
    assert "What to do: " in shown.output


def test_audit_of_a_healthy_model_is_code_0():
    shown = run("audit", f"{MODELS}:build_encoder")
    assert shown.exit_code == 0
    assert "The two closest are heads" in shown.output


@pytest.mark.parametrize(
    ("what", "why"), [("build_without_attention", "Nothing to judge"), ("build_without_batch", "no batch is known")]
)
def test_audit_of_nothing_is_said_and_code_2(what, why):
    shown = run("audit", f"{MODELS}:{what}")
    assert shown.exit_code == 2
    assert why in shown.output


def test_audit_names_attention_that_is_not_read():
    assert "blocks.1" in run("audit", f"{MODELS}:build_mixed").output


def test_audit_gives_plain_data(checkpoint):
    words = ["audit", checkpoint, "--model", f"{MODELS}:build_encoder", "--json"]
    data = json.loads(run(*words).stdout)
    assert data["state"] == "alert"
    assert data["alerts"][0]["where"] == {"encoder.layers.1.self_attn": [1, 3]}


# --- report


def test_report_tells_the_event_and_that_it_is_active(bad):
    shown = run("report", bad)
    assert shown.exit_code == 1
    assert shown.stdout.startswith(
        f"step 300, warning, active (hdi explain copied heads): heads 1 and 3 of {COLLAPSED}"
    )
    assert shown.output.count(": heads 1 and 3") == 2, "in the list and in the verdict"
    assert f"Since step 300: heads 1 and 3 of {COLLAPSED}" in shown.output


def test_report_of_a_healthy_run_are_none_and_code_0(good):
    shown = run("report", good)
    assert (shown.exit_code, "No alert in 10 readings" in shown.output) == (0, True)


def test_a_run_that_watches_no_layer_is_nothing_to_judge(tmp_path):
    History(tmp_path / "history.jsonl", []).close()
    shown = run("report", tmp_path)
    assert shown.exit_code == 2
    assert "no attention layer is watched" in shown.output


def test_a_run_without_a_reading_is_nothing_to_judge(tmp_path):
    History(tmp_path / "history.jsonl", [{"name": "attn", "num_heads": 4}]).close()
    shown = run("report", tmp_path)
    assert (shown.exit_code, "there is no reading yet" in shown.output) == (2, True)


def test_of_two_histories_the_newest_is_taken(tmp_path):
    older = write_run(tmp_path / "a" / "history.jsonl")
    newer = write_run(tmp_path / "b" / "history.jsonl", collapsed=None)
    os.utime(older, (1, 1))
    shown = run("report", tmp_path)
    assert shown.exit_code == 0
    assert str(newer.parent) in shown.stderr


def test_lines_that_cannot_be_read_are_counted(tmp_path):
    path = write_run(tmp_path / "history.jsonl")
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines[:3], "half a line\n", *lines[3:]]))
    assert "1 lines of" in run("report", path).stderr


def test_report_writes_one_file_and_says_the_verdict(bad):
    shown = run("report", bad)
    page = Path(shown.stderr.removeprefix("Written: ").strip())
    assert shown.exit_code == 1
    assert "heads 1 and 3" in shown.stdout
    assert f"<title>Attention heads of {'/'.join(bad.parts[-2:])}</title>" in page.read_text(encoding="utf-8")
    assert page.stat().st_size < 1_000_000


def test_report_gives_the_alerts_as_plain_data(bad):
    shown = run("report", bad, "--json")
    data = json.loads(shown.stdout)
    assert shown.exit_code == 1
    assert any("heads 1 and 3" in alert["message"] for alert in data["alerts"])
    assert data["verdict"] in run("report", bad).stdout


# --- explain


def test_output_that_nobody_reads_on_is_no_error():
    reads, writes = os.pipe()
    os.close(reads)
    program = [sys.executable, "-c", "from hdi_callback.command import main; main()", "explain"]
    ended = subprocess.run(program, stdout=writes, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writes)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_explain_lists_the_rules_in_80_columns():
    shown = run("explain")
    assert shown.exit_code == 0
    assert all(f"\n  {rule.name} " in shown.output for rule in RULES)
    assert max(map(len, shown.output.splitlines())) <= 80


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_explain_says_what_a_rule_means_and_what_to_do(rule):
    shown = run("explain", *rule.name.split())
    assert shown.exit_code == 0
    text = " ".join(shown.output.split())
    assert " ".join(rule.meaning.split()) in text
    assert " ".join(rule.action.split()) in text
    assert run("explain", rule.name.replace(" ", "-")).output == shown.output


@pytest.mark.parametrize("limit", LIMITS)
def test_explain_knows_limits_by_their_names(limit):
    assert f"{limit}=" in run("explain", limit).output


@pytest.mark.parametrize("metric", METRICS)
def test_explain_says_what_a_metric_is(metric):
    shown = run("explain", metric)
    assert shown.exit_code == 0
    assert METRICS[metric].summary.split()[0] in shown.output


def test_a_misspelt_rule_is_answered_with_the_closest_name():
    shown = run("explain", "wurst-pair")
    assert shown.exit_code == 2
    assert "Did you mean 'worst pair'?" in shown.stderr
    assert (len(shown.stderr.splitlines()), shown.stdout) == (1, "")


# --- what is wrong


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("report", "nowhere"), "There is no `history.jsonl` in `nowhere`"),
        (("audit", "nowhere"), "There is no file or folder `nowhere`"),
    ],
)
def test_what_is_wrong_is_one_line_and_code_2(bad, words, said):
    shown = run(*(word.format(run=bad) for word in words))
    assert shown.exit_code == 2
    assert said in shown.stderr
    assert (len(shown.stderr.splitlines()), shown.stdout) == (1, "")


def test_a_command_that_is_not_there_is_code_2():
    shown = run("adit", "run")
    assert (shown.exit_code, shown.stdout) == (2, "")
    assert "No such command 'adit'" in shown.stderr


def test_what_is_interrupted_is_code_130(monkeypatch):
    def interrupted(run):
        raise KeyboardInterrupt

    monkeypatch.setattr("hdi_callback.history.load_history", interrupted)
    assert run("report", "anywhere").exit_code == 130


def test_a_bug_is_not_taken_for_something_unusual(monkeypatch):
    monkeypatch.setattr("hdi_callback.history.load_history", lambda run: 1 / 0)
    shown = run("report", "anywhere")
    assert shown.exit_code == 2
    assert "ZeroDivisionError" in shown.stderr


def test_a_plain_install_has_all_that_the_command_imports():
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    block = re.search(r"^dependencies = \[\n(.*?)^\]", project, flags=re.S | re.M)[1]
    installed = {name.lower() for name in re.findall(r'^ +"([\w-]+)', block, flags=re.M)}
    package = ROOT / "hdi_callback"
    imported = set()
    for room in ("command", "audits", "dashboards", "history", "rules", "monitor", "core", "attention"):
        for file in (package / room).glob("*.py"):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Import):
                    imported |= {one.name.split(".")[0] for one in node.names}
                elif isinstance(node, ast.ImportFrom) and node.level == 0:
                    imported.add(node.module.split(".")[0])
    needed = imported - sys.stdlib_module_names - {"hdi_callback"}
    # pandas for `RunHistory.to_frame`; transformers, asked for by name, where a folder of weights is audited
    by_torch, on_request = {"typing_extensions"}, {"pandas", "transformers"}
    assert {"rich", "safetensors", "transformers"} <= needed
    assert needed - by_torch - on_request <= installed


def test_the_program_runs_as_a_process(checkpoint, tmp_path):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    words = ["audit", str(checkpoint), "--model", f"{MODELS}:build_encoder"]
    command = [sys.executable, "-m", "hdi_callback", *words]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert "heads 1 and 3 of encoder.layers.1.self_attn" in done.stdout
    assert "Traceback" not in done.stderr
