"""Ways to break the promise, put into the package on purpose: each must be seen by the comparison."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn

from hdi_callback import HeadDiversityMonitor
from tests.promise.models import Attention, FrozenEncoder
from tests.promise.plan import Training


@dataclass(frozen=True)
class Fault:
    """Something that a monitor must not do, and a training that shows it.

    Attributes:
        name: what is wrong.
        act: what is done to the model at each reading.
        difference: what must be said among the differences.
        training: the text of a training; the plainest by default.
    """

    name: str
    act: Callable[[nn.Module], Any]
    difference: str
    training: str = "separate / by hand /  / 1"


def _first(model: nn.Module) -> nn.Parameter:
    return next(iter(model.parameters()))


def _write_back(model: nn.Module) -> None:
    weight = _first(model).data
    weight.copy_(weight.bfloat16().float())


def _touch_gradient(model: nn.Module) -> None:
    gradient = _first(model).grad
    assert gradient is not None
    gradient.mul_(1 + 1e-6)


def _run_original(model: nn.Module) -> None:
    with torch.no_grad():
        attention = next(module for module in model.modules() if isinstance(module, Attention))
        attention(torch.ones(1, 3, 16))


def _run_teacher_with_a_hook(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, FrozenEncoder):
            module.layers[0].self_attn.register_forward_hook(lambda *args: None)


def _sync_buffers(model: nn.Module) -> None:
    for buffer in model.buffers():
        if buffer.is_floating_point():
            buffer.data = buffer.data.clone() * 1.0001


def _seed(model: nn.Module) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)


def _draw_of_module(model: nn.Module) -> None:
    for module in model.modules():
        for value in vars(module).values():
            if isinstance(value, torch.Generator):
                torch.rand(1, generator=value)


def _read_in_training_mode(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.Linear):
            assert isinstance(module.weight, Tensor)


def _reset_warnings(model: nn.Module) -> None:
    warnings.simplefilter("default", FutureWarning, append=True)


FAULTS = [
    Fault("draws of torch's generator", lambda model: torch.rand(1), "random states after step 0: torch"),
    Fault("draws of Python's generator", lambda model: random.random(), "random states after step 0: python"),
    Fault("seeds all devices", _seed, "torch.manual_seed None alone"),
    Fault("writes a weight back in another precision", _write_back, "loss 1"),
    Fault("scales a gradient", _touch_gradient, "gradients of step 0.0"),
    Fault(
        "tries the original, not a copy", _run_original, "calls after step 0", "separate / loop / draws of torch / 1"
    ),
    Fault(
        "switches a fast path off",
        _run_teacher_with_a_hook,
        "fast path of an encoder layer",
        "separate / by hand / teacher in evaluation mode / 1",
    ),
    Fault("sets a flag", lambda model: torch.backends.mha.set_fastpath_enabled(False), "surroundings after step 0"),
    Fault("draws of numpy's generator", lambda model: np.random.rand(), "random states after step 0: numpy"),  # noqa: NPY002
    Fault(
        "draws of a generator of the model's",
        _draw_of_module,
        "random states after step 0: blocks.0.attn.extras.0.generator",
        "separate / loop / draws of a generator / 1",
    ),
    Fault("seeds CUDA", lambda model: torch.cuda.manual_seed_all(0), "torch.cuda.manual_seed_all None alone"),
    Fault("syncs a buffer", _sync_buffers, "buffers", "interleaved / by hand / batch norm / 1"),
    Fault("calls hooks of the user's", _run_original, "calls after step 0", "separate / by hand / user hooks / 1"),
    Fault("calls global hooks", _run_original, "calls after step 0", "separate / by hand / global hooks / 1"),
    Fault("counts a class up", _run_original, "calls after step 0", "separate / by hand / counter of a class / 1"),
    Fault(
        "adds to a list of losses", _run_original, "loss 1", "separate / lightning / auxiliary losses in a list / 1"
    ),
    Fault(
        "computes a parametrization once more",
        _read_in_training_mode,
        "calls after step 0",
        "separate / by hand / parametrization that counts / 1",
    ),
    Fault(
        "iterates a spectral norm",
        _read_in_training_mode,
        "loss 1",
        "fused / transformers / spectral norm / 1",
    ),
    Fault("leaves the model in evaluation mode", lambda model: model.eval(), "modules after step 0"),
    Fault(
        "unfreezes",
        lambda model: model.requires_grad_(True),
        "what trains of 'blocks.0",
        "separate / loop / frozen block / 1",
    ),
    Fault("leaves a buffer", lambda model: model.register_buffer("seen", torch.zeros(1)), "modules after step 0"),
    Fault("changes how warnings are shown", _reset_warnings, "surroundings after step 0"),
    Fault("warns as somebody else", lambda model: warnings.warn("look here", stacklevel=1), "warnings of others"),
    Fault("raises", lambda model: [][0], "the training ended"),
]  # fmt: skip


@contextmanager
def broken(act: Callable[[nn.Module], Any]) -> Iterator[None]:
    """Make every reading modify the model."""
    models: dict[int, nn.Module] = {}
    begin, measure = HeadDiversityMonitor.__init__, HeadDiversityMonitor.measure

    def begin_and_keep(self: HeadDiversityMonitor, model: nn.Module, **options: Any) -> None:
        begin(self, model, **options)
        models[id(self)] = model

    def act_and_measure(self: HeadDiversityMonitor, *args: Any, **kwargs: Any) -> Any:
        act(models[id(self)])
        return measure(self, *args, **kwargs)

    with (
        mock.patch.object(HeadDiversityMonitor, "__init__", begin_and_keep),
        mock.patch.object(HeadDiversityMonitor, "measure", act_and_measure),
    ):
        yield


@contextmanager
def leaving_hooks() -> Iterator[None]:
    """Let a monitor put a hook on the model that it never takes off."""

    def leave(model: nn.Module) -> None:
        if not hooked:
            hooked.append(next(model.children()).register_forward_hook(lambda *args: None))

    hooked: list[Any] = []
    with broken(leave):
        yield


PLAINEST = Training.parse("separate / by hand /  / 1")
