"""Interventions on the run as a whole: when they act, how often, and what they leave behind."""

from __future__ import annotations

import json
import warnings

import pytest
import torch

from hdi_callback.errors import MisconfigurationError
from hdi_callback.monitoring.alerts import Alerts
from hdi_callback.monitoring.interventions import (
    Call,
    DiversityPenalty,
    ReviveHeads,
    SaveCheckpoint,
    ScaleLearningRate,
    StopTraining,
)
from hdi_callback.monitoring.readings import LayerRecord, Record
from hdi_callback.monitoring.rules import WorstPair
from tests.models import Classifier
from tests.monitoring.interventions.training import Open, alert


def attached(intervention, *optimizers, model=None):
    training = Open(model or Classifier(), *optimizers)
    intervention.attach(training)
    return training


# --- when, and how often


def test_level_rules_and_layers_decide_if_an_intervention_acts():
    stop = StopTraining(on="critical", rules=["mean alignment"], layers=["blocks.1.*"])
    training = attached(stop)
    for other in (
        alert("blocks.1.attn", level="warning"),
        alert("blocks.0.attn", level="critical"),
        alert("blocks.1.attn", level="critical", rule="worst pair"),
        alert("blocks.1.attn", level="critical", is_resolved=True),
    ):
        assert stop.answer(other) is None
        assert not training.is_stopped
    action = stop.answer(alert("blocks.1.attn", level="critical"))
    assert training.is_stopped
    assert action.message == "step 100, blocks.1.attn: StopTraining stopped the training (mean alignment: critical)"


def test_an_intervention_acts_at_most_at_most_times():
    save = SaveCheckpoint(at_most=2)
    training = attached(save)
    actions = [save.answer(alert(step=step)) for step in (10, 20, 30)]
    assert training.saved == ["heads-mean-alignment-step=10", "heads-mean-alignment-step=20"]
    assert [action is None for action in actions] == [False, False, True]
    assert "at most 2 times" in save.describe()


def test_a_dry_run_reports_the_action_and_does_nothing():
    model = Classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    called = []
    for intervention in (
        StopTraining(on="warning", dry_run=True),
        SaveCheckpoint(dry_run=True),
        ScaleLearningRate(dry_run=True),
        DiversityPenalty(dry_run=True),
        Call(called.append, dry_run=True),
    ):
        training = attached(intervention, optimizer, model=model)
        action = intervention.answer(alert())
        assert "would have" in action.message
        assert action.is_dry_run
        assert (training.is_stopped, training.saved, called) == (False, [], [])
        before = [parameter.clone() for parameter in model.parameters()]
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        intervention.before_optimizer_step(optimizer)
        optimizer.step()
        for parameter, old in zip(model.parameters(), before):
            assert torch.equal(parameter, old - 1), f"{intervention.name} changed a step"
        intervention.detach()


def test_a_function_is_called_with_the_alert():
    messages = []
    call = Call(messages.append, on="notice")
    attached(call)
    reported = alert(level="notice")
    action = call.answer(reported)
    assert messages == [reported]
    assert "called append" in action.message


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: StopTraining(on="serious"), '"notice", "warning" or "critical", got'),
        (lambda: StopTraining(rules="mean alignment"), r"write \['mean alignment'\]"),
        (lambda: StopTraining(layers="blocks.*"), r"write \['blocks"),
        (lambda: SaveCheckpoint(at_most=0), "at least 1"),
        (lambda: ScaleLearningRate(2.0), r"\(0, 1\], got 2.0"),
        (lambda: ScaleLearningRate(scope="group"), '"all" or "layer"'),
        (lambda: DiversityPenalty(0.0), "must be a positive number"),
        (lambda: DiversityPenalty(roles="key"), "must be a list"),
        (lambda: DiversityPenalty(roles=["output"]), 'must be "key", "query" or "value"'),
        (lambda: Call("log"), "must be a function"),
    ],
)
def test_misuse_is_refused_before_training(make, message):
    with pytest.raises(MisconfigurationError, match=message):
        make()


# --- the learning rate


def gradients(model, seed: int = 0) -> None:
    draw = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=draw)


