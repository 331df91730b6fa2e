"""Modules that few people write, for each of which one mechanism of finding is there."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from hdi_callback.attention import survey

WIDTH, HEADS, TOKENS = 16, 4, 7


class Attention(nn.Module):
    """One attention, whose scores and outputs are changed by those below."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def in_heads(self, x):
        return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)

    def sums(self, query, key, value):
        return ((query @ key.mT).softmax(-1) @ value).transpose(1, 2).flatten(2)


class SlidingFeatures(Attention):
    def forward(self, x):
        query, key = (one(x).unfold(-1, 10, 2).transpose(1, 2) for one in (self.q, self.k))  # features 0-9, 2-11, ...
        return self.o(self.sums(query, key, self.in_heads(self.v(x))))


def test_heads_with_overlapping_features_are_refused_for_that():
    found = survey(SlidingFeatures())
    assert found.layers == ()
    assert [one.reason for one in found.refused] == ["its query heads share features of `q`"]


class OneHeadInFourTemperatures(Attention):
    def forward(self, x):
        query, key, value = (one(x)[:, None] for one in (self.q, self.k, self.v))
        return self.o(self.sums(query * torch.arange(1.0, 1 + HEADS).view(-1, 1, 1), key, value)[..., :WIDTH])


def test_several_softmaxes_of_one_score_are_refused_as_mixed_heads():
    found = survey(OneHeadInFourTemperatures())
    assert found.layers == ()
    reason = "its heads mix: several heads depend on the same features of the same tokens"
    assert [one.reason for one in found.refused] == [reason]


class OutputsOfHeadsNormed(Attention):
    """As in RetNet and the Differential Transformer, where a group norm takes the outputs of each head."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(HEADS, WIDTH)

    def forward(self, x):
        mixed = self.sums(*(self.in_heads(one(x)) for one in (self.q, self.k, self.v)))
        return self.o(self.norm(mixed.flatten(0, 1)).view_as(x))


def test_a_group_norm_of_head_outputs_leaves_queries_keys_and_values_to_be_read():
    module = OutputsOfHeadsNormed()
    (layer,) = survey(module).layers
    assert layer.num_heads == HEADS
    assert torch.equal(layer.weight("value").flatten(0, 1), module.v.weight)
    assert "output" not in layer.slices  # the norm divides what the projection takes


class KeysOfALatentOfSevenTokens(Attention):
    """It runs for one length alone, and so not with synthetic inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.k, self.down = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 8)

    def forward(self, x):
        if x.shape[1] != TOKENS:
            raise ValueError
        keys = self.k(self.down(x))
        return self.o(self.sums(*(self.in_heads(one) for one in (self.q(x), keys, self.v(x)))))


def test_keys_of_two_projections_in_a_row_are_refused_if_only_observation_shows_them(monkeypatch):
    module, x = KeysOfALatentOfSevenTokens(), torch.randn(2, TOKENS, WIDTH)
    # What the forward showed cannot be run again, so that its rows are judged by observation alone.
    monkeypatch.setattr("hdi_callback.attention.finding.search.Search.trace_recorded", lambda *_: None)
    found = survey(module, forward=lambda: module(x))
    assert found.layers == ()
    (refusal,) = found.refused
    assert "`down.weight` and `k.weight` in a row" in refusal.reason


class NormedOverAllHeads(Attention):
    def __init__(self, how):
        super().__init__()
        self.how = how

    def forward(self, x):
        query, key = (self.in_heads(self.how(one(x))) for one in (self.q, self.k))
        return self.o(self.sums(query, key, self.in_heads(self.v(x))))


BY_HAND = {
    "normalize": lambda x: nn.functional.normalize(x, dim=-1),
    "the root of a mean without its dim": lambda x: x * torch.rsqrt(x.square().mean(-1)).unsqueeze(-1),
}


