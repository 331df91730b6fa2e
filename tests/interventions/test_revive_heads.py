"""Revived heads: functions before and after, the optimizer's state, and what is refused."""

from __future__ import annotations

import copy
import re

import pytest
import torch
from torch import nn

from hdi_callback.core import head_diversity
from hdi_callback.errors import MisconfigurationError
from hdi_callback.interventions import ReviveHeads, revive_heads
from hdi_callback.rules import Alerts
from tests.interventions.training import Attention, Model, Open, Torch, alert, copy_head, reading

KINDS = {
    "packed": lambda **options: Torch(**options),
    "many": lambda **options: Attention(64, 4, 4, **options),
}


def made(kind: str, **options):
    torch.manual_seed(0)
    model = Model(lambda: KINDS[kind](**options), depth=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, model.layers()["blocks.0"], Open(model, optimizer)


def revive(training, *heads, **options):
    intervention = ReviveHeads(**options)
    intervention.bind(training)
    (action,) = intervention.handle(reading(alert("blocks.0", heads)))
    return action, intervention


def folded(action) -> tuple[list[int], int]:
    """The heads that left, and the one that stays."""
    pairs = re.findall(r"head (\d+) of blocks.0 \(folded into (\d+)", action.message)
    (stays,) = {int(stays) for _, stays in pairs}
    return [int(leaves) for leaves, _ in pairs], stays


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_revived_clone_gets_a_new_subspace_and_the_layer_computes_the_same(kind, bias):
    model, layer, training = made(kind, bias=bias)
    copy_head(layer, 1, 3)
    if bias:
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                nn.init.normal_(parameter)
        with torch.no_grad():  # of copies
            block = model.blocks[0]
            if kind == "packed":
                queries, _, values = block.in_proj_bias.chunk(3)
            else:
                queries, values = block.q_proj.bias, block.v_proj.bias
            for bias in (queries, values):
                bias.view(-1, layer.head_dim)[3] = bias.view(-1, layer.head_dim)[1]
    x = torch.randn(4, 9, model.width)
    with torch.no_grad():
        before = model(x)
    state = torch.get_rng_state()
    action, _ = revive(training, 1, 3)
    assert torch.equal(torch.get_rng_state(), state)
    with torch.no_grad():
        torch.testing.assert_close(model(x), before, rtol=1e-4, atol=1e-5)
    assert float(head_diversity(layer.weight("key")).subspace.worst) < 0.7
    (left,), stays = folded(action)
    assert {left, stays} == {1, 3}
    assert not layer.weight("output")[left].any()
    norms = layer.weight("key").detach().norm(dim=(1, 2))
    assert float(norms[left]) == pytest.approx(float(norms.mean()), rel=0.3)


def test_the_clone_that_contributes_more_is_kept():
    _, layer, training = made("many")
    copy_head(layer, 1, 3)
    with torch.no_grad():
        layer.weight("output")[1] *= 0.1
    assert folded(revive(training, 1, 3)[0]) == ([1], 3)


def test_the_revived_head_learns_again():
    model, layer, training = made("many")
    copy_head(layer, 1, 3)
    (head,), _ = folded(revive(training, 1, 3)[0])
    start = layer.weight("key")[head].detach().clone()
    for seed in range(5):
        model.loss(seed).backward()
        training.optimizers[0].step()
        training.optimizers[0].zero_grad()
    assert layer.weight("output")[head].any()
    assert not torch.allclose(layer.weight("key")[head], start)


@pytest.mark.parametrize("kind", KINDS)
def test_only_the_optimizer_state_of_the_revived_head_is_cleared(kind):
    model, layer, training = made(kind)
    (optimizer,) = training.optimizers
    model.loss(0).backward()
    optimizer.step()
    copy_head(layer, 1, 3)
    before = {id(p): {k: v.clone() for k, v in optimizer.state[p].items()} for p in model.parameters()}
    (head,), _ = folded(revive(training, 1, 3)[0])
    with torch.no_grad():  # look at the state through the layer's own eyes: put it in place of the weights
        for name in ("exp_avg", "exp_avg_sq"):
            for parameter in model.parameters():
                parameter.copy_(optimizer.state[parameter][name])
            after = {role: layer.weight(role).clone() for role in ("query", "key", "value", "output")}
            for parameter in model.parameters():
                parameter.copy_(before[id(parameter)][name])
            for role in ("query", "key", "output"):
                old, keep = layer.weight(role), torch.ones(len(layer.weight(role)), dtype=torch.bool)
                keep[head] = False
                assert not after[role][~keep].any(), role
                assert torch.equal(after[role][keep], old[keep]), role
            assert torch.equal(after["value"], layer.weight("value"))


def test_all_but_one_of_equal_heads_are_revived():
    _, layer, training = made("many")
    for head in (1, 2, 3):
        copy_head(layer, 0, head)
    action, _ = revive(training, rules=["worst pair"])
    assert len(folded(action)[0]) == 3
    assert float(head_diversity(layer.weight("key")).subspace.worst) < 1e-6, "four heads of 16 in 64 dimensions fit"


def test_one_head_of_each_group_stays():
    _, layer, training = made("many")
    copy_head(layer, 0, 2)
    copy_head(layer, 1, 3)
    action, _ = revive(training, 0, 1, 2, 3)
    assert len(re.findall(r"head \d+ of blocks.0 \(folded", action.message)) == 2
    assert float(head_diversity(layer.weight("key")).subspace.worst) < 0.7


@pytest.mark.parametrize("kind", KINDS)
def test_a_head_that_shares_only_its_keys_is_left_and_the_action_says_so(kind):
    model, layer, training = made(kind)
    copy_head(layer, 1, 3, roles=["key"])
    before = copy.deepcopy(model.state_dict())
    action, intervention = revive(training, 1, 3)
    assert action.is_refusal
    assert re.fullmatch(
        r"left as before, above max_output_error=0.1: head [13] of blocks.0 \(folded into [13], with a "
        r"relative error of about \d+ %\)",
        action.message,
    )
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert intervention.count == 0, "a refusal is not counted"
    assert training.expected == []


def test_a_refused_head_is_revived_where_any_error_is_allowed_and_the_action_says_how_large():
    _, layer, training = made("many")
    copy_head(layer, 1, 3, roles=["key"])
    action, _ = revive(training, 1, 3, max_output_error=1)
    assert re.search(r"of blocks.0 \(folded into [13], with a relative error of about \d+ %\)$", action.message)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("gain", [0.5, 2.0])  # scores with a spread from 0.1 to 2
@pytest.mark.parametrize(
    ("role", "noise"), [("key", 0.0), ("key", 0.3), ("query", 0.1), ("query", 10.0), ("value", 0.05)]
)
def test_the_estimated_error_bounds_the_real_change_of_the_output(kind, gain, role, noise, monkeypatch):
    model, layer, training = made(kind)
    errors = []
    own = revive_heads._fold
    monkeypatch.setattr(revive_heads, "_fold", lambda *args: errors.append(own(*args)) or errors[-1])
    with torch.no_grad():
        for name in ("query", "key"):
            layer.weight(name).mul_(gain)
        copy_head(layer, 1, 3)
        weight = layer.weight(role)
        weight[3] += noise * weight.std() * torch.randn_like(weight[3])
        x = torch.randn(128, 64, model.width)
        before = model(x)
    untouched = copy.deepcopy(model)
    action, _ = revive(training, 1, 3, max_output_error=1)
    (head,), _ = folded(action)
    with torch.no_grad():
        untouched.layers()["blocks.0"].weight("output")[head] = 0
        lost = float((model(x) - before).norm() / (before - untouched(x)).norm())
    assert min(lost, 1) <= 1.1 * errors[0][1] + 1e-5


def test_an_event_whose_cause_names_one_head_of_the_two_is_answered():
    _, layer, training = made("many")
    copy_head(layer, 1, 3)
    intervention = ReviveHeads()
    intervention.bind(training)
    (action,) = intervention.handle(reading(alert("blocks.0", (3,), rule="merged values", also=("worst pair",))))
    assert set(folded(action)[0]) <= {1, 3}
    assert not action.is_refusal


def test_heads_with_other_terms_of_their_own_are_left():
    _, layer, training = made("many")
    copy_head(layer, 1, 3)
    layer.module.register_parameter("sinks", nn.Parameter(torch.arange(4.0)))
    assert revive(training, 1, 3)[0].is_refusal
    with torch.no_grad():
        layer.module.sinks.zero_()
    assert not revive(training, 1, 3)[0].is_refusal


def test_a_failure_during_a_revival_restores_weights_and_optimizer(monkeypatch):
    model, layer, training = made("many")
    (optimizer,) = training.optimizers
    model.loss(0).backward()
    optimizer.step()
    for head in (1, 2, 3):
        copy_head(layer, 0, head)
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    own, calls = revive_heads.fresh_head, []

    def fail_later(*args, **options):
        calls.append(1)
        if len(calls) > 3:
            raise RuntimeError("out of memory")
        return own(*args, **options)

    monkeypatch.setattr(revive_heads, "fresh_head", fail_later)
    with pytest.raises(RuntimeError, match="out of memory"):
        revive(training, rules=["worst pair"])
    assert all(torch.equal(tensor, before[0][name]) for name, tensor in model.state_dict().items())
    for number, kept in optimizer.state_dict()["state"].items():
        assert all(torch.equal(value, before[1]["state"][number][name]) for name, value in kept.items())
    assert training.expected == []


def test_every_rank_draws_the_same_heads():
    weights = []
    for _ in range(2):
        _, layer, training = made("many")
        copy_head(layer, 1, 3)
        torch.manual_seed(len(weights))
        revive(training, 1, 3)
        weights.append(layer.weight("key").detach())
    assert torch.equal(*weights)


def test_layers_that_cannot_be_revived_are_refused_before_training():
    grouped = Model(lambda: Attention(64, 8, 4), depth=1)
    with pytest.raises(MisconfigurationError, match=r"its heads share keys or values.*exclude="):
        ReviveHeads().bind(Open(grouped))
    model, _, training = made("many")
    layer = training.layers["blocks.0"]
    for role in ("query", "key", "value"):
        object.__setattr__(layer, "normed", frozenset({role}))
        with pytest.raises(MisconfigurationError, match=rf"a norm follows its {role} heads.*exclude="):
            ReviveHeads().bind(training)
    object.__setattr__(layer, "normed", frozenset())
    nn.utils.parametrizations.weight_norm(model.blocks[0].v_proj)
    with pytest.raises(MisconfigurationError, match="its value heads cannot be written in place"):
        ReviveHeads().bind(training)


def test_the_rules_expect_what_it_writes():
    """The whole way: the alert of copied heads, their revival, and no alert at the reading after it."""
    from tests.rules.readings import EVERY, LAYER, facts, run
    from tests.rules.test_events import copied, healthy, together
    from tests.rules.test_rules import circuits, moves, pair

    _, layer, training = made("many")
    copy_head(layer, 0, 2)
    training.layers = {LAYER: layer}
    object.__setattr__(layer, "name", LAYER)
    alerts = Alerts(layers=[facts()], pretrained=False)
    training.expect_change, training.step = alerts.expect_change, 8 * EVERY + 1
    run([healthy()] * 8 + [copied()], alerts)
    intervention = ReviveHeads()
    intervention.bind(training)
    (action,) = intervention.handle(reading(*alerts.active))
    assert action.step == 8 * EVERY + 1
    assert action.message.count(LAYER) == 1
    moved = [0.01, 0.01, 0.01, 0.01]
    for head in (0, 2):
        moved[head] = 1.2
    after = together(pair(0.1), circuits(0.1), moves(*moved))
    given = run([after, *[healthy()] * 3], alerts, begin=9 * EVERY)
    assert [(alert.status, alert.rule) for found in given for alert in found] == [("resolved", "copied heads")]
