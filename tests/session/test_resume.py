"""What a checkpoint keeps, and what happens where it cannot be used or a run is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from hdi_callback import MisconfigurationError, MonitoringWarning, ReviveHeads, load_history
from hdi_callback.monitor.contract import Contract
from tests.integrations.runs import STEPS, TRAINERS, Training

ODD: dict[str, Any] = {
    "a list": [1, 2],
    "another dictionary": {"epoch": 3},
    "a reading beyond the checkpoint": {
        "step": 5, "last_step": 900, "history": None, "run": None, "layers": {}, "alerts": None, "interventions": [],
        "contract": "",
    },
    "another model": {
        "step": 5, "last_step": 4, "history": None, "run": None, "layers": {"encoder.0": [4, 4, 8, 8]}, "alerts": None,
        "interventions": [], "contract": "",
    },
    "broken alerts": {
        "step": 5, "last_step": 4, "history": None, "run": None, "layers": {}, "alerts": {"a": 1}, "interventions": [],
        "contract": "",
    },
    "a step that is none": {
        "step": "five", "last_step": "four", "history": None, "run": None, "layers": {}, "alerts": None,
        "interventions": [], "contract": "",
    },
}  # fmt: skip


@pytest.mark.parametrize("case", list(ODD))
def test_a_state_that_does_not_load_costs_one_warning_and_a_new_start(case: str, tmp_path: Path) -> None:
    first = Training(tmp_path / "one", steps=6, save_at=5).fit("loop")
    first.saved["heads"] = ODD[case]
    with pytest.warns(MonitoringWarning) as caught:
        second = Training(tmp_path / "two", resume=first.saved).fit("loop")
    assert sum(issubclass(one.category, MonitoringWarning) for one in caught) == 1
    assert len(second.losses) == STEPS - 5
    assert second.history.records
    assert "hdi" in next(iter(second.history.records[0].layers.values())).values


def test_where_an_intervention_does_not_load_nothing_of_the_state_is_used(tmp_path: Path, monkeypatch: Any) -> None:
    first = Training(tmp_path / "one", {"interventions": [ReviveHeads()]}, steps=6, save_at=5).fit("loop")
    first.saved["heads"]["interventions"] = [(name, {}) for name, _ in first.saved["heads"]["interventions"]]
    loaded: list[str] = []
    monkeypatch.setattr(Contract, "load_state_dict", lambda self, state: loaded.append(state))
    with pytest.warns(MonitoringWarning, match="KeyError.*start anew"):
        second = Training(tmp_path / "two", {"interventions": [ReviveHeads()]}, resume=first.saved).fit("loop")
    assert not loaded  # a change since then would be told as one of this run
    assert second.watcher.history_path == tmp_path / "two" / "hdi" / "history.jsonl"


def test_a_state_without_anything_begins_anew(tmp_path: Path) -> None:
    first = Training(tmp_path / "one", None, steps=6, save_at=5).fit("loop")
    first.saved["heads"] = {}
    second = Training(tmp_path / "two", resume=first.saved).fit("loop")
    assert second.watcher.history_path == tmp_path / "two" / "hdi" / "history.jsonl"


def test_a_state_is_loaded_before_the_first_step(tmp_path: Path) -> None:
    run = Training(tmp_path).fit("loop")
    with pytest.raises(MisconfigurationError, match="before the first step"):
        run.watcher.load_state_dict(run.watcher.state_dict())


def test_a_state_is_plain_data(tmp_path: Path) -> None:
    run = Training(tmp_path, save_at=5).fit("loop")
    state = run.saved["heads"]
    assert json.loads(json.dumps(state)) == json.loads(json.dumps(state))
    assert state["step"] == 5
    assert state["last_step"] == 4


def test_a_history_in_a_relative_folder_can_be_opened_after_a_change_of_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()

    def leave(step: int, model: Any) -> None:
        os.chdir(tmp_path / "elsewhere")

    (tmp_path / "runs").mkdir()
    first = Training(Path("runs"), steps=6, save_at=None, after_step=leave).fit("loop")
    assert first.watcher.history_path == tmp_path / "runs" / "hdi" / "history.jsonl"
    assert [record.step for record in first.history.records] == [0, 4, 6]


def test_alerts_that_were_active_are_active_in_the_resumed_run(tmp_path: Path) -> None:
    low = {"thresholds": {"*": {"pair": 1e-3}}, "pretrained": False}
    first = Training(tmp_path, low, steps=6, save_at=5).fit("loop")
    assert first.watcher._session.alerts.active
    second = Training(tmp_path, low, resume=first.saved).fit("loop")
    begun = [alert for record in second.history.records for alert in record.alerts if alert.status == "new"]
    assert len(begun) == len({(alert.rule, alert.layers) for alert in begun}), "none is raised a second time"
    before, after = ({alert.rule for alert in run.watcher._session.alerts.active} for run in (first, second))
    assert after >= before


@pytest.mark.parametrize("kind", list(TRAINERS))
def test_a_head_that_is_revived_after_a_resume_raises_no_jump_and_is_told_once(kind: str, tmp_path: Path) -> None:
    pytest.importorskip(kind if kind != "loop" else "torch")

    def copy_a_head(step: int, model: Any) -> None:
        if step == 16:
            with torch.no_grad():
                for projection in (
                    model.blocks[1].attn.q_proj,
                    model.blocks[1].attn.k_proj,
                    model.blocks[1].attn.v_proj,
                ):
                    for one in projection.parameters():
                        one[16:24] = one[0:8]

    watch = {"every_n_steps": 2, "pretrained": False, "interventions": [ReviveHeads()]}
    first = Training(tmp_path, watch, steps=16, save_at=15).fit(kind)
    second = Training(tmp_path, watch, steps=28, resume=first.saved, after_step=copy_a_head).fit(kind)
    records = second.history.records
    assert [record.step for record in records] == list(range(0, 29, 2))
    alerts = [alert for record in records for alert in record.alerts if not alert.is_over]
    assert {(alert.rule, alert.step) for alert in alerts} == {("copied heads", 16)}
    (action,) = [action for record in records for action in record.actions]
    (layer,) = alerts[0].where
    assert (action.step, action.layers, action.message.count(layer)) == (17, (layer,), 1)
    moved = next(record for record in records if record.step == 18).layers[layer].heads["head_movement"]
    assert max(moved) > 0.5, "or there is no jump to be silent about"


@pytest.mark.parametrize("kind", list(TRAINERS))
def test_a_checkpoint_that_is_resumed_in_another_folder_takes_its_readings_along_and_changes_nothing_there(
    kind: str, tmp_path: Path
) -> None:
    pytest.importorskip(kind if kind != "loop" else "torch")
    watch = {"every_n_steps": 2}
    first = Training(tmp_path / "a", watch, steps=8, save_at=5).fit(kind)
    files = {file: file.read_bytes() for file in first.history.path.parent.rglob("*") if file.is_file()}
    second = Training(tmp_path / "b", watch, resume=first.saved).fit(kind)
    assert second.history.path == tmp_path / "b" / first.history.path.relative_to(tmp_path / "a")
    assert [record.step for record in second.history.records] == list(range(0, STEPS + 1, 2))
    assert second.history.matrix_steps[0] == 0
    assert {file: file.read_bytes() for file in first.history.path.parent.rglob("*") if file.is_file()} == files
    third = Training(tmp_path / "b", watch, steps=7, resume=first.saved).fit(kind)
    assert third.history.path.name == "history-1.jsonl", "the run in that folder is not the one that is resumed"
    assert [record.step for record in load_history(second.history.path).records] == list(range(0, STEPS + 1, 2))


KILLED = """
import os, signal, sys, time
from pathlib import Path
from tests.integrations.runs import Training

