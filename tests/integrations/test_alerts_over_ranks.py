"""Alerts and interventions on two processes: reported once, and done alike on both."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from hdi_callback.monitoring.history import read_lines
from hdi_callback.monitoring.rules.replay import read_alerts

pytestmark = pytest.mark.slow  # `make slow` runs these


@pytest.fixture(scope="module")
def run(tmp_path_factory, request):
    folder = tmp_path_factory.mktemp("ddp")
    root = request.config.rootpath
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)}
    done = subprocess.run(
        [sys.executable, "-m", "tests.integrations.ddp_run", str(folder)],
        cwd=root, env=environment, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return folder, done.stdout, [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in (0, 1)]


def test_both_ranks_end_with_the_same_weights_at_the_same_step(run):
    _, _, (first, second) = run
    assert first["steps"] == second["steps"] < 8 * 8, "the training was stopped on both"
    assert first["weights"].keys() == second["weights"].keys()
    for name, weight in first["weights"].items():
        assert torch.equal(weight, second["weights"][name]), name


def test_the_history_is_written_once_and_holds_the_actions(run):
    folder, _, (first, second) = run
    assert second["history"] == "None"
    (history,) = folder.rglob("history.jsonl")
    assert str(history) == first["history"]
    steps = [line["step"] for line in read_lines(history) if line["kind"] == "reading"]
    assert steps == sorted(set(steps))
    rules = [alert.rule for alert in read_alerts(history) if not alert.is_resolved]
    assert "worst pair" in rules
    assert "mean alignment" in rules
    done = [line["intervention"] for line in read_lines(history) if line["kind"] == "intervention"]
    assert {"ReviveHeads", "DiversityPenalty", "SaveCheckpoint", "StopTraining"} <= set(done)
    assert done.count("SaveCheckpoint") == 1
    assert len(list(folder.rglob("*.ckpt"))) == 1


def test_only_the_first_rank_prints_alerts(run):
    folder, printed, _ = run
    (history,) = folder.rglob("history.jsonl")
    loud = [alert for alert in read_alerts(history) if alert.level != "notice"]
    assert {"worst pair", "mean alignment"} <= {alert.rule for alert in loud}
    for alert in loud:
        assert printed.count(alert.message) == 1
