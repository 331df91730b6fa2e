"""Attention as recent papers vary it, as small modules: read as attention receives it, or refused with the reason."""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from hdi_callback.attention import AttentionLayer, HeadSlice, find_attention, survey
from hdi_callback.attention.finding.runtime_verifier import RuntimeVerifier
from hdi_callback.attention.observe import AttentionObserver
from hdi_callback.errors import UnsupportedAttentionWarning
from tests.attention import models as by_hand
from tests.attention.models import D, H, attend, refusal_of
from tests.attention.sweep.judge import claim_of, judge, merged
from tests.attention.witness import witness

B, T = 41, 6


class GroupedTied(nn.Module):
    """Few key heads, whose keys are their values."""

    def __init__(self):
        super().__init__()
        self.q_proj, self.kv_proj, self.o_proj = nn.Linear(D, D), nn.Linear(D, 16), nn.Linear(D, D)

    def forward(self, x):
        kv = self.kv_proj(x).unflatten(-1, (2, 8)).repeat_interleave(2, 2)
        return self.o_proj(attend(self.q_proj(x).unflatten(-1, (H, 8)), kv, kv))


class Knocking(nn.Module):
    """One square map after those of each head, shared by all of them: for the keys, or a map for each role."""

    def __init__(self, roles: str):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(D, D, bias=False) for _ in range(4))
        self.knock = nn.ModuleDict({role: nn.Linear(8, 8, bias=False) for role in roles})

    def forward(self, x):
        heads = {}
        for role in "qkv":
            heads[role] = getattr(self, f"{role}_proj")(x).unflatten(-1, (H, 8))
            if role in self.knock:
                heads[role] = self.knock[role](heads[role])
        return self.o_proj(attend(heads["q"], heads["k"], heads["v"]))