kind, folder, resume = sys.argv[1], Path(sys.argv[2]), sys.argv[3]

def kill(step, model):
    while step == 7:  # until the thread that writes the history has the reading of step 4 on the disk
        if any('"step":4,' in file.read_text() for file in folder.rglob("history*.jsonl")):
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.01)

if kind in ("loop", "accelerate"):
    import torch
    resume = torch.load(resume)
Training(folder, {"every_n_steps": 2}, resume=resume, after_step=kill).fit(kind)
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", list(TRAINERS))
def test_a_run_that_is_killed_after_it_was_resumed_goes_on_where_its_checkpoint_is(kind: str, tmp_path: Path) -> None:
    if kind not in ("loop", "lightning"):
        pytest.importorskip(kind)
    watch = {"every_n_steps": 2}
    whole = Training(tmp_path / "whole", watch).fit(kind)
    folder = tmp_path / "parts"
    folder.mkdir()
    first = Training(folder, watch, steps=6, save_at=3).fit(kind)
    checkpoint = folder / "saved.pt" if isinstance(first.saved, dict) else first.saved
    command = [sys.executable, "-c", KILLED, kind, str(folder), str(checkpoint)]
    killed = subprocess.run(
        command, check=False, env={**os.environ, "PYTHONPATH": os.getcwd()}, capture_output=True, timeout=300
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr.decode()[-2000:]
    path = getattr(first.watcher, "heads", first.watcher).history_path
    assert [record.step for record in load_history(path).records][:3] == [0, 2, 4]
    last = Training(folder, watch, resume=first.saved).fit(kind)
    assert last.history.path == path
    assert [record.step for record in last.history.records] == [record.step for record in whole.history.records]
    for record, other in zip(last.history.records, whole.history.records):
        for layer, expected in other.layers.items():
            assert record.layers[layer].values["hdi"] == pytest.approx(expected.values["hdi"], rel=1e-5)
