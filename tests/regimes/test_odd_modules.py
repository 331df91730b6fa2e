"""Modules that do what modules should not: a monitor changes nothing of what they do, and nothing of theirs ends it."""

from __future__ import annotations

import random
import threading
import time
import warnings
import weakref
from contextlib import nullcontext
from pathlib import Path
from typing import Any, ClassVar

import lightning as L
import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.modules import module as module_hooks
from torch.nn.utils import parametrizations, parametrize

from hdi_callback import HDICallback, HeadDiversityMonitor, find_attention, watch_heads
from hdi_callback.errors import (
    MisconfigurationError,
    MonitoringWarning,
    NothingToWatchError,
    UnsupportedAttentionWarning,
)

D, H = 16, 4
LOSSES: list[torch.Tensor] = []
CALLS: dict[str, int] = {}


class Attention(nn.Module):
    """Plain attention, which `extra` makes odd."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = H
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(D, D) for _ in range(4))

    def forward(self, x):
        q, k, v = (map_(x).unflatten(-1, (H, -1)).transpose(1, 2) for map_ in (self.q_proj, self.k_proj, self.v_proj))
        return self.out_proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Drawing(Attention):
    def forward(self, x):
        noise = torch.rand(()) + random.random() + np.random.rand()  # noqa: NPY002
        return super().forward(x * noise.to(x.dtype))


class Counting(Attention):
    total = 0
    history: ClassVar[list[int]] = []

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.steps = 0

    def forward(self, x):
        Counting.total += 1
        Counting.history.append(Counting.total)
        CALLS["counting"] = CALLS.get("counting", 0) + 1
        self.count += 1
        self.steps += 1
        return super().forward(x) * (1 + 0.01 * (Counting.total % 3))


class Auxiliary(Attention):
    def forward(self, x):
        y = super().forward(x)
        LOSSES.append(y.square().mean())
        return y


class Referring(Attention):
    """Reaches itself, and keeps a lock and a generator."""

    def __init__(self) -> None:
        super().__init__()
        self.itself = weakref.ref(self)
        self.lock = threading.RLock()
        self.generator = torch.Generator().manual_seed(3)
        self.register_buffer("mean", torch.zeros(D))

    def forward(self, x):
        with self.lock:
            own = self.itself()
            own.mean += 1
            return super().forward(x + torch.rand(D, generator=own.generator) + own.mean)


class Copied(Attention):
    """Draws random numbers when it is copied."""

    def __deepcopy__(self, memo):
        torch.rand(3), random.random()
        CALLS["copied"] = CALLS.get("copied", 0) + 1
        other = Copied()
        other.load_state_dict(self.state_dict())
        return other


class Asked(Attention):
    """Counts what it is asked for, and prints."""

    def __getattr__(self, name: str) -> Any:
        if name in ("config", "qkv", "scale_factor"):
            CALLS[name] = CALLS.get(name, 0) + 1
            torch.rand(1)
            print(name)  # noqa: T201
        return super().__getattr__(name)


class Double(torch.autograd.Function):
    count = 0

    @staticmethod
    def forward(ctx, x):
        Double.count += 1
        return x * (1 + Double.count % 2)

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Stateful(Attention):
    def forward(self, x):
        return super().forward(Double.apply(x))


class Exiting(Attention):
    """Ends the process where a shape is odd."""

    def forward(self, x):
        if x.shape[1] != 6:
            raise SystemExit(1)
        return super().forward(x)


class Seeding(Attention):
    def forward(self, x):
        torch.manual_seed(11)
        torch.set_default_dtype(torch.float32)
        return super().forward(F.dropout(x, 0.3))


class Patched(Attention):
    """Its forward was replaced by a closure over the module."""

    def __init__(self) -> None:
        super().__init__()
        plain, self.steps = super().forward, 0

        def forward(x):
            self.steps += 1
            return plain(x + self.steps)

        self.forward = forward


class Nosy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.steps = 0
        self.register_buffer("count", torch.zeros(()))

    def forward(self, weight):
        self.steps += 1
        self.count += 1
        return weight + 0.01 * torch.randn_like(weight) if self.training else weight


class Noisy(Attention):
    def __init__(self) -> None:
        super().__init__()
        parametrizations.spectral_norm(self.q_proj)
        parametrize.register_parametrization(self.k_proj, "weight", Nosy())
        parametrizations.weight_norm(self.v_proj)
        parametrizations.spectral_norm(self.out_proj)


class Hooked(Attention):
    def __init__(self) -> None:
        super().__init__()

        def count(*args: Any) -> None:
            CALLS["hooks"] = CALLS.get("hooks", 0) + 1

        for part in list(self.modules()):
            part.register_forward_hook(count)
            part.register_forward_pre_hook(count)
            part.register_full_backward_hook(count)


class Compiled(Attention):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = torch.compile(nn.Linear(D, D), backend="eager")

    def forward(self, x):
        return super().forward(self.mlp(x))


KINDS = [
    Attention, Drawing, Counting, Auxiliary, Referring, Copied, Asked, Stateful, Exiting, Seeding, Patched, Noisy,
    Hooked, Compiled,
]  # fmt: skip


class Model(nn.Module):
    def __init__(self, kind: type[Attention]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([kind(), kind()])
        self.drop = nn.Dropout(0.2)

    def forward(self, x):
        for block in self.blocks:
            x = x + self.drop(block(x))
        return x


def trace(model: nn.Module) -> list[Any]:
    """Everything that a monitor must leave alone."""
    steps = [part.steps for part in model.modules() if hasattr(part, "steps")]
    generators = [part.generator.get_state().tolist() for part in model.modules() if isinstance(part, Referring)]
    return [
        {name: value.tolist() for name, value in model.state_dict().items()},
        torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state()),  # noqa: NPY002
        Counting.total, len(Counting.history), dict(CALLS), len(LOSSES), Double.count, steps, generators,
        [part.training for part in model.modules()], torch.get_default_dtype(),
    ]  # fmt: skip


@pytest.fixture(autouse=True)
def fresh():
    state = torch.get_rng_state(), random.getstate()
    LOSSES.clear(), CALLS.clear(), Counting.history.clear()
    Counting.total = Double.count = 0
    torch._dynamo.reset()
    yield
    torch.set_rng_state(state[0])
    random.setstate(state[1])


def train(kind: type[Attention], *, is_watched: bool) -> list[Any]:
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002
    LOSSES.clear(), CALLS.clear(), Counting.history.clear()
    Counting.total = Double.count = 0
    model, fired = Model(kind), []

    def note(*args: Any) -> None:
        fired.append(type(args[0]).__name__)

    handles = [module_hooks.register_module_forward_hook(note), module_hooks.register_module_full_backward_hook(note)]
    left: list[Any] = []
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            before = trace(model)
            monitor = HeadDiversityMonitor(model, metrics=["hdi", "head_covariance"]) if is_watched else None
            assert trace(model) == before
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
            for step in range(3):
                if monitor is not None:
                    monitor.arm()
                loss = model(torch.randn(2, 6, D)).square().mean() + sum(LOSSES[-2:])
                loss.backward()
                left.append(loss.item())
                if monitor is not None:
                    before = trace(model), len(fired)
                    record = monitor.measure(step).record()
                    assert (trace(model), len(fired)) == before
                    assert list(record.layers) == ["blocks.0", "blocks.1"]
                    assert all("hdi" in layer.values for layer in record.layers.values())
                    # What cannot be run before training is found in the first forward, its outputs from the second on;
                    # what makes copies of its own shows no outputs in them.
                    is_read = kind is not Copied and (step > 0 or kind is not Exiting)
                    assert not is_read or all("head_covariance" in layer.values for layer in record.layers.values())
                optimizer.step()
                optimizer.zero_grad()
            if monitor is not None:
                monitor.close()
    finally:
        for handle in handles:
            handle.remove()
    return [left, trace(model), fired, [parameter.tolist() for parameter in model.parameters()]]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.some_slow(quick=8)
def test_training_is_the_same_with_and_without_a_monitor(kind, capsys):
    alone = train(kind, is_watched=False)
    printed = capsys.readouterr().out
    torch._dynamo.reset()
    watched = train(kind, is_watched=True)
    assert [place for place, (one, other) in enumerate(zip(alone, watched)) if one != other] == []
    assert capsys.readouterr().out == printed


class Sleeping(Attention):
    def forward(self, x):
        time.sleep(0.05)
        return super().forward(x)


def test_the_search_of_a_slow_module_is_bounded(monkeypatch, tmp_path):
    for searching in ("finding.search", "trace.kinds"):
        monkeypatch.setattr(f"hdi_callback.attention.{searching}.MOST_SECONDS", 0.3)
    calls = str(tmp_path / "calls")  # a file, as lists are put back

    class SlowAttention(Sleeping):  # whose inputs nobody can make up
        def forward(self, x, tables):
            with open(calls, "a") as file:
                file.write("x")
            return super().forward(x) * tables["scale"]

    model = nn.Sequential(*(nn.Sequential(nn.Sequential(SlowAttention())) for _ in range(6)))
    with pytest.warns(UnsupportedAttentionWarning, match="takes too long"):
        assert find_attention(model) == []
    # One kind of module takes the time that it is given once: not once for each, nor for all that hold it.
    assert len((tmp_path / "calls").read_text()) <= 3 * 0.3 / 0.05 + 2


def test_a_slow_module_that_is_read_in_its_first_trial_is_read():
    assert [layer.num_heads for layer in find_attention(Model(Sleeping))] == [H, H]


def test_neither_search_nor_reading_seeds_a_device(monkeypatch):
    called = []
    for name in ("manual_seed", "manual_seed_all", "seed", "seed_all"):
        monkeypatch.setattr(torch.cuda, name, lambda *args, name=name: called.append(name))
    model = Model(Attention)
    with HeadDiversityMonitor(model) as monitor:
        monitor.arm()
        model(torch.randn(2, 6, D))
        monitor.measure(0).record()
    assert called == []


@pytest.mark.parametrize("name", ["in_proj_weight", "q_proj_weight"])
def test_torchs_own_attention_with_spectral_norm_is_read_without_iterating(name):
    width = None if name == "in_proj_weight" else 8
    model = nn.ModuleDict({"attn": nn.MultiheadAttention(D, H, kdim=width, vdim=width, batch_first=True)})
    parametrizations.spectral_norm(model["attn"], name)
    x, y = torch.randn(2, 6, D), torch.randn(2, 6, width or D)
    with HeadDiversityMonitor(model, metrics=["hdi_query", "head_covariance"]) as monitor:
        model["attn"](x, y, y)
        plain = {key: value.clone() for key, value in model.state_dict().items()}
        model["attn"](x, y, y)
        expected = {key: value.clone() for key, value in model.state_dict().items()}
        model.load_state_dict(plain)
        monitor.arm()
        model["attn"](x, y, y)
        record = monitor.measure(0).record()
    assert set(record.layers["attn"].values) >= {"hdi_query", "head_covariance"}
    assert all(torch.equal(value, expected[key]) for key, value in model.state_dict().items())


# --- what ends nothing


class LazyAttention(Attention):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.LazyLinear(D) for _ in range(4))


@pytest.mark.filterwarnings("error")
def test_lazy_attention_is_found_in_the_first_forward():
    with warnings.catch_warnings(action="ignore"):  # torch's own, of lazy modules
        model = Model(LazyAttention)
    with HeadDiversityMonitor(model, strict=True) as monitor:
        assert monitor.layers == ()
        assert {refusal.name for refusal in monitor.refused} == {"blocks.0", "blocks.1"}
        monitor.arm()
        model(torch.randn(2, 6, D))
        record = monitor.measure(0).record()
        assert {name: set(layer.values) >= {"hdi"} for name, layer in record.layers.items()} == {
            "blocks.0": True,
            "blocks.1": True,
        }


def test_lazy_modules_elsewhere_do_not_hide_attention_layers():
    model = nn.ModuleList([Attention(), nn.LazyLinear(3), nn.LazyConv1d(3, 1), nn.LazyBatchNorm1d()])
    assert [layer.name for layer in find_attention(model)] == ["0"]
    with HeadDiversityMonitor(model) as monitor:
        monitor.arm()
        model[0](torch.randn(2, 6, D))
        assert list(monitor.measure(0).record().layers) == ["0"]


class HeadlessAttention(nn.Module):
    """Called attention, and none."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x):
        return self.b(self.a(x).relu())


