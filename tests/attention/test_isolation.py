"""Code of the user's leaves no trace when it is run by this package."""

from __future__ import annotations

import collections
import contextvars
import copy
import itertools
import os
import random
import signal
import threading
import time
import warnings
import weakref
from contextlib import suppress

import numpy as np
import pytest
import torch
from torch import distributed, nn
from torch.nn.modules import module as module_hooks
from torch.testing._internal.distributed.fake_pg import FakeStore

from hdi_callback.attention.isolation import IsolationError, isolated, isolated_copy
from hdi_callback.attention.isolation.collectives import CollectiveError, answered_locally, collectives_within

LOSSES: list[torch.Tensor] = []
TALLY: collections.Counter[str] = collections.Counter()
TABLE = torch.zeros(4)
NUMBERS = {"next": itertools.count(3)}
DEPTH: contextvars.ContextVar[int] = contextvars.ContextVar("DEPTH", default=0)
GENERATOR = torch.Generator()
STEPS = 0


class Settings:
    """A plain object of the user's."""

    __slots__ = ("counted",)

    def __init__(self) -> None:
        self.counted = 0


SETTINGS = Settings()


class Root(torch.autograd.Function):
    """A function that counts its calls in its class."""

    calls = 0

    @staticmethod
    def forward(ctx, x):
        Root.calls += 1
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def noted(x, history=[]):  # noqa: B006 - a mutable default is what is put back
    history.append(float(x.sum()))
    noted.calls = getattr(noted, "calls", 0) + 1
    return x


class Restless(nn.Module):
    """A module that does everything that a forward should not."""

    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))
        self.lock = threading.Lock()
        self.generator = torch.Generator()
        self.itself = weakref.ref(self)
        self.losses = [self.map(torch.ones(4)).sum()]
        self.count = 0

    def forward(self, x):
        global STEPS
        STEPS += 1
        Restless.calls += 1
        TALLY["forward"] += 1
        SETTINGS.counted += 1
        TABLE.add_(1)
        DEPTH.set(DEPTH.get() + 1)
        os.environ["HDI_TEST_DEPTH"] = str(DEPTH.get())
        next(NUMBERS["next"])
        torch.rand(1, generator=GENERATOR)
        torch.rand(1, generator=self.generator)
        self.itself().mean.add_(1)
        self.itself().count += 1
        self.mean.add_(1)
        self.count += 1
        LOSSES.append(self.map(x).sum())
        self.losses.append(LOSSES[-1])
        random.random()
        np.random.rand()  # noqa: NPY002 - the global state is what is put back
        torch.manual_seed(7)
        torch.set_default_dtype(torch.float64)
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = True
        torch.set_grad_enabled(False)
        print("forward")  # noqa: T201
        warnings.warn("forward", stacklevel=1)
        return noted(Root.apply(x)) + torch.rand(4)


def numpy_state() -> str:
    return str(np.random.get_state())  # noqa: NPY002


def settings_of_torch() -> list:
    return [
        torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark,
        torch.is_grad_enabled(),
    ]  # fmt: skip


def everything(module: Restless) -> list:
    return [
        DEPTH.get(), os.environ.get("HDI_TEST_DEPTH"),
        STEPS, Restless.calls, Root.calls, dict(TALLY), SETTINGS.counted, TABLE.tolist(), repr(NUMBERS["next"]),
        GENERATOR.get_state().tolist(), module.generator.get_state().tolist(), module.mean.tolist(), module.count,
        [id(loss) for loss in LOSSES], [id(loss) for loss in module.losses], random.getstate(),
        numpy_state(), torch.get_rng_state().tolist(), *settings_of_torch(),
        list(noted.__defaults__[0]), noted.__dict__.copy(), vars(torch.cuda._lazy_seed_tracker)["call_order"][:],
    ]  # fmt: skip


def test_side_effects_of_a_forward_are_undone_by_isolation(capsys):
    module, settings = Restless(), settings_of_torch()
    with isolated(module):  # what the classes keep from other tests does not matter
        module.forward(torch.ones(4, dtype=torch.float32))
    assert settings_of_torch() == settings, "already after the first, which sets what the others set again"
    before = everything(module)
    for _ in range(2):
        with isolated(module, seed=0):
            isolated_copy(module).forward(torch.ones(4))
            module.forward(torch.ones(4, dtype=torch.float32))
    assert everything(module) == before
    assert capsys.readouterr().out == ""


