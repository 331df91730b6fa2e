"""Layers have the names of the user's model under the wrappers of those who train it."""

from __future__ import annotations

import pytest
import torch
from lightning.fabric import Fabric
from torch import nn

from hdi_callback import HeadDiversityMonitor
from hdi_callback.attention.wrappers import inner_model
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