def copies(number: int):
    models = []
    for _ in range(number):
        torch.manual_seed(0)
        models.append(Classifier())
    return models


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_the_learning_rate_of_all_parameters_is_scaled_only_while_the_alert_is_active(kind):
    touched, by_hand = copies(2)
    optimizer, reference = kind(touched.parameters(), lr=0.1), kind(by_hand.parameters(), lr=0.1)
    scale = ScaleLearningRate(0.25)
    training = Open(touched, optimizer)
    scale.attach(training)

    def both(factor: float, seed: int) -> None:
        gradients(touched, seed)
        gradients(by_hand, seed)
        reference.param_groups[0]["lr"] = 0.1 * factor
        optimizer.step()
        reference.step()
        for left, right in zip(touched.parameters(), by_hand.parameters()):
            assert torch.equal(left, right)
        assert optimizer.param_groups[0]["lr"] == 0.1, "schedulers and checkpoints see the rate that they set"

    both(1, 0)
    assert scale.answer(alert()).message.endswith("multiplied the learning rate by 0.25 (mean alignment: warning)")
    assert scale.answer(alert("blocks.1.attn")) is not None
    both(0.25, 1)
    assert "restored the learning rate" in scale.answer(alert(is_resolved=True)).message
    both(0.25, 2)  # the other layer's alert is active
    scale.answer(alert("blocks.1.attn", is_resolved=True))
    both(1, 3)
    scale.detach()
    assert not optimizer._optimizer_step_pre_hooks
    assert not optimizer._optimizer_step_post_hooks


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_the_learning_rate_of_one_layer_can_be_scaled_alone(kind):
    touched, by_hand = copies(2)
    inside = {id(parameter) for parameter in by_hand.blocks[0].attn.parameters()}
    groups = [[p for p in by_hand.parameters() if (id(p) in inside) == flag] for flag in (True, False)]
    reference = kind([{"params": groups[0], "lr": 0.025}, {"params": groups[1], "lr": 0.1}], lr=0.1)
    optimizer = kind(touched.parameters(), lr=0.1)
    scale = ScaleLearningRate(0.25, scope="layer")
    scale.attach(Open(touched, optimizer))
    scale.answer(alert("blocks.0.attn"))
    for seed in range(3):
        gradients(touched, seed)
        gradients(by_hand, seed)
        optimizer.step()
        reference.step()
    for left, right in zip(touched.parameters(), by_hand.parameters()):
        torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-6)
    scale.detach()


def test_alerts_of_two_rules_for_one_layer_count_as_one_action():
    scale = ScaleLearningRate()
    attached(scale, torch.optim.SGD(Classifier().parameters(), lr=1.0))
    assert scale.answer(alert(rule="forecast")) is not None
    assert scale.answer(alert(rule="mean alignment")) is None
    goes_on = scale.answer(alert(rule="forecast", is_resolved=True))
    assert goes_on.is_refusal
    assert goes_on.message == (
        "step 100, blocks.0.attn: ScaleLearningRate goes on, as other alerts of the layer are active: mean alignment "
        "(forecast: is over)"
    )
    assert scale.is_active
    assert scale.answer(alert(rule="mean alignment", is_resolved=True)) is not None
    assert not scale.is_active
    assert scale.count == 1
    scale.detach()


@pytest.mark.parametrize("make", [ScaleLearningRate, DiversityPenalty])
def test_an_intervention_on_critical_alerts_ends_when_the_alert_eases_to_a_warning(make):
    acts = make(on="critical")
    attached(acts, torch.optim.SGD(Classifier().parameters(), lr=1.0))
    assert acts.answer(alert(level="warning")) is None
    assert acts.answer(alert(level="critical")) is not None
    assert acts.answer(alert(level="warning", heads=(0, 1))) is not None
    assert not acts.is_active
    assert acts.answer(alert(level="warning", is_resolved=True)) is None
    acts.detach()


def test_a_second_alert_keeps_an_intervention_active_even_after_at_most_is_reached():
    scale = ScaleLearningRate(at_most=1)
    attached(scale, torch.optim.SGD(Classifier().parameters(), lr=1.0))
    assert scale.answer(alert(rule="forecast")) is not None
    assert scale.answer(alert(rule="mean alignment")) is None
    assert scale.answer(alert("blocks.1.attn")) is None
    scale.answer(alert(rule="forecast", is_resolved=True))
    assert scale.standing == {"blocks.0.attn": ["mean alignment"]}
    scale.answer(alert(rule="mean alignment", is_resolved=True))
    assert not scale.is_active
    scale.detach()


