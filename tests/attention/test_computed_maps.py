"""Maps by hand that compute their matrix: what is read is what a forward multiplies with, and nothing changes."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hdi_callback import find_attention
from hdi_callback.attention import survey
from hdi_callback.attention.layer.computed_maps import is_scaled, is_sum_of_maps
from hdi_callback.monitoring.interventions.parameters import owner_of

D, H, R = 24, 4, 3


class InLoralib(nn.Linear):
    """Factors as parameters of a subclass, beside the product with the weight."""

    def __init__(self, in_features, out_features):
        super().__init__(in_features, out_features)
        self.lora_A, self.lora_B = nn.Parameter(torch.randn(R, in_features)), nn.Parameter(torch.zeros(out_features, R))
        self.dropout, self.scaling = nn.Dropout(0.5), 0.25

    def forward(self, x):
        return F.linear(x, self.weight, self.bias) + self.dropout(x) @ self.lora_A.T @ self.lora_B.T * self.scaling

    def matrix(self):
        return self.weight + 0.25 * self.lora_B @ self.lora_A


class Around(nn.Module):
    """A frozen map in a module with factors as bare parameters, stored the other way round."""

    def __init__(self, in_features, out_features):
        super().__init__()
        self.linear = nn.Linear(in_features, out_features).requires_grad_(False)
        self.A, self.B = nn.Parameter(torch.randn(in_features, R)), nn.Parameter(torch.zeros(R, out_features))

    def forward(self, x):
        return self.linear(x) + (x @ self.A @ self.B) * 2

    def matrix(self):
        return self.linear.weight + 2 * (self.A @ self.B).T


class TwoUpdates(nn.Module):
    """Two updates, one of which is switched off."""

    def __init__(self, in_features, out_features):
        super().__init__()
        self.base = nn.Linear(in_features, out_features, bias=False)
        self.down = nn.ModuleDict({name: nn.Linear(in_features, R, bias=False) for name in "ab"})
        self.up = nn.ModuleDict({name: nn.Linear(R, out_features, bias=False) for name in "ab"})
        self.active = "b"

    def forward(self, x):
        return self.base(x) + self.up[self.active](self.down[self.active](x))

    def matrix(self):
        return self.base.weight + self.up["b"].weight @ self.down["b"].weight


class Weighted(nn.Linear):
    """Directions and sizes apart (DoRA)."""

    def __init__(self, in_features, out_features):
        super().__init__(in_features, out_features)
        self.size = nn.Parameter(torch.rand(out_features, 1) + 0.5)
        self.a, self.b = nn.Parameter(torch.randn(R, in_features)), nn.Parameter(torch.randn(out_features, R))

    def forward(self, x):
        return F.linear(x, self.matrix(), self.bias)

    def matrix(self):
        return self.size * F.normalize(self.weight + self.b @ self.a, dim=1)


class ScaledInTheEnd(nn.Linear):
    """An equalised learning rate: the product is scaled."""

    def forward(self, x):
        return F.linear(x, self.weight) * 0.3 + self.bias

    def matrix(self):
        return 0.3 * self.weight


class RoundedInputs(nn.Linear):
    """Eight bits of inputs and ternary weights behind a norm (BitNet), and all kinds of counting and drawing."""

    calls = 0

    def __init__(self, in_features, out_features):
        super().__init__(in_features, out_features, bias=False)
        self.norm = nn.RMSNorm(in_features)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        RoundedInputs.calls += 1
        self.count += 1
        random.random()
        torch.rand(2)
        x = self.norm(x)
        scale = 127 / x.abs().amax(-1, keepdim=True).clamp(min=1e-5)
        x = x + ((x * scale).round() / scale - x).detach()
        return F.linear(x, self.matrix())

    def matrix(self):
        scale = self.weight.abs().mean().clamp(min=1e-5)
        return self.weight + ((self.weight / scale).round().clamp(-1, 1) * scale - self.weight).detach()


class Equalized(nn.Module):
    """No `nn.Linear`: a matrix of its own, which is scaled when it is used (StyleGAN)."""

    def __init__(self, in_features, out_features):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(out_features, in_features)), nn.Parameter(torch.randn(D))

    def forward(self, x):
        return F.linear(x, self.matrix(), self.bias)

    def matrix(self):
        return self.weight * 24**-0.5


class NormedAndTurned(Equalized):
    """Rows of length one, of a matrix that is used the other way round."""

    def forward(self, x):
        return x @ F.normalize(self.weight, dim=0) + self.bias

    def matrix(self):
        return F.normalize(self.weight, dim=0).T


class AddedInPlace(nn.Linear):
    """An update by `torch.einsum`, added to what the weight gave in its own memory."""

    def __init__(self, taken, given):
        super().__init__(taken, given)
        self.blocks = nn.Parameter(torch.randn(H, taken // H, given // H))

    def forward(self, x):
        out = F.linear(x, self.weight, self.bias)
        out += torch.einsum("...hi,hij->...hj", x.unflatten(-1, (H, -1)), self.blocks).flatten(-2)
        return out

    def matrix(self):
        return self.weight + torch.block_diag(*self.blocks.mT)


ALL = [InLoralib, Around, TwoUpdates, Weighted, ScaledInTheEnd, RoundedInputs, AddedInPlace, Equalized, NormedAndTurned]


class Attention(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.q, self.k, self.v, self.o = (kind(D, D) for _ in range(4))

    def forward(self, x):
        q, k, v = (m(x).unflatten(-1, (H, D // H)).transpose(1, 2) for m in (self.q, self.k, self.v))
        return self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def trained(kind):
    """A model whose parameters are no longer those of its start."""
    torch.manual_seed(0)
    model = nn.Sequential(Attention(kind))
    for parameter in model.parameters():
        nn.init.uniform_(parameter, 0.1, 1.0) if parameter.dim() < 2 else nn.init.normal_(parameter)
    return model


@pytest.mark.parametrize("kind", ALL)
def test_the_weight_of_a_computed_map_is_what_it_multiplies_with(kind):
    model = trained(kind)
    (layer,) = find_attention(model)
    for role, name in (("query", "q"), ("key", "k"), ("value", "v")):
        expected = getattr(model[0], name).matrix().view(H, D // H, D)
        torch.testing.assert_close(layer.weight(role), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(
        layer.weight("output"), model[0].o.matrix().T.reshape(H, D // H, D), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("kind", ALL)
def test_the_bias_of_a_computed_linear_map_is_its_output_for_a_zero_input(kind):
    model = trained(kind)
    (layer,) = find_attention(model)
    out_features, bias = model[0].q(torch.zeros(1, 1, D)).flatten(), layer.slices["query"].bias()
    assert (bias is None) == (not out_features.any())
    if bias is not None:
        torch.testing.assert_close(bias.flatten(), out_features)


@pytest.mark.parametrize("kind", ALL)
def test_finding_and_reading_a_computed_map_leaves_everything_as_it_was(kind):
    model = trained(kind).train()
    model(torch.randn(2, 5, D))

    def state():
        return [
            *(value.clone() for value in model.state_dict().values()),
            torch.get_rng_state(),
            torch.tensor([RoundedInputs.calls, hash(random.getstate())]),
            torch.tensor([part.training for part in model.modules()]),
        ]

    before = state()
    (layer,) = find_attention(model)
    for role in layer.slices:
        layer.weight(role)
    assert all(map(torch.equal, before, state()))


def test_a_computed_weight_passes_gradients_to_its_factors_and_is_not_writable():
    model = trained(Around)
    (layer,) = find_attention(model)
    weight = layer.weight("key")
    weight.square().sum().backward()
    whole = model[0].k.matrix()
    expected = torch.autograd.grad(whole.square().sum(), (model[0].k.A, model[0].k.B))
    torch.testing.assert_close((model[0].k.A.grad, model[0].k.B.grad), expected)
    assert model[0].k.linear.weight.grad is None
    assert owner_of(layer, weight) is None


class Bent(Around):
    def forward(self, x):
        return self.linear(x) + F.relu(x @ self.A) @ self.B


class OfSeveralTokens(Around):
    def forward(self, x):
        return self.linear(x) + (x.cumsum(1) @ self.A @ self.B) * 2


class Turned(RoundedInputs):
    """Inputs whose features are mixed first: the factor is no weight of the tokens."""

    def forward(self, x):
        return F.linear(x.flip(-1).cumsum(-1).tanh(), self.weight)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Bent, "`k.B` takes the output of another linear map"),
        (OfSeveralTokens, "sums of the outputs of `k.B` and `k.linear`"),
    ],
)
def test_an_update_that_is_not_linear_is_refused(kind, reason):
    assert is_sum_of_maps(Around(D, D))
    assert not is_sum_of_maps(kind(D, D))
    found = survey(nn.Sequential(Attention(kind)))
    assert found.layers == ()
    assert [reason in one.reason for one in found.refused] == [True]


def test_a_linear_map_whose_forward_mixes_its_input_first_is_refused():
    (refusal,) = survey(nn.Sequential(Attention(Turned))).refused
    assert "a Turned, whose forward does more than multiply with its weight" in refusal.reason


class EqualizedAndBent(Equalized):
    def forward(self, x):
        return F.relu(super().forward(x))


class PlainMatrix(Equalized):
    def matrix(self):
        return self.weight


class PlainMatrixTurned(Equalized):
    """GPT-2's map under another name."""

    def matrix(self):
        return self.weight.T


