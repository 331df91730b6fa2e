"""What is of the whole process, or of the user's model, is in a watched training as without."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import logging
import os
import pickle
import random
import signal
import sys
import threading
import warnings
from collections import Counter
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from hdi_callback import watch_heads
from hdi_callback.attention.extra_forward import nothing_remains
from tests.attention.models import Model


def train(is_watched, folder, *, make=Model, steps=8, look=None, within=contextlib.nullcontext, call=None, every=1):
    """Return the losses of a training; `look` is called in each step, after the forward."""
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    heads = watch_heads(model, optimizer, every, log_dir=folder) if is_watched else None
    losses = []
    with heads or contextlib.nullcontext():
        for _ in range(steps):
            with heads.step() if heads is not None else contextlib.nullcontext(), within():
                x = torch.randn(2, 9, 32)
                loss = (model if call is None else lambda x, model=model: call(model, x))(x).float().square().mean()
                if look is not None:
                    look(model, optimizer)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
    return losses


def hooks_of(model):
    return sum(len(held or ()) for module in model.modules() for name, held in vars(module).items() if "hook" in name)


# --- the model


def test_a_copy_of_a_model_in_a_step_that_is_read_has_the_users_hooks_alone(tmp_path):
    class Noting:
        def __call__(self, module, args):
            pass

    counts = []

    def look(model, optimizer):
        handle = model.blocks[0].register_forward_pre_hook(Noting())
        counts.append((hooks_of(model), hooks_of(copy.deepcopy(model)), hooks_of(copy.deepcopy(model.blocks[0]))))
        handle.remove()

    model = Model()
    with watch_heads(model, torch.optim.SGD(model.parameters()), log_dir=tmp_path):
        assert hooks_of(model) > 0
        assert hooks_of(torch.optim.swa_utils.AveragedModel(model)) == 0
    train(True, tmp_path, look=look)
    assert all(own > 1 for own, *_ in counts)
    assert {tuple(of_copies) for _, *of_copies in counts} == {(1, 1)}


def test_a_model_that_is_saved_in_a_step_that_is_read_loads_without_this_package_and_computes_the_same(tmp_path):
    saved = []

    def look(model, optimizer):
        file = io.BytesIO()
        torch.save(model, file)
        for content in (file.getvalue(), pickle.dumps(model)):
            assert b"hdi_callback" not in content
        with torch.no_grad():
            x = torch.ones(1, 4, 32)
            saved.append(torch.equal(pickle.loads(pickle.dumps(model)).eval()(x), copy.deepcopy(model).eval()(x)))

    train(True, tmp_path, look=look, steps=3)
    assert saved == [True] * 3


def test_a_part_that_is_scripted_in_a_step_that_is_read_is_told_of_its_copy_which_can_be(tmp_path):
    results = []

    def look(model, optimizer):
        projection, x = model.blocks[0].attention.out, torch.ones(32)
        with pytest.raises(AttributeError, match=r"script copy.deepcopy\(model\), which has no hooks"):
            torch.jit.script(projection)
        results.append(
            torch.equal(torch.jit.script(copy.deepcopy(projection))(x), F.linear(x, *projection.parameters()))
        )

    train(True, tmp_path, look=look, steps=2)
    assert results == [True, True]


# --- warnings


class Warns(Model):
    def forward(self, x):
        warnings.warn("of the model's own", stacklevel=1)
        return super().forward(x)


class PartlyCompiled(Warns):
    def __init__(self):
        super().__init__()
        self.blocks[0].compile(backend="eager")


@pytest.mark.parametrize("make", [Warns, PartlyCompiled])
def test_a_warning_of_the_users_is_shown_once(make, tmp_path):
    train(False, tmp_path, make=make)  # compilation itself makes Python forget what was shown
    shown = []
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        warnings.showwarning = lambda message, *_: shown.append(str(message))
        before = [*(filters := warnings.filters)]
        train(True, tmp_path, make=make)
        assert warnings.filters is filters
        assert filters == before
    assert shown.count("of the model's own") == 1


def test_warnings_of_other_threads_are_shown_while_a_forward_runs_once_more():
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        shown = []
        warnings.showwarning = lambda message, *_: shown.append(str(message))
        with nothing_remains(Model()):
            warnings.warn("here", stacklevel=1)
            thread = threading.Thread(target=warnings.warn, args=("there",))
            thread.start()
            thread.join()
            assert torch.backends.mha.get_fastpath_enabled()  # in other threads as well
            warnings.resetwarnings()
        warnings.simplefilter("always")
        warnings.warn("afterwards", stacklevel=1)
    assert shown == ["there", "afterwards"]


# --- modes of torch


class Functions(TorchFunctionMode):
    counts: ClassVar[Counter[str]] = Counter()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        Functions.counts[getattr(func, "__name__", str(func))] += 1
        return func(*args, **(kwargs or {}))


def test_a_function_mode_around_each_step_sees_the_users_calls_alone(tmp_path):
    counts = []
    for is_watched in (False, True):
        Functions.counts = Counter()
        train(is_watched, tmp_path, within=Functions, steps=12)
        counts.append(Functions.counts)
    assert counts[0] == counts[1]
    assert counts[0]["linear"] > 0


@contextlib.contextmanager
def switched_on():
    torch.set_autocast_enabled("cpu", True)
    try:
        yield
    finally:
        torch.set_autocast_enabled("cpu", False)
        torch.clear_autocast_cache()


class Compiled(Model):
    def __init__(self):
        super().__init__()
        self.blocks[0].compile(backend="eager")


@pytest.mark.parametrize("around", [lambda: torch.autocast("cpu", torch.bfloat16), switched_on])
@pytest.mark.parametrize("make", [Model, Compiled])
def test_autocast_around_a_training_keeps_the_weights_that_it_has_cast(make, around, tmp_path):
    losses = []
    for is_watched in (False, True):
        with around():
            losses.append(train(is_watched, tmp_path, make=make))
    assert losses[0] == losses[1]


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.maps, self.out = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x):
        query, key, value = self.maps(x).view(*x.shape[:2], 3, 4, 8).permute(2, 0, 3, 1, 4)
        weights = (query @ key.mT).exp()
        weights = weights / weights.sum(-1, keepdim=True)
        return self.out((weights @ value).transpose(1, 2).flatten(2))


def in_forward_mode(model, x):
    with forward_ad.dual_level():
        return sum(forward_ad.unpack_dual(model(forward_ad.make_dual(x, torch.ones_like(x)))))


def test_a_training_whose_calls_differentiate_in_forward_mode_is_as_without_and_says_that_it_is_not_read(tmp_path):
    expected = train(False, tmp_path, make=Plain, call=in_forward_mode, steps=20)
    with pytest.warns(
        UserWarning, match="none of its modules has been called outside of `torch.func` and `forward_ad`"
    ):
        assert train(True, tmp_path, make=Plain, call=in_forward_mode, steps=20) == expected


# --- the process


def state_of_the_process():
    """Return what any part of a process may set for all others."""
    backends = torch.backends
    return {
        "warnings": [*warnings.filters],
        "random": (random.getstate(), str(np.random.mtrand._rand.get_state()), torch.get_rng_state().tolist()),
        "numbers": (torch.get_default_dtype(), torch.get_default_device(), np.geterr(), np.get_printoptions()),
        "autograd": (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_anomaly_enabled()),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.is_autocast_cache_enabled()),
        "kernels": (
            torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision(), torch.get_num_threads(),
            backends.cudnn.enabled, backends.cudnn.benchmark, backends.cudnn.deterministic, backends.cudnn.allow_tf32,
            backends.mha.get_fastpath_enabled(), backends.cuda.flash_sdp_enabled(), backends.cuda.math_sdp_enabled(),
        ),
        "hooks of Python": (
            sys.excepthook, sys.displayhook, sys.unraisablehook, threading.excepthook, sys.gettrace(), sys.getprofile(),
            sys.getrecursionlimit(), sys.getswitchinterval(), sys.stdout, sys.stderr,
        ),
        "signals": [signal.getsignal(each) for each in signal.valid_signals()],
        "garbage": (gc.isenabled(), gc.get_threshold(), len(gc.callbacks), gc.get_freeze_count()),
        "surroundings": (dict(os.environ), os.getcwd(), [*sys.path], logging.root.level, [*logging.root.handlers]),
        "global hooks": [
            len(held) for name, held in vars(nn.modules.module).items()
            if name.startswith("_global_") and isinstance(held, dict)
        ],
    }  # fmt: skip


@pytest.mark.parametrize("make", [Model, Compiled])
def test_the_state_of_the_process_is_in_each_step_as_without(make, tmp_path):
    states, ends = {}, {}
    for is_watched in (False, True):
        states[is_watched] = []
        random.seed(0)
        np.random.mtrand._rand.seed(0)
        train(is_watched, tmp_path, make=make, look=lambda *_, of=is_watched: states[of].append(state_of_the_process()))
        ends[is_watched] = state_of_the_process(), threading.active_count(), len(os.listdir("/dev/fd"))
    for with_it, without in zip(states[True], states[False]):
        for name in without:
            assert with_it[name] == without[name], name
    assert ends[True] == ends[False]


# --- who makes the steps


def test_an_optimizer_that_takes_over_is_named_soon(tmp_path):
    model = Model()
    first, second = (torch.optim.AdamW(model.parameters(), 1e-3) for _ in range(2))
    with watch_heads(model, first, log_dir=tmp_path) as heads:
        for step in range(10):
            with warnings.catch_warnings(record=True) as shown, heads.step():
                warnings.simplefilter("always")
                model(torch.randn(2, 9, 32)).square().mean().backward()
                (first if step < 3 else second).step()
            if any("No optimizer that was passed" in str(each.message) for each in shown):
                break
    assert 3 < step <= 7
    assert heads.global_step == 3


def test_a_weight_that_a_forward_writes_while_gradients_add_up_is_no_step(tmp_path, recwarn):
    class Tokens(Model):
        def __init__(self):
            super().__init__()
            self.tokens = nn.Embedding(9, 32, max_norm=0.01)

        def forward(self, x):
            with torch.no_grad():
                self.tokens.weight.normal_()
            return super().forward(x + self.tokens(torch.arange(x.shape[1])))

    model = Tokens()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    with watch_heads(model, optimizer, log_dir=tmp_path) as heads:
        for part in range(40):
            with heads.step():
                model(torch.randn(2, 9, 32)).square().mean().backward()
                if part % 10 == 9:
                    optimizer.step()
    assert heads.global_step == 4
    assert not [each for each in recwarn if "No optimizer" in str(each.message)]
