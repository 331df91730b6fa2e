"""What hosts have in common: the factor that is on gradients before a step."""

from __future__ import annotations

import pytest
import torch

from hdi_callback.monitoring.session.host import PlainHost


@pytest.mark.parametrize("scale", [1024.0, torch.tensor(1024.0)])
def test_a_fused_optimizer_takes_off_the_scale_that_it_holds_itself(scale):
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    optimizer.grad_scale = scale
    assert PlainHost().loss_scale(optimizer) == 1024.0


@pytest.mark.parametrize("has_attribute", [False, True])
def test_of_all_other_optimizers_the_scale_has_been_taken_off(has_attribute):
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    if has_attribute:
        optimizer.grad_scale = None
    assert PlainHost().loss_scale(optimizer) == 1.0