class MixtureOfHeads(nn.Module):
    """A router weighs the outputs of the heads of each token, and leaves half of them out."""

    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(D, D) for _ in range(4))
        self.router = nn.Linear(D, H)

    def forward(self, x):
        q, k, v = (proj(x).unflatten(-1, (H, 8)) for proj in (self.q_proj, self.k_proj, self.v_proj))
        weights, chosen = self.router(x).softmax(-1).topk(H // 2, -1)
        share = torch.zeros(*x.shape[:2], H).scatter(-1, chosen, weights)
        return self.o_proj((attend(q, k, v).unflatten(-1, (H, 8)) * share[..., None]).flatten(2))


def sparsemax(scores: Tensor) -> Tensor:
    """The nearest point of the simplex."""
    ordered = scores.sort(-1, descending=True).values
    reach = ordered.cumsum(-1) - 1
    places = torch.arange(1, scores.shape[-1] + 1)
    count = (ordered * places > reach).sum(-1, keepdim=True)
    return (scores - reach.gather(-1, count - 1) / count).clamp_min(0)


class Sparse(nn.Module):
    """Sparsemax in place of softmax, and no name that is known."""

    def __init__(self):
        super().__init__()
        self.one, self.two, self.three, self.four = (nn.Linear(D, D) for _ in range(4))

    def forward(self, x):
        q, k, v = (proj(x).unflatten(-1, (H, 8)).transpose(1, 2) for proj in (self.one, self.two, self.three))
        return self.four((sparsemax(q @ k.mT / 8**0.5) @ v).transpose(1, 2).flatten(2))


class TemporalLatent(nn.Module):
    """Latents of neighbouring tokens are merged, by weights that another map gives."""

    def __init__(self):
        super().__init__()
        self.num_heads = H
        self.q_proj, self.down, self.mix = nn.Linear(D, D), nn.Linear(D, 8), nn.Linear(D, 1)
        self.up, self.out_proj = nn.Linear(8, 2 * D), nn.Linear(D, D)

    def forward(self, x):
        merged = (self.down(x) * self.mix(x).sigmoid()).unflatten(1, (-1, 2)).sum(2)
        k, v = self.up(merged).unflatten(-1, (2, H, 8)).unbind(2)
        q = self.q_proj(x).unflatten(-1, (H, 8)).transpose(1, 2)
        return self.out_proj(((q @ k.permute(0, 2, 3, 1)).softmax(-1) @ v.transpose(1, 2)).transpose(1, 2).flatten(2))


def require_right(module: nn.Module) -> None:
    (layer,) = find_attention(nn.Sequential(module))
    with torch.no_grad(), witness(module.eval()) as observed:
        module(torch.randn(B, T, D))
    (computation,) = merged(observed.computations, B)
    finding = judge(claim_of(layer), observed, computation, B)
    assert finding.is_right, finding.reason


@pytest.mark.parametrize("make", [GroupedTied, MixtureOfHeads])
def test_each_variant_is_read_with_the_heads_that_attention_receives(make):
    torch.manual_seed(0)
    require_right(make())


def test_grouped_tied_attention_has_its_keys_as_its_values():
    module = GroupedTied()
    (layer,) = find_attention(nn.Sequential(module))
    assert (layer.num_heads, layer.num_key_heads) == (4, 2)
    assert torch.equal(layer.weight("key"), module.kv_proj.weight.view(2, 8, D))
    assert torch.equal(layer.weight("value"), layer.weight("key"))


@pytest.mark.parametrize("roles", ["k", "q", "v", "qk", "qkv"])
def test_a_linear_map_that_all_heads_share_after_their_projections_is_part_of_their_weights(roles):
    torch.manual_seed(0)
    module = Knocking(roles)
    (layer,) = find_attention(nn.Sequential(module))
    for role in ("query", "key", "value"):
        weight = getattr(module, f"{role[0]}_proj").weight.view(H, 8, D)
        expected = module.knock[role[0]].weight @ weight if role[0] in roles else weight
        assert torch.allclose(layer.weight(role), expected, atol=1e-6), role
    require_right(module)


def test_one_shared_linear_map_after_all_projections_is_part_of_all_weights():
    torch.manual_seed(0)
    module = Knocking("k")
    module.knock["q"] = module.knock["v"] = module.knock["k"]
    (layer,) = find_attention(nn.Sequential(module))
    for role in ("query", "key", "value"):
        expected = module.knock["k"].weight @ getattr(module, f"{role[0]}_proj").weight.view(H, 8, D)
        assert torch.allclose(layer.weight(role), expected, atol=1e-6), role


def test_sparse_kernels_make_no_difference():
    torch.manual_seed(0)
    module = Sparse()
    (layer,) = find_attention(nn.Sequential(module))
    for role, name in (("query", "one"), ("key", "two"), ("value", "three")):
        assert torch.equal(layer.weight(role), getattr(module, name).weight.view(H, 8, D))


def test_keys_of_several_tokens_are_refused():
    (refusal,) = survey(nn.ModuleDict({"temporal_attention": NamedAttention()})).refused
    assert "its projection `up` takes the output of another linear map" in refusal.reason


class NamedAttention(TemporalLatent):
    """So that it is named in warnings."""


class MixedInPairs(nn.Module):
    """A square map over the keys of two heads at once: they are no heads of their own any more."""

    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(D, D, bias=False) for _ in range(4))
        self.pair = nn.Linear(16, 16, bias=False)

    def forward(self, x):
        k = self.pair(self.k_proj(x).unflatten(-1, (2, 16))).flatten(2).unflatten(-1, (H, 8))
        q, v = (proj(x).unflatten(-1, (H, 8)) for proj in (self.q_proj, self.v_proj))
        return self.o_proj(attend(q, k, v))


def test_a_second_linear_map_that_mixes_several_heads_is_refused():
    assert "come from two projections in a row that are both split into heads" in refusal_of(MixedInPairs())


class Relative(nn.Module):
    """Scores from positions, by a map of their own."""

    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj, self.positions = (nn.Linear(D, D) for _ in range(5))

    def forward(self, x):
        q, k, v = (proj(x).unflatten(-1, (H, 8)).transpose(1, 2) for proj in (self.q_proj, self.k_proj, self.v_proj))
        steps = torch.arange(1.0 - x.shape[1], x.shape[1])
        table = self.positions((steps[:, None] * torch.arange(1.0, D + 1) / D).sin()).unflatten(-1, (H, 8))
        places = (torch.arange(x.shape[1]) - torch.arange(x.shape[1])[:, None]) + x.shape[1] - 1
        bias = torch.einsum("bhtw,tshw->bhts", q, table[places])
        return self.o_proj(((q @ k.mT + bias).softmax(-1) @ v).transpose(1, 2).flatten(2))


def test_positional_terms_in_the_scores_do_not_change_the_keys():
    torch.manual_seed(0)
    module = Relative()
    (layer,) = find_attention(nn.Sequential(module))
    assert torch.equal(layer.weight("key"), module.k_proj.weight.view(H, 8, D))


