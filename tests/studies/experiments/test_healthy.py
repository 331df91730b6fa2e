"""The healthy trainings are what they are said to be: each has a loss that can be trained."""

from __future__ import annotations

import pytest
import torch

from tests.studies.experiments.healthy import RECIPES


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_every_healthy_training_has_a_finite_loss_and_gradients(name: str) -> None:
    torch.manual_seed(0)
    model = RECIPES[name].make().train()
    loss = RECIPES[name].loss(model, 0)
    loss.backward()
    assert loss.isfinite()
    assert any(parameter.grad is not None and bool(parameter.grad.any()) for parameter in model.parameters())
