"""Weights that are computed from parameters: their rows are those that the module's map has, now."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.ao import quantization
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize, prune

from hdi_callback import HeadDiversityMonitor
from hdi_callback.attention.discovery.find import survey
from hdi_callback.errors import UnsupportedAttentionError
from tests.attention.by_hand import B, C, H, T, Written, attend, between, columns, four, heads, join, linear, split
from tests.attention.models import Model, batches

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning:torch"),
]
ROLES = {"query": "q", "key": "k", "value": "v", "output": "o"}


class Centred(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight - weight.mean(1, keepdim=True)


class Ternary(nn.Module):
    """BitNet's weights, with a gradient that goes through."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight + (weight.sign() * weight.abs().mean() - weight).detach()


class Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).mT


class Merged(nn.Linear):
    """A linear map with an adapter that is merged at each forward."""

    def __init__(self) -> None:
        super().__init__(C, C)
        self.A, self.B = nn.Parameter(torch.randn(3, C)), nn.Parameter(torch.randn(C, 3) / 9)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight + 0.5 * self.B @ self.A, self.bias)


class Directed(Merged):
    """A gain times the direction of each row of a weight with its adapter (DoRA), as one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.rand(C, 1) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight + 0.5 * self.B @ self.A
        return F.linear(x, self.gain * weight / weight.norm(dim=1, keepdim=True).detach(), self.bias)


class Equalised(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight * self.in_features**-0.5, self.bias)


class BehindAProperty(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.raw, self.gain = nn.Parameter(torch.randn(C, C) / 5), nn.Parameter(torch.rand(C, 1) + 0.5)

    @property
    def weight(self) -> Tensor:
        return self.raw * self.gain

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


def prune_twice(one: nn.Module) -> None:
    prune.random_unstructured(one, "weight", 0.3)
    prune.l1_unstructured(one, "weight", 0.3)


def parametrized(kind: type[nn.Module]) -> Callable[[nn.Module], object]:
    return lambda one: parametrize.register_parametrization(one, "weight", kind())


CHANGES: dict[str, Callable[[nn.Module], object]] = {
    "pruned": lambda one: prune.random_unstructured(one, "weight", 0.3),
    "pruned twice": prune_twice,
    "whole rows pruned": lambda one: prune.ln_structured(one, "weight", 0.3, 2, 1),
    "older weight norm": nn.utils.weight_norm,
    "older weight norm of the whole": lambda one: nn.utils.weight_norm(one, dim=None),
    "older spectral norm": nn.utils.spectral_norm,
    "weight norm": parametrizations.weight_norm,
    "spectral norm": parametrizations.spectral_norm,
    "orthogonal by an exponential": parametrizations.orthogonal,
    "orthogonal by Cayley": lambda one: parametrizations.orthogonal(one, orthogonal_map="cayley"),
    "orthogonal by Householder": lambda one: parametrizations.orthogonal(one, orthogonal_map="householder"),
    "orthogonal without a base": lambda one: parametrizations.orthogonal(one, use_trivialization=False),
    "centred": parametrized(Centred),
    "symmetric": parametrized(Symmetric),
    "ternary": parametrized(Ternary),
}
MODULES: dict[str, Callable[[], nn.Module]] = {
    "adapter merged in the forward": Merged,
    "gain times the direction of an adapted weight": Directed,
    "equalised learning rate": lambda: Equalised(C, C),
    "behind a property": BehindAProperty,
}


def built(name: str) -> nn.Module:
    torch.manual_seed(0)
    module = between(lambda m, q, k, v: attend(q, k, v))
    for own in ROLES.values():
        if name in MODULES:
            setattr(module, own, MODULES[name]())
        elif name in CHANGES:
            CHANGES[name](getattr(module, own))
    if name == "quantised while it trains":
        module.qconfig = quantization.get_default_qat_qconfig("fbgemm")
        module = quantization.prepare_qat(module.train())
        for own in ROLES.values():  # what they give is rounded as well: that is not of their weight
            getattr(module, own).activation_post_process = nn.Identity()
            getattr(module, own)._forward_hooks.clear()
    return module.train()


def update(module: nn.Module) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 0.01 * torch.randn_like(parameter)


def map_of(module: nn.Module) -> Tensor:
    """The weight that a module's map has in evaluation, from what it gives for each unit vector."""
    with torch.no_grad():
        copied = copy.deepcopy(module).eval()
        if hasattr(copied, "weight_fake_quant"):
            copied.weight_fake_quant.disable_observer()
        nothing = copied(torch.zeros(1, C))
        return (copied(torch.eye(C)) - nothing).mT


