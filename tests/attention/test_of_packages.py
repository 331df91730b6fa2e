"""Kinds of attention that packages of others compute, in small modules of our own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hdi_callback import HeadDiversityMonitor
from hdi_callback.attention import AttentionLayer, HeadSlice, find_attention, survey
from hdi_callback.attention.observe import AttentionObserver
from hdi_callback.errors import UnsupportedAttentionWarning

H, WIDTH, D = 4, 8, 32


def split(x: Tensor) -> Tensor:
    return x.unflatten(-1, (H, WIDTH)).transpose(1, 2)


class Four(nn.Module):
    """Four maps."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(D, D) for _ in range(4))


class Slots(Four):
    """Learned slots compete for tokens: the softmax runs over them, and the weights of a slot are scaled to one."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.slots = nn.Parameter(torch.randn(1, count, D))

    def forward(self, x: Tensor) -> Tensor:
        slots = self.slots.expand(len(x), -1, -1)
        scores = split(self.q(slots)) @ split(self.k(x)).mT
        weights = scores.softmax(-2)
        weights = weights / weights.sum(-1, keepdim=True)
        return self.o((weights @ split(self.v(x))).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("count", [3, 12])
def test_queries_are_read_if_the_softmax_runs_over_the_queries(count):
    torch.manual_seed(0)
    model = nn.Sequential(Slots(count))
    found = survey(model, forward=lambda: model(torch.randn(2, 7, D)))
    assert not found.refused
    (layer,) = found.layers
    assert not layer.left_out
    for role, part in (("query", model[0].q), ("key", model[0].k), ("value", model[0].v)):
        assert torch.equal(layer.weight(role), part.weight.view(H, WIDTH, D)), role


class PositionsOfValues(Four):
    """Adds what a filter over neighbours makes of the values to what attention gives, before the output projection."""

    def __init__(self) -> None:
        super().__init__()
        self.near = nn.Conv1d(D, D, 3, padding=1, groups=D)

    def forward(self, x: Tensor) -> Tensor:
        values = self.v(x)
        weights = (split(self.q(x)) @ split(self.k(x)).mT / WIDTH**0.5).softmax(-1)
        heads = (weights @ split(values)).transpose(1, 2).flatten(2)
        return self.o(heads + self.near(values.mT).mT)


def test_terms_added_to_the_head_outputs_are_not_read_as_values():
    torch.manual_seed(0)
    model = nn.Sequential(PositionsOfValues())
    (layer,) = survey(model, forward=lambda: model(torch.randn(2, 7, D))).layers
    assert layer.output_projection is None
    assert "output" not in layer.slices
    assert torch.equal(layer.weight("value"), model[0].v.weight.view(H, WIDTH, D))


class BesideAnother(Four):
    """One map takes what attention gives, and what another branch gives beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.o = nn.Linear(D, D), nn.Linear(2 * D, D)

    def forward(self, x: Tensor) -> Tensor:
        weights = (split(self.q(x)) @ split(self.k(x)).mT / WIDTH**0.5).softmax(-1)
        heads = (weights @ split(self.v(x))).transpose(1, 2).flatten(2)
        return self.o(torch.cat([heads, self.up(x).relu()], -1))


def test_output_weights_are_read_if_other_features_are_concatenated_with_the_heads():
    torch.manual_seed(0)
    model = nn.Sequential(BesideAnother())
    (layer,) = survey(model).layers
    assert torch.equal(layer.weight("output"), model[0].o.weight[:, :D].T.reshape(H, WIDTH, D))