@pytest.mark.parametrize("how", BY_HAND)
def test_a_handwritten_norm_over_all_heads_does_not_hide_the_heads(how):
    module = NormedOverAllHeads(BY_HAND[how])
    (layer,) = survey(module).layers
    assert torch.equal(layer.weight("key").flatten(0, 1), module.k.weight)
    assert layer.normed == {"query", "key"}


def test_heads_are_found_if_the_forward_casts_to_half_precision():
    module = NormedOverAllHeads(lambda x: x.half())
    (layer,) = survey(module).layers
    assert torch.equal(layer.weight("key").flatten(0, 1), module.k.weight)


class UsesTheWeightsOfItsPart(nn.Module):
    """A part that is never called: the block calls torch's function with its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(WIDTH, HEADS)

    def forward(self, x):
        part, x = self.attn, x.transpose(0, 1)
        return F.multi_head_attention_forward(
            x, x, x, WIDTH, HEADS, part.in_proj_weight, part.in_proj_bias, None, None, False, 0.0,
            part.out_proj.weight, part.out_proj.bias, need_weights=False,
        )[0]  # fmt: skip


def test_a_parent_that_uses_the_weights_of_its_child_gives_one_layer_named_after_the_child():
    found = survey(nn.Sequential(UsesTheWeightsOfItsPart()))
    assert [layer.name for layer in found.layers] == ["0.attn"]
    assert found.refused == ()


class KeysOfAContext(Attention):
    """Other maps give keys and values of a context, where one is passed by a name that its code alone knows."""

    def __init__(self) -> None:
        super().__init__()
        self.more_keys, self.more_values = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, **options):
        key, value, context = self.k(x), self.v(x), options.get("context")
        if context is not None:
            key = torch.cat([key, self.more_keys(context)], 1)
            value = torch.cat([value, self.more_values(context)], 1)
        return self.o(self.sums(*map(self.in_heads, (self.q(x), key, value))))


class PassesOn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part = KeysOfAContext()

    def forward(self, x, **options):
        return self.part(x, **options)


def test_heads_stay_undecided_if_an_optional_context_appears_only_in_the_code_of_the_forward():
    module = PassesOn()
    found = survey(module)
    assert found.layers == ()
    assert "its heads change if the argument `context` is passed" in found.refused[0].reason
    found = survey(module, forward=lambda: module(torch.randn(2, TOKENS, WIDTH)))
    assert [layer.name for layer in found.layers] == ["part"]
    assert found.refused == ()


class HeadsOfTwoSequences(nn.Module):
    """Each of two heads attends within a sequence of its own, and one map takes both."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.ModuleList(nn.Linear(WIDTH, WIDTH // 2) for _ in range(3)) for _ in range(2))
        self.o = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, context):
        outputs = []
        for maps, tokens in ((self.first, x), (self.second, context)):
            query, key, value = (one(tokens) for one in maps)
            outputs.append((query @ key.mT).softmax(-1) @ value)
        return self.o(torch.cat(outputs, -1))


@pytest.mark.parametrize("has_forward", [False, True])
def test_heads_that_attend_to_different_sequences_are_refused_as_one_layer(has_forward):
    module = nn.Sequential(HeadsOfTwoSequences())
    x = torch.randn(2, 2, TOKENS, WIDTH)
    found = survey(module, forward=(lambda: module[0](*x)) if has_forward else None)
    assert found.layers == ()
    (refusal,) = found.refused
    said = "from an input of its own" if has_forward else "come from different tokens"
    assert said in refusal.reason


