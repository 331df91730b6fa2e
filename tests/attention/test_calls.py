"""On whose behalf a forward runs, told by the functions that called it."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from hdi_callback.attention.calls import is_inferring_shapes, is_recomputing, running_calls

STAGE = "torch.distributed.pipelining.stage"


def called_by(name: str, file: str, asked) -> bool:
    """Ask within a function of this name and file."""
    names: dict = {"asked": asked}
    exec(compile(f"def {name}():\n    return asked()", file, "exec"), names)
    return names[name]()


@pytest.mark.parametrize("function", ["_shape_inference", "_forward_metadata_inference"])
def test_shape_inference_of_a_pipeline_stage_is_recognised(monkeypatch, function):
    file = "/torch/distributed/pipelining/stage.py"
    monkeypatch.delitem(sys.modules, STAGE, raising=False)
    assert not called_by(function, file, is_inferring_shapes), "nobody has imported it"
    monkeypatch.setitem(sys.modules, STAGE, ModuleType(STAGE))
    assert called_by(function, file, is_inferring_shapes)
    assert not called_by(function, "/home/user/train.py", is_inferring_shapes)
    assert not called_by("forward_one_chunk", file, is_inferring_shapes)
    assert not is_inferring_shapes()


class Noting(nn.Module):
    """Notes whether each of its forwards is a repetition, and the calls around it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.repeated, self.around = nn.Linear(3, 3), [], []

    def forward(self, x, scale=1.0):
        self.repeated.append(is_recomputing())
        self.around.append(running_calls())
        return self.linear(x).tanh() * scale


@pytest.mark.parametrize(("reentrant", "repeated"), [(False, [False, True]), (True, [False, False])])
def test_a_forward_repeated_by_checkpointing_is_recognised_if_autograd_recorded_the_first(reentrant, repeated):
    module, x = Noting(), torch.ones(2, 3, requires_grad=True)
    checkpoint(module, x, use_reentrant=reentrant).sum().backward()
    assert module.repeated == repeated


def test_running_calls_are_listed_innermost_first_with_their_arguments():
    inner, x = Noting(), torch.ones(2, 3)
    outer = nn.Sequential(inner)
    outer(x)
    (calls,) = inner.around
    assert [one.module for one in calls] == [inner, outer]
    assert calls[0].first is x
    assert calls[0].parameters == {"x", "scale"}
    inner(x, scale=2.0)
    assert inner.around[1][0].arguments["scale"] == 2.0
