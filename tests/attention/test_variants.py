"""Attention as recent papers vary it, as small modules: read as attention receives it, or refused with the reason."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from hdi_callback.attention import find_attention, survey
from tests.attention.models import D, H, attend
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
    with torch.no_grad(), witness(module.eval()) as seen:
        module(torch.randn(B, T, D))
    (computation,) = merged(seen.computations, B)
    finding = judge(claim_of(layer), seen, computation, B)
    assert finding.is_right, finding.reason


@pytest.mark.parametrize("make", [GroupedTied, MixtureOfHeads])
def test_variants_are_read_as_attention_receives_them(make):
    torch.manual_seed(0)
    require_right(make())


def test_grouped_tied_attention_has_its_keys_as_its_values():
    module = GroupedTied()
    (layer,) = find_attention(nn.Sequential(module))
    assert (layer.num_heads, layer.num_key_heads) == (4, 2)
    assert torch.equal(layer.weight("key"), module.kv_proj.weight.view(2, 8, D))
    assert torch.equal(layer.weight("value"), layer.weight("key"))


@pytest.mark.parametrize("roles", ["k", "q", "v", "qk", "qkv"])
def test_a_shared_map_after_those_of_the_heads_is_part_of_their_weight(roles):
    torch.manual_seed(0)
    module = Knocking(roles)
    (layer,) = find_attention(nn.Sequential(module))
    for role in ("query", "key", "value"):
        weight = getattr(module, f"{role[0]}_proj").weight.view(H, 8, D)
        expected = module.knock[role[0]].weight @ weight if role[0] in roles else weight
        assert torch.allclose(layer.weight(role), expected, atol=1e-6), role
    require_right(module)


def test_one_map_for_all_roles_is_part_of_all_weights():
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
    assert "a trial forward shows no heads" in refusal.reason


class NamedAttention(TemporalLatent):
    """So that it is told of by its name."""


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


def test_a_map_over_several_heads_is_not_taken_for_none():
    assert survey(nn.Sequential(MixedInPairs())).layers == ()


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


def test_scores_from_positions_leave_the_keys_as_they_are():
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
def test_two_softmaxes_are_not_taken_for_one_head(share):
    assert survey(nn.Sequential(Differential(share))).layers == ()


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


def test_a_projection_that_is_not_called_is_seen_by_its_weight():
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


def test_a_learned_difference_of_two_softmaxes_is_not_taken_for_one_head():
    assert survey(nn.Sequential(LearnedDifference())).layers == ()
