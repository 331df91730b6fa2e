"""The command `hdi` as a shell runs it: every command on input that is good, and on input that is not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hdi_callback.monitoring.history import History
from hdi_callback.monitoring.readings import LayerRecord, Record
from tests.dashboards.report.synthetic import write_run

COMMANDS = {  # words on good input -> exit code, and what is printed
    ("audit", "checkpoint.pt", "--class", "model:Encoder"): (
        1,
        "layers.1.self_attn: heads 1 and 3 are equal in their key weights",
    ),
    ("audit", "model:build"): (0, "Nothing unusual in 2 layers."),
    ("report", "bad", "good", "-o", "page.html"): (1, "heads 1 and 3 are nearly one head"),
    ("compare", "bad", "good"): (0, "model.blocks.2.attn changed most"),
    ("watch", "bad", "--once"): (1, "! model.blocks.2.attn"),
    ("alerts", "bad"): (1, "1 active alert: model.blocks.2.attn: heads 1 and 3"),
    ("replay", "bad", "--threshold", "pair=off", "--threshold", "forecast=off"): (0, "No active alert."),
    ("allocate", "measured", "--keys", "64"): (0, "attn"),
}
WRONG = {  # words on bad input -> what the one line says
    ("audit", "garbage.safetensors"): "garbage.safetensors",
    ("audit", "model:nothing"): "nothing",
    ("audit", "pickled.ckpt"): "pickled.ckpt",
    ("report", "garbage.jsonl"): "garbage.jsonl",
    ("compare", "bad", "nowhere"): "There is no file or folder `nowhere`",
    ("watch", "nowhere"): "There is no file or folder `nowhere`",
    ("alerts", "bad", "--since", "soon"): "'soon' is not a valid integer",
    ("replay", "bad", "--threshold", "pear=0.9"): "Did you mean 'pair'?",
    ("allocate", "bad", "--keys", "64"): "attention_samples and token_rank",
    ("adit", "bad"): "Did you mean 'audit'?",
}
MODEL = """
import torch
from torch import nn
class Encoder(nn.TransformerEncoder):
    def __init__(self):
        super().__init__(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 2, enable_nested_tensor=False)
def build():
    torch.manual_seed(0)
    model = Encoder()
    for layer in model.layers:
        nn.init.xavier_uniform_(layer.self_attn.in_proj_weight)
    return model
"""


class Payload:
    """Runs code if it is unpickled."""

    def __reduce__(self):
        return (os.mkdir, ("executed",))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("program")
    write_run(folder / "bad" / "hdi" / "history.jsonl")
    write_run(folder / "good" / "hdi" / "history.jsonl", collapsed=None)
    history = History(folder / "measured" / "history.jsonl")
    history.begin(0, [{"name": "attn", "num_heads": 8, "num_key_heads": 8, "head_dim": 8}])
    samples = {"attention_samples": [9.0, 11.0, 8.0, 12.0, 10.0, 9.0, 11.0, 10.0]}
    history.write(Record(50, {"attn": LayerRecord({"token_rank": 6.0}, samples)}))
    (folder / "model.py").write_text(MODEL)
    names: dict = {}
    exec(MODEL, names)
    model = names["build"]()
    with torch.no_grad():
        keys = model.layers[1].self_attn.in_proj_weight[32:64]
        keys[8:16] = keys[24:32]
    torch.save(model.state_dict(), folder / "checkpoint.pt")
    torch.save({"state_dict": {}, "hyper": Payload()}, folder / "pickled.ckpt")
    (folder / "garbage.safetensors").write_bytes(b"\xff" * 100)
    (folder / "garbage.jsonl").write_bytes(b"\x00\xff not a history\n" * 5)
    return folder


def hdi(folder: Path, root: Path, *words: str) -> subprocess.CompletedProcess:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(root), str(folder)]), "COLUMNS": "200"}
    command = [sys.executable, "-m", "hdi_callback", *words]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.some_slow(quick=0)
@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_a_command_prints_its_finding_and_ends_with_the_matching_exit_code(folder, root, words):
    done = hdi(folder, root, *words)
    code, said = COMMANDS[words]
    assert (done.returncode, said in done.stdout + done.stderr) == (code, True), done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    if words[0] not in ("watch",):
        plain = hdi(folder, root, *words, "--json")
        assert plain.returncode == code
        assert json.loads(plain.stdout) is not None


@pytest.mark.some_slow(quick=1)
@pytest.mark.parametrize("words", WRONG, ids=" ".join)
def test_wrong_input_is_one_line_on_stderr_and_exit_code_2(folder, root, words):
    done = hdi(folder, root, *words)
    assert done.returncode == 2, done.stdout + done.stderr
    assert WRONG[words] in done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert done.stdout == ""
    assert not (folder / "executed").exists(), "nothing in a file is executed"