@pytest.mark.parametrize("name", [*CHANGES, *MODULES, "quantised while it trains"])
def test_rows_are_those_of_the_map_as_it_is_after_an_update(name):
    module, x = built(name), torch.randn(B, T, C)
    with torch.no_grad():
        module(x)
    found = survey(module, lambda: module(x))
    assert not found.refused
    layer = found.layers[0]
    update(module)
    with torch.no_grad():
        module(x)
    state, draws = copy.deepcopy(module.state_dict()), torch.get_rng_state()
    weights = {role: layer.weight(role).detach() for role in ROLES}
    assert all(torch.equal(one, state[key]) for key, one in module.state_dict().items())
    assert torch.equal(draws, torch.get_rng_state())
    for role, own in ROLES.items():
        expected = map_of(getattr(module, own))
        expected = columns(expected) if role == "output" else heads(expected)
        torch.testing.assert_close(weights[role], expected, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("name", ["pruned", "weight norm", "orthogonal by an exponential", "behind a property"])
def test_a_weight_that_is_computed_passes_its_gradient_to_the_parameters(name):
    module, x = built(name), torch.randn(B, T, C)
    layer = survey(module, lambda: module(x)).layers[0]
    layer.weight("key").square().sum().backward()
    ours = {key: one.grad for key, one in module.named_parameters() if one.grad is not None}
    assert ours
    module.zero_grad()
    (module.k.weight if name != "pruned" else module.k.weight_orig * module.k.weight_mask).square().sum().backward()
    for key, gradient in ours.items():
        torch.testing.assert_close(gradient, module.get_parameter(key).grad, atol=1e-5, rtol=1e-4)
        assert key.startswith("k.")


def test_a_mask_that_is_pruned_further_counts_at_the_next_reading():
    module, x = built("pruned"), torch.randn(B, T, C)
    layer = survey(module, lambda: module(x)).layers[0]
    prune.random_unstructured(module.k, "weight", 0.9)
    assert int(layer.weight("key").count_nonzero()) == int(module.k.weight_mask.sum()) < C * C / 4


def test_rows_of_a_packed_weight_that_is_pruned_are_those_of_its_thirds():
    module = Written(
        lambda m, x: m.o(join(attend(*(split(one) for one in m.qkv(x).chunk(3, -1))))), qkv=linear(3 * C), o=linear()
    )
    prune.random_unstructured(module.qkv, "weight", 0.3)
    layer = survey(module, lambda: module(torch.randn(B, T, C))).layers[0]
    for role, expected in zip(("query", "key", "value"), (module.qkv.weight_orig * module.qkv.weight_mask).chunk(3)):
        assert torch.equal(layer.weight(role), heads(expected))


def test_torchs_own_attention_is_read_where_it_is_pruned():
    module = nn.MultiheadAttention(C, H, batch_first=True)
    prune.random_unstructured(module, "in_proj_weight", 0.3)
    x = torch.randn(B, T, C)
    layer = survey(module, lambda: module(x, x, x)).layers[0]
    expected = (module.in_proj_weight_orig * module.in_proj_weight_mask).chunk(3)[1]
    assert torch.equal(layer.weight("key"), heads(expected))


def test_a_weight_that_is_cached_for_several_calls_is_read_in_the_first_and_refused_in_others():
    module, x = built("weight norm"), torch.randn(B, T, C)
    with parametrize.cached():
        found = survey(module, lambda: module(x))
        later = survey(module, lambda: module(x))  # what it takes was computed before it was watched
    update(module)
    torch.testing.assert_close(found.layers[0].weight("key"), heads(map_of(module.k)))
    assert not later.layers
    assert later.refused[0].reason == "its query is a product of two computed tensors"


def test_two_weights_of_one_parameter_are_told_apart():
    def forward(m, x):
        q, k = (F.linear(x, m.k.weight * gain[:, None]) for gain in (m.a, m.b))
        return m.o(join(attend(split(q), split(k), split(m.v(x)))))

    module = Written(forward, **four(a=nn.Parameter(torch.rand(C)), b=nn.Parameter(torch.rand(C))))
    layer = survey(module, lambda: module(torch.randn(B, T, C))).layers[0]
    for role, gain in (("query", module.a), ("key", module.b)):
        assert torch.equal(layer.weight(role), heads(module.k.weight * gain[:, None]))


def test_a_number_that_is_read_out_of_a_tensor_makes_its_weight_unreadable():
    def forward(m, x):
        k = F.linear(x, m.k.weight / float(m.k.weight.detach().abs().max()))
        return m.o(join(attend(split(m.q(x)), split(k), split(m.v(x)))))

    module = Written(forward, **four())
    found = survey(module, lambda: module(torch.randn(B, T, C)))
    assert not found.layers
    assert "a number is read out" in found.refused[0].reason


def test_rows_that_are_computed_cannot_be_written():
    module = built("pruned")
    layer = survey(module, lambda: module(torch.randn(B, T, C))).layers[0]
    with pytest.raises(UnsupportedAttentionError, match="computed"):
        layer.weights["key"].write(0, torch.zeros(C // H, C))


@pytest.mark.parametrize("name", ["spectral norm", "older spectral norm", "pruned", "quantised while it trains"])
def test_training_is_bit_identical_where_weights_are_computed(name):
    def trained(*, watched: bool) -> dict[str, Tensor]:
        module = built(name)
        optimizer = torch.optim.SGD(module.parameters(), 0.1)
        torch.manual_seed(1)
        monitor = HeadDiversityMonitor(module) if watched else None
        for step in range(4):
            if monitor is not None:
                monitor.arm()
            module(torch.randn(B, T, C)).square().mean().backward()
            if monitor is not None:
                reading = monitor.measure(step)
                values = reading.record().layers["the model"].values
                assert 0 < values["hdi"] < 1
            optimizer.step()
            optimizer.zero_grad()
        if monitor is not None:
            monitor.close()
        return {**module.state_dict(), "random numbers": torch.get_rng_state()}

    plain, ours = trained(watched=False), trained(watched=True)
    assert all(torch.equal(plain[key], ours[key]) for key in plain)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("compute", [nn.utils.weight_norm, parametrizations.weight_norm, parametrizations.orthogonal])
def test_a_weight_of_parameters_of_another_shape_is_measured_while_it_trains(compute):
    model, (x, _) = Model(layers=1), batches(1)[0]
    compute(model.blocks[0].attention.qkv)
    with HeadDiversityMonitor(model) as monitor:
        monitor.arm()
        model(x).square().mean().backward()
        layers = monitor.measure(0).record().layers
    assert 0 < layers["blocks.0.attention"].values["hdi"] <= 1
