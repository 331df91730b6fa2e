"""One extra forward before the first call: what it finds, and that nothing of it remains."""

from __future__ import annotations

import copy
import functools
import gc
import os
import pickle
import random
import threading

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from hdi_callback import HeadDiversityMonitor, MisconfigurationError, MonitoringWarning
from hdi_callback.attention.calls import modules_within
from hdi_callback.attention.discovery.find import survey_tape
from hdi_callback.attention.extra_forward import CannotRunAgainError, nothing_remains
from hdi_callback.attention.first_calls import FirstCalls
from hdi_callback.attention.first_forward import FirstForward
from tests.attention.models import Counting, Model, batches, is_equal, train

NAMES = ["blocks.0.attention", "blocks.1.attention"]


class Finder:
    """Keeps what was found, and the handle."""

    def __init__(self, model: nn.Module, *, is_recorded: bool = False) -> None:
        self.surveys: list = []
        record = (lambda: FirstForward(model, "auto", 100, torch.is_grad_enabled)) if is_recorded else None
        self.handle = FirstCalls(
            model, lambda survey, recording: self.surveys.append(survey), survey_tape, record=record
        )

    @property
    def names(self) -> list[str]:
        return [layer.name for survey in self.surveys for layer in survey.layers]

    @property
    def refused(self) -> list[str]:
        return [one.reason for survey in self.surveys for one in survey.refused]


@pytest.mark.parametrize(
    ("make", "dtype"),
    [
        (Model, None),
        (Counting, None),
        (lambda: Model(reentrant=True), None),
        (lambda: Model(reentrant=False), None),
        (Model, torch.bfloat16),
    ],
    ids=["plain", "attributes", "reentrant", "not reentrant", "autocast"],
)
def test_training_stays_as_it_is_bit_by_bit(make, dtype):
    finders = []
    plain = train(make, dtype=dtype)
    watched = train(make, lambda model: finders.append(Finder(model)), dtype=dtype)
    assert finders[0].names == NAMES
    assert not finders[0].refused
    assert is_equal(plain, watched)


def test_buffers_attributes_and_random_states_are_put_back():
    model = Counting()
    kept = model.seen
    own = torch.Generator().manual_seed(3)
    model.generator = own
    finder = Finder(model)
    versions = [one._version for one in (*model.buffers(), model.plain)]
    seen = []
    model.register_forward_pre_hook(
        lambda module, args: seen.append((module.calls, len(module.seen), hasattr(module, "last")))
    )
    numpy_state = lambda: np.random.get_state()[1].tolist()  # noqa: E731, NPY002
    states = random.getstate(), numpy_state(), own.get_state()
    observed = []
    found = finder.surveys.append
    finder.handle._on_found = lambda survey, recording: (
        found(survey),
        observed.extend(
            [model.calls, list(kept), hasattr(model, "last"), [one._version for one in (*model.buffers(), model.plain)]]
        ),
    )
    model(batches(1)[0][0])
    assert observed == [0, [], False, versions]
    assert seen == [(0, 0, False)]  # the user's hook ran once more, and its list was put back
    assert model.seen is kept
    assert states[:2] == (random.getstate(), numpy_state())
    assert torch.equal(states[2], own.get_state())


def test_the_inputs_are_copies_also_within_objects():
    class Cache:
        def __init__(self) -> None:
            self.keys: list[Tensor] = []

    class Writing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Model()

        def forward(self, x, cache):
            x.mul_(2)
            cache.keys.append(x)
            return self.inner(x)

    model, cache, x = Writing(), Cache(), torch.ones(2, 9, 32)
    finder = Finder(model)
    model(x, cache=cache)
    assert torch.equal(x, torch.full_like(x, 2))
    assert len(cache.keys) == 1
    assert finder.names == [f"inner.{name}" for name in NAMES]


def test_it_runs_once_and_not_after_removal():
    model = Model()
    finder = Finder(model)
    for x, _ in batches(2):
        model(x)
    assert len(finder.surveys) == 1
    assert not any(module._forward_pre_hooks for module in model.modules())
    other = Model()
    finder = Finder(other)
    finder.handle.remove()
    finder.handle.remove()
    other(batches(1)[0][0])
    assert finder.surveys == []


def test_parts_that_are_called_apart_are_found_apart():
    class Parts(nn.Module):  # as a LightningModule whose `forward` is not called
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.decoder, self.loss = Model(), Model(layers=1), nn.CrossEntropyLoss()

        def training_step(self, x, y):
            hidden = self.encoder(x)
            return self.loss(hidden.flatten(0, 1), y.flatten()) + self.decoder(x).sum()

    model = Parts()
    finder = Finder(model)
    x, y = batches(1)[0]
    model.training_step(x, y)
    assert [[layer.name for layer in survey.layers] for survey in finder.surveys] == [
        ["encoder.blocks.0.attention", "encoder.blocks.1.attention"],
        ["decoder.blocks.0.attention"],
    ]