class Differential(nn.Module):
    """Two softmaxes for the values of a head, one added to the other or taken from it."""

    def __init__(self, share: float):
        super().__init__()
        self.a, self.b, self.share = nn.Linear(D, 3 * D), nn.Linear(D, D), share

    def forward(self, x):
        q, k, v = self.a(x).chunk(3, -1)
        q, k, v = q.unflatten(-1, (2 * H, 4)), k.unflatten(-1, (2 * H, 4)), v.unflatten(-1, (H, 8))
        one, other = attend(q, k, v.repeat_interleave(2, 2)).unflatten(-1, (H, 2, 8)).unbind(-2)
        return self.b((one - self.share * other).flatten(2))


@pytest.mark.parametrize("share", [-1.0, -0.2, 0.2, 0.8])
def test_two_subtracted_softmaxes_that_share_a_value_are_two_heads(share):
    require_two_heads_for_each_value(Differential(share))


def require_two_heads_for_each_value(module):
    with pytest.warns(UnsupportedAttentionWarning, match="the outputs of its heads, several of which are added up"):
        (layer,) = find_attention(nn.Sequential(module))
    assert sorted(layer.slices) == ["key", "query", "value"], "no output is that of one head"
    for number, role in enumerate(("query", "key")):
        assert torch.equal(layer.weight(role), module.a.weight[number * D : number * D + D].view(2 * H, 4, D)), role
    assert torch.equal(layer.weight("value"), module.a.weight[2 * D :].view(H, 8, D))


class UsesTheWeight(nn.Module):
    """The fused projection is never called, its weight is."""

    def __init__(self):
        super().__init__()
        self.num_heads, self.qkv, self.proj = H, nn.Linear(D, 3 * D, bias=False), nn.Linear(D, D)
        self.q_bias = nn.Parameter(torch.zeros(D))

    def forward(self, x):
        bias = torch.cat([self.q_bias, torch.zeros(2 * D)])
        q, k, v = nn.functional.linear(x, self.qkv.weight, bias).unflatten(-1, (3, H, 8)).unbind(2)
        return self.proj(attend(q, k, v))


def test_a_projection_that_is_not_called_is_found_by_its_weight():
    torch.manual_seed(0)
    module = UsesTheWeight()
    (layer,) = find_attention(nn.Sequential(module))
    assert torch.equal(layer.weight("key"), module.qkv.weight[D : 2 * D].view(H, 8, D))
    require_right(module)


class LearnedDifference(Differential):
    """The share is learned, as the original has it: the difference of two exponentials of products."""

    def __init__(self):
        super().__init__(0.0)
        self.lambda_q1, self.lambda_k1, self.lambda_q2, self.lambda_k2 = (
            nn.Parameter(torch.zeros(8)) for _ in range(4)
        )

    def forward(self, x):
        self.share = 0.8 + (self.lambda_q1 @ self.lambda_k1).exp() - (self.lambda_q2 @ self.lambda_k2).exp()
        return super().forward(x)


def test_a_learned_difference_of_two_softmaxes_is_two_heads():
    require_two_heads_for_each_value(LearnedDifference())


class ScaledLatent(nn.Module):
    """Keys and values from a latent behind a norm, times a number; the twin has a number for each feature."""

    def __init__(self, is_twin: bool = False):
        super().__init__()
        self.q, self.down, self.up, self.out = (
            nn.Linear(*shape, bias=False) for shape in ((D, D), (D, 12), (8, 2 * D), (D, D))
        )
        self.between = nn.RMSNorm(8)
        nn.init.uniform_(self.between.weight, 0.5, 2)
        self.times = nn.Parameter(torch.rand(8) + 0.5) if is_twin else 1.7

    def forward(self, x):
        latent, _ = self.down(x).split([8, 4], -1)
        k, v = (self.up(self.between(latent) * self.times)).unflatten(-1, (H, 16)).chunk(2, -1)
        return self.out(attend(self.q(x).unflatten(-1, (H, 8)), k, v))


def test_a_constant_scale_between_the_latent_projections_is_part_of_the_key_weight():
    torch.manual_seed(0)
    module = ScaledLatent()
    (layer,) = find_attention(nn.Sequential(module))
    up = module.up.weight.view(H, 16, 8) * module.between.weight
    assert torch.allclose(layer.weight("key"), (up @ module.down.weight[:8])[:, :8], atol=1e-6)
    assert torch.allclose(layer.weight("value"), (up @ module.down.weight[:8])[:, 8:], atol=1e-6)
    assert "by none of its parameters, as by an activation" in refusal_of(ScaledLatent(is_twin=True))


