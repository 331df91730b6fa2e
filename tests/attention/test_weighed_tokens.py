"""A softmax that weighs tokens is named, however it is written; one that weighs experts, classes or layers is not."""

from __future__ import annotations

import time
import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hdi_callback import HeadDiversityMonitor
from hdi_callback.attention import survey
from hdi_callback.errors import MonitoringWarning, UnsupportedAttentionWarning

NO_PRODUCTS = "its scores are not products of queries and keys"
WIDTH, EXPERTS = 24, 4


class _Model(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x)


class _Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH)) for _ in range(EXPERTS)
        )


class ExpertsOneByOne(_Experts):
    def forward(self, x: Tensor) -> Tensor:
        weights = self.gate(x).softmax(-1)
        return sum(weights[..., i, None] * expert(x) for i, expert in enumerate(self.experts))


class ExpertsSideBySide(_Experts):
    def forward(self, x: Tensor) -> Tensor:
        answers = torch.stack([expert(x) for expert in self.experts], 1)
        return torch.einsum("bne,bend->bnd", self.gate(x).softmax(-1), answers)


class ExpertsOfChosenTokens(_Experts):
    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, WIDTH)
        weights, chosen = self.gate(tokens).softmax(-1).topk(2, -1)
        out = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            at, rank = (chosen == number).nonzero(as_tuple=True)
            out = out.index_add(0, at, expert(tokens[at]) * weights[at, rank, None])
        return out.view_as(x)


class ExpertsInOneParameter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS)
        self.up, self.down = (nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, WIDTH)
        answers = torch.bmm(F.silu(torch.bmm(tokens.expand(EXPERTS, -1, -1), self.up)), self.down)
        return (answers * self.gate(tokens).softmax(-1).t()[..., None]).sum(0).view_as(x)


class LayersWeighed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.GRU(WIDTH, WIDTH, batch_first=True) for _ in range(3))
        self.gate = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        states, state = [], x
        for layer in self.layers:
            state = layer(state)[0]
            states.append(state)
        return (torch.stack(states, -1) * self.gate(x).softmax(-1)[:, :, None]).sum(-1)


class ClassesOfARecurrentNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.recurrent, self.out = nn.GRU(WIDTH, WIDTH, batch_first=True), nn.Linear(WIDTH, 7)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.recurrent(x)[0]).softmax(-1)


class ClassesOfALinearKernel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.q(x) @ (self.k(x).mT @ self.v(x))).softmax(-1)


class FeaturesWeighed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.out((self.gate(x).softmax(-1) * x).mean(1))


class BranchesOfConvolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=size, dilation=size) for size in (1, 2))
        self.gate = nn.Linear(8, 16)

    def forward(self, x: Tensor) -> Tensor:
        made = torch.stack([branch(x) for branch in self.branches], 1)
        weights = self.gate(made.sum(1).mean((2, 3))).view(-1, 2, 8).softmax(1)
        return (made * weights[..., None, None]).sum(1)


class MixtureOfSoftmaxes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.parts, self.out = nn.Linear(WIDTH, 3), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, 30)

    def forward(self, x: Tensor) -> Tensor:
        answers = self.out(self.parts(x).unflatten(-1, (3, WIDTH)).tanh()).softmax(-1)
        return (self.gate(x).softmax(-1)[..., None] * answers).sum(-2)