CUDNN, PRODUCTS = torch.backends.cudnn, torch.backends.cuda.matmul


@pytest.mark.parametrize(
    ("backend", "name"),
    [
        *((CUDNN, name) for name in ("enabled", "benchmark", "deterministic", "allow_tf32")),
        (PRODUCTS, "allow_fp16_reduced_precision_reduction"),
    ],
)
def test_a_setting_of_a_backend_is_put_back(backend, name):
    before = getattr(backend, name)
    try:
        with isolated():
            setattr(backend, name, not before)
            assert getattr(backend, name) != before
        assert getattr(backend, name) == before
    finally:
        setattr(backend, name, before)


def test_side_effects_of_a_forward_are_detected_without_isolation():
    module = Restless()
    with isolated(module):
        before = everything(module)
        module.forward(torch.ones(4))
        after = everything(module)
    # Grad mode, dtype and all others: each of them is really moved, so that the test above can fail.
    assert [place for place, (one, other) in enumerate(zip(before, after)) if one == other] == []


def test_isolation_seeds_no_device(monkeypatch):
    called = []
    for name in ("manual_seed", "manual_seed_all", "seed", "seed_all"):
        monkeypatch.setattr(torch.cuda, name, lambda *args, name=name: called.append(name))
    with isolated(nn.Linear(2, 2), seed=3):
        torch.randn(2)
    assert called == []


def test_the_states_of_all_devices_in_use_are_put_back(monkeypatch):
    devices = (torch.Generator().manual_seed(1), torch.Generator().manual_seed(2))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "default_generators", devices)
    before = [one.get_state() for one in devices]
    with isolated(seed=0):
        for one in devices:
            one.manual_seed(5)
    assert all(torch.equal(one.get_state(), state) for one, state in zip(devices, before))


def test_a_device_that_is_not_in_use_is_not_initialised(monkeypatch):
    class Uninitialised:
        def __iter__(self):
            pytest.fail("CUDA was asked for its generators, which initialises it")

    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: pytest.fail("CUDA was initialised"))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "default_generators", Uninitialised())
    with isolated(seed=0):
        isolated_copy(nn.Linear(2, 2))


def test_random_states_are_put_back_after_each_of_nested_blocks():
    with isolated(seed=0):
        first = torch.randn(2)
        with isolated(seed=1):
            torch.randn(5)
        rest = torch.randn(2)
    with isolated(seed=0):
        assert torch.equal(torch.randn(4), torch.cat([first, rest]))


def test_hooks_of_the_module_and_global_hooks_do_not_fire():
    fired = []
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))

    def note(*args):
        fired.append(args)

    module[0].register_forward_hook(note)
    module[0].register_forward_pre_hook(note, prepend=True)
    module[1].register_full_backward_hook(note)
    module[1].register_full_backward_pre_hook(note)
    module.register_forward_hook(note, always_call=True)
    handles = [
        module_hooks.register_module_forward_hook(note, always_call=True),
        module_hooks.register_module_forward_pre_hook(note),
        module_hooks.register_module_full_backward_hook(note),
        module_hooks.register_module_full_backward_pre_hook(note),
        module_hooks.register_module_parameter_registration_hook(note),
        module_hooks.register_module_module_registration_hook(note),
    ]
    kept = {name: copy.copy(value) for name, value in vars(module_hooks).items() if name.startswith("_global_")}
    try:
        with isolated(module, seed=0):
            trial = isolated_copy(module)
            trial(torch.randn(3, 2, requires_grad=True)).sum().backward()
            trial.register_parameter("other", nn.Parameter(torch.ones(1)))
            nn.Sequential(nn.Linear(1, 1))
        assert fired == []
        now = {name: value for name, value in vars(module_hooks).items() if name.startswith("_global_")}
        assert now == kept
        module(torch.randn(3, 2, requires_grad=True)).sum().backward()
        assert len(fired) > 8  # they are in place again
    finally:
        for handle in handles:
            handle.remove()


