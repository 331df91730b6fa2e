"""Weights that are computed are read as the last forward used them, and reading leaves nothing changed."""

from __future__ import annotations

import random
import warnings
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

from hdi_callback import find_attention
from hdi_callback.attention.isolation import isolated
from hdi_callback.attention.layer.weight_reading import read_tensor
from hdi_callback.monitoring.interventions import DiversityPenalty

D, H = 16, 4


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_heads = H
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(D, D) for _ in range(4))

    def forward(self, x):
        q, k, v = (map_(x).unflatten(-1, (H, -1)).transpose(1, 2) for map_ in (self.q_proj, self.k_proj, self.v_proj))
        return self.out_proj(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Noise(nn.Module):
    """Noise on a weight in training, and all kinds of counting."""

    calls = 0
    drawn: ClassVar[list[float]] = []

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.steps = 0

    def forward(self, weight):
        Noise.calls += 1
        Noise.drawn.append(1.0)
        self.steps += 1
        self.count += 1
        random.random()
        return weight + torch.randn_like(weight) if self.training else 2 * weight


class Drawn(nn.Linear):
    """A linear map whose weight is a property."""

    reads = 0

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.raw = self._parameters.pop("weight")

    @property
    def weight(self):
        Drawn.reads += 1
        return self.raw + torch.randn(self.raw.shape) if self.training else 3 * self.raw

    @weight.setter
    def weight(self, value):
        self._parameters["weight"] = value


def state(module: nn.Module) -> list:
    return [
        *(value.clone() for value in module.state_dict().values()),
        torch.get_rng_state(),
        torch.tensor([Noise.calls, len(Noise.drawn), Drawn.reads, hash(random.getstate())]),
        torch.tensor([part.steps for part in module.modules() if isinstance(part, Noise)]),
        torch.tensor([part.training for part in module.modules()]),
    ]


def require_same(before: list, after: list) -> None:
    assert len(before) == len(after)
    assert [place for place, (one, other) in enumerate(zip(before, after)) if not torch.equal(one, other)] == []


def spectral(linear: nn.Linear) -> nn.Linear:
    return parametrizations.spectral_norm(linear)


def noisy(linear: nn.Linear) -> nn.Linear:
    parametrize.register_parametrization(linear, "weight", Noise())
    return linear


def old_spectral(linear: nn.Linear) -> nn.Linear:
    return torch.nn.utils.spectral_norm(linear)


def old_weight(linear: nn.Linear) -> nn.Linear:
    return torch.nn.utils.weight_norm(linear)


def pruned(linear: nn.Linear) -> nn.Linear:
    return prune.l1_unstructured(linear, "weight", 0.5)


ALL = [spectral, noisy, old_spectral, old_weight, pruned]


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("change", ALL)
def test_finding_and_reading_leave_everything_as_it_was(change):
    module = Attention()
    for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
        change(getattr(module, name))
    model = nn.Sequential(module)
    model(torch.randn(2, 5, D))
    before = state(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (layer,) = find_attention(model)
    for role in ("query", "key", "value", "output"):
        layer.weight(role)
        layer.slices[role].bias()
    layer.facts()
    require_same(before, state(model))


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("change", [spectral, old_spectral, old_weight, pruned])
def test_a_reparametrised_weight_is_read_as_in_the_last_forward(change):
    linear = change(nn.Linear(D, D))
    used = []
    handle = linear.register_forward_hook(lambda module, args, output: used.append(output))
    linear(torch.eye(D))  # iterates
    handle.remove()
    expected = (used[0] - linear.bias).T
    torch.testing.assert_close(read_tensor(linear, "weight"), expected)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_older_weight_and_spectral_norms_are_recomputed_after_an_optimizer_step():
    linear = old_weight(nn.Linear(D, D))
    with torch.no_grad():
        linear.weight_g.mul_(2)
    torch.testing.assert_close(read_tensor(linear, "weight"), 2 * linear.weight.detach())


def test_a_weight_is_read_without_the_noise_of_its_parametrization():
    linear = noisy(nn.Linear(D, D))
    assert torch.equal(read_tensor(linear, "weight"), 2 * linear.parametrizations.weight.original)


def test_a_weight_that_is_a_property_is_read_without_a_trace():
    linear = Drawn(D, D)
    before = state(linear)
    assert torch.equal(read_tensor(linear, "weight"), 3 * linear.raw)
    require_same(before, state(linear))


@pytest.mark.parametrize("change", [spectral, noisy])
def test_gradients_of_a_read_weight_reach_the_parameters_of_its_parametrization(change):
    linear = change(nn.Linear(D, D))
    original = linear.parametrizations.weight.original
    (gradient,) = torch.autograd.grad(read_tensor(linear, "weight").square().sum(), original)
    linear.eval()
    (expected,) = torch.autograd.grad(linear.weight.square().sum(), original)
    torch.testing.assert_close(gradient, expected)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("change", ALL)
def test_the_penalty_does_not_advance_the_buffers_of_a_parametrization(change):
    module = Attention()
    change(module.k_proj)
    (layer,) = find_attention(nn.Sequential(module))
    module(torch.randn(2, 5, D)).sum().backward()
    before = state(module)
    penalty = DiversityPenalty(weight=10.0)
    penalty._training = SimpleNamespace(loss_scale=lambda optimizer: 1.0)
    gradients = penalty._gradients(layer, torch.optim.SGD(module.k_proj.parameters(), lr=0.1))
    require_same(before, state(module))
    assert any(bool(gradient.any()) for _, gradient in gradients)


def test_reading_a_weight_does_not_change_the_cache_of_parametrizations():
    linear = spectral(nn.Linear(D, D))
    with parametrize.cached():
        linear.weight  # noqa: B018 - fills the cache
        kept = dict(parametrize._cache)
        read_tensor(linear, "weight")
        assert {key: id(value) for key, value in parametrize._cache.items()} == {
            key: id(value) for key, value in kept.items()
        }


class Turned(nn.Module):
    """Makes a matrix of the default type, as much code does."""

    def forward(self, weight):
        return torch.eye(weight.shape[0]) @ weight


def test_a_computed_weight_uses_the_default_type_and_device_of_the_user():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        linear = nn.Linear(4, 4)
        parametrize.register_parametrization(linear, "weight", Turned())
        with isolated():  # as when a model is searched
            assert torch.zeros(1).dtype is torch.float32
            assert torch.equal(read_tensor(linear, "weight"), linear.parametrizations.weight.original)
            assert torch.zeros(1).dtype is torch.float32
        with torch.device("meta"):
            linear = nn.Linear(4, 4, dtype=torch.float64)
            parametrize.register_parametrization(linear, "weight", Turned())
            assert read_tensor(linear, "weight").is_meta
    finally:
        torch.set_default_dtype(before)


def test_a_plain_parameter_is_returned_itself_and_a_lazy_one_as_none():
    linear = nn.Linear(2, 2)
    assert read_tensor(linear, "weight") is linear.weight
    assert read_tensor(linear, "scale") is None
    assert read_tensor(nn.LazyLinear(2), "weight") is None


def test_hooks_of_the_users_do_not_fire_when_a_weight_is_read():
    linear, fired = spectral(nn.Linear(2, 2)), []
    for part in linear.modules():
        part.register_forward_hook(lambda *args: fired.append(args))
        part.register_full_backward_hook(lambda *args: fired.append(args))
    handle = nn.modules.module.register_module_forward_hook(lambda *args: fired.append(args))
    try:
        read_tensor(linear, "weight").sum().backward()
    finally:
        handle.remove()
    assert fired == []
