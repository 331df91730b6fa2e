"""The healthy trainings are what they are said to be: each has a loss that can be trained."""

from __future__ import annotations

import math

import pytest
import torch

from tests.studies.experiments.healthy import RECIPES
from tests.studies.experiments.healthy_by_hand import TRAININGS


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_every_healthy_training_has_a_finite_loss_and_gradients(name: str) -> None:
    torch.manual_seed(0)
    model = RECIPES[name].make().train()
    loss = RECIPES[name].loss(model, 0)
    loss.backward()
    assert loss.isfinite()
    assert any(parameter.grad is not None and bool(parameter.grad.any()) for parameter in model.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAININGS)
def test_every_training_by_hand_makes_a_step_that_moves_its_weights(name: str) -> None:
    torch.manual_seed(0)
    training = TRAININGS[name]()
    before = [parameter.detach().clone() for parameter in training.model.train().parameters()]
    loss = training.step(training, 0) if training.step else training.update(0)
    assert math.isfinite(loss)
    assert any(not torch.equal(*pair) for pair in zip(before, training.model.parameters()))
