"""The watch in a loop with accelerate: prepared models and optimizers, accumulation, checkpoints, two processes."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import nullcontext

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.nn import functional as F

from hdi_callback import replay, watch_heads
from hdi_callback.monitoring.history import read_lines, read_records
from hdi_callback.monitoring.rules.replay import read_alerts
from tests.histories import readings
from tests.models import LAYERS, Classifier, batches

pytestmark = pytest.mark.slow  # `make slow` runs these

QUIET = {"verbose": False}


@pytest.fixture(autouse=True)
def no_state_between_tests():
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def prepared(accumulate: int = 1, precision: str = "no", folder=None):
    accelerator = Accelerator(
        cpu=True, gradient_accumulation_steps=accumulate, mixed_precision=precision, project_dir=folder
    )
    torch.manual_seed(0)
    model = Classifier(dropout=0.2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return accelerator, *accelerator.prepare(model, optimizer, batches(count=13))


def train(accelerator, model, optimizer, data, heads=None, batches_at_most=100) -> list[torch.Tensor]:
    losses = []
    for tokens, labels in data:
        with accelerator.accumulate(model), nullcontext() if heads is None else heads.step(epoch=0):
            loss = F.cross_entropy(model(tokens), labels)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.detach())
        if len(losses) == batches_at_most:
            break
    return [*losses, *(p.detach() for p in model.parameters()), torch.get_rng_state()]


@pytest.mark.parametrize(("accumulate", "due"), [(1, [0, 2, 4, 6, 8, 10, 12, 13]), (3, [0, 2, 4, 5])])
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_the_loop_under_accelerate_reads_at_optimizer_steps_and_does_not_change_training(
    tmp_path, accumulate, due, precision
):
    plain = train(*prepared(accumulate, precision))
    accelerator, model, optimizer, data = prepared(accumulate, precision)
    with watch_heads(model, optimizer, every_n_steps=2, log_dir=tmp_path, **QUIET) as heads:
        watched = train(accelerator, model, optimizer, data, heads)
    assert all(torch.equal(a, b) for a, b in zip(plain, watched))
    # Thirteen batches; the last part of an epoch makes a step of its own.
    assert readings(heads.history_path) == due
    records = read_records(heads.history_path)
    assert list(records[0].layers) == LAYERS
    assert [record.epoch for record in records] == [0] * len(due)
    assert all("head_covariance" in record.layers[LAYERS[1]].values for record in records[:-1])


def test_accelerate_keeps_and_restores_its_state(tmp_path):
    def run(resume: bool):
        accelerator, model, optimizer, data = prepared(folder=tmp_path)
        heads = watch_heads(model, optimizer, every_n_steps=2, log_dir=tmp_path, **QUIET)
        accelerator.register_for_checkpointing(heads)
        if resume:
            accelerator.load_state(tmp_path / "kept")
            assert heads.global_step == 5
        with heads:
            train(accelerator, model, optimizer, data, heads, batches_at_most=5)
            if not resume:
                accelerator.save_state(tmp_path / "kept")
                train(accelerator, model, optimizer, data, heads, batches_at_most=3)  # lost
        return heads.history_path

    first = run(resume=False)
    assert readings(first) == [0, 2, 4, 6, 8]
    assert run(resume=True) == first
    assert readings(first) == [0, 2, 4, 6, 8, 10]


# --- on two processes


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory, request):
    folder = tmp_path_factory.mktemp("two")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(request.config.rootpath)}
    done = subprocess.run(
        [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
            "-m", "tests.integrations.accelerate_run", str(folder),
        ],
        cwd=request.config.rootpath, env=environment, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return folder, done.stdout, [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in (0, 1)]


def test_both_processes_step_stop_and_save_together(two_processes):
    _, _, (first, second) = two_processes
    for name, weight in first["weights"].items():
        assert torch.equal(weight, second["weights"][name]), name
    for of in ("steps", "active", "saved", "latest"):
        assert first[of] == second[of], of
    assert first["steps"] < 16, "32 batches each, two to a step, and it was stopped"
    assert len(first["saved"]) == 1
    assert first["active"] != []


def test_one_process_writes_one_history_one_log_and_reports_alerts_once(two_processes):
    folder, printed, (first, second) = two_processes
    (history,) = folder.rglob("*.jsonl")
    assert (first["history"], second["history"]) == (str(history), "None")
    steps = readings(history)
    assert steps == sorted({*range(0, first["steps"] + 1, 2), first["steps"]})
    (events,) = folder.rglob("events*")
    curve = EventAccumulator(str(events.parent)).Reload().Scalars("hdi/mean")
    assert [event.step for event in curve] == steps
    alerts = read_alerts(history)
    assert alerts == replay(history, thresholds={"*": {"mean": 0.3}})
    assert (first["reported"], second["reported"]) == (len(alerts), 0)
    for alert in alerts:
        if alert.level != "notice":
            assert printed.count(alert.message) == 1
    done = [line["intervention"] for line in read_lines(history) if line["kind"] == "intervention"]
    assert {"DiversityPenalty", "SaveCheckpoint", "StopTraining"} <= set(done)
