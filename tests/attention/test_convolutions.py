"""Projections that are convolutions of kernel size one, against linear maps with the same matrix."""

from __future__ import annotations

import copy
import warnings
from dataclasses import replace

import numpy as np
import peft
import pytest
import scipy.linalg
import torch
import torch._dynamo
from torch import Tensor, nn
from torch.nn import functional as F

from hdi_callback import HeadDiversityMonitor, find_attention, register_layout
from hdi_callback.attention import AttentionLayer, HeadSlice, RuntimeVerifier, Taps
from hdi_callback.attention.layer.heads import check_layer
from hdi_callback.attention.layer.projections import (
    effective_weight,
    feature_dim,
    features,
    is_linear,
    is_map,
    is_pointwise,
    objection,
)
from hdi_callback.core import diversity_penalty, head_diversity
from hdi_callback.errors import MisconfigurationError, UnsupportedAttentionError
from hdi_callback.monitoring.interventions import DiversityPenalty, ReviveHeads
from tests.attention.models import D, H
from tests.attention.witness import witness
from tests.monitoring.interventions.training import Open, alert

CONVOLUTIONS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
SPACES = {1: (6,), 2: (2, 3), 3: (1, 2, 3)}
ROLES = ("query", "key", "value", "output")
NAMES = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "output": "out_proj"}
METRICS = ["hdi", "hdi_query", "hdi_output", "head_covariance", "head_correlation", "head_output_overlap"]


def matrix_of(module: nn.Module, taken: int, dims: int) -> Tensor:
    """The matrix of a map, from what it gives for the unit vectors, each at one position."""
    units = torch.eye(taken).double().view(taken, taken, *[1] * dims)
    precise = copy.deepcopy(module).double().eval()
    with torch.no_grad():
        return (precise(units) - precise(torch.zeros_like(units))).flatten(1).mT.float()