class EveryHeadMeetsAllKeys(Attention):
    """The softmax of a head is over the keys of all heads."""

    def __init__(self, is_one_product):
        super().__init__()
        self.is_one_product = is_one_product

    def forward(self, x):
        query, key, value = (self.in_heads(one(x)) for one in (self.q, self.k, self.v))
        if self.is_one_product:
            scores = torch.einsum("bhqd,bgkd->bhqgk", query, key).flatten(-2)
        else:
            scores = (query[:, :, None] @ key[:, None].mT).movedim(2, 3).flatten(-2)
        outputs = scores.softmax(-1) @ value.flatten(1, 2)[:, None]
        return self.o(outputs.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("is_one_product", [False, True])
def test_heads_that_attend_to_the_keys_of_all_heads_are_refused_as_mixed(is_one_product):
    found = survey(EveryHeadMeetsAllKeys(is_one_product))
    assert found.layers == ()
    reason = "its heads mix: the weights of one head depend on the scores of several"
    assert [one.reason for one in found.refused] == [reason]


class AttendsBesideItsPart(Attention):
    """What it attends to by itself depends on an argument that nobody makes up."""

    def __init__(self) -> None:
        super().__init__()
        self.part = PositionsFromAnArgument()

    def forward(self, x, plan):
        x = self.part(x)
        return self.o(self.sums(*(self.in_heads(one(x)) for one in (self.q, self.k, self.v)))) if plan["both"] else x


class PositionsFromAnArgument(Attention):
    """Scores by the distance of tokens beside those by their content, as in Transformer-XL."""

    def __init__(self) -> None:
        super().__init__()
        self.distances = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, positions=None):
        query, key, value = (self.in_heads(one(x)) for one in (self.q, self.k, self.v))
        apart = query @ self.in_heads(self.distances(x if positions is None else positions)).mT
        shape = apart.shape
        apart = F.pad(apart, (1, 0)).view(*shape[:2], shape[-1] + 1, shape[-1])[:, :, 1:].reshape(shape)
        outputs = (query @ key.mT + apart).softmax(-1) @ value
        return self.o(outputs.transpose(1, 2).flatten(2))


def test_keys_of_relative_positions_passed_as_an_argument_are_not_read_as_keys_of_tokens():
    module = PositionsFromAnArgument()
    (layer,) = survey(module).layers
    assert torch.equal(layer.weight("key").flatten(0, 1), module.k.weight)


def test_a_module_that_may_attend_beside_its_child_and_cannot_run_is_refused_by_name():
    module = nn.Sequential(AttendsBesideItsPart())
    found = survey(module)
    assert [layer.name for layer in found.layers] == ["0.part"]
    assert [one.name for one in found.refused] == ["0"]
    found = survey(module, forward=lambda: module[0](torch.randn(2, TOKENS, WIDTH), {"both": True}))
    assert [layer.name for layer in found.layers] == ["0", "0.part"]


