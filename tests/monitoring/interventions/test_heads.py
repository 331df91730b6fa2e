"""Interventions on the heads: gradients against autograd, and functions before and after."""

from __future__ import annotations

import copy
import re

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hdi_callback import find_attention
from hdi_callback.core import diversity_penalty, head_diversity, qk_circuits
from hdi_callback.errors import MisconfigurationError
from hdi_callback.monitoring.alerts import Alert, Finding
from hdi_callback.monitoring.interventions import DiversityPenalty, ReviveHeads
from tests.attention.models import Grouped as LlamaLike
from tests.experiments.collapse.models import Attention as GroupedAttention
from tests.experiments.collapse.models import Shape
from tests.models import Classifier
from tests.monitoring.interventions.training import Open, alert


def batch(seed: int = 0, rows: int = 8):
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(16, (rows, 12), generator=draw), torch.randint(5, (rows,), generator=draw)


def classifier(seed: int = 0) -> Classifier:
    torch.manual_seed(seed)
    return Classifier()


def key_heads(model: Classifier, block: int = 0) -> torch.Tensor:
    return model.blocks[block].attn.k_proj.weight.unflatten(0, (4, 8))


def mean_overlap(weight: torch.Tensor) -> torch.Tensor:
    """The mean over all pairs of heads of tr(P_h P_g) / d_k, by projectors P = W^T (W W^T)^-1 W."""
    projectors = torch.linalg.pinv(weight) @ weight  # (H, d, d)
    H, k = weight.shape[:2]
    traces = torch.einsum("hij,gji->hg", projectors, projectors) / k
    return (traces.sum() - traces.trace()) / (H * (H - 1))


# --- the penalty


@pytest.mark.parametrize("steps", [1, 3], ids=["at once", "accumulated"])
@pytest.mark.parametrize("clip", [None, 0.05], ids=["free", "clipped"])
def test_the_gradient_is_that_of_the_penalty_in_the_loss(steps, clip):
    model, by_hand = classifier(), classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    penalty = DiversityPenalty(0.7, roles=["key", "query"])
    penalty.attach(Open(model, optimizer))
    penalty.answer(alert("blocks.1.attn"))
    for seed in range(steps):
        tokens, label = batch(seed)
        (F.cross_entropy(model(tokens), label) / steps).backward()
        (F.cross_entropy(by_hand(tokens), label) / steps).backward()
    attn = by_hand.blocks[1].attn
    sum(0.7 * mean_overlap(linear.weight.unflatten(0, (4, 8))) for linear in (attn.k_proj, attn.q_proj)).backward()
    penalty.before_optimizer_step(optimizer)
    if clip is not None:
        norms = [nn.utils.clip_grad_norm_(each.parameters(), clip) for each in (model, by_hand)]
        assert norms[0] == pytest.approx(float(norms[1]), rel=1e-6)
    for left, right in zip(model.parameters(), by_hand.parameters()):
        torch.testing.assert_close(left.grad, right.grad, rtol=1e-3, atol=1e-6)  # apart by the ridge of the penalty


def test_scaled_gradients_get_a_scaled_penalty():
    grads = []
    for scale in (1.0, 1024.0):
        model = classifier()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        penalty = DiversityPenalty()
        penalty.attach(Open(model, optimizer, scale=scale))
        penalty.answer(alert())
        penalty.before_optimizer_step(optimizer)
        grads.append(model.blocks[0].attn.k_proj.weight.grad)
        assert model.blocks[1].attn.k_proj.weight.grad is None
        assert model.blocks[0].attn.v_proj.weight.grad is None
    torch.testing.assert_close(1024 * grads[0], grads[1])