class TwoSources(nn.Module):
    """Queries, or keys, of a latent both as it is and behind a norm: no one matrix gives them."""

    def __init__(self, role: str):
        super().__init__()
        self.role, self.norm = role, nn.RMSNorm(10)
        self.a, self.b = nn.Linear(D, 10, bias=False), nn.Linear(20, D, bias=False)
        self.other, self.v, self.o = nn.Linear(D, D, bias=False), nn.Linear(D, D, bias=False), nn.Linear(D, D)

    def forward(self, x):
        latent = self.a(x)
        one, other = self.b(torch.cat([self.norm(latent), latent], -1)), self.other(x)
        q, k = (one, other) if self.role == "query" else (other, one)
        return self.o(attend(*(part.unflatten(-1, (H, 8)) for part in (q, k, self.v(x)))))


def test_keys_are_read_if_the_queries_come_from_two_projections():
    torch.manual_seed(0)
    module = TwoSources("query")
    with pytest.warns(UnsupportedAttentionWarning, match="read in part: without the weights of its queries"):
        (layer,) = find_attention(nn.Sequential(module))
    assert sorted(layer.slices) == ["key", "output", "value"]
    assert torch.equal(layer.weight("key"), module.other.weight.view(H, 8, D))
    assert torch.equal(layer.weight("value"), module.v.weight.view(H, 8, D))


def test_keys_from_two_projections_are_refused():
    torch.manual_seed(0)
    assert "takes the output of another linear map" in refusal_of(TwoSources("key"))


class NormedOutputs(nn.Module):
    """A norm and an activation between heads and output projection, and two softmaxes subtracted in the twin."""

    def __init__(self, *between: nn.Module, is_twin: bool = False):
        super().__init__()
        self.a, self.b, self.c, self.e = (nn.Linear(D, D) for _ in range(4))
        self.between, self.is_twin = nn.ModuleList(between), is_twin

    def forward(self, x):
        q, k, v = (part(x) for part in (self.a, self.b, self.c))
        if self.is_twin:
            q, k = (part.unflatten(-1, (2 * H, 4)) for part in (q, k))
            one, other = (
                attend(q, k, v.unflatten(-1, (H, 8)).repeat_interleave(2, 2)).unflatten(-1, (H, 2, 8)).unbind(-2)
            )
            out = (one - 0.5 * other).flatten(2)
        else:
            out = attend(*(part.unflatten(-1, (H, 8)) for part in (q, k, v)))
        for part in self.between:
            out = part(out)
        return self.e(out)


BETWEEN = [(nn.LayerNorm(D),), (nn.Hardswish(),), (nn.LayerNorm(D), nn.Hardswish())]


@pytest.mark.parametrize("between", BETWEEN, ids=["norm", "activation", "both"])
def test_an_operation_between_heads_and_output_projection_does_not_hide_the_keys(between):
    torch.manual_seed(0)
    module = NormedOutputs(*between)
    (layer,) = find_attention(nn.Sequential(module))
    for role, part in (("query", module.a), ("key", module.b), ("value", module.c)):
        assert torch.equal(layer.weight(role), part.weight.view(H, 8, D)), role
    assert layer.output_projection is None, "what it takes is not what the heads give"
    assert "output" not in layer.slices
    require_right(module)


@pytest.mark.parametrize("between", BETWEEN, ids=["norm", "activation", "both"])
def test_two_subtracted_softmaxes_before_a_norm_are_two_heads_without_outputs(between):
    torch.manual_seed(0)
    module = NormedOutputs(*between, is_twin=True)
    with pytest.warns(UnsupportedAttentionWarning, match="the outputs of its heads, several of which are added up"):
        (layer,) = find_attention(nn.Sequential(module))
    assert sorted(layer.slices) == ["key", "query", "value"]
    for role, part in (("query", module.a), ("key", module.b)):
        assert torch.equal(layer.weight(role), part.weight.view(2 * H, 4, D)), role
    assert torch.equal(layer.weight("value"), module.c.weight.view(H, 8, D))


class FedByValues(nn.Module):
    """A map of the values adds a number to the scores of each key; in the twin, features to the keys."""

    def __init__(self, is_twin: bool = False):
        super().__init__()
        self.num_heads = H
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(D, D) for _ in range(4))
        self.is_twin, self.dt = is_twin, nn.Linear(D, D if is_twin else H)

    def forward(self, x):
        q, k, v = (proj(x) for proj in (self.q_proj, self.k_proj, self.v_proj))
        added = self.dt(v)
        k = k + added if self.is_twin else k
        q, k, v = (part.unflatten(-1, (H, 8)).transpose(1, 2) for part in (q, k, v))
        scores = q @ k.mT / 8**0.5
        if not self.is_twin:
            scores = scores + nn.functional.softplus(added).mT[:, :, None]
        return self.o_proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