class CallsTheForwardOfItsPart(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part = NormedOverAllHeads(lambda x: x)

    def forward(self, x, plan):
        scale = plan["scale"]
        return scale * self.part.forward(x)


def test_attention_whose_forward_is_called_directly_belongs_to_its_layer():
    module = nn.Sequential(CallsTheForwardOfItsPart())
    found = survey(module, forward=lambda: module[0](torch.randn(2, TOKENS, WIDTH), {"scale": 2.0}))
    assert [layer.name for layer in found.layers] == ["0.part"]
    assert found.refused == ()


class SoftmaxOverEdges(nn.Module):
    """The attention of a graph, one after the other; its exponentials are added up node by node."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def of_one(self, x):
        count = len(x)
        begin, end = torch.arange(count).repeat(count), torch.arange(count).repeat_interleave(count)
        query, key, value = (one(x).view(count, HEADS, -1) for one in (self.q, self.k, self.v))
        weights = (query[end] * key[begin]).sum(-1).exp()
        sums = torch.zeros(count, HEADS).index_add(0, end, weights)
        outputs = torch.zeros_like(value).index_add(0, end, weights[..., None] * value[begin])
        return (outputs / sums[..., None]).flatten(1)

    def forward(self, x):
        return torch.stack([self.of_one(one) for one in x])


@pytest.mark.parametrize("has_forward", [False, True])
def test_a_softmax_over_edges_is_named(has_forward):
    module = nn.Sequential(SoftmaxOverEdges())
    x = torch.randn(2, TOKENS, WIDTH)
    found = survey(module, forward=(lambda: module(x)) if has_forward else None)
    assert found.layers == ()
    reason = "its weights are exponentials that are summed by index, as over the edges of a graph"
    assert [one.reason for one in found.refused] == [reason]


class QueryOfAClassToken(Attention):
    """The class token asks as it came in, the other tokens through a map."""

    def forward(self, x):
        query = torch.cat([x[:, :1], self.q(x[:, 1:])], 1)
        return self.o(self.sums(*map(self.in_heads, (query, self.k(x), self.v(x)))))


def test_queries_are_read_if_the_class_token_attends_without_a_projection():
    module = QueryOfAClassToken()
    (layer,) = survey(module).layers
    assert torch.equal(layer.weight("query").flatten(0, 1), module.q.weight)
    assert layer.left_out == "the queries of other tokens, which come from no linear map"


class ContextOfAnotherWidth(Attention):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(40)
        self.more_keys, self.more_values = nn.Linear(40, WIDTH), nn.Linear(40, WIDTH)

    def forward(self, x, more=None):
        key, value = self.k(x), self.v(x)
        if more is not None:
            key = torch.cat([key, self.more_keys(self.norm(more))], 1)
            value = torch.cat([value, self.more_values(self.norm(more))], 1)
        return self.o(self.sums(*map(self.in_heads, (self.q(x), key, value))))


def test_heads_stay_undecided_if_an_optional_context_is_wider_than_the_tokens():
    found = survey(ContextOfAnotherWidth())
    assert found.layers == ()
    assert "its heads change if the argument `more` is passed" in found.refused[0].reason


class OneHeadOfSixteen(nn.Module):
    """Each token has one of sixteen heads, which a router chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(64, 64) for _ in range(4))
        self.router = nn.Linear(64, 16)

    def forward(self, x):
        query, key, value = (one(x).unflatten(-1, (16, 4)).transpose(1, 2) for one in (self.q, self.k, self.v))
        outputs = ((query @ key.mT).softmax(-1) @ value).transpose(1, 2)
        gates = self.router(x).softmax(-1)
        chosen = gates.topk(1, -1)
        gates = torch.zeros_like(gates).scatter(-1, chosen.indices, chosen.values)
        return self.o((outputs * gates[..., None]).flatten(2))


def test_the_output_projection_is_read_if_each_token_chooses_one_of_many_heads():
    module = OneHeadOfSixteen()
    (layer,) = survey(module).layers
    assert torch.equal(layer.weight("output").flatten(0, 1), module.o.weight.T)