class FirstTokenApart(Four):
    """The query of the first token has a map of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        queries = torch.cat([self.first(x[:, :1]), self.q(x[:, 1:])], 1)
        weights = (split(queries) @ split(self.k(x)).mT / WIDTH**0.5).softmax(-1)
        return self.o((weights @ split(self.v(x))).transpose(1, 2).flatten(2))


def test_queries_of_other_tokens_by_another_projection_are_reported_as_left_out():
    torch.manual_seed(0)
    model = nn.Sequential(FirstTokenApart())
    (layer,) = survey(model, forward=lambda: model(torch.randn(2, 7, D))).layers
    assert layer.left_out == "the queries of other tokens, which come from `q`"
    assert torch.equal(layer.weight("query"), model[0].first.weight.view(H, WIDTH, D))


@torch.jit.script
def scores_of(q: Tensor, k: Tensor) -> Tensor:
    """Multiply queries and keys where no function mode sees it."""
    return torch.bmm(q.flatten(0, 1), k.flatten(0, 1).transpose(1, 2)) * 0.35


class Compiled(Four):
    """Multiplies queries and keys in a function that torch.jit.script compiled."""

    def forward(self, x: Tensor) -> Tensor:
        weights = scores_of(split(self.q(x)), split(self.k(x))).softmax(-1).unflatten(0, (-1, H))
        return self.o((weights @ split(self.v(x))).transpose(1, 2).flatten(2))


def test_matrix_products_in_a_scripted_function_are_traced():
    torch.manual_seed(0)
    model = nn.Sequential(Compiled())
    found = survey(model, forward=lambda: model(torch.randn(2, 7, D)))
    assert not found.refused
    assert torch.equal(found.layers[0].weight("key"), model[0].k.weight.view(H, WIDTH, D))


class Alone(Four):
    """Windows of a single token."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (one(x).reshape(-1, 1, H, WIDTH).transpose(1, 2) for one in (self.q, self.k, self.v))
        weights = torch.einsum("nhid,nhjd->nhij", q, k).softmax(-1)
        return self.o(torch.einsum("nhij,nhjd->nhid", weights, v).reshape(x.shape))


def test_attention_to_a_single_key_is_refused_for_that():
    found = survey(nn.Sequential(Alone()))
    assert not found.layers
    assert ["a single key" in one.reason for one in found.refused] == [True]


class Upkeep(nn.Module):
    """Holds a model that stands elsewhere, for what is done to it between steps."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def upkeep(self, scores: Tensor) -> Tensor:
        """Look like attention by its code."""
        return (scores @ scores.mT).softmax(-1)

    def forward(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class Kept(nn.Module):
    """A model of linear attention, and what looks after it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(D, D), nn.ReLU(), nn.Linear(D, D))
        self.keeper = Upkeep(self.net)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


def test_a_container_of_attention_that_runs_elsewhere_is_not_refused_after_a_forward():
    model = nn.Sequential(Kept())
    assert [one.name for one in survey(model).refused] == ["0.keeper"]
    assert not survey(model, forward=lambda: model(torch.randn(2, 7, D))).refused