class Codebook(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scores, self.entries = nn.Linear(WIDTH, 16), nn.Embedding(16, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.scores(x).softmax(-1) @ self.entries.weight


SILENT = (
    ExpertsOneByOne, ExpertsSideBySide, ExpertsOfChosenTokens, ExpertsInOneParameter, LayersWeighed,
    ClassesOfARecurrentNet, ClassesOfALinearKernel, FeaturesWeighed, MixtureOfSoftmaxes, Codebook,
)  # fmt: skip


class PooledWithoutAMap(nn.Module):
    """The sum is written by hand, and an activation follows it."""

    def __init__(self) -> None:
        super().__init__()
        self.score, self.out = nn.Linear(WIDTH, 1), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh((x * self.score(x).softmax(1)).sum(1)))


class PooledBehindARecurrentNet(nn.Module):
    """Every state is made of all tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.GRU(WIDTH, 12, batch_first=True, bidirectional=True)
        self.score, self.ask = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        states = self.recurrent(x)[0]
        weights = F.softmax(self.ask(torch.tanh(self.score(states))), dim=1)
        return (weights * states).sum(1)


class PooledTokenByToken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.score, self.value = nn.Linear(WIDTH, 1), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        weights, values = self.score(x).softmax(1), self.value(x)
        total = values.new_zeros(len(x), WIDTH)
        for token in range(x.shape[1]):
            total = total + weights[:, token] * values[:, token]
        return total


class PooledPixels(nn.Module):
    """Global context: a map of one channel weighs the pixels of an image."""

    def __init__(self) -> None:
        super().__init__()
        self.score, self.out = nn.Conv2d(8, 1, 1), nn.Conv2d(8, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        weights = self.score(x).flatten(1).softmax(-1)
        return x + self.out((x.flatten(2) * weights[:, None]).sum(-1)[..., None, None])


NAMED = (PooledWithoutAMap, PooledBehindARecurrentNet, PooledTokenByToken, PooledPixels)


def _refusals(module: type[nn.Module], *, has_forward: bool) -> list[str]:
    torch.manual_seed(0)
    model = _Model(module())
    is_of_images = any(isinstance(one, nn.Conv2d) for one in model.modules())
    x = torch.randn(2, 8, 6, 6) if is_of_images else torch.randn(2, 7, WIDTH)
    found = survey(model, forward=(lambda: model(x)) if has_forward else None)
    assert found.layers == ()
    return [one.reason for one in found.refused]


@pytest.mark.parametrize("has_forward", [False, True])
@pytest.mark.parametrize("module", [*SILENT, BranchesOfConvolutions])
def test_a_softmax_over_experts_classes_layers_or_features_is_not_reported(module, has_forward):
    assert _refusals(module, has_forward=has_forward) == []


@pytest.mark.parametrize("has_forward", [False, True])
@pytest.mark.parametrize("module", NAMED)
def test_attention_pooling_without_a_product_of_queries_and_keys_is_refused_for_that(module, has_forward):
    assert _refusals(module, has_forward=has_forward) == [NO_PRODUCTS]


def test_tracing_three_recurrent_layers_in_a_row_takes_less_than_20_seconds():
    start = time.process_time()
    _refusals(LayersWeighed, has_forward=False)
    assert time.process_time() - start < 20  # it took minutes, as each step was followed to the first


def make_attn(width: int) -> nn.Module:
    return nn.Identity()


class ABlockOfConvolutions(nn.Module):
    """A block of a ResNet: its parts are chosen when it is made."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(8, 8, 3, stride=2, padding=1), nn.Conv2d(8, 4, 3, padding=1)
        self.chosen = make_attn(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.chosen(self.first(x))) + x[:, 4:, ::2, ::2]


class KernelsWeighedByAList(nn.Module):
    """A softmax and a product, of inputs that nobody can make up: kernels are weighed, not tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels, self.gate = nn.Parameter(torch.randn(3, WIDTH, WIDTH)), nn.Linear(WIDTH, 3)

    def forward(self, inputs: list[Tensor]) -> Tensor:
        (x,) = inputs
        weights = torch.softmax(self.gate(x.mean(1)), -1)
        return torch.matmul(x, (weights[:, :, None, None] * self.kernels).sum(1))


class _OfAList(_Model):
    def forward(self, x: Tensor) -> Tensor:
        return self.block([x])


def test_a_block_of_convolutions_is_not_taken_for_attention():
    assert _refusals(ABlockOfConvolutions, has_forward=False) == []


def test_a_module_that_computed_no_attention_in_a_forward_is_not_listed():
    model, x = _OfAList(KernelsWeighedByAList()), torch.randn(2, 7, WIDTH)
    assert [one.reason for one in survey(model).refused] == ["it could not be run with synthetic inputs"]
    assert survey(model, forward=lambda: model(x)).refused == ()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UnsupportedAttentionWarning)
        monitor = HeadDiversityMonitor(model)
        monitor.arm()
        model(x)
        with pytest.warns(MonitoringWarning, match="No attention layer was found"):
            monitor.measure(0)
        monitor.close()
