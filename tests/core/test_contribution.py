"""What a head adds to the output and to the loss, against the contributions and losses themselves."""

from __future__ import annotations

import pytest
import torch

from hdi_callback.core import ContributionSums, ImportanceSums, head_slopes
from hdi_callback.errors import ShapeError
from tests.core.tensor_sizes import TensorSizes
from tests.core.test_subspaces import gaussian


@pytest.mark.parametrize("with_bias", [False, True])
def test_contributions_are_those_of_the_heads_one_by_one(with_bias):
    outputs, weight = gaussian(50, 4, 6) + 0.5, gaussian(4, 6, 20, seed=1)
    bias = gaussian(20, seed=2) if with_bias else None
    z = torch.einsum("thi,hid->thd", outputs, weight)
    y = z.sum(1) if bias is None else z.sum(1) + bias
    sums = ContributionSums.of(outputs, weight, bias=bias)
    expected = z.square().sum(-1).mean(0).sqrt() / y.square().sum(-1).mean().sqrt()
    assert torch.allclose(sums.relative, expected, rtol=1e-12)
    assert float(sums.count) == 50


def test_one_head_contributes_everything_and_two_cancelling_heads_more():
    outputs, weight = gaussian(9, 1, 3), gaussian(1, 3, 5, seed=1)
    assert ContributionSums.of(outputs, weight).relative.tolist() == pytest.approx([1])
    against = ContributionSums.of(outputs.expand(9, 2, 3), torch.cat([weight, -0.5 * weight]))
    assert against.relative.tolist() == pytest.approx([2, 1])


def test_pieces_and_padding_add_up_to_one_pass():
    outputs, weight, bias = gaussian(30, 3, 4), gaussian(3, 4, 7, seed=1), gaussian(7, seed=2)
    valid = torch.arange(30) % 3 > 0
    spoiled = outputs.masked_fill(~valid[:, None, None], torch.nan)
    whole = ContributionSums.of(outputs[valid], weight, bias=bias)
    pieces = ContributionSums.of(spoiled[:11], weight, bias=bias, valid=valid[:11]) + ContributionSums.of(
        spoiled[11:], weight, bias=bias, valid=valid[11:]
    )
    for name in ("count", "heads", "output", "relative"):
        assert torch.allclose(getattr(whole, name), getattr(pieces, name), rtol=1e-12)
    assert ContributionSums.of(outputs[:0], weight).relative.isnan().all()


def test_no_tensor_of_tokens_heads_and_features_is_formed():
    outputs, weight = torch.randn(64, 8, 4), torch.randn(8, 4, 256)
    with TensorSizes() as sizes:
        ContributionSums.of(outputs, weight)
    assert sizes.largest <= 64 * 256


def test_importance_is_the_slope_of_the_loss_in_a_factor_on_the_head():
    outputs, weight, target = gaussian(20, 3, 4), gaussian(3, 4, 5, seed=1), gaussian(20, 5, seed=2)

    def loss(gate):
        y = torch.einsum("thi,hid->td", outputs * gate[:, None], weight)
        return (torch.tanh(y) - target).square().mean()

    gate = torch.ones(3, dtype=torch.float64, requires_grad=True)
    loss(gate).backward()
    leaf = outputs.clone().requires_grad_()
    (torch.tanh(torch.einsum("thi,hid->td", leaf, weight)) - target).square().mean().backward()
    sums = ImportanceSums.of(outputs, leaf.grad)
    assert torch.allclose(sums.slope, gate.grad)
    assert torch.allclose(sums.importance, gate.grad.abs())
    step = 1e-6
    for lost in ([0], [2], [0, 2]):
        less = torch.ones(3, dtype=torch.float64)
        less[lost] -= step
        change = float(loss(less) - loss(torch.ones(3, dtype=torch.float64))) / step
        cost = sums.cost[lost[0]] if len(lost) == 1 else sums.pair_cost[lost[0], lost[1]]
        assert change == pytest.approx(float(cost), rel=1e-4)
    assert torch.allclose(sums.pair_cost.diagonal(), sums.cost)