@pytest.mark.some_slow(quick=2)
@pytest.mark.parametrize("make", [StopTraining, SaveCheckpoint, ScaleLearningRate, DiversityPenalty])
def test_active_interventions_and_how_often_they_acted_survive_a_resumption(make):
    first, second = make(on="warning", at_most=2), make(on="warning", at_most=2)
    model = Classifier()
    for intervention in (first, second):
        attached(intervention, torch.optim.SGD(model.parameters(), lr=1.0), model=model)
    first.answer(alert())
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert second.count == 1
    assert getattr(second, "standing", None) == getattr(first, "standing", None)
    assert second.answer(alert("blocks.1.attn")) is not None
    assert second.answer(alert("blocks.1.attn", rule="worst pair", step=200)) is None
    for intervention in (first, second):
        intervention.detach()


@pytest.mark.parametrize(
    "rule", ["weight jump", "later tokens", "weights not finite", "sharp from the start", "one key"]
)
def test_the_penalty_acts_by_default_only_on_alerts_about_heads_that_are_alike(rule):
    usual, named = DiversityPenalty(), DiversityPenalty(rules=[rule])
    for intervention in (usual, named):
        attached(intervention, torch.optim.SGD(Classifier().parameters(), lr=1.0))
    assert usual.answer(alert(rule=rule)) is None
    assert not usual.is_active
    assert named.answer(alert(rule=rule)) is not None
    assert usual.answer(alert(rule="merged scores")) is not None


def test_a_resumed_intervention_drops_alerts_of_rules_and_layers_it_no_longer_covers():
    scale = ScaleLearningRate(0.1)
    attached(scale, torch.optim.SGD(Classifier().parameters(), lr=1.0))
    scale.answer(alert(rule="weight jump"))
    scale.answer(alert(rule="forecast"))
    for resumed, standing in (
        (ScaleLearningRate(0.1), {"blocks.0.attn": ["weight jump", "forecast"]}),
        (ScaleLearningRate(0.1, rules=["forecast"]), {"blocks.0.attn": ["forecast"]}),
        (ScaleLearningRate(0.1, rules=["worst pair"]), {}),
        (ScaleLearningRate(0.1, layers=["decoder.*"]), {}),
    ):
        resumed.load_state_dict(scale.state_dict())
        assert resumed.standing == standing
    scale.detach()


# --- what goes wrong inside the user's optimizer.step()


@pytest.mark.parametrize("scope", ["all", "layer"])
def test_a_failure_around_an_optimizer_step_costs_one_warning_and_the_step_is_made(scope):
    models = []
    for watched in (False, True):
        torch.manual_seed(0)
        model = Classifier()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        if watched:
            scale = ScaleLearningRate(scope=scope)
            attached(scale, optimizer, model=model)
            scale.answer(alert())
            scale.factor = "x"  # what no learning rate can be multiplied by
        messages = []
        for _ in range(3):
            model(torch.arange(12)[None] % 16).sum().backward()
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                optimizer.step()
            messages += [str(one.message) for one in caught]
            optimizer.zero_grad()
        assert optimizer.param_groups[0]["lr"] == 0.5
        assert [("learning rate" in one and "failed" in one) for one in messages] == [True] * watched
        models.append(model)
    for one, other in zip(models[0].parameters(), models[1].parameters()):
        assert torch.equal(one, other)


# --- weights that were loaded


@pytest.mark.parametrize("kind", [DiversityPenalty, ReviveHeads])
def test_head_interventions_ignore_pretrained_clones_until_the_run_changes_them(kind):
    def reported(curve, intervention):
        attached(intervention)
        alerts = Alerts([WorstPair()], {})
        news = []
        for step, value in curve:
            values = {"hdi_worst_alignment": value, "hdi_energy_worst_alignment": 0.0, "hdi_alignment": 0.1}
            arrays = {"worst_alignment_pair": (0, 1)}
            news += alerts.judge(Record(step, {"blocks.0.attn": LayerRecord(values, arrays)}))
        begun = [one for one in news if not one.is_resolved]
        return [one.step for one in begun], [intervention._is_for(one) for one in begun]

    loaded = [(0, 0.95), (10, 0.95), (20, 0.95)]
    assert reported(loaded, kind()) == ([10], [False])
    assert reported(loaded, kind(rules=["worst pair"])) == ([10], [True])
    assert reported([(0, 0.2), (10, 0.95)], kind()) == ([10], [True])
    assert reported([*loaded, (30, 0.3), (40, 0.95)], kind()) == ([10, 40], [False, True])
    assert reported(loaded, StopTraining(on="warning")) == ([10], [True])
