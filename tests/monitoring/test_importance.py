"""What losing a head would cost, as the monitor reads it from the gradients of the armed step."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from hdi_callback import HeadDiversityMonitor
from hdi_callback.errors import MonitoringWarning
from tests.models import CLASSES, HEADS, LAYERS, LENGTH, WIDTH, Classifier

METRICS = ["head_importance_min", "hdi_worst_pair_importance", "hdi_worst_pair_importance_both"]
NAME = LAYERS[0]


def batch(count: int = 6, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(16, (count, LENGTH), generator=generator)
    return tokens, torch.randint(CLASSES, (count,), generator=generator)


@pytest.fixture
def model() -> Classifier:
    torch.manual_seed(0)
    return Classifier()


def slopes_by_gates(model: Classifier, tokens: torch.Tensor, label: torch.Tensor) -> dict[str, torch.Tensor]:
    """Gradients of the loss in a factor on each head in each sequence, ``(sequences, H)``, by autograd alone."""
    gates = {name: torch.ones(len(tokens), 1, HEADS, 1, requires_grad=True) for name in LAYERS}
    handles = [
        model.get_submodule(name).out_proj.register_forward_pre_hook(
            lambda module, args, name=name: (args[0].unflatten(-1, (HEADS, -1)).mul(gates[name]).flatten(2),)
        )
        for name in LAYERS
    ]
    F.cross_entropy(model(tokens), label).backward()
    for handle in handles:
        handle.remove()
    model.zero_grad()
    return {name: gate.grad[:, 0, :, 0] for name, gate in gates.items()}


def read(model: nn.Module, *batches, **options) -> dict[str, object]:
    with HeadDiversityMonitor(model, metrics=METRICS, **options) as monitor:
        monitor.arm()
        for tokens, label in batches:
            F.cross_entropy(model(tokens), label).backward()
        return monitor.measure(step=0).record()


def test_importance_agrees_with_gradients_of_head_gates(model):
    tokens, label = batch()
    truth = slopes_by_gates(model, tokens, label)
    record = read(model, (tokens, label), max_tokens=8)  # of all tokens, however many are kept
    for name in LAYERS:
        layer, slopes = record.layers[name], truth[name]
        size = slopes.abs().sum(0)
        assert layer.arrays["head_importance"] == pytest.approx((size / size.mean()).tolist(), rel=1e-4)
        assert layer.arrays["head_slope"] == pytest.approx(slopes.sum(0).tolist(), rel=1e-3, abs=1e-7)
        assert layer.values["head_importance_min"] == pytest.approx(float(size.min() / size.mean()), rel=1e-4)
        h, g = layer.arrays["worst_pair"]
        both = (slopes[:, h] + slopes[:, g]).abs().sum() / size.mean()
        assert layer.values["hdi_worst_pair_importance_both"] == pytest.approx(float(both), rel=1e-4)
        one = min(size[h], size[g]) / size.mean()
        assert layer.values["hdi_worst_pair_importance"] == pytest.approx(float(one), rel=1e-4)
        assert float(layer.matrices["head_pair_importance"][h, g]) == pytest.approx(float(both), rel=1e-4)


def test_the_slope_is_the_product_of_the_output_weight_with_its_gradient(model):
    record = read(model, batch())
    for name in LAYERS:
        weight = model.get_submodule(name).out_proj.weight
        truth = (weight * weight.grad).T.unflatten(0, (HEADS, -1)).sum((1, 2))
        assert record.layers[name].arrays["head_slope"] == pytest.approx(truth.tolist(), rel=1e-3, abs=1e-7)


def test_a_factor_on_the_loss_changes_no_curve(model):
    tokens, label = batch()
    once = read(model, (tokens, label)).layers[NAME]
    with HeadDiversityMonitor(model, metrics=METRICS) as monitor:
        monitor.arm()
        (F.cross_entropy(model(tokens), label) * 1024).backward()
        scaled = monitor.measure(step=0).record().layers[NAME]
    for name in METRICS:
        assert scaled.values[name] == pytest.approx(once.values[name], rel=1e-4)


def test_accumulated_batches_add_up(model):
    (tokens, label), (more, labels) = batch(6), batch(6, seed=1)
    truth = torch.cat([slopes_by_gates(model, tokens, label)[NAME], slopes_by_gates(model, more, labels)[NAME]])
    layer = read(model, (tokens, label), (more, labels)).layers[NAME]
    assert layer.arrays["head_slope"] == pytest.approx(truth.sum(0).tolist(), rel=1e-3, abs=1e-7)
    size = truth.abs().sum(0)
    assert layer.arrays["head_importance"] == pytest.approx((size / size.mean()).tolist(), rel=1e-4)


class Torch(nn.Module):
    """`nn.MultiheadAttention`, which never calls its output projection."""

    def __init__(self, *, batch_first: bool) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(WIDTH, HEADS, batch_first=batch_first)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attn(x, x, x, need_weights=False)[0]


@pytest.mark.parametrize("batch_first", [True, False])
def test_importance_of_torchs_attention_is_read_after_its_output_projection(batch_first):
    torch.manual_seed(0)
    model, x, target = Torch(batch_first=batch_first), torch.randn(3, 7, WIDTH), torch.randn(3, 7, WIDTH)
    with HeadDiversityMonitor(model, metrics=METRICS) as monitor:
        monitor.arm()
        (model(x) - target).square().mean().backward()
        layer = monitor.measure(step=0).record().layers["attn"]
    weight = model.attn.out_proj.weight
    truth = (weight * weight.grad).T.unflatten(0, (HEADS, -1)).sum((1, 2))
    assert layer.arrays["head_slope"] == pytest.approx(truth.tolist(), rel=1e-3, abs=1e-7)


class Grouped(nn.Module):
    """Four query heads on two key heads."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = 4, 2, 8
        self.q_proj, self.o_proj = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)
        self.k_proj, self.v_proj = nn.Linear(WIDTH, 16), nn.Linear(WIDTH, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (p(x).unflatten(-1, (-1, 8)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
        return self.o_proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def test_the_importance_of_a_key_head_sums_its_query_heads():
    torch.manual_seed(0)
    model = nn.ModuleDict({"attn": Grouped()})
    x, target = torch.randn(1, 7, WIDTH), torch.randn(1, 7, WIDTH)  # of one sequence all is known from the slopes
    with HeadDiversityMonitor(model, metrics=METRICS) as monitor:
        monitor.arm()
        (model["attn"](x) - target).square().mean().backward()
        layer = monitor.measure(step=0).record().layers["attn"]
    slope = torch.tensor(layer.arrays["head_slope"])
    unit = slope.abs().mean()
    both = torch.stack([slope[:2].sum(), slope[2:].sum()])
    assert layer.values["hdi_worst_pair_importance"] == pytest.approx(float(both.abs().min() / unit), rel=1e-4)
    assert layer.values["hdi_worst_pair_importance_both"] == pytest.approx(float(both.sum().abs() / unit), rel=1e-4)
    assert layer.matrices["head_pair_importance"].shape == (2, 2)


def test_gradients_and_weights_are_the_same_bit_for_bit(model):
    other = copy.deepcopy(model)
    tokens, label = batch()
    F.cross_entropy(other(tokens), label).backward()
    read(model, (tokens, label))
    for mine, theirs in zip(model.parameters(), other.parameters()):
        assert torch.equal(mine.grad, theirs.grad)


def one(model, tokens, label):
    return F.cross_entropy(model(tokens), label)


def by_checkpointing(model, tokens, label):
    x = checkpoint(model.blocks, model.embed(tokens), use_reentrant=False)
    F.cross_entropy(model.head(x.mean(1)), label).backward()


def twice(model, tokens, label):
    loss = one(model, tokens, label)
    loss.backward(retain_graph=True)
    loss.backward()


@sdpa_kernel(SDPBackend.MATH)  # the other kernel cannot be differentiated twice
def differentiated(model, tokens, label):
    loss = one(model, tokens, label)
    slopes = torch.autograd.grad(loss, [*model.head.parameters(), model.embed.weight], create_graph=True)
    (loss + sum(slope.square().sum() for slope in slopes)).backward()


def without_backward(model, tokens, label):
    one(model, tokens, label)


def compiled(model, tokens, label):
    torch._dynamo.reset()
    one(torch.compile(model, backend="eager"), tokens, label).backward()
    torch._dynamo.reset()


def frozen(model, tokens, label):
    for part in (model.embed, model.blocks):
        part.requires_grad_(False)
    one(model, tokens, label).backward()


@pytest.mark.some_slow(quick=2)
@pytest.mark.parametrize(
    ("step", "why"),
    [
        (by_checkpointing, "activation checkpointing"),
        (twice, "several backward passes"),
        (differentiated, "create_graph=True"),
        (without_backward, "no backward reached"),
        (compiled, "compiled graphs"),
        (frozen, "autograd computes no gradient"),
    ],
)
def test_importance_is_absent_with_the_reason_if_it_cannot_be_read(model, step, why):
    with HeadDiversityMonitor(model, metrics=[*METRICS, "head_contribution_min"]) as monitor:
        monitor.arm()
        with pytest.warns(MonitoringWarning, match=why):
            step(model, *batch())
            record = monitor.measure(step=0).record()
    assert why in record.absent[f"head importance/{NAME}"]
    assert not set(METRICS) & set(record.layers[NAME].values)
    assert "head_contribution_min" in record.layers[NAME].values


def test_importance_is_read_under_reentrant_checkpointing(model):
    tokens, label = batch()
    truth = slopes_by_gates(model, tokens, label)[NAME].sum(0)
    with HeadDiversityMonitor(model, metrics=METRICS) as monitor:
        monitor.arm()
        x = checkpoint(model.blocks, model.embed(tokens), use_reentrant=True)
        F.cross_entropy(model.head(x.mean(1)), label).backward()
        layer = monitor.measure(step=0).record().layers[NAME]
    assert layer.arrays["head_slope"] == pytest.approx(truth.tolist(), rel=1e-3, abs=1e-7)


def test_a_late_backward_does_not_enter_the_next_reading(model):
    tokens, label = batch()
    with HeadDiversityMonitor(model, metrics=METRICS) as monitor:
        monitor.arm()
        late = one(model, tokens, label)
        with pytest.warns(MonitoringWarning, match="no backward reached"):
            monitor.measure(step=0)
        monitor.arm()
        one(model, *batch(seed=1)).backward()
        late.backward()  # of the forward before
        mixed = monitor.measure(step=1).record().layers[NAME]
    model.zero_grad()
    assert mixed.arrays["head_slope"] == read(model, batch(seed=1)).layers[NAME].arrays["head_slope"]


def test_importance_is_absent_if_the_backward_is_compiled(model, monkeypatch):
    from torch._dynamo import compiled_autograd

    with HeadDiversityMonitor(model, metrics=METRICS) as monitor:
        monitor.arm()
        with pytest.warns(MonitoringWarning, match="the backward is compiled"):
            with monkeypatch.context() as while_forward:
                while_forward.setattr(compiled_autograd, "compiled_autograd_enabled", True)
                loss = one(model, *batch())
            loss.backward()
            record = monitor.measure(step=0).record()
    assert "the backward is compiled" in record.absent[f"head importance/{NAME}"]
    assert not set(METRICS) & set(record.layers[NAME].values)