def test_importance_is_taken_sequence_by_sequence_for_one_head_and_for_two():
    outputs, gradients = gaussian(6, 7, 3, 4), gaussian(6, 7, 3, 4, seed=1)
    slopes = (outputs * gradients).sum((1, 3))
    assert torch.allclose(head_slopes(outputs, gradients), slopes)
    sums = ImportanceSums.of(outputs[:2], gradients[:2]) + ImportanceSums.of(outputs[2:], gradients[2:])
    assert torch.allclose(sums.slope, slopes.sum(0))
    assert torch.allclose(sums.importance, slopes.abs().sum(0))
    assert torch.allclose(sums.pairs[0, 2], (slopes[:, 0] + slopes[:, 2]).abs().sum())
    assert torch.equal(sums.pairs, sums.pairs.mT)


def test_importance_in_chunks_is_that_of_one_pass(monkeypatch):
    outputs, gradients = gaussian(6, 7, 3, 4), gaussian(6, 7, 3, 4, seed=1)
    whole = ImportanceSums.of(outputs, gradients)
    monkeypatch.setattr("hdi_callback.core.contribution._CHUNK", 20)
    with TensorSizes() as sizes:
        pieces = ImportanceSums.of(outputs, gradients)
    assert torch.allclose(whole.slope, pieces.slope)
    assert torch.allclose(whole.pairs, pieces.pairs)
    assert sizes.largest <= 6 * 3 * 4


def test_pairs_of_heads_are_summed_within_the_size_limit_of_a_chunk(monkeypatch):
    slopes = gaussian(40, 3)
    monkeypatch.setattr("hdi_callback.core.contribution._CHUNK", 20)
    with TensorSizes() as sizes:
        sums = ImportanceSums.of_slopes(slopes)
    assert torch.allclose(sums.pairs[0, 2], (slopes[:, 0] + slopes[:, 2]).abs().sum())
    assert sizes.largest <= 20


def test_tokens_without_a_gradient_may_hold_nan():
    outputs, gradients = gaussian(2, 5, 3, 4), gaussian(2, 5, 3, 4, seed=1)
    gradients[0, 3:] = 0
    spoiled = outputs.clone()
    spoiled[0, 3:] = torch.nan
    assert torch.equal(ImportanceSums.of(outputs, gradients).pairs, ImportanceSums.of(spoiled, gradients).pairs)


def test_the_cost_of_a_head_is_exact_for_a_linear_loss():
    outputs, direction = gaussian(10, 2, 3), gaussian(2, 3, seed=1)
    sums = ImportanceSums.of(outputs, direction.expand(10, 2, 3))
    loss = (outputs * direction).sum()
    without = (outputs[:, 1] * direction[1]).sum()
    assert float(sums.cost[0]) == pytest.approx(float(without - loss))
    assert float(sums.pair_cost[0, 1]) == pytest.approx(float(-loss))


def test_half_precision_is_added_up_in_single():
    outputs, gradients = gaussian(4000, 2, 3).half(), gaussian(4000, 2, 3, seed=1).half()
    expected = (outputs.double() * gradients.double()).sum((0, 2))
    assert torch.allclose(ImportanceSums.of(outputs, gradients).slope.double(), expected, rtol=1e-4)
    weight = gaussian(2, 3, 5).half()
    exact = ContributionSums.of(outputs.double(), weight.double()).relative
    assert torch.allclose(ContributionSums.of(outputs, weight).relative.double(), exact, rtol=1e-5)


def test_shapes_that_do_not_belong_together_are_refused():
    outputs = gaussian(5, 2, 3)
    with pytest.raises(ShapeError, match="must agree"):
        ContributionSums.of(outputs, gaussian(3, 3, 4))
    with pytest.raises(ShapeError, match="one entry for each of 5 tokens"):
        ContributionSums.of(outputs, gaussian(2, 3, 4), valid=torch.ones(4, dtype=torch.bool))
    with pytest.raises(ShapeError, match="have one shape"):
        ImportanceSums.of(outputs, outputs[:4])
