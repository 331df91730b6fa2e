"""The gradient of the penalty against autograd, written out."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hdi_callback.core import head_diversity, qk_circuits
from hdi_callback.errors import MisconfigurationError
from hdi_callback.interventions import DiversityPenalty
from tests.interventions.training import Attention, Model, Open, alert, copy_head, reading


def mean_overlap(weight: torch.Tensor) -> torch.Tensor:
    """The mean over all pairs of heads of tr(P_h P_g) / d_k, by projectors P = W^T (W W^T)^-1 W."""
    projectors = torch.linalg.pinv(weight) @ weight
    H, k = weight.shape[:2]
    traces = torch.einsum("hij,gji->hg", projectors, projectors) / k
    return (traces.sum() - traces.trace()) / (H * (H - 1))


def mean_cosine(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """The mean over all pairs of heads of the squared cosine of their d x d products."""
    products = torch.einsum("hki,hkj->hij", query.double(), key.double()).flatten(1)
    cosines = F.cosine_similarity(products[:, None], products[None], dim=-1).square()
    H = len(query)
    return (cosines.sum() - cosines.trace()) / (H * (H - 1))


def active(model, *optimizers, layers=("blocks.1",), scale=1.0, **options):
    penalty = DiversityPenalty(**options)
    penalty.bind(Open(model, *optimizers, scale=scale))
    penalty.handle(reading(alert(dict.fromkeys(layers, ()))))
    return penalty


@pytest.mark.parametrize("measure", ["subspace", "circuit"])
@pytest.mark.parametrize("steps", [1, 3], ids=["at once", "accumulated"])
def test_the_gradient_is_that_of_the_penalty_in_the_loss(steps, measure):
    torch.manual_seed(0)
    model = Model()
    by_hand = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    penalty = active(model, optimizer, weight=0.7, measure=measure)
    for seed in range(steps):
        for one in (model, by_hand):
            (one.loss(seed) / steps).backward()
    layer = by_hand.layers()["blocks.1"]
    own = (
        mean_overlap(layer.weight("key"))
        if measure == "subspace"
        else mean_cosine(layer.weight("query"), layer.weight("key"))
    )
    (0.7 * own).backward()
    penalty.before_optimizer_step(optimizer)
    for one, other in zip(model.parameters(), by_hand.parameters()):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-3, atol=1e-6)  # apart by the ridge of the penalty


def test_scaled_gradients_get_a_scaled_penalty_and_other_layers_none():
    gradients = []
    for scale in (1.0, 1024.0):
        torch.manual_seed(0)
        model = Model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        active(model, optimizer, scale=scale).before_optimizer_step(optimizer)
        assert [name for name, one in model.named_parameters() if one.grad is not None] == ["blocks.1.k_proj.weight"]
        gradients.append(model.blocks[1].k_proj.weight.grad)
    torch.testing.assert_close(1024 * gradients[0], gradients[1])


def test_it_works_where_gradients_are_switched_off_as_in_a_hook():
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    penalty = active(model, optimizer)
    with torch.no_grad():
        penalty.before_optimizer_step(optimizer)
    assert model.blocks[1].k_proj.weight.grad.abs().max() > 0


def test_frozen_parameters_and_those_of_other_optimizers_are_skipped():
    model = Model()
    model.blocks[0].k_proj.weight.requires_grad_(False)
    one, other = (torch.optim.SGD(block.parameters(), lr=0.1) for block in model.blocks)
    penalty = active(model, one, other, layers=("blocks.0", "blocks.1"))
    penalty.before_optimizer_step(one)
    assert all(parameter.grad is None for parameter in model.parameters())
    penalty.before_optimizer_step(other)
    assert [name for name, item in model.named_parameters() if item.grad is not None] == ["blocks.1.k_proj.weight"]


@pytest.mark.parametrize("measure", ["subspace", "circuit"])
@pytest.mark.parametrize("kind", ["copies", "one subspace"])
def test_exact_clones_are_separated_without_drawing_global_random_numbers(kind, measure):
    torch.manual_seed(0)
    model = Model(depth=1)
    layer = model.layers()["blocks.0"]
    copy_head(layer, 0, 2)
    if kind == "one subspace":  # W_Q -> A^-T W_Q, W_K -> A W_K leaves scores as they are
        turn = torch.linalg.qr(torch.randn(16, 16)).Q
        with torch.no_grad():
            for role in ("query", "key"):
                layer.weight(role)[2] = turn @ layer.weight(role)[0]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    penalty = active(model, optimizer, layers=("blocks.0",), weight=1.0, measure=measure)
    state, before = torch.get_rng_state(), layer.weight("key").detach().clone()
    for step in range(300):
        optimizer.zero_grad()
        penalty.before_optimizer_step(optimizer)
        if step == 0:
            assert torch.equal(layer.weight("key"), before)
        optimizer.step()
    assert torch.equal(torch.get_rng_state(), state)
    if measure == "subspace":
        assert float(head_diversity(layer.weight("key")).subspace.overlap[0, 2]) < 0.7
    else:
        assert float(qk_circuits(layer.weight("query"), layer.weight("key")).cosine[0, 2]) < 0.7


def test_weights_that_are_not_finite_get_no_gradient():
    model = Model()
    with torch.no_grad():
        model.blocks[1].k_proj.weight[0, 0] = torch.nan
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.blocks[1].k_proj.weight.grad = torch.ones_like(model.blocks[1].k_proj.weight)
    active(model, optimizer).before_optimizer_step(optimizer)
    assert torch.equal(model.blocks[1].k_proj.weight.grad, torch.ones_like(model.blocks[1].k_proj.weight))


def test_a_rank_that_fails_keeps_all_ranks_from_adding():
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    penalty = active(model, optimizer)
    penalty.training.max_over_ranks = lambda tensors: [torch.ones_like(one) for one in tensors]  # another has failed
    penalty.before_optimizer_step(optimizer)
    assert not model.blocks[1].k_proj.weight.grad.any()


def test_grouped_keys_are_pushed_apart():
    model = Model(lambda: Attention(64, 8, 2), depth=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for measure, names in (("subspace", ["k_proj"]), ("circuit", ["q_proj", "k_proj"])):
        optimizer.zero_grad()
        active(model, optimizer, layers=("blocks.0",), measure=measure).before_optimizer_step(optimizer)
        with_gradient = [
            name.split(".")[2] for name, item in model.named_parameters() if item.grad is not None and item.grad.any()
        ]
        assert with_gradient == names


def test_layers_without_query_weights_are_refused_before_training_where_circuits_are_meant():
    model = Model()
    training = Open(model)
    del training.layers["blocks.0"].weights["query"]
    DiversityPenalty().bind(training)
    with pytest.raises(MisconfigurationError, match=r"cannot act on `blocks.0`: it has no query weight.*exclude="):
        DiversityPenalty(measure="circuit").bind(training)


def test_it_begins_and_ends_with_alerts_and_says_so():
    model = Model()
    penalty = DiversityPenalty()
    penalty.bind(Open(model, torch.optim.SGD(model.parameters(), lr=0.1)))
    said = []
    for record in (
        reading(alert()),
        reading(alert(), alert("blocks.1", step=150)),
        reading(alert("blocks.1", step=150)),
        reading(),
    ):
        said += [action.message for action in penalty.handle(record)]
    assert said == [
        "began to push the key heads apart (weight 0.1) in blocks.0",
        "began to push the key heads apart (weight 0.1) in blocks.1",
        "stopped pushing the heads apart in blocks.0",
        "stopped pushing the heads apart in blocks.1",
    ]
    assert isinstance(model, nn.Module)
