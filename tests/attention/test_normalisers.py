"""What makes weights of scores in place of a softmax: heads, the card, and the name, against published functions."""

from __future__ import annotations

from collections.abc import Callable

import entmax
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hdi_callback import check
from hdi_callback.attention.find import survey
from tests.attention.by_hand import B, C, D, T, between, truth_of_four

ONE = "weights that add up to one"
RELU, SQUARED = "ReLU over its sum", "squared ReLU over its sum"
LATER = torch.ones(T, T, dtype=torch.bool).triu(1)


def over_its_sum(x: Tensor) -> Tensor:
    return x / x.sum(-1, keepdim=True).clamp_min(1e-9)


def sparsemax(x: Tensor) -> Tensor:
    ordered = x.sort(-1, descending=True)[0]
    sums, count = ordered.cumsum(-1) - 1, torch.arange(1, x.shape[-1] + 1)
    size = (count * ordered > sums).sum(-1, keepdim=True)
    return (x - sums.gather(-1, size - 1) / size).clamp(min=0)


def changed_in_place(x: Tensor) -> Tensor:
    relu = x.relu_()
    return relu.div_(relu.sum(-1, keepdim=True) + 1e-6)


NORMALISERS: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "entmax": (lambda x: entmax.entmax15(x, -1), "entmax of order 1.5"),
    "entmax as a module": (entmax.Entmax15(-1), "entmax of order 1.5"),
    "entmax by bisection": (lambda x: entmax.entmax_bisect(x, 1.5), "entmax of order 1.5"),
    "entmax of another order": (lambda x: entmax.entmax_bisect(x, 1.25), ONE),
    "normmax": (lambda x: entmax.normmax_bisect(x, 2), ONE),
    "sparsemax": (lambda x: entmax.sparsemax(x, -1), "sparsemax"),
    "sparsemax by bisection": (entmax.sparsemax_bisect, "sparsemax"),
    "sparsemax written out": (sparsemax, "sparsemax"),
    "ReLU": (lambda x: over_its_sum(x.relu()), RELU),
    "ReLU, normalised by torch": (lambda x: F.normalize(x.relu(), p=1, dim=-1), RELU),
    "ReLU in place": (changed_in_place, RELU),
    "squared ReLU": (lambda x: over_its_sum(x.relu() ** 2), SQUARED),
    "sigmoid over its sum": (lambda x: over_its_sum(x.sigmoid()), "sigmoid over its sum"),
    "softplus over its sum": (lambda x: over_its_sum(F.softplus(x)), ONE),
    "square over its sum": (lambda x: over_its_sum(x.square()), ONE),
}


def attention(function: Callable[[Tensor], Tensor], *, causal: bool = False, dropout: float = 0.0) -> nn.Module:
    def attend(m: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.mT / D**0.5
        scores = scores.masked_fill(LATER, -1e9) if causal else scores
        return F.dropout(function(scores), dropout, m.training) @ v

    torch.manual_seed(0)
    return between(attend)


@pytest.mark.parametrize("causal", [False, True], ids=["all keys", "causal"])
@pytest.mark.parametrize("name", NORMALISERS)
def test_heads_and_name_are_known_by_what_is_done_to_scores(name, causal):
    function, said = NORMALISERS[name]
    module = attention(function, causal=causal, dropout=0.1)
    x = torch.randn(B, T, C)
    found = survey(module, lambda: module(x))
    assert not found.refused
    for role, expected in truth_of_four(module).items():
        assert torch.equal(found.layers[0].weight(role), expected)
    assert found.layers[0].kind.endswith(f"{said} in place of a softmax")
    verdict = check(module, lambda: module(x))
    assert verdict.cards[0].lines["softmax"] == f"none: {said}, over keys; dropout 0.1 behind it"
    assert verdict.cards[0].is_causal == causal
    leaks = causal and name == "square over its sum"  # the square of a mask of -1e9 is the largest of all
    assert [finding.name for finding in verdict.findings] == (["later tokens"] if leaks else [])


@pytest.mark.parametrize("name", ["entmax", "ReLU"])
def test_trying_what_makes_weights_moves_no_random_state_and_no_gradient(name):
    module, x = attention(NORMALISERS[name][0], dropout=0.1), torch.randn(B, T, C)

    def trained(run: Callable[[], object]) -> tuple[Tensor, Tensor]:
        torch.manual_seed(1)
        module.zero_grad()
        run()
        module(x).square().mean().backward()
        return module.k.weight.grad.clone(), torch.get_rng_state()

    plain = trained(lambda: None)  # `survey` puts back what its own forward draws
    ours = trained(lambda: survey(module, lambda: module(x)))
    assert torch.equal(plain[0], ours[0])
    assert torch.equal(plain[1], ours[1])


def test_a_learned_order_of_entmax_is_taken_as_it_is():
    module = between(
        lambda m, q, k, v: entmax.entmax_bisect(q @ k.mT / D**0.5, 1 + m.order.sigmoid()) @ v,
        order=nn.Parameter(torch.zeros(4, 1, 1)),
    )
    layer = survey(module, lambda: module(torch.randn(B, T, C))).layers[0]
    assert layer.kind.endswith("entmax of order 1.5 in place of a softmax")
