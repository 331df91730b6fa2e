"""Interventions of a user's that fail, wherever they do: one warning each, and the run and the others go on."""

from __future__ import annotations

import copy
import json
import pickle
import warnings

import pytest
import torch

from hdi_callback import HDICallback, watch_heads
from hdi_callback.errors import MisconfigurationError, MonitoringWarning
from hdi_callback.monitoring.alerts import Finding, Rule
from hdi_callback.monitoring.interventions import Call, Intervention, ScaleLearningRate
from tests.models import Classifier


class Always(Rule):
    name = "always"

    def judge(self, series, active):
        return active.finding if active else Finding("something")


class Fails(Intervention):
    """Fails at one of its parts."""

    name = "Fails"

    def __init__(self, at: str = "", error: type[Exception] = RuntimeError, state=None) -> None:
        super().__init__()
        self.at, self.error, self.state = at, error, state

    def part(self, at: str) -> None:
        if at == self.at:
            raise self.error("broken")

    def attach(self, training):
        super().attach(training)
        self.part("attach")

    def detach(self):
        self.part("detach")

    def act(self, alert):
        self.part("act")
        return self._action(alert, "acted")

    def before_optimizer_step(self, optimizer):
        self.part("before_optimizer_step")

    def state_dict(self):
        self.part("state_dict")
        return {**super().state_dict(), "state": self.state}

    def load_state_dict(self, state):
        self.part("load_state_dict")
        super().load_state_dict(state)


def train(*interventions, state=None):
    """Train a few steps; give the weights, the state in the middle, the warnings and the alerts of the good one."""
    torch.manual_seed(0)
    model = Classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    reported: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with watch_heads(
            model, optimizer, every_n_steps=1, history=False, verbose=False, alerts=[Always()],
            interventions=[*interventions, Call(lambda alert: reported.append(alert.layer))],
        ) as heads:  # fmt: skip
            if state is not None:
                heads.load_state_dict(state)
            for seed in range(3):
                tokens = torch.randint(16, (4, 12), generator=torch.Generator().manual_seed(seed))
                with heads.step():
                    model(tokens).square().mean().backward()
                    optimizer.step()
                optimizer.zero_grad()
            kept = heads.state_dict()
    about = [str(item.message) for item in caught if issubclass(item.category, MonitoringWarning)]
    return [parameter.detach().clone() for parameter in model.parameters()], kept, about, reported


@pytest.mark.parametrize("at", ["attach", "detach", "act", "before_optimizer_step", "state_dict"])
def test_an_intervention_that_raises_costs_one_warning_and_neither_the_run_nor_the_others(at):
    plain, *_ = train()
    weights, kept, messages, reported = train(Fails(at))
    assert len(messages) == 1
    assert "Fails" in messages[0]
    assert "RuntimeError: broken" in messages[0]
    assert reported == ["blocks.0.attn", "blocks.1.attn"]
    assert all(torch.equal(left, right) for left, right in zip(weights, plain))
    json.dumps(kept)


def test_a_state_that_cannot_be_loaded_costs_one_warning_and_the_others_resume():
    *_, kept, _, _ = train(Fails())
    _, _, messages, reported = train(Fails("load_state_dict"), state=kept)
    assert [("resuming the intervention Fails" in message) for message in messages] == [True]
    assert reported == [], "the alerts stand, as the state says"


@pytest.mark.parametrize(
    "state",
    [lambda: None, torch.ones(2), {1: 2}, {1, 2}, object()],
    ids=["function", "tensor", "keys", "set", "object"],
)
def test_a_state_that_cannot_be_saved_is_left_out_with_one_warning(state):
    _, kept, messages, _ = train(Fails(state=state))
    assert len(messages) == 1
    assert "keeping the state of the intervention Fails" in messages[0]
    assert json.loads(json.dumps(kept))["interventions"][0] == ["Fails", {"count": 1}]
    assert pickle.loads(pickle.dumps(kept)) == kept


def test_an_intervention_that_refuses_the_model_is_an_error_and_leaves_no_hook_on_the_optimizer():
    model = Classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(MisconfigurationError, match="broken"):
        watch_heads(
            model, optimizer, history=False, verbose=False,
            interventions=[ScaleLearningRate(), Fails("attach", MisconfigurationError)],
        )  # fmt: skip
    assert not optimizer._optimizer_step_pre_hooks
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_an_intervention_is_reset_in_a_second_run():
    scale, fails = ScaleLearningRate(0.5), Fails()
    for _ in range(2):
        _, kept, messages, reported = train(scale, fails)
        assert messages == []
        assert reported == ["blocks.0.attn", "blocks.1.attn"]
        counts = {name: state["count"] for name, state in kept["interventions"]}
        assert counts == {"ScaleLearningRate": 2, "Fails": 1, "Call": 2}


def test_an_alert_of_a_removed_rule_and_its_intervention_end_after_a_resumption():
    class Other(Rule):
        name = "other"

        def judge(self, series, active):
            return None

    def run(rules, state=None):
        torch.manual_seed(0)
        model = Classifier()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scale = ScaleLearningRate(0.5)
        with watch_heads(
            model, optimizer, every_n_steps=1, history=False, verbose=False, alerts=rules, interventions=[scale]
        ) as heads:
            if state is not None:
                heads.load_state_dict(state)
            with heads.step():
                model(torch.randint(16, (4, 12))).square().mean().backward()
                optimizer.step()
            return heads.state_dict(), heads.active_alerts, scale.is_active

    state, active, is_scaled = run([Always()])
    assert len(active) == 2
    assert is_scaled
    _, active, is_scaled = run([Other()], state)
    assert active == []
    assert not is_scaled


def test_the_learning_rate_survives_a_step_that_fails():
    weight = torch.nn.Parameter(torch.ones(2))

    class Picky(torch.optim.SGD):
        fail = True

        def step(self, closure=None):
            if self.fail:
                raise RuntimeError("out of memory")
            return super().step(closure)

    optimizer = Picky([weight], lr=1.0)
    scale = ScaleLearningRate(0.5)

    class Training:
        def __init__(self) -> None:
            self.layers, self.optimizers = {}, [optimizer]

    scale.attach(Training())
    scale.standing = {"attn": ["worst pair"]}
    weight.grad = torch.ones(2)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="out of memory"):
            optimizer.step()
    optimizer.fail = False
    optimizer.step()
    assert optimizer.param_groups[0]["lr"] == 1.0
    assert weight.tolist() == [0.5, 0.5]


def test_interventions_are_copied_and_pickled_without_their_training():
    scale = ScaleLearningRate(0.5)
    train(scale)
    for twin in (copy.deepcopy(scale), pickle.loads(pickle.dumps(scale))):
        assert (twin.factor, twin.on, twin._training, twin._handles) == (0.5, "warning", None, [])
    callback = pickle.loads(pickle.dumps(HDICallback(interventions=[scale])))
    assert callback._settings.interventions[0].factor == 0.5