class QueriesOfExperts(nn.Module):
    """As in JetMoe: a router sends each token to two of four experts, which give its queries and take its outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.kv = nn.Linear(WIDTH, 4), nn.Linear(WIDTH, 2 * WIDTH)
        self.into, self.back = (nn.Parameter(torch.randn(4, WIDTH, WIDTH) / 4) for _ in range(2))
        self.received: list[torch.Tensor] = []

    def forward(self, x):
        gates, chosen = self.router(x).flatten(0, 1).topk(2)
        order = chosen.flatten().argsort()
        sizes = [int((chosen == expert).sum()) for expert in range(4)]
        tokens = x.flatten(0, 1)[order // 2].split(sizes)
        query = torch.cat([F.linear(part, one) for part, one in zip(tokens, self.into)])
        query = torch.zeros(len(order), WIDTH).index_add(0, order, query).view(*x.shape[:2], 4, -1).transpose(1, 2)
        key, value = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.kv(x).chunk(2, -1))
        key, value = key.repeat(1, 2, 1, 1), value.repeat(1, 2, 1, 1)
        self.received = [query.detach(), key.detach()]
        heads = ((query @ key.mT).softmax(-1) @ value).transpose(1, 2).reshape(len(order), WIDTH)
        given = torch.cat([F.linear(part, one) for part, one in zip(heads[order].split(sizes), self.back)])
        given = given * gates.softmax(-1).flatten()[order, None]
        return torch.zeros(x.shape).flatten(0, 1).index_add(0, order // 2, given).view(x.shape)


@pytest.mark.parametrize("has_forward", [False, True])
def test_heads_with_queries_from_several_experts_are_counted_once(has_forward):
    module, x = QueriesOfExperts(), torch.randn(3, TOKENS, WIDTH)
    (layer,) = survey(module, forward=(lambda: module(x)) if has_forward else None).layers
    module(x)
    query, key = module.received
    assert layer.num_heads == query.shape[1]
    claimed = x[:, None] @ layer.weight("key").mT + module.kv.bias[:WIDTH].view(2, 1, -1)
    received = key[:, list(layer.head_order)]  # those that share a key side by side
    torch.testing.assert_close(claimed.repeat_interleave(2, 1), received)
    assert "query" not in layer.slices
    outputs = "the outputs of its heads, which go to one of several matrices of `back`"
    assert layer.left_out == f"the weights of its queries and {outputs}"


class ValuesTurned(Attention):
    """Values are rotated as keys are (H-Transformer-1D); outputs may be rotated back, and projected in groups."""

    def __init__(self, is_turned_back, groups) -> None:
        super().__init__()
        self.is_turned_back, self.groups = is_turned_back, groups
        self.o = nn.Linear(WIDTH // groups, WIDTH // groups)

    def turned(self, x, sign=1.0):
        angles = sign * torch.arange(x.shape[-2])[:, None] / (1.0 + torch.arange(x.shape[-1] // 2))
        one, other = x.chunk(2, -1)
        parts = (one * angles.cos() - other * angles.sin(), other * angles.cos() + one * angles.sin())
        return torch.cat(parts, -1)

    def forward(self, x):
        query, key, value = (self.turned(self.in_heads(one(x))) for one in (self.q, self.k, self.v))
        heads = (query @ key.mT).softmax(-1) @ value
        heads = self.turned(heads, -1.0) if self.is_turned_back else heads
        heads = heads.transpose(1, 2).flatten(2)
        return self.o(heads.unflatten(2, (self.groups, -1)) if self.groups > 1 else heads).flatten(2)


@pytest.mark.parametrize(("is_turned_back", "groups"), [(False, 1), (True, 1), (True, 2)])
def test_queries_and_keys_are_read_if_the_values_are_rotated(is_turned_back, groups):
    module = ValuesTurned(is_turned_back, groups)
    (layer,) = survey(module).layers
    for role, matrix in (("query", module.q), ("key", module.k)):
        assert torch.equal(layer.weight(role).flatten(0, 1), matrix.weight)
    assert "value" not in layer.slices
    assert layer.left_out.startswith("the weights of its values")


class SummariesBeside(Attention):
    """As in DeepSeek-V4: keys and values of each token, and beside them those that are gated sums of two tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.kv, self.of_sums, self.gate = nn.Linear(WIDTH, 4), nn.Linear(WIDTH, 4), nn.Linear(WIDTH, 4)
        self.norm = nn.RMSNorm(4)

    def forward(self, x):
        pairs = (one(x[:, : x.shape[1] // 2 * 2]).unflatten(1, (-1, 2)) for one in (self.of_sums, self.gate))
        kept, gates = pairs
        sums = self.norm((kept * gates.softmax(2)).sum(2))
        key = torch.cat([self.norm(self.kv(x)), sums], 1)[:, None]
        return self.o(self.sums(self.in_heads(self.q(x)), key, key))


def test_keys_of_tokens_are_read_beside_keys_of_summaries_of_several_tokens():
    module = SummariesBeside()
    (layer,) = survey(module).layers
    assert (layer.num_heads, layer.num_key_heads) == (HEADS, 1)
    for role in ("key", "value"):
        assert torch.equal(layer.weight(role)[0], module.kv.weight)
    second = "the keys and values of a second token stream, which come from `gate` and `of_sums`"
    assert layer.left_out.startswith(second)


class ValuesSharedByMoreHeads(Attention):
    """Four keys; values are tiled: heads 0 and 2 share one, and so do 1 and 3."""

    def __init__(self) -> None:
        super().__init__()
        self.v = nn.Linear(WIDTH, WIDTH // 2)

    def forward(self, x):
        value = self.v(x).unflatten(-1, (2, -1)).transpose(1, 2).repeat(1, 2, 1, 1)
        return self.o(self.sums(self.in_heads(self.q(x)), self.in_heads(self.k(x)), value))


def test_heads_that_share_values_and_not_keys_are_read_in_the_order_of_their_value_heads():
    module = ValuesSharedByMoreHeads()
    (layer,) = survey(module).layers
    assert layer.head_order == (0, 2, 1, 3)
    assert (layer.num_key_heads, layer.num_value_heads) == (4, 2)
    in_heads = module.k.weight.view(HEADS, -1, WIDTH)
    assert torch.equal(layer.weight("key"), in_heads[list(layer.head_order)])
    assert torch.equal(layer.weight("value").flatten(0, 1), module.v.weight)


class MemoryAttentionLayer(nn.Module):
    """A part that attends, and a feed-forward beside it, in what cannot be run with synthetic inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.part = NormedOverAllHeads(lambda x: x)
        self.linear1, self.linear2 = nn.Linear(WIDTH, 40), nn.Linear(40, WIDTH)

    def forward(self, x, plan):
        return self.linear2(self.linear1(self.part(x)[: plan["tokens"]]).softmax(-1))


def test_a_feed_forward_layer_beside_an_attention_child_is_not_reported():
    found = survey(nn.Sequential(MemoryAttentionLayer()))
    assert [layer.name for layer in found.layers] == ["0.part"]
    assert found.refused == ()


class TokensOfATable(Attention):
    """A whole model in one module, which takes the numbers of words."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.norm = nn.Embedding(50, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, ids):
        x = self.words(ids)
        return self.o(self.sums(*map(self.in_heads, (self.q(x), self.norm(self.k(x)), self.v(x)))))


def test_token_embeddings_looked_up_inside_the_module_count_as_tokens():
    module = nn.Sequential(TokensOfATable())
    found = survey(module, forward=lambda: module(torch.randint(50, (2, TOKENS))))
    (layer,) = found.layers
    assert layer.slices["key"].index().tolist() == torch.arange(WIDTH).view(HEADS, -1).tolist()
    assert layer.slices["key"].owner is module[0].k


def weigh(query, key, value):
    return (query @ key.mT).softmax(-1) @ value


class WithoutACopy(nn.Module):
    """Observation alone shows what it computes, as no generator can be copied."""

    def __init__(self, width) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(WIDTH, width) for _ in range(3))
        self.numbers = (number for number in range(3))

    def forward(self, x, heads=HEADS):
        made = (one(x).unflatten(-1, (heads, -1)).transpose(1, 2) for one in (self.a, self.b, self.c))
        return weigh(*made).transpose(1, 2).flatten(2)


def test_the_output_projection_outside_a_module_is_read_from_observation_alone():
    module = nn.Sequential(WithoutACopy(WIDTH), nn.Linear(WIDTH, WIDTH))
    found = survey(module, forward=lambda: module(torch.randn(2, TOKENS, WIDTH)))
    (layer,) = found.layers
    assert torch.equal(layer.weight("key").flatten(0, 1), module[0].b.weight)
    assert torch.equal(layer.weight("output").flatten(0, 1), module[1].weight.T)


class SingleHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(WithoutACopy(4) for _ in range(HEADS))
        self.o = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.o(torch.cat([part(x, heads=1) for part in self.parts], -1))


def test_heads_computed_in_separate_modules_are_refused_if_only_observation_shows_them():
    module = SingleHeads()
    found = survey(module, forward=lambda: module(torch.randn(2, TOKENS, WIDTH)))
    assert found.layers == ()
    assert [one.name for one in found.refused] == [f"parts.{number}" for number in range(HEADS)]
    reason = "its heads are computed one by one, each in a separate attention call"
    assert {one.reason for one in found.refused} == {reason}