def test_the_penalty_skips_frozen_parameters_and_those_of_other_optimizers():
    model = classifier()
    first, second = model.blocks[0].attn, model.blocks[1].attn
    first.k_proj.weight.requires_grad_(False)
    one, other = torch.optim.SGD(first.parameters(), lr=0.1), torch.optim.SGD(second.parameters(), lr=0.1)
    penalty = DiversityPenalty()
    penalty.attach(Open(model, one, other))
    penalty.answer(alert("blocks.0.attn"))
    penalty.answer(alert("blocks.1.attn"))
    penalty.before_optimizer_step(one)
    assert [parameter.grad for parameter in model.parameters() if parameter.grad is not None] == []
    penalty.before_optimizer_step(other)
    assert [name for name, item in model.named_parameters() if item.grad is not None] == ["blocks.1.attn.k_proj.weight"]


@pytest.mark.some_slow(quick=1)
@pytest.mark.parametrize("kind", ["copies", "one subspace"])
def test_the_penalty_separates_exact_clones_without_drawing_global_random_numbers(kind):
    model = classifier()
    with torch.no_grad():
        turn = torch.eye(8) if kind == "copies" else torch.randn(8, 8)
        key_heads(model)[2] = turn @ key_heads(model)[0]
    plain = torch.autograd.grad(diversity_penalty(key_heads(model)), model.blocks[0].attn.k_proj.weight)[0]
    heads = plain.unflatten(0, (4, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    penalty = DiversityPenalty(1.0)
    penalty.attach(Open(model, optimizer))
    penalty.answer(alert())
    state, weights = torch.get_rng_state(), key_heads(model).detach().clone()
    before = float(head_diversity(weights).overlap[0, 2])
    assert before > 1 - 1e-4
    for step in range(200):
        optimizer.zero_grad()
        penalty.before_optimizer_step(optimizer)
        if step == 0:
            assert torch.equal(key_heads(model), weights)
        optimizer.step()
    assert torch.equal(torch.get_rng_state(), state)
    assert float(head_diversity(key_heads(model)).overlap[0, 2]) < 0.7
    assert heads.isfinite().all()


def circuit_cosines(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Cosines of the d x d products of each query head with its key head, written out."""
    products = torch.einsum("hki,hkj->hij", query.double(), key.double()).flatten(1)
    return F.cosine_similarity(products[:, None], products[None], dim=-1)


def test_the_gradient_of_the_circuits_is_that_of_the_products_written_out():
    model, by_hand = classifier(), classifier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    penalty = DiversityPenalty(0.7, measure="circuit")
    penalty.attach(Open(model, optimizer))
    penalty.answer(alert("blocks.1.attn"))
    penalty.before_optimizer_step(optimizer)
    attn = by_hand.blocks[1].attn
    cosines = circuit_cosines(*(linear.weight.unflatten(0, (4, 8)) for linear in (attn.q_proj, attn.k_proj)))
    (0.7 * (cosines.square().sum() - 4) / 12).backward()
    for name in ("q_proj", "k_proj"):
        left, right = (getattr(each.blocks[1].attn, name).weight.grad for each in (model, by_hand))
        torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-8)
    assert model.blocks[1].attn.v_proj.weight.grad is None


@pytest.mark.some_slow(quick=1)
@pytest.mark.parametrize("groups", [4, 2, 1], ids=["own keys", "grouped", "multi-query"])
def test_the_circuit_penalty_separates_heads_with_equal_scores(groups):
    torch.manual_seed(0)
    model = nn.Sequential(LlamaLike(key_heads=groups))
    (layer,) = find_attention(model)
    with torch.no_grad():  # key heads 0 and 1 share a group, or are made alike
        layer.weight("query")[1] = layer.weight("query")[0]
        if groups == 4:
            layer.weight("key")[1] = layer.weight("key")[0]

    def cosine() -> float:
        key = layer.weight("key").detach()
        return float(circuit_cosines(layer.weight("query").detach(), key.repeat_interleave(4 // groups, 0))[0, 1])

    assert cosine() > 1 - 1e-6
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    penalty = DiversityPenalty(1.0, measure="circuit")
    penalty.attach(Open(model, optimizer))
    penalty.answer(alert(layer.name))
    state = torch.get_rng_state()
    for _ in range(300):
        optimizer.zero_grad()
        penalty.before_optimizer_step(optimizer)
        optimizer.step()
    assert torch.equal(torch.get_rng_state(), state)
    assert cosine() < 0.5


def test_the_circuit_penalty_refuses_roles():
    with pytest.raises(MisconfigurationError, match="leave `roles` out"):
        DiversityPenalty(roles=["value"], measure="circuit")
    with pytest.raises(MisconfigurationError, match="`measure` of DiversityPenalty"):
        DiversityPenalty(measure="kernel")


def test_clones_get_equal_gradients_without_noise():
    weight = torch.randn(4, 8, 32, generator=torch.Generator().manual_seed(0))
    weight[2] = weight[0]
    weight.requires_grad_()
    (gradient,) = torch.autograd.grad(diversity_penalty(weight), weight)
    torch.testing.assert_close(gradient[2], gradient[0])


def test_weights_that_are_not_finite_get_no_gradient():
    model = classifier()
    with torch.no_grad():
        key_heads(model)[1, 0, 0] = float("nan")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    penalty = DiversityPenalty()
    penalty.attach(Open(model, optimizer))
    penalty.answer(alert())
    penalty.before_optimizer_step(optimizer)
    assert not model.blocks[0].attn.k_proj.weight.grad.any()


# --- revival


class Wrapped(nn.Module):
    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.attn = attention

    def forward(self, x):
        out = self.attn(x, x, x) if isinstance(self.attn, nn.MultiheadAttention) else self.attn(x)
        return out[0] if isinstance(out, tuple) else out


def make(kind: str) -> Wrapped:
    torch.manual_seed(0)
    if kind == "packed":
        return Wrapped(nn.MultiheadAttention(32, 4, bias=False, batch_first=True))
    if kind == "grouped":
        return Wrapped(GroupedAttention(Shape(heads=8, key_heads=4, width=64)))
    if kind == "many":
        return Wrapped(GroupedAttention(Shape(heads=4, key_heads=4, width=64)))
    raise AssertionError(kind)


def make_clones(layer, first: int, second: int) -> None:
    group = layer.num_heads // layer.num_key_heads
    with torch.no_grad():
        for role in ("key", "value"):
            layer.weight(role)[second] = layer.weight(role)[first]
        for member in range(group):
            layer.weight("query")[second * group + member] = layer.weight("query")[first * group + member]


@pytest.mark.parametrize("kind", ["packed", "grouped", "many"])
def test_a_revived_clone_gets_a_new_subspace_and_the_layer_output_is_unchanged(kind):
    model = make(kind)
    (layer,) = find_attention(model)
    make_clones(layer, 1, 3)
    x = torch.randn(4, 9, layer.weight("key").shape[-1])
    with torch.no_grad():
        before = model(x)
    revive = ReviveHeads()
    revive.attach(Open(model, torch.optim.AdamW(model.parameters())))
    state = torch.get_rng_state()
    action = revive.answer(alert("attn", rule="worst pair", heads=(1, 3)))
    assert torch.equal(torch.get_rng_state(), state)
    with torch.no_grad():
        after = model(x)
    torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-6)
    assert float(head_diversity(layer.weight("key")).worst) < 0.7
    assert action.facts["lost"] < 1e-5
    assert set(action.facts["heads"]) | {action.facts["stays"]} == {1, 3}
    left = action.facts["heads"][0]
    group = layer.num_heads // layer.num_key_heads
    assert not layer.weight("output")[left * group : (left + 1) * group].any()
    norms = layer.weight("key").detach().norm(dim=(1, 2))
    assert float(norms[left]) == pytest.approx(float(norms.mean()), rel=0.3)


@pytest.mark.parametrize("kind", [LlamaLike, lambda: nn.MultiheadAttention(32, 4, batch_first=True)])
def test_the_bias_contribution_of_a_revived_head_moves_to_the_output_bias(kind):
    torch.manual_seed(0)
    model = Wrapped(kind())
    (layer,) = find_attention(model)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter)
    make_clones(layer, 0, 1)
    attn = layer.module
    with torch.no_grad():  # so that both attend alike; what they add differs
        queries = attn.in_proj_bias[:32] if isinstance(attn, nn.MultiheadAttention) else attn.q_proj.bias
        group = layer.num_heads // layer.num_key_heads
        queries.view(layer.num_key_heads, group, -1)[1] = queries.view(layer.num_key_heads, group, -1)[0]
    x = torch.randn(4, 9, 32)
    with torch.no_grad():
        before = model(x)
    revive = ReviveHeads()
    revive.attach(Open(model))
    revive.answer(alert("attn", rule="worst pair", heads=(0, 1)))
    with torch.no_grad():
        torch.testing.assert_close(model(x), before, rtol=1e-4, atol=1e-5)
    assert float(head_diversity(layer.weight("key")).worst) < 0.7


def test_the_clone_that_contributes_more_is_kept():
    model = make("many")
    (layer,) = find_attention(model)
    make_clones(layer, 1, 3)
    with torch.no_grad():
        layer.weight("output")[1] *= 0.1
    revive = ReviveHeads()
    revive.attach(Open(model))
    assert revive.answer(alert("attn", rule="worst pair", heads=(1, 3))).facts["stays"] == 3


def test_the_revived_head_learns_again():
    model = make("many")
    (layer,) = find_attention(model)
    make_clones(layer, 1, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    revive = ReviveHeads()
    revive.attach(Open(model, optimizer))
    (head,) = revive.answer(alert("attn", rule="worst pair", heads=(1, 3))).facts["heads"]
    start = layer.weight("key")[head].detach().clone()
    for seed in range(5):
        x = torch.randn(4, 9, 64, generator=torch.Generator().manual_seed(seed))
        model(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert layer.weight("output")[head].any()
    assert not torch.allclose(layer.weight("key")[head], start)


@pytest.mark.parametrize("kind", ["packed", "grouped"])
def test_only_the_optimizer_state_of_the_revived_head_is_reset(kind):
    model = make(kind)
    (layer,) = find_attention(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(torch.randn(4, 9, layer.weight("key").shape[-1])).square().sum().backward()
    optimizer.step()
    make_clones(layer, 1, 3)
    before = {id(p): {k: v.clone() for k, v in optimizer.state[p].items()} for p in model.parameters()}
    revive = ReviveHeads()
    revive.attach(Open(model, optimizer))
    (head,) = revive.answer(alert("attn", rule="worst pair", heads=(1, 3))).facts["heads"]
    group = layer.num_heads // layer.num_key_heads
    with torch.no_grad():  # look at the state through the layer's own eyes: put it in place of the weights
        for name in ("exp_avg", "exp_avg_sq"):
            for parameter in model.parameters():
                parameter.data.copy_(optimizer.state[parameter][name])
            after = {role: layer.weight(role).clone() for role in ("query", "key", "value", "output")}
            for parameter in model.parameters():
                parameter.data.copy_(before[id(parameter)][name])
            for role, width in (("query", group), ("key", 1), ("output", group)):
                old = layer.weight(role)
                gone = slice(head * width, (head + 1) * width)
                assert not after[role][gone].any(), role
                keep = torch.ones(len(old), dtype=torch.bool)
                keep[gone] = False
                assert torch.equal(after[role][keep], old[keep]), role
            assert torch.equal(after["value"], layer.weight("value"))


def test_all_but_one_of_equal_heads_are_revived():
    model = make("many")
    (layer,) = find_attention(model)
    for head in (1, 2, 3):
        make_clones(layer, 0, head)
    revive = ReviveHeads(rules=["tied heads"])
    revive.attach(Open(model))
    action = revive.answer(alert("attn", rule="tied heads"))
    assert len(action.facts["heads"]) == 3
    assert float(head_diversity(layer.weight("key")).worst) < 1e-6, "four heads of 16 in 64 dimensions fit"


@pytest.mark.some_slow(quick=2)
@pytest.mark.parametrize("dry_run", [False, True])
@pytest.mark.parametrize("kind", ["packed", "grouped", "many"])
def test_a_head_that_shares_only_its_keys_is_not_revived_and_the_action_says_so(kind, dry_run):
    model = make(kind)
    (layer,) = find_attention(model)
    with torch.no_grad():
        layer.weight("key")[3] = layer.weight("key")[1]
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    revive = ReviveHeads(dry_run=dry_run)
    revive.attach(Open(model))
    action = revive.answer(alert("attn", rule="worst pair", heads=(1, 3)))
    assert action.is_refusal
    assert 0.5 < action.facts["lost"] <= 1
    assert re.search(
        r"left head [13] as it is: head [13] would replace the output with a relative error of about \d+ %, "
        r"above max_output_error=0.1",
        action.message,
    )
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert revive.count == 0, "a refusal is not counted"


def test_the_action_states_the_output_error_of_an_incomplete_handover():
    model = make("many")
    (layer,) = find_attention(model)
    with torch.no_grad():
        layer.weight("key")[3] = layer.weight("key")[1]
    revive = ReviveHeads(max_output_error=1)
    revive.attach(Open(model))
    action = revive.answer(alert("attn", rule="worst pair", heads=(1, 3)))
    assert 0.5 < action.facts["lost"] <= 1
    head = f"head {action.facts['stays']}"
    said = rf"; {head} now adds to the output what it added, with a relative error of about \d+ %, as {head} attends"
    assert re.search(rf"{said} or writes differently \(max_output_error=1 allows it\)", action.message)


def test_the_action_states_a_complete_handover():
    model = make("many")
    (layer,) = find_attention(model)
    with torch.no_grad():
        for role in ("query", "key", "value"):
            layer.weight(role)[3] = layer.weight(role)[1]
    revive = ReviveHeads()
    revive.attach(Open(model))
    action = revive.answer(alert("attn", rule="worst pair", heads=(1, 3)))
    assert action.facts["lost"] < 0.005
    assert "now adds to the output what it added (worst pair" in action.message


@pytest.mark.some_slow(quick=4)
@pytest.mark.parametrize("kind", ["packed", "grouped", "many"])
@pytest.mark.parametrize("gain", [0.5, 1.0, 2.0, 3.0])  # scores with a spread from 0.1 to 5
@pytest.mark.parametrize(
    ("role", "noise"),
    [("key", 0.0), ("key", 0.03), ("key", 0.3), ("query", 0.1), ("query", 10.0), ("value", 0.05), ("value", 10.0)],
)
def test_the_estimated_error_bounds_the_real_change_of_the_output(kind, gain, role, noise):
    model = make(kind)
    (layer,) = find_attention(model)
    with torch.no_grad():
        layer.weight("query").mul_(gain)
        layer.weight("key").mul_(gain)
        make_clones(layer, 1, 3)
        weight = layer.weight(role)
        group = len(weight) // layer.num_key_heads
        weight[3 * group : 4 * group] += noise * weight.std() * torch.randn_like(weight[3 * group : 4 * group])
        x = torch.randn(16, 128, layer.weight("key").shape[-1])
        before = model(x)
    untouched = copy.deepcopy(model)
    revive = ReviveHeads(max_output_error=1)
    revive.attach(Open(model))
    action = revive.answer(alert("attn", rule="worst pair", heads=(1, 3)))
    (head,), estimate = action.facts["heads"], action.facts["lost"]
    with torch.no_grad():
        (old,) = find_attention(untouched)
        group = old.num_heads // old.num_key_heads
        old.weight("output")[head * group : (head + 1) * group] = 0
        contributed = before - untouched(x)
        lost = float((model(x) - before).norm() / contributed.norm())
    assert min(lost, 1) <= 1.1 * estimate + 1e-5
    if role == "value":  # both attend alike, and nothing is estimated but the values
        assert estimate <= 1.15 * lost + 1e-5
    elif gain == 2.0:  # scores that look at something
        assert estimate <= 2 * lost + 1e-5


class Sinks(GroupedAttention):
    """Has something of its own for each head besides the projections."""

    def __init__(self) -> None:
        super().__init__(Shape(heads=4, key_heads=4, width=64))
        self.sinks = nn.Parameter(torch.arange(4.0))


@pytest.mark.parametrize("differs", [True, False])
def test_heads_with_different_learned_sinks_are_not_revived(differs):
    torch.manual_seed(0)
    model = Wrapped(Sinks())
    (layer,) = find_attention(model)
    make_clones(layer, 1, 3)
    if not differs:
        nn.init.zeros_(model.attn.sinks)
    revive = ReviveHeads()
    revive.attach(Open(model))
    assert revive.answer(alert("attn", rule="worst pair", heads=(1, 3))).is_refusal == differs


def test_a_failure_during_a_revival_restores_weights_and_optimizer(monkeypatch):
    model = make("grouped")
    (layer,) = find_attention(model)
    make_clones(layer, 1, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(torch.randn(4, 9, 64)).square().sum().backward()
    optimizer.step()
    make_clones(layer, 1, 3)
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    moments = [{k: v.clone() for k, v in optimizer.state[p].items()} for p in model.parameters()]
    revive = ReviveHeads()
    revive.attach(Open(model, optimizer))
    calls = []

    def fails(weight, head, *, generator):
        calls.append(head)
        if len(calls) == 2:
            raise RuntimeError("no room")
        return torch.zeros_like(weight[head])

    monkeypatch.setattr("hdi_callback.monitoring.interventions.revive_heads.fresh_head", fails)
    with pytest.raises(RuntimeError, match="no room"):
        revive.answer(alert("attn", rule="worst pair", heads=(1, 3)))
    assert len(calls) == 2
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())
    for parameter, before in zip(model.parameters(), moments):
        assert all(torch.equal(optimizer.state[parameter][name], value) for name, value in before.items())
    assert revive.count == 0


def test_layers_excluded_by_pattern_need_not_be_writable():
    model = make("many")
    nn.utils.parametrizations.weight_norm(model.attn.k_proj)
    with pytest.raises(MisconfigurationError, match="cannot write"):
        ReviveHeads().attach(Open(model))
    ReviveHeads(layers=["blocks.*"]).attach(Open(model))


def test_tied_heads_are_treated_only_if_the_intervention_names_that_rule():
    model = make("many")
    (layer,) = find_attention(model)
    make_clones(layer, 1, 3)
    tied = alert("attn", rule="tied heads", heads=(1, 3))
    for usual in (ReviveHeads(), DiversityPenalty()):
        usual.attach(Open(model))
        assert usual.answer(tied) is None
    asked = ReviveHeads(rules=["tied heads"])
    asked.attach(Open(model))
    assert asked.answer(tied) is not None


def test_alerts_about_all_heads_are_not_answered_by_default():
    revive = ReviveHeads()
    revive.attach(Open(make("many")))
    assert revive.answer(alert("attn", rule="mean alignment")) is None
    assert revive.answer(alert("attn", rule="forecast")) is None


def test_every_rank_draws_the_same_heads():
    weights = []
    for _ in range(2):
        model = make("many")
        (layer,) = find_attention(model)
        make_clones(layer, 1, 3)
        revive = ReviveHeads(seed=3)
        revive.attach(Open(model))
        torch.rand(7)  # ranks differ in their own random states
        revive.answer(alert("attn", rule="worst pair", heads=(1, 3)))
        weights.append(layer.weight("key").detach().clone())
    assert torch.equal(*weights)


def test_heads_that_cannot_be_written_in_place_are_refused_before_training():
    model = make("many")
    nn.utils.parametrizations.weight_norm(model.attn.k_proj)
    with pytest.raises(MisconfigurationError, match="cannot write the key heads of `attn` in place"):
        ReviveHeads().attach(Open(model))


def test_heads_whose_values_are_normed_are_refused_before_training():
    model = make("many")
    model.attn.v_proj = nn.Sequential(model.attn.v_proj, nn.RMSNorm(64, elementwise_affine=False))
    with pytest.raises(MisconfigurationError, match="a norm follows its values"):
        ReviveHeads().attach(Open(model))


# --- groups


def grouped_alert(layer: str, groups, rule="worst pair", metric="hdi_worst_alignment", step=100) -> Alert:
    heads = tuple(sorted(head for group in groups for head in group))
    return Alert(step, layer, rule, "warning", "", Finding("", heads=heads, groups=groups, metric=metric))


def test_one_head_of_each_group_stays_and_takes_over_the_output():
    torch.manual_seed(0)
    model = nn.Sequential(GroupedAttention(Shape(heads=8, key_heads=8, width=64)))
    (layer,) = find_attention(model)
    with torch.no_grad():
        for role in ("query", "key", "value"):
            weight = layer.weight(role)
            weight[[4, 6]] = weight[1].clone()
            weight[7] = weight[2]
    x = torch.randn(2, 12, 64)
    before = model(x)
    revive = ReviveHeads()
    revive.attach(Open(model, torch.optim.SGD(model.parameters(), lr=0.1)))
    action = revive.answer(grouped_alert(layer.name, ((1, 4, 6), (2, 7))))
    assert len(action.facts["heads"]) == 3
    torch.testing.assert_close(model(x), before, rtol=1e-4, atol=1e-5)
    cosine = qk_circuits(layer.weight("query"), layer.weight("key"))
    assert float(cosine.worst) < 0.3, "none of them attends like another any more"
    assert head_diversity(layer.weight("key")).worst_alignment < 0.3


def test_query_heads_with_equal_scores_under_one_key_get_fresh_queries():
    torch.manual_seed(0)
    model = nn.Sequential(GroupedAttention(Shape(heads=8, key_heads=2, width=64)))
    (layer,) = find_attention(model)
    with torch.no_grad():
        layer.weight("query")[[1, 3]] = layer.weight("query")[0].clone()
    x, keys = torch.randn(2, 12, 64), layer.weight("key").detach().clone()
    before = model(x)
    assert float(qk_circuits(layer.weight("query"), layer.weight("key")).worst) > 0.99
    revive = ReviveHeads()
    revive.attach(Open(model, torch.optim.SGD(model.parameters(), lr=0.1)))
    action = revive.answer(grouped_alert(layer.name, ((0, 1, 3),), "merged scores", "circuit_qk_worst"))
    assert "fresh query weights" in action.message
    torch.testing.assert_close(model(x), before, rtol=1e-4, atol=1e-5)
    assert torch.equal(layer.weight("key"), keys)
    assert float(qk_circuits(layer.weight("query"), layer.weight("key")).worst) < 0.5


def test_reviving_continues_while_the_alert_is_active_unless_it_was_refused():
    torch.manual_seed(0)
    model = nn.Sequential(GroupedAttention(Shape(heads=8, key_heads=8, width=64)))
    (layer,) = find_attention(model)
    with torch.no_grad():
        for role in ("query", "key", "value"):
            layer.weight(role)[1] = layer.weight(role)[0]
    revive = ReviveHeads()
    revive.attach(Open(model, torch.optim.SGD(model.parameters(), lr=0.1)))
    reported = grouped_alert(layer.name, ((0, 1),))
    assert not revive.answer(reported).is_refusal
    with torch.no_grad():  # training has pulled them together again
        for role in ("query", "key", "value"):
            layer.weight(role)[1] = layer.weight(role)[0]
    assert not revive.go_on(reported).is_refusal
    assert revive.count == 2
    with torch.no_grad():
        for role in ("query", "key", "value", "output"):
            layer.weight(role)[:2] = torch.randn_like(layer.weight(role)[:2])
    assert revive.go_on(reported).is_refusal
    assert revive.go_on(reported) is None