def test_a_linear_map_with_a_scaled_weight_and_an_activation_is_refused():
    assert not is_scaled(EqualizedAndBent(D, D))
    found = survey(nn.Sequential(Attention(EqualizedAndBent)))
    assert found.layers == ()
    assert ["are computed from `v`" in one.reason for one in found.refused] == [True]


def test_a_matrix_that_is_not_scaled_is_read_as_a_live_view_of_its_parameter():
    assert is_scaled(Equalized(D, D))
    assert not is_scaled(PlainMatrix(D, D))
    assert not is_scaled(PlainMatrixTurned(D, D))
    model = trained(PlainMatrix)
    (layer,) = find_attention(model)
    weight = layer.weight("key")
    assert weight.data_ptr() == model[0].k.weight.data_ptr()


def test_modules_of_one_class_with_different_settings_are_tried_separately():
    one, other = Attention(Switched), Attention(Switched)
    for part in (other.q, other.k, other.v, other.o):
        part.is_bent = True
    assert len(find_attention(nn.Sequential(one))) == 1
    found = survey(nn.Sequential(other))
    assert found.layers == ()
    assert ["takes the output of another linear map" in one.reason for one in found.refused] == [True]


class Switched(Around):
    is_bent = False

    def __init__(self, in_features, out_features):
        super().__init__(in_features, out_features)
        self.is_bent = False

    def forward(self, x):
        inner = x @ self.A
        return self.linear(x) + (F.relu(inner) if self.is_bent else inner) @ self.B
