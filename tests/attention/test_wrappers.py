"""Layers have the names of the user's model under the wrappers of those who train it."""

from __future__ import annotations

import pytest
import torch
from lightning.fabric import Fabric
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from hdi_callback import HeadDiversityMonitor, find_attention, watch_heads
from hdi_callback.attention.wrappers import inner_model, is_wrapper
from hdi_callback.errors import UnsupportedAttentionWarning
from hdi_callback.monitoring.interventions import StopTraining
from tests.models import Classifier

NAMES = ["blocks.0.attn", "blocks.1.attn"]


class OwnEngine(nn.DataParallel):
    """A subclass of a wrapper wraps as well."""


@pytest.mark.parametrize("wrap", ["fabric", "compiled within fabric", "engine"])
def test_layers_and_patterns_have_the_names_of_the_users_model(wrap):
    model = Classifier()
    if wrap == "engine":
        wrapped = OwnEngine(model)
    else:
        inner = torch.compile(model, backend="eager") if wrap.startswith("compiled") else model
        wrapped = Fabric(accelerator="cpu").setup_module(inner)
    assert inner_model(wrapped) is model
    with HeadDiversityMonitor(wrapped, include=["blocks.*"]) as monitor:
        assert [layer.name for layer in monitor.layers] == NAMES


class Odd(nn.Module):
    """Looks like attention and has no heads that can be told apart."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(7, 5), nn.Linear(5, 7)

    def forward(self, x):
        return self.b(self.a(x).tanh())


class OddAttention(Odd):
    pass


def compiled(module):
    return torch.compile(module, backend="eager")


@pytest.mark.parametrize("wrap", [compiled, checkpoint_wrapper, lambda module: compiled(checkpoint_wrapper(module))])
def test_patterns_refusals_and_layers_within_a_wrapped_submodule_have_the_users_names(wrap):
    model = Classifier()
    model.odd = nn.Sequential(wrap(OddAttention()))
    model.blocks[0] = wrap(model.blocks[0])
    model.blocks[1].attn = wrap(model.blocks[1].attn)
    with pytest.warns(UnsupportedAttentionWarning) as reported:
        found = find_attention(model)
    assert [layer.name for layer in found] == NAMES
    assert "`odd.0` (OddAttention)" in str(reported[0].message)
    assert "exclude=['odd.0']" in str(reported[0].message)
    assert [layer.name for layer in find_attention(model, include=["blocks.0.attn"])] == NAMES[:1]
    assert [layer.name for layer in find_attention(model, include=["blocks.*"], exclude=["blocks.0.attn"])] == NAMES[1:]
    with HeadDiversityMonitor(model, exclude=["odd.0"]) as monitor:
        assert [layer.name for layer in monitor.layers] == NAMES
        assert monitor.refused == ()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings = {
        "thresholds": {"blocks.0.attn": {"mean": 0.7}},
        "interventions": [StopTraining(layers=["blocks.1.attn"])],
    }
    watch_heads(model, optimizer, exclude=["odd.0"], history=False, verbose=False, **settings).close()


def test_a_submodule_that_the_user_named_module_is_not_taken_for_a_wrapped_model():
    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.Linear(2, 2)

    model = Holder()
    assert inner_model(model) is model
    assert inner_model(nn.DataParallel(model)) is model


def test_checkpoint_and_compile_wrappers_are_recognised():
    linear = nn.Linear(2, 2)
    wrapped = [checkpoint_wrapper(linear), torch.compile(linear, backend="eager"), linear, nn.Sequential(linear)]
    assert [bool(is_wrapper(one)) for one in wrapped] == [True, True, False, False]
