"""When interventions act, and those on the whole run."""

from __future__ import annotations

import copy
import json
import pickle

import pytest
import torch

from hdi_callback.errors import MisconfigurationError
from hdi_callback.interventions import (
    Intervention,
    QKClip,
    ReviveHeads,
    SaveCheckpoint,
    StopTraining,
)
from tests.interventions.training import Model, Open, alert, copy_head, reading


class Note(Intervention):
    name = "Note"

    def __init__(self, **options):
        super().__init__(**options)
        self.seen = []

    def on_alert(self, alert):
        self.seen.append(alert.rule)
        return self.action(alert.layers, "took note")


def open_training(*interventions, step: int = 101):
    model = Model()
    training = Open(model, torch.optim.SGD(model.parameters(), lr=0.1))
    training.step = step
    for one in interventions:
        one.bind(training)
    return training


def test_level_and_rules_decide_whether_it_acts():
    note, critical, merged = Note(), Note(on="critical"), Note(rules=["merged values"])
    open_training(note, critical, merged)
    for one in (note, critical, merged):
        one.handle(reading(alert()))
        one.handle(reading(alert(step=200, rule="copied heads", also=("merged values",), level="critical")))
        one.handle(reading(alert(step=300, level="notice")))
    assert note.seen == ["worst pair", "copied heads"]
    assert critical.seen == ["copied heads"]
    assert merged.seen == ["copied heads"]


def test_an_alert_is_answered_once_and_again_when_it_names_other_heads_or_reaches_the_level():
    note, critical = Note(), Note(on="critical")
    open_training(note, critical)
    for state in (
        [alert(heads=(0, 1))] * 3 + [alert(heads=(0, 1, 2))] * 2 + [alert(heads=(0, 1, 2), level="critical")] * 2
    ):
        for one in (note, critical):
            one.handle(reading(state))
    assert note.seen == ["worst pair"] * 2
    assert critical.seen == ["worst pair"]


def test_a_rule_that_joins_an_event_in_silence_is_answered():
    merged = Note(rules=["merged values"])
    open_training(merged)
    merged.handle(reading(alert()))
    merged.handle(reading(alert(also=("merged values",))))
    assert merged.seen == ["worst pair"]


def test_it_acts_at_most_so_often_and_the_action_has_the_step_and_names_each_layer_once():
    save = SaveCheckpoint(at_most=2)
    training = open_training(save)
    actions = [action for step in range(100, 500, 100) for action in save.handle(reading(alert(step=step)))]
    assert training.saved == ["heads-worst-pair-step=101"] * 2
    assert [(action.step, action.layers) for action in actions] == [(101, ("blocks.0",))] * 2
    assert actions[0].message == "saved heads-worst-pair-step=101.ckpt"


def test_training_is_stopped_on_critical_alerts_by_default():
    stop = StopTraining()
    training = open_training(stop)
    assert stop.handle(reading(alert())) == ()
    (action,) = stop.handle(reading(alert(level="critical")))
    assert training.is_stopped
    assert action.message == "stopped the training (worst pair)"


MISUSE = {
    "a level": (lambda: StopTraining(on="loud"), '"notice" or "warning" or "critical"'),
    "rules as one string": (lambda: SaveCheckpoint(rules="worst pair"), r"write \['worst pair'\]"),
    "at_most": (lambda: SaveCheckpoint(at_most=0), "at least 1"),
    "an error above one": (lambda: ReviveHeads(max_output_error=2), "of at least 0, at most 1"),
    "a limit": (lambda: QKClip(limit=0), "above 0"),
}  # fmt: skip


@pytest.mark.parametrize("case", MISUSE)
def test_misuse_is_an_error_that_says_what_to_write(case):
    make, message = MISUSE[case]
    with pytest.raises(MisconfigurationError, match=message):
        make()


# --- the learning rate


def train(model, optimizer, training, *interventions, steps=6, active=(), begin=0):
    """Train with a reading at every second step."""
    actions = []
    for step in range(begin, begin + steps):
        training.step = step
        optimizer.zero_grad()
        model.loss(step).backward()
        optimizer.step()
        training.step = step + 1
        if step % 2 == 0:
            logits = {name: block.largest.tolist() for name, block in zip(training.layers, model.blocks)}
            record = reading(*(active(step) if callable(active) else active), step=step, logits=logits)
            actions += [action for one in interventions for action in one.handle(record)]
    return actions


# --- all of them


EVERY = {
    "StopTraining": lambda **options: StopTraining(on="warning", **options),
    "SaveCheckpoint": SaveCheckpoint,
    "ReviveHeads": lambda **options: ReviveHeads(max_output_error=1, **options),
    "QKClip": lambda **options: QKClip(limit=0.1, **options),
}


def trained(*interventions, active=()):
    torch.manual_seed(0)
    model = Model()
    copy_head(model.blocks[0].layer("blocks.0"), 0, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    training = Open(model, optimizer)
    for one in interventions:
        one.bind(training)
    actions = train(model, optimizer, training, *interventions, active=active)
    return [*model.parameters()], [*torch.get_rng_state()], actions, training


@pytest.mark.parametrize("kind", EVERY)
def test_without_an_alert_training_is_bit_identical(kind):
    plain, state, _, _ = trained()
    make = EVERY[kind] if kind != "QKClip" else (lambda: QKClip(limit=1e3))
    with_it, its_state, actions, _ = trained(make())
    assert all(torch.equal(one, other) for one, other in zip(plain, with_it))
    assert state == its_state
    assert actions == []


@pytest.mark.parametrize("kind", EVERY)
def test_a_resumed_training_is_bit_identical_to_an_unbroken_one(kind):
    def begin(seed=0):
        torch.manual_seed(seed)
        model = Model()
        copy_head(model.blocks[0].layer("blocks.0"), 0, 1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        training, intervention = Open(model, optimizer), EVERY[kind]()
        intervention.bind(training)
        return model, optimizer, training, intervention

    active = [alert(heads=(0, 1))]
    model, optimizer, training, intervention = begin()
    whole = train(model, optimizer, training, intervention, steps=8, active=active)

    first, its_optimizer, its_training, its_intervention = begin()
    actions = train(first, its_optimizer, its_training, its_intervention, steps=4, active=active)
    kept = copy.deepcopy((first.state_dict(), its_optimizer.state_dict()))
    state = json.loads(json.dumps(its_intervention.state_dict()))

    second, its_optimizer, its_training, its_intervention = begin(seed=1)
    second.load_state_dict(kept[0])
    its_optimizer.load_state_dict(kept[1])
    its_intervention.load_state_dict(state)
    actions += train(second, its_optimizer, its_training, its_intervention, steps=4, active=active, begin=4)
    assert actions == whole
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), second.parameters()))


@pytest.mark.parametrize("kind", EVERY)
def test_it_can_be_copied_and_sent_to_other_processes_while_it_acts(kind):
    intervention = EVERY[kind]()
    open_training(intervention)
    intervention.handle(reading(alert(heads=(0, 1))))
    other = pickle.loads(pickle.dumps(intervention))
    assert other.state_dict() == copy.deepcopy(intervention).state_dict() == intervention.state_dict()


def test_heads_that_were_alike_at_step_0_are_left_alone_unless_their_rule_is_named():
    at_start = alert(heads=(0, 1), since=0, step=0)
    revive = EVERY["ReviveHeads"]
    assert not revive().answers(at_start)
    assert revive(rules=["worst pair"]).answers(at_start)
    assert revive().answers(alert(heads=(0, 1)))
    assert not revive().answers(alert(rule="later tokens"))