def test_a_step_that_a_wrapper_calls_as_the_forward_does_not_run_twice():
    class Step(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.steps = Model(), []

        def training_step(self, x):
            self.steps.append(1)
            return self.net(x)

    model = Step()
    finder = Finder(model)
    model.forward = model.training_step  # as Lightning's strategies do for DistributedDataParallel
    model(batches(1)[0][0])
    assert model.steps == [1]
    assert finder.names == [f"net.{name}" for name in NAMES]


def test_a_forward_that_raises_without_gradient_costs_a_reason_and_nothing_else():
    class Picky(Model):
        def forward(self, x):
            if not torch.is_grad_enabled():
                raise RuntimeError("only with gradients")
            return super().forward(x)

    model = Picky()
    finder = Finder(model)
    model(batches(1)[0][0]).sum().backward()
    assert finder.names == []
    assert "RuntimeError: only with gradients" in finder.refused[0]


def test_a_failure_around_a_call_is_one_warning_and_the_call_goes_on():
    model, (x, _) = Model(), batches(1)[0]

    def fail(survey, recording):
        raise ZeroDivisionError("inside")

    handle = FirstCalls(model, fail, survey_tape)
    with pytest.warns(MonitoringWarning, match="ZeroDivisionError: inside"):
        model(x)
    assert not any(module._forward_pre_hooks for module in model.modules())
    handle.remove()


def test_misuse_that_shows_in_the_first_call_is_raised_there():
    model = Model()

    def complain(survey, recording):
        raise MisconfigurationError("nothing to watch")

    handle = FirstCalls(model, complain, survey_tape)
    with pytest.raises(MisconfigurationError, match="nothing to watch"):
        model(batches(1)[0][0])
    model(batches(1)[0][0])
    handle.remove()


def test_hooks_that_are_installed_then_see_the_real_forward():
    model, seen = Model(), []

    def install(survey, recording):
        for layer in survey.layers:
            layer.output_module.register_forward_pre_hook(lambda module, args: seen.append(args[0].requires_grad))

    handle = FirstCalls(model, install, survey_tape)
    model(batches(1)[0][0])
    handle.remove()
    assert seen == [True, True]


class Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        torch.rand(())
        return func(*args, **(kwargs or {}))


class Functions(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("is_recorded", [False, True], ids=["run once more", "recorded"])
@pytest.mark.parametrize("mode", [Operations, Functions])
def test_modes_of_the_users_see_nothing_of_it(mode, is_recorded):
    counts, states = [], []
    for watch in (False, True):
        torch.manual_seed(0)
        model, x = Model(), batches(1)[0][0]
        finder = Finder(model, is_recorded=is_recorded) if watch else None
        with mode() as user:
            model(x)
        counts.append(user.count)
        states.append(torch.get_rng_state())
    assert counts[0] == counts[1]
    assert torch.equal(*states)
    assert finder.names == NAMES


def test_a_model_under_a_default_device_runs_as_usual():
    class Positions(Model):
        def forward(self, x):
            return super().forward(x + torch.arange(x.shape[1])[:, None])

    with torch.device("meta"):
        model = Positions()
        finder = Finder(model)
        model(torch.zeros(2, 9, 32))
    assert finder.names == NAMES


def test_copies_and_saved_models_wait_for_nothing(tmp_path):
    model = Model()
    finder = Finder(model)
    copy.deepcopy(model)(batches(1)[0][0])
    pickle.loads(pickle.dumps(model))(batches(1)[0][0])
    assert finder.surveys == []
    model(batches(1)[0][0])
    assert finder.names == NAMES


def test_nothing_is_seen_of_evaluation_mode_but_its_fast_path_is_left():
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=True).eval()
    finder = Finder(model)
    with torch.no_grad():
        model(torch.randn(2, 5, 16), src_key_padding_mask=torch.tensor([[False] * 5, [False] * 3 + [True] * 2]))
    assert finder.names == ["layers.0.self_attn", "layers.1.self_attn"]
    assert not finder.refused
    assert torch.backends.mha.get_fastpath_enabled()


# --- compiled training


def compiled(model):
    return torch.compile(model, backend="aot_eager", fullgraph=True)


def in_place(model):
    model.compile(backend="aot_eager")
    return model


def blocks(model):
    for block in model.blocks:
        block.compile(backend="aot_eager", fullgraph=True)
    return model


def blocks_wrapped(model):
    for at, block in enumerate(model.blocks):
        model.blocks[at] = torch.compile(block, backend="aot_eager")
    return model


def forwards(model):
    for block in model.blocks:
        block.forward = torch.compile(block.forward, backend="aot_eager")
    return model


def function_around(model):
    return torch.compile(lambda x: model(x) * 1.0, backend="aot_eager", fullgraph=True)


SLOW = [pytest.param(call, marks=pytest.mark.slow) for call in (in_place, blocks, blocks_wrapped, forwards)]


@pytest.mark.parametrize("call", [compiled, function_around, *SLOW])
def test_compiled_training_stays_as_it_is_bit_by_bit(call):
    finders, kept, graphs = [], [], []
    for watch in (lambda model: None, lambda model: finders.append(Finder(model))):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        kept.append(train(Model, watch, call=call))
        graphs.append(torch._dynamo.utils.counters["stats"].get("unique_graphs", 0))
    assert is_equal(*kept)
    assert graphs[0] == graphs[1] > 0
    assert [name.replace("_orig_mod.", "") for name in finders[0].names] == NAMES


def test_a_compiled_step_runs_once_up_to_its_first_module_and_no_optimizer_twice():
    torch._dynamo.reset()
    model, ran = Model(), []
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    class Step:
        def __init__(self) -> None:
            self.model = model

        def run(self, x, y):
            return F.cross_entropy(self.model(x).flatten(0, 1), y.flatten())

    update = torch.compile(optimizer.step, backend="aot_eager")
    optimizer.register_step_post_hook(lambda *_: ran.append(1))
    finder = Finder(model)
    for one in model.parameters():
        one.grad = torch.zeros_like(one)
    update()
    assert len(ran) == 1
    assert finder.surveys == []
    step = torch.compile(Step().run, backend="aot_eager")
    step(*batches(1)[0])
    assert finder.names == NAMES


def test_other_threads_go_on_compiled():
    torch._dynamo.reset()
    gc.collect()  # what waits for a model that nobody has any more
    calls, uncompiled, stop = [0], [0], threading.Event()

    def work(x):
        if not torch.compiler.is_compiling() and x is not None:
            uncompiled[0] += 1
        return x + 1

    run = torch.compile(work, backend="eager")
    run(torch.ones(3))

    def loop():
        while not stop.is_set():
            run(torch.ones(3))
            calls[0] += 1

    thread = threading.Thread(target=loop)
    thread.start()
    for _ in range(5):
        finder = Finder(model := Model())
        model(batches(1)[0][0])
        assert finder.names == NAMES
    stop.set()
    thread.join()
    assert calls[0] > 0
    assert uncompiled[0] == 0
    assert type(torch._dynamo.eval_frame._stance).__name__ == "DynamoStance"


class Skipping(Model):
    """Layers of which the last is dropped until it is wanted."""

    def forward(self, x: Tensor, count: int = 2) -> Tensor:
        for block in self.blocks[:count]:
            x = block(x)
        return x


def test_a_layer_that_does_not_run_in_the_first_forward_is_found_when_it_runs():
    model, found = Skipping(layers=3), []
    waiting = FirstCalls(
        model,
        lambda survey, recording: found.append(survey),
        survey_tape,
        record=lambda: FirstForward(model, "auto", 100, torch.is_grad_enabled),
    )
    model(torch.randn(2, 5, 32))
    assert [layer.name for layer in found[0].layers] == ["blocks.0.attention", "blocks.1.attention"]
    assert not found[0].refused
    model(torch.randn(2, 5, 32), count=3)
    assert [layer.name for layer in found[1].layers] == ["blocks.2.attention"]
    assert [name for name, module in model.named_modules() if module._forward_pre_hooks] == ["head"]  # not called yet
    waiting.remove()
    assert not any(module._forward_pre_hooks for module in model.modules())


class Writing(Model):
    """Writes a file and goes on with a generator function: neither could be put back."""

    def __init__(self, path) -> None:
        super().__init__()
        self.file = path.open("w")
        self.numbers = (number for number in range(100))

    def forward(self, x: Tensor) -> Tensor:
        self.file.write(f"{next(self.numbers)} ")
        return super().forward(x)


@pytest.mark.parametrize("way", ["blocks", "function around"])
def test_a_compiled_model_that_holds_what_could_not_be_put_back_is_refused_and_never_runs_twice(way, tmp_path):
    torch._dynamo.reset()
    model, (x, _) = Writing(tmp_path / "written"), batches(1)[0]
    run = torch.compile(lambda x: model(x), backend="eager") if way == "function around" else blocks(model)
    with HeadDiversityMonitor(model) as monitor:
        for _ in range(10):
            monitor.arm()
            run(x)
            monitor.disarm()
        assert "a generator function that runs and an open file could not be put back" in monitor.refused[0].reason
    model.file.close()
    assert (tmp_path / "written").read_text().split() == [str(number) for number in range(10)]


@pytest.mark.parametrize("hold", [lambda: open(os.devnull, "w"), lambda: (iter([1]),), lambda: (n for n in [1])])  # noqa: SIM115
def test_what_could_not_be_put_back_is_named_before_a_training_runs_twice(hold):
    model = Counting()
    model.held = hold()
    with pytest.raises(CannotRunAgainError, match="could not be put back"), nothing_remains(model, is_training=True):
        model(batches(1)[0][0])
    assert model.calls == 0


@pytest.mark.parametrize(
    ("hold", "change", "state"),
    [
        (bytearray, lambda held: held.append(1), len),
        (lambda: np.zeros((3, 4))[:, ::2], lambda held: held.fill(1), lambda held: held.sum()),
        (lambda: np.random.default_rng(0).random, lambda held: held(), lambda held: held.__self__.bit_generator.state),
        (lambda: torch.zeros(3), lambda held: held.resize_(6), lambda held: tuple(held.shape)),
        (lambda: torch.zeros(3), lambda held: held.set_(torch.ones(2)), lambda held: held.tolist()),
        (
            lambda: nn.Parameter(torch.zeros(3)),
            lambda held: held.requires_grad_(False),
            lambda held: held.requires_grad,
        ),
        (
            lambda: nn.Parameter(torch.zeros(3)),
            lambda held: setattr(held, "data", torch.ones(3)),
            lambda held: held.sum().item(),
        ),
        (
            lambda: nn.Parameter(torch.zeros(3)),
            lambda held: held.register_hook(torch.neg),
            lambda held: bool(held._backward_hooks),
        ),
        (lambda: {"a": 1, "b": 2}, lambda held: held.update(a=held.pop("a")), list),
        (
            lambda: functools.lru_cache(lambda number: number),
            lambda held: held(1),
            lambda held: held.cache_info().currsize,
        ),
        (lambda: zip([1, 2], [3, 4]), None, None),
    ],
)
def test_what_a_model_holds_is_as_it_was(hold, change, state):
    model = Counting()
    held = model.held = hold()
    before = None if state is None else state(held)
    with nothing_remains(model, is_training=True):
        next(model.held) if change is None else change(held)
    assert model.held is held
    assert next(held) == (1, 3) if state is None else state(held) == before


def test_nothing_is_said_of_a_forward_that_can_be_put_back():
    model, (x, _) = Counting(), batches(1)[0]
    with nothing_remains(model, x, is_training=True):
        model(x)
    assert (model.calls, model.seen) == (0, [])


class LateBlock(Model):
    """Its second block runs from the third call on."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        for block in self.blocks[: 1 + (self.calls > 2)]:
            x = block(x)
        return self.head(x)


@pytest.mark.parametrize("call", [compiled, in_place, blocks])
def test_a_layer_that_runs_later_in_a_compiled_model_is_found_when_it_runs(call):
    torch._dynamo.reset()
    model = LateBlock()
    run = call(model) if call is not compiled else torch.compile(model, backend="aot_eager")
    with HeadDiversityMonitor(run) as monitor:
        seen = []
        for step, (x, _) in enumerate(batches(4)):
            monitor.arm()
            run(x)
            record = monitor.measure(step).record()
            seen.append([name for name, layer in record.layers.items() if "attention_entropy" in layer.values])
    assert seen == [NAMES[:1], NAMES[:1], NAMES, NAMES]


@pytest.mark.parametrize("call", [compiled, in_place, blocks])
def test_a_compiled_model_all_of_whose_layers_have_run_is_looked_at_once(call, monkeypatch):
    torch._dynamo.reset()
    looks = []
    survey = FirstCalls._run_once_more
    monkeypatch.setattr(FirstCalls, "_run_once_more", lambda *args: looks.append(0) or survey(*args))
    model = Model()
    run = call(model) if call is not compiled else torch.compile(model, backend="aot_eager")
    with HeadDiversityMonitor(run) as monitor:
        for step, (x, _) in enumerate(batches(3)):
            monitor.arm()
            run(x)
            monitor.measure(step)
    assert len(looks) == 1


def test_a_scripted_part_of_a_model_is_no_obstacle():
    model, (x, _) = Model(), batches(1)[0]
    model.head = torch.jit.script(nn.Linear(32, 3))
    finder = Finder(model, is_recorded=True)
    model(x)
    assert finder.names == NAMES


class FailsOnce(Model):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 1:
            raise ValueError("the first batch is odd")
        return super().forward(x)


def test_a_first_forward_of_a_compiled_model_that_fails_is_waited_out():
    torch._dynamo.reset()
    model, inputs = blocks(FailsOnce()), batches(2)
    finder = Finder(model)
    with pytest.raises(ValueError, match="odd"):
        model(inputs[0][0])
    model(inputs[1][0])
    assert finder.names == NAMES
    assert not finder.refused


def test_modules_are_those_of_torch_also_where_a_part_holds_the_whole():
    model = Model()
    model.blocks[0].whole = model
    assert set(modules_within(model)) == set(model.modules())
