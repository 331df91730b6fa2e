"""The handler on a pytorch-ignite trainer: it reads as the loop does, changes nothing, stops, resumes and goes on."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.nn import functional as F

pytest.importorskip("ignite", reason="pytorch-ignite is not installed")

from ignite.engine import Engine, Events
from ignite.handlers import Checkpoint, DiskSaver

from hdi_callback import HDIHandler, watch_heads
from hdi_callback.errors import HeadCollapseWarning, MisconfigurationError
from hdi_callback.monitoring.history import read_records
from hdi_callback.monitoring.interventions import StopTraining
from tests.integrations.test_loop import adam, batch, classifier, collapse

QUIET = {"verbose": False, "every_n_steps": 2}


def trainer_for(model, optimizer, *, after=lambda step: None, losses=None):
    def train(engine, data):
        model.train()
        optimizer.zero_grad()
        tokens, labels = data
        loss = F.cross_entropy(model(tokens), labels)
        loss.backward()
        optimizer.step()
        after(engine.state.iteration)
        if losses is not None:
            losses.append(loss.detach())

    return Engine(train)


def trained(folder, *, is_watched, epochs=2, dropout=0.1):
    model = classifier(dropout)
    optimizer, losses = adam(model), []
    trainer = trainer_for(model, optimizer, losses=losses)
    handler = None
    if is_watched:
        handler = HDIHandler(model, optimizer, log_dir=folder, **QUIET)
        handler.attach(trainer)
    torch.manual_seed(1)
    trainer.run([batch(step) for step in range(3)], max_epochs=epochs)
    return [*losses, *(p.detach() for p in model.parameters()), torch.get_rng_state()], model, handler


def values(path):
    return [
        (record.step, {name: dict(layer.values) for name, layer in record.layers.items()})
        for record in read_records(path)
    ]


def test_a_training_is_bit_identical_with_the_handler(tmp_path):
    bare, *_ = trained(tmp_path, is_watched=False)
    watched, model, handler = trained(tmp_path, is_watched=True)
    assert len(bare) == len(watched)
    assert all(torch.equal(a, b) for a, b in zip(bare, watched))
    assert [record.step for record in read_records(handler.heads.history_path)] == [0, 2, 4, 6]
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_the_readings_are_those_of_a_loop(tmp_path):
    *_, handler = trained(tmp_path / "ignite", is_watched=True, dropout=0.0)
    model = classifier()
    optimizer = adam(model)
    with watch_heads(model, optimizer, log_dir=tmp_path / "loop", **QUIET) as heads:
        for epoch in range(2):
            for step in range(3):
                with heads.step(epoch=epoch):
                    optimizer.zero_grad()
                    tokens, labels = batch(step)
                    F.cross_entropy(model(tokens), labels).backward()
                    optimizer.step()
    assert values(handler.heads.history_path) == values(heads.history_path)
    epochs = [[record.epoch for record in read_records(one.history_path)] for one in (handler.heads, heads)]
    assert epochs[0] == epochs[1] == [0, 0, 1, 1]


def test_an_intervention_terminates_the_trainer(tmp_path):
    model = classifier()
    optimizer = adam(model)
    trainer = trainer_for(model, optimizer, after=lambda step: collapse(model, step))
    handler = HDIHandler(
        model, optimizer, log_dir=tmp_path, thresholds={"*": {"pair": 0.5}}, interventions=[StopTraining()], **QUIET
    )
    handler.attach(trainer)
    with pytest.warns(HeadCollapseWarning):
        trainer.run([batch(step) for step in range(30)], max_epochs=1)
    assert 4 < trainer.state.iteration < 30
    assert handler.heads.global_step == trainer.state.iteration
    assert handler.heads.active_alerts


def test_a_run_resumed_from_a_checkpoint_continues_its_history(tmp_path):
    *_, handler = trained(tmp_path / "whole", is_watched=True, dropout=0.0)
    model = classifier()
    optimizer = adam(model)
    first = HDIHandler(model, optimizer, log_dir=tmp_path / "parts", **QUIET)
    trainer = trainer_for(model, optimizer)
    first.attach(trainer)
    parts = {"model": model, "optimizer": optimizer, "trainer": trainer, "heads": first}
    keep = Checkpoint(parts, DiskSaver(str(tmp_path / "saved"), require_empty=False))
    trainer.add_event_handler(Events.EPOCH_COMPLETED, keep)
    trainer.run([batch(step) for step in range(3)], max_epochs=1)
    (saved,) = (tmp_path / "saved").iterdir()

    model = classifier()
    optimizer = adam(model)
    second = HDIHandler(model, optimizer, log_dir=tmp_path / "parts", **QUIET)
    trainer = trainer_for(model, optimizer)
    second.attach(trainer)
    parts = {"model": model, "optimizer": optimizer, "trainer": trainer, "heads": second}
    Checkpoint.load_objects(parts, torch.load(saved, weights_only=True))
    trainer.run([batch(step) for step in range(3)], max_epochs=2)
    assert second.heads.history_path == first.heads.history_path
    expected = values(handler.heads.history_path)
    for layer in dict(expected)[4].values():  # the first reading after the resumption is compared with none
        assert {layer.pop("head_movement_min"), layer.pop("head_unchanged")} != {None}
    assert [entry for entry in values(second.heads.history_path) if entry[0] != 3] == expected


def test_a_trainer_run_again_for_further_epochs_continues_the_history(tmp_path):
    model = classifier()
    optimizer = adam(model)
    handler, trainer = HDIHandler(model, optimizer, log_dir=tmp_path, **QUIET), trainer_for(model, optimizer)
    handler.attach(trainer)
    for epochs in (2, 4):
        trainer.run([batch(step) for step in range(2)], max_epochs=epochs)
    assert [record.step for record in read_records(handler.heads.history_path)] == [0, 2, 4, 6, 8]


def test_an_exception_reaches_the_user_and_the_next_run_is_watched(tmp_path):
    model = classifier()
    optimizer = adam(model)
    before = copy.deepcopy(model.state_dict())
    fails = [True]

    def after(step):
        if step == 3 and fails[0]:
            raise ValueError("out of cookies")

    handler, trainer = (
        HDIHandler(model, optimizer, log_dir=tmp_path, **QUIET),
        trainer_for(model, optimizer, after=after),
    )
    handler.attach(trainer)
    with pytest.raises(ValueError, match="out of cookies"):
        trainer.run([batch(step) for step in range(4)], max_epochs=1)
    assert any(not torch.equal(value, before[name]) for name, value in model.state_dict().items())
    handler.close()
    handler.close()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    fails[0] = False
    trainer = trainer_for(model, optimizer, after=after)
    handler.attach(trainer)
    trainer.run([batch(step) for step in range(4)], max_epochs=1)
    steps = [record.step for record in read_records(handler.heads.history_path)]
    assert steps == sorted(set(steps))
    assert steps[-1] == handler.heads.global_step == 3 + 4


def test_misuse_is_refused_before_training(tmp_path):
    model = classifier()
    with pytest.raises(MisconfigurationError, match="every_n_steps"):
        HDIHandler(model, adam(model), every_n_steps=0)
    handler = HDIHandler(model, adam(model), log_dir=tmp_path, **QUIET)
    with pytest.raises(MisconfigurationError, match="must be an ignite Engine, got Classifier"):
        handler.attach(model)
    engine = Engine(lambda engine, data: None)
    handler.attach(engine)
    with pytest.raises(MisconfigurationError, match="attach it once"):
        handler.attach(engine)
