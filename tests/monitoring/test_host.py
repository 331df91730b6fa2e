"""What hosts have in common: the factor that is on gradients before a step."""

from __future__ import annotations

import pytest
import torch

from hdi_callback.monitoring.session.host import PlainHost


@pytest.mark.parametrize("scale", [1024.0, torch.tensor(1024.0)])
def test_the_loss_scale_of_a_fused_optimizer_is_its_own_grad_scale(scale):
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    optimizer.grad_scale = scale
    assert PlainHost().loss_scale(optimizer) == 1024.0


@pytest.mark.parametrize("has_attribute", [False, True])
def test_the_loss_scale_of_other_optimizers_is_one(has_attribute):
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    if has_attribute:
        optimizer.grad_scale = None
    assert PlainHost().loss_scale(optimizer) == 1.0
