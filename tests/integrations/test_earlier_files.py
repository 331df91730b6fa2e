"""Files that earlier versions have left behind: today's code reads them, and runs go on from them."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path

import pytest
import torch

from hdi_callback.errors import HeadCollapseWarning
from hdi_callback.monitoring.history import read_lines, read_records
from hdi_callback.monitoring.rules.replay import read_alerts, replay
from tests.fixtures.write import STEPS, lightning_run, loop_run, transformers_run

VERSIONS = sorted(Path(__file__).parent.parent.joinpath("fixtures").glob("v*"))
TRAINERS = ("lightning", "loop", "transformers")


@pytest.fixture(params=VERSIONS, ids=lambda path: path.name)
def version(request) -> Path:
    return request.param


@pytest.fixture(autouse=True)
def _no_warning_of_ours():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", HeadCollapseWarning)
        yield


def earlier_history(version: Path, trainer: str, folder: Path) -> str:
    """Put the history of the earlier run to where that run would have written it."""
    path = folder / "hdi" / "history.jsonl"
    path.parent.mkdir(parents=True)
    shutil.copy(version / trainer / "history.jsonl", path)
    return str(path)


def values(path: Path) -> list[dict[str, dict[str, float]]]:
    return [{name: dict(layer.values) for name, layer in record.layers.items()} for record in read_records(path)]


def shows_one_run(path: Path | None, before: Path) -> None:
    """The readings go on without a gap or a double point, and what was reported before is not reported again."""
    assert path is not None
    assert [record.step for record in read_records(path)] == [0, 2, 4, 6, 8]
    assert values(path)[:3] == values(before)[:3]
    assert [alert for alert in read_alerts(path) if alert.step <= 4] == [
        alert for alert in read_alerts(before) if alert.step <= 4
    ]
    reported = [(alert.layer, alert.rule, alert.level) for alert in read_alerts(path) if not alert.is_resolved]
    begun = [line for line in read_lines(path) if line["kind"] == "intervention"]
    assert len(reported) == len(set(reported)), "an alert that is active is not raised again"
    assert begun[0] == next(line for line in read_lines(before) if line["kind"] == "intervention")


@pytest.mark.parametrize("trainer", TRAINERS)
def test_the_history_of_an_earlier_version_can_be_read_and_replayed(version, trainer):
    path = version / trainer / "history.jsonl"
    assert [record.step for record in read_records(path)] == [0, 2, 4, 5]
    assert all(len(record.layers) == 2 for record in read_records(path))
    earlier = read_alerts(path)
    again = replay(path, thresholds={"*": {"mean": 0.01}})  # the limit of that run; sentences may have changed since
    assert [(alert.step, alert.layer, alert.rule) for alert in again] == [
        (alert.step, alert.layer, alert.rule) for alert in earlier
    ]
    assert earlier != []
    assert all(alert.message.startswith(f"step {alert.step}, {alert.layer}: ") for alert in earlier)


def test_a_lightning_checkpoint_of_an_earlier_version_is_resumed(version, tmp_path):
    path = earlier_history(version, "lightning", tmp_path)
    checkpoint = torch.load(version / "lightning" / "lightning.ckpt", weights_only=True)
    for state in checkpoint["callbacks"].values():
        if "history" in state:
            state["history"] = path
    torch.save(checkpoint, tmp_path / "earlier.ckpt")
    callback = lightning_run(tmp_path, steps=STEPS, resume=tmp_path / "earlier.ckpt")
    shows_one_run(callback.history_path, version / "lightning" / "history.jsonl")


def test_the_state_of_a_loop_of_an_earlier_version_is_resumed(version, tmp_path):
    path = earlier_history(version, "loop", tmp_path)
    state = {**json.loads((version / "loop" / "state.json").read_text()), "history": path}
    heads, _ = loop_run(tmp_path, steps=STEPS, state=state)
    assert heads.global_step == STEPS
    shows_one_run(heads.history_path, version / "loop" / "history.jsonl")


@pytest.mark.slow
def test_a_transformers_checkpoint_of_an_earlier_version_is_resumed(version, tmp_path):
    transformers_run(tmp_path)  # for the weights and the optimizer, which are not ours
    shutil.rmtree(tmp_path / "hdi")
    path = earlier_history(version, "transformers", tmp_path)
    (checkpoint,) = tmp_path.glob("checkpoint-*")
    for file in ("hdi_state.json", "trainer_state.json"):
        text = (version / "transformers" / file).read_text().replace('"hdi/history.jsonl"', json.dumps(path))
        (checkpoint / file).write_text(text)
    callback = transformers_run(tmp_path, steps=STEPS, resume=checkpoint)
    shows_one_run(callback.history_path, version / "transformers" / "history.jsonl")