class Shy(nn.Module):
    """A module whose copies are the module itself, or share its weights."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.weight = kind, nn.Parameter(torch.ones(2))

    def __deepcopy__(self, memo):
        torch.rand(1)
        if self.kind == "itself":
            return self
        if self.kind == "exit":
            raise SystemExit
        return copy.copy(self)


@pytest.mark.parametrize("kind", ["itself", "shared", "exit"])
def test_a_copy_that_shares_tensors_or_exits_is_refused(kind):
    module = nn.Sequential(Shy(kind))
    before = torch.get_rng_state()
    with pytest.raises(IsolationError, match=r"copy of it shares|copying it raises SystemExit"):
        isolated_copy(module)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_parametrization_is_computed_and_neither_draws_nor_iterates():
    module = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)))
    module(torch.ones(4))
    before = {name: value.clone() for name, value in module.state_dict().items()}
    kind = type(module[0])
    trial = isolated_copy(module)
    assert type(trial[0]) is nn.Linear
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    module.eval()
    assert torch.equal(trial[0].weight, module[0].weight)
    assert type(module[0]) is kind


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_the_older_weight_norm_can_be_copied_after_a_forward():
    module = nn.Sequential(nn.utils.weight_norm(nn.Linear(4, 4)))
    x = torch.randn(2, 4)
    output = module(x)
    trial = isolated_copy(module)
    assert torch.equal(trial(x), output)
    assert trial[0].weight.grad_fn is None


@pytest.mark.parametrize("error", [SystemExit, GeneratorExit, type("Stop", (BaseException,), {})])
def test_code_that_would_exit_the_process_raises_an_exception_instead(error):
    with pytest.raises(IsolationError, match=error.__name__), isolated():
        raise error
    assert torch.randn(1).dtype is torch.float32


def test_a_run_over_its_deadline_is_stopped_at_its_next_operation():
    with isolated(seconds=0.05):
        x = torch.ones(2)
        with pytest.raises(IsolationError, match=r"more than 0\.05 s"):
            for _ in range(10_000):
                time.sleep(0.001)
                x = x + 1
    assert torch.equal(x * 0, torch.zeros(2))


def test_time_that_other_work_on_the_machine_takes_is_not_counted():
    """A search on a busy machine finds what it finds on an idle one."""
    with isolated(seconds=0.5):
        for _ in range(10):
            time.sleep(0.06)  # the processor works for others
            torch.ones(2) + 1
    with pytest.raises(IsolationError, match=r"more than 0\.5 s"), isolated(seconds=0.5):
        while True:
            torch.ones(2) + 1


def test_an_interruption_by_the_user_ends_the_run():
    with pytest.raises(KeyboardInterrupt), isolated():
        raise KeyboardInterrupt


def test_a_system_exit_from_a_signal_handler_ends_the_process():
    def stop(number, frame):
        raise SystemExit(3)

    before = signal.signal(signal.SIGUSR1, stop)
    try:
        with pytest.raises(SystemExit), isolated():
            signal.raise_signal(signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_settings_of_the_user_do_not_apply_inside_isolation():
    class Seen(torch.utils._python_dispatch.TorchDispatchMode):
        calls = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            Seen.calls += 1
            return func(*args, **(kwargs or {}))

    packed = []
    with (
        torch.device("meta"),
        torch.autocast("cpu", dtype=torch.bfloat16),
        Seen(),
        torch.autograd.graph.saved_tensors_hooks(lambda x: packed.append(x) or x, lambda x: x),
        isolated(seed=0),
    ):
        x = torch.randn(2, 2, requires_grad=True)
        y = x @ x
        assert (y.device.type, y.dtype, Seen.calls, packed) == ("cpu", torch.float32, 0, [])
        assert torch.autograd.grad(y.sum(), x)[0].shape == (2, 2)
    with torch.inference_mode(), isolated(), torch.enable_grad():
        assert (torch.ones(1, requires_grad=True) * 2).requires_grad
    with torch.no_grad(), isolated():
        assert not torch.is_grad_enabled()


def test_a_compiled_child_runs_as_it_was_written():
    torch._dynamo.reset()
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    module = nn.Sequential(torch.compile(nn.Linear(2, 2), backend=backend))
    with isolated(module, seed=0):
        isolated_copy(module)(torch.randn(1, 2))
    assert graphs == []
    module(torch.randn(1, 2))
    assert len(graphs) == 1
    torch._dynamo.reset()


def test_another_thread_can_print_during_isolation(capsys):
    with isolated():
        print("mine")  # noqa: T201
        thread = threading.Thread(target=print, args=("theirs",))
        thread.start()
        thread.join()
    assert capsys.readouterr().out == "theirs\n"


def test_too_large_a_copy_is_refused():
    module = nn.Module()
    module.register_buffer("mask", torch.empty(2**31, dtype=torch.int8, device="meta"))
    module.register_buffer("other", torch.empty(1))
    with pytest.raises(IsolationError, match="2 GiB"):
        isolated_copy(module)


def test_a_tensor_that_did_not_change_is_not_written():
    module = Restless()
    weight = torch.ones(4, requires_grad=True)
    loss = (module.mean * weight).sum()  # saves the buffer
    version = module.mean._version
    with isolated(module), suppress(RuntimeError):
        isolated_copy(module).map(torch.ones(4))
    assert module.mean._version == version
    loss.backward()
    assert torch.equal(weight.grad, torch.zeros(4))


class Emptied(nn.Module):
    """Holds a view of memory that was freed, as FSDP1's flat parameters leave it between forwards."""

    def __init__(self) -> None:
        super().__init__()
        flat = torch.ones(12)
        self.whole, self.weight = flat, flat[4:].view(2, 4)
        flat.untyped_storage().resize_(0)


