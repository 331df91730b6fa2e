"""Every metric is asked for by the same name at every door, and arrives in the history, also after a resumption."""

from __future__ import annotations

import warnings
from pathlib import Path

import lightning as L
import pytest
import torch
import yaml
from jsonargparse import ArgumentParser
from torch.nn import functional as F

from hdi_callback import HDICallback, HDIHandler, HDITrainerCallback, HeadDiversityMonitor, watch_heads
from hdi_callback.errors import MonitoringWarning
from hdi_callback.monitoring.history import History, read_records
from hdi_callback.monitoring.metrics import METRICS, MOVEMENT
from tests.integrations import test_transformers as with_transformers
from tests.models import CLASSES, LENGTH, Classifier, LitClassifier, batches, step

NAMES = list(METRICS)
QUIET = {"every_n_steps": 1, "verbose": False, "alerts": None}


def made() -> tuple[Classifier, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Classifier()
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def by_monitor(folder: Path) -> Path:
    model, optimizer = made()
    history = History(folder / "history.jsonl")
    with HeadDiversityMonitor(model, metrics=NAMES) as monitor:
        history.begin(0, monitor.facts)
        for number in range(3):
            monitor.arm()
            tokens = torch.randint(16, (4, LENGTH), generator=torch.Generator().manual_seed(number))
            F.cross_entropy(model(tokens), tokens.sum(1) % CLASSES).backward()
            history.write(monitor.measure(number).record())
            optimizer.step()
            optimizer.zero_grad()
    return folder / "history.jsonl"


def by_loop(folder: Path) -> Path:
    model, optimizer = made()
    with watch_heads(model, optimizer, metrics=NAMES, log_dir=folder, **QUIET) as heads:
        for number in range(3):
            with heads.step():
                step(model, optimizer, number)
    return heads.history_path


def by_lightning(folder: Path, callback: HDICallback | None = None) -> Path:
    callback = HDICallback(metrics=NAMES, **QUIET) if callback is None else callback
    trainer = L.Trainer(
        accelerator="cpu", max_epochs=1, logger=False, callbacks=[callback], default_root_dir=folder,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(LitClassifier(), batches(count=3))
    return callback.history_path


def by_yaml(folder: Path) -> Path:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(HDICallback, "callback")
    read = parser.parse_string(yaml.safe_dump({"callback": {"metrics": NAMES, **QUIET}}))
    return by_lightning(folder, parser.instantiate_classes(read).callback)


def by_transformers(folder: Path) -> Path:
    callback = HDITrainerCallback(metrics=NAMES, **QUIET)
    with_transformers.train(folder, callback, max_steps=3)
    return callback.history_path


def by_ignite(folder: Path) -> Path:
    pytest.importorskip("ignite", reason="pytorch-ignite is not installed")
    from ignite.engine import Engine

    model, optimizer = made()
    trainer = Engine(lambda engine, number: step(model, optimizer, number))
    handler = HDIHandler(model, optimizer, metrics=NAMES, log_dir=folder, **QUIET)
    handler.attach(trainer)
    trainer.run(range(3), max_epochs=1)
    return handler.heads.history_path


@pytest.mark.parametrize("door", [by_monitor, by_loop, by_lightning, by_yaml, by_transformers, by_ignite])
def test_every_metric_arrives_by_its_name_or_is_absent_with_a_reason(door, tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", MonitoringWarning)
        records = read_records(door(tmp_path))
    measured = {name for record in records for layer in record.layers.values() for name in layer.values}
    missing = set(NAMES) - measured
    if door is not by_transformers:  # whose fused projection hides what single keys are made of
        assert missing == set()
    reasons = {key.partition("/")[0] for record in records for key in record.absent}
    assert {METRICS[name].source for name in missing} <= reasons
    assert set(records[1].scalars(NAMES)) >= {
        f"{name}/{next(iter(records[1].layers))}" for name in NAMES if name in measured
    }


def test_every_metric_is_measured_again_after_a_resumption(tmp_path):
    model, optimizer = made()
    heads = watch_heads(model, optimizer, metrics=NAMES, log_dir=tmp_path, **QUIET)
    for number in range(2):
        with heads.step():
            step(model, optimizer, number)
    state = heads.state_dict()
    heads.close()
    with watch_heads(model, optimizer, metrics=NAMES, log_dir=tmp_path, **QUIET) as heads:
        heads.load_state_dict(state)
        for number in range(2, 5):
            with heads.step():
                step(model, optimizer, number)
    records = {record.step: record for record in read_records(heads.history_path)}
    assert list(records) == [0, 1, 2, 3, 4, 5]
    whole = {number: set(next(iter(record.layers.values())).values) for number, record in records.items()}
    assert whole[1] == whole[3] == whole[4] == set(NAMES)
    changes = {name for name in NAMES if name.startswith("update_") or METRICS[name].source == MOVEMENT}
    assert set(NAMES) - whole[2] == changes, "what needs an earlier reading of the same process"


@pytest.mark.parametrize("written", ["default", ["default", "attention_sink"], None])
def test_the_default_metrics_can_be_requested_from_yaml(written):
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(HDICallback, "callback")
    read = parser.parse_string(yaml.safe_dump({"callback": {"metrics": written}}))
    chosen = parser.instantiate_classes(read).callback._settings.metrics
    assert chosen == (*HDICallback()._settings.metrics, *(["attention_sink"] if isinstance(written, list) else []))