class Sorted(Four):
    """Tokens attend within buckets that they are sorted into by what a projection gives."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split(one(x)) for one in (self.q, self.k, self.v))
        order = k.sum(-1, keepdim=True).argsort(2).expand_as(k)
        q, k, v = (one.gather(2, order).unflatten(2, (-1, 4)) for one in (q, k, v))
        heads = ((q @ k.mT).softmax(-1) @ v).flatten(2, 3)
        return self.o(torch.zeros_like(heads).scatter(2, order, heads).transpose(1, 2).flatten(2))


def test_heads_are_read_if_tokens_are_sorted_by_a_projection():
    torch.manual_seed(0)
    model = nn.Sequential(Sorted())
    found = survey(model, forward=lambda: model(torch.randn(2, 8, D)))
    assert found.refused == ()
    (layer,) = found.layers
    for role in ("query", "key", "value"):
        weight = model[0].get_parameter(f"{role[0]}.weight")
        assert torch.equal(layer.weight(role), weight.view(layer.num_heads, -1, D)), role


class Shortened(Four):
    """Makes few keys and values of many tokens by a matrix over tokens, as Linformer does."""

    def __init__(self, ends: str = "") -> None:
        super().__init__()
        self.ends = ends
        self.fewer, self.fewer_values = (nn.Parameter(torch.randn(8, 5)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        count = x.shape[1]
        keys = torch.einsum("bnd,nk->bkd", self.k(x), self.fewer[:count])
        values = torch.einsum("bnd,nk->bkd", self.v(x), self.fewer_values[:count])
        if self.ends == "left":
            keys, values = self.fewer[:count].mT @ self.k(x), self.fewer_values[:count].mT @ self.v(x)
        if self.ends == "one":
            keys = self.k(x).mean(1, keepdim=True).expand_as(keys)
        if self.ends == "turned":
            keys = keys.roll(1, -1) + keys
        weights = (split(self.q(x)) @ split(keys).mT).softmax(-1)
        return self.o((weights @ split(values)).transpose(1, 2).flatten(2))


def test_keys_and_values_mixed_over_tokens_by_a_matrix_are_read_and_marked_so():
    torch.manual_seed(0)
    model = nn.Sequential(Shortened())
    (layer,) = find_attention(model, forward=lambda: model(torch.randn(2, 8, D)))
    assert "keys of several tokens" in layer.kind
    for role, part in (("query", model[0].q), ("key", model[0].k), ("value", model[0].v)):
        assert torch.equal(layer.weight(role), part.weight.view(H, WIDTH, D)), role
    # What attention receives as keys of a head is what these rows give, and the mixture of it over tokens.
    x = torch.randn(2, 8, D)
    fewer_keys = torch.einsum("bnd,hkd,nm->bhmk", x, layer.weight("key"), model[0].fewer)
    biases = model[0].k.bias.view(H, 1, WIDTH) * model[0].fewer.sum(0)[:, None]
    scores = split(model[0].q(x)) @ (fewer_keys + biases).mT
    values = split(torch.einsum("bnd,nk->bkd", model[0].v(x), model[0].fewer_values))
    expected = model[0].o((scores.softmax(-1) @ values).transpose(1, 2).flatten(2))
    assert torch.allclose(model(x), expected, atol=1e-4)


@pytest.mark.parametrize("ends", ["", "left"])
def test_a_matrix_over_tokens_does_not_contradict_a_layer(ends):
    """Multiplied from the left, it takes tokens in place of features."""
    torch.manual_seed(0)
    model = nn.Sequential(Shortened(ends))
    x = torch.randn(2, 8, D)
    layers = find_attention(model, forward=lambda: model(x))
    observer = AttentionObserver(model, layers)
    observer.arm()
    model(x)
    observer.disarm()
    (verdict,) = observer.verdicts().values()
    assert verdict.state == "undecided", verdict.sentence
    assert verdict.roles["query"].state == "established"


class FromTheLeft(nn.Module):
    """Multiplies features that stand in front of tokens with matrices from the left."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Parameter(torch.randn(D, D) / D**0.5) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = ((one @ x).unflatten(1, (H, WIDTH)) for one in (self.q, self.k, self.v))
        return self.o @ (v @ (q.mT @ k).softmax(-1).mT).flatten(1, 2)


def test_a_matrix_multiplied_from_the_left_is_a_projection_if_features_come_before_tokens():
    torch.manual_seed(0)
    model, x = nn.Sequential(FromTheLeft()), torch.randn(2, D, 7)
    parts = {role: HeadSlice(model[0], role[0], H, WIDTH) for role in ("query", "key", "value")}
    for claimed, state in ((parts, "established"), (parts | {"key": parts["query"]}, "contradicted")):
        layer = AttentionLayer("0", model[0], H, H, WIDTH, WIDTH, "mine", claimed)
        observer = AttentionObserver(model, [layer])
        observer.arm()
        model(x)
        observer.disarm()
        assert observer.verdicts()["0"].state == state