def test_freed_storage_is_neither_read_nor_written():
    module = Emptied()
    with isolated(module):
        module.calls = 1
    assert not hasattr(module, "calls"), "everything else is put back"
    with pytest.raises(IsolationError, match="was freed"):
        isolated_copy(module)


def test_storage_freed_during_isolation_is_not_written():
    module = Restless()
    with isolated(module):
        module.mean += 1
        module.mean.untyped_storage().resize_(0)
    assert module.mean.untyped_storage().nbytes() == 0


def test_a_static_method_kept_as_an_attribute_can_be_copied():
    module = nn.Linear(2, 2)
    module.act = staticmethod(torch.tanh)
    trial = isolated_copy(nn.Sequential(module))
    assert trial[0].act is module.act
    assert not any(one is other for one in trial.parameters() for other in module.parameters())


def test_a_module_that_holds_process_groups_stores_and_streams_can_be_copied():
    """Process groups, stores and streams, as attention over ranks keeps them, are refused by `copy.deepcopy`."""
    module = nn.Linear(4, 4)
    kept = [torch.Stream(device="cpu"), torch.distributed.HashStore(), torch.distributed.ProcessGroup(0, 1)]
    module.group, module.others = kept[2], {"stores": kept[:2]}
    with pytest.raises(TypeError, match="cannot pickle"):
        copy.deepcopy(module)
    trial = isolated_copy(module)
    assert trial.group is kept[2]
    assert [one is other for one, other in zip(trial.others["stores"], kept)] == [True, True]
    assert trial.weight is not module.weight


def test_a_replaced_forward_runs_in_the_copy_with_the_weights_of_the_copy():
    module = nn.Linear(2, 2)
    inner = module.forward
    module.forward = lambda x: 2 * inner(x)
    trial, x = isolated_copy(module), torch.ones(1, 2)
    with torch.no_grad():
        trial.weight.zero_()
        trial.bias.fill_(3)
    assert torch.equal(trial(x), torch.full((1, 2), 6.0))
    assert torch.equal(module(x), 2 * nn.functional.linear(x, module.weight, module.bias))


@pytest.fixture
def two_ranks():
    """A process group of two ranks, of which there is one, and no message is sent."""
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield distributed.new_group([0])
    distributed.destroy_process_group()


def test_a_collective_over_other_ranks_is_refused_and_one_within_this_rank_is_computed(two_ranks):
    with collectives_within({0}):
        x = torch.ones(2) + 1
        distributed.all_reduce(x, group=two_ranks)
        with pytest.raises(CollectiveError, match="calls c10d::allreduce_, in which the other ranks do not take part"):
            distributed.all_reduce(x)
    assert x.tolist() == [2, 2]
    distributed.all_reduce(x)


def test_a_sum_over_ranks_is_answered_as_if_each_held_the_same(two_ranks):
    x, parts = torch.tensor([1.0, 2.0]), [torch.empty(2), torch.empty(2)]
    with answered_locally():
        distributed.all_gather(parts, x)
        distributed.all_reduce(x)
    assert x.tolist() == [2, 4]
    assert [part.tolist() for part in parts] == [[1, 2], [1, 2]]


@pytest.mark.filterwarnings("ignore:.*all_gather_into_tensor.* is deprecated:FutureWarning")
def test_gathering_into_one_tensor_answers_with_the_same_part_for_each_rank(two_ranks):
    x, gathered = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.empty(4, 2)
    with answered_locally():
        distributed.all_gather_into_tensor(gathered, x)
    assert torch.equal(gathered, torch.cat([x, x]))