def test_a_bias_of_the_scores_computed_from_values_is_not_part_of_the_keys():
    torch.manual_seed(0)
    module = FedByValues()
    (layer,) = find_attention(nn.Sequential(module))
    for role in ("query", "key", "value"):
        assert torch.equal(layer.weight(role), getattr(module, f"{role[0]}_proj").weight.view(H, 8, D))
    require_right(module)


def checked(layer: AttentionLayer, *inputs: Tensor) -> dict[str, str]:
    """What a real forward shows against the heads of a layer."""
    check = RuntimeVerifier([layer])
    check.arm()
    layer.module(*inputs)
    try:
        return check.contradictions()
    finally:
        check.suspend()


def test_a_bias_of_the_scores_computed_from_values_does_not_contradict_the_heads():
    torch.manual_seed(0)
    (layer,) = find_attention(nn.Sequential(FedByValues()))
    assert checked(layer, torch.randn(3, T, D)) == {}


def test_keys_to_which_values_are_added_are_refused():
    torch.manual_seed(0)
    module = FedByValues(is_twin=True)
    with pytest.warns(UnsupportedAttentionWarning, match="its keys are sums of the outputs of `dt` and `k_proj`"):
        assert len(find_attention(nn.Sequential(module))) == 0
    claimed = {role: HeadSlice(module, f"{role[0]}_proj.weight", H, 8) for role in ("query", "key", "value")}
    layer = AttentionLayer("twin", module, H, H, 8, 8, "claimed", claimed, module.o_proj, evidence="trace")
    assert "its keys are sums of the outputs of `dt` and `k_proj`" in checked(layer, torch.randn(3, T, D))["twin"]


class Exclusive(nn.Module):
    """What a token's own values have in common with the outputs of their head is taken from them."""

    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(D, D) for _ in range(4))

    def forward(self, x):
        q, k, v = (proj(x).unflatten(-1, (H, 8)) for proj in (self.q_proj, self.k_proj, self.v_proj))
        out, own = attend(q, k, v).unflatten(-1, (H, 8)), nn.functional.normalize(v, dim=-1)
        return self.o_proj((out - 0.3 * (out * own).sum(-1, keepdim=True) * own).flatten(2))


def test_no_output_projection_is_claimed_if_the_output_features_of_a_head_are_mixed():
    torch.manual_seed(0)
    (layer,) = find_attention(nn.Sequential(Exclusive()))
    assert {role: (one.parameter, one.index().tolist()) for role, one in layer.slices.items()} == {
        role: (f"{role[0]}_proj.weight", torch.arange(D).view(H, 8).tolist()) for role in ("query", "key", "value")
    }
    assert layer.output_projection is None


class MixedHeads(Exclusive):
    """As many features as heads have, each a sum over two heads."""

    def forward(self, x):
        q, k, v = (proj(x).unflatten(-1, (H, 8)) for proj in (self.q_proj, self.k_proj, self.v_proj))
        out = attend(q, k, v).unflatten(-1, (H, 8))
        return self.o_proj((out + out.roll(1, 2)).flatten(2))


def test_outputs_that_mix_heads_are_refused():
    torch.manual_seed(0)
    assert "mixed or normalised before they reach the output projection" in refusal_of(MixedHeads())


class Memory(nn.Module):
    """Something of the values is added behind the output projection, which needs what nobody makes up."""

    def __init__(self, is_before: bool = False):
        super().__init__()
        self.a, self.b, self.c, self.e = (nn.Linear(D, D) for _ in range(4))
        self.convolution, self.is_before = nn.Conv1d(D, D, 3, padding=1, groups=D), is_before

    def forward(self, x, lengths=None):
        q, k, v = (part(x) for part in (self.a, self.b, self.c))
        out = attend(*(part.unflatten(-1, (H, 8)) for part in (q, k, v)))
        if self.is_before:
            return self.e(out + self.convolution((v * lengths.unsqueeze(-1)).mT).mT)
        return self.e(out) + self.convolution((v * lengths.unsqueeze(-1)).mT).mT


def test_an_error_after_the_output_projection_does_not_hide_the_heads():
    torch.manual_seed(0)
    module = Memory()
    (layer,) = find_attention(nn.Sequential(module))
    assert torch.equal(layer.weight("key"), module.b.weight.view(H, 8, D))
    assert "could not be run" in refusal_of(Memory(is_before=True))