def test_strict_waits_for_the_first_forward_and_raises_before_the_first_step():
    model = nn.Sequential(HeadlessAttention())
    with HeadDiversityMonitor(model, strict=True) as monitor:
        with pytest.warns(MonitoringWarning, match="could be read yet"):
            monitor.measure(0)  # no forward was read
        monitor.arm()
        model(torch.randn(2, 6, D))
        with (
            pytest.raises(MisconfigurationError, match="nothing to watch"),
            pytest.warns(UnsupportedAttentionWarning, match="no softmax"),
        ):
            monitor.measure(0)


class NeedyAttention(Attention):
    """Needs inputs that nobody can make up."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(()))

    def forward(self, x, gate):
        return super().forward(x * gate["gate"]) * self.gain


class Needy(Model):
    def forward(self, x):
        for block in self.blocks:
            x = x + block(x, {"gate": torch.ones(6, D)})
        return x


def steps_taken(model: nn.Module, folder: Path, *, strict: bool) -> tuple[int, list[str]]:
    optimizer, taken = torch.optim.SGD(model.parameters(), 0.1), 0
    with watch_heads(model, optimizer, every_n_steps=1, log_dir=folder, strict=strict) as heads:
        for _ in range(3):
            with heads.step():
                model(torch.randn(2, 6, D)).square().mean().backward()
                before = [parameter.clone() for parameter in model.parameters()]
                optimizer.step()
                taken += not all(torch.equal(*pair) for pair in zip(before, model.parameters()))
                optimizer.zero_grad()
        return taken, [layer.name for layer in heads.monitor.layers]


@pytest.mark.filterwarnings("ignore::hdi_callback.errors.HDIWarning")
@pytest.mark.parametrize("strict", [False, True])
def test_a_loop_reads_layers_that_the_first_forward_shows(tmp_path, strict):
    assert steps_taken(Needy(NeedyAttention), tmp_path, strict=strict) == (3, ["blocks.0", "blocks.1"])


@pytest.mark.filterwarnings("ignore::hdi_callback.errors.HDIWarning")
def test_a_strict_loop_without_attention_raises_before_its_first_step(tmp_path):
    assert steps_taken(nn.Sequential(HeadlessAttention()), tmp_path / "lenient", strict=False) == (3, [])
    model = nn.Sequential(HeadlessAttention())
    before = [parameter.clone() for parameter in model.parameters()]
    with pytest.raises(NothingToWatchError, match="nothing to watch"):
        steps_taken(model, tmp_path / "strict", strict=True)
    assert all(torch.equal(*pair) for pair in zip(before, model.parameters()))


class Lit(L.LightningModule):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch, index):
        return self.model(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)


@pytest.mark.filterwarnings("ignore::hdi_callback.errors.HDIWarning")
@pytest.mark.parametrize(("model", "steps"), [(Needy(NeedyAttention), 3), (nn.Sequential(HeadlessAttention()), 0)])
def test_a_strict_callback_raises_before_the_first_step_or_not_at_all(tmp_path, model, steps):
    trainer = L.Trainer(
        max_steps=3, callbacks=[HDICallback(every_n_steps=1, strict=True)], logger=False, accelerator="cpu",
        default_root_dir=tmp_path, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    raises = nullcontext() if steps else pytest.raises(NothingToWatchError)
    with raises:
        trainer.fit(Lit(model), torch.utils.data.DataLoader(torch.randn(8, 6, D), batch_size=2))
    assert trainer.global_step == steps
    assert bool(steps) == ("hdi/min" in trainer.callback_metrics)


def test_strict_raises_at_once_if_no_forward_can_show_attention():
    with pytest.raises(MisconfigurationError, match="nothing to watch"):
        HeadDiversityMonitor(nn.Sequential(nn.Linear(2, 2)), strict=True)
    with warnings.catch_warnings(), pytest.raises(MisconfigurationError, match="nothing to watch"):
        warnings.simplefilter("ignore")
        HeadDiversityMonitor(nn.Sequential(HeadlessAttention()), strict=True, check_heads=False)


def test_without_strict_missing_attention_is_a_warning_after_the_forward():
    model = nn.Sequential(HeadlessAttention())
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        monitor = HeadDiversityMonitor(model)
    assert [str(one.message) for one in said] == []
    with monitor:
        monitor.arm()
        model(torch.randn(2, 6, D))
        with (
            pytest.warns(MonitoringWarning, match="nothing to watch"),
            pytest.warns(UnsupportedAttentionWarning, match="no softmax"),
        ):
            monitor.measure(0)


@pytest.mark.filterwarnings("ignore::hdi_callback.errors.MonitoringWarning")
def test_a_layer_on_the_meta_device_is_absent_and_the_others_are_read():
    model = Model(Attention)
    with HeadDiversityMonitor(model, metrics=["hdi", "head_covariance"]) as monitor:
        model.blocks[1].to("meta")
        monitor.arm()
        model.blocks[0](torch.randn(2, 6, D))
        record = monitor.measure(0).record()
    assert "hdi" in record.layers["blocks.0"].values
    assert "head_covariance" in record.layers["blocks.0"].values
    assert record.layers["blocks.1"].values == {}
    assert "meta device" in record.absent["blocks.1"]


def test_a_layer_that_runs_on_one_token_does_not_stop_the_check_of_the_others(monkeypatch):
    model = nn.ModuleList([Attention(), Attention()])
    with HeadDiversityMonitor(model) as monitor:
        monitor.arm()
        model[0](torch.randn(3, 1, D))
        right = model[1].forward
        # Heads that are interleaved, which is not what was found.
        turned = torch.arange(D).view(H, -1).T.flatten()
        model[1].forward = lambda x: right(x)
        monkeypatch.setattr(
            Attention,
            "forward",
            lambda self, x: self.out_proj(
                F.scaled_dot_product_attention(
                    *(
                        part(x)[..., turned].unflatten(-1, (H, -1)).transpose(1, 2)
                        for part in (self.q_proj, self.k_proj, self.v_proj)
                    )
                )
                .transpose(1, 2)
                .flatten(2)
            ),
        )
        del model[1].forward
        model[1](torch.randn(3, 6, D))
        with pytest.warns(UnsupportedAttentionWarning, match="`1` is left out from now on"):
            monitor.measure(0)
        assert "checking heads" not in monitor.warn_once.count


class Complex(Attention):
    def __init__(self) -> None:
        super().__init__()
        for part in (self.q_proj, self.k_proj, self.v_proj, self.out_proj):
            part.to(torch.complex64)


@pytest.mark.filterwarnings("ignore:Complex modules")
def test_complex_weights_are_refused_as_complex():
    with pytest.warns(UnsupportedAttentionWarning, match="complex weight") as said:
        assert find_attention(Model(Complex)) == []
    assert not any("quantised" in str(one.message) for one in said)


class Direct(Attention):
    """Uses its output projection by its weight."""

    def forward(self, x):
        q, k, v = (map_(x).unflatten(-1, (H, -1)).transpose(1, 2) for map_ in (self.q_proj, self.k_proj, self.v_proj))
        outputs = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return F.linear(outputs, self.out_proj.weight, self.out_proj.bias)


def test_outputs_are_absent_with_the_reason_if_the_output_projection_is_not_called():
    model = Model(Direct)
    with HeadDiversityMonitor(model, metrics=["hdi", "head_covariance"]) as monitor:
        for step in range(2):
            monitor.arm()
            model(torch.randn(2, 6, D))
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                record = monitor.measure(step).record()
            assert "without calling its output projection" in record.absent["head outputs/blocks.0"]
            assert [("directly" in str(one.message), "compiled" in str(one.message)) for one in said] == [
                (True, False)
            ] * (step == 0)


def test_unloading_an_adapter_is_named_in_the_warning():
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(Model(Attention), peft.LoraConfig(target_modules=["q_proj", "out_proj"]))
    with HeadDiversityMonitor(model, metrics=["hdi", "head_covariance"]) as monitor:
        model.unload()
        monitor.arm()
        model.base_model.model(torch.randn(2, 6, D))
        with pytest.warns(MonitoringWarning, match="adapter was unloaded") as said:
            record = monitor.measure(0).record()
    assert not any("compiled" in str(one.message) for one in said)
    assert all("hdi" in layer.values for layer in record.layers.values())