@pytest.mark.parametrize(
    ("ends", "reason"),
    [("one", "its keys are the same for all tokens"), ("turned", "each of its keys mixes the features of all tokens")],
)
def test_keys_averaged_to_one_token_or_mixed_over_features_are_refused(ends, reason):
    torch.manual_seed(0)
    model = nn.Sequential(Shortened(ends))
    found = survey(model, forward=lambda: model(torch.randn(2, 8, D)))
    assert [one.reason for one in found.refused] == [reason]


class InRounds(Four):
    """Attends, and weighs the value of each token in two rounds by its own key, as after hashing into buckets."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (one(x).unflatten(-1, (H, WIDTH)).transpose(1, 2) for one in (self.q, self.k, self.v))
        attended = F.scaled_dot_product_attention(q, k, v)
        keys, values = (torch.stack([one, one], -2) for one in (k, v))
        rounds = (q[..., None, :] @ keys.mT).softmax(-1) @ values
        return self.o((attended + rounds.squeeze(-2)).transpose(1, 2).flatten(2))


def test_a_softmax_over_copies_of_one_token_is_reported_as_such():
    torch.manual_seed(0)
    model = nn.Sequential(InRounds())
    found = survey(model, forward=lambda: model(torch.randn(2, 8, D)))
    said = [one.reason for one in found.refused] + [one.left_out for one in found.layers]
    assert any("runs over copies of a single token" in one for one in said), said


class Mixed(Four):
    """Mixes the weights of all heads after the softmax, as re-attention and talking heads do."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.mix = nn.Parameter(torch.randn(H, H)) if "matrix" in way else nn.Conv2d(H, H, 1) if way == "map" else None
        self.mix = nn.Linear(H, H) if way == "linear" else self.mix
        self.over_queries = nn.Parameter(torch.randn(7, 7))

    def forward(self, x: Tensor) -> Tensor:
        weights = (split(self.q(x)) @ split(self.k(x)).mT / WIDTH**0.5).softmax(-1)
        if self.way == "matrix":
            weights = torch.einsum("bhij,hg->bgij", weights, self.mix)
        elif self.way == "matrix behind":
            weights = torch.einsum("gh,bhij->bgij", self.mix, weights)
        elif self.way == "linear":
            weights = self.mix(weights.movedim(1, -1)).movedim(-1, 1)
        elif self.way == "queries":
            weights = torch.einsum("bhij,ik->bhkj", weights, self.over_queries)
        else:
            weights = self.mix(weights)
        return self.o((weights @ split(self.v(x))).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("way", ["matrix", "matrix behind", "linear", "map"])
def test_heads_with_mixed_attention_weights_are_read_and_the_mixing_is_reported_as_left_out(way):
    torch.manual_seed(0)
    model = nn.Sequential(Mixed(way))
    with pytest.warns(UnsupportedAttentionWarning, match="mixing of the weights of all heads by `mix` after"):
        (layer,) = find_attention(model, forward=lambda: model(torch.randn(2, 7, D)))
    assert layer.left_out == "the mixing of the weights of all heads by `mix` after the softmax"
    for role, part in (("query", model[0].q), ("key", model[0].k), ("value", model[0].v)):
        assert torch.equal(layer.weight(role), part.weight.view(H, WIDTH, D)), role
    # With the weights of these rows, averaged head by head as they are mixed, the layer is what it computes.
    x = torch.randn(2, 7, D)
    q, k, v = (torch.einsum("bnd,hkd->bhnk", x, layer.weight(role)) for role in ("query", "key", "value"))
    q, k, v = (one + m.bias.view(H, 1, WIDTH) for one, m in zip((q, k, v), (model[0].q, model[0].k, model[0].v)))
    weights = (q @ k.mT / WIDTH**0.5).softmax(-1)
    if way == "matrix":
        mixed = torch.einsum("bhij,hg->bgij", weights, model[0].mix)
    elif way == "matrix behind":
        mixed = torch.einsum("bhij,gh->bgij", weights, model[0].mix)
    else:
        mixed = torch.einsum("bhij,gh->bgij", weights, model[0].mix.weight.view(H, H))
        mixed = mixed + model[0].mix.bias.view(H, 1, 1)
    expected = torch.einsum("bhnk,hkd->bnd", mixed @ v, layer.weight("output")) + model[0].o.bias
    assert torch.allclose(model(x), expected, atol=1e-4)


def test_attention_weights_mixed_over_queries_are_not_reported_as_mixed_over_heads():
    torch.manual_seed(0)
    model = nn.Sequential(Mixed("queries"))
    found = survey(model, forward=lambda: model(torch.randn(2, 7, D)))
    reported = [layer.left_out for layer in found.layers] + [one.reason for one in found.refused]
    assert reported
    assert not any("heads" in one for one in reported)


class BehindAGate(Four):
    """Tokens are what a softmax over features of a product weighs, and a square map of them, before attention."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other, self.square = (nn.Linear(D, D) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.square((self.one(x) @ self.other(x).mT @ x).softmax(-1))
        weights = (split(self.q(x)) @ split(self.k(x)).mT).softmax(-1)
        return self.o((weights @ split(self.v(x))).transpose(1, 2).flatten(2))


def test_a_square_linear_map_on_softmax_outputs_is_not_mistaken_for_mixing_of_heads():
    torch.manual_seed(0)
    model = nn.Sequential(BehindAGate())
    (layer,) = survey(model, forward=lambda: model(torch.randn(2, 7, D))).layers
    assert not layer.left_out
    assert torch.equal(layer.weight("key"), model[0].k.weight.view(H, WIDTH, D))


class WithFirstValues(Four):
    """Values are weighed against those of the first layer by a gate for each head, as value residuals are."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(D, H)

    def forward(self, x: Tensor, first: Tensor) -> Tensor:
        share = self.gate(x).sigmoid().mT[..., None]
        values = share * split(self.v(x)) + (1 - share) * first
        weights = (split(self.q(x)) @ split(self.k(x)).mT).softmax(-1)
        return self.o((weights @ values).transpose(1, 2).flatten(2))


def test_values_from_several_projections_are_left_out_and_queries_and_keys_are_read():
    torch.manual_seed(0)
    model = nn.ModuleDict({"odd": WithFirstValues()})
    x, first = torch.randn(2, 7, D), torch.randn(2, H, 7, WIDTH)
    (layer,) = survey(model, forward=lambda: model["odd"](x, first)).layers
    assert layer.left_out == "the weights of its values, which combine the outputs of `gate` and `v`"
    assert set(layer.slices) == {"query", "key", "output"}
    assert (layer.num_heads, layer.num_key_heads, layer.head_dim, layer.value_dim) == (H, H, WIDTH, WIDTH)
    for role, part in (("query", model["odd"].q), ("key", model["odd"].k)):
        assert torch.equal(layer.weight(role), part.weight.view(H, WIDTH, D)), role


class ClassQuery(Four):
    """The query of the first token is the token as it is; a map gives those of all others."""

    def forward(self, x: Tensor) -> Tensor:
        queries = torch.cat([x[:, :1], self.q(x[:, 1:])], 1)
        weights = (split(queries) @ split(self.k(x)).mT).softmax(-1)
        return self.o((weights @ split(self.v(x))).transpose(1, 2).flatten(2))


def test_queries_are_read_and_the_class_token_without_a_projection_is_reported_as_left_out():
    torch.manual_seed(0)
    model = nn.Sequential(ClassQuery())
    (layer,) = survey(model, forward=lambda: model(torch.randn(2, 7, D))).layers
    assert layer.left_out == "the queries of other tokens, which come from no linear map"
    assert torch.equal(layer.weight("query"), model[0].q.weight.view(H, WIDTH, D))


class OverEdges(Four):
    """Every token attends to its neighbours in a graph, whose scores stand in one list."""

    def forward(self, x: Tensor, source: Tensor, target: Tensor) -> Tensor:
        q, k, v = (one(x).unflatten(-1, (H, WIDTH)) for one in (self.q, self.k, self.v))
        scores = (q[target] * k[source]).sum(-1).exp()
        sums = torch.zeros(len(x), H).index_add(0, target, scores)
        weights = scores / sums[target]
        return self.o(torch.zeros_like(v).index_add(0, target, weights[..., None] * v[source]).flatten(1))


class InBlocks(Four):
    """Adds up exponentials and weighted values block by block, and divides at the end."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (split(one(x)) for one in (self.q, self.k, self.v))
        whole, sums = 0, 0
        for some, values in zip(k.split(4, 2), v.split(4, 2)):
            weights = (q @ some.mT).exp()
            whole, sums = whole + weights @ values, sums + weights.sum(-1, keepdim=True)
        return self.o((whole / sums).transpose(1, 2).flatten(2))


class LinearAttention(Four):
    """Weighs by products of exponentials, which is no softmax of products."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = split(self.q(x)).exp(), split(self.k(x)).exp(), split(self.v(x))
        return self.o((q @ (k.mT @ v) / (q @ k.sum(2)[..., None])).transpose(1, 2).flatten(2))


def test_attention_by_exponentials_over_graph_edges_is_refused_and_in_blocks_it_is_read():
    torch.manual_seed(0)
    x = torch.randn(9, D)
    source, target = (torch.randint(9, (30,)) for _ in range(2))
    graph, blocks, linear = (nn.Sequential(kind()) for kind in (OverEdges, InBlocks, LinearAttention))
    (over_edges,) = survey(graph, forward=lambda: graph[0](x, source, target)).refused
    assert "summed by index, as over the edges of a graph" in over_edges.reason
    (in_blocks,) = survey(blocks, forward=lambda: blocks(x[None, :8])).layers  # together they add up to one
    assert (in_blocks.num_heads, in_blocks.head_dim) == (H, WIDTH)
    assert not any("exponentials" in one.reason for one in survey(linear).refused)


class SharedValues(nn.Module):
    """Heads with queries and keys of their own that all weigh the same values, the weights of all in one matrix."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.q, self.k, self.o = (nn.Linear(D, D) for _ in range(3))
        self.v = nn.Linear(D, WIDTH)

    def forward(self, x):
        q, k = (split(part(x)) for part in (self.q, self.k))
        weights = torch.einsum("bhid,bhjd->bhij", q, k).mul(WIDTH**-0.5).softmax(-1)
        if self.way == "einsum":
            return self.o(torch.einsum("bhij,bjd->bihd", weights, self.v(x)).flatten(2))
        if self.way == "several values":
            values = self.v(x).unflatten(-1, (2, WIDTH // 2)).transpose(1, 2)
            return self.o(torch.einsum("bhij,brjd->bihrd", weights, values).flatten(2))
        mixed = weights.flatten(1, 2) @ self.v(x)
        return self.o(mixed.unflatten(1, (H, -1)).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("way", ["einsum", "several values", "flattened"])
def test_heads_that_share_their_values_are_apart_if_one_product_takes_the_weights_of_all(way):
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(D), SharedValues(way))
    (layer,) = find_attention(model)
    assert (layer.num_heads, layer.num_key_heads) == (H, H)
    assert torch.equal(layer.weight("query"), model[1].q.weight.view(H, WIDTH, D))
    assert torch.equal(layer.weight("key"), model[1].k.weight.view(H, WIDTH, D))
    assert torch.equal(layer.weight("value"), model[1].v.weight[None])
    with HeadDiversityMonitor(model) as monitor:
        for step in range(2):
            monitor.arm()
            model(torch.randn(2, 5, D))
            assert monitor.measure(step).record().absent == {}
        assert monitor.refused == ()