class InGroups(nn.Module):
    """Tokens in groups, that have a dimension of their own; in the twin the keys are mixed across heads."""

    def __init__(self, is_twin: bool = False):
        super().__init__()
        self.num_heads, self.is_twin = H, is_twin
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(D, D) for _ in range(4))

    def forward(self, query, key, value):
        shape = (query.shape[0] * query.shape[1], -1, H, 8)
        q, k, v = self.q_proj(query).view(shape), self.k_proj(key).view(shape), self.v_proj(value).view(shape)
        if self.is_twin:
            k = k + k.roll(1, 2)
        return self.o_proj(attend(q, k, v).reshape(*query.shape[:2], -1, D))


def test_attention_within_groups_of_tokens_does_not_contradict_the_heads():
    torch.manual_seed(0)
    module = InGroups()
    (layer,) = find_attention(nn.Sequential(module))
    x = torch.randn(B, 2, T, D)
    assert checked(layer, x, x, x) == {}
    with torch.no_grad(), witness(module.eval()) as observed:
        module(x, x, x)
    (computation,) = merged(observed.computations, B)
    finding = judge(claim_of(layer), observed, computation, B)
    assert finding.is_right, finding.reason
    assert "which does not show its key heads" in refusal_of(InGroups(is_twin=True))


@pytest.mark.parametrize("shape", [(T, 3, D), (3, T, D), (T, 1, D)])
def test_heads_are_verified_with_the_length_in_the_first_or_second_dimension(shape):
    torch.manual_seed(0)
    (layer,) = find_attention(nn.Sequential(by_hand.LengthFirst()))
    x = torch.randn(shape)
    assert checked(layer, x) == {}
    mixed = replace(layer, num_heads=2, num_key_heads=2, head_dim=16, value_dim=16, slices={
        role: replace(part, heads=2, width=16) for role, part in layer.slices.items()
    })  # fmt: skip
    assert set(checked(mixed, x)) == {layer.name}


class Viewed(by_hand.Separate):
    """Length first, and views that a tensor of another order in memory does not have."""

    def forward(self, query, encoded):
        length, batch, _ = query.shape
        q, k, v = self.q_proj(query), self.k_proj(encoded), self.v_proj(encoded)
        q = q.view(length, batch * H, 8).transpose(0, 1)
        k, v = (part.view(-1, batch * H, 8).transpose(0, 1) for part in (k, v))
        out = (q @ k.mT / 8**0.5).softmax(-1) @ v
        return self.out_proj(out.transpose(0, 1).reshape(length, batch, D))


def test_heads_are_read_and_verified_with_a_second_input_of_any_name_and_with_views():
    torch.manual_seed(0)
    (layer,) = find_attention(nn.Sequential(Viewed()))
    assert checked(layer, torch.randn(T, 3, D), torch.randn(T + 2, 3, D)) == {}
    assert torch.equal(layer.weight("key"), layer.module.k_proj.weight.view(H, 8, D))