class Convolved(nn.Module):
    """Attention over all positions of what has a number of spatial dimensions, features before them."""

    def __init__(self, dims: int = 2, groups: int = 1):
        super().__init__()
        self.dims = dims
        for name in NAMES.values():
            setattr(self, name, CONVOLUTIONS[dims](D, D, 1, groups=groups))

    def forward(self, x):
        q, k, v = (
            proj(x).flatten(2).unflatten(1, (H, -1)).mT  # (batch, heads, positions, width)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        mixed = F.scaled_dot_product_attention(q, k, v).mT.flatten(1, 2)
        return self.out_proj(mixed.unflatten(-1, x.shape[2:]))


class Multiplied(nn.Module):
    """The same over tokens, by linear maps."""

    def __init__(self, twin: Convolved):
        super().__init__()
        self.num_heads = H
        for name in NAMES.values():
            linear, convolution = nn.Linear(D, D), getattr(twin, name)
            with torch.no_grad():
                linear.weight.copy_(matrix_of(convolution, D, twin.dims))
                linear.bias.copy_(convolution.bias)
            setattr(self, name, linear)

    def forward(self, x):
        q, k, v = (proj(x).unflatten(-1, (H, -1)).transpose(1, 2) for proj in (self.q_proj, self.k_proj, self.v_proj))
        return self.out_proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def describe(name: str, module: Convolved) -> AttentionLayer:
    slices = {role: HeadSlice(module, f"{path}.weight", H, D // H) for role, path in NAMES.items()}
    return AttentionLayer(name, module, H, H, D // H, D // H, "convolutions", slices, module.out_proj)


register_layout(Convolved, describe)


def twins(dims: int = 2, groups: int = 1) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    convolved = Convolved(dims, groups)
    return nn.Sequential(convolved), nn.Sequential(Multiplied(convolved))


def image(dims: int = 2, batch: int = 3, seed: int = 1) -> Tensor:
    return torch.randn(batch, D, *SPACES[dims], generator=torch.Generator().manual_seed(seed))


def tokens_of(x: Tensor) -> Tensor:
    return x.flatten(2).mT


every_shape = pytest.mark.parametrize(("dims", "groups"), [(1, 1), (2, 1), (3, 1), (1, 4), (2, 2), (3, 32)])


def test_the_convolution_and_its_linear_twin_compute_the_same():
    for dims, groups in [(1, 1), (2, 4)]:
        convolved, multiplied = twins(dims, groups)
        x = image(dims)
        torch.testing.assert_close(tokens_of(convolved(x)), multiplied(tokens_of(x)))


# --- the matrix


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_the_matrix_is_what_each_position_is_multiplied_with(dims, groups):
    convolution = CONVOLUTIONS[dims](8, 12, 1, groups=groups)
    assert is_pointwise(convolution)
    assert is_map(convolution)
    assert not is_linear(convolution)
    assert objection(convolution) is None
    assert features(convolution) == (8, 12)
    assert feature_dim(convolution) == -1 - dims
    assert torch.equal(effective_weight(convolution, "weight"), matrix_of(convolution, 8, dims))


@pytest.mark.parametrize("memory", [torch.contiguous_format, torch.channels_last])
def test_the_matrix_of_a_convolution_without_groups_is_a_view(memory):
    convolution = nn.Conv2d(8, 12, 1).to(memory_format=memory)
    matrix = effective_weight(convolution, "weight")
    with torch.no_grad():
        matrix[3, 5] = 7
    assert float(matrix_of(convolution, 8, 2)[3, 5]) == pytest.approx(7, abs=1e-6)


def test_a_strided_pointwise_convolution_maps_every_position_that_it_does_not_skip():
    convolution = nn.Conv2d(8, 12, 1, stride=(2, 3))
    assert is_pointwise(convolution)
    x = torch.randn(2, 8, 5, 7)
    truth = effective_weight(convolution, "weight") @ x[:, :, ::2, ::3].flatten(2) + convolution.bias[:, None]
    torch.testing.assert_close(convolution(x).flatten(2), truth)


def test_a_convolution_that_mixes_positions_is_not_pointwise():
    assert not is_pointwise(nn.Conv2d(8, 8, 3, padding=1))
    assert not is_pointwise(nn.Conv2d(8, 8, (1, 3)))
    assert not is_pointwise(nn.Conv2d(8, 8, 1, padding=1))
    assert not is_pointwise(nn.ConvTranspose2d(8, 8, 1))
    assert not is_pointwise(nn.Linear(8, 8))
    assert is_pointwise(nn.Conv1d(8, 8, 1, padding="same"))


class Casts(nn.Conv2d):
    def forward(self, x):
        return F.conv2d(x, self.weight.to(x.dtype), self.bias, self.stride, groups=self.groups)


class CastsInGroups(Casts):
    """Looked at by itself, as a class is tried once."""


class Standardises(nn.Conv2d):
    def forward(self, x):
        return F.conv2d(x, F.normalize(self.weight, dim=1), self.bias, groups=self.groups)


class Doubles(nn.Conv2d):
    """Overrides what the forward of a convolution calls."""

    def _conv_forward(self, input, weight, bias):
        return super()._conv_forward(input, 2 * weight, bias)


class Pads(nn.Conv2d):
    """Sees the neighbour beside each position."""

    def forward(self, x):
        return super().forward(x + x.roll(1, -1))


def test_a_subclass_is_read_if_it_multiplies_with_its_weight():
    assert objection(Casts(8, 12, 1)) is None
    assert objection(CastsInGroups(8, 12, 1, groups=2, stride=2)) is None
    for kind in (Standardises, Doubles, Pads):
        assert objection(kind(8, 12, 1)) == f"a {kind.__name__}, whose forward does more than multiply with its weight"


def test_a_parametrised_convolution_is_read_as_it_multiplies():
    convolution = nn.utils.parametrizations.weight_norm(nn.Conv2d(8, 12, 1, groups=2))
    with torch.no_grad():
        convolution.parametrizations.weight.original0.uniform_(0.5, 2)
    assert objection(convolution) is None
    torch.testing.assert_close(effective_weight(convolution, "weight"), matrix_of(convolution, 8, 2))


@pytest.mark.parametrize("dims", [1, 2])
def test_the_weight_of_a_lora_convolution_is_base_and_update(dims):
    torch.manual_seed(0)
    config = peft.LoraConfig(r=2, target_modules=["k_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(nn.Sequential(Convolved(dims)), config).base_model.model[0].k_proj
    assert type(adapted).__module__.startswith("peft")
    assert objection(adapted) is None
    assert features(adapted) == (D, D)
    really = matrix_of(adapted, D, dims)
    torch.testing.assert_close(effective_weight(adapted, "weight"), really)
    assert not torch.allclose(really, adapted.base_layer.weight.flatten(1), atol=1e-3)


@pytest.mark.parametrize("options", [{"use_dora": True}, {"groups": 2}])
def test_another_update_of_a_convolution_is_refused_by_name(options):
    groups = options.pop("groups", 1)
    config = peft.LoraConfig(r=2, target_modules=["k_proj"], **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that peft cannot merge groups
        adapted = peft.get_peft_model(nn.Sequential(Convolved(2, groups)), config).base_model.model[0].k_proj
    assert "a Conv2d of peft" in objection(adapted)


# --- the heads


@every_shape
def test_heads_of_a_convolution_are_those_of_its_linear_twin(dims, groups):
    convolved, multiplied = twins(dims, groups)
    (layer,), (twin,) = find_attention(convolved), find_attention(multiplied)
    assert {**layer.facts(), "type": "", "kind": ""} == {**twin.facts(), "type": "", "kind": ""}
    for role in ROLES:
        assert torch.equal(layer.weight(role), twin.weight(role))
        assert torch.equal(layer.slices[role].bias(), twin.slices[role].bias())
        assert layer.slices[role].features == (D, D)


@pytest.mark.parametrize("groups", [1, 4])
def test_interleaved_heads_are_read_from_a_convolution(groups):
    convolution = nn.Conv2d(16, 24, 1, groups=groups)
    keys = HeadSlice(convolution, "weight", heads=2, width=4, start=4, stride=12)
    really = matrix_of(convolution, 16, 2)
    assert torch.equal(keys.rows(), torch.stack([really[4:8], really[16:20]]))
    features_in = HeadSlice(convolution, "weight", heads=4, width=2, stride=1, step=8)
    assert torch.equal(features_in.columns()[1], really.mT[[1, 9]])


@pytest.mark.parametrize("groups", [1, 4])
def test_a_gradient_of_what_is_read_reaches_the_convolution(groups):
    convolved, multiplied = twins(groups=groups)
    for model in (convolved, multiplied):
        (layer,) = find_attention(model)
        diversity_penalty(layer.weight("key")).backward()
    dense = multiplied[0].k_proj.weight.grad
    width = D // groups
    blocks = [dense[start : start + width, start : start + width] for start in range(0, D, width)]
    result = convolved[0].k_proj.weight.grad.flatten(1)
    torch.testing.assert_close(result, torch.cat(blocks))
    assert groups > 1 or result.abs().max() > 0


def test_heads_of_different_groups_share_nothing():
    """Of four groups and four heads each head sees features of its own."""
    (layer,) = find_attention(twins(groups=4)[0])
    found = head_diversity(layer.weight("key"))
    assert float(found.index) == pytest.approx(1, abs=1e-6)
    (other,) = find_attention(twins()[0])
    assert float(head_diversity(other.weight("key")).index) < 0.99


@pytest.mark.parametrize(
    ("convolution", "contradiction"),
    [
        (nn.Conv2d(D, D, 3), "its key weight is not a matrix"),
        (nn.Conv2d(D, D, 1, padding=1), "its key weight is not a matrix"),
        (nn.Conv2d(D, D - 8, 1), "its key weight has 24 features, fewer than 4 heads of 8"),
    ],
)
def test_heads_claimed_on_a_convolution_that_is_not_pointwise_are_refused(convolution, contradiction):
    module = Convolved()
    module.k_proj = convolution
    with pytest.raises(UnsupportedAttentionError, match=contradiction):
        check_layer(describe("attn", module))


# --- readings and captures


@every_shape
def test_readings_are_those_of_the_linear_twin(dims, groups):
    read = []
    for model, x in zip(twins(dims, groups), (image(dims), tokens_of(image(dims))), strict=True):
        with HeadDiversityMonitor(model, metrics=METRICS, max_tokens=10_000) as monitor:
            monitor.arm()
            model(x)
            record = monitor.measure(0).record()
        assert record.absent == {}
        read.append(record.scalars(METRICS))
    assert len(read[0]) >= len(METRICS)
    assert read[0] == pytest.approx(read[1], abs=1e-5)


@every_shape
def test_an_image_is_captured_as_one_sequence_of_its_positions(dims, groups):
    model = twins(dims, groups)[0]
    with Taps(find_attention(model)) as taps, witness(model) as observed:
        taps.arm()
        model(image(dims))
        capture = taps.captures["0"]
    really = observed.computations[0].output.transpose(1, 2)  # (batch, positions, heads, width)
    assert torch.equal(capture.outputs, really.flatten(0, 1))
    assert capture.lengths == (6, 6, 6)
    assert capture.num_tokens == 18


def test_the_sample_of_many_positions_is_that_of_as_many_tokens():
    samples = []
    convolved, multiplied = twins()
    x = torch.randn(4, D, 9, 11)
    for model, result in ((convolved, x), (multiplied, tokens_of(x))):
        with Taps(find_attention(model), max_tokens=64) as taps:
            taps.arm()
            model(result)
            samples.append(taps.captures["0"])
    torch.testing.assert_close(samples[0].outputs, samples[1].outputs)
    assert samples[0].lengths == samples[1].lengths
    assert samples[0].num_tokens == samples[1].num_tokens == 4 * 99


def test_an_image_without_a_batch_dimension_is_one_sequence():
    module = nn.Sequential(Convolved())
    with Taps(find_attention(module)) as taps:
        taps.arm()
        module[0].out_proj(image()[0])
        capture = taps.captures["0"]
    assert torch.equal(capture.outputs.flatten(1), image()[0].flatten(1).mT)
    assert capture.lengths == (6,)


def test_an_unexpected_number_of_features_is_absent_with_the_reason():
    module = Convolved()
    with Taps(find_attention(nn.Sequential(module))) as taps:
        taps.arm()
        module.out_proj.weight = nn.Parameter(torch.randn(D, 8, 1, 1))
        module.out_proj(torch.randn(2, 8, D, D))  # as many columns as there should be features
        assert taps.absent == {"0": "the input of its output projection has 8 features, expected 4 x 8"}


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("groups", [1, 4])
def test_a_compiled_model_is_captured_without_a_graph_break(backend, groups):
    model, _ = twins(groups=groups)
    with Taps(find_attention(model)) as taps:
        taps.arm()
        model(image())
        truth = taps.captures["0"]
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with Taps(find_attention(model)) as taps:
        compiled = torch.compile(model, backend=backend)
        compiled(image())
        for _ in range(2):
            taps.arm()
            compiled(image()).sum().backward()
            capture = taps.captures["0"]
            torch.testing.assert_close(capture.outputs, truth.outputs)
            assert capture.lengths == truth.lengths
            taps.release()
    assert not torch._dynamo.utils.counters["graph_break"]
    torch._dynamo.reset()


@pytest.mark.parametrize("memory", [torch.contiguous_format, torch.channels_last])
def test_training_is_bit_identical_with_a_capture_and_without(memory):
    gradients = []
    for is_armed in (False, True):
        model = twins()[0].to(memory_format=memory)
        with Taps(find_attention(model)) as taps:
            if is_armed:
                taps.arm()
            state = torch.get_rng_state()
            model(image().to(memory_format=memory)).square().sum().backward()
            assert torch.equal(torch.get_rng_state(), state)
            assert len(taps.captures) == is_armed
        gradients.append([parameter.grad for parameter in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


# --- interventions


@pytest.mark.parametrize("groups", [1, 4])
def test_the_penalty_gives_a_convolution_the_gradient_of_its_linear_twin(groups):
    grown = []
    for model in twins(groups=groups):
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        penalty = DiversityPenalty(0.5)
        penalty.attach(Open(model, optimizer))
        penalty.answer(alert("0"))
        penalty.before_optimizer_step(optimizer)
        grown.append(model[0].k_proj.weight.grad)
    width = D // groups
    blocks = [grown[1][start : start + width, start : start + width] for start in range(0, D, width)]
    torch.testing.assert_close(grown[0].flatten(1), torch.cat(blocks))


@pytest.mark.parametrize("memory", ["contiguous", "channels last", "channels last after a step"])
def test_a_head_is_revived_as_in_the_linear_twin_and_its_optimizer_state_is_reset(memory):
    convolved, multiplied = twins()
    if memory == "channels last":
        convolved.to(memory_format=torch.channels_last)
    after = []
    for model, x in ((convolved, image()), (multiplied, tokens_of(image()))):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        model(x).square().sum().backward()
        optimizer.step()
        if memory == "channels last after a step" and model is convolved:
            convolved.to(memory_format=torch.channels_last)
        (layer,) = find_attention(model)
        with torch.no_grad():
            for role in ("query", "key", "value"):
                layer.weight(role)[3] = layer.weight(role)[1]
                layer.slices[role].bias()[3] = layer.slices[role].bias()[1]
            before = model(x)
        revive = ReviveHeads()
        revive.attach(Open(model, optimizer))
        (head,) = revive.answer(alert("0", rule="worst pair", heads=(1, 3))).facts["heads"]
        with torch.no_grad():
            torch.testing.assert_close(model(x), before, rtol=1e-4, atol=1e-5)
        moments = {role: optimizer.state[getattr(layer.module, NAMES[role]).weight]["exp_avg"] for role in ROLES}
        after.append((head, {role: layer.weight(role).detach() for role in ROLES}, moments))
    (head, weights, moments), (other_head, other_weights, other_moments) = after
    assert head == other_head
    of_head = slice(head * 8, (head + 1) * 8)
    for role in ROLES:
        # Rows of a fresh head are drawn within a subspace, of which nothing but the projector is unique.
        grams = [each[role].mT @ each[role] for each in (weights, other_weights)]
        torch.testing.assert_close(*grams, rtol=1e-3, atol=1e-5)
        torch.testing.assert_close(moments[role].flatten(1), other_moments[role], rtol=1e-3, atol=1e-5)
    for role in ("query", "key"):
        assert not moments[role][of_head].any()
        assert moments[role][: of_head.start].any() or moments[role][of_head.stop :].any()
    assert not moments["output"][:, of_head].any()


def test_reviving_heads_of_a_grouped_convolution_is_refused():
    with pytest.raises(MisconfigurationError, match="cannot write the query heads of `0` in place"):
        ReviveHeads().attach(Open(twins(groups=4)[0]))


# --- norms that follow


def normed(kind: str) -> tuple[nn.Module, Tensor]:
    """A map with a norm over the batch behind it, and inputs: (batch, features, ...)."""
    torch.manual_seed(0)
    if kind == "linear":
        linear, norm = nn.Linear(D, D), nn.BatchNorm1d(D)

        class LinearNorm(nn.Module):
            """As levit has it."""

            def __init__(self):
                super().__init__()
                self.linear, self.bn = linear, norm

            def forward(self, x):
                x = self.linear(x.mT)
                return self.bn(x.flatten(0, 1)).reshape_as(x).mT

        module, x = LinearNorm(), torch.randn(8, D, 40)
    else:
        module, x = nn.Sequential(nn.Conv2d(D, D, 1, bias=False), nn.BatchNorm2d(D)), torch.randn(8, D, 5, 8)
        norm = module[1]
    with torch.no_grad():
        norm.weight.uniform_(0.2, 3).mul_(torch.randn(D).sign())
        norm.bias.normal_()
        norm.running_mean.normal_()
        norm.running_var.uniform_(0.1, 5)
    return module, x * torch.linspace(0.3, 3, D).view(D, *[1] * (x.dim() - 2))


def fitted_rows(module: nn.Module, x: Tensor) -> np.ndarray:
    """The matrix of an affine map, by least squares from what it takes and gives."""
    with torch.no_grad():
        result = module(x)
    taken, result = (tensor.movedim(1, -1).flatten(0, -2).double().numpy() for tensor in (x, result))
    taken = np.concatenate([taken, np.ones((len(taken), 1))], 1)
    solved, residual, _, _ = scipy.linalg.lstsq(taken, result)
    assert residual.max() < 1e-6, "it is affine"
    return solved[:-1].T


@pytest.mark.parametrize("is_training", [False, True])
@pytest.mark.parametrize("kind", ["convolution", "linear"])
def test_a_norm_over_the_batch_leaves_principal_angles_as_they_are(kind, is_training):
    module, x = normed(kind)
    really = fitted_rows(copy.deepcopy(module).train(is_training), x).reshape(H, D // H, D)
    owner = "linear" if kind == "linear" else "0"
    read = HeadSlice(module, f"{owner}.weight", H, D // H).rows().detach().double().numpy()
    assert not np.allclose(really, read, atol=1e-2), "the norm does scale"
    for head in range(H):
        for other in range(head):
            angles = scipy.linalg.subspace_angles(really[head].T, really[other].T)
            np.testing.assert_allclose(scipy.linalg.subspace_angles(read[head].T, read[other].T), angles, atol=1e-4)


# --- the check in a run


@pytest.mark.parametrize("sides", [(2, 3), (2, D), (D, 2), (8, 8)])
def test_a_claim_is_checked_on_images_of_any_size(sides):
    (layer,) = find_attention(twins()[0])
    wrong = replace(layer, slices={role: replace(part, stride=1, step=H) for role, part in layer.slices.items()})
    for claim, names in ((layer, set()), (wrong, {layer.name})):
        check = RuntimeVerifier([claim])
        check.arm()
        layer.module(torch.randn(3, D, *sides))
        assert set(check.contradictions()) == names
        check.suspend()


class FilteredByParameters(nn.Module):
    """Attention over the pixels of an image, whose filters of one pixel are parameters of its own."""

    def __init__(self, dims: int) -> None:
        super().__init__()
        self.convolve, ones = getattr(F, f"conv{dims}d"), [1] * dims
        self.query, self.key, self.value, self.out = (nn.Parameter(torch.randn(16, 16, *ones) / 4) for _ in range(4))
        self.seen: dict[str, Tensor] = {}

    def forward(self, x):
        parts = (self.convolve(x, weight) for weight in (self.query, self.key, self.value))
        q, k, v = (part.flatten(2).unflatten(1, (4, 4)).mT for part in parts)
        mixed = F.scaled_dot_product_attention(q, k, v)
        self.seen = {"query": q, "key": k, "value": v, "output": mixed}
        return self.convolve(mixed.mT.flatten(1, 2).unflatten(2, x.shape[2:]), self.out)


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_filters_of_single_tokens_are_read_if_they_are_parameters_of_the_module(dims):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Identity(), FilteredByParameters(dims)), torch.randn(2, 16, *SPACES[dims])
    (layer,) = find_attention(model, forward=lambda: model(x))
    model(x)
    for role in ("query", "key", "value"):
        made = torch.einsum("hwc,bcn->bhnw", layer.weight(role), x.flatten(2))
        torch.testing.assert_close(made, model[1].seen[role])
    made = torch.einsum("hwc,bhnw->bcn", layer.weight("output"), model[1].seen["output"])
    torch.testing.assert_close(made, model(x).flatten(2))