class ManyGates(nn.Module):
    """A gate for each of many heads, some of which may look like the number of a value."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(D, 256) for _ in range(3))
        self.gate, self.e = nn.Linear(D, 64), nn.Linear(256, D)

    def forward(self, x):
        q, k, v = (part(x).unflatten(-1, (64, 4)) for part in (self.a, self.b, self.c))
        return self.e((attend(q, k, v).unflatten(-1, (64, 4)) * self.gate(x)[..., None].sigmoid()).flatten(2))


def test_a_gate_on_the_outputs_is_not_read_as_values():
    torch.manual_seed(0)
    module = ManyGates()
    (layer,) = find_attention(nn.Sequential(module))
    assert torch.equal(layer.weight("value"), module.c.weight.view(64, 4, D))
    assert torch.equal(layer.weight("key"), module.b.weight.view(64, 4, D))


class QueriesInPieces(by_hand.NanoGPT):
    """Attends from some queries at a time to all keys, to save memory."""

    def __init__(self, length):
        super().__init__()
        self.length = length

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (self.n_head, -1)).transpose(1, 2) for part in self.c_attn(x).chunk(3, -1))
        attended = [(piece @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v for piece in q.split(self.length, 2)]
        return self.c_proj(torch.cat(attended, 2).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("length", [3, 4, 8])
def test_queries_split_into_pieces_are_no_extra_heads_and_nothing_stays_unexplained(length):
    """With 4 heads, 2 sequences of 16 and pieces of 8, heads x queries are as many tokens as the map gave."""
    torch.manual_seed(0)
    model = nn.Sequential(QueriesInPieces(length))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (layer,) = find_attention(model, forward=lambda: model(torch.randn(2, 16, D)))
    assert (layer.num_heads, layer.left_out) == (H, "")
    observer = AttentionObserver(model, [layer])
    observer.arm()
    model(torch.randn(2, 16, D))
    observer.disarm()
    assert {core.heads for core in observer.cores} == {H}
    assert observer.unexplained([layer]) == []


class Gated(by_hand.NanoGPT):
    """Each score passes a gate by itself (Ramapuram et al., 2024), in a class that no name gives away."""

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (self.n_head, -1)).transpose(1, 2) for part in self.c_attn(x).chunk(3, -1))
        weights = (q @ k.mT / q.shape[-1] ** 0.5 - 2).sigmoid()
        return self.c_proj((weights @ v).transpose(1, 2).flatten(2))


def test_attention_with_sigmoid_weights_is_refused_by_name():
    torch.manual_seed(0)
    model = nn.Sequential(Gated())
    with pytest.warns(UnsupportedAttentionWarning, match=r"`0` \(Gated\).*its weights are not a softmax \(sigmoid\)"):
        assert find_attention(model, forward=lambda: model(torch.randn(2, 6, D))) == []


def test_a_squeeze_and_excitation_gate_is_not_reported_as_attention():
    """Squeeze and excitation: a product with a sigmoid that no scores went into."""

    class Excited(nn.Module):
        def __init__(self):
            super().__init__()
            self.down, self.up, self.out = nn.Linear(D, 8), nn.Linear(8, D), nn.Linear(D, D)

        def forward(self, x):
            gate = self.up(self.down(x.mean(1, keepdim=True)).relu()).sigmoid()
            return self.out(x * gate)

    model = nn.Sequential(Excited())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert find_attention(model, forward=lambda: model(torch.randn(2, 6, D))) == []


class PackedInOneParameter(nn.Module):
    """Queries, keys and values of one parameter; values, weights and output map meet in one product of three."""

    def __init__(self):
        super().__init__()
        self.packed, self.back = nn.Parameter(torch.randn(3, H, 8, D)), nn.Parameter(torch.randn(H, 8, D))

    def forward(self, x):
        q, k, v = torch.einsum("bnd,thkd->tbhnk", x, self.packed)
        weights = torch.einsum("bhqk,bhnk->bhqn", q, k).softmax(-1)
        return torch.einsum("bhqn,bhnk,hkd->bqd", weights, v, self.back)


def test_queries_keys_and_values_from_one_einsum_with_a_packed_parameter_are_read():
    torch.manual_seed(0)
    model = nn.Sequential(PackedInOneParameter())
    (layer,) = find_attention(model)
    for number, role in enumerate(("query", "key", "value")):
        assert torch.equal(layer.weight(role), model[0].packed[number])
    assert torch.equal(layer.weight("output"), model[0].back)


class Bilinear(nn.Module):
    """Scores of two inputs and a matrix for each head at once: no queries, no keys."""

    def __init__(self):
        super().__init__()
        self.between, self.v, self.o = nn.Parameter(torch.randn(H, D, D)), nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x):
        scores = torch.einsum("bqd,hde,bke->bhqk", x, self.between, x)
        out = scores.softmax(-1) @ self.v(x).unflatten(-1, (H, -1)).transpose(1, 2)
        return self.o(out.transpose(1, 2).flatten(2))


def test_a_bilinear_product_of_two_inputs_is_refused_as_no_linear_map():
    model = nn.Sequential(Bilinear())
    found = survey(model, forward=lambda: model(torch.randn(2, 6, D)))
    assert not found.layers
    assert [one.name for one in found.refused] == ["0"]


class LearnedTokensBeside(by_hand.NanoGPT):
    """Two learned keys and values that all tokens may attend to."""

    def __init__(self):
        super().__init__()
        self.more = nn.Parameter(torch.randn(2, 1, self.n_head, 2, D // self.n_head))

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (self.n_head, -1)).transpose(1, 2) for part in self.c_attn(x).chunk(3, -1))
        k, v = (torch.cat([more.expand(len(x), -1, -1, -1), one], 2) for more, one in zip(self.more, (k, v)))
        return self.c_proj(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("has_forward", [False, True])
def test_learned_tokens_are_reported_as_left_out(has_forward):
    model = nn.Sequential(LearnedTokensBeside())
    with pytest.warns(UnsupportedAttentionWarning) as reported:
        (layer,) = find_attention(model, forward=(lambda: model(torch.randn(2, 6, D))) if has_forward else None)
    assert layer.left_out == "learned keys that no projection gives"
    assert len(reported) == 1


class TwoScores(by_hand.NanoGPT):
    """Text and layout attend by one sum of scores, and average values of their own (LiLT)."""

    def __init__(self):
        super().__init__()
        self.c_layout, self.layout_proj = nn.Linear(D, 3 * D), nn.Linear(D, D)

    def forward(self, x):
        sides = [
            [part.unflatten(-1, (self.n_head, -1)).transpose(1, 2) for part in mix(x).chunk(3, -1)]
            for mix in (self.c_attn, self.c_layout)
        ]
        scores = sum(q @ k.mT for q, k, _ in sides)
        out = [(scores.softmax(-1) @ v).transpose(1, 2).flatten(2) for _, _, v in sides]
        return self.c_proj(out[0]) + self.layout_proj(out[1])


def test_scores_that_a_trace_shows_to_be_sums_are_not_claimed_from_observation():
    torch.manual_seed(0)
    model = nn.Sequential(TwoScores())
    found = survey(model, forward=lambda: model(torch.randn(2, 6, D)))
    assert not found.layers
    (refused,) = found.refused
    assert refused.reason == "its scores are sums of several terms: a product of `c_attn`, a product of `c_layout`"


class OneKeyHead(nn.Module):
    """Keys and values of one head, met by einsum without a dim of their own, as in PaLM."""

    def __init__(self, mask: str):
        super().__init__()
        self.to_all, self.to_out, self.mask = nn.Linear(D, D + 8 + 8 + D), nn.Linear(D, D), mask

    def forward(self, x):
        q, k, v, beside = self.to_all(x).split((D, 8, 8, D), -1)
        scores = torch.einsum("bhid,bjd->bhij", q.unflatten(-1, (H, 8)).transpose(1, 2) * 8**-0.5, k)
        hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        if self.mask == "filled":
            scores = scores.masked_fill(hidden, -torch.finfo(scores.dtype).max)
        elif self.mask == "added":
            scores = scores + torch.zeros(hidden.shape).masked_fill(hidden, float("-inf"))
        attended = torch.einsum("bhij,bjd->bhid", scores.softmax(-1), v)
        return self.to_out(attended.transpose(1, 2).flatten(2)) + nn.functional.gelu(beside)


@pytest.mark.parametrize("mask", ["", "filled", "added"])
def test_a_single_key_head_by_einsum_is_read_with_and_without_a_causal_mask(mask):
    """The first query of a causal mask has one key, which shows nothing."""
    module = OneKeyHead(mask)
    (layer,) = find_attention(nn.Sequential(module))
    assert (layer.num_heads, layer.num_key_heads) == (H, 1)
    query, key, value, _ = module.to_all.weight.detach().split((D, 8, 8, D))
    assert torch.equal(layer.weight("query"), query.view(H, 8, D))
    assert torch.equal(layer.weight("key"), key[None])
    assert torch.equal(layer.weight("value"), value[None])
    assert torch.equal(layer.weight("output"), module.to_out.weight.detach().mT.reshape(H, 8, D))


class FilteredAttention(nn.Module):
    """Keys and values of several pixels each, behind a norm that is written out, as in Twins."""

    def __init__(self):
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(1, D, 1, 1)), nn.Parameter(torch.zeros(1, D, 1, 1))
        self.to_q, self.to_kv = nn.Conv2d(D, D, 1, bias=False), nn.Conv2d(D, 2 * D, 2, stride=2, bias=False)
        self.to_out = nn.Sequential(nn.Conv2d(D, D, 1))

    def forward(self, x):
        x = (x - x.mean(1, keepdim=True)) / (x.var(1, unbiased=False, keepdim=True) + 1e-5).sqrt()
        x = x * self.scale + self.shift
        q, k, v = (
            one.flatten(2).unflatten(1, (H, -1)).transpose(2, 3)
            for one in (self.to_q(x), *self.to_kv(x).chunk(2, dim=1))
        )
        attended = (q @ k.mT / 8**0.5).softmax(-1) @ v
        return self.to_out(attended.transpose(2, 3).reshape(x.shape))


def test_keys_and_values_of_a_strided_convolution_are_refused_by_its_name():
    model = nn.Sequential(FilteredAttention())
    with pytest.warns(
        UnsupportedAttentionWarning, match="come from the convolution `to_kv`, whose filters cover several tokens"
    ):
        assert find_attention(model, forward=lambda: model(torch.randn(2, D, 8, 8))) == []
